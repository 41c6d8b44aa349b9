"""State machines and pure functions that decide about clusters, federated rounds, MSJobs and leader election.

The machines of clusters and federated rounds have a method `step(event, now)` that returns effects, which the processes in the
other packages carry out. This package uses no sockets, files, clocks, random numbers, asyncio or torch.

    `cluster`             the scheduler's state machine and a node's, for a training cluster
    `federated`           the state machine of federated rounds, secure aggregation, privacy accounting
    `msjob`               the next actions for an MSJob, computed by pure functions
    `parameter_server`    distribution of rows over parameter servers
    `messages`            wire messages of a training cluster; those of a federated cluster are in `federated.messages`
    `events`, `effects`   input and output of the scheduler's and the node's state machine
    `types`               roles, states, settings and journal records of a training cluster
    `event_log`           bounded list of the events that users see
    `incidents`           one record for each recovery or resize: stages, durations, outcome
    `leader_election`     leader election among schedulers, by a lease in a compare-and-swap store
    `strategy_ladder`     names of the recovery strategies, in the order of the ladder
    `restart_limits`      the limits that --max-restarts sets, and their defaults
    `taskd_variables`     translation of TaskD's environment variables to covey's settings
    `addresses`           parsing of IP addresses; loopback addresses and names
    `plurals`             singular and plural forms for counts in messages
"""
