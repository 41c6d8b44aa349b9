"""Secure aggregation protocol: the scheduler's part, messages, neighbour graph and secret sharing.

Keys, masks and unmasking of sums are in `covey.federated.privacy`.

`scheduler_round`  the phases of one secure round, as the scheduler runs it
`messages`         requests of devices, replies to them, and records of the protocol
`neighbor_graph`   which devices share masks and secrets (Harary graph), and the share threshold
`shamir`           secret sharing over a prime field
"""
