"""Federated learning: devices, servers that aggregate their updates, and a scheduler that decides rounds.

    import covey

    covey.set_fl_context(enable_fl=True, ms_role="MS_SERVER", server_num=2, start_fl_job_threshold=8)
    covey.federated.run(model)                 # a torch module or a dict of numpy arrays

`covey federated up` runs the same script as the scheduler and as each server. Only `fit` imports torch. The protocol of
scheduler and servers, without I/O, is in `covey.core.federated`.

    `context`              `set_fl_context`: table of settings; `privacy_settings` checks those that depend on each other
    `run_role`             `run(model)`: runs the scheduler or a server, according to `ms_role`
    `process_supervisor`   `covey federated up`: starts and restarts the processes of a host
    `device_protocol`      the device protocol: paths, codes, fields
    `model_codec`          a model as flat float32 array and as safetensors
    `update_compression`   compression of updates: 8 bits per value, or a fraction of the values
    `strategies`           FedAvg and others
    `scheduler`            the scheduler process
    `server`               the server process
    `device`               the device library
    `privacy`              masks, noise, device certificates
    `simulation`           many devices in one process
"""

from __future__ import annotations

from typing import Any

from covey.federated.context import get_fl_context, reset_fl_context, set_fl_context
from covey.federated.device.client import Device, Task
from covey.federated.device.torch_fit import fit
from covey.federated.server.aggregation import Evaluate
from covey.federated.strategies import FedAdam, FedAvg, FedAvgM, FedBuff, FedProx, FedYogi, Median, Strategy, TrimmedMean


def run(model: Any, strategy: Strategy | None = None, evaluate: Evaluate | None = None) -> None:
    """Run the scheduler or a server in this process; arguments and errors are those of `covey.federated.run_role.run`."""
    from covey.federated.run_role import run as run_role

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
