"""Some slots' rows of all parameters, and the order in which gradients reach them.

Sync mode. A step's gradients are summed in order of rank, whatever order they come in, and divided by the number of workers.
When every rank's are here the step is *complete*, and every rank hears so; it is *applied* when somebody asks for the values
of the next step. The pause between the two matters: if any rank has gone on, all servers have every gradient of the step; if
none has, no server has applied it, and the replacement of a rank that died in between still finds everywhere the values its
predecessor saw.

A gradient is known by (step, rank), and taken once: who is not sure whether it arrived sends it again.

A shard is not safe for threads; whoever has it holds a lock. Pushes are checked before they change anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import msgspec
import numpy as np

from covey.core.parameter_server.settings import ConsistencyMode, ServingSettings
from covey.core.parameter_server.sharding import SLOTS, SlotOwners
from covey.errors import UsageError
from covey.parameter_server.array_codec import Piece, typed
from covey.parameter_server.messages import ALL, Push, Spec
from covey.parameter_server.optimizers import Array
from covey.parameter_server.table import EMPTY, Table, merged

NOBODY: Final = -1


class Gift(msgspec.Struct):
    """A gradient of one parameter from one rank. `rows` is None where it is for all."""

    name: str
    rows: Array | None
    gradient: Array
    lr: float
    owned: bool  # nobody else reads the gradient's memory, so sums may be made there


class Stage:
    """The gradients of one step, until all are here."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.waiting: dict[int, list[Gift]] = {}  # of ranks whose turn has not come
        self.summed: list[Gift] = []  # of ranks below `turn`, in order; at most one for each whole parameter
        self.turn = 0

    def add(self, rank: int, gifts: list[Gift]) -> None:
        """Take a rank's gradients in. They are summed as soon as those of all lower ranks are."""
        self.ranks.add(rank)
        self.waiting[rank] = gifts
        while self.turn in self.waiting:
            for gift in self.waiting.pop(self.turn):
                whole = next((g for g in self.summed if g.name == gift.name and g.rows is None), None)
                if gift.rows is None and whole is not None and whole.owned:
                    whole.gradient += gift.gradient
                elif gift.rows is None and whole is not None:
                    whole.gradient, whole.owned = whole.gradient + gift.gradient, True
                else:
                    self.summed.append(gift)
            self.turn += 1

    def part(self, cut: Callable[[Gift], Gift]) -> Stage:
        """The same stage for some of the rows."""
        found = Stage()
        found.ranks, found.turn = set(self.ranks), self.turn
        found.waiting = {rank: [cut(gift) for gift in gifts] for rank, gifts in self.waiting.items()}
        found.summed = [cut(gift) for gift in self.summed]
        return found


