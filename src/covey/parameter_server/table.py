"""One parameter's rows on one server: values, optimizer state and random initial values."""

from __future__ import annotations

import numpy as np

from covey.core.parameter_server.sharding import SlotOwners
from covey.parameter_server.messages import DTYPES, InitialValues, ParameterSpec
from covey.parameter_server.optimizers import Array, update_rows, update_weights
from covey.parameter_server.row_placement import RowPlacement

DRAW_CHUNK_ELEMENTS = 1 << 16  # elements drawn at a time, to limit temporary memory


class Table:
    """The rows of one parameter on one server, and the optimizer's state for them."""

    def __init__(
        self,
        spec: ParameterSpec,
        server: int,
        placement: RowPlacement,
        weights: Array,
        states: dict[str, Array],
        update_count: int = 0,
    ) -> None:
        self.spec, self.server, self.placement = spec, server, placement
        self.weights, self.states, self.update_count = weights, states, update_count
        self._row_versions: Array | None = None  # by row: count of its last update; None before the first `changed_since`

    @classmethod
    def create(cls, spec: ParameterSpec, server: int, owners: SlotOwners, values: Array | None = None) -> Table:
        """Return a new table with `values` (bytes, not copied). If `values` is None, use the initial values of the spec, or
        zeros if their kind is "given". Raise `ValueError` if `values` has the wrong size."""
        placement = RowPlacement(spec.rows, spec.striped, owners)
        shape, dtype = (placement.count_rows(server), spec.width), DTYPES[spec.dtype]
        if values is not None:
            weights: Array = values.view(dtype).reshape(shape)
        else:
            weights = np.zeros(shape, dtype)
            draw_initial_values(weights, spec.begin, placement, server)
        states = {name: np.full(shape, first, dtype) for name, first in spec.rule.initial_states.items()}
        return cls(spec, server, placement, weights, states)

    def copy_owned_rows(self, owners: SlotOwners) -> Table:
        """Return a table with copies of those rows that `owners` assigns to this server."""
        placement = RowPlacement(self.spec.rows, self.spec.striped, owners)
        indexes = self.placement.local_indexes(placement.row_numbers(self.server, 0, placement.count_rows(self.server)))
        states = {name: values[indexes] for name, values in self.states.items()}
        return Table(self.spec, self.server, placement, self.weights[indexes], states, self.update_count)

    def merge(self, other: Table, owners: SlotOwners) -> Table:
        """Return a table with copies of the rows of both tables, with this table's update count. `owners` assigns the slots of
        both tables to this server."""
        placement = RowPlacement(self.spec.rows, self.spec.striped, owners)
        indexes = [
            placement.local_indexes(table.placement.row_numbers(self.server, 0, len(table.weights))) for table in (self, other)
        ]

        def join(first: Array, second: Array) -> Array:
            joined: Array = np.empty((placement.count_rows(self.server), self.spec.width), first.dtype)
            joined[indexes[0]], joined[indexes[1]] = first, second
            return joined

        states = {name: join(values, other.states[name]) for name, values in self.states.items()}
        return Table(self.spec, self.server, placement, join(self.weights, other.weights), states, self.update_count)

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + sum(state.nbytes for state in self.states.values())

    def apply_gradient(self, gradient: Array, lr: float) -> None:
        """Apply a gradient of all rows."""
        self.update_count += 1
        update_weights(self.spec.rule, lr, self.update_count, self.weights, gradient, list(self.states.values()))

    def apply_row_gradient(self, rows: Array, gradient: Array, lr: float) -> None:
        """Apply a gradient of some rows, given by their numbers, each once. Adam changes the other rows too."""
        self.update_count += 1
        local = self.placement.local_indexes(rows)
        if self._row_versions is not None:
            self._row_versions[slice(None) if self.spec.rule.updates_all_rows else local] = self.update_count
        update_rows(self.spec.rule, lr, self.update_count, self.weights, local, gradient, list(self.states.values()))

    def read_values(self, rows: Array | None) -> Array:
        """Return a copy of the values of some rows; for None, the array of all values itself."""
        return self.weights if rows is None else np.take(self.weights, self.placement.local_indexes(rows), axis=0)

    def changed_since(self, rows: Array, since: Array) -> Array:
        """Return for each row whether it may have changed after its update count in `since`. The last change of each row is
        recorded from the first call on; an earlier update counts as a change of all rows."""
        if self._row_versions is None:
            self._row_versions = np.full(len(self.weights), self.update_count, np.int64)
        found: Array = self._row_versions[self.placement.local_indexes(rows)] > since
        return found


def sum_duplicate_rows(rows: Array, gradient: Array) -> tuple[Array, Array]:
    """Return the rows sorted and without duplicates, and the sum of each row's gradients."""
    order = np.argsort(rows, kind="stable")
    rows, gradient = rows[order], gradient[order]
    first = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1]))) if len(rows) else np.empty(0, np.int64)
    if len(first) == len(rows):
        return rows, gradient
    return rows[first], np.add.reduceat(gradient, first, axis=0)


def draw_initial_values(weights: Array, begin: InitialValues, placement: RowPlacement, server: int) -> None:
    """Fill in random initial values, which do not depend on the number of servers. Do nothing for "zeros" and "given"."""
    if begin.kind in ("zeros", "given") or weights.size == 0:
        return
    width = weights.shape[1]
    step = max(1, DRAW_CHUNK_ELEMENTS // width)
    columns = np.arange(width, dtype=np.uint64)
    for start in range(0, len(weights), step):
        stop = min(start + step, len(weights))
        rows = placement.row_numbers(server, start, stop).astype(np.uint64)
        number = rows[:, None] * np.uint64(width) + columns
        first = _draw_uniform(number * np.uint64(2), begin.seed)
        if begin.kind == "uniform":
            weights[start:stop] = (2.0 * first - 1.0) * begin.scale
        else:
            second = _draw_uniform(number * np.uint64(2) + np.uint64(1), begin.seed)
            weights[start:stop] = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second) * begin.scale


def _draw_uniform(number: Array, seed: int) -> Array:
    """Return a random number above 0 and up to 1 for each `number`, by splitmix64."""
    z = number * np.uint64(0x9E3779B97F4A7C15) + np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & (1 << 64) - 1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    found: Array = ((z >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    return found
