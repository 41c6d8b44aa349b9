"""Benchmarks: time to form and to heal a cluster, scalability, and the cost of each part of covey.

Every benchmark also measures a peer in the same invocation, because absolute times depend mostly on the machine. Run one with
`python -m bench.formation`, for example; each has the option `--quick`.
"""
