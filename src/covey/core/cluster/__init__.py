"""The state machines of a training cluster: the scheduler's and a node's, and the pure functions that they use.

The scheduler's machine is a composition of parts. Each part owns its fields and has the decisions about them in its module;
`scheduler_machine` constructs the parts in the order in which they may call each other.

    `scheduler_machine`   step(event, now): dispatches events, messages, requests and ticks; restores from the journal
    `state`               Step, Outbox (effects in order), Lifecycle (phase, generation), ClusterState (what decisions read)
    `members`             members, agents, connections, heartbeats; ranks and the layout of ranks on hosts
    `incident_log`        every recovery and resize: its stages, durations and outcome
    `heal_barrier`        the safe point of a generation, the plan made of its reports, the rendezvous of the ranks
    `resize`              scale-out, scale-in, shrink and rollback of the number of workers
    `resharding`          scaling of the parameter servers, in two phases
    `shutdown`            the final dump, the end, and its delivery to all members
    `recovery`            a recovery from "a process died" to "all ranks resumed", with spares
    `failure_detector`    members that are silent or stuck, checked on every tick
    `registration`        admission of nodes and agents, and the formation
    `formation`           whether the cluster is complete, and the ranks
    `view`                read-only snapshot for clients
    `fault_schedule`      the faults that `covey chaos` injects, from a seed
    `node_machine`        the node's side: register, send heartbeats, reconnect, leave
"""
