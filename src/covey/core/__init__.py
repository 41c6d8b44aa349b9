"""State machines and pure functions: everything that covey decides.

A decision takes an event and the current time, and returns effects and a reason. The processes in the other packages carry the
effects out. This package uses no sockets, files, clocks, random numbers, asyncio or torch. If a test of a module here needs a
sleep or a patch, the decision is in the wrong place.

    `cluster`             the scheduler's state machine and a node's, for a training cluster
    `federated`           the state machine of federated rounds, secure aggregation, privacy accounting
    `jobs`                the next actions for an MSJob, as a pure function
    `parameter_server`    distribution of rows over parameter servers
    `messages`            wire messages of a training cluster
    `events`, `effects`   input and output of the state machines
    `types`               roles, states, settings and records that the messages and machines share
    `event_log`           bounded list of the events that users see
    `incidents`           one record for each recovery or resize: stages, durations, outcome
    `leader_election`     leader election among schedulers, by a lease in a compare-and-swap store
    `strategy_ladder`     recovery strategies, in the order in which they are tried
    `restart_limits`      the limits that max_restarts sets, and their defaults
    `taskd_variables`     TaskD's environment variables as covey's settings
    `addresses`           addresses and names that mean this host
    `plurals`             counts in sentences
"""
