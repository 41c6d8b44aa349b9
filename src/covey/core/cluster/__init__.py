"""The state machines of a training cluster: the scheduler's and a node's, and the pure functions that they use.

`scheduler_machine` is one object whose methods are spread over the modules below it; `transitions` says what each of them does.

    `scheduler_machine`   step(event, now): dispatches events, messages and ticks
    `admin_requests`      requests of clients: scale, stop, dump, kill
    `registration`        applies the decision on a registration; `admission` decides it: admit, re-attach, defer or refuse
    `failure_detector`    timeouts, checked on every tick
    `lifecycle`           forming, deaths, recovery, restart of all workers, restore from the journal, end
    `spares`              promotion and replacement of warm spares
    `resharding`          scaling of the parameter servers, in two phases
    `resize`              applies a scale-out, a scale-in or a shrink; `resize_plan` decides who joins, leaves or changes rank
    `transitions`         primitive transitions that these share, the phases, the effects of the current step
    `state`               settings, phase, members by id and rank
    `formation`           when the cluster is complete; the layout of ranks on hosts
    `ranks`               rank and local rank of each member
    `recovery_strategy`   the ladder: which strategy follows a death, and why
    `heal_plan`           what each rank does after a failure, from the reports of all ranks
    `rendezvous`          key-value store in which the ranks of a generation find each other
    `view`                read-only snapshot for clients
    `fault_schedule`      which fault `covey chaos` injects next, from a seed
    `node_machine`        the node's side: register, send heartbeats, reconnect, leave
"""
