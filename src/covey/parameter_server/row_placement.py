"""Placement of rows: the server of each row, and the row's index among that server's rows.

The assignment is that of `covey.core.parameter_server.sharding`, computed for numpy arrays of row numbers.
"""

from __future__ import annotations

import numpy as np

from covey.core.parameter_server.sharding import SLOTS, SlotOwners, count_slot_rows, slot_of, slot_row_range
from covey.parameter_server.optimizers import Array


class RowPlacement:
    """Placement of one parameter's rows. A server stores the rows of its slots one slot after the other, in slot order."""

    def __init__(self, rows: int, striped: bool, owners: SlotOwners) -> None:
        self.row_count, self.striped, self.owners = rows, striped, owners
        self._owner_by_slot = np.array(owners)
        self._slot_offsets = np.zeros(SLOTS, np.int64)
        self._first_rows = np.array([0 if striped else slot_row_range(slot, rows)[0] for slot in range(SLOTS)])
        self._row_counts: dict[int, int] = {}
        self._row_ranges = {} if striped else self._build_row_ranges()  # computed once, because every push and pull needs them
        for slot, owner in enumerate(owners):
            self._slot_offsets[slot] = self._row_counts.get(owner, 0)
            self._row_counts[owner] = int(self._slot_offsets[slot]) + count_slot_rows(slot, rows, striped)

    def count_rows(self, server: int) -> int:
        """Return the number of rows of a server."""
        return self._row_counts.get(server, 0)

    def owners_of_rows(self, rows: Array) -> Array:
        """Return the owner of each of these rows; `shard.NO_OWNER` if its slot has none."""
        found: Array = self._owner_by_slot[self._slots_of_rows(rows)]
        return found

    def local_indexes(self, rows: Array) -> Array:
        """Return the index of each of these rows among its server's rows."""
        slots = self._slots_of_rows(rows)
        found: Array = self._slot_offsets[slots] + (rows // SLOTS if self.striped else rows - self._first_rows[slots])
        return found

    def _slots_of_rows(self, rows: Array) -> Array:
        found: Array = slot_of(rows, self.row_count, self.striped)
        return found

    def row_ranges(self, server: int) -> list[tuple[int, int]]:
        """Return a server's row ranges (first, end) in ascending order; [] if it has no rows or the parameter is striped."""
        return self._row_ranges.get(server, [])

    def _build_row_ranges(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        for slot, owner in enumerate(self.owners):
            first, last = slot_row_range(slot, self.row_count)
            ranges = found.setdefault(owner, [])
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], last)
            elif first < last:
                ranges.append((first, last))
        return found

    def row_numbers(self, server: int, first: int, last: int) -> Array:
        """Return the row numbers at a server's indexes `first` to `last` (exclusive)."""
        if not self.striped:
            parts = [range(a, b) for a, b in self.row_ranges(server)]
        else:
            parts = [range(slot, self.row_count, SLOTS) for slot, owner in enumerate(self.owners) if owner == server]
        found: list[Array] = []
        offset = 0
        for part in parts:
            low, high = max(first - offset, 0), min(last - offset, len(part))
            if low < high:
                selected = part[low:high]
                found.append(np.arange(selected.start, selected.stop, selected.step))
            offset += len(part)
        return np.concatenate(found) if found else np.empty(0, np.int64)
