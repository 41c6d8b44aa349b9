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
from covey.parameter_server.array_codec import RowBlock, view_as_dtype
from covey.parameter_server.messages import ALL, ParameterSpec, PushGradients
from covey.parameter_server.optimizers import Array
from covey.parameter_server.table import ZERO_INIT, Table, sum_duplicate_rows

NO_OWNER: Final = -1


class RowGradient(msgspec.Struct):
    """A gradient of one parameter from one rank. `rows` is None where it is for all."""

    name: str
    rows: Array | None
    gradient: Array
    lr: float
    owns_memory: bool  # nobody else reads the gradient's memory, so sums may be made there


class StepGradients:
    """The gradients of one step, until all are here."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.waiting_by_rank: dict[int, list[RowGradient]] = {}  # of ranks whose turn has not come
        self.summed: list[RowGradient] = []  # of ranks below `turn`, in order; at most one for each whole parameter
        self.next_rank = 0

    def add(self, rank: int, gifts: list[RowGradient]) -> None:
        """Take a rank's gradients in. They are summed as soon as those of all lower ranks are."""
        self.ranks.add(rank)
        self.waiting_by_rank[rank] = gifts
        while self.next_rank in self.waiting_by_rank:
            for gift in self.waiting_by_rank.pop(self.next_rank):
                whole = next((g for g in self.summed if g.name == gift.name and g.rows is None), None)
                if gift.rows is None and whole is not None and whole.owns_memory:
                    whole.gradient += gift.gradient
                elif gift.rows is None and whole is not None:
                    whole.gradient, whole.owns_memory = whole.gradient + gift.gradient, True
                else:
                    self.summed.append(gift)
            self.next_rank += 1

    def select_rows(self, cut: Callable[[RowGradient], RowGradient]) -> StepGradients:
        """The same stage for some of the rows."""
        found = StepGradients()
        found.ranks, found.next_rank = set(self.ranks), self.next_rank
        found.waiting_by_rank = {rank: [cut(gift) for gift in gifts] for rank, gifts in self.waiting_by_rank.items()}
        found.summed = [cut(gift) for gift in self.summed]
        return found


