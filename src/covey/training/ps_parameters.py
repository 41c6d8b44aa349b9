"""The part of a model that lies on the parameter servers, as its training process sees it.

Parameters that were marked by `set_param_ps` have a copy here, which is refreshed at every step's boundary; an `Embedding`
has none. When the optimizer steps, their gradients go to the servers instead, and the optimizer, finding none, leaves them
alone. In sync mode that push is one of the step's collectives: it is complete when every rank's is, it has a number, and it
is repeated after a death like any other.
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
from covey.parameter_server.server_channel import RequestBatch
from covey.training.argument_checks import check_type
from covey.training.collectives.communicator import Communicator
from covey.training.collectives.group import Group, ReduceOp, Work, WorkDone
from covey.training.collectives.numbered import NumberedCollectives
from covey.training.embedding import Embedding
from covey.training.gradient_reducer import SERVED_ATTRIBUTE as MARK
from covey.training.lazy_torch import torch_module

IN_LOOP_ATTRIBUTE: Final = "covey_in_loop"  # marks a parameter whose loop is made: who serves it is settled
FINAL_SAVE_TIMEOUT_S: Final = 10.0  # for writing rows down when the run is about to end
TOO_LATE_MESSAGE: Final = "set_param_ps comes too late for a model whose covey.Loop is made: call it before Loop(...)"

log = logging.getLogger("covey")


def mark_for_server(target: Any, *, recurse: bool, init_in_server: bool, optimizer: OptimizerRule | None) -> None:
    """Have a parameter, or all that a module trains, served."""
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
        raise UsageError(f"set_param_ps takes a torch module or parameter, not a {type(target).__name__}")
    for parameter in found:
        _check_dtype("a parameter", parameter)
        if parameter.is_meta:
            raise UsageError(
                "a parameter on the meta device has no memory here, and needs some to be computed with: only a"
                " torch.nn.Embedding does without, with init_in_server=True"
            )
        setattr(parameter, MARK, (optimizer, init_in_server))


def _is_in_loop(module: Any) -> bool:
    tables = [m for m in module.modules() if isinstance(m, Embedding)]
    return any(table.is_attached for table in tables) or any(hasattr(p, IN_LOOP_ATTRIBUTE) for p in module.parameters())


def move_embedding_to_servers(module: Any, optimizer: OptimizerRule | None) -> None:
    """A torch.nn.Embedding whose rows begin and stay on the servers. Its weight, which may be on the meta device, is let go."""
    if module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UsageError(
            "an Embedding with padding_idx, max_norm, scale_grad_by_freq or sparse cannot begin on the servers: do without"
        )
    module.served = Embedding(module.num_embeddings, module.embedding_dim, optimizer=optimizer, scale=1.0)  # as torch's
    module.weight = None
    module.forward = module.served.forward


def is_served(parameter: Any) -> bool:
    return hasattr(parameter, MARK)


class ServedParameters:
    """All of one model's parameters that are served."""

    def __init__(self, model: Any, optimizer: Any, group: Communicator) -> None:
        self.full_parameters = {name: p for name, p in model.named_parameters() if is_served(p)}
        self.tables = {name: m for name, m in model.named_modules() if isinstance(m, Embedding)}
        self.has_local_parameters = any(p.requires_grad and not is_served(p) for p in model.parameters())
        self._optimizer = optimizer
        self._group = group
        self.step = 0
        self.is_pushed = True
        self._proven_generation = 0  # the newest in which a push has shown that every rank takes part
        self._caches: dict[str, RowCache] = {}
        self._prefetches: dict[str, Callable[[], Array]] = {}  # by table: what was asked for in the step before
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
        """Whether this worker waits for no other: nothing is reduced, and its pace is its own."""
        return self.has_parameters and not self.is_sync and not self.has_local_parameters

    # -- beginning ---------------------------------------------------------------------------------------------------

    def declare(self, rank: int) -> None:
        """Make all parameters known to the servers; rank 0 says how they begin."""
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

    def align_start_step(self, rank: int, step: int, folder: str, *, given: bool) -> int:
        """Bring servers and this worker to one step, and return it. `given`: this worker's state came from another."""
        self.declare(rank)
        if given:
            return step
        if self.is_independent:
            saved = checkpoint_files.complete_steps(folder) if folder else []
            if saved and self.client.query_next_step() == 0:
                self.client.load(saved[-1], folder)
            return self.client.query_next_step()
        standing = self.client.query_next_step() if self._group.world == 1 else step
        if standing > step and not self.has_local_parameters:
            return standing
        if standing > step and step == 0:
            raise PeerError("the only worker died with the parameters that were not served, and there is no checkpoint")
        if step > 0 and rank == 0:
            log.info("the servers take their rows from the checkpoint of step %d", step)
            self.client.load(step, folder)
        return step

    # -- a step ------------------------------------------------------------------------------------------------------

    def pull_for_step(self, step: int) -> None:
        """A step begins: the values it is to see."""
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
        """Rows for this step."""
        name = next(name for name, found in self.tables.items() if found is table)
        if not table.vocab_cache_size:
            return self.client.pull_rows(self.step, name, numbers)
        if (fetched := self._prefetches.pop(name, None)) is not None:
            fetched()  # into the cache: what has changed since is asked for below
        return self.client.pull_rows_cached(self.step, name, numbers, self._cache_for(name, table))()

    def _cache_for(self, name: str, table: Embedding) -> RowCache:
        if name not in self._caches:
            self._caches[name] = RowCache(table.embedding_size, table.vocab_cache_size)
        return self._caches[name]

    def _start_prefetch(self) -> None:
        """The step is complete on all servers, and this rank has gone on: what the next one needs may be asked for. Not
        earlier: asking for a step's values makes the one before it final, and a replacement may still have to repeat it."""
        for name, table in self.tables.items():
            if (rows := table.take_next_rows()) is not None:
                self._prefetches[name] = self.client.pull_rows_cached(self.step + 1, name, rows, self._cache_for(name, table))

    def take_gradients(self) -> list[GradientToPush]:
        """What this step has gathered; with it the optimizer has nothing left to do for them."""
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
        """The step is repeated, or was not taken: what it gathered is not needed."""
        self.is_pushed = not self.has_parameters
        for parameter in self.full_parameters.values():
            parameter.grad = None
        for table in self.tables.values():
            table.take_used_rows()

    def push(self, collectives: NumberedCollectives | None) -> None:
        """This step's gradients: in sync mode as one of its collectives, where there are others."""
        if self.is_pushed:  # the servers know gradients by (step, rank) and take them once: a second push would be lost
            raise UsageError(
                "where parameters are served the optimizer may step once in each step of the loop: take its next batch before"
                " step() is called again"
            )
        self.is_pushed = True
        push = PushCollective(self.client, self.step, self.take_gradients(), self._notify_done, self._claim_proof)
        if collectives is not None and self.is_sync:
            collectives.run(push)
        else:
            push.run_without_group()
        self._start_prefetch()

    def save(self, step: int, folder: str, keep: int) -> None:
        """Have the servers write down their rows; wait for it."""
        self.client.save(step, folder, keep)

    def save_before_exit(self, step: int, folder: str) -> None:
        """The same when the run is about to end, perhaps because a server is gone."""
        if not self.client.try_save(step, folder, FINAL_SAVE_TIMEOUT_S):
            log.warning(
                "the servers did not write down step %d within %g s: it cannot be resumed from", step, FINAL_SAVE_TIMEOUT_S
            )

    def _notify_done(self, work: RequestBatch) -> None:
        assert self._group.worker_context is not None
        self._group.worker_context.inbox.put(WorkDone(work))

    def _claim_proof(self, generation: int) -> bool:
        """Return whether the push that is being issued must show that every rank takes part: once in each generation."""
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
        """The same memory where that is possible."""
        found: Array = tensor.detach().cpu().contiguous().view(-1).numpy()
        return found


