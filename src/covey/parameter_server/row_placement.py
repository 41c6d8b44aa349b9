"""Where a row lies: on which server, and at which place among that server's rows.

`covey.core.parameter_server.sharding`, for whole arrays.
"""

from __future__ import annotations

import numpy as np

from covey.core.parameter_server.sharding import SLOTS, SlotOwners, count_slot_rows, slot_of, slot_row_range
from covey.parameter_server.optimizers import Array


class RowPlacement:
    """One parameter's rows under one layout. A server keeps its slots one after the other, in order of slot."""

    def __init__(self, rows: int, striped: bool, owners: SlotOwners) -> None:
        self.row_count, self.striped, self.owners = rows, striped, owners
        self._owner_by_slot = np.array(owners)
        self._slot_offsets = np.zeros(SLOTS, np.int64)
        self._first_rows = np.array([0 if striped else slot_row_range(slot, rows)[0] for slot in range(SLOTS)])
        self._row_counts: dict[int, int] = {}
        self._row_ranges = {} if striped else self._build_row_ranges()  # asked for with every push and pull
        for slot, owner in enumerate(owners):
            self._slot_offsets[slot] = self._row_counts.get(owner, 0)
            self._row_counts[owner] = int(self._slot_offsets[slot]) + count_slot_rows(slot, rows, striped)

    def count_rows(self, server: int) -> int:
        """How many rows a server has."""
        return self._row_counts.get(server, 0)

    def owners_of_rows(self, rows: Array) -> Array:
        """The server of each of these rows."""
        found: Array = self._owner_by_slot[self._slots_of_rows(rows)]
        return found

    def local_indexes(self, rows: Array) -> Array:
        """The place of each of these rows among its server's."""
        slots = self._slots_of_rows(rows)
        found: Array = self._slot_offsets[slots] + (rows // SLOTS if self.striped else rows - self._first_rows[slots])
        return found

    def _slots_of_rows(self, rows: Array) -> Array:
        found: Array = slot_of(rows, self.row_count, self.striped)
        return found

    def row_ranges(self, server: int) -> list[tuple[int, int]]:
        """A server's part of a parameter that is not striped: pieces, first and last (not included), one after the other."""
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
        """Which rows of the parameter lie at a server's places `first` to `last`."""
        if not self.striped:
            parts = [range(a, b) for a, b in self.row_ranges(server)]
        else:
            parts = [range(slot, self.row_count, SLOTS) for slot, owner in enumerate(self.owners) if owner == server]
        found: list[Array] = []
        offset = 0
        for part in parts:
            low, high = max(first - offset, 0), min(last - offset, len(part))
            if low < high:
                piece = part[low:high]
                found.append(np.arange(piece.start, piece.stop, piece.step))
            offset += len(part)
        return np.concatenate(found) if found else np.empty(0, np.int64)
