"""The functions of `covey` for a training script: `init()`, ranks, collectives, and the objects of a training.

`covey.init()` joins the cluster; the others use the group that it made. The classes of `covey.training` that import torch, or
need the group, are made by functions here.
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
from covey.runtime.process_variables import INCARNATION_VARIABLE, PROGRESS_FD_VARIABLE
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
FL_CONTEXT_VARIABLE: Final = "COVEY_FL_CONTEXT"  # what `covey federated up` sets for its processes


class _ScriptState:
    """One per process."""

    def __init__(self) -> None:
        self.is_initialized = False
        self.node: MembershipThread | None = None  # none: a world of one
        self.group = Communicator(None)


_state = _ScriptState()


def init() -> None:
    """Join the cluster that the MS_* variables describe; without them this process is a world of one.

    A process to which another launcher (torchrun, mpirun, srun) gave a rank in a larger world is refused. In the process whose
    role is MS_SCHED this runs the scheduler and never returns to the training code. A wrong setting or a refusal is one
    sentence on stderr and the exit code of its family.
    """
    if _state.is_initialized:
        return
    install_error_hook()
    try:
        if sentence := _federated_blocker():
            raise UsageError(sentence)
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
                log.info("MS_ENABLE_LCCL=1 is accepted and changes nothing: collectives run on gloo")
            node = MembershipThread(settings, scheduler_address(settings), lambda: _state.group.wait_for_all_ranks())
            place = node.join()
            if place.rank >= 0:
                os.environ.update(RANK_ID=str(place.rank), RANK_SIZE=str(place.world), DEVICE_ID=str(place.local_rank))
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
    """Once: not in a life of this process's own, nor under an agent, which does the same."""
    from covey.worker import supervisor

    if INCARNATION_VARIABLE not in os.environ and PROGRESS_FD_VARIABLE not in os.environ:
        supervisor.run_supervised()


def get_rank() -> int:
    """This worker's rank, from 0. A spare waits here until it has one."""
    return _require_initialized().group.rank


def get_group_size() -> int:
    """How many workers there are. This and the rank may change where the world may (docs/elastic.md), inside a collective."""
    return _require_initialized().group.world


def get_local_rank() -> int:
    """This worker's place among those of its host, from 0."""
    node = _require_initialized().node
    return node.assignment.local_rank if node is not None else 0


def get_local_rank_size() -> int:
    """How many workers this host has."""
    node = _require_initialized().node
    return node.assignment.local_world if node is not None else 1


def restart_count() -> int:
    """How many lives of this rank there were before this one."""
    node = _require_initialized().node
    return node.assignment.restarts if node is not None else 0


def is_replacement() -> bool:
    """Whether this process took the place of one that died."""
    node = _require_initialized().node
    return (node is not None and node.started_as_spare) or restart_count() > 0


def group() -> Communicator:
    """The group of all workers."""
    return _require_initialized().group


def report(step: int | None = None, phase: str = "", loss: Any = None) -> None:
    """Say what this worker is doing; the next beat carries it to `covey status`, the live view and the console. What is left
    out stays as it was: in a `covey.Loop`, which tells the step itself, `covey.report(loss=loss)` is enough."""
    node = _require_initialized().node
    if node is None:
        return
    before = node.progress
    step, phase = (before.step, before.phase) if step is None else (step, phase)
    said = msgspec.structs.replace(
        before, step=step, phase=phase[:PHASE_MAX], in_loop=node.leaves_at_step_boundary, waiting_in=""
    )
    node.report_progress(msgspec.structs.replace(said, loss=before.loss if loss is None else _finite_loss(loss)))


def _finite_loss(loss: Any) -> float:
    """A number that equals itself: two beats must be seen to say the same. A tensor's is its item."""
    value = float(loss.item() if hasattr(loss, "item") else loss)
    return value if math.isfinite(value) else math.inf


def set_seed(seed: int) -> None:
    """Seed Python, numpy and torch (where it is loaded or loadable)."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= SEED_MAX:
        raise UsageError(f"set_seed({seed!r}) is not possible: give a whole number from 0 to {SEED_MAX}")
    seed_process(seed)


# -- collectives -----------------------------------------------------------------------------------------------------


def all_reduce(array: Any, op: Any = "sum") -> Any:
    """Reduce a tensor or array over all workers, in place: "sum", "mean", "max", "min" or "product"."""
    return group().all_reduce(array, op)


def reduce(tensors: Iterable[Any]) -> list[Any]:
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
    """The training loop that does not notice a death: see `covey.training.loop.Loop`."""
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
    """In place of torch's, for a module that a `Loop` trains: see `covey.training.ddp.DistributedDataParallel`."""
    from covey.training import ddp

    return ddp.DistributedDataParallel(module, **options)


def ShardedOptimizer(params: Any, kind: Any, *, copies: int = 1, **options: Any) -> sharded_optimizer.ShardedOptimizer:
    """A torch optimizer whose state is cut among the workers, with copies: see
    `covey.training.sharded_optimizer.ShardedOptimizer`."""
    from covey.training import sharded_optimizer

    return sharded_optimizer.ShardedOptimizer(params, kind, copies=copies, **options)


def Model(net: Any, loss_fn: Callable[[Any, Any], Any], optimizer: Any) -> model.Model:
    """A training in one call: see `covey.training.model.Model`."""
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
    """A table whose rows lie on the parameter servers: see `covey.training.embedding.Embedding`."""
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
    """Have a torch parameter, or all that a module trains, served by the parameter servers: see docs/parameters.md."""
    if not ps_context.get_ps_context("enable_ps"):
        raise UsageError(
            "set_param_ps needs the parameter server mode: call covey.set_ps_context(enable_ps=True) before init()"
        )
    from covey.training.ps_parameters import mark_for_server

    _ = group().client  # says what is missing if this cluster has no servers
    mark_for_server(target, recurse=recurse, init_in_server=init_in_server, optimizer=optimizer)


def _federated_blocker() -> str:
    """Return why this process has no rank: it is one of a federated cluster. Return "" if it is none."""
    if "covey.federated.context" not in sys.modules and FL_CONTEXT_VARIABLE not in os.environ:
        return ""  # the import needs numpy
    from covey.federated import context

    return context.describe_missing_run() if context.is_enabled() else ""


def _require_initialized() -> _ScriptState:
    if not _state.is_initialized:
        if sentence := _federated_blocker():
            raise UsageError(sentence)
        raise UsageError("call covey.init() first: before it this process has no rank")
    return _state
