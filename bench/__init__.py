"""Benchmarks: how fast a cluster forms and heals, how large it may be, and what each part of covey costs.

Every figure stands beside that of a peer measured in the same invocation, because absolute times say more about the machine
than about the program. `python -m bench.formation` and so on, each also with `--quick`.
"""
