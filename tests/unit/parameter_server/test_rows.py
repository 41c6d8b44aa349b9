"""Rows alone: states, shardings, generations, and equality of rows with the same version."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.unit.parameter_server.server_parts import (
    ALONE,
    DECLARE,
    EMPTY,
    LOWER,
    PAIR,
    UPPER,
    Call,
    all_slots,
    halves,
    hand_over,
    pack_body,
    push,
)

from covey.core.parameter_server.sharding import SLOTS
from covey.errors import UsageError
from covey.parameter_server.messages import DetachSlots, LoadRows, PullValues, ReleaseSlots, ReplicatedChange, RowSelection
from covey.parameter_server.optimizers import Array
from covey.parameter_server.rows import TRANSITIONS, Rows, RowsState, SlotsMovedError, VersionedRows
from covey.parameter_server.shard_set import ShardSet


def rows_of_all_slots() -> Rows:
    rows = Rows(ALONE, 0, all_slots())
    with rows.condition:
        rows.apply(DECLARE, EMPTY, owned=True)
    return rows


def state(rows: Rows) -> RowsState:
    return rows.state


def test_first_process_of_a_server_is_serving_with_its_slots() -> None:
    rows = Rows(PAIR, 1, halves())
    assert state(rows) is RowsState.SERVING and rows.own.shard_set.slots == set(UPPER)


def test_server_that_owns_no_slots_is_serving() -> None:
    assert Rows(PAIR, 1, all_slots(0)).state is RowsState.SERVING


def test_restarted_server_has_no_rows_until_it_is_restored() -> None:
    before = rows_of_all_slots()
    rows = Rows(ALONE, 0, all_slots(), restoring=True)
    assert state(rows) is RowsState.RESTORING and not rows.own.shard_set.slots
    replica, arrays = before.own.pack()
    with rows.condition:
        rows.restore(replica, pack_body(arrays))
    assert state(rows) is RowsState.SERVING and rows.own.shard_set.parameter_names == ["t"]
    assert (rows.own.replication_id, rows.own.change_count) == (before.own.replication_id, 1)


def test_server_restored_after_a_sharding_change_is_moving() -> None:
    replica, arrays = rows_of_all_slots().own.pack()
    rows = Rows(PAIR, 0, halves(version=1), restoring=True)
    with rows.condition:
        rows.restore(replica, pack_body(arrays))
    assert state(rows) is RowsState.MOVING


def test_server_is_moving_until_it_has_detached_slots_of_other_servers() -> None:
    rows = rows_of_all_slots()
    with rows.condition:
        rows.adopt(halves(version=1))
        assert state(rows) is RowsState.MOVING
        rows.apply(DetachSlots(UPPER), EMPTY, owned=True)
    assert state(rows) is RowsState.SERVING
    assert [shard.slots for shard in rows.own.shard_set.detached] == [set(UPPER)]
    with rows.condition:
        rows.apply(ReleaseSlots(UPPER), EMPTY, owned=True)
    assert not rows.own.shard_set.detached and rows.own.change_count == 3


def test_server_is_moving_until_other_servers_have_handed_over_its_slots() -> None:
    rows = Rows(PAIR, 0, halves())
    request, body = hand_over(UPPER, version=1, generation=7)
    with rows.condition:
        rows.apply(DECLARE, EMPTY, owned=True)
        rows.adopt(all_slots(0, version=1))
        assert state(rows) is RowsState.MOVING
        assert rows.apply(request, body, owned=True) and state(rows) is RowsState.SERVING
        assert not rows.apply(request, body, owned=True), "the repeated request changes nothing"
    assert rows.own.change_count == 2 and rows.newest_generations == [7]


def test_no_state_returns_to_restoring() -> None:
    assert TRANSITIONS.keys() == set(RowsState)
    assert not any(RowsState.RESTORING in following for following in TRANSITIONS.values())


def test_rows_of_present_slots_can_be_read_while_other_slots_are_missing() -> None:
    rows = Rows(PAIR, 0, halves())
    lower, upper = (np.array([slots[0]], np.int64).view(np.uint8) for slots in (LOWER, UPPER))
    with rows.condition:
        rows.adopt(all_slots(0, version=1))
        assert rows.has_rows([RowSelection("t", 1)], lower)
        assert not rows.has_rows([RowSelection("t", 1)], upper)
        assert not rows.has_rows([RowSelection("w", -1)], EMPTY), "a complete parameter needs all slots"


def test_wait_raises_slots_moved_when_a_newer_sharding_is_adopted() -> None:
    rows = Rows(ALONE, 0, all_slots())

    def wait() -> None:
        with rows.condition:
            rows.wait_unless_resharded(PullValues(0, []), lambda: False)

    call = Call(wait)
    assert call.is_waiting()
    with rows.condition:
        rows.adopt(all_slots(version=1))
    with pytest.raises(SlotsMovedError):
        call.wait()


def test_wait_for_a_step_ends_when_all_ranks_have_pushed_the_previous_one() -> None:
    rows = rows_of_all_slots()

    def wait() -> ShardSet:
        with rows.condition:
            return rows.wait_for_step(PullValues(1, []), 1)

    call = Call(wait)
    assert call.is_waiting()
    with rows.condition:
        rows.apply(*push(0, 3), owned=True)
        assert rows.own.shard_set.step == 0, "complete, but not applied before it is read"
    assert call.wait() is rows.own.shard_set and rows.own.shard_set.step == 1


def test_newest_generation_of_a_rank_never_decreases() -> None:
    rows = Rows(ALONE, 0, all_slots())
    assert [rows.record_generation(0, generation) for generation in (3, 5, 4)] == [3, 5, 5]


def test_repeated_change_is_not_counted() -> None:
    rows = rows_of_all_slots()
    with rows.condition:
        assert [rows.apply(*push(0, 3), owned=True) for _ in range(2)] == [True, False]
        assert not rows.apply(DECLARE, EMPTY, owned=True)
    assert rows.own.change_count == 2


def test_refused_change_changes_nothing() -> None:
    rows = rows_of_all_slots()
    with rows.condition, pytest.raises(UsageError):
        rows.apply(*push(7, 3), owned=True)
    assert rows.own.change_count == 1


def test_loaded_rows_have_another_replication_id() -> None:
    rows = rows_of_all_slots()
    old, loaded, request = rows.own.replication_id, ShardSet(ALONE, 0, range(SLOTS)), LoadRows(3, "/checkpoint")
    with rows.condition:
        rows.replace(loaded, request)
    assert rows.own.shard_set is loaded and rows.own.replication_id != old and rows.last_load == request


def test_equal_changes_make_equal_rows() -> None:
    own, replica = (VersionedRows(ShardSet(ALONE, 0, range(SLOTS))) for _ in range(2))
    changes: list[tuple[ReplicatedChange, Array]] = [
        (DECLARE, EMPTY),
        push(0, 1, 2),
        push(1, 2, 3),
        (DetachSlots(LOWER), EMPTY),
        push(2, 200),
        (ReleaseSlots(LOWER), EMPTY),
    ]
    for change, body in changes:
        assert own.apply(change, body, owned=False) and replica.apply(change, body.copy(), owned=True)
    packed = [rows.pack() for rows in (own, replica)]
    assert own.change_count == replica.change_count == len(changes)
    assert len({msgspec.msgpack.encode(message.state) for message, _ in packed}) == 1
    assert np.array_equal(pack_body(packed[0][1]), pack_body(packed[1][1]))


def test_handed_over_rows_are_copied_if_the_body_is_not_owned() -> None:
    request, body = hand_over(UPPER, version=1)
    before = body.copy()
    rows = VersionedRows(ShardSet(PAIR, 0))
    rows.apply(request, body, owned=False)
    rows.apply(*push(0, UPPER[0]), owned=True)
    rows.shards_at_step(1)
    assert np.array_equal(body, before)