class Shard:
    """A server's rows of some slots. `server` is whose they are, which is another's where this is a copy."""

    def __init__(self, serving: ServingSettings, server: int, slots: Iterable[int]) -> None:
        self.serving, self.server, self.slots = serving, server, frozenset(slots)
        self.owners = owned(server, self.slots)
        self.tables: dict[str, Table] = {}
        self.step = 0  # steps that are applied, in sync mode
        self.pushed = [-1] * serving.workers  # each rank's newest step
        self.stage = Stage()

    # -- what is asked -----------------------------------------------------------------------------------------------

    def declare(self, spec: Spec, values: Array) -> None:
        """A parameter and its first values. Said again, it changes nothing, but must be the same."""
        known = self.tables.get(spec.name)
        if known is not None:
            self.check_spec(spec)
            return
        given = spec.begin.kind == "given"
        table = Table(spec, self.server, self.owners, values if given and values.nbytes else None)
        if given and values.nbytes != table.weights.nbytes:
            raise UsageError(f"{spec.name} begins with {values.nbytes} bytes here, not {table.weights.nbytes}")
        self.tables[spec.name] = table

    def check_spec(self, spec: Spec) -> None:
        """The same parameter, as all must declare it. Its learning rate may change, and what it began with is past."""
        known = self.tables[spec.name].spec
        for field in ("rows", "width", "dtype", "striped"):
            ours, theirs = getattr(known, field), getattr(spec, field)
            if ours != theirs:
                raise UsageError(f"{spec.name} is declared with {field} {theirs}, but it has {field} {ours} already")
        ours, theirs = (msgspec.structs.asdict(rule) for rule in (known.rule, spec.rule))
        for field in ("kind", *(field for field in ours if field not in ("kind", "lr"))):
            if ours[field] != theirs[field]:
                raise UsageError(
                    f"{spec.name} is declared with the optimizer's {field} {theirs[field]}, but it has {ours[field]} already:"
                    " all workers must say the same"
                )

    def gifts(self, push: Push, pieces: list[Piece], *, owned: bool) -> list[Gift]:
        """What a push gives these rows, checked. Raises `UsageError`; nothing has changed then."""
        if push.rank >= self.serving.workers:
            raise UsageError(f"rank {push.rank} pushed, but there are {self.serving.workers} workers")
        if self.serving.mode is ConsistencyMode.SYNC and push.step > self.step + self.complete(self.step):
            raise UsageError(f"step {push.step} cannot be pushed: step {self.step} is not complete")
        for piece in pieces:
            total = float(piece.values.sum())
            if self.serving.refuse_nan and not math.isfinite(total) and not np.isfinite(piece.values).all():
                raise UsageError(
                    f"the gradient of {piece.name} from rank {push.rank} at step {push.step} has values that are no finite"
                    " numbers: mend the training, or let them pass with COVEY_PS_NAN=pass"
                )
        return [Gift(piece.name, piece.rows, piece.values, piece.lr, owned) for piece in pieces]

    # -- steps -------------------------------------------------------------------------------------------------------

    def known(self, step: int, rank: int) -> bool:
        """Whether this rank's gradients of a step are here, or were."""
        return step <= self.pushed[rank]

    def push(self, step: int, rank: int, gifts: list[Gift]) -> None:
        """Take gradients in, checked and not known yet."""
        if self.serving.mode is ConsistencyMode.SYNC:
            if step > self.step:
                self.apply()
            self.stage.add(rank, gifts)
        else:
            for gift in gifts:
                self._update([gift], 1.0)
        self.pushed[rank] = step

    def complete(self, step: int) -> bool:
        """Whether every rank's gradients of a step are here."""
        return step < self.step or (step == self.step and len(self.stage.ranks) == self.serving.workers)

    def ready(self, step: int) -> bool:
        """Whether the values for a step can be given."""
        if self.serving.mode is ConsistencyMode.SYNC:
            return step <= self.step or self.complete(step - 1)
        ahead = self.serving.staleness if self.serving.mode is ConsistencyMode.BOUNDED else math.inf
        return min(self.pushed) + 1 >= step - ahead

    def reach(self, step: int) -> None:
        """Apply what must be applied before the values for a step can be given."""
        if self.serving.mode is ConsistencyMode.SYNC and step > self.step:
            self.apply()

    def apply(self) -> None:
        """The complete step becomes part of the values."""
        stage, self.stage = self.stage, Stage()
        self.step += 1
        by_name: dict[str, list[Gift]] = {}
        for gift in stage.summed:
            by_name.setdefault(gift.name, []).append(gift)
        for gifts in by_name.values():
            self._update(gifts, 1.0 / self.serving.workers)

    def _update(self, gifts: list[Gift], scale: float) -> None:
        """One parameter's gradients of one step."""
        table, lr = self.tables[gifts[0].name], gifts[0].lr
        if gifts[0].rows is None:
            gradient = gifts[0].gradient
            if scale != 1.0:
                gradient = np.multiply(gradient, gradient.dtype.type(scale), out=gradient if gifts[0].owned else None)
            table.apply(gradient, lr)
            return
        rows = np.concatenate([gift.rows for gift in gifts if gift.rows is not None])
        rows, gradient = merged(rows, np.concatenate([gift.gradient for gift in gifts]))
        table.apply_rows(rows, gradient * gradient.dtype.type(scale) if scale != 1.0 else gradient, lr)

    # -- some of it, all of it ---------------------------------------------------------------------------------------

    def part(self, slots: Iterable[int]) -> Shard:
        """Some slots as a shard of their own, at the same point of the same step."""
        found = Shard(self.serving, self.server, slots)
        found.step, found.pushed = self.step, list(self.pushed)
        found.tables = {name: table.part(found.owners) for name, table in self.tables.items()}

        def cut(gift: Gift) -> Gift:
            mine, table = found.tables[gift.name], self.tables[gift.name]
            if gift.rows is None:
                places = table.placement.local(mine.placement.numbers(self.server, 0, len(mine.weights)))
                return Gift(gift.name, None, gift.gradient[places], gift.lr, owned=True)
            here = mine.placement.owner(gift.rows) == self.server
            return Gift(gift.name, gift.rows[here], gift.gradient[here], gift.lr, owned=True)

        found.stage = self.stage.part(cut)
        return found

    def agrees(self, other: Shard) -> bool:
        """Whether both are at the same point, between two steps: then they can be one."""
        same = self.step == other.step and self.pushed == other.pushed and self.tables.keys() == other.tables.keys()
        between = not self.stage.ranks and not other.stage.ranks
        return same and between and all(other.tables[name].updates == t.updates for name, t in self.tables.items())

    def join(self, other: Shard) -> Shard:
        """One shard of two that agree."""
        found = Shard(self.serving, self.server, self.slots | other.slots)
        found.step, found.pushed = self.step, list(self.pushed)
        found.tables = {name: table.join(other.tables[name], found.owners) for name, table in self.tables.items()}
        return found

    def pack(self) -> tuple[Any, list[Array]]:
        """Everything, as plain data and arrays in an order that `unpack` knows."""
        arrays: list[Array] = []
        tables = []
        for table in self.tables.values():
            tables.append([msgspec.to_builtins(table.spec), table.updates])
            arrays += [table.weights, *table.states.values()]
        waiting = sorted(self.stage.waiting.items())
        kept = [(ALL, self.stage.summed), *waiting]
        gifts = []
        for rank, given in kept:
            for gift in given:
                gifts.append([rank, gift.name, -1 if gift.rows is None else len(gift.rows), gift.lr])
                arrays += [np.ascontiguousarray(a) for a in (gift.rows, gift.gradient) if a is not None]
        stage = [sorted(self.stage.ranks), self.stage.turn, [rank for rank, _ in waiting]]
        return [self.step, self.pushed, tables, stage, gifts], arrays

    def unpack(self, state: Any, body: Array) -> Array:
        """Become what `pack` described; `body` is the arrays, one after the other. Returns what is left of it."""
        self.step, pushed, tables, (ranks, turn, waiting), gifts = state
        self.pushed = list(pushed)  # the state may be on its way to a copy: it must not change with the shard
        place = 0

        def take(dtype: Any, rows: int, width: int) -> Array:
            nonlocal place
            piece = body[place : place + rows * width * np.dtype(dtype).itemsize]
            place += piece.nbytes
            return typed(piece, dtype).reshape(rows, width)

        self.tables = {}
        for described, updates in tables:
            spec = msgspec.convert(described, Spec)
            table = Table(msgspec.structs.replace(spec, begin=EMPTY), self.server, self.owners)
            table.spec, table.updates = spec, updates
            table.weights = take(table.weights.dtype, *table.weights.shape)
            table.states = {name: take(values.dtype, *values.shape) for name, values in table.states.items()}
            self.tables[spec.name] = table
        self.stage = Stage()
        self.stage.ranks, self.stage.turn = set(ranks), turn
        self.stage.waiting = {rank: [] for rank in waiting}
        for rank, name, count, lr in gifts:
            table = self.tables[name]
            rows = take(np.int64, count, 1).reshape(-1).copy() if count >= 0 else None
            shape = (count if count >= 0 else len(table.weights), table.spec.width)
            gift = Gift(name, rows, take(table.weights.dtype, *shape).copy(), lr, owned=True)
            (self.stage.summed if rank == ALL else self.stage.waiting[rank]).append(gift)
        return body[place:]


def owned(server: int, slots: Collection[int]) -> SlotOwners:
    """A layout in which only these slots are somebody's."""
    return tuple(server if slot in slots else NOBODY for slot in range(SLOTS))
