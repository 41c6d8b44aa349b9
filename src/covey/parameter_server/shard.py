"""Rows of some slots of all parameters, and the order in which gradients are applied.

In sync mode, the gradients of a step are summed in rank order, whatever order they arrive in, and divided by the number of
workers. When the gradients of all ranks have arrived, the step is *complete*. It is *applied* when a rank pulls or saves values
for the next step, or pushes gradients of the next step. Because of this delay, the replacement of a rank that died can still
pull the values that its predecessor used, unless another rank has begun the next step. In the other modes, gradients are
applied when they arrive.

A push is identified by (step, rank) and accepted once, so a worker can resend it. A shard is not thread-safe.
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
from covey.parameter_server.messages import ALL, DTYPES, ParameterSpec, PushGradients
from covey.parameter_server.optimizers import Array
from covey.parameter_server.row_blocks import RowBlock, view_as_dtype
from covey.parameter_server.row_placement import RowPlacement
from covey.parameter_server.table import Table, sum_duplicate_rows

NO_OWNER: Final = -1


class RowGradient(msgspec.Struct, frozen=True):
    """A gradient of one parameter, from one rank or summed over several. `rows` is None if the gradient is for all rows of the
    shard."""

    name: str
    rows: Array | None
    gradient: Array
    lr: float  # learning rate
    owns_memory: bool  # nothing else uses the gradient's memory, so sums may be stored in it


class StepGradients:
    """The gradients of one step that have arrived, until they are applied."""

    def __init__(
        self,
        ranks: Iterable[int] = (),
        waiting_by_rank: dict[int, list[RowGradient]] | None = None,
        summed: list[RowGradient] | None = None,
        next_rank: int = 0,
    ) -> None:
        self.ranks = set(ranks)  # ranks that have pushed
        self.waiting_by_rank = waiting_by_rank or {}  # gradients of ranks above `next_rank`
        self.summed = summed or []  # of ranks below `next_rank`, in order; those for all rows of a parameter are added up
        self.next_rank = next_rank  # the lowest rank that has not pushed

    def add(self, rank: int, gradients: list[RowGradient]) -> None:
        """Add a rank's gradients: to `summed` once all lower ranks have pushed, until then to `waiting_by_rank`."""
        self.ranks.add(rank)
        self.waiting_by_rank[rank] = gradients
        while self.next_rank in self.waiting_by_rank:
            for added in self.waiting_by_rank.pop(self.next_rank):
                index = next((n for n, g in enumerate(self.summed) if g.name == added.name and g.rows is None), None)
                if added.rows is not None or index is None:
                    self.summed.append(added)
                    continue
                total = self.summed[index]
                into = total.gradient if total.owns_memory else None
                gradient = np.add(total.gradient, added.gradient, out=into)
                self.summed[index] = RowGradient(total.name, None, gradient, total.lr, owns_memory=True)
            self.next_rank += 1

    def select_rows(self, select: Callable[[RowGradient], RowGradient]) -> StepGradients:
        """Return these gradients for some of their rows; `select` returns the part of one gradient."""
        waiting = {rank: [select(one) for one in gradients] for rank, gradients in self.waiting_by_rank.items()}
        return StepGradients(self.ranks, waiting, [select(one) for one in self.summed], self.next_rank)


