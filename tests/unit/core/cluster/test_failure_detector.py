"""What time alone shows: silence, missing progress, and the scheduler's own suspension."""

from __future__ import annotations

from tests.unit.core.cluster.editable_cluster import HERE, EditableCluster, training_cluster

from covey.core.cluster.failure_detector import SUSPENSION_S
from covey.core.effects import Close, PublishEvent
from covey.core.messages import SafePointReport, ScaleRequest
from covey.core.types import ClusterSettings, Member, NodeState, Phase, Progress, Role


def raw_workers(**settings: object) -> EditableCluster:
    """Two workers without an agent over connections 1 and 2, heard at 0.0; a silent one is silent after 10 s."""
    usual = {"recovery": True, "node_timeout_s": 10.0, **settings}
    cluster = EditableCluster(ClusterSettings(2, **usual), phase=Phase.READY, generation=1)  # type: ignore[arg-type]
    for rank in range(2):
        state, connection = NodeState.ALIVE, 1 + rank
        cluster.add(Member(Role.WORKER, str(rank), f"life {rank}", HERE, rank=rank, state=state, connection=connection))
    return cluster


def states(cluster: EditableCluster) -> list[NodeState]:
    return [member.state for member in cluster.members_in_role(Role.WORKER)]


def waits(cluster: EditableCluster, *ranks: int, at: float = 0.0) -> None:
    """These ranks wait in a collective since then."""
    for rank in ranks:
        cluster.heartbeats.note_progress(cluster.worker(str(rank)), Progress(5, waiting_in="5.0"), at)


def test_a_longer_gap_between_ticks_is_a_suspension() -> None:
    cluster = training_cluster()
    assert cluster.detector.take_suspension_s(cluster.step(SUSPENSION_S)) == 0.0
    assert cluster.take_effects() == []
    assert cluster.detector.take_suspension_s(cluster.step(SUSPENSION_S + 7.5)) == 7.5
    said = "suspended for 7.5 s: all timeouts are extended by that time"
    assert cluster.take_effects() == [PublishEvent("scheduler", "slept", said)]
    assert cluster.detector.take_suspension_s(cluster.step(SUSPENSION_S + 7.6)) == 0.0


def test_a_silent_member_is_suspect_after_half_the_timeout_and_dead_after_all_of_it() -> None:
    cluster = raw_workers()
    cluster.heartbeats.note_heartbeat(cluster.worker("0"), 8.0)
    cluster.detector.check_heartbeats(cluster.step(5.0))
    assert states(cluster) == [NodeState.ALIVE, NodeState.ALIVE]
    cluster.detector.check_heartbeats(cluster.step(5.1))
    assert states(cluster) == [NodeState.ALIVE, NodeState.SUSPECT]
    cluster.detector.check_heartbeats(cluster.step(10.0))
    assert states(cluster) == [NodeState.ALIVE, NodeState.SUSPECT]
    cluster.take_effects()
    cluster.detector.check_heartbeats(cluster.step(10.1))
    assert states(cluster) == [NodeState.ALIVE, NodeState.DEAD] and cluster.out.counters["silent_deaths"] == 1
    assert Close(2) in cluster.take_effects() and cluster.phase is Phase.HEALING
    assert cluster.incidents.records[0].cause == "no heartbeat for 10.1 s (MS_NODE_TIMEOUT is 10 s)"


def test_member_that_a_rollback_removed_in_the_same_tick_is_not_judged() -> None:
    """Found by seed 1173 of the cluster: the death of one joining worker removes all that join with it."""
    cluster = training_cluster("elastic-training", connected=True, recovery=True, node_timeout_s=10.0)
    for agent in cluster.agents.values():
        cluster.heartbeats.note_heartbeat(agent, 20.0)
    for member in cluster.members.values():
        cluster.heartbeats.note_heartbeat(member, 20.0)
    cluster.resize.request(cluster.step(0.0), ScaleRequest(workers=6))
    first, second = (cluster.worker(node_id) for node_id in cluster.joining_ids)
    for connection, member in ((50, first), (51, second)):
        cluster.change(member, instance_id=f"process {connection}")
        cluster.table.attach_member(connection, member, 0.0)
    cluster.heartbeats.note_heartbeat(second, 12.0)
    cluster.take_effects()
    cluster.detector.check_heartbeats(cluster.step(20.0))
    effects = cluster.take_effects()
    assert cluster.joining_ids == () and cluster.out.counters["silent_deaths"] == 1
    assert effects.count(Close(51)) == 1
    assert not [e for e in effects if isinstance(e, PublishEvent) and (e.node, e.what) == (second.name, "suspect")]


