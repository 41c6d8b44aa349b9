"""Slots: every row has one owner after any sequence of scalings, and the number of moves is minimal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.parameter_server.sharding import (
    SLOTS,
    SlotOwners,
    assign_initial_slots,
    count_slot_rows,
    initial_sharding,
    rebalance_slots,
    replica_holder,
    slot_of,
    slot_row_range,
)

SERVERS = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)
ROWS = st.integers(1, 5000)


@given(ROWS, st.booleans())
def test_every_row_is_in_exactly_one_slot(rows: int, striped: bool) -> None:
    found = [slot_of(row, rows, striped) for row in range(rows)]
    assert [found.count(slot) for slot in range(SLOTS)] == [count_slot_rows(slot, rows, striped) for slot in range(SLOTS)]
    if not striped:
        assert all(first <= row < last for row, slot in enumerate(found) for first, last in [slot_row_range(slot, rows)])


@given(st.lists(SERVERS, min_size=1, max_size=8))
def test_every_slot_has_one_owner_and_loads_are_even_after_any_scaling(sequence: list[list[int]]) -> None:
    owners = assign_initial_slots(sequence[0])
    check(owners, sequence[0])
    for servers in sequence[1:]:
        before = owners
        owners, moves = rebalance_slots(before, servers)
        check(owners, servers)
        moved = {move.slot: move for move in moves}
        assert len(moved) == len(moves), "a slot moves at most once"
        for slot in range(SLOTS):
            if slot in moved:
                assert (moved[slot].old_owner, moved[slot].new_owner) == (before[slot], owners[slot]) and before[
                    slot
                ] != owners[slot]
            else:
                assert before[slot] == owners[slot]
        assert len(moves) == minimal_moves(before, servers)


def check(owners: SlotOwners, servers: list[int]) -> None:
    shares = [owners.count(server) for server in servers]
    assert len(owners) == SLOTS == sum(shares), "every slot is owned by one of the servers"
    assert max(shares) - min(shares) <= 1


def minimal_moves(before: SlotOwners, servers: list[int]) -> int:
    """Return the number of slots that must move for even loads."""
    least, over = divmod(SLOTS, len(servers))
    held = sorted((before.count(server) for server in servers), reverse=True)
    return SLOTS - sum(min(count, least + (position < over)) for position, count in enumerate(held))


@given(SERVERS)
def test_replica_is_on_another_server_and_each_server_holds_one(servers: list[int]) -> None:
    holders = [replica_holder(server, servers) for server in servers]
    if len(servers) == 1:
        assert holders == [None]
    else:
        assert sorted(h for h in holders if h is not None) == sorted(servers)
        assert all(h != server for h, server in zip(holders, servers, strict=True))


def test_initial_sharding_has_contiguous_slots_and_replicas_on_the_next_server() -> None:
    sharding = initial_sharding(3)
    assert (sharding.version, sharding.ring, sharding.leaving) == (0, (0, 1, 2), ())
    assert sharding.owners == assign_initial_slots([0, 1, 2])
    assert [sharding.owners.count(server) for server in range(3)] == [86, 85, 85]
    assert list(sharding.owners) == sorted(sharding.owners)
    assert [replica_holder(server, sharding.ring) for server in range(3)] == [1, 2, 0]


@pytest.mark.parametrize("wrong", [[], [1, 1], list(range(SLOTS + 1))], ids=["none", "duplicate", "too many"])
def test_slots_of_no_duplicate_or_too_many_servers_fail_an_assertion(wrong: list[int]) -> None:
    with pytest.raises(AssertionError):
        assign_initial_slots(wrong)
    with pytest.raises(AssertionError):
        rebalance_slots(assign_initial_slots([0]), wrong)
    most = list(range(SLOTS))
    assert assign_initial_slots(most) == tuple(most) and sorted(rebalance_slots(assign_initial_slots([0]), most)[0]) == most