class Shard:
    """A server's rows of some slots. `server` is the owner of the rows, also in a replica on another server."""

    def __init__(
        self,
        serving: ServingSettings,
        server: int,
        slots: Iterable[int],
        tables: dict[str, Table] | None = None,
        step: int = 0,
        last_pushed_steps: Iterable[int] | None = None,
        step_gradients: StepGradients | None = None,
    ) -> None:
        self.serving, self.server, self.slots = serving, server, frozenset(slots)
        self.owners = partial_owners(server, self.slots)
        self.tables = tables or {}
        self.step = step  # number of applied steps, in sync mode; in the others that of the loaded checkpoint, or 0
        # by rank; -1: it has pushed none
        self.last_pushed_steps = [-1] * serving.workers if last_pushed_steps is None else list(last_pushed_steps)
        self.step_gradients = step_gradients or StepGradients()

    # -- requests ----------------------------------------------------------------------------------------------------

    def declare(self, spec: ParameterSpec, values: Array) -> None:
        """Add a parameter unless it exists. `values` has its initial values if their kind in the spec is "given". Raise
        `UsageError` if the parameter exists with another declaration or given values are missing, `ValueError` if given values
        have the wrong size."""
        known = self.tables.get(spec.name)
        if known is not None:
            self.check_spec(spec)
            return
        has_values = spec.begin.kind == "given"
        table = Table.create(spec, self.server, self.owners, values if has_values and values.nbytes else None)
        if has_values and values.nbytes != table.weights.nbytes:
            raise UsageError(
                f"received {values.nbytes} bytes of initial values of {spec.name}, expected {table.weights.nbytes}"
            )
        self.tables[spec.name] = table

    def check_spec(self, spec: ParameterSpec) -> None:
        """Raise `UsageError` if an existing parameter was declared differently. Learning rate and initial values may differ."""
        known = self.tables[spec.name].spec
        for field in ("rows", "width", "dtype", "striped"):
            declared, requested = getattr(known, field), getattr(spec, field)
            if declared != requested:
                raise UsageError(f"{spec.name} is declared with {field} {requested}, but already has {field} {declared}")
        declared, requested = (msgspec.structs.asdict(rule) for rule in (known.rule, spec.rule))
        for field in ("kind", *(field for field in declared if field not in ("kind", "lr"))):
            if declared[field] != requested[field]:
                raise UsageError(
                    f"{spec.name} is declared with the optimizer's {field} {requested[field]}, but already has"
                    f" {declared[field]}: declare it equally on all workers"
                )

    def build_gradients(self, push: PushGradients, blocks: list[RowBlock], *, owned: bool) -> list[RowGradient]:
        """Return the gradients of a push from its blocks. Raise `UsageError` if the rank does not exist, if in sync mode an
        earlier step is not complete, or if values are NaN or infinite and `refuse_nan` is set. `owned`: see
        `RowGradient.owns_memory`."""
        if push.rank >= self.serving.workers:
            raise UsageError(f"received a push of rank {push.rank}, expected ranks 0 to {self.serving.workers - 1}")
        if self.serving.mode is ConsistencyMode.SYNC and push.step > self.step + self.is_step_complete(self.step):
            raise UsageError(f"step {push.step} cannot be pushed: step {self.step} is not complete")
        for block in blocks:
            total = float(block.values.sum())
            if self.serving.refuse_nan and not math.isfinite(total) and not np.isfinite(block.values).all():
                raise UsageError(
                    f"the gradient of {block.name} from rank {push.rank} at step {push.step} has NaN or infinite values:"
                    " fix the training, or set COVEY_PS_NAN=pass to accept them"
                )
        return [RowGradient(block.name, block.rows, block.values, block.lr, owned) for block in blocks]

    # -- steps -------------------------------------------------------------------------------------------------------

    def has_pushed(self, step: int, rank: int) -> bool:
        """Return whether this rank has pushed this step or a later one."""
        return step <= self.last_pushed_steps[rank]

    def add_gradients(self, step: int, rank: int, gradients: list[RowGradient]) -> None:
        """Add a rank's gradients of a step that the rank has not pushed yet. In sync mode, first apply the previous step if it
        is pending; in the other modes, apply the gradients."""
        if self.serving.mode is ConsistencyMode.SYNC:
            if step > self.step:
                self.apply_step()
            self.step_gradients.add(rank, gradients)
        else:
            for gradient in gradients:
                self._update_table([gradient], 1.0)
        self.last_pushed_steps[rank] = step

    def is_step_complete(self, step: int) -> bool:
        """Return whether the gradients of all ranks for a step have arrived. For sync mode."""
        return step < self.step or (step == self.step and len(self.step_gradients.ranks) == self.serving.workers)

    def is_step_readable(self, step: int) -> bool:
        """Return whether the values for a step can be read: in sync mode if the previous step is complete, in bounded mode if
        every rank has pushed all steps below `step` - `staleness`, in async mode always."""
        if self.serving.mode is ConsistencyMode.SYNC:
            return step <= self.step or self.is_step_complete(step - 1)
        ahead = self.serving.staleness if self.serving.mode is ConsistencyMode.BOUNDED else math.inf
        return min(self.last_pushed_steps) + 1 >= step - ahead

    def apply_until(self, step: int) -> None:
        """In sync mode, apply the step before `step` if it is pending. `step` must be readable (`is_step_readable`)."""
        if self.serving.mode is ConsistencyMode.SYNC and step > self.step:
            self.apply_step()

    def apply_step(self) -> None:
        """Update the values with the gradients of the current step, which must be complete, and begin the next step."""
        complete, self.step_gradients = self.step_gradients, StepGradients()
        self.step += 1
        by_name: dict[str, list[RowGradient]] = {}
        for gradient in complete.summed:
            by_name.setdefault(gradient.name, []).append(gradient)
        for gradients in by_name.values():
            self._update_table(gradients, 1.0 / self.serving.workers)

    def _update_table(self, gradients: list[RowGradient], scale: float) -> None:
        """Update one parameter with the sum of `gradients` times `scale`, at the first gradient's learning rate. `gradients` is
        one gradient for all rows, or one or more gradients for some rows."""
        first = gradients[0]
        table, lr = self.tables[first.name], first.lr
        if first.rows is None:
            gradient = first.gradient
            if scale != 1.0:
                gradient = np.multiply(gradient, gradient.dtype.type(scale), out=gradient if first.owns_memory else None)
            table.apply_gradient(gradient, lr)
            return
        rows = np.concatenate([one.rows for one in gradients if one.rows is not None])
        rows, gradient = sum_duplicate_rows(rows, np.concatenate([one.gradient for one in gradients]))
        table.apply_row_gradient(rows, gradient * gradient.dtype.type(scale) if scale != 1.0 else gradient, lr)

    # -- copies and transfers ----------------------------------------------------------------------------------------

    def copy_slots(self, slots: Iterable[int]) -> Shard:
        """Return a copy of some slots as a new shard, with the same step and the gradients that have arrived for the step."""
        copied = frozenset(slots)
        owners = partial_owners(self.server, copied)
        tables = {name: table.copy_owned_rows(owners) for name, table in self.tables.items()}

        def select(gradient: RowGradient) -> RowGradient:
            placement, table = tables[gradient.name].placement, self.tables[gradient.name]
            if gradient.rows is None:
                rows = placement.row_numbers(self.server, 0, placement.count_rows(self.server))
                values = gradient.gradient[table.placement.local_indexes(rows)]
                return RowGradient(gradient.name, None, values, gradient.lr, owns_memory=True)
            is_own = placement.owners_of_rows(gradient.rows) == self.server
            return RowGradient(gradient.name, gradient.rows[is_own], gradient.gradient[is_own], gradient.lr, owns_memory=True)

        gradients = self.step_gradients.select_rows(select)
        return Shard(self.serving, self.server, copied, tables, self.step, self.last_pushed_steps, gradients)

    def can_merge(self, other: Shard) -> bool:
        """Return whether both shards have the same parameters, step, pushes and update counts, and neither has gradients of the
        current step."""
        same = (
            self.step == other.step
            and self.last_pushed_steps == other.last_pushed_steps
            and self.tables.keys() == other.tables.keys()
        )
        between = not self.step_gradients.ranks and not other.step_gradients.ranks
        return same and between and all(other.tables[name].update_count == t.update_count for name, t in self.tables.items())

    def merge(self, other: Shard) -> Shard:
        """Return one shard with copies of the rows of both, and with this shard's step and pushes. Gradients of the current
        step are dropped."""
        slots = self.slots | other.slots
        owners = partial_owners(self.server, slots)
        tables = {name: table.merge(other.tables[name], owners) for name, table in self.tables.items()}
        return Shard(self.serving, self.server, slots, tables, self.step, self.last_pushed_steps)

    def load(self, tables: dict[str, Table], step: int, last_pushed_steps: list[int]) -> None:
        """Replace all rows by those of a checkpoint, and drop the gradients of the current step."""
        self.tables, self.step, self.last_pushed_steps = tables, step, last_pushed_steps
        self.step_gradients = StepGradients()

    def pack(self) -> tuple[Any, list[Array]]:
        """Return everything but the slots, for `unpack`: plain data, and arrays. Values of rows are not copied."""
        arrays: list[Array] = []
        tables = []
        for table in self.tables.values():
            tables.append([msgspec.to_builtins(table.spec), table.update_count])
            arrays += [table.weights, *table.states.values()]
        waiting = sorted(self.step_gradients.waiting_by_rank.items())
        packed = []
        for rank, gradients in [(ALL, self.step_gradients.summed), *waiting]:
            for one in gradients:
                packed.append([rank, one.name, -1 if one.rows is None else len(one.rows), one.lr])
                arrays += [np.ascontiguousarray(a) for a in (one.rows, one.gradient) if a is not None]
        pushed = [sorted(self.step_gradients.ranks), self.step_gradients.next_rank, [rank for rank, _ in waiting]]
        return [self.step, self.last_pushed_steps, tables, pushed, packed], arrays

    def unpack(self, state: Any, body: Array) -> Array:
        """Replace everything but the slots by what `pack` returned. `body` starts with its arrays; return the rest of `body`.
        Rows may be stored in the memory of `body`."""
        self.step, last_pushed_steps, tables, (ranks, next_rank, waiting_ranks), packed = state
        self.last_pushed_steps = list(last_pushed_steps)  # a copy: the state may still be sent to a replica
        offset = 0

        def take(dtype: Any, rows: int, width: int) -> Array:
            nonlocal offset
            part = body[offset : offset + rows * width * np.dtype(dtype).itemsize]
            offset += part.nbytes
            return view_as_dtype(part, dtype).reshape(rows, width)

        self.tables = {}
        for described, updates in tables:
            spec = msgspec.convert(described, ParameterSpec)
            placement = RowPlacement(spec.rows, spec.striped, self.owners)
            shape = (placement.count_rows(self.server), spec.width)
            weights, *states = (take(DTYPES[spec.dtype], *shape) for _ in range(1 + len(spec.rule.initial_states)))
            named_states = dict(zip(spec.rule.initial_states, states, strict=True))
            self.tables[spec.name] = Table(spec, self.server, placement, weights, named_states, updates)
        summed: list[RowGradient] = []
        waiting: dict[int, list[RowGradient]] = {rank: [] for rank in waiting_ranks}
        for rank, name, count, lr in packed:
            table = self.tables[name]
            rows = take(np.int64, count, 1).reshape(-1).copy() if count >= 0 else None
            shape = (count if count >= 0 else len(table.weights), table.spec.width)
            gradient = RowGradient(name, rows, take(table.weights.dtype, *shape).copy(), lr, owns_memory=True)
            (summed if rank == ALL else waiting[rank]).append(gradient)
        self.step_gradients = StepGradients(ranks, waiting, summed, next_rank)
        return body[offset:]


def partial_owners(server: int, slots: Collection[int]) -> SlotOwners:
    """Return the owners of all slots: `server` for those in `slots`, `NO_OWNER` for the others."""
    return tuple(server if slot in slots else NO_OWNER for slot in range(SLOTS))
