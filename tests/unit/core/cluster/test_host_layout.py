"""Layout of members on hosts: messages with ranks, and with the processes that an agent runs."""

from __future__ import annotations

from tests.unit.core.cluster.editable_cluster import EditableCluster

from covey.core.cluster.formation import decide_formation
from covey.core.cluster.members import HostLayout
from covey.core.messages import Assignment, RankAssigned
from covey.core.parameter_server.sharding import initial_sharding
from covey.core.types import AgentInfo, ClusterSettings, Host, Member, Role

NEAR, FAR = Host("boot-near", "box", "10.0.0.1"), Host("boot-far", "box", "10.0.0.2")


def cluster(workers: int, servers: int, *members: Member) -> EditableCluster:
    made = EditableCluster(ClusterSettings(workers, servers), cluster_id="c1")
    for member in members:
        made.add(member)
    return made


def worker(node_id: str, host: Host = NEAR, agent: str = "") -> Member:
    return Member(Role.WORKER, node_id, f"life of {node_id}", host, agent=agent)


def test_rank_message_has_rank_world_and_local_rank() -> None:
    formed = cluster(3, 1, worker("a", FAR), worker("b", NEAR), worker("c", NEAR), Member(Role.PSERVER, "s", "l", NEAR))
    ranks, _ = decide_formation(formed)
    assert ranks is not None
    formed.table.set_ranks(ranks)
    formed.set(generation=1)
    layout = HostLayout(formed)
    published = {member.name: layout.make_rank_assigned(member) for member in formed.members.values()}
    assert published == {
        "worker:b": RankAssigned(generation=1, rank=0, world=3, local_rank=0, local_world=2),
        "worker:c": RankAssigned(generation=1, rank=1, world=3, local_rank=1, local_world=2),
        "worker:a": RankAssigned(generation=1, rank=2, world=3, local_rank=0, local_world=1),
        "pserver:s": RankAssigned(generation=1, rank=0, world=1, local_rank=0, local_world=1, workers=3),
    }


def test_agent_message_has_its_ranks_and_master_address() -> None:
    formed = cluster(3, 0, worker("far/0", FAR, "far"), worker("near/0", NEAR, "near"), worker("near/1", NEAR, "near"))
    formed.add_agent(AgentInfo("far", "lf", FAR, 1, meet_port=1111))
    formed.add_agent(AgentInfo("near", "ln", NEAR, 2, meet_port=2222))
    ranks, _ = decide_formation(formed)
    assert ranks is not None
    formed.table.set_ranks(ranks)
    formed.set(generation=1)
    layout = HostLayout(formed)
    near, far = layout.make_desired_children(formed.agents["near"]), layout.make_desired_children(formed.agents["far"])
    assert near.assignments == [Assignment("0", 0, 1, 0), Assignment("1", 1, 1, 1)] and near.local_world == 2
    assert far.assignments == [Assignment("2", 2, 1, 0)] and far.local_world == 1
    assert (near.master_address, near.master_port) == (far.master_address, far.master_port) == ("10.0.0.1", 2222)
    assert [(start.host_index, start.host_count, start.world) for start in (near, far)] == [(0, 2, 3), (1, 2, 3)]


def laid_out(*members: Member, servers: int = 0) -> tuple[EditableCluster, HostLayout]:
    """A cluster that has formed of these, in its third generation."""
    made = cluster(sum(m.role is Role.WORKER for m in members), servers, *members)
    made.set(generation=3)
    return made, HostLayout(made)


def test_spare_gets_world_size_without_rank() -> None:
    new = [Member(Role.SPARE, str(number), "l", host, rank=number) for number, host in enumerate((NEAR, FAR))]
    made, layout = laid_out(worker("0", NEAR), worker("1", NEAR), *new)
    spares = made.members_in_role(Role.SPARE)
    assert [layout.make_rank_assigned(spare) for spare in spares] == [
        RankAssigned(3, -1, 2, -1, 2),
        RankAssigned(3, -1, 2, -1, 0),
    ]
    made.set(sharding=initial_sharding(2))
    assert layout.make_rank_assigned(spares[0]).sharding == initial_sharding(2)


def test_rank_message_has_restarts_and_promoted_member() -> None:
    again = Member(
        Role.WORKER,
        "5",
        "l",
        NEAR,
        rank=0,
        member_index=5,
        since_generation=2,
        local_rank=0,
        restarts=4,
        ended_processes=1,
        incarnation=6,
    )
    server = Member(Role.PSERVER, "0", "l", NEAR, rank=0, member_index=0, local_rank=0, restarts=4, ended_processes=1)
    made, layout = laid_out(again, server, servers=1)
    again, server = made.members[(Role.WORKER, "5")], made.members[(Role.PSERVER, "0")]
    assert layout.make_rank_assigned(again) == RankAssigned(3, 0, 1, 0, 1, restarts=4, member_index=5, since_generation=2)
    assert layout.make_rank_assigned(server).restarts == 1, "of a server: since the last full restart"
    made.change(again, promoted_from="spare:0.1")
    assert (layout.make_rank_assigned(again).node_id, layout.make_rank_assigned(again).incarnation) == ("5", 6)


def test_joining_server_gets_future_ring_before_others() -> None:
    new = [Member(Role.PSERVER, str(rank), "l", NEAR, rank=rank, member_index=rank) for rank in range(3)]
    made, layout = laid_out(worker("0"), *new, servers=2)
    servers = made.members_in_role(Role.PSERVER)
    made.set(joining_servers=(2,))
    coming = layout.make_rank_assigned(servers[2]).sharding
    assert coming is not None and (coming.version, coming.ring, set(coming.owners)) == (0, (0, 1, 2), {0, 1})
    assert (
        layout.make_rank_assigned(servers[0]).sharding is None
        and layout.make_rank_assigned(made.members_in_role(Role.WORKER)[0]).sharding is None
    )
    made.set(joining_servers=(), sharding=initial_sharding(3))
    assert {layout.make_rank_assigned(member).sharding for member in made.members.values()} == {initial_sharding(3)}


def test_host_without_workers_gets_local_world_0() -> None:
    made, layout = laid_out(worker("0", NEAR, "near"), Member(Role.SPARE, "0", "", FAR, rank=0, agent="far"))
    made.add_agent(AgentInfo("far", "lf", FAR, 0, meet_port=1111, spares=1))
    published = layout.make_desired_children(made.agents["far"])
    assert (published.host_index, published.host_count, published.local_world, published.world) == (0, 1, 0, 1)
    assert published.master_port == 1111, "if the agent of the first worker is unknown"
    assert [a.name for a in published.assignments] == ["spare:0"]
