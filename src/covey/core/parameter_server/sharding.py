"""Sharding: the owner of each slot, the replica holder of each server, and the moves when the set of servers changes.

Every parameter is divided into the same number of slots, and each slot has one owner, so every row has exactly one owner. A
table whose rows are pulled individually is *striped* (row r is in slot r mod SLOTS), because rows in demand tend to have
adjacent numbers. A parameter that is pulled completely is divided into contiguous ranges, so that a server has few ranges.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

SLOTS: Final = 256  # also the maximum number of servers

SlotOwners = tuple[int, ...]  # by slot: the server's rank
ServerRanks = tuple[int, ...]


class Sharding(msgspec.Struct, frozen=True):
    """Owner of each slot, with a version."""

    version: int
    owners: SlotOwners
    ring: ServerRanks  # servers among which each holds the replica of the one before
    leaving: ServerRanks = ()  # servers that own no slot any more, but may still have slots to hand over

    @property
    def servers(self) -> set[int]:
        return {*self.owners, *self.ring, *self.leaving}


def initial_sharding(servers: int) -> Sharding:
    """Return the sharding of a new cluster: version 0, servers 0 to `servers` - 1 (at least one, at most `SLOTS`)."""
    return Sharding(0, assign_initial_slots(range(servers)), tuple(range(servers)))


class SlotMove(msgspec.Struct, frozen=True):
    """A slot that changes its owner."""

    slot: int
    old_owner: int
    new_owner: int


def assign_initial_slots(servers: Sequence[int]) -> SlotOwners:
    """Return the owners in a new cluster: each server has one contiguous run of slots, in the order given.

    There must be 1 to `SLOTS` different servers. The lengths of the runs differ by at most one.
    """
    assert 0 < len(servers) <= SLOTS and len(set(servers)) == len(servers)
    return tuple(servers[slot * len(servers) // SLOTS] for slot in range(SLOTS))


def rebalance_slots(owners: SlotOwners, servers: Sequence[int]) -> tuple[SlotOwners, list[SlotMove]]:
    """Return the owners for another set of servers, and the moves from `owners` to them, as few as possible.

    Afterwards the numbers of slots of two servers differ by at most one. There must be 1 to `SLOTS` different servers.
    """
    assert 0 < len(servers) <= SLOTS and len(set(servers)) == len(servers)
    held = {server: [slot for slot, owner in enumerate(owners) if owner == server] for server in servers}
    least, over = divmod(SLOTS, len(servers))
    fullest = sorted(servers, key=lambda server: (-len(held[server]), server))
    share = {server: least + (position < over) for position, server in enumerate(fullest)}
    unassigned = [slot for slot, owner in enumerate(owners) if owner not in held]
    for server in servers:
        unassigned += held[server][share[server] :]
    found, moves = list(owners), []
    receivers = [server for server in sorted(servers) for _ in range(share[server] - len(held[server]))]
    for slot, receiver in zip(sorted(unassigned), receivers, strict=True):
        moves.append(SlotMove(slot, owners[slot], receiver))
        found[slot] = receiver
    return tuple(found), moves


def replica_holder(server: int, servers: Collection[int]) -> int | None:
    """Return the server that holds the replica of a server's rows: the next by rank, after the last the first.

    Return None if `servers` has fewer than two; otherwise raise `ValueError` if `server` is not among them.
    """
    ring = sorted(servers)
    return ring[(ring.index(server) + 1) % len(ring)] if len(ring) > 1 else None


def slot_of(row: Any, rows: int, striped: bool) -> Any:
    """Return the slot of row number `row` of a parameter with `rows` rows; for an array of row numbers, an array."""
    return row % SLOTS if striped else ((row + 1) * SLOTS - 1) // rows


def slot_row_range(slot: int, rows: int) -> tuple[int, int]:
    """Return the first row and the end (exclusive) of a slot of a parameter with `rows` rows that is not striped."""
    return rows * slot // SLOTS, rows * (slot + 1) // SLOTS


def count_slot_rows(slot: int, rows: int, striped: bool) -> int:
    """Return the number of rows in a slot of a parameter with `rows` rows; 0 if the slot is empty."""
    if striped:
        return (rows - slot + SLOTS - 1) // SLOTS
    first, last = slot_row_range(slot, rows)
    return last - first
