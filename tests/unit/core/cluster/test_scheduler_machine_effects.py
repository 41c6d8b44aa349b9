"""What the machine tells, counts and keeps of what it decides: people and their dashboards read these words."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster
from tests.unit.core.cluster.test_scheduler_machine import (
    BOX,
    ended,
    machine,
    phase,
    published,
    ready,
    register,
    resume_all_ranks,
    sent,
    sharded_over_four,
    sharded_under_agent,
    stored_records,
    tick,
    training,
    workers_of,
)

from covey.core import messages
from covey.core.cluster.heal_barrier import COLLECTIVE_RETRIES_MAX, DEATH_REPORT_S
from covey.core.cluster.resize import JOIN_TIMEOUT_S
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.effects import Level, PublishEvent, SchedulerEffect
from covey.core.events import MessageReceived, Tick
from covey.core.incidents import Outcome, Stage
from covey.core.strategy_ladder import parse_strategies
from covey.core.types import AgentRecord, ClusterRecord, MemberRecord, Phase, Role
from covey.errors import ExitCode

SAID = "connection reset"


def warnings(effects: list[SchedulerEffect]) -> list[str]:
    return [f"{e.node} {e.what}: {e.reason}" for e in effects if isinstance(e, PublishEvent) and e.level is Level.WARNING]


def incidents_of(made: SchedulerMachine) -> list[tuple[str, str, str, Outcome]]:
    return [(i.strategy, i.cause, i.reason, i.outcome) for i in made.incidents.records]


# -- another size ----------------------------------------------------------------------------------------------------


def test_scale_out_is_counted_published_persisted_and_limited_in_time() -> None:
    made = sharded_under_agent(3)
    tick(made, 1.0)
    effects = made.step(MessageReceived(messages.ScaleRequest(workers=4), 9), 1.0)
    reason = "the world grows from 3 to 4 workers, as requested"
    assert incidents_of(made) == [("scale-out", "requested", reason, Outcome.OPEN)]
    assert made.counters == {"scale_out": 1} and made.cluster.requested_workers == 4
    assert f"cluster resized: {reason}; the world size is now 4" in warnings(effects)
    assert made.cluster.reason == reason and made.cluster.resized_generation == made.cluster.generation
    assert [a.node_id for a in sent(effects, messages.DesiredChildren)[1].assignments] == ["0", "1", "2", "3"]
    assert {f.world for f in sent(effects, messages.RankAssigned).values()} == {4} and set(
        sent(effects, messages.RankAssigned)
    ) == {11, 12, 13}
    newcomer = made.cluster.members[(Role.WORKER, "3")]
    assert (newcomer.member_index, newcomer.local_rank, newcomer.since_generation, made.cluster.next_member_index) == (
        3,
        3,
        made.cluster.generation,
        4,
    )
    beats = [1, 11, 12, 13]
    tick(made, 1.0 + JOIN_TIMEOUT_S, beats=beats, since=1.0)
    assert len(workers_of(made)) == 4, "in its very last moment it may still come"
    effects = tick(made, 1.5 + JOIN_TIMEOUT_S, beats=beats, since=1.0 + JOIN_TIMEOUT_S)
    back = f"not all joined within {JOIN_TIMEOUT_S:g} s; the scale-out is rolled back"
    assert incidents_of(made)[0][3] is Outcome.ROLLED_BACK and incidents_of(made)[1] == ("scale-in", back, back, Outcome.OPEN)
    assert workers_of(made) == ["0", "1", "2"] and made.cluster.requested_workers == 3
    assert f"cluster resized: {back}; the world size is now 3" in warnings(effects)
    assert [r.slots for r in stored_records(effects) if isinstance(r, AgentRecord)] == [3], (
        "its host offers no more than it has"
    )
    assert [a.node_id for a in sent(effects, messages.DesiredChildren)[1].assignments] == ["0", "1", "2"]
    resume_all_ranks(made)
    assert (phase(made), incidents_of(made)[1][3]) == (Phase.READY, Outcome.RESUMED)


def test_scale_in_is_counted_published_and_persisted() -> None:
    made = sharded_over_four(together=0)
    effects = made.step(MessageReceived(messages.ScaleRequest(node_ids=["b"]), 9), 1.0)
    reason = "the world shrinks from 4 to 3 workers, as requested"
    assert incidents_of(made) == [("scale-in", "requested", reason, Outcome.OPEN)] and made.counters == {"scale_in": 1}
    assert sent(effects, messages.ClusterEnded) == {2: messages.ClusterEnded(f"worker:b leaves: {reason}")}
    assert {link: formed.rank for link, formed in sent(effects, messages.RankAssigned).items()} == {1: 0, 3: 2, 4: 1}
    assert {r.node_id for r in stored_records(effects) if isinstance(r, MemberRecord)} == {"d"}, "whose rank changes"


def test_rank_without_replacement_shrinks_world() -> None:
    made = sharded_under_agent(3)
    edited = EditableCluster.of(made)
    edited.change(edited.worker("1"), deaths_without_progress=3)
    effects = made.step(MessageReceived(messages.ChildExited("1", 1, 137, "killed"), 1), 1.0)
    assert made.counters.get("shrinks") == 1 and made.cluster.size(Role.WORKER) == 2
    assert [w for w in warnings(effects) if w.startswith("cluster resized: ") and w.endswith("; the world size is now 2")]


# -- a collective that broke -----------------------------------------------------------------------------------------


def broken(made: SchedulerMachine, now: float, reason: str = SAID) -> list[SchedulerEffect]:
    """Report a failed collective from one rank, without a death."""
    made.step(Tick(), now)
    made.step(MessageReceived(messages.CollectiveFailed(made.cluster.generation, reason), 10), now)
    assert phase(made) is Phase.READY, "a death may still explain it"
    assert sent(made.step(Tick(), now + 0.9 * DEATH_REPORT_S), messages.NewGeneration) == {}
    return made.step(Tick(), now + 1.1 * DEATH_REPORT_S)


def test_failed_collective_is_retried_if_all_processes_live() -> None:
    made = training(strategies=parse_strategies(("retry",)))
    made.step(MessageReceived(messages.CollectiveFailed(made.cluster.generation - 1, SAID), 10), 0.5)
    made.step(MessageReceived(messages.CollectiveFailed(made.cluster.generation, SAID), 99), 0.5)
    assert sent(made.step(Tick(), 1.0), messages.NewGeneration) == {}, "an old one, and a stranger's"
    effects = broken(made, 1.0)
    reason = f"a collective failed ({SAID}) and all processes are alive"
    assert f"cluster retry: {reason}: the step is retried" in warnings(effects)
    assert incidents_of(made) == [("retry", SAID, "all processes are alive", Outcome.OPEN)] and made.counters["retries"] == 1
    assert set(sent(effects, messages.NewGeneration)) == {10, 11, 12}
    assert made.incidents.records[0].ms[Stage.DETECTED] == 0.0 and made.incidents.records[0].ms[Stage.DECIDED] > 100
    made.step(MessageReceived(messages.StateFetched(made.cluster.generation - 1), 10), 2.0)
    made.step(MessageReceived(messages.StateFetched(made.cluster.generation), 99), 2.0)
    made.step(MessageReceived(messages.StateFetched(made.cluster.generation), 10), 3.0)
    for link in (10, 11, 12):
        made.step(MessageReceived(messages.RankResumed(made.cluster.generation, 5), link), 3.5)
    assert (phase(made), incidents_of(made)[0][3]) == (Phase.READY, Outcome.RESUMED)
    assert made.incidents.records[0].ms[Stage.RESUMED] == 500.0, "the others' word did not count as restored"
    assert sum(made.incidents.records[0].ms.values()) == pytest.approx(2500.0)


def test_repeatedly_failed_collective_ends_run() -> None:
    made = training(strategies=parse_strategies(("retry",)))
    now = 1.0
    for number in range(COLLECTIVE_RETRIES_MAX):
        assert sent(broken(made, now), messages.NewGeneration), number
        now += 1.0
    end = ended(broken(made, now))
    assert end is not None and end.code == ExitCode.PEER_FAILED
    assert end.reason == f"a collective failed ({SAID}) and all processes are alive, 5 times in a row without a step in between"


def test_failed_collective_ends_run_without_retry_strategy() -> None:
    end = ended(broken(training(strategies=parse_strategies(("recover-in-place",))), 1.0))
    assert end is not None and end.code == ExitCode.PEER_FAILED
    assert end.reason == f"a collective failed ({SAID}) and all processes are alive, but retry is not enabled (COVEY_STRATEGY)"


# -- parameter servers -----------------------------------------------------------------------------------------------


def served(**settings: Any) -> SchedulerMachine:
    """A worker and two servers of one agent over link 1; theirs are links 11, 20 and 21. All is in its place."""
    made = machine(1, server_num=2, copies=1, **settings)
    made.step(MessageReceived(messages.RegisterAgent("a", "life of a", BOX, 1, servers=2), 1), 0.0)
    made.step(MessageReceived(register("0", incarnation=1), 11), 0.0)
    made.step(MessageReceived(messages.RendezvousPut("met", b"", 1), 11), 0.0)
    for number in range(2):
        serve(made, number)
        made.step(MessageReceived(messages.ServerInSync(0), 20 + number), 0.0)
    return made


def serve(made: SchedulerMachine, number: int) -> None:
    """A server comes that its agent was told to start."""
    incarnation = made.cluster.members[(Role.PSERVER, str(number))].incarnation
    made.step(
        MessageReceived(
            messages.Register(Role.PSERVER, str(number), f"life of s{number}", BOX, incarnation=incarnation), 20 + number
        ),
        1.0,
    )


def records(effects: list[SchedulerEffect]) -> list[ClusterRecord]:
    return [record for record in stored_records(effects) if isinstance(record, ClusterRecord)]


def test_server_scale_out_moves_rows_when_all_joined() -> None:
    made = served()
    effects = made.step(MessageReceived(messages.ScaleRequest(servers=3), 9), 1.0)
    reason = "the number of parameter servers increases from 2 to 3, as requested"
    assert (
        incidents_of(made) == [("scale-out", "requested", reason, Outcome.OPEN)] and made.incidents.records[0].node == "servers"
    )
    assert made.counters == {"server_scale_out": 1} and f"servers scale-out: {reason}" in published(effects)
    assert records(effects)[-1].joining_servers == (2,), "it is durable"
    assert [(r.role, r.rank) for r in stored_records(effects) if isinstance(r, MemberRecord)] == [(Role.PSERVER, 2)]
    assert [a.node_id for a in sent(effects, messages.DesiredChildren)[1].assignments] == ["0", "0", "1", "2"]
    newcomer = made.cluster.members[(Role.PSERVER, "2")]
    assert (newcomer.rank, newcomer.local_rank, newcomer.agent, made.cluster.next_server_number) == (2, 2, "a", 3)
    serve(made, 2)
    assert sent(made.step(MessageReceived(messages.ServerInSync(0), 20), 2.0), messages.ShardingAssigned) == {}, (
        "not all are settled"
    )
    made.step(MessageReceived(messages.ServerInSync(0), 21), 2.0)
    effects = made.step(MessageReceived(messages.ServerInSync(0), 22), 2.0)
    (sharing,) = {published.sharding for published in sent(effects, messages.ShardingAssigned).values()}
    assert (sharing.version, sharing.ring, sharing.leaving) == (1, (0, 1, 2), ()) and set(
        sent(effects, messages.ShardingAssigned)
    ) == {
        11,
        20,
        21,
        22,
    }
    assert records(effects)[-1].sharding == sharing and made.cluster.has_row_copies
    assert sorted(sharing.owners.count(number) for number in range(3)) == [85, 85, 86]
    assert "servers shared anew: 85 of 256 slots move" in published(effects)
    for link in (20, 21):
        made.step(MessageReceived(messages.ServerInSync(1), link), 3.0)
    made.step(MessageReceived(messages.ServerInSync(0), 22), 3.0)
    assert incidents_of(made)[0][3] is Outcome.OPEN, "what it says is of the sharing before"
    effects = made.step(MessageReceived(messages.ServerInSync(1), 22), 3.0)
    assert "servers settled: all rows are distributed over 3 parameter servers" in published(effects)
    assert (incidents_of(made)[0][3], made.cluster.rows_in_place, made.cluster.has_row_copies) == (Outcome.RESUMED, True, True)


def test_server_scale_in_removes_servers_without_rows() -> None:
    made = served()
    effects = made.step(MessageReceived(messages.ScaleRequest(node_ids=["pserver:1"]), 9), 1.0)
    reason = "the number of parameter servers decreases from 2 to 1, as requested"
    assert incidents_of(made) == [("scale-in", "requested", reason, Outcome.OPEN)] and made.counters == {"server_scale_in": 1}
    assert f"servers scale-in: {reason}" in published(effects) and "servers shared anew: 128 of 256 slots move" in published(
        effects
    )
    (sharing,) = {published.sharding for published in sent(effects, messages.ShardingAssigned).values()}
    assert (sharing.version, sharing.ring, sharing.leaving) == (1, (0,), (1,)) and not made.cluster.has_row_copies
    assert set(sharing.owners) == {0}
    made.step(MessageReceived(messages.ServerInSync(1), 20), 2.0)
    effects = made.step(MessageReceived(messages.ServerInSync(1), 21), 2.0)
    assert sent(effects, messages.ClusterEnded) == {
        21: messages.ClusterEnded("pserver:1 leaves: its rows have moved to the other servers")
    }
    assert set(sent(effects, messages.ShardingAssigned)) == {11, 20} and made.cluster.size(Role.PSERVER) == 1
    assert (
        made.cluster.sharding is not None
        and made.cluster.sharding.leaving == ()
        and incidents_of(made)[0][3] is Outcome.RESUMED
    )


def test_server_scale_out_is_rolled_back_if_late() -> None:
    made = served()
    tick(made, 1.0)
    made.step(MessageReceived(messages.ScaleRequest(more_servers=1), 9), 1.0)
    beats = [1, 11, 20, 21]
    tick(made, 1.0 + JOIN_TIMEOUT_S, beats=beats, since=1.0)
    assert made.cluster.joining_servers == (2,), "in its very last moment it may still come"
    effects = tick(made, 1.5 + JOIN_TIMEOUT_S, beats=beats, since=1.0 + JOIN_TIMEOUT_S)
    assert f"servers rolled back: not all joined within {JOIN_TIMEOUT_S:g} s; the scale-out is rolled back" in warnings(effects)
    assert incidents_of(made)[0][3] is Outcome.ROLLED_BACK and made.cluster.size(Role.PSERVER) == 2
    assert records(effects)[-1].joining_servers == () and made.cluster.sharding is None
    assert [a.node_id for a in sent(effects, messages.DesiredChildren)[1].assignments] == ["0", "0", "1"]
    made.step(MessageReceived(messages.ScaleRequest(more_servers=1), 9), 1.5 + JOIN_TIMEOUT_S)
    assert made.cluster.joining_servers == (3,), "no number is given twice"


# -- words on the way ------------------------------------------------------------------------------------------------


def test_leave_return_and_standby_are_published() -> None:
    made = training(recovery=True)
    assert "agent:b leaving: asked to leave" in warnings(
        made.step(MessageReceived(messages.Draining("asked to leave"), 2), 1.0)
    )
    made = ready("a", "b", node_timeout_s=10.0)
    suspected = tick(made, 6.0, beats=[2])
    assert [w for w in warnings(suspected) if w.startswith("worker:a suspect: no heartbeat for ")]
    assert "worker:a heard again: its heartbeat arrived late" in published(
        made.step(MessageReceived(messages.Heartbeat(), 1), 6.1)
    )


def test_re_attached_rank_receives_member_indexes_after_resize() -> None:
    """A rank with older member indexes gets the new ones with its plan; a rank that has them gets none."""
    made = sharded_under_agent(3)
    made.step(MessageReceived(messages.ScaleRequest(workers=2), 9), 1.0)
    generation = made.cluster.generation
    for old, expected in ((made.cluster.resized_generation, False), (made.cluster.resized_generation - 1, True)):
        again = sharded_under_agent(3)
        again.step(MessageReceived(messages.ScaleRequest(workers=2), 9), 1.0)
        effects: list[SchedulerEffect] = []
        for member in again.cluster.members_in_role(Role.WORKER):
            report = messages.SafePointReport(
                generation, messages.CollectiveNumber(5, 0), indexes_version=old, slot_count=2, held_slots=b"\x03"
            )
            effects += again.step(MessageReceived(report, member.connection), 1.0)
        plans = sent(effects, messages.HealPlan)
        seating = messages.MemberIndexes(again.cluster.resized_generation, [0, 1]) if expected else None
        assert {link: plan.member_indexes for link, plan in plans.items()} == {11: seating, 12: seating}
