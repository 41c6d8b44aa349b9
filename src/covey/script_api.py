"""Public functions of `covey` for training scripts: `init()`, ranks, collectives, and constructors of training objects.

The functions for ranks, progress and collectives raise UsageError before `covey.init()`. A constructor such as `Loop` imports
its class from `covey.training` when it is called, because a script may run without torch.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from covey import ps_context
from covey.core.types import PHASE_MAX, Role
from covey.errors import CoveyError, UsageError
from covey.log import configure_logging, log
from covey.runtime.child_environment import INCARNATION_VARIABLE, PROGRESS_FD_VARIABLE
from covey.settings import check_manual_settings, load_settings, misspelled_variables
from covey.training.collectives.communicator import Communicator
from covey.training.seeding import seed_process
from covey.worker.foreign_launchers import describe_refusal, find_foreign_rank
from covey.worker.membership_thread import MembershipThread, scheduler_address, wait_until_cluster_ends
from covey.worker.process_exit import install_error_hook
from covey.worker.spare import is_spare

if TYPE_CHECKING:
    from covey.parameter_server.optimizers import OptimizerRule
    from covey.training import ddp, embedding, loop, model, sharded_optimizer
    from covey.training.checkpoint.checkpoint import Checkpoint

SEED_MAX: Final = 2**32 - 1
FL_CONTEXT_VARIABLE: Final = "COVEY_FL_CONTEXT"  # set by `covey federated up` for its processes


class _ScriptState:
    def __init__(self) -> None:
        self.is_initialized = False
        self.node: MembershipThread | None = None  # None: the world size is 1
        self.group = Communicator(None)


_state = _ScriptState()


def init() -> None:
    """Join the cluster that the MS_* variables describe and block until it has formed; without a cluster the world size is 1.

    In a worker of a cluster, RANK_ID, RANK_SIZE and DEVICE_ID are then set in the environment; a spare has no rank yet. In
    other roles this does not return: it runs a scheduler (MS_SCHED) or a parameter server (MS_PSERVER), or waits for the end of
    the cluster (MS_SERVER). Further calls do nothing.

    If a setting is invalid or the cluster cannot be joined, print a message to stderr and exit with the code of the error.
    """
    if _state.is_initialized:
        return
    install_error_hook()
    try:
        if message := _federated_blocker():
            raise UsageError(message)
        loaded = load_settings(os.environ)
        settings = loaded.settings
        if settings.role is not None or settings.sched_host or settings.sched_port or settings.worker_num:
            check_manual_settings(settings)
            if settings.role is Role.SCHEDULER:
                from covey.scheduler.main import run_scheduler_and_exit

                run_scheduler_and_exit(loaded)
            if settings.supervise and settings.role is Role.WORKER:
                _ensure_supervised()
            role = Role.SPARE if is_spare() else settings.role
            configure_logging(settings, f"{role}:{settings.node_id}" if settings.node_id else f"{role}")
            for remark in misspelled_variables(os.environ):
                log.warning("%s", remark)
            if settings.lccl:
                log.info("MS_ENABLE_LCCL=1 has no effect: collectives run on gloo")
            node = MembershipThread(settings, scheduler_address(settings), lambda: _state.group.wait_for_all_ranks())
            assignment = node.join()
            if assignment.rank >= 0:
                os.environ.update(
                    RANK_ID=str(assignment.rank), RANK_SIZE=str(assignment.world), DEVICE_ID=str(assignment.local_rank)
                )
            _state.node = node
            if settings.role is Role.PSERVER:
                from covey.worker.parameter_server_role import run_parameter_server

                run_parameter_server(node, settings)
            if settings.role is not Role.WORKER:
                wait_until_cluster_ends(node)
            serving = None
            if settings.server_num:
                from covey.worker.parameter_server_role import make_serving_settings

                serving = make_serving_settings(settings)
            _state.group = Communicator(node, serving)
        elif (found := find_foreign_rank(os.environ)) is not None:
            raise UsageError(describe_refusal(found, Path(sys.argv[0]).name))
    except CoveyError as error:
        print(f"covey: {error}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(int(error.exit_code))
    _state.is_initialized = True


def _ensure_supervised() -> None:
    """Call `run_supervised`, unless this process is supervised already or was started by an agent."""
    from covey.worker import container_supervisor

    if INCARNATION_VARIABLE not in os.environ and PROGRESS_FD_VARIABLE not in os.environ:
        container_supervisor.run_supervised()


def get_rank() -> int:
    """Return this worker's rank, from 0. A spare blocks until it has one."""
    return _require_initialized().group.rank


