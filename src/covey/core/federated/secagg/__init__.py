"""Secure aggregation protocol of the scheduler. Keys, masks and sums of arrays are in `covey.federated.privacy`.

`protocol`         the phases of one secure round
`messages`         requests of devices, replies to them, and stored records
`neighbor_graph`   which devices share masks and secrets (Harary graph), and the share threshold
`shamir`           secret sharing over a prime field
"""
