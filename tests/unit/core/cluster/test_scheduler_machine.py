"""The scheduler's machine, with literal events: which effects it returns, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster

from covey.core.cluster.heal_barrier import RendezvousStore
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.effects import Close, EndCluster, Persist, PublishEvent, SchedulerEffect, Send
from covey.core.events import ConnectionLost, HostGone, JournalRead, MessageReceived, MindSporeDetected, Tick
from covey.core.incidents import Incident, Outcome
from covey.core.messages import (
    Assignment,
    CheckpointFailed,
    ChildExited,
    ChildStarted,
    ClusterEnded,
    CollectiveFailed,
    CollectiveNumber,
    DesiredChildren,
    Draining,
    DumpRequest,
    DumpWritten,
    HealPlan,
    Heartbeat,
    KillChild,
    KillRequest,
    Leave,
    LeaveAcknowledged,
    NewGeneration,
    RankAssigned,
    RankResumed,
    Refused,
    Register,
    RegisterAgent,
    Registered,
    RendezvousGet,
    RendezvousPut,
    RendezvousValue,
    RequestAccepted,
    SafePointReport,
    ScaleAccepted,
    ScaleRequest,
    StateFetched,
    StopRequest,
    TemplateReady,
)
from covey.core.strategy_ladder import parse_strategies
from covey.core.types import (
    AgentRecord,
    ClusterRecord,
    ClusterSettings,
    Ended,
    Host,
    MemberRecord,
    NodeState,
    Phase,
    Progress,
    Record,
    Role,
    ScriptError,
)
from covey.errors import ExitCode

BOX, OTHER = Host("boot-box", "box", "10.0.0.1"), Host("boot-other", "other", "10.0.0.2")
Kind = TypeVar("Kind")
Effects = list[SchedulerEffect]


def machine(workers: int = 2, **settings: Any) -> SchedulerMachine:
    made = SchedulerMachine(ClusterSettings(workers, **settings), cluster_id="c1", job="job", now=0.0)
    assert made.step(JournalRead(), 0.0) == [
        Persist(ClusterRecord("c1", "job", workers, made.cluster.settings.server_num, Phase.FORMING, 0))
    ]
    return made


def register(name: str, life: str = "", host: Host = BOX, **more: Any) -> Register:
    return Register(Role.WORKER, name, life or f"life of {name}", host, **more)


def ready(*names: str, **settings: Any) -> SchedulerMachine:
    """A cluster of raw workers that has formed; the links are 1, 2, ..."""
    made = machine(len(names), **settings)
    for link, name in enumerate(names, start=1):
        made.step(MessageReceived(register(name), link), 0.0)
    assert phase(made) is Phase.READY
    return made


def ready_agents(**settings: Any) -> SchedulerMachine:
    """Two agents over links 1 and 2, with ranks 0 and 1 on the first and rank 2 on the second."""
    made = machine(3, **settings)
    made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 2, meet_port=29500), 1), 0.0)
    made.step(MessageReceived(RegisterAgent("b", "life of b", OTHER, 1), 2), 0.0)
    assert phase(made) is Phase.READY
    return made


def sent(effects: Effects, kind: type[Kind]) -> dict[int, Kind]:
    """What was sent of this kind, by link."""
    return {e.connection: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}


def stored_records(effects: Effects) -> list[Record]:
    return [effect.record for effect in effects if isinstance(effect, Persist)]


def published(effects: Effects) -> list[str]:
    return [f"{e.node} {e.what}: {e.reason}" for e in effects if isinstance(e, PublishEvent)]


def state(made: SchedulerMachine, name: str) -> NodeState:
    return made.cluster.members[(Role.WORKER, name)].state


def phase(made: SchedulerMachine) -> Phase:
    return made.cluster.phase


def ended(effects: Effects) -> EndCluster | None:
    return next((effect for effect in effects if isinstance(effect, EndCluster)), None)


def tick(made: SchedulerMachine, until: float, beats: Iterable[int] = (), since: float = 0.0) -> Effects:
    """Half a second at a time, as a shell would; these links beat every two seconds."""
    out: Effects = []
    for half in range(int(since * 2) + 1, int(until * 2) + 1):
        if half % 4 == 0:
            for link in beats:
                out += made.step(MessageReceived(Heartbeat(Progress(half, "step")), link), half / 2)
        out += made.step(Tick(), half / 2)
    return out


def journal(*effects: Effects) -> tuple[Record, ...]:
    """What a journal would hold: the last record per place."""
    found: dict[object, Record] = {}
    for record in (r for some in effects for r in stored_records(some)):
        place = (record.role.group, record.rank) if isinstance(record, MemberRecord) else getattr(record, "id", "cluster")
        found[place] = record
    return tuple(found.values())


# -- forming ---------------------------------------------------------------------------------------------------------


def test_nodes_are_registered_immediately_and_get_ranks_when_complete() -> None:
    made = machine(2)
    first = made.step(MessageReceived(register("b"), 7), 0.0)
    assert sent(first, Registered) == {7: Registered("c1", "b", 1)} and not stored_records(first)
    assert made.cluster.reason == "1 worker missing"
    last = made.step(MessageReceived(register("a"), 8), 0.1)
    assert sent(last, RankAssigned) == {7: RankAssigned(1, 1, 2, 1, 2), 8: RankAssigned(1, 0, 2, 0, 2)}


def test_ranks_are_persisted_before_they_are_sent_and_cluster_last() -> None:
    made = machine(2)
    made.step(MessageReceived(register("a"), 1), 0.0)
    effects = made.step(MessageReceived(register("b"), 2), 0.0)
    promises = [n for n, e in enumerate(effects) if isinstance(e, Send) and isinstance(e.message, RankAssigned)]
    writes = [n for n, e in enumerate(effects) if isinstance(e, Persist)]
    assert max(writes) < min(promises)
    assert stored_records(effects)[-1] == ClusterRecord("c1", "job", 2, 0, Phase.READY, 1, next_member_index=2)
    assert [r.rank for r in stored_records(effects) if isinstance(r, MemberRecord)] == [0, 1]


def test_refusal_is_shown_while_cluster_forms() -> None:
    """Hosts that were told another number of workers each: one is refused, and the other would wait for it in silence."""
    made = machine(4, topo_timeout_s=10.0)
    made.step(MessageReceived(RegisterAgent("a", "la", BOX, 2, fingerprint={"MS_WORKER_NUM": "4"}), 1), 0.0)
    made.step(MessageReceived(RegisterAgent("b", "lb", OTHER, 3, fingerprint={"MS_WORKER_NUM": "6"}), 2), 1.0)
    said = f"2 workers missing; {OTHER.name} ({OTHER.address}) was refused: "
    assert made.cluster.reason.startswith(said) and "MS_WORKER_NUM" in made.cluster.reason
    over = ended(tick(made, 11.0, beats=[1]))
    assert over is not None and over.code == ExitCode.NOT_FORMED and over.reason.endswith(made.cluster.last_refusal)


def test_formation_timeout_lists_registered_nodes() -> None:
    made = machine(3, topo_timeout_s=10.0)
    made.step(MessageReceived(register("a"), 1), 0.0)
    effects = tick(made, 11.0, beats=[1])
    said = "not complete within 10 s: 2 workers missing, registered: worker:a"
    assert sent(effects, ClusterEnded) == {1: ClusterEnded(said, ExitCode.NOT_FORMED)}
    assert ended(effects) == EndCluster(ExitCode.NOT_FORMED, said)


def test_formation_with_negative_limit_never_ends() -> None:
    made = machine(2, topo_timeout_s=-1.0, heartbeats_enabled=False)
    made.step(MessageReceived(register("a"), 1), 0.0)
    assert not tick(made, 5000.0)


def test_node_that_leaves_before_formation_is_removed() -> None:
    made = machine(2)
    made.step(MessageReceived(register("a"), 1), 0.0)
    assert sent(made.step(MessageReceived(Leave(), 1), 0.0), LeaveAcknowledged) == {1: LeaveAcknowledged()}
    made.step(MessageReceived(register("a", "second life"), 2), 0.0)
    made.step(MessageReceived(register("b"), 3), 0.0)
    assert phase(made) is Phase.READY
    assert made.step(ConnectionLost("closed", 1), 0.0) == [], "the connection of a node that left belongs to no member"
    assert state(made, "a") is NodeState.ALIVE


def test_connection_lost_while_forming_removes_node() -> None:
    made = machine(2)
    made.step(MessageReceived(register("0"), 1), 0.0)
    assert published(made.step(ConnectionLost("reset", 1), 0.0)) == [
        "worker:0 gone before the cluster formed: its connection closed (reset)"
    ]
    assert sent(made.step(MessageReceived(register("0", "second life"), 2), 0.0), Registered)


def test_agent_lost_while_forming_removes_its_children() -> None:
    made = machine(3)
    made.step(MessageReceived(RegisterAgent("a", "la", BOX, 2), 1), 0.0)
    made.step(ConnectionLost("reset", 1), 0.0)
    assert not made.cluster.members and not made.cluster.agents
    assert sent(made.step(MessageReceived(RegisterAgent("a", "la", BOX, 3), 2), 0.0), DesiredChildren)


def test_node_ranks_of_agents_are_kept() -> None:
    made = machine(4)
    made.step(MessageReceived(RegisterAgent("a", "la", BOX, 2, first_rank=2), 1), 0.0)
    starts = sent(made.step(MessageReceived(RegisterAgent("b", "lb", OTHER, 2, first_rank=0), 2), 0.0), DesiredChildren)
    assert {link: [a.rank for a in start.assignments] for link, start in starts.items()} == {1: [2, 3], 2: [0, 1]}


# -- refusing --------------------------------------------------------------------------------------------------------


def test_refusal_is_sent_and_published_and_closes_connection() -> None:
    made = ready("0", "1")
    effects = made.step(MessageReceived(register("0", "another"), 9), 1.0)
    said = "worker:0 on box is alive: a second node with its id is not allowed"
    assert effects == [
        PublishEvent("worker:0", "refused", f"{said} (from 10.0.0.1)", effects[0].level),  # type: ignore[union-attr]
        Send(Refused(said), 9),
        Close(9),
    ]
    assert made.counters["refused"] == 1


def test_connection_belongs_to_one_node() -> None:
    made = ready("0", "1", recovery=True)
    effects = made.step(MessageReceived(register("other"), 1), 1.0)
    assert sent(effects, Refused)[1].reason == "its connection already belongs to another node"
    assert state(made, "0") is NodeState.DEAD, "the connection is closed, so its member is lost"


def test_the_same_registration_twice_changes_nothing() -> None:
    made = ready("0", "1")
    again = made.step(MessageReceived(register("0"), 1), 1.0)
    assert sent(again, RankAssigned) == {1: RankAssigned(1, 0, 2, 0, 2)} and not stored_records(again)


# -- death without recovery ------------------------------------------------------------------------------------------


def test_lost_connection_ends_cluster_without_recovery() -> None:
    made = ready("0", "1", "2")
    made.step(MessageReceived(Heartbeat(Progress(12, "backward")), 3), 1.0)
    effects = made.step(ConnectionLost("connection reset by peer", 2), 1.0)
    stops = sent(effects, ClusterEnded)
    assert set(stops) == {1, 3} and stops[1] == stops[3]
    failure = stops[1].failure
    assert failure is not None
    assert (failure.rank, failure.host, failure.code) == (1, "box", ExitCode.PEER_FAILED)
    assert failure.others == ["rank 0 on box: alive", "rank 2 on box: alive, step 12, backward"]
    assert ended(effects) == EndCluster(30, "worker:1 on box: its connection closed (connection reset by peer)", failure)
    told_end = Ended(30, "worker:1 on box: its connection closed (connection reset by peer)", failure)
    assert stored_records(effects)[-1] == ClusterRecord("c1", "job", 3, 0, Phase.ENDED, 1, next_member_index=3, ended=told_end)


def test_first_failure_is_reported() -> None:
    made = ready_agents()
    exited = ChildExited("2", 1, 139, "signal 11", ["Segmentation fault"], "worker_2.log")
    effects = made.step(MessageReceived(exited, 2), 1.0)
    assert made.step(MessageReceived(ChildExited("0", 1, 1), 1), 1.1) == []
    failure = sent(effects, ClusterEnded)[1].failure
    assert failure is not None
    assert (failure.node_id, failure.code, failure.reason, failure.tail) == ("2", 139, "signal 11", ["Segmentation fault"])
    assert failure.log == "worker_2.log"
    assert ended(effects) == EndCluster(139, "worker:2 on other: signal 11", failure)


def test_exception_of_the_first_failure_is_in_its_report() -> None:
    raised = ScriptError("ValueError", "no", "train.py:3", "Traceback ...")
    by_agent = ready_agents().step(MessageReceived(ChildExited("2", 1, 1, "exit code 1", error=raised), 2), 1.0)
    by_itself = ready("0", "1").step(MessageReceived(Leave(1, "ValueError: no", raised), 2), 1.0)
    for effects in (by_agent, by_itself):
        failure = sent(effects, ClusterEnded)[1].failure
        assert failure is not None and failure.error == raised


def test_after_end_member_receives_outcome_and_unknown_node_is_refused() -> None:
    made = ready("0", "1")
    made.step(MessageReceived(StopRequest("enough"), 9), 1.0)
    late = made.step(MessageReceived(register("1", cluster_id="c1", incarnation=1, generation=1, rank=1), 10), 2.0)
    assert sent(late, ClusterEnded) == {10: ClusterEnded("enough", ExitCode.STOPPED)} and Close(10) in late
    stranger = made.step(MessageReceived(register("x"), 11), 2.0)
    assert sent(stranger, Refused) == {11: Refused("the cluster has ended: enough")}
    assert (
        made.step(Tick(), 100.0)
        == made.step(ConnectionLost("gone", 1), 100.0)
        == made.step(MessageReceived(Heartbeat(), 2), 100.0)
        == []
    )


def test_a_cluster_ends_once() -> None:
    made = ready("0", "1")
    first = made.step(MessageReceived(StopRequest("enough"), 9), 1.0)
    assert sent(first, LeaveAcknowledged) == {9: LeaveAcknowledged()} and ended(first) is not None
    again = made.step(MessageReceived(StopRequest("enough"), 9), 1.0)
    assert sent(again, LeaveAcknowledged) and ended(again) is None


# -- leaving ---------------------------------------------------------------------------------------------------------


def test_leave_is_persisted_before_acknowledgement() -> None:
    made = ready("0", "1")
    effects = made.step(MessageReceived(Leave(), 1), 1.0)
    incidents_of = next(n for n, e in enumerate(effects) if isinstance(e, Persist))
    assert incidents_of < effects.index(Send(LeaveAcknowledged(), 1))
    assert state(made, "0") is NodeState.LEFT and phase(made) is Phase.READY
    assert made.step(ConnectionLost("closed", 1), 1.1) == []


def test_cluster_ends_with_0_when_all_workers_left() -> None:
    made = ready("0", "1")
    made.step(MessageReceived(Leave(), 1), 1.0)
    effects = made.step(MessageReceived(Leave(), 2), 1.0)
    assert ended(effects) == EndCluster(0, "all 2 workers finished")
    assert sent(effects, LeaveAcknowledged) == {2: LeaveAcknowledged()} and not sent(effects, ClusterEnded)


def test_leave_with_nonzero_code_is_failure() -> None:
    made = ready("0", "1")
    effects = made.step(MessageReceived(Leave(3, "ValueError: no data"), 1), 1.0)
    failure = sent(effects, ClusterEnded)[2].failure
    assert failure is not None and failure.reason == "ValueError: no data" and failure.code == 3


def test_leave_may_be_repeated() -> None:
    made = ready("0", "1", recovery=True)
    made.step(MessageReceived(Leave(), 1), 1.0)
    again = made.step(MessageReceived(register("0", incarnation=1, rank=0), 5), 2.0)
    assert sent(again, Registered) and not sent(again, RankAssigned)
    assert sent(made.step(MessageReceived(Leave(), 5), 2.0), LeaveAcknowledged) == {5: LeaveAcknowledged()}
    assert made.counters["left"] == 1


def test_leave_of_child_is_not_its_exit() -> None:
    made = ready_agents()
    made.step(MessageReceived(register("0", incarnation=1), 3), 0.0)
    assert made.step(MessageReceived(Leave(), 3), 1.0) == [Send(LeaveAcknowledged(), 3)]
    assert state(made, "0") is NodeState.ALIVE
    assert not sent(tick(made, 60.0, beats=[1, 2], since=1.0), ClusterEnded), "it needs no beats of its own any more"
    assert ended(made.step(MessageReceived(ChildExited("0", 1, 1, "exit code 1"), 1), 61.0))


# -- recovery --------------------------------------------------------------------------------------------------------


def test_death_and_return_each_start_a_generation_with_recovery() -> None:
    made = ready("0", "1", recovery=True)
    death = made.step(ConnectionLost("reset", 2), 1.0)
    assert phase(made) is Phase.HEALING and ended(death) is None
    assert sent(death, NewGeneration) == {1: NewGeneration(2, "worker:1 died: its connection closed (reset)")}
    back = made.step(MessageReceived(register("1", "second life"), 3), 2.0)
    assert sent(back, NewGeneration) == {1: NewGeneration(3, "worker:1 returned")}
    assert sent(back, Registered) == {3: Registered("c1", "1", 2)}
    assert sent(back, RankAssigned) == {3: RankAssigned(3, 1, 2, 1, 2, restarts=1)}
    assert phase(made) is Phase.READY


def test_new_generation_is_persisted_before_its_incarnation() -> None:
    made = ready("0", "1", recovery=True)
    made.step(ConnectionLost("reset", 2), 1.0)
    records = stored_records(made.step(MessageReceived(register("1", "second life"), 3), 2.0))
    assert [type(record) for record in records] == [ClusterRecord, MemberRecord, Incident, ClusterRecord]
    assert [r.generation for r in records if isinstance(r, ClusterRecord)] == [3, 3]


def test_same_process_re_attaches_with_its_incarnation() -> None:
    made = ready("0", "1", recovery=True)
    made.step(ConnectionLost("reset", 2), 1.0)
    again = made.step(MessageReceived(register("1", incarnation=1, generation=1, rank=1, cluster_id="c1"), 3), 1.1)
    assert sent(again, RankAssigned) == {3: RankAssigned(2, 1, 2, 1, 2)}
    assert phase(made) is Phase.READY and made.cluster.generation == 2


def test_replacement_on_other_host_gets_free_local_rank() -> None:
    made = machine(4, recovery=True)
    for link, (name, host) in enumerate([("a", BOX), ("b", BOX), ("c", OTHER), ("d", OTHER)], start=1):
        made.step(MessageReceived(register(name, host=host), link), 0.0)
    made.step(ConnectionLost("reset", 1), 1.0)
    back = made.step(MessageReceived(register("e", host=OTHER), 9), 2.0)
    assert sent(back, RankAssigned) == {9: RankAssigned(3, 0, 4, local_rank=2, local_world=3, restarts=1)}


def test_unfilled_rank_ends_cluster_after_timeout() -> None:
    made = ready("0", "1", recovery=True, topo_timeout_s=20.0)
    made.step(ConnectionLost("reset", 2), 0.0)
    effects = tick(made, 21.0, beats=[1])
    end = ended(effects)
    assert end is not None and end.reason == "worker:1 did not come back within 20 s" and end.code == ExitCode.PEER_FAILED
    assert end.failure is not None and end.failure.reason == "its connection closed (reset)"


def test_new_process_is_deferred_until_previous_is_declared_dead() -> None:
    made = ready("0", "1", recovery=True, node_timeout_s=10.0)
    tick(made, 6.0, beats=[1])
    assert state(made, "1") is NodeState.SUSPECT
    held = made.step(MessageReceived(register("1", "second life"), 3), 6.0)
    assert sent(held, Refused)[3].retry_after_s > 0 and len(published(held)) == 1
    assert published(made.step(MessageReceived(register("1", "second life"), 3), 6.5)) == [], "it is said once"
    tick(made, 11.0, beats=[1], since=6.0)
    assert sent(made.step(MessageReceived(register("1", "second life"), 3), 11.0), RankAssigned) == {
        3: RankAssigned(3, 1, 2, 1, 2, restarts=1)
    }


def test_late_heartbeat_clears_suspect_and_may_make_cluster_ready() -> None:
    made = ready("0", "1", "2", recovery=True, node_timeout_s=10.0)
    made.step(ConnectionLost("reset", 3), 0.0)
    tick(made, 6.0, beats=[1])
    made.step(MessageReceived(register("2", "second life"), 4), 6.0)
    assert phase(made) is Phase.HEALING, "1 is silent"
    made.step(MessageReceived(Heartbeat(), 2), 6.5)
    assert phase(made) is Phase.READY


def test_suspect_that_leaves_does_not_block_ready() -> None:
    made = ready("0", "1", "2", recovery=True, node_timeout_s=10.0)
    made.step(ConnectionLost("reset", 3), 0.0)
    tick(made, 6.0, beats=[1])
    made.step(MessageReceived(register("2", "second life"), 4), 6.0)
    made.step(MessageReceived(Leave(), 2), 6.5)
    assert phase(made) is Phase.READY


# -- silence ---------------------------------------------------------------------------------------------------------


def test_silent_member_is_suspect_then_dead() -> None:
    made = ready("0", "1", node_timeout_s=10.0)
    effects = tick(made, 11.0, beats=[1])
    assert "worker:1 suspect: no heartbeat for 5.5 s" in published(effects)
    end = ended(effects)
    assert end is not None and end.reason == "worker:1 on box: no heartbeat for 10.5 s (MS_NODE_TIMEOUT is 10 s)"
    assert Close(2) in effects


@pytest.mark.parametrize("settings", [{"heartbeats_enabled": False}, {"node_timeout_s": -1.0}])
def test_without_timeout_only_lost_connection_is_death(settings: dict[str, Any]) -> None:
    made = ready("0", "1", **settings)
    assert not tick(made, 500.0)
    assert ended(made.step(ConnectionLost("reset", 1), 500.0))


def test_suspension_of_scheduler_is_not_silence_of_members() -> None:
    made = ready("0", "1", node_timeout_s=10.0)
    tick(made, 4.0, beats=[1, 2])
    effects = made.step(Tick(), 300.0)
    assert published(effects) == ["scheduler slept: suspended for 296.0 s: all timeouts are extended by that time"]
    assert state(made, "0") is state(made, "1") is NodeState.ALIVE
    assert ended(tick(made, 312.0, since=300.0)), "from then on it counts again"


# -- agents ----------------------------------------------------------------------------------------------------------


def test_exit_of_child_is_reported_by_agent() -> None:
    made = ready_agents(node_timeout_s=10.0)
    attached = made.step(MessageReceived(register("0", incarnation=1), 3), 0.0)
    assert sent(attached, RankAssigned) == {3: RankAssigned(1, 0, 3, 0, 2)}
    assert made.step(ConnectionLost("reset", 3), 1.0) == [], "its agent would have seen an exit"
    made.step(MessageReceived(ChildStarted("1", 1, 4711), 1), 1.0)
    assert made.cluster.members[(Role.WORKER, "1")].pid == 4711
    assert made.step(MessageReceived(ChildExited("2", 1, 1), 1), 1.0) == [], "not its child"
    assert made.step(MessageReceived(ChildExited("0", 2, 1), 1), 1.0) == [], "not its incarnation"


def test_restart_all_restarts_every_worker_in_new_generation() -> None:
    made = ready_agents(max_restarts=1)
    made.step(MessageReceived(register("2", incarnation=1), 3), 0.0)
    effects = made.step(MessageReceived(ChildExited("0", 1, 1, "exit code 1"), 1), 1.0)
    starts = sent(effects, DesiredChildren)
    assert starts[1].assignments == [Assignment("0", 0, 2, 0), Assignment("1", 1, 2, 1)]
    assert (starts[2].generation, starts[2].restarts, starts[2].max_restarts) == (2, 1, 1)
    made.step(MessageReceived(Heartbeat(Progress(9)), 3), 1.0)
    assert made.cluster.progress(made.cluster.members[(Role.WORKER, "2")]).step == -1, "the old incarnation no longer speaks"
    assert [record.state for record in stored_records(effects) if isinstance(record, MemberRecord)] == [NodeState.ALIVE] * 3
    assert phase(made) is Phase.READY
    assert ended(made.step(MessageReceived(ChildExited("1", 2, 1), 1), 2.0)), "one restart was allowed"


@pytest.mark.parametrize("heals", [False, True])
def test_a_host_may_allow_fewer_restarts_than_the_scheduler(heals: bool) -> None:
    made = machine(1, max_restarts=5, strategies=parse_strategies(["recover-in-place"]))
    effects = made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 1, max_restarts=1), 1), 0.0)
    assert [record.max_restarts for record in stored_records(effects) if isinstance(record, AgentRecord)] == [1]
    EditableCluster.of(made).set(heals=heals)
    assert not ended(made.step(MessageReceived(ChildExited("0", 1, 1), 1), 1.0))
    assert ended(made.step(MessageReceived(ChildExited("0", 2, 1), 1), 2.0))


def test_lost_agent_is_gone_immediately_unless_agents_return() -> None:
    settings: dict[str, Any] = {"recovery": True, "strategies": parse_strategies(["recover"])}
    waiting, gone = ready_agents(**settings), ready_agents(**settings, agents_return=False)
    for made in (waiting, gone):
        EditableCluster.of(made).set(heals=True)
        made.step(ConnectionLost("reset", 2), 1.0)
    assert (phase(waiting), phase(gone)) == (Phase.READY, Phase.HEALING)


def test_lost_agent_ends_cluster_without_recovery() -> None:
    made = ready_agents(max_restarts=5)
    effects = made.step(ConnectionLost("reset", 2), 1.0)
    end = ended(effects)
    assert end is not None and end.reason == "worker:2 on other: the agent on other is gone (reset)"
    assert "cluster end: cannot restart worker:2: no agent is left on other" in published(effects)
    assert made.counters["deaths"] == 1


def test_lost_agent_may_return_within_node_timeout_with_recovery() -> None:
    made = ready_agents(recovery=True, node_timeout_s=10.0)
    assert published(made.step(ConnectionLost("reset", 2), 0.0)) == ["agent:b out of reach: reset"]
    tick(made, 8.0, beats=[1])
    again = made.step(MessageReceived(RegisterAgent("b", "life of b", OTHER, 1, cluster_id="c1"), 5), 8.0)
    assert sent(again, DesiredChildren)[5].assignments == [Assignment("2", 2, 1, 0)]
    made.step(ConnectionLost("reset", 5), 8.0)
    assert ended(tick(made, 20.0, beats=[1], since=8.0))


def test_raised_target_admits_workers_that_register_by_themselves() -> None:
    made = ready("a", "b")
    assert isinstance(_reply_to(made, ScaleRequest(more_workers=1, start_processes=False)), Refused), "no step was finished yet"
    EditableCluster.of(made).set(trains=True)
    extra = MessageReceived(register("c"), 7)
    assert "one worker too many" in sent(made.step(extra, 1.0), Refused)[7].reason
    effects = made.step(MessageReceived(ScaleRequest(more_workers=1, start_processes=False), 9), 1.0)
    assert [r.requested_workers for r in stored_records(effects) if isinstance(r, ClusterRecord)] == [3], "it is durable"
    joined = made.step(MessageReceived(register("c"), 8), 1.0)
    assert sent(joined, RankAssigned)[8].world == 3 and made.cluster.target_workers == 3


def test_late_host_grows_world_after_template_is_ready() -> None:
    made = ready_agents(worker_max=4, last_call_s=0.0)
    EditableCluster.of(made).set(trains=True)
    made.step(MessageReceived(RegisterAgent("c", "life of c", OTHER, 1, template_importing=True), 3), 1.0)
    tick(made, 3.0, beats=[1, 2, 3], since=1.0)
    assert (phase(made), made.cluster.size(Role.WORKER)) == (Phase.READY, 3), "no rank waits for its imports"
    another = made.step(MessageReceived(RegisterAgent("d", "life of d", OTHER, 1), 4), 3.0)
    assert sent(another, Refused)[4].reason == "the cluster has formed with its 4 workers: this host registered too late"
    made.step(MessageReceived(TemplateReady(), 3), 3.0)
    assert sent(tick(made, 4.0, since=3.0), DesiredChildren)[3].assignments == [Assignment("3", 3, 1, 1)]


def sharded_over_four(together: int) -> SchedulerMachine:
    """Return four workers with a sharded state, of which `together` may leave at once."""
    made = ready("a", "b", "c", "d")
    made.step(MessageReceived(RendezvousPut("met", b"", 1), 1), 0.0)
    for link in range(1, 5):
        made.step(MessageReceived(Heartbeat(Progress(5, "train", in_loop=True, departing_max=together)), link), 0.0)
    return made


def outcomes(made: SchedulerMachine) -> list[Outcome]:
    return [incident.outcome for incident in made.incidents.records]


def resume_ranks(made: SchedulerMachine, links: Sequence[int]) -> list[SchedulerEffect]:
    generation = made.cluster.generation
    return [effect for link in links for effect in made.step(MessageReceived(RankResumed(generation, 5), link), 1.0)]


def test_rank_with_state_shard_leaves_after_others_hold_it() -> None:
    made = sharded_over_four(together=1)
    effects = made.step(MessageReceived(ScaleRequest(workers=2), 9), 1.0)
    assert set(sent(effects, ClusterEnded)) == {4} and {f.world for f in sent(effects, RankAssigned).values()} == {3}
    assert [r.departing_ids for r in stored_records(effects) if isinstance(r, ClusterRecord)] == [("c",)], "it is durable"
    effects = resume_ranks(made, (1, 2, 3))
    assert set(sent(effects, ClusterEnded)) == {3} and {f.world for f in sent(effects, RankAssigned).values()} == {2}
    assert (phase(made), outcomes(made)) == (Phase.HEALING, [Outcome.OPEN]), "one operation until all have left"
    resume_ranks(made, (1, 2))
    assert (phase(made), outcomes(made)) == (Phase.READY, [Outcome.RESUMED])
    assert made.cluster.departing_ids == ()


def test_batch_of_leaving_ranks_equals_replicas() -> None:
    for together, gone in ((0, {2, 3, 4}), (2, {3, 4}), (5, {2, 3, 4})):
        made = sharded_over_four(together)
        assert set(sent(made.step(MessageReceived(ScaleRequest(workers=1), 9), 1.0), ClusterEnded)) == gone


def test_restored_scheduler_keeps_departing_ids() -> None:
    made = sharded_over_four(together=1)
    records = stored_records(made.step(MessageReceived(ScaleRequest(workers=2), 9), 1.0))
    cluster = next(r for r in records if isinstance(r, ClusterRecord))
    again = SchedulerMachine(made.cluster.settings, cluster_id="c2", job="job", now=0.0, wall=0.0)
    again.step(JournalRead((cluster,)), 0.0)
    assert again.cluster.departing_ids == ("c",)


def sharded_under_agent(workers: int, together: int = 1) -> SchedulerMachine:
    """As many workers of one agent, over link 1, each with a part of the state; theirs are links 11, 12, ..."""
    made = machine(workers, strategies=parse_strategies(("recover-in-place", "elastic-training")), recovery=True)
    made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, workers), 1), 0.0)
    made.step(MessageReceived(RendezvousPut("met", b"", 1), 1), 0.0)
    start_processes(made)
    complete_step(made, together)
    return made


def start_processes(made: SchedulerMachine) -> None:
    for member in made.cluster.members_in_role(Role.WORKER):
        life = f"{member.node_id}.{member.incarnation}"
        made.step(
            MessageReceived(register(member.node_id, life, incarnation=member.incarnation), 11 + int(member.node_id)), 1.0
        )
    first = made.cluster.members_in_role(Role.WORKER)[0]
    made.step(MessageReceived(RendezvousPut("met", b"", made.cluster.generation), first.connection), 1.0)


def complete_step(made: SchedulerMachine, together: int = 1) -> None:
    for member in made.cluster.members_in_role(Role.WORKER):
        made.step(
            MessageReceived(Heartbeat(Progress(5, "train", in_loop=True, departing_max=together)), member.connection), 1.0
        )


def resume_all_ranks(made: SchedulerMachine) -> list[SchedulerEffect]:
    return resume_ranks(made, [m.connection for m in made.cluster.members_in_role(Role.WORKER)])


def lose_state(made: SchedulerMachine) -> None:
    """Report that no rank holds one slot of the state, so that all workers restart from their checkpoint."""
    for member in made.cluster.members_in_role(Role.WORKER):
        made.step(
            MessageReceived(
                SafePointReport(made.cluster.generation, CollectiveNumber(5, 0), slot_count=2, held_slots=b"\x01"),
                member.connection,
            ),
            1.0,
        )
    assert not made.cluster.trains and all(not m.connection for m in made.cluster.members_in_role(Role.WORKER)), (
        "all workers restart"
    )
    assert made.cluster.reason.endswith(": all workers restart from the newest checkpoint"), "and the console says so"


def workers_of(made: SchedulerMachine) -> list[str]:
    return [m.node_id for m in made.cluster.members_in_role(Role.WORKER)]


def test_remaining_ranks_leave_after_rollback_to_checkpoint() -> None:
    made = sharded_under_agent(4)
    made.step(MessageReceived(ScaleRequest(workers=2), 9), 1.0)
    assert workers_of(made) == ["0", "1", "2"]
    lose_state(made)
    start_processes(made)
    resume_all_ranks(made)
    assert (phase(made), outcomes(made)) == (Phase.READY, [Outcome.OPEN]), "the operation is not over"
    assert isinstance(_reply_to(made, ScaleRequest(workers=5)), Refused), "no step was finished yet"
    complete_step(made)
    effects = tick(made, 2.0, since=1.5)
    assert set(sent(effects, ClusterEnded)) == {13} and workers_of(made) == ["0", "1"]
    resume_all_ranks(made)
    assert (phase(made), outcomes(made), made.cluster.departing_ids) == (Phase.READY, [Outcome.RESUMED], ())


def test_scale_in_ends_with_run_if_training_ends_first() -> None:
    made = sharded_under_agent(4)
    made.step(MessageReceived(ScaleRequest(workers=2), 9), 1.0)
    resume_ranks(made, (11, 12))
    made.step(MessageReceived(ChildExited("0", 1, 0), 1), 1.0)
    resume_ranks(made, (13,))
    assert outcomes(made) == [Outcome.OPEN]
    for name in ("1", "2"):
        made.step(MessageReceived(ChildExited(name, 1, 0), 1), 1.0)
    assert (phase(made), outcomes(made)) == (Phase.ENDED, [Outcome.FINISHED])


def test_one_departing_rank_stays_if_no_other_is_alive() -> None:
    made = sharded_under_agent(5, together=2)
    made.step(MessageReceived(ScaleRequest(workers=1), 9), 1.0)
    assert workers_of(made) == ["0", "1", "2"]
    edited = EditableCluster.of(made)
    edited.change(edited.worker("0"), deaths_without_progress=3)  # it cannot be replaced: the world shrinks
    made.step(MessageReceived(ChildExited("0", 1, 137, "killed"), 1), 1.0)
    assert sorted(workers_of(made)) == ["1", "2"]
    resume_all_ranks(made)
    assert len(workers_of(made)) == 1
    resume_all_ranks(made)
    assert (phase(made), set(outcomes(made))) == (Phase.READY, {Outcome.RESUMED})


def test_restored_scheduler_waits_for_resumed_ranks_before_next_leave() -> None:
    made = sharded_under_agent(4)
    made.step(MessageReceived(ScaleRequest(workers=2), 9), 1.0)
    edited = EditableCluster.of(made)
    edited.barrier.safe_point.resumed.clear()
    edited.barrier.resume(is_pending=False)
    edited.recovery.update_readiness(edited.step(1.0), "all members are reachable again")  # as after a return
    effects = tick(made, 2.0, since=1.5)
    assert set(sent(effects, NewGeneration)) == {11, 12, 13} and phase(made) is Phase.HEALING
    assert workers_of(made) == ["0", "1", "2"], "no rank leaves before all have resumed"
    assert set(sent(resume_all_ranks(made), ClusterEnded)) == {13}


def test_joining_ranks_after_full_restart_are_healed_as_others() -> None:
    made = sharded_under_agent(3)
    made.step(MessageReceived(ScaleRequest(workers=4), 9), 1.0)
    start_processes(made)
    lose_state(made)
    assert outcomes(made) == [Outcome.RESTARTED]
    made.step(MessageReceived(ChildExited("3", 2, 137, "killed"), 1), 1.0)
    assert workers_of(made) == ["0", "1", "2", "3"] and outcomes(made) == [Outcome.RESTARTED, Outcome.OPEN]


def test_rollback_request_is_answered() -> None:
    made = sharded_under_agent(3)
    made.step(MessageReceived(ScaleRequest(workers=4), 9), 1.0)
    answer = _reply_to(made, ScaleRequest(roll_back=True))
    assert isinstance(answer, ScaleAccepted) and (answer.operation, answer.reason) == (
        2,
        "requested; the scale-out is rolled back",
    )


def test_death_during_rollback_is_healed() -> None:
    made = sharded_under_agent(3)
    made.step(MessageReceived(ScaleRequest(workers=4), 9), 1.0)
    made.step(MessageReceived(ChildExited("1", 1, 137, "killed"), 1), 2.0)
    made.step(MessageReceived(ChildExited("3", 1, 137, "killed"), 1), 3.0)
    growth, death, back = made.incidents.records
    assert [growth.outcome, death.outcome, back.outcome] == [Outcome.ROLLED_BACK, Outcome.OPEN, Outcome.OPEN]
    assert growth.reason.endswith("as requested; worker:3 did not join: killed; the scale-out is rolled back")
    assert growth.total_ms == 2000.0, "it had been waited for so long"
    start_processes(made)
    resume_all_ranks(made)
    assert outcomes(made) == [Outcome.ROLLED_BACK, Outcome.RESUMED, Outcome.RESUMED]


def test_no_rollback_if_all_ranks_with_state_died() -> None:
    made = sharded_under_agent(2, together=0)
    made.step(MessageReceived(ScaleRequest(workers=3), 9), 1.0)
    for name in ("0", "1"):
        made.step(MessageReceived(ChildExited(name, 1, 137, "killed"), 1), 1.0)
    start_processes(made)
    for member in made.cluster.members_in_role(Role.WORKER):
        made.step(MessageReceived(SafePointReport(made.cluster.generation, None, needs_state=True), member.connection), 1.0)
    assert isinstance(_reply_to(made, ScaleRequest(roll_back=True)), Refused), "all workers restart in the larger world"
    made.step(MessageReceived(ChildExited("2", 1, 137, "killed"), 1), 1.0)
    assert (workers_of(made), made.incidents.records[-1].strategy) == (["0", "1", "2"], "recover-in-place")


def restart_scheduler(made: SchedulerMachine, effects: Effects) -> SchedulerMachine:
    """The next scheduler, with what was durable after these effects; all members have re-attached."""
    agents = [AgentRecord.from_agent(agent) for agent in made.cluster.agents.values()]
    members = {r.rank: r for r in (MemberRecord.from_member(m) for m in made.cluster.members.values())}
    records = [r for r in stored_records(effects) if not isinstance(r, MemberRecord)]
    again = SchedulerMachine(made.cluster.settings, cluster_id="c2", job="job", now=0.0)
    again.step(JournalRead((*records, *agents, *members.values())), 0.0)
    again.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 3, cluster_id="c1"), 1), 0.0)
    start_processes(again)
    return again


@pytest.mark.parametrize("what", ["all come", "one dies", "none comes"])
def test_restored_scheduler_waits_for_joining_ranks(what: str) -> None:
    made = sharded_under_agent(3)
    again = restart_scheduler(made, made.step(MessageReceived(ScaleRequest(workers=5), 9), 1.0))
    assert (phase(again), outcomes(again)) == (Phase.HEALING, [Outcome.OPEN]), "they are here, and not in a step yet"
    if what == "all come":
        resume_all_ranks(again)
        assert (phase(again), outcomes(again)) == (Phase.READY, [Outcome.RESUMED])
        assert isinstance(_reply_to(again, ScaleRequest(roll_back=True)), Refused)
        return
    if what == "one dies":
        again.step(MessageReceived(ChildExited("4", 1, 137, "killed"), 1), 2.0)
    else:
        tick(again, 302.0, beats=[1, 11, 12, 13, 14, 15], since=1.0)
    assert workers_of(again) == ["0", "1", "2"] and outcomes(again) == [Outcome.ROLLED_BACK, Outcome.OPEN]
    resume_all_ranks(again)
    assert outcomes(again) == [Outcome.ROLLED_BACK, Outcome.RESUMED]


def _reply_to(made: SchedulerMachine, reply_to: ScaleRequest) -> ScaleAccepted | RequestAccepted | Refused:
    return reply(made.step(MessageReceived(reply_to, 9), 1.0))


def reply(effects: Effects) -> ScaleAccepted | RequestAccepted | Refused:
    """The only answer to an operator's request."""
    kinds = (ScaleAccepted, RequestAccepted, Refused)
    (answer,) = [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kinds)]
    return answer


