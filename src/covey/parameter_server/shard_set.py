"""All rows a server holds: one shard, or for a while several.

Slots that came from another server may be at another point of the step than those that were here. Each shard knows for itself
whose gradients it has, so that a push reaches every row once, however rows moved meanwhile; as soon as two shards agree they
become one. What was severed for another server is kept aside, unchanged, until that one has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from covey.core.parameter_server.settings import ConsistencyMode, ServingSettings
from covey.core.parameter_server.sharding import SlotOwners
from covey.errors import UsageError
from covey.parameter_server.array_codec import Face, Piece, parse
from covey.parameter_server.messages import DTYPES, Part, Push, Spec
from covey.parameter_server.optimizers import Array
from covey.parameter_server.row_placement import Placement
from covey.parameter_server.shard import Shard, owned


class Shelf:
    """The shards of one server. Not safe for threads."""

    def __init__(self, serving: ServingSettings, server: int, slots: Iterable[int] = ()) -> None:
        self.serving, self.server = serving, server
        self.shards = [shard] if (shard := Shard(serving, server, slots)).slots else []
        self.going: list[Shard] = []

    @property
    def slots(self) -> frozenset[int]:
        return frozenset().union(*(shard.slots for shard in self.shards))

    @property
    def names(self) -> list[str]:
        """The parameters that all of them have."""
        return [name for name in self.shards[0].tables if self.knows(name)] if self.shards else []

    @property
    def step(self) -> int:
        return min((shard.step for shard in self.shards), default=0)

    def knows(self, name: str) -> bool:
        return bool(self.shards) and all(name in shard.tables for shard in self.shards)

    # -- what workers ask --------------------------------------------------------------------------------------------

    def declare(self, spec: Spec, values: Array) -> bool:
        """A parameter and its first values; whether it was new to anyone."""
        new = [shard for shard in self.shards if spec.name not in shard.tables]
        for shard in self.shards:
            given = values
            if values.nbytes and len(self.shards) > 1:
                face = _Face(spec, _placed(spec, owned(self.server, self.slots)))
                size = face.placement.size(self.server)
                if values.nbytes % size:
                    raise UsageError(f"{spec.name} begins with {values.nbytes} bytes here, for {size} rows")
                given = values.reshape(size, -1)[self._places(shard, face)].reshape(-1)
            shard.declare(spec, given)
        return bool(new)

    def check_spec(self, spec: Spec) -> None:
        for shard in self.shards:
            shard.check_spec(spec)

    def push(self, push: Push, body: Array, *, owned: bool) -> bool:
        """Take a push in, where it is not known; whether it was new to anyone. Raises `UsageError`; nothing changed then."""
        new = [push.rank >= self.serving.workers or not shard.known(push.step, push.rank) for shard in self.shards]
        if not any(new):
            return False
        faces = self._faces()
        pieces = self._split(parse(push.parts, body, faces, self.server), faces)
        gifts = [
            shard.gifts(push, its, owned=owned) if wanted else []
            for shard, its, wanted in zip(self.shards, pieces, new, strict=True)
        ]
        for shard, given, wanted in zip(self.shards, gifts, new, strict=True):
            if wanted:
                shard.push(push.step, push.rank, given)
        if self.serving.mode is not ConsistencyMode.SYNC:
            self.tidy()
        return True

    def complete(self, step: int) -> bool:
        return all(shard.complete(step) for shard in self.shards)

    def ready(self, step: int) -> bool:
        return all(shard.ready(step) for shard in self.shards)

    def reach(self, step: int) -> None:
        for shard in self.shards:
            shard.reach(step)
        self.tidy()

    def pushed(self, rank: int) -> int:
        return min((shard.pushed[rank] for shard in self.shards), default=-1)

    def check(self, parts: list[Part], body: Array) -> None:
        """Raises `UsageError` if these cannot be pulled."""
        parse(parts, body, self._faces(), self.server, values=False)

    def values(self, parts: list[Part], body: Array) -> list[Array]:
        """The values of these parts; those of whole parameters are not copied if that can be."""
        faces = self._faces()
        return [self._values(piece, faces[piece.name]) for piece in parse(parts, body, faces, self.server, values=False)]

    def changed(self, part: Part, body: Array) -> tuple[int, Array, Array]:
        """The number of the last change, which of the rows changed since the numbers that follow them, and their values."""
        faces, half = self._faces(), body.nbytes // 2
        [piece] = parse([part], body[:half], faces, self.server, values=False)
        since = body[half:].view(np.int64)
        if piece.rows is None or len(since) != len(piece.rows):
            raise UsageError(f"{part.name}: so many numbers of changes are needed as there are rows")
        if len(self.shards) > 1:  # which number is meant?
            return -1, np.ones(len(piece.rows), bool), self._values(piece, faces[part.name])
        table = self.shards[0].tables[part.name]
        changed = table.changed(piece.rows, since)
        return table.updates, changed, table.values(piece.rows[changed])

    # -- slots come and go -------------------------------------------------------------------------------------------

    def sever(self, slots: Iterable[int]) -> None:
        """Set these slots aside, as they are."""
        leaving = frozenset(slots)
        for shard in list(self.shards):
            if part := shard.slots & leaving:
                self.going.append(shard.part(part))
                self.shards.remove(shard)
                if rest := shard.slots - leaving:
                    self.shards.append(shard.part(rest))

    def drop(self, slots: Iterable[int]) -> None:
        """Another server has these."""
        gone = frozenset(slots)
        self.going = [shard for shard in self.going if not shard.slots <= gone]

    def adopt(self, state: Any, body: Array) -> None:
        """Slots from another server."""
        shard = Shard(self.serving, self.server, state[0])
        assert not shard.slots & self.slots
        shard.unpack(state[1], body)
        self.shards.append(shard)

    def tidy(self) -> None:
        """Make one of those that agree."""
        while len(self.shards) > 1:
            last = self.shards[-1]
            other = next((shard for shard in self.shards[:-1] if shard.agrees(last)), None)
            if other is None:
                return
            self.shards = [other.join(last), *(s for s in self.shards if s is not other and s is not last)]

    # -- all of it ---------------------------------------------------------------------------------------------------

    def whole(self) -> Shard:
        """All rows in one shard, for a file; what is staged is not in it."""
        found = self.shards[0]
        for shard in self.shards[1:]:
            found = found.join(shard)
        return found

    def pack(self) -> tuple[Any, list[Array]]:
        """Everything, as plain data and arrays."""
        states: list[Any] = []
        arrays: list[Array] = []
        for shard in (*self.shards, *self.going):
            state, its = shard.pack()
            states.append([sorted(shard.slots), state])
            arrays += its
        return [len(self.shards), states], arrays

    def unpack(self, state: Any, body: Array) -> None:
        """Become what `pack` described."""
        count, states = state
        found = []
        for slots, inner in states:
            shard = Shard(self.serving, self.server, slots)
            body = shard.unpack(inner, body)
            found.append(shard)
        self.shards, self.going = found[:count], found[count:]

    # -- several shards ----------------------------------------------------------------------------------------------

    def _faces(self) -> Mapping[str, Face]:
        """The parameters, as if all shards were one."""
        if len(self.shards) == 1:
            return self.shards[0].tables
        owners = owned(self.server, self.slots)
        return {name: _Face(spec := self.shards[0].tables[name].spec, _placed(spec, owners)) for name in self.names}

    def _split(self, pieces: list[Piece], faces: Mapping[str, Face]) -> list[list[Piece]]:
        """What of a message is for which shard."""
        if len(self.shards) == 1:
            return [pieces]
        return [[self._share(shard, piece, faces[piece.name]) for piece in pieces] for shard in self.shards]

    def _share(self, shard: Shard, piece: Piece, face: Face) -> Piece:
        if piece.rows is None:
            values = piece.values[self._places(shard, face)] if len(piece.values) else piece.values
            return Piece(piece.name, None, values, piece.lr)
        here = shard.tables[piece.name].placement.owner(piece.rows) == self.server
        values = piece.values[here] if len(piece.values) else piece.values
        return Piece(piece.name, piece.rows[here], values, piece.lr)

    def _places(self, shard: Shard, face: Face) -> Array:
        """Where a shard's rows lie among all."""
        mine = _placed(face.spec, shard.owners)
        return face.placement.local(mine.numbers(self.server, 0, mine.size(self.server)))

    def _values(self, piece: Piece, face: Face) -> Array:
        tables = [shard.tables[piece.name] for shard in self.shards]
        if len(tables) == 1:
            return tables[0].values(piece.rows)
        count = face.placement.size(self.server) if piece.rows is None else len(piece.rows)
        found = np.empty((count, face.spec.width), DTYPES[face.spec.dtype])
        for shard, table in zip(self.shards, tables, strict=True):
            if piece.rows is None:
                found[self._places(shard, face)] = table.weights
            else:
                here = table.placement.owner(piece.rows) == self.server
                found[here] = table.values(piece.rows[here])
        return found


class _Face(msgspec.Struct, frozen=True):
    spec: Spec
    placement: Placement


def _placed(spec: Spec, owners: SlotOwners) -> Placement:
    return Placement(spec.rows, spec.striped, owners)
