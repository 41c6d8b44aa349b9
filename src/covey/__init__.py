"""covey launches, monitors, resizes and repairs clusters of training processes.

import covey

covey.init()                                   # joins the cluster; alone, the world size is 1
rank, world = covey.get_rank(), covey.get_group_size()
covey.reduce([p.grad for p in model.parameters()])   # the mean of the gradients over all workers

`__getattr__` imports a public name when it is first used, because commands need few of them. Type checkers and editors read the
imports below `TYPE_CHECKING`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from covey.version import VERSION

if TYPE_CHECKING:
    from covey import federated as federated
    from covey.errors import CoveyError
    from covey.errors import UsageError as UsageError
    from covey.federated import get_fl_context, reset_fl_context, set_fl_context
    from covey.ps_context import get_ps_context, reset_ps_context, set_ps_context
    from covey.script_api import (
        DistributedDataParallel,
        Embedding,
        Loop,
        Model,
        ShardedOptimizer,
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        get_group_size,
        get_local_rank,
        get_local_rank_size,
        get_rank,
        init,
        is_replacement,
        reduce,
        report,
        restart_count,
        set_param_ps,
        set_seed,
    )
    from covey.script_api import (
        group as group,
    )
    from covey.training.checkpoint.checkpoint import Checkpoint
    from covey.training.data.loader import Data
    from covey.training.model import Callback, CheckpointConfig, LossMonitor, ModelCheckpoint

__version__ = VERSION

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "CoveyError",
    "Data",
    "DistributedDataParallel",
    "Embedding",
    "Loop",
    "LossMonitor",
    "Model",
    "ModelCheckpoint",
    "ShardedOptimizer",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "get_fl_context",
    "get_group_size",
    "get_local_rank",
    "get_local_rank_size",
    "get_ps_context",
    "get_rank",
    "init",
    "is_replacement",
    "reduce",
    "report",
    "reset_fl_context",
    "reset_ps_context",
    "restart_count",
    "set_fl_context",
    "set_param_ps",
    "set_ps_context",
    "set_seed",
]

_NAMES_BY_MODULE: Final = {
    "covey.errors": "CoveyError UsageError",
    "covey.federated": "get_fl_context reset_fl_context set_fl_context",
    "covey.ps_context": "get_ps_context reset_ps_context set_ps_context",
    "covey.script_api": "DistributedDataParallel Embedding Loop Model ShardedOptimizer all_gather all_reduce barrier broadcast"
    " get_group_size get_local_rank get_local_rank_size get_rank group init is_replacement reduce report restart_count"
    " set_param_ps set_seed",
    "covey.training.checkpoint.checkpoint": "Checkpoint",
    "covey.training.data.loader": "Data",
    "covey.training.model": "Callback CheckpointConfig LossMonitor ModelCheckpoint",
}
_MODULE_BY_NAME: Final = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

if not TYPE_CHECKING:  # so that a type checker reports a name that does not exist

    def __getattr__(name: str) -> Any:
        if name == "federated":
            return importlib.import_module("covey.federated")
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module 'covey' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_BY_NAME, "federated"})
