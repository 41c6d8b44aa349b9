"""Federated learning: devices, servers that take and add their updates, and a scheduler that decides rounds.

import covey

covey.set_fl_context(enable_fl=True, ms_role="MS_SERVER", server_num=2, start_fl_job_threshold=8)
covey.federated.run(model)                     # the same script in every role; a torch module or a dict of numpy arrays

    settings      `context`, `private` (what goes together); `process` becomes what they say, `keeper` starts a host's processes
    device port   `http`, `devices` (its paths), `gate`, `intake` (of updates), `relay` (secure rounds), `page`, of the types in
                  `protocol`, `replies` and `openapi`
    a server      `server`, with its `upstream` to the scheduler and `peers`; what it has of a round is in `holdings`: a `part`
                  with its `accumulator` or `masked_sum`, the log of `updates`, and what `safekeeping` adds
    the models    `model`, `models`, `store`; `summing` makes the next by one of the `strategies`
    scheduler     `scheduler`, `manage` (its REST port)
    devices       `device`, `masked_device`, `torch_device`, `compress`; `simulate` and `private_trial` are many at once

No torch here: servers run without it. What is decided about rounds and claims lives in `covey.core`.
"""

from __future__ import annotations

from typing import Any

from covey.federated.context import get_fl_context, reset_fl_context, set_fl_context
from covey.federated.device import Device, Task
from covey.federated.strategies import FedAdam, FedAvg, FedAvgM, FedBuff, FedProx, FedYogi, Median, Strategy, TrimmedMean
from covey.federated.summing import Evaluate
from covey.federated.torch_device import fit


def run(model: Any, strategy: Strategy | None = None, evaluate: Evaluate | None = None) -> None:
    """Become the scheduler or a server, as `ms_role` says: see `covey.federated.process.run`."""
    from covey.federated.process import run as run_role

    run_role(model, strategy, evaluate)


__all__ = [
    "Device",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedProx",
    "FedYogi",
    "Median",
    "Strategy",
    "Task",
    "TrimmedMean",
    "fit",
    "get_fl_context",
    "reset_fl_context",
    "run",
    "set_fl_context",
]
