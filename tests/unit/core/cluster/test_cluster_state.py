"""Indexes of members, free slots of agents, and members that are restored from the journal."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster

from covey.core import types

BOX, OTHER = types.Host("boot-box", "box", "10.0.0.1"), types.Host("boot-other", "other", "10.0.0.2")


def cluster_members(*members: types.Member, servers: int = 0) -> EditableCluster:
    made = EditableCluster(types.ClusterSettings(2, servers), phase=types.Phase.READY, generation=1)
    for member in members:
        made.add(member)
    return made


def child(rank: int, role: types.Role = types.Role.WORKER, **more: Any) -> types.Member:
    usual: dict[str, Any] = {"rank": rank, "agent": "a", "state": types.NodeState.ALIVE}
    return types.Member(role, str(rank), "", BOX, **(usual | more))


def test_each_rank_has_one_member() -> None:
    made = cluster_members(child(0), child(1))
    assert [member.rank for rank in range(3) if (member := made.member_at_rank(types.Role.WORKER, rank))] == [0, 1]
    with pytest.raises(AssertionError, match="would be there twice"):
        made.add(types.Member(types.Role.WORKER, "another name", "", BOX, rank=0))
    with pytest.raises(AssertionError, match="would be there twice"):
        made.add(types.Member(types.Role.WORKER, "0", "", BOX, rank=7))


def test_moved_child_belongs_to_new_agent() -> None:
    made = cluster_members(child(0), child(1))
    made.table.move_to_agent(made.worker("1"), types.AgentInfo("b", "life", OTHER, 1))
    assert [m.node_id for m in made.children("a")] == ["0"] and [m.node_id for m in made.children("b")] == ["1"]
    assert made.members[(types.Role.WORKER, "1")].host == OTHER


def test_free_slots_are_registered_slots_without_running_members() -> None:
    made = cluster_members(child(0), child(1, state=types.NodeState.DEAD), child(0, types.Role.PSERVER), servers=1)
    made.add_agent(types.AgentInfo("a", "life", BOX, 2, servers=3, connection=1))
    assert made.free_slots_by_agent(types.Role.WORKER) == {"a": 1} and made.free_slots_by_agent(types.Role.PSERVER) == {"a": 2}
    made.change_agent("a", slots=1)
    assert made.free_slots_by_agent(types.Role.WORKER) == {}
    for away in (types.AgentInfo("a", "life", BOX, 2), types.AgentInfo("a", "life", BOX, 2, connection=1, is_leaving=True)):
        made.add_agent(away)
        assert made.free_slots_by_agent(types.Role.WORKER) == {}


def test_restore_ignores_members_beyond_recorded_world() -> None:
    stored_records: tuple[types.Record, ...] = (
        types.AgentRecord.from_agent(types.AgentInfo("a", "life", BOX, 3)),
        *(types.MemberRecord.from_member(child(rank)) for rank in range(3)),
        *(types.MemberRecord.from_member(child(rank, types.Role.PSERVER)) for rank in range(3)),
        types.MemberRecord.from_member(child(9, types.Role.SPARE)),
    )

    def taken_over(world: int, coming: tuple[int, ...] = ()) -> EditableCluster:
        made, record = cluster_members(servers=2), types.ClusterRecord("c", "job", 3, 2, types.Phase.READY, 1, world=world)
        made.set(joining_servers=coming)
        made.table.restore_members((record, *stored_records), record, made.server_resize.server_ranks(), 7.0)
        return made

    made = taken_over(2)
    assert sorted(made.members) == [
        (types.Role.PSERVER, "0"),
        (types.Role.PSERVER, "1"),
        (types.Role.SPARE, "9"),
        (types.Role.WORKER, "0"),
        (types.Role.WORKER, "1"),
    ]
    assert {member.state for member in made.members.values()} == {types.NodeState.SUSPECT}
    assert made.last_heartbeat_at(made.agents["a"]) == 7.0
    assert {made.last_heartbeat_at(member) for member in made.members.values()} == {7.0}
    assert taken_over(-1).size(types.Role.WORKER) == 3, "a world that never changed has all of them"
    coming = taken_over(-1, coming=(2,))
    assert coming.size(types.Role.PSERVER) == 3 and coming.size(types.Role.WORKER) == 3


def test_record_has_world_size_after_resize() -> None:
    made = cluster_members(child(0), child(1))
    assert made.record().world == -1
    made.set(resized_generation=1)
    assert made.record().world == 2
