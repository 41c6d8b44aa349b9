"""One parameter's rows on one server: values, optimizer state, and how both begin."""

from __future__ import annotations

import msgspec
import numpy as np

from covey.core.parameter_server.sharding import SlotOwners
from covey.parameter_server.messages import DTYPES, InitialValues, ParameterSpec
from covey.parameter_server.optimizers import Array, update_rows, update_weights
from covey.parameter_server.row_placement import RowPlacement

DRAW_CHUNK_ELEMENTS = 1 << 16  # elements that are drawn at a time: what that takes beside the rows must not show
ZERO_INIT = InitialValues("zeros")  # the values follow


class Table:
    """The rows of a parameter that lie here."""

    def __init__(self, spec: ParameterSpec, server: int, owners: SlotOwners, values: Array | None = None) -> None:
        self.spec = spec
        self.server = server
        self.placement = RowPlacement(spec.rows, spec.striped, owners)
        self.update_count = 0
        self._row_versions: Array | None = None  # by row: the update that changed it last; kept once somebody asks
        shape = (self.placement.count_rows(server), spec.width)
        dtype = DTYPES[spec.dtype]
        if values is not None:
            self.weights: Array = values.view(dtype).reshape(shape)
        else:
            self.weights = np.zeros(shape, dtype)
            draw_initial_values(self.weights, spec.begin, self.placement, server)
        self.states = {name: np.full(shape, first, dtype) for name, first in spec.rule.initial_states.items()}

    def copy_owned_rows(self, owners: SlotOwners) -> Table:
        """The rows that these owners leave to this server, in a table of their own."""
        found = Table(msgspec.structs.replace(self.spec, begin=ZERO_INIT), self.server, owners)
        places = self.placement.local_indexes(
            found.placement.row_numbers(self.server, 0, found.placement.count_rows(self.server))
        )
        found.spec, found.update_count = self.spec, self.update_count
        found.weights = self.weights[places]
        found.states = {name: values[places] for name, values in self.states.items()}
        return found

    def merge(self, other: Table, owners: SlotOwners) -> Table:
        """These rows and the other's in one table."""
        found = Table(msgspec.structs.replace(self.spec, begin=ZERO_INIT), self.server, owners)
        found.spec, found.update_count = self.spec, self.update_count
        for table in (self, other):
            places = found.placement.local_indexes(table.placement.row_numbers(self.server, 0, len(table.weights)))
            found.weights[places] = table.weights
            for name, values in table.states.items():
                found.states[name][places] = values
        return found

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + sum(state.nbytes for state in self.states.values())

    def apply_gradient(self, gradient: Array, lr: float) -> None:
        """A gradient for all rows."""
        self.update_count += 1
        update_weights(self.spec.rule, lr, self.update_count, self.weights, gradient, list(self.states.values()))

    def apply_row_gradient(self, rows: Array, gradient: Array, lr: float) -> None:
        """A gradient for some rows, by their numbers in the parameter, each named once."""
        self.update_count += 1
        local = self.placement.local_indexes(rows)
        if self._row_versions is not None:
            self._row_versions[slice(None) if self.spec.rule.updates_all_rows else local] = self.update_count
        update_rows(self.spec.rule, lr, self.update_count, self.weights, local, gradient, list(self.states.values()))

    def read_values(self, rows: Array | None) -> Array:
        """The values of some rows, or of all: those are not copied."""
        return self.weights if rows is None else np.take(self.weights, self.placement.local_indexes(rows), axis=0)

    def changed_since(self, rows: Array, since: Array) -> Array:
        """Which of these rows changed since the update that goes with each; before the first call, all may have."""
        if self._row_versions is None:
            self._row_versions = np.full(len(self.weights), self.update_count, np.int64)
        found: Array = self._row_versions[self.placement.local_indexes(rows)] > since
        return found


def sum_duplicate_rows(rows: Array, gradient: Array) -> tuple[Array, Array]:
    """Each row once, with the sum of its gradients in the order they are given."""
    order = np.argsort(rows, kind="stable")
    rows, gradient = rows[order], gradient[order]
    first = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1]))) if len(rows) else np.empty(0, np.int64)
    if len(first) == len(rows):
        return rows, gradient
    return rows[first], np.add.reduceat(gradient, first, axis=0)


def draw_initial_values(weights: Array, begin: InitialValues, placement: RowPlacement, server: int) -> None:
    """First values. Each is a function of (seed, row, column), so that they do not depend on how many servers there are."""
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
    """Numbers above 0 and up to 1, by splitmix64."""
    z = number * np.uint64(0x9E3779B97F4A7C15) + np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & (1 << 64) - 1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    found: Array = ((z >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    return found
