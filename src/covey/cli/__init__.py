"""The verbs of `covey`, and how options become settings. Nobody imports this room.

covey run      `options` → `plan` (with `slurm`; `describe` says it in words) → `run`, shown by `live` and `echo`,
                   told on by `notify`
looking        `look`, `watch`, `check`, `bundle`, all through `visit`
other verbs    `kill`, `chaos`, `tls`, `federated`, `simulate`, `jobs` with `kubernetes`
for all        `main`, `parts`, `patience`, `completion`
"""
