"""The ladder, rung by rung, from literal clusters (what follows a death, and why not the rung above), and a recovery."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.core.cluster.editable_cluster import HERE, THERE, EditableCluster, training_cluster

from covey.core import types
from covey.core.cluster import recovery
from covey.core.cluster.recovery import RecoveryAction
from covey.core.cluster.shutdown import ShutdownState
from covey.core.effects import Close, Persist, SchedulerEffect, Send
from covey.core.incidents import Outcome, Stage
from covey.core.messages import (
    ChildExited,
    DesiredChildren,
    Draining,
    HealPlan,
    Leave,
    LeaveAcknowledged,
    NewGeneration,
    RankAssigned,
    RankResumed,
    RegisterAgent,
    RendezvousPut,
    SafePointReport,
)
from covey.core.strategy_ladder import RecoveryStrategy, parse_strategies
from covey.errors import ExitCode, UsageError

ALL = (
    RecoveryStrategy.RETRY,
    RecoveryStrategy.IN_PLACE,
    RecoveryStrategy.RECOVER,
    RecoveryStrategy.ELASTIC,
    RecoveryStrategy.DUMP,
    RecoveryStrategy.EXIT,
)


def dies(made: EditableCluster, role: types.Role = types.Role.WORKER, rank: int = 3) -> types.Member:
    return made.change(made.members[(role, str(rank))], state=types.NodeState.DEAD)


@pytest.mark.parametrize(
    ("rungs", "changed", "after", "reason"),
    [
        (ALL, {}, RecoveryAction.REPLACE, "worker:3 is restarted on host-b; the other ranks wait in their step"),
        (
            ALL[2:],
            {"extra_ranks": 1},
            RecoveryAction.MOVE,
            "worker:3 is restarted on host-a; the other ranks wait in their step",
        ),
        (
            ALL[2:3],
            {"extra_ranks": 0},
            RecoveryAction.END,
            "no other host can run worker:3 (COVEY_EXTRA_RANKS is 0)",
        ),
        (ALL[1:2], {"replacements_max": 0}, RecoveryAction.END, "0 replacements on host-b are used up (--max-restarts)"),
        (
            ALL[3:4],
            {"extra_ranks": 0},
            RecoveryAction.SHRINK,
            "neither recover-in-place nor recover is enabled (COVEY_STRATEGY): the other ranks continue in a world of 3",
        ),
        ((), {"max_restarts": 2}, RecoveryAction.RESTART_ALL, "restart 1 of 2: all workers restart"),
        ((), {}, RecoveryAction.END, "no restart is allowed (--max-restarts is 0)"),
    ],
)
def test_each_strategy_is_chosen_if_earlier_ones_are_impossible(
    rungs: tuple[RecoveryStrategy, ...], changed: dict[str, Any], after: RecoveryAction, reason: str
) -> None:
    made = training_cluster(*rungs, **changed)
    assert recovery.choose_action(made, dies(made), 137) == (after, reason)


@pytest.mark.parametrize("code", [ExitCode.BAD_SETTING, ExitCode.BAD_SCRIPT])
def test_script_error_codes_end_run(code: int) -> None:
    made = training_cluster(*ALL)
    reason = f"worker:3 exited with code {code:d}: a restart does not fix that"
    assert recovery.choose_action(made, dies(made), code) == (RecoveryAction.END, reason)


def test_full_restarts_are_limited_and_need_every_host() -> None:
    made = training_cluster(max_restarts=2)
    made.set(restarts=2)
    assert recovery.choose_action(made, dies(made)) == (RecoveryAction.END, "all restarts are used up (--max-restarts)")
    made.set(restarts=1)
    assert recovery.choose_action(made, dies(made))[0] is RecoveryAction.RESTART_ALL
    made.change_agent("a", max_restarts=1)
    assert recovery.choose_action(made, dies(made))[0] is RecoveryAction.END, "a host may have said less"
    lost = training_cluster(max_restarts=2)
    lost.remove_agent("b")
    assert recovery.choose_action(lost, dies(lost)) == (
        RecoveryAction.END,
        "cannot restart worker:3: no agent is left on host-b",
    )
    other = training_cluster(max_restarts=2)
    other.remove_agent("a")
    away = "not all workers can restart, because the host of some is gone or leaving"
    assert recovery.choose_action(other, dies(other)) == (RecoveryAction.END, away), "host-a could not start its own"


def test_cluster_waits_for_host_if_one_may_join() -> None:
    made = training_cluster(RecoveryStrategy.IN_PLACE, recovery=True)
    made.remove_agent("b")
    after, reason = recovery.choose_action(made, dies(made))
    assert after is RecoveryAction.WAIT and reason.endswith(": waiting for a host to join")
    shrinks = training_cluster(RecoveryStrategy.IN_PLACE, RecoveryStrategy.ELASTIC, shrink_after_s=5.0)
    shrinks.remove_agent("b")
    after, reason = recovery.choose_action(shrinks, dies(shrinks))
    assert after is RecoveryAction.WAIT and reason.endswith(": waiting for a host to join; the world shrinks after 5 s")
    shrinks.change(shrinks.worker("0"), state=types.NodeState.LEFT)
    assert recovery.choose_action(shrinks, dies(shrinks))[0] is not RecoveryAction.WAIT, (
        "no rank can be in step with one that left"
    )


LOST = "the rows of pserver:0 were lost"


@pytest.mark.parametrize(
    ("changed", "after", "reason"),
    [
        (
            {},
            RecoveryAction.RESTART_ALL,
            f"{LOST} because the holder of their replica died as well: all workers restart from the last checkpoint",
        ),
        (
            {"heals": False},
            RecoveryAction.END,
            f"{LOST} because the holder of their replica died as well:"
            " start the cluster again, it resumes from its last checkpoint",
        ),
        (
            {"restarts": 3},
            RecoveryAction.END,
            f"{LOST} because the holder of their replica died as well, and all workers were restarted 3 times already",
        ),
    ],
)
def test_lost_rows_cause_limited_full_restarts(changed: dict[str, Any], after: RecoveryAction, reason: str) -> None:
    made = training_cluster(RecoveryStrategy.IN_PLACE, servers=2)
    made.set(**changed)
    assert recovery.choose_action(made, dies(made, types.Role.PSERVER, 0), ExitCode.ROWS_LOST) == (after, reason)


def test_rows_without_replica_are_lost_with_server() -> None:
    made = training_cluster(RecoveryStrategy.RECOVER, servers=1, copies=0)
    made.set(has_row_copies=False)
    after, reason = recovery.choose_action(made, dies(made, types.Role.PSERVER, 0), 137)
    assert after is RecoveryAction.END
    assert reason == f"{LOST} with it because they had no replica, and recover-in-place is not enabled (COVEY_STRATEGY)"


def test_parse_strategies_sorts_by_ladder_appends_exit_and_rejects_unknown_names() -> None:
    assert parse_strategies([" dump", "retry", ""]) == (
        RecoveryStrategy.RETRY,
        RecoveryStrategy.DUMP,
        RecoveryStrategy.EXIT,
    )
    with pytest.raises(UsageError) as refused:
        parse_strategies(["hope"])
    assert str(refused.value) == f"the strategy hope is unknown: expected {', '.join(RecoveryStrategy)}"


def test_host_with_capacity_has_fewest_extra_ranks_and_is_not_leaving() -> None:
    made = training_cluster(RecoveryStrategy.RECOVER, extra_ranks=2)
    for name, link, slots in (("c", 3, 0), ("d", 4, 0), ("e", 5, 0)):
        made.add_agent(types.AgentInfo(name, f"life of {name}", HERE, slots, connection=link))
    made.add(types.Member(types.Role.WORKER, "4", "life", HERE, rank=4, agent="c", state=types.NodeState.ALIVE))
    made.change_agent("a", is_leaving=True)
    made.change_agent("d", connection=0)
    assert recovery.host_with_capacity(made, dies(made)) is made.agents["e"], "a leaves, d is not heard, c has one already"
    made.change_agent("e", is_leaving=True)
    assert recovery.host_with_capacity(made, dies(made)) is made.agents["c"]
    made.change_agent("c", is_leaving=True)
    assert recovery.host_with_capacity(made, dies(made)) is None, "never the host it died on"


def test_reason_names_why_member_is_not_restarted() -> None:
    made = training_cluster()
    made.set(heals=False)
    assert recovery.choose_action(made, dies(made))[1] == (
        "no restart is allowed (--max-restarts is 0), and no worker can be replaced alone, because none has called covey.init()"
    )
    raw = training_cluster()
    member = raw.change(dies(raw), agent="")
    assert recovery.choose_action(raw, member) == (RecoveryAction.END, "recovery is off")
    never = training_cluster(RecoveryStrategy.IN_PLACE)
    never.change_agent("b", max_restarts=0)
    assert recovery.choose_action(never, dies(never))[1] == "0 replacements on host-b are used up (--max-restarts)"


# -- the part -----------------------------------------------------------------------------------------------------------


def exits(cluster: EditableCluster, rank: int, code: int = 137, now: float = 1.0) -> list[SchedulerEffect]:
    """The agent reports the exit of a worker; returns the effects."""
    member = cluster.worker(str(rank))
    report = ChildExited(str(rank), member.incarnation, code, "killed")
    cluster.recovery.on_child_exited(cluster.step(now), cluster.agents[member.agent].connection, report)
    return cluster.take_effects()


def met(*rungs: str, **settings: Any) -> EditableCluster:
    """Four connected workers whose group has met."""
    cluster = training_cluster(*rungs, connected=True, **settings)
    cluster.barrier.on_rendezvous_put(cluster.step(0.0), 10, RendezvousPut("address", b"", 1))
    return cluster


def resume(cluster: EditableCluster, *connections: int, now: float = 3.0) -> list[SchedulerEffect]:
    for connection in connections:
        cluster.recovery.on_resumed(cluster.step(now), connection, RankResumed(cluster.generation, 6))
    return cluster.take_effects()


def sent(effects: list[SchedulerEffect], kind: type) -> list[int]:
    return [effect.connection for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def outcomes(cluster: EditableCluster) -> list[tuple[str, Outcome]]:
    return [(incident.strategy, incident.outcome) for incident in cluster.incidents.records]


def test_a_rank_is_replaced_in_a_new_generation_that_is_durable_before_its_incarnation() -> None:
    cluster = met("recover-in-place")
    effects = exits(cluster, 1)
    records = [effect.record for effect in effects if isinstance(effect, Persist)][1:]
    assert [type(record) for record in records] == [types.ClusterRecord, types.MemberRecord], "after the incident"
    assert records == [cluster.record(), types.MemberRecord.from_member(cluster.worker("1"))]
    assert (cluster.generation, cluster.worker("1").incarnation, cluster.phase) == (2, 2, types.Phase.HEALING)
    assert sent(effects, NewGeneration) == [10, 12, 13] and sent(effects, DesiredChildren) == [1]
    failure = cluster.recovery.first_failure
    assert failure is not None and failure.node_id == "1" and outcomes(cluster) == [("recover-in-place", Outcome.OPEN)]


def test_exit_of_other_incarnation_or_foreign_child_is_ignored() -> None:
    cluster = met("recover-in-place")
    for connection, incarnation in ((1, 2), (2, 1), (99, 1)):
        cluster.recovery.on_child_exited(cluster.step(1.0), connection, ChildExited("1", incarnation, 137, "killed"))
    assert cluster.take_effects() == [] and cluster.worker("1").state is types.NodeState.ALIVE


def test_a_recovery_is_over_when_the_last_rank_has_resumed() -> None:
    cluster = met("recover-in-place")
    exits(cluster, 1)
    cluster.table.attach_member(21, cluster.worker("1"), 2.0)
    cluster.barrier.on_rendezvous_put(cluster.step(2.0), 21, RendezvousPut("address", b"", 2))
    resume(cluster, 10, 12, 13)
    assert cluster.phase is types.Phase.HEALING and outcomes(cluster)[0][1] is Outcome.OPEN
    cluster.recovery.on_resumed(cluster.step(3.0), 21, RankResumed(1, 6))
    assert cluster.phase is types.Phase.HEALING, "of an earlier generation"
    resume(cluster, 21)
    assert (cluster.lifecycle.phase, cluster.reason) == (types.Phase.READY, "all ranks resumed")
    assert outcomes(cluster) == [("recover-in-place", Outcome.RESUMED)] and cluster.recovery.first_failure is None
    assert cluster.progress(cluster.worker("0")).step == cluster.lifecycle.highest_step == 6


def test_a_suspect_member_keeps_the_cluster_from_being_ready() -> None:
    cluster = met("recover-in-place")
    cluster.set(phase=types.Phase.HEALING)
    cluster.change(cluster.worker("2"), state=types.NodeState.SUSPECT)
    cluster.recovery.update_readiness(cluster.step(2.0), "why")
    assert cluster.phase is types.Phase.HEALING and cluster.take_effects() == []
    cluster.change(cluster.worker("2"), state=types.NodeState.ALIVE)
    cluster.recovery.update_readiness(cluster.step(2.0), "why")
    assert (cluster.lifecycle.phase, cluster.reason) == (types.Phase.READY, "why")


def test_plans_are_sent_when_all_ranks_have_reported() -> None:
    cluster = met("recover-in-place")
    for connection in (10, 11, 12, 13, 1, 99):
        assert not sent(cluster.take_effects(), HealPlan)
        cluster.recovery.on_report(cluster.step(2.0), connection, SafePointReport(1, needs_state=connection == 11))
        if connection == 13:
            assert sent(cluster.take_effects(), HealPlan) == [10, 11, 12, 13]
    cluster.recovery.on_report(cluster.step(2.0), 10, SafePointReport(0))
    assert cluster.take_effects() == [], "an earlier generation, an agent and a stranger report nothing"


def test_failed_plan_during_a_dump_restarts_no_worker() -> None:
    cluster = met("recover-in-place", "dump")
    cluster.heartbeats.note_progress(cluster.worker("0"), types.Progress(5, "train", in_loop=True), 0.0)
    cluster.shutdown.request_dump(cluster.step(1.0), "enough")
    cluster.take_effects()
    for connection in (10, 11, 12, 13):
        report = SafePointReport(1, needs_state=connection == 11, has_complete_state=False)
        cluster.recovery.on_report(cluster.step(2.0), connection, report)
    assert cluster.take_effects() == [] and cluster.restarts == 0 and cluster.generation == 1
    assert cluster.shutdown.state is ShutdownState.DUMPING


def test_no_worker_of_a_scale_in_leaves_during_a_dump() -> None:
    cluster = met("dump")
    cluster.set(departing_ids=("3",))
    cluster.heartbeats.note_progress(cluster.worker("0"), types.Progress(5, "train", in_loop=True), 0.0)
    cluster.shutdown.request_dump(cluster.step(1.0), "enough")
    cluster.barrier.require_agreement()
    resume(cluster, 10, 11, 12, 13)
    assert "3" in {member.node_id for member in cluster.members_in_role(types.Role.WORKER)} and cluster.generation == 1


def test_a_lost_state_is_a_full_restart_and_closes_the_incidents() -> None:
    cluster = met("recover-in-place")
    cluster.incidents.open(cluster.step(1.0), "recover", "", "killed")
    for connection in (10, 11, 12, 13):
        cluster.recovery.on_report(cluster.step(2.0), connection, SafePointReport(1, needs_state=True))
    assert cluster.full_restart == types.FullRestart(1, "no rank holds the training state any more") and not cluster.trains
    assert outcomes(cluster) == [("recover", Outcome.RESTARTED)]
    assert cluster.incidents.records[0].ms[Stage.REFORMED] == 1000.0


def test_promoted_spare_keeps_its_connection() -> None:
    cluster = met("recover")
    spare = types.Member(
        types.Role.SPARE, "0", "spare life", HERE, rank=0, agent="a", state=types.NodeState.ALIVE, pid=9, connection=30
    )
    spare = cluster.add(spare, progress=types.Progress(is_spare_ready=True))
    effects = exits(cluster, 1)
    taken = cluster.worker("1")
    assert (taken.connection, taken.instance_id, taken.promoted_from, taken.incarnation) == (30, "spare life", "spare:0.1", 2)
    assert cluster.table.member_at(30) == taken and cluster.table.current(spare).state is types.NodeState.LEFT
    assert sent(effects, RankAssigned) == [30] and cluster.out.counters["promotions"] == 1
    assert outcomes(cluster) == [("recover", Outcome.OPEN)]


def test_death_of_spare_is_not_a_failure() -> None:
    cluster = met("recover")
    cluster.add(types.Member(types.Role.SPARE, "0", "life", HERE, rank=0, agent="a", state=types.NodeState.ALIVE))
    cluster.recovery.on_child_exited(cluster.step(1.0), 1, ChildExited("0", 1, 137, "killed", role=types.Role.SPARE))
    assert cluster.phase is types.Phase.READY and cluster.generation == 1 and outcomes(cluster) == []
    cluster.change_agent("a", spares=1)
    cluster.take_effects()
    cluster.recovery.run_idle_work(cluster.step(2.0))
    assert sent(cluster.take_effects(), DesiredChildren) == [1]
    assert cluster.members[(types.Role.SPARE, "0")].incarnation == 2


def test_full_restart_resets_counts_of_workers() -> None:
    cluster = met(max_restarts=1)
    cluster.change(cluster.worker("2"), deaths_without_progress=2, member_index=7)
    effects = exits(cluster, 1)
    workers = cluster.members_in_role(types.Role.WORKER)
    assert [(m.incarnation, m.connection, m.member_index) for m in workers] == [(2, 0, rank) for rank in range(4)]
    assert [m.handovers for m in workers] == [1, 0, 1, 1], "a process that had not failed uses up no budget"
    assert cluster.worker("2").deaths_without_progress == 0 and (cluster.restarts, cluster.trains) == (1, False)
    assert sent(effects, DesiredChildren) == [1, 2] and outcomes(cluster) == [("restart all", Outcome.RESTARTED)]
    assert cluster.phase is types.Phase.READY


def test_new_host_restarts_workers_of_lost_host() -> None:
    cluster = met("recover", recovery=True, extra_ranks=0)
    cluster.recovery.on_leave(cluster.step(1.0), 2, Leave(143, "SIGTERM"))
    assert sent(cluster.take_effects(), LeaveAcknowledged) == [2] and list(cluster.agents) == ["a"]
    assert [m.state for m in cluster.members_in_role(types.Role.WORKER)] == [types.NodeState.ALIVE] * 2 + [
        types.NodeState.DEAD
    ] * 2
    agent = cluster.table.add_agent(RegisterAgent("c", "life of c", THERE, 2))
    cluster.table.attach_agent(3, agent, 2.0)
    cluster.recovery.use_new_hosts(cluster.step(2.0))
    assert [(m.agent, m.incarnation) for m in cluster.members_in_role(types.Role.WORKER)] == [("a", 1)] * 2 + [("c", 2)] * 2
    assert sent(cluster.take_effects(), DesiredChildren) == [3] and cluster.out.counters["returns"] == 2


def test_world_shrinks_without_host_in_time_extended_by_suspension() -> None:
    cluster = met("recover", "elastic-training", extra_ranks=0, shrink_after_s=5.0)
    cluster.recovery.on_leave(cluster.step(1.0), 2, Leave(143, "SIGTERM"))
    cluster.recovery.postpone(2.0)
    assert not cluster.recovery.act_on_deadlines(cluster.step(8.0)) and cluster.size(types.Role.WORKER) == 4
    assert cluster.recovery.act_on_deadlines(cluster.step(8.1)) and cluster.size(types.Role.WORKER) == 2
    assert cluster.reason == "no host joined for worker:2, worker:3 within 5 s: the other ranks continue in a world of 2"


def test_run_ends_if_absent_members_miss_deadline() -> None:
    cluster = met("recover", recovery=True, extra_ranks=0, topo_timeout_s=30.0)
    cluster.recovery.on_leave(cluster.step(1.0), 2, Leave(143, "SIGTERM"))
    assert not cluster.recovery.act_on_deadlines(cluster.step(31.0))
    assert cluster.recovery.act_on_deadlines(cluster.step(31.1)) and cluster.ended is not None
    assert (cluster.ended.code, cluster.ended.reason) == (143, "worker:2, worker:3 did not come back within 30 s")


def test_dead_member_receives_reason_before_close() -> None:
    cluster = met("recover-in-place")
    cluster.recovery.declare_dead(cluster.step(5.0), cluster.worker("1"), "stuck", since=2.0)
    effects = cluster.take_effects()
    assert Close(11) == effects[-1] and cluster.incidents.records[0].ms[Stage.DETECTED] == 3000.0
    assert cluster.table.member_at(11) is None


def test_handover_is_neither_failure_nor_counted_replacement() -> None:
    cluster = met("recover-in-place")
    cluster.recovery.on_draining(cluster.step(1.0), 11, Draining("its host is needed"))
    exits(cluster, 1, code=143)
    assert (cluster.worker("1").handovers, cluster.worker("1").deaths_without_progress) == (1, 0)
    assert cluster.recovery.first_failure is None and cluster.out.counters["handovers"] == 1


def test_gone_host_is_recorded_and_its_nodes_are_dead() -> None:
    cluster = met("recover-in-place", recovery=True)
    pod = msgspec.structs.replace(THERE, life="uid-1")
    cluster.change_agent("b", host=pod)
    cluster.recovery.on_host_gone(cluster.step(1.0), "uid-1", "its pod is gone")
    assert cluster.gone_hosts == ("uid-1",) and list(cluster.agents) == ["a"]
    effects = cluster.take_effects()
    assert isinstance(effects[0], Persist) and Close(2) in effects
    cluster.recovery.on_host_gone(cluster.step(2.0), "uid-1", "its pod is gone")
    assert cluster.take_effects() == []


def test_the_cluster_ends_when_the_last_worker_has_left() -> None:
    cluster = met()
    for rank in range(4):
        assert cluster.ended is None
        exits(cluster, rank, code=0)
    assert cluster.lifecycle.has_ended and cluster.reason == "all 4 workers finished"
