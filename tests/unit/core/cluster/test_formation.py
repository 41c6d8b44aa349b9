"""When a cluster is complete, and what everyone is told about its place."""

from __future__ import annotations

from covey.core.cluster import formation
from covey.core.cluster.state import ClusterState
from covey.core.messages import Assignment, RankAssigned
from covey.core.parameter_server.sharding import initial_sharding
from covey.core.types import AgentInfo, ClusterSettings, Host, Member, Role

NEAR, FAR = Host("boot-near", "box", "10.0.0.1"), Host("boot-far", "box", "10.0.0.2")


def cluster(workers: int, servers: int, *members: Member) -> ClusterState:
    made = ClusterState("c1", ClusterSettings(workers, servers))
    for member in members:
        made.add(member)
    return made


def worker(node_id: str, host: Host = NEAR, agent: str = "") -> Member:
    return Member(Role.WORKER, node_id, f"life of {node_id}", host, agent=agent)


def test_nobody_is_here_yet() -> None:
    plan, reason = formation.decide_formation(cluster(2, 1))
    assert plan is None and reason == "2 workers missing, 1 pserver missing"
    assert formation.describe_missing(cluster(2, 1)) == "2 workers missing, here: nobody; 1 pserver missing, here: nobody"


def test_those_who_waited_in_vain_are_told_who_was_there() -> None:
    waiting = cluster(30, 0, *(worker(f"w{n}") for n in range(25)))
    said = formation.describe_missing(waiting)
    assert said.startswith("5 workers missing, here: worker:w0, worker:w1, worker:w2, ") and said.endswith(
        "worker:w19 and 5 more"
    )


def test_both_kinds_of_server_count_as_one() -> None:
    servers = [Member(Role.PSERVER, "0", "a", NEAR, rank=0), Member(Role.SERVER, "x", "b", NEAR)]
    plan, reason = formation.decide_formation(cluster(1, 2, worker("0"), *servers))
    assert plan is not None and plan.ranks == {"worker:0": 0, "pserver:0": 0, "server:x": 1}
    assert reason == "all 3 nodes are here"


def test_a_node_is_told_its_rank_the_world_and_its_place_on_its_host() -> None:
    formed = cluster(3, 1, worker("a", FAR), worker("b", NEAR), worker("c", NEAR), Member(Role.PSERVER, "s", "l", NEAR))
    plan, _ = formation.decide_formation(formed)
    assert plan is not None
    formed.assign_ranks(plan.ranks)
    formed.generation = 1
    layout = formation.HostLayout(formed)
    told = {member.name: layout.make_rank_assigned(member) for member in formed.members.values()}
    assert told == {
        "worker:b": RankAssigned(generation=1, rank=0, world=3, local_rank=0, local_world=2),
        "worker:c": RankAssigned(generation=1, rank=1, world=3, local_rank=1, local_world=2),
        "worker:a": RankAssigned(generation=1, rank=2, world=3, local_rank=0, local_world=1),
        "pserver:s": RankAssigned(generation=1, rank=0, world=1, local_rank=0, local_world=1, workers=3),
    }


def test_an_agent_is_told_which_ranks_to_run_and_where_rank_0_is() -> None:
    formed = cluster(3, 0, worker("far/0", FAR, "far"), worker("near/0", NEAR, "near"), worker("near/1", NEAR, "near"))
    formed.agents = {
        "far": AgentInfo("far", "lf", FAR, 1, meet_port=1111),
        "near": AgentInfo("near", "ln", NEAR, 2, meet_port=2222),
    }
    plan, _ = formation.decide_formation(formed)
    assert plan is not None
    formed.assign_ranks(plan.ranks)
    formed.generation = 1
    layout = formation.HostLayout(formed)
    near, far = layout.make_desired_children(formed.agents["near"]), layout.make_desired_children(formed.agents["far"])
    assert near.assignments == [Assignment("0", 0, 1, 0), Assignment("1", 1, 1, 1)] and near.local_world == 2
    assert far.assignments == [Assignment("2", 2, 1, 0)] and far.local_world == 1
    assert (near.master_address, near.master_port) == (far.master_address, far.master_port) == ("10.0.0.1", 2222)
    assert [(start.host_index, start.host_count, start.world) for start in (near, far)] == [(0, 2, 3), (1, 2, 3)]


def laid_out(*members: Member, servers: int = 0) -> tuple[ClusterState, formation.HostLayout]:
    """A cluster that has formed of these, in its third generation."""
    made = cluster(sum(m.role is Role.WORKER for m in members), servers, *members)
    made.generation = 3
    return made, formation.HostLayout(made)


def test_a_spare_is_told_the_world_without_a_place_in_it() -> None:
    spares = [Member(Role.SPARE, str(number), "l", host, rank=number) for number, host in enumerate((NEAR, FAR))]
    made, layout = laid_out(worker("0", NEAR), worker("1", NEAR), *spares)
    assert [layout.make_rank_assigned(spare) for spare in spares] == [
        RankAssigned(3, -1, 2, -1, 2),
        RankAssigned(3, -1, 2, -1, 0),
    ]
    made.sharing = initial_sharding(2)
    assert layout.make_rank_assigned(spares[0]).sharding == initial_sharding(2)


def test_who_comes_again_is_told_how_often_and_who_was_promoted_as_whom() -> None:
    again = Member(Role.WORKER, "5", "l", NEAR, rank=0, seat=5, since=2, local_rank=0, restarts=4, lives=1, incarnation=6)
    server = Member(Role.PSERVER, "0", "l", NEAR, rank=0, seat=0, local_rank=0, restarts=4, lives=1)
    _, layout = laid_out(again, server, servers=1)
    assert layout.make_rank_assigned(again) == RankAssigned(3, 0, 1, 0, 1, restarts=4, member_index=5, since_generation=2)
    assert layout.make_rank_assigned(server).restarts == 1, "of a server: since everyone last started"
    again.process = "spare:0.1"
    assert (layout.make_rank_assigned(again).node_id, layout.make_rank_assigned(again).incarnation) == ("5", 6)


def test_a_server_that_is_coming_learns_with_whom_it_will_share_and_others_when_it_is_here() -> None:
    servers = [Member(Role.PSERVER, str(rank), "l", NEAR, rank=rank, seat=rank) for rank in range(3)]
    made, layout = laid_out(worker("0"), *servers, servers=2)
    made.coming = (2,)
    coming = layout.make_rank_assigned(servers[2]).sharding
    assert coming is not None and (coming.version, coming.ring, set(coming.owners)) == (0, (0, 1, 2), {0, 1})
    assert (
        layout.make_rank_assigned(servers[0]).sharding is None
        and layout.make_rank_assigned(made.members_in_role(Role.WORKER)[0]).sharding is None
    )
    made.coming, made.sharing = (), initial_sharding(3)
    assert {layout.make_rank_assigned(member).sharding for member in made.members.values()} == {initial_sharding(3)}


def test_a_host_without_workers_is_told_so() -> None:
    made, layout = laid_out(worker("0", NEAR, "near"), Member(Role.SPARE, "0", "", FAR, rank=0, agent="far"))
    made.agents = {"far": AgentInfo("far", "lf", FAR, 0, meet_port=1111, spares=1)}
    told = layout.make_desired_children(made.agents["far"])
    assert (told.host_index, told.host_count, told.local_world, told.world) == (0, 1, 0, 1)
    assert told.master_port == 1111, "where nobody knows the first worker's agent"
    assert [a.name for a in told.assignments] == ["spare:0"]


def test_one_node_is_here() -> None:
    assert formation.decide_formation(cluster(1, 0, worker("0")))[1] == "the only node is here"
