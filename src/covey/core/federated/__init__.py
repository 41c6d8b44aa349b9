"""The state machine of a federated cluster, and the pure functions that it uses.

`federation_machine`   top of the machine: administrative requests and status
`secagg_rounds`        rounds with secure aggregation; the protocol itself is in `secagg`
`rounds`               opens, closes, seals and sums rounds
`server_membership`    servers register, die, return and leave; adoption of a dead server's log
`round_window`         admissions and deadline of one round
`claims`               which server may count the update of a device
`messages`             messages and records between scheduler and servers
`dp_accounting`        Gaussian differential privacy: epsilon, delta, noise multiplier
`secagg`               the secure aggregation protocol
"""