def test_agent_may_leave_after_its_workers_finished() -> None:
    made = ready_agents()
    made.step(MessageReceived(ChildExited("2", 1, 0), 2), 1.0)
    assert made.step(ConnectionLost("closed", 2), 2.0) == []
    assert phase(made) is Phase.READY


def test_leaving_agent_ends_its_workers() -> None:
    made = ready_agents()
    made.step(MessageReceived(register("2", incarnation=1), 3), 0.0)
    effects = made.step(MessageReceived(Leave(143, "SIGTERM"), 2), 1.0)
    end = ended(effects)
    assert (
        end is not None
        and end.code == 143
        and sent(effects, LeaveAcknowledged) == {2: LeaveAcknowledged()}
        and set(sent(effects, ClusterEnded)) == {1}
    )


def test_a_dead_server_without_an_agent_is_not_healed_by_restarting_workers() -> None:
    made = machine(1, server_num=1, max_restarts=3)
    made.step(MessageReceived(RegisterAgent("a", "la", BOX, 1), 1), 0.0)
    made.step(MessageReceived(Register(Role.PSERVER, "0", "ls", BOX), 2), 0.0)
    assert ended(made.step(ConnectionLost("reset", 2), 1.0)) is not None


def test_replacement_has_time_for_progress_while_others_wait() -> None:
    made = ready_agents(strategies=("recover-in-place",), stuck_s=1.0)
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
    for rank, waits in enumerate(("5.0", "5.0", "")):
        made.step(MessageReceived(Heartbeat(Progress(5, "train", waiting_in=waits)), 10 + rank), 0.0)
    effects = tick(made, 2.0)
    assert "worker:2 died: stuck: all other ranks wait for it in collective 5.0 for over 1 s" in published(effects)
    assert sent(effects, DesiredChildren)[2].assignments == [Assignment("2", 2, 2, 0)]
    made.step(MessageReceived(register("2", "second life", OTHER, incarnation=2), 20), 2.0)
    effects = made.step(MessageReceived(Heartbeat(), 20), 2.0) + tick(made, 25.0, beats=[1, 2], since=2.0)
    assert "worker:2 died" not in " ".join(published(effects)), "it restores"
    made.step(MessageReceived(Heartbeat(Progress(5, "train", in_loop=True)), 20), 25.0)
    assert any("worker:2 died: stuck" in sentence for sentence in published(tick(made, 27.0, since=25.0))), "it had begun"


