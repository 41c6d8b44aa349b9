"""State machines and pure functions: everything that covey decides.

A decision takes an event and the current time, and returns effects and a reason. The processes in the other packages carry the
effects out. Not here: sockets, files, clocks, random numbers, asyncio, torch. If a test of a module here needs a sleep or a
patch, the decision is in the wrong place.

    `cluster`             the scheduler's state machine and a node's, for a training cluster
    `federated`           the state machine of federated rounds, secure aggregation, privacy accounting
    `jobs`                what to do about an MSJob now, as a pure function
    `parameter_server`    how rows are distributed over parameter servers
    `messages`            wire messages of a training cluster
    `events`, `effects`   input and output of the state machines
    `types`               roles, states, settings and records that the messages and machines share
    `event_log`           bounded list of the events that users see
    `incidents`           one record for each recovery or resize: stages, durations, outcome
    `leader_election`     who leads among several schedulers, over a compare-and-swap value
    `strategy_ladder`     recovery strategies, in the order in which they are tried
    `restart_limits`      what max_restarts means, and its defaults
    `taskd_variables`     TaskD's environment variables as covey's settings
    `addresses`           addresses and names that mean this host
    `plurals`             counts in sentences
"""
