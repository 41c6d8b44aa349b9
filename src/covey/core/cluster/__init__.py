"""State machines of a training cluster (the scheduler's and a node's), its view for clients, and the faults of `covey chaos`.

The scheduler's machine is composed of parts that own their fields. `scheduler_machine` constructs the parts; a part may call
those constructed before it.

    `scheduler_machine`   step(event, now): dispatches events, messages, requests and ticks; restores from the journal
    `state`               Step, Outbox (effects in order), Lifecycle (phase, generation), ClusterState (what decisions read)
    `members`             members, agents, connections, heartbeats; ranks and the layout of ranks on hosts
    `incident_log`        recoveries and resizes: their stages, durations and outcomes
    `heal_barrier`        the safe point of a generation, the heal plans made from its reports, the rendezvous store
    `resize`              scale-out, scale-in, shrink and rollback of the number of workers
    `server_resize`       scaling of the parameter servers
    `shutdown`            the final dump, the end, and its delivery to all members
    `recovery`            a recovery from "a process died" to "all ranks resumed", with spares
    `failure_detector`    members that are silent or stuck, checked on ticks
    `registration`        admission of nodes and agents, and the formation
    `formation`           whether the cluster is complete, and the ranks
    `view`                read-only snapshot for clients
    `chaos_policy`        the faults that `covey chaos` injects, from a seed
    `node_machine`        the node's side: register, send heartbeats, reconnect, leave
"""