def test_run_ends_if_rank_left_early() -> None:
    made = ready_agents(strategies=("recover-in-place", "dump"), stuck_s=5.0)
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
    made.step(MessageReceived(ChildExited("2", 1, 0), 2), 0.0)
    for rank in range(2):
        made.step(MessageReceived(Heartbeat(Progress(5, "train", in_loop=True, waiting_in="5.0")), 10 + rank), 0.0)
    effects = tick(made, 6.0)
    assert published(effects)[-1].startswith(
        "cluster dump: worker:2 left before the run was finished: all other ranks wait in collective 5.0 for over 5 s"
    )
    assert set(sent(effects, DumpRequest)) == {10, 11} and phase(made) is Phase.HEALING
    made.step(MessageReceived(DumpWritten(5, "dump-5"), 10), 6.0)
    end = ended(made.step(MessageReceived(DumpWritten(5, "dump-5"), 11), 6.0))
    assert end is not None and end.code == ExitCode.PEER_FAILED and end.reason.endswith("; step 5 is in dump-5")


def test_wait_for_finished_rank_ends_run_immediately() -> None:
    made = ready_agents(strategies=("recover-in-place",))
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
    made.step(MessageReceived(SafePointReport(1, CollectiveNumber(-1, 6), finished=True), 12), 0.0)
    for rank, waits in enumerate(("-1.5", "-1.6")):  # a beat is older than what followed it
        made.step(MessageReceived(Heartbeat(Progress(5, "train", waiting_in=waits)), 10 + rank), 0.0)
    assert not ended(tick(made, 0.3))
    made.step(MessageReceived(Heartbeat(Progress(5, "train", waiting_in="-1.7")), 11), 0.4)
    end = ended(tick(made, 0.6, since=0.4))
    assert end is not None and end.code == ExitCode.PEER_FAILED
    assert end.reason == (
        "rank 2 has finished its script, but rank 1 waits for it in collective -1.7: all ranks must call"
        " the same collectives in the same order"
    )


