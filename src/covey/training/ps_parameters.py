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
from covey.parameter_server.client import Client, Given
from covey.parameter_server.messages import DTYPES, Begin, Spec
from covey.parameter_server.optimizers import SGD, Adagrad, Adam, Array, LazyAdam, Momentum, Rule
from covey.parameter_server.row_cache import Cache
from covey.parameter_server.server_channel import Work
from covey.training.argument_checks import of_kind
from covey.training.collectives.communicator import Group
from covey.training.collectives.gloo_group import Done, Gloo, torch_module
from covey.training.collectives.numbered import Collectives
from covey.training.embedding import Embedding
from covey.training.gradient_reducer import SERVED as MARK

IN_LOOP: Final = "covey_in_loop"  # marks a parameter whose loop is made: who serves it is settled
GASP_S: Final = 10.0  # for writing rows down when the run is about to end
TOO_LATE: Final = "set_param_ps comes too late for a model whose covey.Loop is made: call it before Loop(...)"

log = logging.getLogger("covey")


def mark(target: Any, *, recurse: bool, init_in_server: bool, optimizer: Rule | None) -> None:
    """Have a parameter, or all that a module trains, served."""
    torch = torch_module()
    if optimizer is not None:
        of_kind("set_param_ps", "optimizer", optimizer, Rule)
    if isinstance(target, torch.nn.Module):
        if _in_loop(target):
            raise UsageError(TOO_LATE)
        if init_in_server:
            for module in list(target.modules()) if recurse else [target]:
                if type(module) is torch.nn.Embedding:
                    take_over(module, optimizer)
        found = [p for p in target.parameters(recurse) if p.requires_grad]
    elif isinstance(target, torch.nn.Parameter):
        if hasattr(target, IN_LOOP):
            raise UsageError(TOO_LATE)
        found = [target]
    else:
        raise UsageError(f"set_param_ps takes a torch module or parameter, not a {type(target).__name__}")
    for parameter in found:
        _dtype("a parameter", parameter)
        if parameter.is_meta:
            raise UsageError(
                "a parameter on the meta device has no memory here, and needs some to be computed with: only a"
                " torch.nn.Embedding does without, with init_in_server=True"
            )
        setattr(parameter, MARK, (optimizer, init_in_server))


def _in_loop(module: Any) -> bool:
    tables = [m for m in module.modules() if isinstance(m, Embedding)]
    return any(table.source is not None for table in tables) or any(hasattr(p, IN_LOOP) for p in module.parameters())


def take_over(module: Any, optimizer: Rule | None) -> None:
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


