"""Parameters of a model that parameter servers hold, as seen by the training process.

A parameter marked by `set_param_ps` has a local copy, which is refreshed at every step boundary; an `Embedding` has none. When
the loop's optimizer steps, the gradients of both are pushed to the servers, which run their own optimizer; the loop's optimizer
finds `grad=None` and skips marked parameters. If the loop's optimizer does not step, an empty push ends the step.

In sync mode a push completes when the servers have the gradients of every rank. It is a numbered collective, unless the world
size is 1 and cannot grow.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from covey.core.parameter_server.settings import ConsistencyMode
from covey.errors import PeerError, UsageError
from covey.parameter_server import checkpoint_files
from covey.parameter_server.client import GradientToPush, ParameterClient
from covey.parameter_server.messages import DTYPES, InitialValues, ParameterSpec
from covey.parameter_server.optimizers import SGD, Adagrad, Adam, Array, LazyAdam, Momentum, OptimizerRule
from covey.parameter_server.row_cache import RowCache
from covey.parameter_server.server_requests import RequestBatch
from covey.training.argument_checks import check_type
from covey.training.collectives.communicator import Communicator
from covey.training.collectives.group import Group, ReduceOp, Work, WorkDone
from covey.training.collectives.numbered import NumberedCollectives
from covey.training.embedding import Embedding
from covey.training.gradient_reducer import SERVED_ATTRIBUTE as MARK
from covey.training.lazy_torch import torch_module

IN_LOOP_ATTRIBUTE: Final = "covey_in_loop"  # marks a parameter whose loop exists: it is too late for `set_param_ps`
FINAL_SAVE_TIMEOUT_S: Final = 10.0  # limit of `save_before_exit`
TOO_LATE_MESSAGE: Final = "set_param_ps is too late for a model that is in a covey.Loop: call it before Loop(...)"

log = logging.getLogger("covey")


def mark_for_server(target: Any, *, recurse: bool, init_in_server: bool, optimizer: OptimizerRule | None) -> None:
    """Mark a parameter, or a module's trainable parameters (with `recurse` also those of its submodules), as served.

    `init_in_server`: the servers draw the initial values, and a `torch.nn.Embedding` (the target or, with `recurse`, any of its
    submodules) becomes a table on the servers.
    `optimizer`: the rule of the servers; None: derived from the loop's optimizer. Raise `UsageError` if the target is in a
    loop, or cannot be served; parts of it may then be marked.
    """
    torch = torch_module()
    if optimizer is not None:
        check_type("set_param_ps", "optimizer", optimizer, OptimizerRule)
    if isinstance(target, torch.nn.Module):
        if _is_in_loop(target):
            raise UsageError(TOO_LATE_MESSAGE)
        if init_in_server:
            for module in list(target.modules()) if recurse else [target]:
                if type(module) is torch.nn.Embedding:
                    move_embedding_to_servers(module, optimizer)
        found = [p for p in target.parameters(recurse) if p.requires_grad]
    elif isinstance(target, torch.nn.Parameter):
        if hasattr(target, IN_LOOP_ATTRIBUTE):
            raise UsageError(TOO_LATE_MESSAGE)
        found = [target]
    else:
        raise UsageError(f"set_param_ps got a {type(target).__name__}: expected a torch module or parameter")
    for parameter in found:
        _check_dtype("a parameter", parameter)
        if parameter.is_meta:
            raise UsageError(
                "a parameter on the meta device has no local memory and cannot be served: only a torch.nn.Embedding with"
                " init_in_server=True can be on the meta device"
            )
        setattr(parameter, MARK, (optimizer, init_in_server))


def _is_in_loop(module: Any) -> bool:
    tables = [m for m in module.modules() if isinstance(m, Embedding)]
    return any(table.is_attached for table in tables) or any(hasattr(p, IN_LOOP_ATTRIBUTE) for p in module.parameters())


def move_embedding_to_servers(module: Any, optimizer: OptimizerRule | None) -> None:
    """Replace the weight of a torch.nn.Embedding by a table on the servers, whose initial values are normal with scale 1.

    The weight, which may be on the meta device, is dropped. Raise `UsageError` if the module has options that a table does not
    support.
    """
    if module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UsageError(
            "an Embedding with padding_idx, max_norm, scale_grad_by_freq or sparse cannot be initialized on the servers: remove"
            " these options"
        )
    module.served = Embedding(module.num_embeddings, module.embedding_dim, optimizer=optimizer, scale=1.0)  # torch's scale
    module.weight = None
    module.forward = module.served.forward


def is_served(parameter: Any) -> bool:
    return hasattr(parameter, MARK)


class ServedParameters:
    """All served parameters of one model: marked parameters, and tables (`Embedding`)."""

    def __init__(self, model: Any, optimizer: Any, group: Communicator) -> None:
        self.full_parameters = {name: p for name, p in model.named_parameters() if is_served(p)}  # pulled and pushed completely
        self.tables = {name: m for name, m in model.named_modules() if isinstance(m, Embedding)}
        self.has_local_parameters = any(p.requires_grad and not is_served(p) for p in model.parameters())
        self._optimizer = optimizer
        self._group = group
        self.step = 0
        self.is_pushed = True  # this step's gradients are pushed, or there is nothing to push
        self._proven_generation = 0  # the newest generation in which a push included an all_reduce of all ranks
        self._caches: dict[str, RowCache] = {}
        self._prefetches: dict[str, Callable[[], Array]] = {}  # by table: requests started in the previous step
        if group.serving_settings is not None:
            for parameter in model.parameters():
                setattr(parameter, IN_LOOP_ATTRIBUTE, True)
        if self.has_parameters:
            self.client: ParameterClient = group.client
            self.is_sync = self.client.serving.mode is ConsistencyMode.SYNC
            for table in self.tables.values():
                table.attach_to_loop(self)

    @property
    def has_parameters(self) -> bool:
        return bool(self.full_parameters or self.tables)

    @property
    def is_independent(self) -> bool:
        """Whether training needs no collectives: all trained parameters are served, and the mode is not sync."""
        return self.has_parameters and not self.is_sync and not self.has_local_parameters

    # -- start of the training -----------------------------------------------------------------------------------------

    def declare(self, rank: int) -> None:
        """Declare all served parameters to the servers.

        Rank 0 also sends initial values, unless the servers draw them; other ranks block until rank 0 has declared. Raise
        `UsageError` if a dtype or the optimizer is not supported, or a parameter was declared differently.
        """
        for name, parameter in self.full_parameters.items():
            begin = (
                InitialValues("normal", seed=zlib.crc32(name.encode()))
                if getattr(parameter, MARK)[1]
                else InitialValues("given")
            )
            values = self._as_flat_array(parameter)
            rule = getattr(parameter, MARK)[0] or optimizer_rule_for(
                self._optimizer, self._param_group_of(parameter), rows=False
            )
            spec = ParameterSpec(name, values.size, 1, _check_dtype(name, values), False, rule, begin)
            self.client.declare(spec, values if begin.kind == "given" else None, first=rank == 0)
        for name, table in self.tables.items():
            rule = table.optimizer_rule or optimizer_rule_for(self._optimizer, self._optimizer.param_groups[0], rows=True)
            spec = ParameterSpec(name, table.vocab_size, table.embedding_size, "float32", True, rule, table.initial_values)
            self.client.declare(spec, None, first=rank == 0)

    def align_start_step(self, rank: int, step: int, folder: str, *, has_state: bool) -> int:
        """Declare all served parameters, bring the servers and this worker to the same step, and return that step.

        `step` is the worker's: of the state received from another rank (`has_state`), of the loaded checkpoint, or 0. `folder`
        has the checkpoints; "": none.

        - With `has_state` the result is `step`.
        - An independent worker continues at the step that the servers expect from it next. If that is 0, the servers first
          load the newest complete rows in `folder`, if there are any.
        - A single worker without local parameters continues at the servers' step if that is later.
        - Otherwise the result is `step`, and if it is a checkpoint's, rank 0 has the servers load their rows of it.

        Raise `PeerError` if a single worker's local parameters are lost, and `StoreError` if the servers cannot load their
        rows.
        """
        self.declare(rank)
        if has_state:
            return step
        if self.is_independent:
            saved = checkpoint_files.complete_steps(folder) if folder else []
            if saved and self.client.query_next_step() == 0:
                self.client.load(saved[-1], folder)
            return self.client.query_next_step()
        server_step = self.client.query_next_step() if self._group.world == 1 else step
        if server_step > step and not self.has_local_parameters:
            return server_step
        if server_step > step and step == 0:
            raise PeerError(
                "the only worker died with its local parameters, and there is no checkpoint: start the training over"
            )
        if step > 0 and rank == 0:
            log.info("parameter servers load their rows from the checkpoint of step %d", step)
            self.client.load(step, folder)
        return step

    # -- a step ------------------------------------------------------------------------------------------------------

    def pull_for_step(self, step: int) -> None:
        """Begin a step: pull the values of the marked parameters into their local copies."""
        self.step, self.is_pushed = step, False
        if not self.full_parameters:
            return
        destinations = [(name, p, self._as_flat_array(p)) for name, p in self.full_parameters.items()]
        self.client.pull_parameters(step, [(name, flat) for name, _, flat in destinations])
        with torch_module().no_grad():
            for _, parameter, flat in destinations:
                if flat.ctypes.data != parameter.data_ptr():
                    parameter.copy_(torch_module().from_numpy(flat).view_as(parameter))

    def fetch_rows(self, table: Embedding, numbers: Array) -> Array:
        """Return the values of the rows `numbers` of a table for this step; raise `UsageError` if a row does not exist."""
        name = next(name for name, found in self.tables.items() if found is table)
        if not table.vocab_cache_size:
            return self.client.pull_rows(self.step, name, numbers)
        if (fetched := self._prefetches.pop(name, None)) is not None:
            fetched()  # fills the cache, by which the pull below saves transfers
        return self.client.pull_rows_cached(self.step, name, numbers, self._cache_for(name, table))()

    def _cache_for(self, name: str, table: Embedding) -> RowCache:
        if name not in self._caches:
            self._caches[name] = RowCache(table.embedding_size, table.vocab_cache_size)
        return self._caches[name]

    def _start_prefetch(self) -> None:
        """Request the rows that `prefetch` named for the next step; call only when this step's push is complete.

        In sync mode the request makes the servers apply this step. Before the push is complete, a replacement may still need
        the values from before the step.
        """
        for name, table in self.tables.items():
            if (rows := table.take_next_rows()) is not None:
                self._prefetches[name] = self.client.pull_rows_cached(self.step + 1, name, rows, self._cache_for(name, table))

    def take_gradients(self) -> list[GradientToPush]:
        """Return this step's gradients of served parameters and clear them, so that the loop's optimizer skips these
        parameters."""
        found: list[GradientToPush] = []
        for name, parameter in self.full_parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                lr = float(self._param_group_of(parameter)["lr"])
                found.append(
                    GradientToPush(name, self._as_flat_array(gradient), self._learning_rate(getattr(parameter, MARK)[0], lr))
                )
                parameter.grad = None
        for name, table in self.tables.items():
            used = [(numbers, values.grad) for numbers, values in table.take_used_rows() if values.grad is not None]
            if used:
                rows = np.concatenate([numbers for numbers, _ in used])
                gradient = np.concatenate([grad.detach().cpu().numpy() for _, grad in used])
                lr = self._learning_rate(table.optimizer_rule, float(self._optimizer.param_groups[0]["lr"]))
                found.append(GradientToPush(name, gradient, lr, rows))
        return found

    def discard_gradients(self) -> None:
        """Drop this step's gradients, and allow another push in this step."""
        self.is_pushed = not self.has_parameters
        for parameter in self.full_parameters.values():
            parameter.grad = None
        for table in self.tables.values():
            table.take_used_rows()

    def push(self, collectives: NumberedCollectives | None) -> None:
        """Push this step's gradients and block until the servers have them; in sync mode, until they have those of all ranks.

        In sync mode with `collectives` the push is a numbered collective. Raise `UsageError` on a second push in a step, and a
        `CoveyError` if a server refuses the gradients.
        """
        if self.is_pushed:  # servers accept gradients once per (step, rank): a second push would be ignored
            raise UsageError(
                "with served parameters the optimizer may step only once per step of the loop: take the next batch before"
                " calling step() again"
            )
        self.is_pushed = True
        push = PushCollective(self.client, self.step, self.take_gradients(), self._notify_done, self._claim_proof)
        if collectives is not None and self.is_sync:
            collectives.run(push)
        else:
            push.run_without_group()
        self._start_prefetch()

    def save(self, step: int, folder: str, keep: int) -> None:
        """Have the servers write their rows at this step to files and keep the files of their `keep` newest steps.

        Block until the files are written. Raise `StoreError` if a server cannot write.
        """
        self.client.save(step, folder, keep)

    def save_before_exit(self, step: int, folder: str) -> None:
        """Have the servers write their rows at this step, wait at most `FINAL_SAVE_TIMEOUT_S` seconds, and log a failure."""
        if not self.client.try_save(step, folder, FINAL_SAVE_TIMEOUT_S):
            log.warning(
                "parameter servers did not save step %d within %g s: the run cannot resume from it", step, FINAL_SAVE_TIMEOUT_S
            )

    def _notify_done(self, work: RequestBatch) -> None:
        assert self._group.node_interface is not None
        self._group.node_interface.inbox.put(WorkDone(work))

    def _claim_proof(self, generation: int) -> bool:
        """Return whether this is the first call in `generation`; the push then includes an all_reduce of all ranks."""
        is_first, self._proven_generation = generation != self._proven_generation, generation
        return is_first

    @staticmethod
    def _learning_rate(rule: OptimizerRule | None, lr: float) -> float:
        return rule.lr if rule is not None else lr

    def _param_group_of(self, parameter: Any) -> dict[str, Any]:
        for found in self._optimizer.param_groups:
            if any(p is parameter for p in found["params"]):
                return dict(found)
        first: dict[str, Any] = self._optimizer.param_groups[0]
        return first

    def _as_flat_array(self, tensor: Any) -> Array:
        """The array shares the memory of a contiguous CPU tensor; otherwise it is a copy."""
        found: Array = tensor.detach().cpu().contiguous().view(-1).numpy()
        return found