@pytest.mark.parametrize("text", ["", "5", "5.-1", "a.b", "٣.٣", "1.2.3", "9" * 30 + ".0"])
def test_invalid_collective_number_parses_as_none(text: str) -> None:
    assert CollectiveNumber.parse(text) is None and CollectiveNumber.parse(str(CollectiveNumber(-1, 7))) == CollectiveNumber(
        -1, 7
    )


def test_left_rank_does_not_block_resume() -> None:
    """Without heartbeats no wait would ever be detected."""
    made = ready_agents(strategies=("recover-in-place",), heartbeats_enabled=False, stuck_s=-1.0)
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
    made.step(MessageReceived(ChildExited("2", 1, 0), 2), 0.0)
    made.step(MessageReceived(ChildExited("1", 1, 137, "killed by SIGKILL"), 1), 1.0)
    made.step(MessageReceived(register("1", "second life", incarnation=2), 21), 1.0)
    made.step(MessageReceived(SafePointReport(2, completed=CollectiveNumber(5, 0), waiting_in=CollectiveNumber(6, 0)), 10), 1.0)
    assert not ended(tick(made, 1.5, since=1.0)), "the other has not said a word"
    made.step(MessageReceived(SafePointReport(2, needs_state=True), 21), 1.5)
    end = ended(tick(made, 2.0, since=1.5))
    assert end is not None and end.code == ExitCode.PEER_FAILED
    assert end.reason == "worker:2 left before the run was finished: all other ranks wait to resume"