def get_group_size() -> int:
    """Return the number of workers. It can change when the world is resized (docs/elastic.md)."""
    return _require_initialized().group.world


def get_local_rank() -> int:
    """Return this worker's index on its host, from 0. A spare blocks until it has a rank."""
    node = _require_initialized().node
    return node.assignment.local_rank if node is not None else 0


def get_local_rank_size() -> int:
    """Return the number of workers on this host. A spare blocks until it has a rank."""
    node = _require_initialized().node
    return node.assignment.local_world if node is not None else 1


def restart_count() -> int:
    """Return the number of processes that this worker had before this process. A spare blocks until it has a rank."""
    node = _require_initialized().node
    return node.assignment.restarts if node is not None else 0


def is_replacement() -> bool:
    """Return whether this process started as a spare, or this worker had another process before (`restart_count`)."""
    node = _require_initialized().node
    return (node is not None and node.started_as_spare) or restart_count() > 0


def group() -> Communicator:
    """Return the communicator of all workers."""
    return _require_initialized().group


def report(step: int | None = None, phase: str = "", loss: Any = None) -> None:
    """Report the progress of this worker for `covey status`, the live table and the console; do nothing without a cluster.

    Without `step`, the earlier step and phase are kept; without `loss`, the earlier loss. A loss that is not finite is reported
    as infinity. A `covey.Loop` reports the step itself: `covey.report(loss=loss)` is sufficient there.
    """
    node = _require_initialized().node
    if node is None:
        return
    before = node.progress
    step, phase = (before.step, before.phase) if step is None else (step, phase)
    progress = msgspec.structs.replace(
        before, step=step, phase=phase[:PHASE_MAX], in_loop=node.leaves_at_step_boundary, waiting_in=""
    )
    node.report_progress(msgspec.structs.replace(progress, loss=before.loss if loss is None else _finite_loss(loss)))


def _finite_loss(loss: Any) -> float:
    """Return the loss as a float; infinity if it is not finite, because equal reports must compare equal and NaN does not."""
    value = float(loss.item() if hasattr(loss, "item") else loss)
    return value if math.isfinite(value) else math.inf


