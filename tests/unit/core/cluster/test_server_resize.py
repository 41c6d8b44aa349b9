"""Scaling of parameter servers: refusals, transitions and messages."""

from __future__ import annotations

from itertools import product

import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster, training_cluster

from covey.core.cluster import server_resize
from covey.core.cluster.resize import JOIN_TIMEOUT_S, ResizePlan
from covey.core.cluster.server_resize import TRANSITIONS, ServerResizeState
from covey.core.effects import Persist, SchedulerEffect, Send
from covey.core.incidents import Incident, Outcome
from covey.core.messages import ClusterEnded, DesiredChildren, ScaleAccepted, ScaleRequest, ServerInSync, ShardingAssigned
from covey.core.strategy_ladder import RecoveryStrategy
from covey.core.types import ClusterRecord, MemberRecord, Phase, Role


@pytest.mark.parametrize(
    ("scale_request", "sentence"),
    [
        (ScaleRequest(servers=2), "there are 2 parameter servers already"),
        (ScaleRequest(servers=0), "0 parameter servers are not possible: expected 1 to 256"),
        (ScaleRequest(more_servers=2000), "2002 parameter servers are not possible: expected 1 to 256"),
        (
            ScaleRequest(workers=3, servers=3),
            "the number of workers (4) is fixed with parameter servers: only the number of servers can change",
        ),
        (
            ScaleRequest(more_workers=1, more_servers=1),
            "the number of workers (4) is fixed with parameter servers: only the number of servers can change",
        ),
        (
            ScaleRequest(node_ids=["9"]),
            "The node id:9 is illegal. The parameter servers are pserver:0, pserver:1, and only they can be removed",
        ),
        (
            ScaleRequest(node_ids=["0", "pserver:1"]),
            "not all parameter servers can be removed: use covey stop to end the cluster",
        ),
    ],
)
def test_impossible_server_resize_is_refused_with_reason(scale_request: ScaleRequest, sentence: str) -> None:
    made = training_cluster(RecoveryStrategy.IN_PLACE, servers=2)
    assert server_resize.is_server_request(made, scale_request) and server_resize.plan_server_resize(
        made, {0, 1}, scale_request
    ) == (
        None,
        sentence,
    )


def test_server_resize_requires_ready_cluster_with_all_servers_in_sync() -> None:
    made = training_cluster(RecoveryStrategy.IN_PLACE, servers=2)
    assert server_resize.plan_server_resize(made, {0}, ScaleRequest(servers=3))[1] == (
        "the rows of pserver:1 have no replica yet: try again in a moment"
    )
    made.set(joining_servers=(2,))
    assert server_resize.plan_server_resize(made, {0, 1}, ScaleRequest(servers=3))[1].startswith(
        "parameter servers are already being added or removed"
    )
    made.set(joining_servers=(), phase=Phase.HEALING, reason="worker:1 died")
    assert (
        server_resize.plan_server_resize(made, {0, 1}, ScaleRequest(servers=3))[1]
        == "The cluster is not ready. It is healing: worker:1 died"
    )
    bare = training_cluster(RecoveryStrategy.IN_PLACE)
    assert server_resize.plan_server_resize(bare, set(), ScaleRequest(servers=3)) == (
        None,
        "this cluster has no parameter servers",
    )
    assert not server_resize.is_server_request(bare, ScaleRequest(node_ids=["1"])), "where there are none, an id is a worker's"


def test_new_servers_use_least_loaded_agents_and_last_or_named_servers_leave() -> None:
    made = training_cluster(RecoveryStrategy.IN_PLACE, servers=2)
    change, reason = server_resize.plan_server_resize(made, {0, 1}, ScaleRequest(more_servers=2))
    assert (
        change == ResizePlan(["b", "b"], []) and reason == "the number of parameter servers increases from 2 to 4, as requested"
    )
    change, reason = server_resize.plan_server_resize(made, {0, 1}, ScaleRequest(servers=1))
    assert change == ResizePlan([], [made.members[(Role.PSERVER, "1")]])
    assert reason == "the number of parameter servers decreases from 2 to 1, as requested"
    change, _ = server_resize.plan_server_resize(made, {0, 1}, ScaleRequest(node_ids=["pserver:0"]))
    assert change == ResizePlan([], [made.members[(Role.PSERVER, "0")]])
    for agent in ("a", "b"):
        made.change_agent(agent, connection=0)
    no_agent = "no agent can start a server: only covey run can add servers"
    assert server_resize.plan_server_resize(made, {0, 1}, ScaleRequest(servers=3)) == (None, no_agent)


# -- the part -----------------------------------------------------------------------------------------------------------

ALLOWED = [(before, after) for before, states in TRANSITIONS.items() for after in sorted(states)]
FORBIDDEN = sorted(set(product(ServerResizeState, ServerResizeState)) - set(ALLOWED))


def in_sync(cluster: EditableCluster, *ranks: int, now: float = 1.0) -> list[SchedulerEffect]:
    """These servers report that they hold all their rows by the present sharding."""
    for rank in ranks:
        member = cluster.members[(Role.PSERVER, str(rank))]
        report = ServerInSync(cluster.current_sharding.version)
        cluster.server_resize.note_in_sync(cluster.step(now), member, report)
    return cluster.take_effects()


def served() -> EditableCluster:
    """A cluster with two servers in sync; their connections are 20 and 21."""
    cluster = training_cluster(servers=2, connected=True, copies=1)
    in_sync(cluster, 0, 1)
    return cluster


def growing() -> EditableCluster:
    """Server 2 was requested and is started on the second host."""
    cluster = served()
    reply = cluster.server_resize.request(cluster.step(1.0), ScaleRequest(servers=3))
    assert isinstance(reply, ScaleAccepted)
    return cluster