@pytest.mark.parametrize("had", [False, True])
def test_run_ends_if_rank_left_between_plan_and_step(had: bool) -> None:
    """The left rank had resumed if all others do. Otherwise they wait for it and the run ends."""
    made = ready_agents(strategies=("recover-in-place",), heartbeats_enabled=False, stuck_s=5.0)
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
    made.step(MessageReceived(RendezvousPut("met", b"", 1), 10), 0.0)
    made.step(MessageReceived(ChildExited("1", 1, 137, "killed by SIGKILL"), 1), 1.0)
    made.step(MessageReceived(register("1", "second life", incarnation=2), 21), 1.0)
    for link in (10, 12):
        made.step(
            MessageReceived(SafePointReport(2, completed=CollectiveNumber(5, 0), waiting_in=CollectiveNumber(6, 0)), link), 1.0
        )
    assert set(sent(made.step(MessageReceived(SafePointReport(2, needs_state=True), 21), 1.0), HealPlan)) == {10, 12, 21}
    made.step(MessageReceived(ChildExited("2", 1, 0), 2), 1.0)
    made.step(MessageReceived(RankResumed(2, 6), 10), 1.0)
    effects = tick(made, 6.0, since=0.5)
    assert not ended(effects) and phase(made) is Phase.HEALING, "the others have time to say so"
    if had:
        made.step(MessageReceived(RankResumed(2, 6), 21), 6.0)
        tick(made, 6.5, since=6.0)
        assert (phase(made), outcomes(made)) == (Phase.READY, [Outcome.RESUMED])
        return
    end = ended(tick(made, 7.0, since=6.0))
    assert end is not None and end.code == ExitCode.PEER_FAILED
    assert end.reason == "worker:2 left before the run was finished: all other ranks have waited to resume for over 5 s"