def test_no_member_is_suspect_if_heartbeats_are_disabled() -> None:
    for cluster in (raw_workers(heartbeats_enabled=False), raw_workers(node_timeout_s=-1.0)):
        cluster.detector.check_heartbeats(cluster.step(1000.0))
        assert states(cluster) == [NodeState.ALIVE, NodeState.ALIVE] and cluster.take_effects() == []


def test_no_member_is_declared_dead_after_end() -> None:
    cluster = raw_workers(recovery=False)
    cluster.detector.check_heartbeats(cluster.step(11.0))
    assert cluster.phase is Phase.ENDED and states(cluster) == [NodeState.DEAD, NodeState.ALIVE]


def test_the_children_of_a_silent_agent_are_dead_with_it() -> None:
    cluster = training_cluster("recover", connected=True, recovery=True, extra_ranks=0, node_timeout_s=10.0)
    cluster.heartbeats.note_heartbeat(cluster.agents["a"], 8.0)
    for member in cluster.members.values():
        cluster.heartbeats.note_heartbeat(member, 8.0)
    cluster.detector.check_heartbeats(cluster.step(10.1))
    assert states(cluster) == [NodeState.ALIVE] * 2 + [NodeState.DEAD] * 2 and list(cluster.agents) == ["a"]


def test_unregistered_child_or_child_of_disconnected_agent_is_judged_with_agent() -> None:
    cluster = training_cluster("recover-in-place", node_timeout_s=10.0)
    cluster.table.forget_instance(cluster.worker("0"))
    cluster.table.detach(2)
    for agent in cluster.agents.values():
        cluster.heartbeats.note_heartbeat(agent, 8.0)
    cluster.detector.check_heartbeats(cluster.step(10.1))
    incarnations = [member.incarnation for member in cluster.members_in_role(Role.WORKER)]
    assert incarnations == [1, 2, 1, 1], "only worker:1 was silent itself, and is started again"


def test_rank_that_all_others_wait_for_is_stuck_and_declared_dead() -> None:
    cluster = training_cluster("recover-in-place", connected=True, stuck_s=20.0)
    waits(cluster, 0, 1, 2)
    cluster.detector.check_blocked_collectives(cluster.step(20.0))
    assert cluster.take_effects() == []
    cluster.detector.check_blocked_collectives(cluster.step(20.1))
    assert cluster.out.counters["stuck"] == 1 and cluster.worker("3").incarnation == 2
    assert cluster.incidents.records[0].cause == "stuck: all other ranks wait for it in collective 5.0 for over 20 s"


def test_no_rank_is_stuck_while_another_started_waiting_or_made_progress() -> None:
    cluster = training_cluster("recover-in-place", connected=True, stuck_s=20.0)
    waits(cluster, 0, 1)
    waits(cluster, 2, at=10.0)
    cluster.detector.check_blocked_collectives(cluster.step(25.0))
    assert cluster.take_effects() == [], "rank 2 does not wait long enough"
    waits(cluster, 2, at=0.0)
    cluster.heartbeats.note_progress(cluster.worker("3"), Progress(5, "data"), 10.0)
    cluster.detector.check_blocked_collectives(cluster.step(29.0))
    assert cluster.take_effects() == [], "rank 3 made progress"
    cluster.detector.check_blocked_collectives(cluster.step(31.0))
    assert cluster.out.counters["stuck"] == 1


def test_wait_before_a_recovery_does_not_count_after_it() -> None:
    """The replacement of a stuck rank finished its script before the others had sent another heartbeat."""
    cluster = training_cluster("recover-in-place", connected=True, stuck_s=20.0)
    waits(cluster, 0, 1, 2)
    for rank in ("0", "1", "2"):
        cluster.heartbeats.note_resumed(cluster.worker(rank), 5, 24.0)
    cluster.table.set_state(cluster.worker("3"), NodeState.LEFT)
    cluster.detector.check_blocked_collectives(cluster.step(25.0))
    assert cluster.take_effects() == [], "no rank has waited for 20 s since the resume"
    cluster.detector.check_blocked_collectives(cluster.step(44.1))
    assert cluster.lifecycle.has_ended and "worker:3 left before the run was finished" in cluster.lifecycle.reason


def test_no_rank_is_stuck_with_negative_limit() -> None:
    cluster = training_cluster("recover-in-place", connected=True, stuck_s=-1.0)
    waits(cluster, 0, 1, 2)
    cluster.detector.check_blocked_collectives(cluster.step(10_000.0))
    assert cluster.take_effects() == []


def test_run_ends_if_ranks_wait_without_end() -> None:
    cluster = training_cluster("recover-in-place", connected=True)
    cluster.barrier.add_report(cluster.worker("0"), SafePointReport(1, finished=True))
    waits(cluster, 1)
    cluster.detector.check_blocked_collectives(cluster.step(1.0))
    assert cluster.phase is Phase.ENDED
    assert cluster.reason.startswith("rank 0 has finished its script, but rank 1 waits for it")
