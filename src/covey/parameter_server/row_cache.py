"""A worker's cache of rows, validated on every use.

A row is cached with the version of its table. A pull sends the versions, and the server returns only rows that have changed
since, so results are the same as without the cache, in every mode. Versions of another sharding or replication id are invalid:
then the cache is cleared.
"""

from __future__ import annotations

import msgspec
import numpy as np

from covey.parameter_server.optimizers import Array

UNKNOWN = -1


class RowUpdate(msgspec.Struct, frozen=True):
    """One server's reply about some rows: which of them changed, their values, and the table's version."""

    server: int
    replication_id: str
    version: int
    rows: Array
    changed: Array
    values: Array


class RowCache:
    """At most `size` rows of one table; row r is stored at index r mod size. Not thread-safe."""

    def __init__(self, width: int, size: int) -> None:
        self._rows = np.full(size, UNKNOWN, np.int64)
        self._versions = np.full(size, UNKNOWN, np.int64)
        self._values = np.zeros((size, width), np.float32)
        self._sharding_version = UNKNOWN
        self.replication_ids: dict[int, str] = {}  # by server

    def cached_versions(self, rows: Array, sharding_version: int) -> Array:
        """Return the version at which each of these rows is cached; `UNKNOWN` if it is not."""
        if sharding_version != self._sharding_version:
            return np.full(len(rows), UNKNOWN, np.int64)
        indexes = rows % len(self._rows)
        found: Array = np.where(self._rows[indexes] == rows, self._versions[indexes], UNKNOWN)
        return found

    def fill_values(self, update: RowUpdate, into: Array) -> None:
        """Write the values of the update's rows to `into`: changed ones from the update, others from the cache."""
        unchanged = ~update.changed
        into[unchanged] = self._values[update.rows[unchanged] % len(self._rows)]
        into[update.changed] = update.values

    def store_updates(self, sharding_version: int, updates: list[RowUpdate], values: list[Array]) -> None:
        """Cache the values of these updates' rows; clear the cache first if sharding or replication id changed."""
        if sharding_version != self._sharding_version or any(
            self.replication_ids.get(u.server, u.replication_id) != u.replication_id for u in updates
        ):
            self._rows[:] = UNKNOWN
            self.replication_ids = {}
        self._sharding_version = sharding_version
        for update, found in zip(updates, values, strict=True):
            self.replication_ids[update.server] = update.replication_id
            if update.version >= 0:
                indexes = update.rows % len(self._rows)
                self._rows[indexes], self._versions[indexes], self._values[indexes] = update.rows, update.version, found