class PushCollective:
    """One rank's gradients of one step, as a collective that can be reissued."""

    def __init__(
        self,
        client: ParameterClient,
        step: int,
        gradients: Sequence[GradientToPush],
        notify_done: Callable[[RequestBatch], None],
        claim_proof: Callable[[int], bool],
    ) -> None:
        self._client, self._step, self._gradients = client, step, gradients
        self._notify_done, self._claim_proof = notify_done, claim_proof
        self._work: RequestBatch | None = None

    def issue(self, group: Group) -> list[Work]:
        """Start the push, unless an earlier generation started it, and return the works to wait for."""
        if self._work is None:
            self._work = self._client.push(self._step, self._gradients, self._notify_done)
        elif self._work.finished.is_set():
            self._notify_done(self._work)  # the first notification was consumed in an earlier generation
        works: list[Work] = [self._work]
        if self._claim_proof(group.generation):
            # The servers may hold the gradients of a rank that has died since. A donor must not continue before the replacement
            # has its state, and neither may the servers, so this push depends on every rank, like all other collectives.
            torch = torch_module()
            works.append(group.all_reduce(torch.zeros(1, dtype=torch.uint8), ReduceOp.SUM))
        return works

    def results(self) -> list[Any]:
        """Return an empty list: a rank that missed the push reads the values from the servers."""
        return []

    def complete(self, results: list[Any]) -> None:
        if self._work is not None and self._work.error is not None:
            raise self._work.error

    def run_without_group(self) -> None:
        """Push and block until the servers have replied; raise the error of a refused push."""
        self._client.push(self._step, self._gradients, blocking=True)


