"""A worker's memory of rows it has seen: never trusted, always checked.

A row is kept with the number of its last change that its server knew of. A pull names the numbers, and the server sends only
rows that changed since, so what a worker computes with is the same as without the cache, in every mode. Numbers of another
sharing, or of another life of a server's rows, mean nothing: then everything is forgotten.
"""

from __future__ import annotations

import msgspec
import numpy as np

from covey.parameter_server.optimizers import Array

UNKNOWN = -1


class RowUpdate(msgspec.Struct, frozen=True):
    """What one server said about some rows: which of them changed, and their values. `number` is that of the last change."""

    server: int
    replication_id: str
    version: int
    rows: Array
    changed: Array
    values: Array


class RowCache:
    """At most `size` rows of one table; row r can only lie at place r mod size. Used by one thread."""

    def __init__(self, width: int, size: int) -> None:
        self._rows = np.full(size, UNKNOWN, np.int64)
        self._versions = np.full(size, UNKNOWN, np.int64)
        self._values = np.zeros((size, width), np.float32)
        self._sharding_version = UNKNOWN
        self.replication_ids: dict[int, str] = {}  # by server

    def cached_versions(self, rows: Array, sharding_version: int) -> Array:
        """The number at which each of these rows is known here."""
        if sharding_version != self._sharding_version:
            return np.full(len(rows), UNKNOWN, np.int64)
        places = rows % len(self._rows)
        found: Array = np.where(self._rows[places] == rows, self._versions[places], UNKNOWN)
        return found

    def fill_values(self, piece: RowUpdate, into: Array) -> None:
        """The values of a piece's rows: those that changed came with it."""
        unchanged = ~piece.changed
        into[unchanged] = self._values[piece.rows[unchanged] % len(self._rows)]
        into[piece.changed] = piece.values

    def store_updates(self, sharding_version: int, pieces: list[RowUpdate], values: list[Array]) -> None:
        """Remember the values of these pieces."""
        if sharding_version != self._sharding_version or any(
            self.replication_ids.get(p.server, p.replication_id) != p.replication_id for p in pieces
        ):
            self._rows[:] = UNKNOWN
            self.replication_ids = {}
        self._sharding_version = sharding_version
        for piece, found in zip(pieces, values, strict=True):
            self.replication_ids[piece.server] = piece.replication_id
            if piece.version >= 0:
                places = piece.rows % len(self._rows)
                self._rows[places], self._versions[places], self._values[places] = piece.rows, piece.version, found
