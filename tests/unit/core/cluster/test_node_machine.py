"""A node's machine, with literal events: how it joins, keeps its place, and leaves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from covey.core import messages
from covey.core.cluster.node_machine import NodeMachine, NodeSettings, NodeStage
from covey.core.effects import Close, Connect, Deliver, EndMembership, Level, NodeEffect, PublishEvent, Send, SendHeartbeat
from covey.core.events import Connected, ConnectionLost, LeaveRequested, MessageReceived, SchedulerRefused, Tick
from covey.core.types import Host, Role
from covey.errors import ExitCode

BOX = Host("boot-box", "box", "10.0.0.1")
WISH = messages.Register(Role.WORKER, "", "life", BOX)
NEVER = float("inf")


def node(registration: messages.Register | messages.RegisterAgent = WISH, **settings: Any) -> NodeMachine:
    return NodeMachine(registration, NodeSettings("sched:8118", **settings), jitter=lambda: 1.0, now=0.0)


def waiting(**settings: Any) -> NodeMachine:
    """Registered at 0 s, and waiting for the others."""
    made = node(**settings)
    made.step(Tick(), 0.0)
    made.step(Connected(), 0.0)
    made.step(MessageReceived(messages.Registered("c1", "w", 1)), 0.0)
    assert made.stage is NodeStage.WAITING
    return made


def member(**settings: Any) -> NodeMachine:
    made = waiting(**settings)
    made.step(MessageReceived(messages.RankAssigned(1, 3, 8, 1, 4)), 0.0)
    assert made.stage is NodeStage.MEMBER
    return made


def finish(effects: list[NodeEffect]) -> EndMembership | None:
    return next((effect for effect in effects if isinstance(effect, EndMembership)), None)


def due(made: NodeMachine, until: float = 1e6) -> list[tuple[float, NodeEffect]]:
    """Tick whenever the machine wants it, up to a time."""
    out: list[tuple[float, NodeEffect]] = []
    while made.due_at <= until:
        now = made.due_at
        out += [(now, effect) for effect in made.step(Tick(), now)]
    return out


# -- joining ---------------------------------------------------------------------------------------------------------


def test_node_connects_registers_waits_and_becomes_member() -> None:
    made = node()
    assert made.due_at == 0.0 and made.step(Tick(), 0.0) == [Connect()]
    assert made.due_at == 1800.0, "nothing to do until something happens or the time is over"
    assert made.step(Connected(), 1.0) == [Send(WISH)]
    assert made.step(MessageReceived(messages.Registered("c1", "w", 1)), 1.0) == [Deliver(messages.Registered("c1", "w", 1))]
    formed = messages.RankAssigned(1, 3, 8, 1, 4)
    assert made.step(MessageReceived(formed), 2.0) == [Deliver(formed)]
    assert made.registration == messages.Register(
        Role.WORKER, "w", "life", BOX, cluster_id="c1", incarnation=1, generation=1, rank=3
    )


def test_node_reconnects_after_50_ms_with_exponential_backoff() -> None:
    made = node(retry_upper_s=5.0)
    calls = []
    for _ in range(10):
        now = made.due_at
        assert made.step(Tick(), now) == [Connect()]
        calls.append(now)
        made.step(ConnectionLost("connection refused"), now)
    gaps = [later - earlier for earlier, later in pairwise(calls)]
    assert gaps == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_connection_failure_is_published_once_per_reason() -> None:
    made = node()
    said = []
    for now, reason in enumerate(("connection refused", "connection refused", "wrong secret")):
        assert made.step(Tick(), now) == [Connect()]
        said += [effect.reason for effect in made.step(ConnectionLost(reason), now) if isinstance(effect, PublishEvent)]
    assert said == [
        "no connection to the scheduler at sched:8118 (connection refused); retrying",
        "no connection to the scheduler at sched:8118 (wrong secret); retrying",
    ]


def test_node_ends_if_no_scheduler_accepts_it_in_time() -> None:
    made = node(topo_timeout_s=60.0)
    made.step(Tick(), 0.0)
    made.step(ConnectionLost("connection refused"), 0.0)
    assert finish(made.step(Tick(), 60.0)) == EndMembership(
        ExitCode.UNREACHABLE,
        "no scheduler accepted this node at sched:8118 within 60 s (connection refused):"
        " start the scheduler, or check MS_SCHED_HOST and MS_SCHED_PORT",
    )


def test_node_reconnects_if_registration_is_not_answered() -> None:
    made = node(receive_timeout_s=10.0)
    made.step(Tick(), 0.0)
    made.step(Connected(), 0.0)
    assert made.due_at == 10.0 and made.step(Tick(), 10.0)[0] == Close()
    assert made.stage is NodeStage.CONNECTING and made.step(Tick(), made.due_at) == [Connect()]


def test_node_ends_after_formation_timeout_without_message() -> None:
    made = waiting(topo_timeout_s=60.0, heartbeats_enabled=False)
    last = due(made, 100.0)
    assert [at for at, effect in last if isinstance(effect, EndMembership)] == [65.0], "the scheduler's own word is waited for"
    ended = finish([effect for _, effect in last])
    assert ended is not None and ended.code == ExitCode.NOT_FORMED
    assert ended.reason == "registered at sched:8118, but the cluster was not complete within 60 s"


def test_a_negative_limit_never_ends() -> None:
    assert waiting(topo_timeout_s=-1.0, heartbeats_enabled=False).due_at == NEVER


def test_refused_node_ends() -> None:
    made = node()
    made.step(Tick(), 0.0)
    made.step(Connected(), 0.0)
    said = "the scheduler at sched:8118 refused: one worker too many"
    assert made.step(MessageReceived(messages.Refused("one worker too many")), 0.0) == [
        EndMembership(ExitCode.REFUSED, said),
        Close(),
    ]
    assert made.stage is NodeStage.ENDED and made.due_at == NEVER and made.step(ConnectionLost("x"), 1.0) == []


def test_node_that_refuses_the_scheduler_ends() -> None:
    made = node()
    made.step(Tick(), 0.0)
    assert made.step(SchedulerRefused("it is open"), 0.0) == [EndMembership(ExitCode.REFUSED, "it is open"), Close()]
    assert made.stage is NodeStage.ENDED and made.due_at == NEVER


def test_deferred_node_registers_again_on_same_connection_and_publishes_once() -> None:
    made = node(receive_timeout_s=10.0)
    made.step(Tick(), 0.0)
    made.step(Connected(), 0.0)
    held = messages.Refused("not known to be over", retry_after_s=0.5)
    assert made.step(MessageReceived(held), 0.0) == [PublishEvent("scheduler", "held off", "not known to be over")]
    assert made.due_at == 0.5 and made.step(Tick(), 0.5) == [Send(WISH)]
    assert made.due_at == 10.5, "the second question is waited for no longer than the first"
    assert made.step(MessageReceived(held), 0.6) == []


# -- living ----------------------------------------------------------------------------------------------------------


def test_heartbeat_interval_is_between_lower_and_upper() -> None:
    made = member(retry_lower_s=3.0, retry_upper_s=5.0)
    assert [at for at, effect in due(made, 20.0) if effect == SendHeartbeat()] == [5.0, 10.0, 15.0, 20.0]


def test_heartbeats_can_be_disabled() -> None:
    assert member(heartbeats_enabled=False).due_at == NEVER


def test_member_keeps_running_and_reconnects_at_least_twice_a_second() -> None:
    made = member(recovery=True)
    lost = made.step(ConnectionLost("reset"), 10.0)
    said = "the scheduler at sched:8118 is unreachable (reset); the script continues"
    assert [(e.what, e.reason) for e in lost if isinstance(e, PublishEvent)] == [("lost", said)]
    for _ in range(50):
        now = made.due_at
        assert made.step(Tick(), now) == [Connect()]
        made.step(ConnectionLost("connection refused"), now)
        assert made.due_at - now <= 0.5
    assert made.step(Connected(), 60.0) == [Send(made.registration)]
    assert isinstance(made.registration, messages.Register) and (
        made.registration.rank,
        made.registration.incarnation,
        made.registration.cluster_id,
    ) == (3, 1, "c1")
    back = made.step(MessageReceived(messages.Registered("c1", "w", 1)), 60.0)
    assert made.stage is NodeStage.MEMBER
    assert back[-1] == SendHeartbeat(), (
        "a scheduler that was started again knows nothing of what it does, and may judge by that soon"
    )


def test_no_heartbeat_after_reconnect_if_disabled() -> None:
    made = member(recovery=True, heartbeats_enabled=False)
    made.step(ConnectionLost("reset"), 10.0)
    made.step(Connected(), 10.1)
    assert SendHeartbeat() not in made.step(MessageReceived(messages.Registered("c1", "w", 1)), 10.1)


def test_member_without_recovery_ends_after_node_timeout() -> None:
    made = member(node_timeout_s=30.0)
    made.step(ConnectionLost("reset"), 10.0)
    for now in (10.1, 10.3, 39.0):
        assert made.step(Tick(), now) == [Connect()]
        made.step(ConnectionLost("connection refused"), now)
    assert finish(made.step(Tick(), 40.0)) == EndMembership(
        ExitCode.SCHEDULER_LOST, "the scheduler at sched:8118 did not come back within 30 s (connection refused)"
    )


def test_message_of_older_generation_is_ignored() -> None:
    made = member()
    news = messages.NewGeneration(3, "a member died")
    assert made.step(MessageReceived(news), 1.0) == [Deliver(news)]
    assert (
        made.step(MessageReceived(messages.NewGeneration(2, "late")), 1.0)
        == made.step(MessageReceived(messages.RankAssigned(1, 3, 8, 1, 4)), 1.0)
        == []
    )
    assert isinstance(made.registration, messages.Register) and made.registration.generation == 3


def test_agent_is_member_after_desired_children() -> None:
    made = node(messages.RegisterAgent("a", "life", BOX, 2))
    made.step(Tick(), 0.0)
    made.step(Connected(), 0.0)
    made.step(MessageReceived(messages.Registered("c1")), 0.0)
    start = messages.DesiredChildren(1, 2, [], "10.0.0.1", 29500)
    assert made.step(MessageReceived(start), 0.0) == [Deliver(start)]
    assert made.stage is NodeStage.MEMBER and made.registration == messages.RegisterAgent("a", "life", BOX, 2, cluster_id="c1")


def test_node_ends_with_code_of_cluster() -> None:
    stop = messages.ClusterEnded("worker:1 on box: exit code 7", 7)
    assert member().step(MessageReceived(stop), 1.0) == [EndMembership(7, "worker:1 on box: exit code 7", stop), Close()]


# -- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        messages.LeaveAcknowledged(),
        messages.ClusterEnded("all finished", 0),
        messages.ClusterEnded("another died", 30),
        messages.Refused("it has ended"),
    ],
)
def test_leave_ends_with_own_code_for_any_reply(answer: messages.FromScheduler) -> None:
    made = member()
    assert made.step(LeaveRequested(5, "tired"), 1.0) == [Send(messages.Leave(5, "tired"))]
    assert made.step(LeaveRequested(0, "again"), 1.0) == []
    ended = finish(made.step(MessageReceived(answer), 1.1))
    assert ended is not None and ended.code == 5


def test_other_messages_do_not_extend_leave_deadline() -> None:
    made = member()
    made.step(LeaveRequested(), 1.0)
    made.step(MessageReceived(messages.NewGeneration(2, "another one left")), 2.0)
    made.step(MessageReceived(messages.RendezvousValue("key", b"value", 2)), 2.0)
    made.step(MessageReceived(messages.RankAssigned(2, 3, 8, 1, 4)), 2.0)
    assert finish([effect for _, effect in due(made, 6.0)]) == EndMembership(
        0, "left; the scheduler at sched:8118 did not acknowledge it in time"
    )


def test_leave_without_connection_ends_immediately() -> None:
    made = node()
    made.step(Tick(), 0.0)
    assert finish(made.step(LeaveRequested(2), 0.5)) == EndMembership(2, "left before it was a member")


def test_leave_during_registration_waits_for_reply() -> None:
    made = node()
    made.step(Tick(), 0.0)
    made.step(Connected(), 0.0)
    assert made.step(LeaveRequested(), 0.1) == []
    assert made.step(MessageReceived(messages.Registered("c1", "w", 1)), 0.2) == [
        Deliver(messages.Registered("c1", "w", 1)),
        Send(messages.Leave()),
    ]
    assert finish(made.step(MessageReceived(messages.LeaveAcknowledged()), 0.3)) == EndMembership(0, "left")


def test_cluster_end_during_leave_is_acknowledgement_with_message() -> None:
    made = member()
    made.step(LeaveRequested(143), 1.0)
    stop = messages.ClusterEnded("interrupted by Ctrl-C", 130)
    assert finish(made.step(MessageReceived(stop), 1.1)) == EndMembership(143, "left", stop)


def test_lost_connection_during_leave_ends_node_without_recovery() -> None:
    made = member()
    made.step(LeaveRequested(), 1.0)
    assert finish(made.step(ConnectionLost("reset"), 1.1)) == EndMembership(
        0, "left; the scheduler did not acknowledge it (reset)"
    )


def test_leaving_node_with_recovery_reconnects_to_deliver_leave() -> None:
    made = member(recovery=True, node_timeout_s=30.0)
    made.step(ConnectionLost("reset"), 1.0)
    assert made.step(LeaveRequested(), 2.0) == []
    made.step(Tick(), made.due_at)
    made.step(Connected(), 3.0)
    assert Send(messages.Leave()) in made.step(MessageReceived(messages.Registered("c1", "w", 1)), 3.0)
    made.step(MessageReceived(messages.RankAssigned(1, 3, 8, 1, 4)), 3.0)
    assert finish(made.step(MessageReceived(messages.LeaveAcknowledged()), 3.1)) == EndMembership(0, "left")


@pytest.mark.parametrize("linked", [True, False])
def test_leaving_node_with_recovery_ends_after_node_timeout(linked: bool) -> None:
    made = member(recovery=True, node_timeout_s=30.0)
    if not linked:
        made.step(ConnectionLost("reset"), 1.0)
    made.step(LeaveRequested(), 2.0)
    ends = []
    while made.stage is not NodeStage.ENDED:
        now = made.due_at
        effects = made.step(Tick(), now)
        if Connect() in effects:
            made.step(ConnectionLost("connection refused"), now)
        ends += [(now, effect) for effect in effects if isinstance(effect, EndMembership)]
    assert ends == [(32.0, EndMembership(0, "left; the scheduler at sched:8118 did not acknowledge it in time"))]


def test_node_leaves_scheduler_that_is_silent_beyond_its_limit() -> None:
    made = member(heartbeats_enabled=False)
    made.step(ConnectionLost("reset"), 0.0)
    made.step(Connected(5.0), 1.0)
    made.step(MessageReceived(messages.LeaderHeartbeat()), 3.0)
    assert made.step(Tick(), 7.9) == []
    left, lost = made.step(Tick(), 8.0)
    assert left == Close() and isinstance(lost, PublishEvent) and "it sent nothing for 5 s" in lost.reason


def test_leaving_node_does_not_register_again() -> None:
    made = waiting(recovery=True)
    made.step(LeaveRequested(), 1.0)
    assert finish(made.step(ConnectionLost("reset"), 1.1)) is not None


# -- what it says and remembers --------------------------------------------------------------------------------------


def test_loss_and_return_of_scheduler_are_published_once_and_registration_is_updated() -> None:
    made = member(recovery=True)
    lost = "the scheduler at sched:8118 is unreachable (reset); the script continues"
    assert made.step(ConnectionLost("reset"), 1.0) == [PublishEvent("scheduler", "lost", lost, Level.WARNING)]
    assert made.step(ConnectionLost("connection refused"), 1.1) == [], "it is away still"
    made.step(Connected(), 2.0)
    back = made.step(MessageReceived(messages.Registered("c2", "w", 5)), 2.0)
    assert back == [
        Deliver(messages.Registered("c2", "w", 5)),
        PublishEvent("scheduler", "found again", "re-attached to sched:8118"),
        SendHeartbeat(),
    ]
    assert isinstance(made.registration, messages.Register) and (
        made.registration.cluster_id,
        made.registration.incarnation,
    ) == (
        "c2",
        5,
    )
    made.step(ConnectionLost("reset"), 3.0)
    assert made.due_at == 3.05, "it calls again as soon as it did the first time"


def test_failed_connection_is_published_again_when_reason_changes() -> None:
    made = node()
    made.step(Tick(), 0.0)
    said = "no connection to the scheduler at sched:8118 (connection refused); retrying"
    assert made.step(ConnectionLost("connection refused"), 0.1) == [PublishEvent("scheduler", "not reached", said)]
    assert made.step(ConnectionLost("connection refused"), 0.2) == []


def test_missing_reply_is_reported_with_limit() -> None:
    made = node(receive_timeout_s=7.0)
    made.step(Tick(), 0.0)
    made.step(Connected(), 0.0)
    closed, published = made.step(Tick(), 7.0)
    assert closed == Close() and isinstance(published, PublishEvent)
    assert "(no answer within 7 s (MS_RECEIVE_MSG_TIMEOUT))" in published.reason


def test_other_messages_are_delivered_to_program_except_acknowledgement() -> None:
    made = member()
    value = messages.RendezvousValue("key", b"value", 1)
    assert made.step(MessageReceived(value), 1.0) == [Deliver(value)]
    assert made.step(MessageReceived(messages.LeaveAcknowledged()), 1.0) == []
    again = messages.RankAssigned(1, 3, 8, 1, 4)
    assert made.step(MessageReceived(again), 1.0) == [Deliver(again)], "it may have missed it"


def test_promoted_spare_registers_as_worker() -> None:
    made = node(messages.Register(Role.SPARE, "0", "life", BOX))
    made.step(Tick(), 0.0)
    made.step(Connected(), 0.0)
    made.step(MessageReceived(messages.Registered("c1", "0", 1)), 0.0)
    made.step(MessageReceived(messages.RankAssigned(1, -1, 3, -1, 2)), 0.0)
    made.step(MessageReceived(messages.RankAssigned(2, 1, 3, 1, 2, node_id="7", incarnation=4)), 1.0)
    assert made.registration == messages.Register(
        Role.WORKER, "7", "life", BOX, cluster_id="c1", incarnation=4, generation=2, rank=1
    )


def test_silence_is_detected_at_due_time() -> None:
    made = member(heartbeats_enabled=False)
    made.step(ConnectionLost("reset"), 0.0)
    made.step(Connected(5.0), 1.0)
    made.step(MessageReceived(messages.Registered("c1", "w", 1)), 1.0)
    assert made.due_at == 6.0


@pytest.mark.parametrize(("jitter", "retry", "beat"), [(0.0, 0.025, 3.0), (1.0, 0.05, 5.0)])
def test_jitter_spreads_reconnects_and_heartbeats(jitter: float, retry: float, beat: float) -> None:
    made = NodeMachine(WISH, NodeSettings("sched:8118"), jitter=lambda: jitter, now=0.0)
    assert made.stage is NodeStage.CONNECTING
    made.step(Tick(), 0.0)
    made.step(ConnectionLost("connection refused"), 0.0)
    assert made.due_at == retry
    made.step(Tick(), retry)
    made.step(Connected(), 1.0)
    made.step(MessageReceived(messages.Registered("c1", "w", 1)), 1.0)
    assert made.due_at == 1.0 + beat


def test_limit_of_zero_is_a_limit() -> None:
    made = member(node_timeout_s=0.0)
    made.step(ConnectionLost("reset"), 1.0)
    end = finish(made.step(Tick(), 1.0))
    assert end is not None and end.code == ExitCode.SCHEDULER_LOST
    patient = member(node_timeout_s=0.0, recovery=True)
    patient.step(ConnectionLost("reset"), 1.0)
    assert finish(patient.step(Tick(), 1e6)) is None, "with recovery it waits without limit"
