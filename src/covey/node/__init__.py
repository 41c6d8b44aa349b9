"""The shells: thin loops that carry events to the core and its effects to the world. Not here: decisions.

scheduler   `scheduler` around the cluster's machine, with its `lines`, `commits`, `followers` and `storyteller`; `office`
            makes one from the settings and `sockets`, `leading` keeps its lease, `managing` its REST port, `serve` is the
            process
agent       `agent`, the parent of a host's workers: `relay` carries their words, `children` starts and ends them, `child`
            says what one is, `lifeline` ends them with it, `environment` and `output` are theirs, `log_pieces` reads what
            they wrote; `scheduler_process` is the scheduler as one more child
template    `template`, the process that workers are forked from, `keeper` at the agent's end of it; `bootstrap`, `entry`,
            `threads` and `learn` make of a fork what a fresh interpreter would have been
worker      `worker` beside the training thread, `spare` until it has a place, `pserver` in place of a training; `runtime`
            runs a node's machine, `child_runtime` that of an agent's child; `ending` is how its process ends, `uncaught`
            describes its exception, `supervise` what stays behind in a container, `stacks` a look into a stuck one,
            `launchers` finds the rank that another launcher gave
for all     `host`, `security`, `kernel`, `log` (our own lines), `report` (of the first failure), `faults` (for `covey chaos`)
"""
