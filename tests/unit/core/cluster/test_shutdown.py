"""The end of a cluster: the dump, the delivery of the outcome, and the end of the scheduler."""

from __future__ import annotations

from itertools import product

import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster, training_cluster

from covey.core.cluster.shutdown import END_DELIVERY_S, TRANSITIONS, ShutdownState, dumpable_ranks
from covey.core.effects import EndCluster, Persist, SchedulerEffect, Send
from covey.core.incidents import Outcome
from covey.core.messages import ClusterEnded, Draining, DumpRequest, DumpWritten, Refused, RequestAccepted
from covey.core.types import ClusterRecord, Ended, Host, Member, MemberRecord, NodeState, Phase, Progress, Role
from covey.errors import ExitCode


def test_dumpable_ranks_are_connected_ranks_in_a_loop() -> None:
    made = training_cluster()
    assert dumpable_ranks(made) == (
        set(),
        "no rank is in a covey.Loop, so no rank can dump its state",
    )
    made.set(phase=Phase.ENDED, reason="all 4 workers finished")
    assert dumpable_ranks(made) == (set(), "the cluster has ended: all 4 workers finished")


# -- the part -----------------------------------------------------------------------------------------------------------

ALLOWED = [(before, after) for before, states in TRANSITIONS.items() for after in sorted(states)]
FORBIDDEN = sorted(set(product(ShutdownState, ShutdownState)) - set(ALLOWED))
ENOUGH = Ended(ExitCode.STOPPED, "enough")


def in_loop(*rungs: str, dump_s: float = 20.0) -> EditableCluster:
    """Four workers over connections 10 to 13; those of ranks 0 and 1 are in a loop."""
    cluster = training_cluster(*rungs, connected=True, dump_s=dump_s)
    for rank in (0, 1):
        cluster.heartbeats.note_progress(cluster.worker(str(rank)), Progress(5, "train", in_loop=True), 0.0)
    return cluster


def disconnected_members(node_timeout_s: float = 10.0) -> EditableCluster:
    """Beside the workers of agents there is worker:raw, which lost its connection at 1.0."""
    cluster = training_cluster(connected=True, node_timeout_s=node_timeout_s)
    raw = Member(Role.WORKER, "raw", "raw life", Host("c", "host-c", "10.0.0.3"), rank=4, state=NodeState.SUSPECT)
    cluster.add(raw, last_heartbeat_at=1.0)
    return cluster


def state(cluster: EditableCluster) -> ShutdownState:
    return cluster.shutdown.state