def test_finished_rank_leaves_after_scheduler_lost_earlier_reports() -> None:
    made = ready_agents(strategies=("recover-in-place",))
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
    made.step(MessageReceived(ChildExited("2", 1, 0), 2), 0.0)
    for rank in range(2):
        assert not sent(
            made.step(MessageReceived(SafePointReport(1, completed=CollectiveNumber(9, 0), finished=True), 10 + rank), 0.0),
            HealPlan,
        )
    assert sent(tick(made, 0.5), HealPlan) == dict.fromkeys((10, 11), HealPlan(1, done=True))
    assert not sent(tick(made, 1.0, since=0.5), HealPlan), "once"
    assert not ended(made.step(MessageReceived(ChildExited("0", 1, 0), 1), 0.4))
    end = ended(made.step(MessageReceived(ChildExited("1", 1, 1), 1), 0.4))
    assert end is not None and end.code == 0, "all had come to their end: nothing is left to repeat"


def test_replacement_that_never_registers_ends_run_after_heal_deadline() -> None:
    made = ready_agents(strategies=("recover-in-place",), topo_timeout_s=60.0)
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
    made.step(MessageReceived(ChildExited("2", 1, 137, "killed by SIGKILL"), 2), 1.0)
    assert not ended(tick(made, 60.0, beats=[1, 2, 10, 11], since=1.0))
    end = ended(tick(made, 64.0, beats=[1, 2, 10, 11], since=60.0))
    assert end is not None and end.code == 137 and end.reason == "worker:2 did not come back within 60 s"


# -- the scheduler's own death ---------------------------------------------------------------------------------------


def restored(records: tuple[Record, ...], now: float = 100.0, **settings: Any) -> tuple[SchedulerMachine, Effects]:
    cluster = next(r for r in records if isinstance(r, ClusterRecord))
    made = SchedulerMachine(
        ClusterSettings(cluster.worker_num, cluster.server_num, **settings), cluster_id="c2", job="job", now=now
    )
    return made, made.step(JournalRead(records), now)


def crashed(*names: str, **settings: Any) -> tuple[Record, ...]:
    """The journal of a cluster of raw workers that formed."""
    made = machine(len(names), **settings)
    return journal(*(made.step(MessageReceived(register(name), link), 0.0) for link, name in enumerate(names, start=1)))


def test_members_re_attach_with_ranks_and_cluster_is_ready() -> None:
    made, effects = restored(crashed("a", "b"), recovery=True)
    assert published(effects) == ["cluster restored: generation 1, 2 members"]
    assert phase(made) is Phase.RETURNING and made.cluster.cluster_id == "c1"
    held: dict[str, Any] = {"cluster_id": "c1", "incarnation": 1, "generation": 1}
    one = made.step(MessageReceived(register("a", rank=0, **held), 1), 100.1)
    assert sent(one, RankAssigned) == {1: RankAssigned(1, 0, 2, 0, 2)} and not stored_records(one)
    made.step(MessageReceived(register("b", rank=1, **held), 2), 100.2)
    assert phase(made) is Phase.READY and made.cluster.generation == 1


def test_member_that_misses_return_deadline_is_dead_and_replaced() -> None:
    made, _ = restored(crashed("a", "b"), recovery=True, node_timeout_s=10.0)
    made.step(MessageReceived(register("a"), 1), 100.0)
    assert sent(made.step(MessageReceived(register("b", "second life"), 2), 100.0), Refused)[2].retry_after_s > 0
    effects = tick(made, 111.0, beats=[1], since=100.0)
    assert sent(effects, NewGeneration)[1].generation == 2 and phase(made) is Phase.HEALING


def test_restored_dead_member_is_awaited() -> None:
    before = ready("a", "b", recovery=True)
    records = journal(tuple(Persist(r) for r in crashed("a", "b")), before.step(ConnectionLost("reset", 2), 1.0))  # type: ignore[arg-type]
    made, _ = restored(records, recovery=True, topo_timeout_s=30.0)
    effects = made.step(MessageReceived(register("a"), 1), 100.0)
    assert phase(made) is Phase.HEALING
    assert published(effects)[-1] == "cluster healing: waiting for worker:b to be restarted with the same variables"
    assert ended(tick(made, 131.0, beats=[1], since=100.0))


