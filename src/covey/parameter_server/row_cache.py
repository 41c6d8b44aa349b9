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


class Piece(msgspec.Struct, frozen=True):
    """What one server said about some rows: which of them changed, and their values. `number` is that of the last change."""

    server: int
    origin: str
    number: int
    rows: Array
    changed: Array
    values: Array


class Cache:
    """At most `size` rows of one table; row r can only lie at place r mod size. Used by one thread."""

    def __init__(self, width: int, size: int) -> None:
        self._rows = np.full(size, UNKNOWN, np.int64)
        self._numbers = np.full(size, UNKNOWN, np.int64)
        self._values = np.zeros((size, width), np.float32)
        self._sharing = UNKNOWN
        self.origins: dict[int, str] = {}  # by server

    def numbers(self, rows: Array, sharing: int) -> Array:
        """The number at which each of these rows is known here."""
        if sharing != self._sharing:
            return np.full(len(rows), UNKNOWN, np.int64)
        places = rows % len(self._rows)
        found: Array = np.where(self._rows[places] == rows, self._numbers[places], UNKNOWN)
        return found

    def fill(self, piece: Piece, into: Array) -> None:
        """The values of a piece's rows: those that changed came with it."""
        kept = ~piece.changed
        into[kept] = self._values[piece.rows[kept] % len(self._rows)]
        into[piece.changed] = piece.values

    def keep(self, sharing: int, pieces: list[Piece], values: list[Array]) -> None:
        """Remember the values of these pieces."""
        if sharing != self._sharing or any(self.origins.get(p.server, p.origin) != p.origin for p in pieces):
            self._rows[:] = UNKNOWN
            self.origins = {}
        self._sharing = sharing
        for piece, found in zip(pieces, values, strict=True):
            self.origins[piece.server] = piece.origin
            if piece.number >= 0:
                places = piece.rows % len(self._rows)
                self._rows[places], self._numbers[places], self._values[places] = piece.rows, piece.number, found
