"""The shells: thin loops that carry events to the core and its effects to the world.

`scheduler` runs the cluster's machine, `worker` lives beside a training thread, `agent` is the parent of a host's workers,
`template` is the process they are forked from. Not here: decisions.
"""