def test_return_is_limited_by_topo_timeout_without_heartbeats() -> None:
    made, _ = restored(crashed("a", "b"), recovery=True, heartbeats_enabled=False, topo_timeout_s=30.0)
    made.step(MessageReceived(register("a"), 1), 100.0)
    end = ended(tick(made, 131.0, since=100.0))
    assert end is not None and end.reason == "worker:b did not come back within 30 s"


def test_incomplete_formation_in_journal_is_ignored() -> None:
    records = crashed("a", "b")
    forming = ClusterRecord("c1", "job", 2, 0, Phase.FORMING, 0)
    made, effects = restored((forming, *records[:-1]), recovery=True)
    assert phase(made) is Phase.FORMING and not made.cluster.members and effects == []
    made.step(MessageReceived(register("b"), 1), 100.0)
    assert made.cluster.reason == "1 worker missing"


def test_re_attached_agents_cover_children_that_never_registered() -> None:
    made = machine(3, recovery=True)
    first = made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 2), 1), 0.0)
    records = journal(first, made.step(MessageReceived(RegisterAgent("b", "life of b", OTHER, 1), 2), 0.0))
    made, _ = restored(records, recovery=True)
    made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 2, cluster_id="c1"), 1), 100.0)
    assert phase(made) is Phase.RETURNING
    made.step(MessageReceived(RegisterAgent("b", "life of b", OTHER, 1, cluster_id="c1"), 2), 100.0)
    assert phase(made) is Phase.READY
    assert {m.state for m in made.cluster.members.values()} == {NodeState.ALIVE}


def test_full_restart_waits_for_disconnected_agent() -> None:
    made = machine(3, recovery=True)
    first = made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 2), 1), 0.0)
    records = journal(first, made.step(MessageReceived(RegisterAgent("b", "life of b", OTHER, 1), 2), 0.0))
    made, _ = restored(records, recovery=True, max_restarts=1)
    made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 2, cluster_id="c1"), 1), 100.0)
    effects = made.step(MessageReceived(ChildExited("0", 1, 1), 1), 100.0)
    assert set(sent(effects, DesiredChildren)) == {1} and phase(made) is Phase.RETURNING
    assert {record.state for record in stored_records(effects) if isinstance(record, MemberRecord)} == {NodeState.ALIVE}
    late = made.step(MessageReceived(RegisterAgent("b", "life of b", OTHER, 1, cluster_id="c1"), 2), 101.0)
    assert sent(late, DesiredChildren)[2].assignments == [Assignment("2", 2, 2, 0)] and phase(made) is Phase.READY


def test_restored_scheduler_heals_death_reported_before_registrations() -> None:
    made = machine(1)
    formed = made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 1), 1), 0.0)
    attached = made.step(MessageReceived(register("0", incarnation=1), 2), 0.1)
    assert stored_records(made.step(MessageReceived(register("0", incarnation=1), 3), 0.2)) == [], (
        "that the program heals is written once"
    )
    made, _ = restored(journal(formed, attached), strategies=("recover-in-place",))
    made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 1, cluster_id="c1"), 1), 100.0)
    effects = made.step(MessageReceived(ChildExited("0", 1, 137), 1), 100.0)
    assert sent(effects, DesiredChildren)[1].assignments == [Assignment("0", 0, 2, 0)]


def test_restored_cluster_ends_if_all_workers_had_left() -> None:
    before = ready("a", "b", recovery=True)
    leaves = [before.step(MessageReceived(Leave(), link), 1.0) for link in (1, 2)]
    formed: Effects = [Persist(record) for record in crashed("a", "b")]
    records = [r for r in journal(formed, *leaves) if isinstance(r, MemberRecord)]
    _, effects = restored((*records, ClusterRecord("c1", "job", 2, 0, Phase.READY, 1)), recovery=True)
    assert ended(effects) == EndCluster(0, "all 2 workers finished")


# -- the board -------------------------------------------------------------------------------------------------------


def test_values_are_returned_only_in_their_generation() -> None:
    made = ready("0", "1", recovery=True)
    assert made.step(MessageReceived(RendezvousGet("addr/1", 1), 1), 0.0) == []
    assert sent(made.step(MessageReceived(RendezvousPut("addr/1", b"here", 1), 2), 0.0), RendezvousValue) == {
        1: RendezvousValue("addr/1", b"here", 1)
    }
    assert sent(made.step(MessageReceived(RendezvousGet("addr/1", 1), 2), 0.0), RendezvousValue) == {
        2: RendezvousValue("addr/1", b"here", 1)
    }
    made.step(ConnectionLost("reset", 2), 1.0)
    assert (
        made.step(MessageReceived(RendezvousPut("addr/0", b"late", 1), 1), 1.0)
        == made.step(MessageReceived(RendezvousGet("addr/1", 2), 1), 1.0)
        == []
    )


def test_unregistered_connection_cannot_use_rendezvous_store() -> None:
    made = ready("0", "1")
    assert made.step(MessageReceived(RendezvousPut("addr/0", b"forged", 1), 99), 0.0) == []
    made.step(MessageReceived(RendezvousPut("addr/0", b"true", 1), 1), 0.0)
    assert made.step(MessageReceived(RendezvousGet("addr/0", 1), 99), 0.0) == []


# -- a host that is said to be gone ----------------------------------------------------------------------------------

POD, NEXT = Host("pod-1", "pod-1", "10.0.0.2", life="uid-1"), Host("pod-1", "pod-1", "10.0.0.3", life="uid-2")


def pods(**settings: Any) -> SchedulerMachine:
    """Two agents, one in a pod, whose workers have called covey.init(); the pod's link broke."""
    made = machine(3, recovery=True, strategies=parse_strategies(["recover"]), extra_ranks=0, **settings)
    made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 2, first_rank=0), 1), 0.0)
    made.step(MessageReceived(RegisterAgent("b", "life of b", POD, 1, first_rank=2), 2), 0.0)
    made.step(MessageReceived(register("2", host=POD, incarnation=1), 3), 0.0)
    made.step(ConnectionLost("reset", 3), 1.0)
    made.step(ConnectionLost("reset", 2), 1.0)
    return made


def test_next_pod_is_admitted_only_after_previous_is_reported_gone() -> None:
    made = pods()
    again = RegisterAgent("c", "life of c", NEXT, 1, first_rank=2)
    assert sent(made.step(MessageReceived(again, 4), 2.0), Refused)[4].retry_after_s > 0, (
        "an agent of its host alone proves nothing"
    )
    said = made.step(HostGone("uid-1", "the pod pod-1 is over"), 2.0)
    assert state(made, "2") is NodeState.DEAD and phase(made) is Phase.HEALING
    assert {record.gone_hosts for record in stored_records(said) if isinstance(record, ClusterRecord)} == {("uid-1",)}, (
        "it is durable"
    )
    [start] = sent(made.step(MessageReceived(again, 4), 2.5), DesiredChildren).values()
    assert [(a.node_id, a.incarnation) for a in start.assignments] == [("2", 2)], "its place, its rank, the next life"


def test_nodes_of_gone_pod_are_refused_by_every_scheduler() -> None:
    made = pods()
    effects = [made.step(HostGone("uid-1", "it is over"), 2.0), made.step(HostGone("uid-1", "it is over"), 2.0)]
    assert effects[1] == [], "once is enough"
    other = machine(3, recovery=True, strategies=parse_strategies(["recover"]), extra_ranks=0)
    other.step(JournalRead(journal(*effects)), 3.0)
    for each in (made, other):
        for registration in (RegisterAgent("b", "life of b", POD, 1), register("2", host=POD, incarnation=1)):
            assert "was reported gone" in sent(each.step(MessageReceived(registration, 9), 3.0), Refused)[9].reason


def test_worker_of_gone_host_is_dead_and_its_connection_closed() -> None:
    made = machine(2, recovery=True)
    made.step(MessageReceived(register("x"), 1), 0.0)
    made.step(MessageReceived(register("y", host=POD), 2), 0.0)
    said = made.step(HostGone("uid-1", "it is over"), 1.0)
    assert state(made, "y") is NodeState.DEAD and state(made, "x") is NodeState.ALIVE and Close(2) in said
    assert made.step(HostGone("uid-9", "unknown host"), 1.0)[1:] == [] and state(made, "x") is NodeState.ALIVE
    assert sent(made.step(MessageReceived(register("y", "next", host=NEXT), 3), 1.5), Registered)[3].incarnation == 2


def test_kill_request_is_sent_to_agent_and_exit_is_handled_normally() -> None:
    made = ready_agents()
    made.step(MessageReceived(ChildStarted("2", 1, 42), 2), 1.0)
    effects = made.step(MessageReceived(KillRequest("worker:2", "to see"), 9), 1.0)
    assert sent(effects, KillChild) == {2: KillChild("2", 1)} and isinstance(reply(effects), RequestAccepted)
    assert "worker:2 to be killed: to see: process 42 of worker:2 on other is killed" in published(effects)
    assert state(made, "2") is NodeState.ALIVE and made.counters["kills"] == 1, "nothing is decided before it is dead"