class Served:
    """All of one model's parameters that are served."""

    def __init__(self, model: Any, optimizer: Any, group: Group) -> None:
        self.whole = {name: p for name, p in model.named_parameters() if is_served(p)}
        self.tables = {name: m for name, m in model.named_modules() if isinstance(m, Embedding)}
        self.local = any(p.requires_grad and not is_served(p) for p in model.parameters())
        self._optimizer = optimizer
        self._group = group
        self.step = 0
        self.pushed = True
        self._caches: dict[str, Cache] = {}
        self._ahead: dict[str, Callable[[], Array]] = {}  # by table: what was asked for in the step before
        if group.serving is not None:
            for parameter in model.parameters():
                setattr(parameter, IN_LOOP, True)
        if self.any:
            self.client: Client = group.client
            self.sync = self.client.serving.mode is ConsistencyMode.SYNC
            for table in self.tables.values():
                table.source = self

    @property
    def any(self) -> bool:
        return bool(self.whole or self.tables)

    @property
    def independent(self) -> bool:
        """Whether this worker waits for no other: nothing is reduced, and its pace is its own."""
        return self.any and not self.sync and not self.local

    # -- beginning ---------------------------------------------------------------------------------------------------

    def declare(self, rank: int) -> None:
        """Make all parameters known to the servers; rank 0 says how they begin."""
        for name, parameter in self.whole.items():
            begin = Begin("normal", seed=zlib.crc32(name.encode())) if getattr(parameter, MARK)[1] else Begin("given")
            values = self._flat(parameter)
            rule = getattr(parameter, MARK)[0] or rule_of(self._optimizer, self._lr_group(parameter), rows=False)
            spec = Spec(name, values.size, 1, _dtype(name, values), False, rule, begin)
            self.client.declare(spec, values if begin.kind == "given" else None, first=rank == 0)
        for name, table in self.tables.items():
            rule = table.rule or rule_of(self._optimizer, self._optimizer.param_groups[0], rows=True)
            spec = Spec(name, table.vocab_size, table.embedding_size, "float32", True, rule, table.begin)
            self.client.declare(spec, None, first=rank == 0)

    def begin(self, rank: int, step: int, folder: str, *, given: bool) -> int:
        """Bring servers and this worker to one step, and return it. `given`: this worker's state came from another."""
        self.declare(rank)
        if given:
            return step
        if self.independent:
            saved = checkpoint_files.whole_steps(folder) if folder else []
            if saved and self.client.standing() == 0:
                self.client.load(saved[-1], folder)
            return self.client.standing()
        standing = self.client.standing() if self._group.world == 1 else step
        if standing > step and not self.local:
            return standing
        if standing > step and step == 0:
            raise PeerError("the only worker died with the parameters that were not served, and there is no checkpoint")
        if step > 0 and rank == 0:
            log.info("the servers take their rows from the checkpoint of step %d", step)
            self.client.load(step, folder)
        return step

    # -- a step ------------------------------------------------------------------------------------------------------

    def refresh(self, step: int) -> None:
        """A step begins: the values it is to see."""
        self.step, self.pushed = step, False
        if not self.whole:
            return
        homes = [(name, p, self._flat(p)) for name, p in self.whole.items()]
        self.client.pull_whole(step, [(name, flat) for name, _, flat in homes])
        with torch_module().no_grad():
            for _, parameter, flat in homes:
                if flat.ctypes.data != parameter.data_ptr():
                    parameter.copy_(torch_module().from_numpy(flat).view_as(parameter))

    def rows(self, table: Embedding, numbers: Array) -> Array:
        """Rows for this step."""
        name = next(name for name, found in self.tables.items() if found is table)
        if not table.vocab_cache_size:
            return self.client.pull_rows(self.step, name, numbers)
        if (fetched := self._ahead.pop(name, None)) is not None:
            fetched()  # into the cache: what has changed since is asked for below
        return self.client.check_rows(self.step, name, numbers, self._cache(name, table))()

    def _cache(self, name: str, table: Embedding) -> Cache:
        if name not in self._caches:
            self._caches[name] = Cache(table.embedding_size, table.vocab_cache_size)
        return self._caches[name]

    def _fetch_ahead(self) -> None:
        """The step is complete on all servers, and this rank has gone on: what the next one needs may be asked for. Not
        earlier: asking for a step's values makes the one before it final, and a replacement may still have to repeat it."""
        for name, table in self.tables.items():
            rows, table.next = table.next, None
            if rows is not None:
                self._ahead[name] = self.client.check_rows(self.step + 1, name, rows, self._cache(name, table))

    def gradients(self) -> list[Given]:
        """What this step has gathered; with it the optimizer has nothing left to do for them."""
        found: list[Given] = []
        for name, parameter in self.whole.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                lr = float(self._lr_group(parameter)["lr"])
                found.append(Given(name, self._flat(gradient), self._rate(getattr(parameter, MARK)[0], lr)))
                parameter.grad = None
        for name, table in self.tables.items():
            used = [(numbers, values.grad) for numbers, values in table.used if values.grad is not None]
            table.used = []
            if used:
                rows = np.concatenate([numbers for numbers, _ in used])
                gradient = np.concatenate([grad.detach().cpu().numpy() for _, grad in used])
                lr = self._rate(table.rule, float(self._optimizer.param_groups[0]["lr"]))
                found.append(Given(name, gradient, lr, rows))
        return found

    def forget(self) -> None:
        """The step is repeated, or was not taken: what it gathered is not needed."""
        self.pushed = not self.any
        for parameter in self.whole.values():
            parameter.grad = None
        for table in self.tables.values():
            table.used = []

    def push(self, collectives: Collectives | None) -> None:
        """This step's gradients: in sync mode as one of its collectives, where there are others."""
        if self.pushed:  # the servers know gradients by (step, rank) and take them once: a second push would be lost
            raise UsageError(
                "where parameters are served the optimizer may step once in each step of the loop: take its next batch before"
                " step() is called again"
            )
        self.pushed = True
        push = Push(self.client, self.step, self.gradients(), self._news)
        if collectives is not None and self.sync:
            collectives.run(push)
        else:
            push.run_alone()
        self._fetch_ahead()

    def save(self, step: int, folder: str, keep: int) -> None:
        """Have the servers write down their rows; wait for it."""
        self.client.save(step, folder, keep)

    def gasp(self, step: int, folder: str) -> None:
        """The same when the run is about to end, perhaps because a server is gone."""
        if not self.client.try_save(step, folder, GASP_S):
            log.warning("the servers did not write down step %d within %g s: it cannot be resumed from", step, GASP_S)

    def _news(self, work: Work) -> None:
        assert self._group.meeting is not None
        self._group.meeting.inbox.put(Done(work))

    @staticmethod
    def _rate(rule: Rule | None, lr: float) -> float:
        return rule.lr if rule is not None else lr

    def _lr_group(self, parameter: Any) -> dict[str, Any]:
        for found in self._optimizer.param_groups:
            if any(p is parameter for p in found["params"]):
                return dict(found)
        first: dict[str, Any] = self._optimizer.param_groups[0]
        return first

    def _flat(self, tensor: Any) -> Array:
        """The same memory where that is possible."""
        found: Array = tensor.detach().cpu().contiguous().view(-1).numpy()
        return found