def state(cluster: EditableCluster) -> ServerResizeState:
    return cluster.server_resize.state


def sent_to(effects: list[SchedulerEffect], kind: type) -> list[int]:
    return [effect.connection for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


@pytest.mark.parametrize(("before", "after"), ALLOWED)
def test_an_allowed_transition_is_made(before: ServerResizeState, after: ServerResizeState) -> None:
    part = training_cluster(servers=2).server_resize
    part.state = before
    part._set_state(after)
    assert part.state is after and part.is_resharding is (after is not ServerResizeState.STABLE)


@pytest.mark.parametrize(("before", "after"), FORBIDDEN)
def test_a_forbidden_transition_fails(before: ServerResizeState, after: ServerResizeState) -> None:
    part = training_cluster(servers=2).server_resize
    part.state = before
    with pytest.raises(AssertionError, match=f"no transition from {before} to {after}"):
        part._set_state(after)
    assert part.state is before


def test_new_servers_are_durable_before_the_cluster_and_own_no_rows() -> None:
    cluster = growing()
    effects = cluster.take_effects()
    records = [type(effect.record) for effect in effects if isinstance(effect, Persist)]
    assert records == [MemberRecord, ClusterRecord, Incident]
    assert sent_to(effects, DesiredChildren) == [2] and not sent_to(effects, ShardingAssigned)
    assert (cluster.joining_servers, cluster.rows_in_place, cluster.next_server_number) == ((2,), True, 3)
    assert set(cluster.current_sharding.owners) == {0, 1} and cluster.server_resize.server_ranks() == {0, 1, 2}


def test_rows_move_when_all_servers_are_in_sync_and_settle_when_they_are_again() -> None:
    cluster = growing()
    cluster.take_effects()
    assert in_sync(cluster, 0, 1) == [], "the new one is still to come"
    moving = in_sync(cluster, 2)
    assert state(cluster) is ServerResizeState.MOVING and cluster.joining_servers == ()
    assert set(cluster.current_sharding.owners) == {0, 1, 2}
    durable = next(n for n, effect in enumerate(moving) if isinstance(effect, Persist))
    published = [n for n, effect in enumerate(moving) if isinstance(effect, Send)]
    assert published and durable < min(published), "a server learns no sharding that a restarted scheduler does not know"
    assert in_sync(cluster, 0, 1) == []
    in_sync(cluster, 2)
    assert state(cluster) is ServerResizeState.STABLE
    assert cluster.incidents.records[-1].outcome is Outcome.RESUMED and cluster.rows_survive_death


def test_report_of_earlier_sharding_is_ignored() -> None:
    cluster = growing()
    in_sync(cluster, 0, 1, 2)
    for rank in range(3):
        member = cluster.members[(Role.PSERVER, str(rank))]
        cluster.server_resize.note_in_sync(cluster.step(1.0), member, ServerInSync(0))
    assert state(cluster) is ServerResizeState.MOVING


def test_departing_server_leaves_after_its_rows_moved() -> None:
    cluster = served()
    reply = cluster.server_resize.request(cluster.step(1.0), ScaleRequest(servers=1))
    assert isinstance(reply, ScaleAccepted) and state(cluster) is ServerResizeState.MOVING
    assert cluster.size(Role.PSERVER) == 2 and set(cluster.current_sharding.owners) == {0}
    cluster.take_effects()
    effects = in_sync(cluster, 0, 1)
    assert sent_to(effects, ClusterEnded) == [21] and cluster.size(Role.PSERVER) == 1
    assert cluster.table.member_at(21) is None and not cluster.rows_survive_death
    assert cluster.server_resize.server_ranks() == {0}


def test_scale_out_is_rolled_back_only_by_death_of_joining_server() -> None:
    cluster = growing()
    step = cluster.step(2.0)
    assert not cluster.server_resize.roll_back_if_joining(step, cluster.members[(Role.PSERVER, "1")], "killed")
    assert cluster.joining_servers == (2,)
    assert cluster.server_resize.roll_back_if_joining(step, cluster.members[(Role.PSERVER, "2")], "killed")
    assert (list(cluster.joining_servers), state(cluster)) == ([], ServerResizeState.STABLE) and cluster.size(Role.PSERVER) == 2
    incident = cluster.incidents.records[-1]
    assert incident.outcome is Outcome.ROLLED_BACK
    assert incident.reason.endswith("pserver:2 did not join: killed; the scale-out is rolled back")


def test_late_scale_out_is_rolled_back_and_suspension_extends_its_time() -> None:
    cluster = growing()
    cluster.server_resize.postpone(5.0)
    assert not cluster.server_resize.roll_back_if_overdue(cluster.step(1.0 + JOIN_TIMEOUT_S + 5.0))
    assert cluster.server_resize.roll_back_if_overdue(cluster.step(1.1 + JOIN_TIMEOUT_S + 5.0))
    assert not cluster.server_resize.roll_back_if_overdue(cluster.step(1000.0)), "there is none any more"
    assert cluster.next_server_number == 3, "no number is given twice"


@pytest.mark.parametrize(
    ("coming", "moved", "expected"),
    [((), True, ServerResizeState.STABLE), ((2,), True, ServerResizeState.ARRIVING), ((), False, ServerResizeState.MOVING)],
)
def test_state_is_restored_from_record(coming: tuple[int, ...], moved: bool, expected: ServerResizeState) -> None:
    cluster = training_cluster(servers=2)
    cluster.server_resize.restore(
        ClusterRecord("c", "", 4, 2, Phase.READY, 1, joining_servers=coming, rows_in_place=moved), 5.0
    )
    assert state(cluster) is expected and (cluster.joining_servers, cluster.rows_in_place) == (coming, moved)
