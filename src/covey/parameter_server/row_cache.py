"""A worker's cache of rows, validated on every use.

A row is cached with the version (update count) of its table. A pull sends the versions, and the server returns only rows that
may have changed since, so the result is the same as without the cache. The cache is cleared if the sharding changes, or if a
server's replication id changes, as after the server restored or loaded its rows.
"""

from __future__ import annotations

import msgspec
import numpy as np

from covey.parameter_server.optimizers import Array

UNKNOWN = -1


class RowUpdate(msgspec.Struct, frozen=True):
    """One server's reply to `PullChanged`, with the requested row numbers."""

    server: int
    replication_id: str
    version: int  # of the server's table; negative: the rows cannot be cached
    rows: Array  # row numbers
    changed: Array  # of each row: whether it may have changed
    values: Array  # only of the changed rows


class RowCache:
    """At most `size` rows of one float32 table; row r is stored at index r mod size. Not thread-safe."""

    def __init__(self, width: int, size: int) -> None:
        self._rows = np.full(size, UNKNOWN, np.int64)
        self._versions = np.full(size, UNKNOWN, np.int64)
        self._values = np.zeros((size, width), np.float32)
        self._sharding_version = UNKNOWN
        self.replication_ids: dict[int, str] = {}  # by server

    def cached_versions(self, rows: Array, sharding_version: int) -> Array:
        """Return the version at which each row is cached; `UNKNOWN` if it is not, or if the cache is for another sharding."""
        if sharding_version != self._sharding_version:
            return np.full(len(rows), UNKNOWN, np.int64)
        indexes = rows % len(self._rows)
        found: Array = np.where(self._rows[indexes] == rows, self._versions[indexes], UNKNOWN)
        return found

    def fill_values(self, update: RowUpdate, into: Array) -> None:
        """Write the values of the update's rows to `into`: changed rows from the update, the others from the cache."""
        unchanged = ~update.changed
        into[unchanged] = self._values[update.rows[unchanged] % len(self._rows)]
        into[update.changed] = update.values

    def store_updates(self, sharding_version: int, updates: list[RowUpdate], values: list[Array]) -> None:
        """Cache the rows of these updates with their values, one array per update. Clear the cache first if the sharding or a
        replication id has changed. Rows of updates with a negative version are not cached."""
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
