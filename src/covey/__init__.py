"""covey starts, keeps, scales and heals clusters of training processes.

import covey

covey.init()                                   # joins the cluster, or is a world of one
rank, world = covey.get_rank(), covey.get_group_size()
covey.reduce([p.grad for p in model.parameters()])   # the mean of the gradients over all workers
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from covey.errors import CoveyError, UsageError
from covey.ps_context import get_ps_context, reset_ps_context, set_ps_context
from covey.script_api import (
    get_group_size,
    get_local_rank,
    get_local_rank_size,
    get_rank,
    group,
    init,
    is_replacement,
    report,
    restart_count,
    set_seed,
)
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.data.loader import Data
from covey.training.model import Callback, CheckpointConfig, LossMonitor, ModelCheckpoint
from covey.version import VERSION

if TYPE_CHECKING:
    from covey.federated import get_fl_context, reset_fl_context, set_fl_context

__version__ = VERSION


def __getattr__(name: str) -> Any:
    """What belongs to federated learning is loaded when it is first asked for: it imports numpy, which schedulers and verbs do
    not need."""
    if name in ("federated", "get_fl_context", "reset_fl_context", "set_fl_context"):
        federated = importlib.import_module("covey.federated")
        return federated if name == "federated" else getattr(federated, name)
    raise AttributeError(f"module 'covey' has no attribute {name!r}")


def Loop(model: Any, optimizer: Any, data: Any, **options: Any) -> Any:
    """The training loop that does not notice a death: see `covey.training.loop.Loop`."""
    from covey.training.loop import Loop as TrainingLoop

    return TrainingLoop(model, optimizer, data, group=group(), **options)


def DistributedDataParallel(module: Any, **options: Any) -> Any:
    """In place of torch's, for a module that a `Loop` trains: see `covey.training.ddp.DistributedDataParallel`."""
    from covey.training.ddp import DistributedDataParallel as Wrapped

    return Wrapped(module, **options)


def ShardedOptimizer(params: Any, kind: Any, **options: Any) -> Any:
    """A torch optimizer whose state is cut among the workers, with copies: see
    `covey.training.sharded_optimizer.ShardedOptimizer`."""
    from covey.training.sharded_optimizer import ShardedOptimizer as Sharded

    return Sharded(params, kind, **options)


def Model(net: Any, loss_fn: Any, optimizer: Any) -> Any:
    """A training in one call: see `covey.training.model.Model`."""
    from covey.training.model import Model as TrainingModel

    return TrainingModel(net, loss_fn, optimizer, group=group())


def set_param_ps(target: Any, recurse: bool = True, init_in_server: bool = False, optimizer: Any = None) -> None:
    """Have a torch parameter, or all that a module trains, served by the parameter servers: see docs/parameters.md."""
    if not get_ps_context("enable_ps"):
        raise UsageError(
            "set_param_ps needs the parameter server mode: call covey.set_ps_context(enable_ps=True) before init()"
        )
    from covey.training.ps_parameters import mark_for_server

    _ = group().client  # says what is missing if this cluster has no servers
    mark_for_server(target, recurse=recurse, init_in_server=init_in_server, optimizer=optimizer)


def Embedding(vocab_size: int, embedding_size: int, **options: Any) -> Any:
    """A table whose rows lie on the parameter servers: see `covey.training.embedding.Embedding`."""
    if not get_ps_context("enable_ps"):
        raise UsageError("Embedding needs the parameter server mode: call covey.set_ps_context(enable_ps=True) before init()")
    from covey.training.embedding import Embedding as Table

    return Table(vocab_size, embedding_size, **options)


def all_reduce(array: Any, op: Any = "sum") -> Any:
    """Reduce a tensor or array over all workers, in place: "sum", "mean", "max", "min" or "product"."""
    return group().all_reduce(array, op)


def reduce(tensors: Any) -> list[Any]:
    """The mean of gradients over all workers, in place."""
    return group().reduce(list(tensors))


def broadcast(array: Any, root: int = 0) -> Any:
    """The root's values for every worker, in place."""
    return group().broadcast(array, root)


def all_gather(array: Any) -> list[Any]:
    """Every worker's array, in order of rank."""
    return group().all_gather(array)


def barrier() -> None:
    """Return when every worker is here."""
    group().barrier()


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