class Shard:
    """A server's rows of some slots. `server` is whose they are, which is another's where this is a copy."""

    def __init__(self, serving: ServingSettings, server: int, slots: Iterable[int]) -> None:
        self.serving, self.server, self.slots = serving, server, frozenset(slots)
        self.owners = partial_owners(server, self.slots)
        self.tables: dict[str, Table] = {}
        self.step = 0  # steps that are applied, in sync mode
        self.last_pushed_steps = [-1] * serving.workers  # each rank's newest step
        self.step_gradients = StepGradients()

    # -- what is asked -----------------------------------------------------------------------------------------------

    def declare(self, spec: ParameterSpec, values: Array) -> None:
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

    def check_spec(self, spec: ParameterSpec) -> None:
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

    def build_gradients(self, push: PushGradients, pieces: list[RowBlock], *, owned: bool) -> list[RowGradient]:
        """What a push gives these rows, checked. Raises `UsageError`; nothing has changed then."""
        if push.rank >= self.serving.workers:
            raise UsageError(f"rank {push.rank} pushed, but there are {self.serving.workers} workers")
        if self.serving.mode is ConsistencyMode.SYNC and push.step > self.step + self.is_step_complete(self.step):
            raise UsageError(f"step {push.step} cannot be pushed: step {self.step} is not complete")
        for piece in pieces:
            total = float(piece.values.sum())
            if self.serving.refuse_nan and not math.isfinite(total) and not np.isfinite(piece.values).all():
                raise UsageError(
                    f"the gradient of {piece.name} from rank {push.rank} at step {push.step} has values that are no finite"
                    " numbers: mend the training, or let them pass with COVEY_PS_NAN=pass"
                )
        return [RowGradient(piece.name, piece.rows, piece.values, piece.lr, owned) for piece in pieces]

    # -- steps -------------------------------------------------------------------------------------------------------

    def has_pushed(self, step: int, rank: int) -> bool:
        """Whether this rank's gradients of a step are here, or were."""
        return step <= self.last_pushed_steps[rank]

    def add_gradients(self, step: int, rank: int, gifts: list[RowGradient]) -> None:
        """Take gradients in, checked and not known yet."""
        if self.serving.mode is ConsistencyMode.SYNC:
            if step > self.step:
                self.apply_step()
            self.step_gradients.add(rank, gifts)
        else:
            for gift in gifts:
                self._update_table([gift], 1.0)
        self.last_pushed_steps[rank] = step

    def is_step_complete(self, step: int) -> bool:
        """Whether every rank's gradients of a step are here."""
        return step < self.step or (step == self.step and len(self.step_gradients.ranks) == self.serving.workers)

    def is_step_readable(self, step: int) -> bool:
        """Whether the values for a step can be given."""
        if self.serving.mode is ConsistencyMode.SYNC:
            return step <= self.step or self.is_step_complete(step - 1)
        ahead = self.serving.staleness if self.serving.mode is ConsistencyMode.BOUNDED else math.inf
        return min(self.last_pushed_steps) + 1 >= step - ahead

    def apply_until(self, step: int) -> None:
        """Apply what must be applied before the values for a step can be given."""
        if self.serving.mode is ConsistencyMode.SYNC and step > self.step:
            self.apply_step()

    def apply_step(self) -> None:
        """The complete step becomes part of the values."""
        stage, self.step_gradients = self.step_gradients, StepGradients()
        self.step += 1
        by_name: dict[str, list[RowGradient]] = {}
        for gift in stage.summed:
            by_name.setdefault(gift.name, []).append(gift)
        for gifts in by_name.values():
            self._update_table(gifts, 1.0 / self.serving.workers)

    def _update_table(self, gifts: list[RowGradient], scale: float) -> None:
        """One parameter's gradients of one step."""
        table, lr = self.tables[gifts[0].name], gifts[0].lr
        if gifts[0].rows is None:
            gradient = gifts[0].gradient
            if scale != 1.0:
                gradient = np.multiply(gradient, gradient.dtype.type(scale), out=gradient if gifts[0].owns_memory else None)
            table.apply_gradient(gradient, lr)
            return
        rows = np.concatenate([gift.rows for gift in gifts if gift.rows is not None])
        rows, gradient = sum_duplicate_rows(rows, np.concatenate([gift.gradient for gift in gifts]))
        table.apply_row_gradient(rows, gradient * gradient.dtype.type(scale) if scale != 1.0 else gradient, lr)

    # -- some of it, all of it ---------------------------------------------------------------------------------------

    def copy_slots(self, slots: Iterable[int]) -> Shard:
        """Some slots as a shard of their own, at the same point of the same step."""
        found = Shard(self.serving, self.server, slots)
        found.step, found.last_pushed_steps = self.step, list(self.last_pushed_steps)
        found.tables = {name: table.copy_owned_rows(found.owners) for name, table in self.tables.items()}

        def cut(gift: RowGradient) -> RowGradient:
            mine, table = found.tables[gift.name], self.tables[gift.name]
            if gift.rows is None:
                places = table.placement.local_indexes(mine.placement.row_numbers(self.server, 0, len(mine.weights)))
                return RowGradient(gift.name, None, gift.gradient[places], gift.lr, owns_memory=True)
            here = mine.placement.owners_of_rows(gift.rows) == self.server
            return RowGradient(gift.name, gift.rows[here], gift.gradient[here], gift.lr, owns_memory=True)

        found.step_gradients = self.step_gradients.select_rows(cut)
        return found

    def can_merge(self, other: Shard) -> bool:
        """Whether both are at the same point, between two steps: then they can be one."""
        same = (
            self.step == other.step
            and self.last_pushed_steps == other.last_pushed_steps
            and self.tables.keys() == other.tables.keys()
        )
        between = not self.step_gradients.ranks and not other.step_gradients.ranks
        return same and between and all(other.tables[name].update_count == t.update_count for name, t in self.tables.items())

    def merge(self, other: Shard) -> Shard:
        """One shard of two that agree."""
        found = Shard(self.serving, self.server, self.slots | other.slots)
        found.step, found.last_pushed_steps = self.step, list(self.last_pushed_steps)
        found.tables = {name: table.merge(other.tables[name], found.owners) for name, table in self.tables.items()}
        return found

    def pack(self) -> tuple[Any, list[Array]]:
        """Everything, as plain data and arrays in an order that `unpack` knows."""
        arrays: list[Array] = []
        tables = []
        for table in self.tables.values():
            tables.append([msgspec.to_builtins(table.spec), table.update_count])
            arrays += [table.weights, *table.states.values()]
        waiting = sorted(self.step_gradients.waiting_by_rank.items())
        kept = [(ALL, self.step_gradients.summed), *waiting]
        gifts = []
        for rank, given in kept:
            for gift in given:
                gifts.append([rank, gift.name, -1 if gift.rows is None else len(gift.rows), gift.lr])
                arrays += [np.ascontiguousarray(a) for a in (gift.rows, gift.gradient) if a is not None]
        stage = [sorted(self.step_gradients.ranks), self.step_gradients.next_rank, [rank for rank, _ in waiting]]
        return [self.step, self.last_pushed_steps, tables, stage, gifts], arrays

    def unpack(self, state: Any, body: Array) -> Array:
        """Become what `pack` described; `body` is the arrays, one after the other. Returns what is left of it."""
        self.step, pushed, tables, (ranks, turn, waiting), gifts = state
        self.last_pushed_steps = list(pushed)  # the state may be on its way to a copy: it must not change with the shard
        place = 0

        def take(dtype: Any, rows: int, width: int) -> Array:
            nonlocal place
            piece = body[place : place + rows * width * np.dtype(dtype).itemsize]
            place += piece.nbytes
            return view_as_dtype(piece, dtype).reshape(rows, width)

        self.tables = {}
        for described, updates in tables:
            spec = msgspec.convert(described, ParameterSpec)
            table = Table(msgspec.structs.replace(spec, begin=ZERO_INIT), self.server, self.owners)
            table.spec, table.update_count = spec, updates
            table.weights = take(table.weights.dtype, *table.weights.shape)
            table.states = {name: take(values.dtype, *values.shape) for name, values in table.states.items()}
            self.tables[spec.name] = table
        self.step_gradients = StepGradients()
        self.step_gradients.ranks, self.step_gradients.next_rank = set(ranks), turn
        self.step_gradients.waiting_by_rank = {rank: [] for rank in waiting}
        for rank, name, count, lr in gifts:
            table = self.tables[name]
            rows = take(np.int64, count, 1).reshape(-1).copy() if count >= 0 else None
            shape = (count if count >= 0 else len(table.weights), table.spec.width)
            gift = RowGradient(name, rows, take(table.weights.dtype, *shape).copy(), lr, owns_memory=True)
            (self.step_gradients.summed if rank == ALL else self.step_gradients.waiting_by_rank[rank]).append(gift)
        return body[place:]


def partial_owners(server: int, slots: Collection[int]) -> SlotOwners:
    """A layout in which only these slots are somebody's."""
    return tuple(server if slot in slots else NO_OWNER for slot in range(SLOTS))