class PushCollective:
    """One step's gradients of one rank, as a collective that can be issued again."""

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
        """Begin, or find out what became of what was begun: the servers know the gradients by (step, rank)."""
        if self._work is None:
            self._work = self._client.push(self._step, self._gradients, self._notify_done)
        elif self._work.finished.is_set():
            self._notify_done(self._work)  # the first news of it was lost with a generation
        works: list[Work] = [self._work]
        if self._claim_proof(group.generation):
            # The servers may have the gradients of a rank that died since. A donor must not continue before the replacement
            # has its state, and neither may the servers: so this push depends on every rank, like all other collectives.
            torch = torch_module()
            works.append(group.all_reduce(torch.zeros(1, dtype=torch.uint8), ReduceOp.SUM))
        return works

    def results(self) -> list[Any]:
        """Nothing to hand over: who missed it finds the values on the servers."""
        return []

    def complete(self, results: list[Any]) -> None:
        if self._work is not None and self._work.error is not None:
            raise self._work.error

    def run_without_group(self) -> None:
        """Without a group: wait for the servers only."""
        self._client.push(self._step, self._gradients, here=True)


def optimizer_rule_for(optimizer: Any, group: dict[str, Any], *, rows: bool) -> OptimizerRule:
    """The optimizer of the loop, as the servers have it. For tables, Adam is LazyAdam: it moves the rows of the batch only."""
    kind, lr = type(optimizer).__name__, float(group["lr"])
    decay = float(group.get("weight_decay", 0.0))
    if group.get("maximize") or group.get("amsgrad"):
        raise UsageError(
            f"{kind} with maximize or amsgrad is not known to the servers: give set_param_ps an optimizer of covey's"
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
    raise UsageError(f"{kind} is not known to the servers: give set_param_ps or Embedding an optimizer of covey's")


def _check_dtype(name: str, values: Any) -> Any:
    found = str(values.dtype).removeprefix("torch.")
    if found not in DTYPES:
        raise UsageError(f"{name} is {found}, which cannot be served: {' and '.join(DTYPES)} can")
    return found
