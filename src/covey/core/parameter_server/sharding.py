"""Which server owns which rows of a parameter, where their copy lies, and what moves when servers come and go.

Every parameter is cut into the same number of slots, and a slot has one owner: so every row has exactly one, whatever happens
to the servers. A table whose rows are asked for one by one is *striped* (row r lies in slot r mod SLOTS), because the rows in
demand tend to lie together; a parameter that is moved as a whole is cut into contiguous spans, so that a server's part is few
pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

SLOTS: Final = 256  # and so at most this many servers

SlotOwners = tuple[int, ...]  # by slot: the server's rank
ServerRanks = tuple[int, ...]


class Sharding(msgspec.Struct, frozen=True):
    """Who owns which slot. Servers and workers act by the same version: whoever asks by an older one is told the newer."""

    version: int
    owners: SlotOwners
    ring: ServerRanks  # who hold each other's copies
    leaving: ServerRanks = ()  # who own nothing any more, but may still hold what moves

    @property
    def servers(self) -> set[int]:
        """Everyone who may be asked for something."""
        return {*self.owners, *self.ring, *self.leaving}


def initial_sharding(servers: int) -> Sharding:
    """As a cluster begins, where nothing else was said."""
    return Sharding(0, assign_initial_slots(range(servers)), tuple(range(servers)))


class SlotMove(msgspec.Struct, frozen=True):
    """A slot that changes hands."""

    slot: int
    old_owner: int
    new_owner: int


def assign_initial_slots(servers: Sequence[int]) -> SlotOwners:
    """The first layout: each server owns one run of slots."""
    assert 0 < len(servers) <= SLOTS and len(set(servers)) == len(servers)
    return tuple(servers[slot * len(servers) // SLOTS] for slot in range(SLOTS))


def rebalance_slots(owners: SlotOwners, servers: Sequence[int]) -> tuple[SlotOwners, list[SlotMove]]:
    """The layout for another set of servers, and the fewest moves that lead to it. Shares differ by at most one slot."""
    assert 0 < len(servers) <= SLOTS and len(set(servers)) == len(servers)
    held = {server: [slot for slot, owner in enumerate(owners) if owner == server] for server in servers}
    least, over = divmod(SLOTS, len(servers))
    fullest = sorted(servers, key=lambda server: (-len(held[server]), server))
    share = {server: least + (place < over) for place, server in enumerate(fullest)}
    homeless = [slot for slot, owner in enumerate(owners) if owner not in held]
    for server in servers:
        homeless += held[server][share[server] :]
    found, moves = list(owners), []
    takers = [server for server in sorted(servers) for _ in range(share[server] - len(held[server]))]
    for slot, taker in zip(sorted(homeless), takers, strict=True):
        moves.append(SlotMove(slot, owners[slot], taker))
        found[slot] = taker
    return tuple(found), moves


def replica_holder(server: int, servers: Collection[int]) -> int | None:
    """Who holds the copy of a server's rows: the next in the ring; None for a server that is alone."""
    ring = sorted(servers)
    return ring[(ring.index(server) + 1) % len(ring)] if len(ring) > 1 else None


def slot_of(row: Any, rows: int, striped: bool) -> Any:
    """The slot of a row of a parameter that has so many; of an array of rows, an array."""
    return row % SLOTS if striped else ((row + 1) * SLOTS - 1) // rows


def slot_row_range(slot: int, rows: int) -> tuple[int, int]:
    """First and last (not included) row of a slot of a parameter that is not striped."""
    return rows * slot // SLOTS, rows * (slot + 1) // SLOTS


def count_slot_rows(slot: int, rows: int, striped: bool) -> int:
    """How many rows a slot has."""
    if striped:
        return (rows - slot + SLOTS - 1) // SLOTS
    first, last = slot_row_range(slot, rows)
    return last - first