def sent(effects: list[SchedulerEffect], kind: type) -> list[int]:
    return [effect.connection for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def end_of(effects: list[SchedulerEffect]) -> EndCluster | None:
    return next((effect for effect in effects if isinstance(effect, EndCluster)), None)


@pytest.mark.parametrize(("before", "after"), ALLOWED)
def test_an_allowed_transition_is_made(before: ShutdownState, after: ShutdownState) -> None:
    part = training_cluster().shutdown
    part.state = before
    part._set_state(after)
    assert part.state is after


@pytest.mark.parametrize(("before", "after"), FORBIDDEN)
def test_a_forbidden_transition_fails(before: ShutdownState, after: ShutdownState) -> None:
    part = training_cluster().shutdown
    part.state = before
    with pytest.raises(AssertionError, match=f"no transition from {before} to {after}"):
        part._set_state(after)
    assert part.state is before


def test_no_rank_can_dump_before_the_cluster_has_formed() -> None:
    cluster = in_loop("dump")
    cluster.set(phase=Phase.FORMING)
    assert dumpable_ranks(cluster) == (set(), "the cluster has not formed yet")
    assert cluster.shutdown.request_dump(cluster.step(), "enough") == Refused("the cluster has not formed yet")


def test_dump_starts_again_if_the_host_of_the_scheduler_leaves_during_a_dump() -> None:
    cluster = in_loop("dump")
    assert isinstance(cluster.shutdown.request_dump(cluster.step(1.0), "enough"), RequestAccepted)
    cluster.take_effects()
    agent = next(iter(cluster.agents.values()))
    cluster.recovery.on_draining(cluster.step(2.0), agent.connection, Draining("maintenance", scheduler_leaves=True))
    assert cluster.shutdown.state is ShutdownState.DUMPING
    assert cluster.planned_end is not None and cluster.planned_end.reason == "maintenance"
    assert [e.message for e in cluster.take_effects() if isinstance(e, Send)] == [DumpRequest("maintenance")] * 2


def test_end_is_persisted_then_sent_to_members_before_agents() -> None:
    cluster = training_cluster(connected=True)
    cluster.incidents.open(cluster.step(1.0), "recover", "", "killed")
    cluster.take_effects()
    cluster.shutdown.end(cluster.step(2.0), ExitCode.STOPPED, "enough")
    effects = cluster.take_effects()
    assert sent(effects, ClusterEnded) == [10, 11, 12, 13, 1, 2]
    durable = next(n for n, e in enumerate(effects) if isinstance(e, Persist) and isinstance(e.record, ClusterRecord))
    assert durable < min(n for n, effect in enumerate(effects) if isinstance(effect, Send))
    assert effects[-1] == EndCluster(ExitCode.STOPPED, "enough") and state(cluster) is ShutdownState.OVER
    assert (cluster.phase, cluster.ended) == (Phase.ENDED, ENOUGH) and cluster.incidents.records[0].outcome is Outcome.ENDED


def test_scheduler_waits_until_disconnected_members_received_end() -> None:
    cluster = disconnected_members()
    cluster.shutdown.end(cluster.step(2.0), ExitCode.STOPPED, "enough")
    assert state(cluster) is ShutdownState.TELLING and end_of(cluster.take_effects()) is None
    assert not cluster.shutdown.tell_if_missed(cluster.step(3.0), 30, "raw life", "another cluster")
    assert cluster.shutdown.tell_if_missed(cluster.step(3.0), 30, "raw life", "c")
    effects = cluster.take_effects()
    assert sent(effects, ClusterEnded) == [30] and end_of(effects) and state(cluster) is ShutdownState.OVER
    cluster.shutdown.stop_telling(cluster.step(4.0))
    assert cluster.take_effects() == [], "it ends once"


@pytest.mark.parametrize(("node_timeout_s", "limit_s"), [(10.0, 10.0), (-1.0, END_DELIVERY_S)])
def test_scheduler_exits_after_limit_without_reconnect(node_timeout_s: float, limit_s: float) -> None:
    cluster = disconnected_members(node_timeout_s)
    cluster.shutdown.end(cluster.step(2.0), ExitCode.STOPPED, "enough")
    cluster.shutdown.tick_after_end(cluster.step(1.9 + limit_s))
    assert end_of(cluster.take_effects()) is None
    cluster.shutdown.tick_after_end(cluster.step(2.0 + limit_s))
    assert end_of(cluster.take_effects())


def test_end_is_immediate_without_dump_strategy_or_loop() -> None:
    for cluster in (in_loop(), training_cluster("dump", connected=True)):
        cluster.shutdown.dump_or_end(cluster.step(2.0), 1, "worker:3 died")
        assert state(cluster) is ShutdownState.OVER and cluster.ended == Ended(1, "worker:3 died")


def test_cluster_ends_after_all_dumps_with_highest_step_in_reason() -> None:
    cluster = in_loop("dump")
    cluster.shutdown.dump_or_end(cluster.step(2.0), 1, "worker:3 died")
    effects = cluster.take_effects()
    assert sent(effects, DumpRequest) == [10, 11] and cluster.planned_end == Ended(1, "worker:3 died")
    assert isinstance(effects[0], Persist), "durable before it is asked for"
    cluster.shutdown.note_dump_written(cluster.step(3.0), cluster.worker("0"), DumpWritten(6, "here"))
    assert state(cluster) is ShutdownState.DUMPING
    cluster.shutdown.note_dump_written(cluster.step(3.0), cluster.worker("1"), DumpWritten(5, "there"))
    assert cluster.ended == Ended(1, "worker:3 died; step 6 is in here")


def test_dump_is_awaited_until_deadline_or_death_of_rank() -> None:
    for is_late in (True, False):
        cluster = in_loop("dump")
        cluster.shutdown.dump_or_end(cluster.step(2.0), 1, "worker:3 died")
        cluster.shutdown.end_if_dumped(cluster.step(22.0))
        assert cluster.ended is None, "the last moment counts"
        cluster.take_effects()
        if is_late:
            cluster.shutdown.end_if_dumped(cluster.step(22.1))
        else:
            for rank in ("0", "1"):
                dead = cluster.change(cluster.worker(rank), state=NodeState.DEAD)
                cluster.shutdown.note_death(cluster.step(3.0), dead)
                assert cluster.take_effects()[0] == Persist(MemberRecord.from_member(dead))
        assert cluster.ended == Ended(1, "worker:3 died; no rank could dump its state")


def test_dump_request_is_repeated_to_re_attached_ranks() -> None:
    cluster = in_loop()
    assert isinstance(cluster.shutdown.request_dump(cluster.step(2.0), "enough"), RequestAccepted)
    again = cluster.shutdown.request_dump(cluster.step(2.0), "enough")
    assert again == Refused("a dump is already in progress")
    cluster.take_effects()
    for rank in ("0", "3"):
        cluster.shutdown.repeat_dump_request(cluster.step(3.0), cluster.worker(rank))
    assert sent(cluster.take_effects(), DumpRequest) == [10], "rank 3 was not asked"


def test_restarted_scheduler_awaits_dumps_of_present_ranks() -> None:
    cluster = training_cluster("dump", connected=True, dump_s=20.0)
    cluster.shutdown.restore(ClusterRecord("c", "", 4, 0, Phase.HEALING, 1, planned_end=ENOUGH))
    cluster.shutdown.resume_dump(cluster.step(100.0))
    assert state(cluster) is ShutdownState.DUMPING
    cluster.shutdown.discount_suspension(5.0, 103.0)
    cluster.shutdown.end_if_dumped(cluster.step(123.0))
    assert cluster.ended is None, "a suspension prolongs it, to no more than the full time"
    cluster.shutdown.end_if_dumped(cluster.step(123.1))
    assert cluster.ended == Ended(ExitCode.STOPPED, "enough; no rank could dump its state")


@pytest.mark.parametrize("is_told", [False, True])
def test_restarted_scheduler_sends_end_to_disconnected_members(is_told: bool) -> None:
    cluster = disconnected_members()
    cluster.set(phase=Phase.FORMING)
    cluster.shutdown.resume_end(cluster.step(2.0), Ended(1, "over", told=is_told))
    assert (cluster.phase, cluster.reason) == (Phase.ENDED, "over")
    assert state(cluster) is (ShutdownState.OVER if is_told else ShutdownState.TELLING)