@pytest.mark.parametrize(
    ("node", "why"), [("worker:9", "there is no node"), ("worker:1", "is not running yet"), ("worker:0", "process 7 on")]
)
def test_kill_request_without_target_is_refused(node: str, why: str) -> None:
    made = machine(2)
    made.step(MessageReceived(register("0", pid=7), 1), 0.0)
    made.step(MessageReceived(register("1"), 2), 0.0)
    effects = made.step(MessageReceived(KillRequest(node), 9), 1.0)
    assert not sent(effects, KillChild) and why in sent(effects, Refused)[9].reason


def test_worker_with_mindspore_protocol_ends_run() -> None:
    made = ready_agents(max_restarts=3)
    effects = made.step(MindSporeDetected("worker:1"), 1.0)
    reason = "worker:1 runs a MindSpore script, which needs MindSpore's own scheduler: add --framework mindspore"
    assert set(sent(effects, ClusterEnded)) == {1, 2} and sent(effects, ClusterEnded)[1] == ClusterEnded(
        reason, ExitCode.BAD_SETTING
    )
    assert phase(made) is Phase.ENDED and not made.step(MindSporeDetected("worker:0"), 2.0)


def test_worker_that_called_init_may_use_mindspore_protocol() -> None:
    made = ready_agents()
    EditableCluster.of(made).set(heals=True)
    assert not made.step(MindSporeDetected("worker:1"), 2.0) and phase(made) is Phase.READY


def test_failed_checkpoint_is_published_and_counted() -> None:
    made = ready("0", "1")
    assert published(made.step(MessageReceived(CheckpointFailed(10, "the disk is full"), 2), 1.0)) == [
        "worker:1 unsaved: the disk is full"
    ]
    assert made.counters["unsaved"] == 1 and phase(made) is Phase.READY
    assert not made.step(MessageReceived(CheckpointFailed(10, "the disk is full"), 7), 1.0), "a stranger's is not"


def test_requested_dump_ends_run_when_all_ranks_have_written() -> None:
    made = ready("0", "1")
    reply_to = MessageReceived(StopRequest("enough", dump=True), 9)
    early = made.step(reply_to, 1.0)
    assert not sent(early, DumpRequest) and isinstance(reply(early), Refused), "no rank is in a loop yet"
    for link in (1, 2):
        made.step(MessageReceived(Heartbeat(Progress(3, "train", in_loop=True)), link), 1.0)
    effects = made.step(reply_to, 1.0)
    assert sent(effects, DumpRequest) == {link: DumpRequest("enough") for link in (1, 2)}
    assert isinstance(reply(effects), RequestAccepted)
    assert "already" in sent(made.step(reply_to, 1.0), Refused)[9].reason
    assert ended(made.step(MessageReceived(DumpWritten(4, "here"), 1), 1.1)) is None
    end = ended(made.step(MessageReceived(DumpWritten(4, "here"), 2), 1.1))
    assert end is not None and (end.code, end.reason) == (ExitCode.STOPPED, "enough; step 4 is in here")


def test_requested_dump_continues_after_scheduler_restart() -> None:
    before = ready("0", "1", recovery=True)
    for link in (1, 2):
        before.step(MessageReceived(Heartbeat(Progress(3, "train", in_loop=True)), link), 1.0)
    reply_to = before.step(MessageReceived(StopRequest("enough", dump=True), 9), 1.0)
    before.step(MessageReceived(DumpWritten(4, "here"), 1), 1.1)  # heard, and lost with the scheduler
    formed: Effects = [Persist(record) for record in crashed("0", "1")]
    made, _ = restored(journal(formed, reply_to), recovery=True, dump_s=20.0)
    for link, rank in ((1, 0), (2, 1)):
        back = made.step(
            MessageReceived(register(str(rank), rank=rank, cluster_id="c1", incarnation=1, generation=1), link), 100.1
        )
        assert sent(back, DumpRequest) == {link: DumpRequest("enough")}
    assert ended(made.step(MessageReceived(DumpWritten(4, "here"), 1), 100.2)) is None
    end = ended(made.step(MessageReceived(DumpWritten(5, "there"), 2), 100.3))
    assert end is not None and (end.code, end.reason) == (ExitCode.STOPPED, "enough; step 5 is in there")

    alone, _ = restored(journal(formed, reply_to), recovery=True, dump_s=20.0)
    alone.step(MessageReceived(register("0"), 1), 100.1)
    alone.step(MessageReceived(DumpWritten(4, "here"), 1), 100.2)
    tick(alone, 119.0, beats=[1], since=100.0)
    assert alone.cluster.ended is None
    tick(alone, 121.0, beats=[1], since=119.0)
    assert alone.cluster.ended is not None, "a member that does not return is not awaited any longer"
    assert alone.cluster.ended.reason == "enough; step 4 is in here"


def training(**settings: Any) -> SchedulerMachine:
    """Three ranks that have finished a step."""
    made = ready_agents(**settings)
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), host=BOX if rank < 2 else OTHER, incarnation=1), 10 + rank), 0.0)
        made.step(MessageReceived(Heartbeat(Progress(5, "train", in_loop=True)), 10 + rank), 0.0)
    return made


@pytest.mark.parametrize("left", [False, True])
def test_world_shrinks_without_returning_host_if_possible(left: bool) -> None:
    made = training(strategies=("recover-in-place", "elastic-training"), shrink_after_s=5.0, extra_ranks=0, agents_return=False)
    made.step(ConnectionLost("closed", 2), 0.0)
    assert phase(made) is Phase.HEALING
    if left:
        made.step(MessageReceived(ChildExited("0", 1, 0), 1), 0.0)
    effects = tick(made, 5.0, beats=[1, 10, 11]) + tick(made, 6.0, beats=[1, 10, 11], since=5.0)
    limit = "no host joined for worker:2 within 5 s"
    if left:
        end = ended(effects)
        assert end is not None and end.reason == f"{limit}, and some workers have finished and left already"
    else:
        assert (
            made.cluster.size(Role.WORKER) == 2 and made.cluster.reason == f"{limit}: the other ranks continue in a world of 2"
        )


def test_unreplaceable_rank_of_leaving_host_ends_run_with_dump() -> None:
    made = training(strategies=("recover", "dump"), extra_ranks=0)
    made.step(MessageReceived(Draining("asked to leave"), 2), 0.0)
    effects = made.step(MessageReceived(ChildExited("2", 1, 1), 2), 0.0)
    assert set(sent(effects, DumpRequest)) == {10, 11}
    assert "cluster dump: other was asked to leave, and no other host can run worker:2" in " ".join(published(effects))


def test_full_store_refuses_puts_and_gets() -> None:
    made = ready_agents()
    made.step(MessageReceived(register("0", incarnation=1), 10), 0.0)
    EditableCluster.of(made).barrier._rendezvous = RendezvousStore(bytes_max=3, keys_max=1)
    assert not sent(made.step(MessageReceived(RendezvousPut("a", b"123", 1), 10), 0.0), Refused)
    assert (
        sent(made.step(MessageReceived(RendezvousPut("b", b"", 1), 10), 0.0), Refused)[10].reason
        == "the rendezvous store is full: b was not stored"
    )
    assert not sent(made.step(MessageReceived(RendezvousGet("c", 1), 10), 0.0), Refused)
    refused = sent(made.step(MessageReceived(RendezvousGet("d", 1), 10), 0.0), Refused)[10]
    assert refused.reason == "the rendezvous store is full: too many requests wait for values, d was rejected"


def test_unknown_connections_and_old_generations_set_no_value() -> None:
    made = ready_agents()
    made.step(MessageReceived(register("0", incarnation=1), 10), 0.0)
    assert (
        made.step(MessageReceived(RendezvousPut("a", b"x", 1), 99), 0.0)
        == made.step(MessageReceived(RendezvousPut("a", b"x", 7), 10), 0.0)
        == []
    )
    assert (
        made.step(MessageReceived(RendezvousGet("a", 1), 99), 0.0)
        == made.step(MessageReceived(RendezvousGet("a", 7), 10), 0.0)
        == []
    )
    board = EditableCluster.of(made).barrier._rendezvous
    assert not board.values and not board.waiters_by_key


@pytest.mark.parametrize(
    "message", [SafePointReport(0, finished=True), CollectiveFailed(0, "broken"), RankResumed(0, 1), StateFetched(0)]
)
def test_reports_about_a_generation_are_ignored_before_formation(message: Any) -> None:
    made = machine(2)
    made.step(MessageReceived(register("one"), 1), 0.0)
    assert made.step(MessageReceived(message, 1), 0.1) == []
    assert ended(tick(made, 2.0, beats=[1])) is None and phase(made) is Phase.FORMING
    made.step(MessageReceived(register("two"), 2), 2.0)
    assert phase(made) is Phase.READY
