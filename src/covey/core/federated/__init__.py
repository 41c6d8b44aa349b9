"""State machine of a federated cluster, and the pure functions that it uses.

`federation_machine`   dispatches events and administrative requests to the parts below
`server_roster`        the servers: registration, loss, return, scaling, adoption of logs, generations
`instance`             the plan of the rounds, and the conditions that end an instance
`round`                the current round and its stages
`round_window`         admissions and time windows of one round
`aggregation`          plain or secure aggregation of one round; the secure protocol itself is in `secagg`
`outbox`               effects of one call, in order
`update_claims`        which server may count the update of a device
`messages`             messages and records between scheduler and servers
`dp_accounting`        Gaussian differential privacy: epsilon, delta, noise multiplier
`secagg`               the secure aggregation protocol
"""