def set_seed(seed: int) -> None:
    """Seed the random generators of Python, numpy and, if it is installed, torch. Raise UsageError unless the seed is an
    integer from 0 to 2**32 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= SEED_MAX:
        raise UsageError(f"set_seed({seed!r}) is invalid: expected an integer from 0 to {SEED_MAX}")
    seed_process(seed)


# -- collectives -----------------------------------------------------------------------------------------------------


def all_reduce(array: Any, op: Any = "sum") -> Any:
    """Reduce a tensor or array over all workers in place and return it; `op`: "sum", "mean", "max", "min" or "product".

    Raise UsageError for another `op`, or for a dtype that cannot be reduced by it.
    """
    return group().all_reduce(array, op)


def reduce(tensors: Iterable[Any]) -> list[Any]:
    """Replace each tensor, such as a gradient, by its mean over all workers, in place. Return the tensors as a list; None
    entries are kept."""
    return group().reduce(list(tensors))


def broadcast(array: Any, root: int = 0) -> Any:
    """Copy the values of rank `root` to every worker, in place, and return the array.

    Raise UsageError if `root` is not a rank, and PeerError if the worker with that rank left before it took part.
    """
    return group().broadcast(array, root)


def all_gather(array: Any) -> list[Any]:
    """Return the arrays of all workers, in order of rank. Shapes and dtypes must be equal on all workers."""
    return group().all_gather(array)


def barrier() -> None:
    """Block until every worker has called this."""
    group().barrier()


# -- training --------------------------------------------------------------------------------------------------------


def Loop(
    model: Any,
    optimizer: Any,
    data: Any,
    *,
    epochs: int = 1,
    steps: int | None = None,
    accumulate: int = 1,
    schedulers: Sequence[Any] = (),
    scaler: Any = None,
    checkpoint: Checkpoint | None = None,
    seed: int = 0,
) -> loop.Loop:
    """Return a training loop that continues after failures of workers: see `covey.training.loop.Loop`."""
    from covey.training import loop

    return loop.Loop(
        model,
        optimizer,
        data,
        epochs=epochs,
        steps=steps,
        accumulate=accumulate,
        schedulers=schedulers,
        scaler=scaler,
        checkpoint=checkpoint,
        seed=seed,
        group=group(),
    )


def DistributedDataParallel(module: Any, **options: Any) -> ddp.DistributedDataParallel:
    """Return a wrapper of a module, for use in a `Loop`: see `covey.training.ddp.DistributedDataParallel`."""
    from covey.training import ddp

    return ddp.DistributedDataParallel(module, **options)


def ShardedOptimizer(params: Any, kind: Any, *, copies: int = 1, **options: Any) -> sharded_optimizer.ShardedOptimizer:
    """Return an optimizer whose state is sharded over the workers: see `covey.training.sharded_optimizer.ShardedOptimizer`."""
    from covey.training import sharded_optimizer

    return sharded_optimizer.ShardedOptimizer(params, kind, copies=copies, **options)


def Model(net: Any, loss_fn: Callable[[Any, Any], Any], optimizer: Any) -> model.Model:
    """Return a model with MindSpore's `train` interface: see `covey.training.model.Model`."""
    from covey.training import model

    return model.Model(net, loss_fn, optimizer, group=group())


def Embedding(
    vocab_size: int,
    embedding_size: int,
    *,
    optimizer: OptimizerRule | None = None,
    init: Literal["normal", "uniform", "zeros"] = "normal",
    scale: float = 0.01,
    seed: int = 0,
    vocab_cache_size: int = 0,
) -> embedding.Embedding:
    """Return an embedding table whose rows are on the parameter servers: see `covey.training.embedding.Embedding`.

    Raise UsageError without `set_ps_context(enable_ps=True)`, or for an invalid argument.
    """
    if not ps_context.get_ps_context("enable_ps"):
        raise UsageError("Embedding needs the parameter server mode: call covey.set_ps_context(enable_ps=True) before init()")
    from covey.training import embedding

    return embedding.Embedding(
        vocab_size,
        embedding_size,
        optimizer=optimizer,
        init=init,
        scale=scale,
        seed=seed,
        vocab_cache_size=vocab_cache_size,
    )


def set_param_ps(target: Any, recurse: bool = True, init_in_server: bool = False, optimizer: Any = None) -> None:
    """Mark a torch parameter, or the trainable parameters of a module, to be kept on the parameter servers
    (docs/parameters.md).

    Call it before the `Loop` is created. Raise UsageError without `set_ps_context(enable_ps=True)`, without parameter servers,
    or if `target` cannot be kept there.
    """
    if not ps_context.get_ps_context("enable_ps"):
        raise UsageError(
            "set_param_ps needs the parameter server mode: call covey.set_ps_context(enable_ps=True) before init()"
        )
    from covey.training.ps_parameters import mark_for_server

    _ = group().client  # raises if the cluster has no parameter servers
    mark_for_server(target, recurse=recurse, init_in_server=init_in_server, optimizer=optimizer)


def _federated_blocker() -> str:
    """Return an error message if federated learning is enabled, because this process has no rank then; else ""."""
    if "covey.federated.context" not in sys.modules and FL_CONTEXT_VARIABLE not in os.environ:
        return ""  # the import needs numpy
    from covey.federated import context

    return context.describe_missing_run() if context.is_enabled() else ""


def _require_initialized() -> _ScriptState:
    if not _state.is_initialized:
        if message := _federated_blocker():
            raise UsageError(message)
        raise UsageError("call covey.init() first: this process has no rank yet")
    return _state