def optimizer_rule_for(optimizer: Any, group: dict[str, Any], *, rows: bool) -> OptimizerRule:
    """Return the servers' equivalent of a parameter group of the loop's optimizer; `rows`: for a table.

    For a table, Adam and AdamW become LazyAdam, which updates only the rows of the batch and has no weight decay. Raise
    `UsageError` if there is no equivalent.
    """
    kind, lr = type(optimizer).__name__, float(group["lr"])
    decay = float(group.get("weight_decay", 0.0))
    if group.get("maximize") or group.get("amsgrad"):
        raise UsageError(
            f"{kind} with maximize or amsgrad is not supported by the servers: pass one of covey's optimizers to set_param_ps"
        )
    if kind == "SGD" and group["momentum"]:
        options = {"dampening": group["dampening"], "nesterov": group["nesterov"], "weight_decay": decay}
        return Momentum(lr, group["momentum"], **options)
    if kind == "SGD":
        return SGD(lr, weight_decay=decay)
    if kind == "SparseAdam" or (rows and kind in ("Adam", "AdamW")):
        return LazyAdam(lr, group["betas"], eps=group["eps"])
    if kind in ("Adam", "AdamW"):
        return Adam(lr, group["betas"], eps=group["eps"], weight_decay=decay, decoupled=kind == "AdamW")
    if kind == "Adagrad":
        initial = group["initial_accumulator_value"]
        return Adagrad(lr, lr_decay=group["lr_decay"], weight_decay=decay, initial=initial, eps=group["eps"])
    raise UsageError(f"{kind} is not supported by the servers: pass one of covey's optimizers to set_param_ps or Embedding")


def _check_dtype(name: str, values: Any) -> Any:
    found = str(values.dtype).removeprefix("torch.")
    if found not in DTYPES:
        raise UsageError(f"{name} is {found}, which cannot be served: convert it to {' or '.join(DTYPES)}")
    return found