class Push:
    """One step's gradients of one rank, as a collective that can be issued again."""

    def __init__(self, client: Client, step: int, given: Sequence[Given], news: Callable[[Work], None]) -> None:
        self._client, self._step, self._given, self._news = client, step, given, news
        self._work: Work | None = None

    def issue(self, group: Gloo) -> list[Any]:
        """Begin, or find out what became of what was begun: the servers know the gradients by (step, rank)."""
        if self._work is None:
            self._work = self._client.push(self._step, self._given, self._news)
        elif self._work.over.is_set():
            self._news(self._work)  # the first news of it was lost with a generation
        works = [self._work]
        if not group.proven:
            # The servers may have the gradients of a rank that died since. Whoever gives its replacement state must not go on
            # before that has it, nor may the servers: so this depends on every rank, as all other collectives do.
            group.proven = True
            torch = torch_module()
            works.append(group.all_reduce(torch.zeros(1, dtype=torch.uint8), torch.distributed.ReduceOp.SUM))
        return works

    def results(self) -> list[Any]:
        """Nothing to hand over: who missed it finds the values on the servers."""
        return []

    def complete(self, results: list[Any]) -> None:
        if self._work is not None and self._work.error is not None:
            raise self._work.error

    def run_alone(self) -> None:
        """Without a group: wait for the servers only."""
        self._client.push(self._step, self._given, here=True)


def rule_of(optimizer: Any, group: dict[str, Any], *, rows: bool) -> Rule:
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


def _dtype(name: str, values: Any) -> Any:
    found = str(values.dtype).removeprefix("torch.")
    if found not in DTYPES:
        raise UsageError(f"{name} is {found}, which cannot be served: {' and '.join(DTYPES)} can")
    return found
