"""Resizing of the world: requests, joining hosts, batches, rollbacks and restarts of the scheduler."""

from __future__ import annotations

import pytest
from tests.unit.core.cluster.editable_cluster import HERE, THERE, EditableCluster, training_cluster

from covey.core import types
from covey.core.cluster import recovery, resize
from covey.core.cluster.registration import Admission, decide_agent_admission
from covey.core.cluster.resize import JOIN_TIMEOUT_S
from covey.core.effects import Close, Persist, SchedulerEffect, Send
from covey.core.incidents import Outcome
from covey.core.messages import (
    ClusterEnded,
    DesiredChildren,
    NewGeneration,
    RankAssigned,
    Refused,
    RegisterAgent,
    ScaleAccepted,
    ScaleRequest,
)
from covey.core.strategy_ladder import parse_strategies


def formed(workers: int = 4, worker_max: int = 0) -> EditableCluster:
    """Two hosts, the second half of the workers on the other one."""
    cluster = EditableCluster(
        types.ClusterSettings(workers, worker_max=worker_max), phase=types.Phase.READY, trains=True, heals=True
    )
    for name, host, connection in (("a", HERE, 1), ("b", THERE, 2)):
        cluster.add_agent(types.AgentInfo(name, f"life of {name}", host, workers // 2, connection=connection))
    for rank in range(workers):
        agent, host = ("a", HERE) if rank < workers // 2 else ("b", THERE)
        cluster.add(
            types.Member(
                types.Role.WORKER, str(rank), "", host, rank=rank, member_index=rank, agent=agent, state=types.NodeState.ALIVE
            )
        )
    return cluster


def comes(slots: int = 2, first_rank: int = -1, host: types.Host = THERE) -> RegisterAgent:
    return RegisterAgent("c", "life of c", host, slots, first_rank)


@pytest.mark.parametrize(
    ("scale_request", "sentence"),
    [
        (ScaleRequest(0), "a world of 0 workers is not possible: expected 1 to 6"),
        (ScaleRequest(7), "a world of 7 workers is not possible: expected 1 to 6"),
        (ScaleRequest(more_workers=3), "a world of 7 workers is not possible: expected 1 to 6"),
        (ScaleRequest(4), "there are 4 workers already"),
        (ScaleRequest(node_ids=["9"]), "The node id:9 is illegal. The workers are 0, 1, 2, 3"),
        (ScaleRequest(node_ids=["pserver:0"]), "The node id:pserver:0 is illegal. The workers are 0, 1, 2, 3"),
        (
            ScaleRequest(node_ids=["0", "worker:1", "2", "3"]),
            "not all workers can be removed: use covey stop to end the cluster",
        ),
    ],
)
def test_impossible_resize_is_refused_with_reason(scale_request: ScaleRequest, sentence: str) -> None:
    assert resize.plan_resize(formed(worker_max=6), scale_request) == (None, sentence)


def test_resize_is_refused_while_healing_or_after_a_worker_finished() -> None:
    healing = formed()
    healing.set(phase=types.Phase.HEALING, reason="worker:1 died")
    assert resize.plan_resize(healing, ScaleRequest(5))[1] == "The cluster is not ready. It is healing: worker:1 died"
    leaving = formed()
    leaving.change(leaving.worker("2"), state=types.NodeState.LEFT)
    assert resize.plan_resize(leaving, ScaleRequest(3)) == (None, "some workers have finished and left already")


def test_late_host_is_admitted_if_its_slots_are_needed() -> None:
    assert decide_agent_admission(formed(), comes()).admission is Admission.REFUSE
    assert decide_agent_admission(formed(worker_max=6), comes()).admission is Admission.ADMIT
    lost = formed()
    lost.change(lost.worker("3"), state=types.NodeState.DEAD)
    assert decide_agent_admission(lost, comes()).admission is Admission.ADMIT
    away = formed()
    away.change_agent("b", connection=0)
    assert decide_agent_admission(away, comes()).admission is Admission.DEFER


def test_world_grows_on_free_slots_up_to_target() -> None:
    cluster = formed(worker_max=5)
    cluster.add_agent(types.AgentInfo("c", "life of c", THERE, 2, connection=3))
    plan, reason = resize.plan_growth(cluster)
    assert plan is not None and plan.agents == ["c"]
    assert reason == "the world grows from 4 to 5 workers because host-b joined"
    cluster.set(requested_workers=4)
    assert resize.plan_growth(cluster)[0] is None


@pytest.mark.parametrize(("first_rank", "host", "taken"), [(2, HERE, "2"), (-1, THERE, "2"), (0, THERE, "0"), (-1, HERE, "0")])
def test_returning_host_gets_its_former_ranks(first_rank: int, host: types.Host, taken: str) -> None:
    cluster = formed()
    for node_id in ("0", "2"):
        cluster.change(cluster.worker(node_id), state=types.NodeState.DEAD)
    for agent in ("a", "b"):
        cluster.remove_agent(agent)
    cluster.add_agent(types.AgentInfo("c", "life of c", host, 1, first_rank, connection=3))
    assert [(member.node_id, agent.id) for member, agent in recovery.replacement_hosts(cluster)] == [(taken, "c")]


@pytest.mark.parametrize("raw", [False, True])
def test_world_that_shrinks_immediately_waits_for_no_host(raw: bool) -> None:
    strategies = parse_strategies(("recover", "elastic-training"))
    for shrink_after_s, trains, after in (
        (30.0, True, recovery.RecoveryAction.WAIT),
        (0.0, True, recovery.RecoveryAction.SHRINK),
        (0.0, False, recovery.RecoveryAction.WAIT),  # no step is finished, so it cannot shrink
    ):
        cluster = formed()
        settings = types.ClusterSettings(4, recovery=True, strategies=strategies, extra_ranks=0, shrink_after_s=shrink_after_s)
        cluster.settings = settings
        cluster.set(trains=trains)
        cluster.remove_agent("b")
        lost = cluster.change(cluster.worker("3"), agent="" if raw else "b", state=types.NodeState.DEAD)
        assert recovery.choose_action(cluster, lost)[0] is after


def test_scale_out_needs_agent_and_room_below_limit() -> None:
    made = training_cluster(worker_max=5)
    assert resize.target_with_extra(made, 1) == (5, "up to 5 workers are allowed, as requested")
    assert resize.target_with_extra(made, 2) == (None, "a world of 6 workers is not possible: expected 1 to 5")
    assert resize.plan_resize(made, ScaleRequest(5))[1] == "the world grows from 4 to 5 workers, as requested"
    for agent in ("a", "b"):
        made.change_agent(agent, is_leaving=True)
    no_agent = "no agent can start a worker: only covey run can add workers"
    assert resize.plan_resize(made, ScaleRequest(5)) == (None, no_agent)
    made.set(phase=types.Phase.HEALING, reason="worker:1 died")
    assert resize.target_with_extra(made, 1) == (None, "The cluster is not ready. It is healing: worker:1 died")


# -- the part -----------------------------------------------------------------------------------------------------------


def requested(request: ScaleRequest, cluster: EditableCluster | None = None) -> EditableCluster:
    """Four workers over connections 10 to 13, after a request that was accepted at 1.0."""
    cluster = cluster or training_cluster(connected=True)
    assert isinstance(cluster.resize.request(cluster.step(1.0), request), ScaleAccepted)
    return cluster


def sent(effects: list[SchedulerEffect], kind: type) -> list[int]:
    return [effect.connection for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def persisted(effects: list[SchedulerEffect], kind: type) -> list[object]:
    return [effect.record for effect in effects if isinstance(effect, Persist) and isinstance(effect.record, kind)]


def outcomes(cluster: EditableCluster) -> list[tuple[str, Outcome]]:
    return [(incident.strategy, incident.outcome) for incident in cluster.incidents.records]


def ranks(cluster: EditableCluster) -> dict[str, int]:
    return {member.node_id: member.rank for member in cluster.members_in_role(types.Role.WORKER)}


def test_a_refused_request_changes_nothing() -> None:
    cluster = training_cluster(connected=True)
    before = cluster.record()
    for request in (ScaleRequest(4), ScaleRequest(roll_back=True), ScaleRequest(node_ids=["9"])):
        assert isinstance(cluster.resize.request(cluster.step(1.0), request), Refused)
    assert cluster.record() == before and cluster.take_effects() == [] and not cluster.incidents.records


def test_scale_out_is_one_generation_in_which_agents_start_workers() -> None:
    cluster = requested(ScaleRequest(6))
    effects = cluster.take_effects()
    assert (cluster.requested_workers, cluster.joining_ids, cluster.generation, cluster.resized_generation) == (
        6,
        ("4", "5"),
        2,
        2,
    )
    assert (
        cluster.phase is types.Phase.HEALING
        and cluster.barrier.is_pending
        and outcomes(cluster) == [("scale-out", Outcome.OPEN)]
    )
    assert persisted(effects, types.ClusterRecord) == [cluster.record()] and len(persisted(effects, types.MemberRecord)) == 2
    assert sent(effects, RankAssigned) == [10, 11, 12, 13] and sent(effects, DesiredChildren) == [1, 2]
    last_write = max(n for n, effect in enumerate(effects) if isinstance(effect, Persist))
    assert last_write < min(n for n, effect in enumerate(effects) if isinstance(effect, Send))
    cluster.resize.finish_growth()
    assert cluster.joining_ids == ()


def test_rolled_back_scale_out_restores_world() -> None:
    cluster = requested(ScaleRequest(6))
    cluster.table.attach_member(14, cluster.worker("4"), 1.0)
    cluster.take_effects()
    reply = cluster.resize.request(cluster.step(2.0), ScaleRequest(roll_back=True))
    assert reply == ScaleAccepted(2, "requested; the scale-out is rolled back")
    effects = cluster.take_effects()
    assert (cluster.requested_workers, cluster.joining_ids, cluster.generation) == (4, (), 3) and set(ranks(cluster)) == {
        "0",
        "1",
        "2",
        "3",
    }
    assert outcomes(cluster) == [("scale-out", Outcome.ROLLED_BACK), ("scale-in", Outcome.OPEN)]
    assert Close(14) in effects and cluster.table.member_at(14) is None and sent(effects, DesiredChildren) == [1, 2]
    assert isinstance(cluster.resize.request(cluster.step(2.0), ScaleRequest(roll_back=True)), Refused)


def test_only_death_of_joining_worker_rolls_scale_out_back() -> None:
    cluster = requested(ScaleRequest(5))
    dead = cluster.change(cluster.worker("1"), state=types.NodeState.DEAD)
    assert not cluster.resize.roll_back_if_joining(cluster.step(2.0), dead, "killed") and cluster.joining_ids == ("4",)
    assert cluster.resize.roll_back_if_joining(cluster.step(2.0), cluster.worker("4"), "killed")
    assert cluster.reason == "worker:4 did not join: killed; the scale-out is rolled back"


def test_scale_out_without_earlier_state_cannot_be_rolled_back() -> None:
    cluster = requested(ScaleRequest(5))
    cluster.set(trains=False)
    assert not cluster.resize.roll_back_if_joining(cluster.step(2.0), cluster.worker("4"), "killed")
    assert cluster.joining_ids == () and cluster.size(types.Role.WORKER) == 5, "it is a worker like any other"


def test_joining_workers_have_limited_time_extended_by_suspension() -> None:
    cluster = requested(ScaleRequest(5))
    cluster.resize.postpone(5.0)
    assert not cluster.resize.roll_back_if_overdue(cluster.step(6.0 + JOIN_TIMEOUT_S))
    assert cluster.resize.roll_back_if_overdue(cluster.step(6.1 + JOIN_TIMEOUT_S)) and cluster.size(types.Role.WORKER) == 4


@pytest.mark.parametrize(
    ("has_group", "connected", "rolls_back"), [(False, True, False), (False, False, True), (True, True, True)]
)
def test_scale_out_without_a_group_is_complete_if_all_have_joined(has_group: bool, connected: bool, rolls_back: bool) -> None:
    """Without a group no rank sends `RankResumed`, so the registration of the joining workers has to suffice."""
    cluster = training_cluster(connected=True)
    cluster.set(joining_ids=("3",))
    cluster.resize.resume(cluster.step(0.0))
    cluster.set(joining_ids=("3",))
    cluster.barrier.resume(is_pending=has_group)
    if not connected:
        cluster.table.detach(13)
    assert cluster.resize.roll_back_if_overdue(cluster.step(JOIN_TIMEOUT_S + 1.0)) is rolls_back
    assert cluster.joining_ids == () and cluster.size(types.Role.WORKER) == (3 if rolls_back else 4)


def test_departing_workers_are_notified_and_highest_ranks_fill_gaps() -> None:
    cluster = requested(ScaleRequest(node_ids=["0", "1"]))
    effects = cluster.take_effects()
    assert ranks(cluster) == {"3": 1, "2": 0}
    assert sent(effects, ClusterEnded) == [11, 10] and cluster.table.member_at(10) is None
    assert persisted(effects, types.MemberRecord) == [
        types.MemberRecord.from_member(member) for member in cluster.members_in_role(types.Role.WORKER)
    ], "whose ranks changed"
    assert outcomes(cluster) == [("scale-in", Outcome.OPEN)] and cluster.requested_workers == 2


def test_workers_leave_in_batches_of_departing_max() -> None:
    cluster = training_cluster(connected=True)
    cluster.heartbeats.note_progress(cluster.worker("0"), types.Progress(5, in_loop=True, departing_max=1), 0.0)
    requested(ScaleRequest(2), cluster)
    assert (cluster.departing_ids, set(ranks(cluster))) == (("2",), {"0", "1", "2"}), "the highest rank first"
    for rank in range(3):
        cluster.barrier.add_resumed(rank)
    assert cluster.resize.release_next_leavers(cluster.step(2.0))
    assert (cluster.departing_ids, set(ranks(cluster))) == ((), {"0", "1"})
    assert not cluster.resize.release_next_leavers(cluster.step(3.0)), "none is left"


def test_no_worker_leaves_before_all_ranks_resumed() -> None:
    cluster = training_cluster(connected=True)
    cluster.set(departing_ids=("3",))
    assert cluster.resize.release_next_leavers(cluster.step(2.0))
    assert cluster.departing_ids == ("3",) and cluster.barrier.is_agreeing and cluster.phase is types.Phase.HEALING
    assert sent(cluster.take_effects(), NewGeneration) == [10, 11, 12, 13]


def test_given_up_worker_leaves_no_free_slot() -> None:
    cluster = training_cluster(connected=True)
    dead = cluster.change(cluster.worker("1"), state=types.NodeState.DEAD)
    cluster.resize.give_up_member(cluster.step(2.0), dead, "worker:1 died", "the other ranks continue in a world of 3")
    effects = cluster.take_effects()
    assert ranks(cluster) == {"0": 0, "2": 2, "3": 1} and cluster.agents["a"].slots == 1
    assert persisted(effects, types.AgentRecord) == [types.AgentRecord.from_agent(cluster.agents["a"])]
    assert sent(effects, DesiredChildren) == [1] and cluster.free_slots_by_agent(types.Role.WORKER) == {}


@pytest.mark.parametrize(("is_open", "trains"), [(True, True), (False, True), (True, False)])
def test_restarted_scheduler_continues_resize(is_open: bool, trains: bool) -> None:
    cluster = training_cluster(connected=True)
    cluster.resize.restore(
        types.ClusterRecord(
            "c", "", 4, 0, types.Phase.HEALING, 1, requested_workers=5, joining_ids=("3",), departing_ids=("2",)
        )
    )
    cluster.set(trains=trains)
    if is_open:
        cluster.incidents.open(cluster.step(0.0), "scale-out", "", "requested")
    cluster.resize.resume(cluster.step(100.0))
    is_pending = is_open and trains
    assert cluster.barrier.is_pending is is_pending and cluster.joining_ids == (("3",) if is_pending else ())
    assert (cluster.requested_workers, cluster.departing_ids) == (5, ("2",))
    assert not cluster.resize.roll_back_if_overdue(cluster.step(100.0 + JOIN_TIMEOUT_S)), "they have the full time"
    assert cluster.resize.roll_back_if_overdue(cluster.step(100.1 + JOIN_TIMEOUT_S)) is is_pending
