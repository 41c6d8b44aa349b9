"""Benchmarks: how fast a cluster forms, and how large it may be.

Every figure stands beside that of a peer measured in the same invocation, because absolute times say more about the machine
than about the program. `python -m bench.formation` and `python -m bench.scale`, each also with `--quick`.
"""
