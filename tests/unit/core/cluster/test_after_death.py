"""All effects after a death: restarts, messages, events, records, rollbacks and the end of the cluster."""

from __future__ import annotations

from typing import Any

from tests.unit.core.cluster.editable_cluster import EditableCluster
from tests.unit.core.cluster.test_scheduler_machine import (
    BOX,
    OTHER,
    Effects,
    crashed,
    ended,
    journal,
    lose_state,
    machine,
    outcomes,
    phase,
    published,
    ready,
    ready_agents,
    register,
    restored,
    sent,
    sharded_over_four,
    sharded_under_agent,
    start_processes,
    state,
    stored_records,
    tick,
    training,
    workers_of,
)
from tests.unit.core.cluster.test_scheduler_machine_effects import incidents_of, records, serve, served, warnings
from tests.unit.core.cluster.test_spares_decided import SPARE, SpareCluster

from covey.core import messages
from covey.core.cluster.members import HostLayout
from covey.core.cluster.resize import JOIN_TIMEOUT_S
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.cluster.shutdown import END_DELIVERY_S
from covey.core.effects import Close, EndCluster, Persist
from covey.core.events import ConnectionLost, HostGone, MessageReceived, Tick
from covey.core.incidents import Outcome, Stage
from covey.core.strategy_ladder import parse_strategies
from covey.core.types import AgentRecord, ClusterRecord, Ended, Host, MemberRecord, NodeState, Phase, Progress, Role
from covey.errors import ExitCode

IN_PLACE = parse_strategies(("recover-in-place",))
THIRD = Host("boot-third", "third", "10.0.0.3")


def dies(made: SchedulerMachine, node_id: str, link: int = 1, life: int = 1, reason: str = "killed") -> Effects:
    return made.step(MessageReceived(messages.ChildExited(node_id, life, 137, reason), link), 1.0)


def members(effects: Effects) -> list[tuple[str, int, NodeState]]:
    """Those that were written down, in order."""
    return [(r.node_id, r.incarnation, r.state) for r in stored_records(effects) if isinstance(r, MemberRecord)]


# -- one starts again ------------------------------------------------------------------------------------------------


def test_rank_restarts_on_its_host_and_other_agents_receive_nothing() -> None:
    made = training(strategies=IN_PLACE)
    effects = dies(made, "1")
    reason = "worker:1 is restarted on box; the other ranks wait in their step"
    assert warnings(effects) == ["worker:1 died: killed", f"cluster recover-in-place: {reason}"]
    assert incidents_of(made) == [("recover-in-place", "killed", reason, Outcome.OPEN)]
    assert sent(effects, messages.NewGeneration) == dict.fromkeys((10, 12), messages.NewGeneration(2, "worker:1 died: killed"))
    assert members(effects) == [("1", 2, NodeState.ALIVE)], "the next scheduler must know which life is meant"
    assert {link: start.assignments for link, start in sent(effects, messages.DesiredChildren).items()} == {
        1: [messages.Assignment("0", 0, 1, 0), messages.Assignment("1", 1, 2, 1)]
    }
    assert made.counters == {"deaths": 1, "replacements": 1} and made.cluster.reason == reason
    failure = EditableCluster.of(made).recovery.first_failure
    assert failure is not None and (failure.code, failure.log) == (137, "")


def test_third_death_without_step_ends_run_and_step_resets_count() -> None:
    made = training(strategies=IN_PLACE)
    for life in (1, 2):
        assert not ended(dies(made, "1", life=life))
    made.step(MessageReceived(messages.Heartbeat(Progress(6, "train", in_loop=True)), 10), 1.0)
    for life in (3, 4, 5):
        assert not ended(dies(made, "1", life=life)), "a step was made since"
    end = ended(dies(made, "1", life=6))
    assert end is not None and end.code == 137
    assert end.reason == "worker:1 on box: killed; not recovered: worker:1 died 3 times without a step in between"


def test_rank_of_lost_host_restarts_elsewhere_and_old_process_is_refused() -> None:
    made = training(strategies=parse_strategies(("recover",)), agents_return=False)
    effects = made.step(ConnectionLost("reset", 2), 1.0)
    reason = "worker:2 is restarted on box; the other ranks wait in their step"
    assert warnings(effects)[0] == "agent:b gone: reset"
    assert (
        sent(effects, messages.Refused) == {12: messages.Refused(f"this process was superseded: {reason}")}
        and Close(12) in effects
    )
    assert sent(effects, messages.DesiredChildren)[1].assignments[-1] == messages.Assignment("2", 2, 2, 2)
    assert sent(effects, messages.NewGeneration)[10].reason == "worker:2 died: the agent on other is gone (reset)"


def test_promoted_spare_of_other_host_updates_both_agents() -> None:
    spare_cluster = SpareCluster(here=0, there=1).begin().stand_by(0, OTHER)
    effects = spare_cluster.die(1)
    assert {link: [a.name for a in start.assignments] for link, start in sent(effects, messages.DesiredChildren).items()} == {
        1: ["worker:0"],
        2: ["worker:1", "worker:2"],
    }, "the old life may still have to be ended"
    assert sent(effects, messages.NewGeneration) == dict.fromkeys((10, 12), messages.NewGeneration(2, "worker:1 died: killed"))
    assert spare_cluster.machine.incidents.records[-1].strategy == "recover"


def test_moved_rank_sends_nothing_to_former_agent() -> None:
    made = training(strategies=parse_strategies(("recover",)))
    made.step(MessageReceived(messages.Draining("asked to leave"), 2), 1.0)
    assert set(sent(dies(made, "2", link=2), messages.DesiredChildren)) == {1}


def test_process_asked_to_leave_hands_over_without_failure() -> None:
    made = training(strategies=IN_PLACE)
    for life in (1, 2):
        link = made.cluster.members[(Role.WORKER, "1")].connection
        made.step(MessageReceived(messages.Draining("its host is needed"), link), 1.0)
        effects = dies(made, "1", life=life, reason="signal 15")
        assert warnings(effects)[0] == "worker:1 handed over: its host is needed"
        assert sent(effects, messages.NewGeneration)[10].reason == "worker:1 handed over: its host is needed"
        assert made.cluster.members[(Role.WORKER, "1")].handovers == life
        made.step(MessageReceived(register("1", f"life {life + 1}", incarnation=life + 1), 20 + life), 1.0)
    assert made.counters == {"handovers": 2, "replacements": 2}
    assert (
        EditableCluster.of(made).recovery.first_failure is None
        and made.cluster.members[(Role.WORKER, "1")].deaths_without_progress == 0
    )


def test_spare_exit_and_readiness_are_published() -> None:
    spare_cluster = SpareCluster().begin().stand_by()
    assert "spare:0 stands by: train.py:7" in published(spare_cluster.effects)
    again = spare_cluster.receive(messages.Heartbeat(Progress(phase="train.py:7", is_spare_ready=True)), SPARE)
    assert published(again) == [], "once"
    assert warnings(spare_cluster.die(0, role=Role.SPARE)) == ["spare:0 died: killed"]


def test_script_error_code_ends_run_without_restart() -> None:
    made = training(strategies=IN_PLACE)
    effects = made.step(MessageReceived(messages.ChildExited("1", 1, ExitCode.BAD_SCRIPT, "no such file"), 1), 1.0)
    assert f"cluster end: worker:1 exited with code {ExitCode.BAD_SCRIPT}: a restart does not fix that" in warnings(effects)
    assert ended(effects)


def test_world_shrinks_without_replacement_and_reason_is_shown() -> None:
    made = sharded_under_agent(3)
    edited = EditableCluster.of(made)
    edited.change(edited.worker("1"), deaths_without_progress=3)
    effects = dies(made, "1")
    assert "cluster resized: worker:1 died: killed; the world size is now 2" in warnings(effects)
    assert made.cluster.reason.startswith("worker:1 died 3 times without a step in between: ")


# -- a host comes ----------------------------------------------------------------------------------------------------


def test_new_host_restarts_members_of_lost_hosts() -> None:
    made = training(strategies=parse_strategies(("recover",)), extra_ranks=0, recovery=True, agents_return=False)
    made.step(MessageReceived(messages.RendezvousPut("met", b"", 1), 10), 0.0)
    made.step(ConnectionLost("reset", 2), 1.0)
    assert (phase(made), state(made, "2")) == (Phase.HEALING, NodeState.DEAD)
    assert made.cluster.reason.endswith("(COVEY_EXTRA_RANKS is 0): waiting for a host to join")
    effects = made.step(MessageReceived(messages.RegisterAgent("c", "life of c", THIRD, 1), 3), 2.0)
    said = "worker:2 restarted on third"
    assert f"cluster takes a host: {said}" in published(effects)
    assert sent(effects, messages.NewGeneration) == dict.fromkeys((10, 11), messages.NewGeneration(3, said))
    assert members(effects) == [("2", 2, NodeState.ALIVE)]
    assert (
        sent(effects, messages.DesiredChildren)[3].assignments == [messages.Assignment("2", 2, 2, 0)]
        and made.counters["returns"] == 1
    )
    made.step(MessageReceived(register("2", "second", THIRD, incarnation=2), 13), 2.0)
    assert phase(made) is Phase.HEALING, "it is here, and not in the others' step yet"
    for link in (10, 11, 13):
        made.step(MessageReceived(messages.RankResumed(3, 6), link), 3.0)
    assert (phase(made), outcomes(made)) == (Phase.READY, [Outcome.RESUMED])
    assert EditableCluster.of(made).recovery.first_failure is None


def test_joining_host_is_cause_of_scale_out() -> None:
    made = ready_agents(worker_max=4, last_call_s=0.0)
    EditableCluster.of(made).set(trains=True)
    made.step(MessageReceived(messages.RegisterAgent("c", "life of c", THIRD, 1), 3), 1.0)
    assert incidents_of(made)[0][:3] == (
        "scale-out",
        "a host joined",
        "the world grows from 3 to 4 workers because third joined",
    )


def test_world_shrinks_after_shrink_limit_without_new_host() -> None:
    made = training(
        strategies=parse_strategies(("recover-in-place", "elastic-training")), shrink_after_s=5.0, agents_return=False
    )
    made.step(ConnectionLost("closed", 2), 0.0)
    beats = [1, 10, 11]
    tick(made, 5.0, beats=beats)
    assert made.cluster.size(Role.WORKER) == 3
    effects = tick(made, 6.0, beats=beats, since=5.0)
    limit = "no host joined for worker:2 within 5 s"
    reason = f"{limit}: the other ranks continue in a world of 2"
    assert incidents_of(made)[-1] == ("elastic-training", limit, reason, Outcome.OPEN) and made.counters["shrinks"] == 1
    assert f"cluster resized: {limit}; the world size is now 2" in warnings(effects)


def test_end_reports_first_failure_if_world_cannot_shrink() -> None:
    made = training(
        strategies=parse_strategies(("recover-in-place", "elastic-training")), shrink_after_s=5.0, agents_return=False
    )
    made.step(MessageReceived(messages.Leave(139, "the machine is on fire"), 2), 0.0)
    made.step(MessageReceived(messages.ChildExited("0", 1, 0), 1), 0.0)
    end = ended(tick(made, 6.0, beats=[1, 10, 11]))
    assert end is not None and end.failure is not None
    assert (end.code, end.failure.node_id, end.failure.code) == (139, "2", 139)
    assert end.failure.reason == "the agent on other is gone (the machine is on fire)"


# -- full restart ----------------------------------------------------------------------------------------------------


def test_full_restart_is_counted_and_sent_to_server_without_agent() -> None:
    made = machine(1, server_num=1, max_restarts=2)
    made.step(MessageReceived(messages.RegisterAgent("a", "la", BOX, 1), 1), 0.0)
    made.step(MessageReceived(messages.Register(Role.PSERVER, "0", "ls", BOX), 2), 0.0)
    for life in (1, 2):
        effects = dies(made, "0", life=life)
        assert sent(effects, messages.NewGeneration) == {2: messages.NewGeneration(life + 1, "worker:0 died: killed")}
        assert made.cluster.reason == f"worker:0 died (killed), restart {life} of 2: all workers restart"
        assert (made.cluster.restarts, made.counters["restarts"]) == (life, life)


def roll_back(made: SchedulerMachine) -> Effects:
    """Report on all ranks that no rank holds one slot of the state."""
    effects: Effects = []
    for member in made.cluster.members_in_role(Role.WORKER):
        report = messages.SafePointReport(
            made.cluster.generation, messages.CollectiveNumber(5, 0), slot_count=2, held_slots=b"\x01"
        )
        effects += made.step(MessageReceived(report, member.connection), 1.0)
    return effects


def test_rollback_to_checkpoint_is_published_and_not_repeated_for_one_step() -> None:
    made = sharded_under_agent(3)
    dies(made, "1")
    start_processes(made)
    lose_state(made)
    lost = (
        "only dead ranks held the optimizer's state of 1 of 2 parameters:"
        " increase ShardedOptimizer(copies=...) to survive more deaths at the same time"
    )
    assert made.cluster.reason == f"{lost}: all workers restart from the newest checkpoint"
    start_processes(made)
    end = ended(roll_back(made))
    assert end is not None and end.code == ExitCode.PEER_FAILED
    assert end.reason.startswith(f"{lost}; full restart 1: all ranks restart from the newest checkpoint")
    assert end.failure is not None and end.failure.node_id == "1", "what began it"


def test_rollback_to_checkpoint_is_repeated_after_further_step() -> None:
    made = sharded_under_agent(2)
    for step in (5, 6):
        made.step(MessageReceived(messages.Heartbeat(Progress(step, "train", in_loop=True)), 11), 1.0)
        effects = roll_back(made)
        assert [
            w
            for w in warnings(effects)
            if w.startswith("cluster roll back: only dead ranks held the optimizer's state of 1 of 2 ")
        ]
        assert warnings(effects)[0].endswith(": all workers restart from the newest checkpoint")
        start_processes(made)
    assert made.counters["restarts"] == 2


def test_no_rollback_to_checkpoint_if_one_worker_cannot_restart() -> None:
    assert ended(roll_back(sharded_over_four(together=1))), "workers without an agent cannot be restarted"
    made = sharded_under_agent(2)
    made.step(MessageReceived(messages.Draining("asked to leave"), 1), 1.0)
    assert ended(roll_back(made)), "nothing more is started on that host"


def test_lost_state_is_published_and_persisted() -> None:
    made = sharded_under_agent(2)
    effects: Effects = []
    for member in made.cluster.members_in_role(Role.WORKER):
        effects += made.step(
            MessageReceived(messages.SafePointReport(made.cluster.generation, None, needs_state=True), member.connection), 1.0
        )
    said = "all ranks restart from the newest checkpoint, or from the beginning if there is none"
    cause = "no rank holds the training state any more"
    assert warnings(effects) == [f"cluster state lost: full restart 1: {said}; cause: {cause}"]
    assert [record.trains for record in records(effects)] == [False] and made.cluster.trains is False


# -- the dying gasp --------------------------------------------------------------------------------------------------


def test_remaining_ranks_dump_before_end_and_planned_end_is_persisted() -> None:
    made = training(strategies=parse_strategies(("dump",)), dump_s=20.0)
    tick(made, 1.0)
    effects = made.step(MessageReceived(messages.ChildExited("2", 1, 139, "signal 11"), 2), 1.0)
    reason = "worker:2 on other: signal 11"
    assert sent(effects, messages.DumpRequest) == dict.fromkeys((10, 11), messages.DumpRequest(reason)) and not ended(effects)
    assert (phase(made), made.cluster.reason, made.incidents.records[0].strategy) == (Phase.HEALING, reason, "dump")
    assert members(effects) == [("2", 1, NodeState.DEAD)]
    assert f"cluster dump: {reason}; the remaining ranks dump their state" in warnings(effects)
    failure = EditableCluster.of(made).recovery.first_failure
    assert failure is not None and records(effects)[-1].planned_end == Ended(139, reason, failure)
    wrote = made.step(MessageReceived(messages.DumpWritten(5, "there"), 10), 1.0)
    assert published(wrote) == ["worker:0 dumped: step 5 is in there"] and not ended(wrote)
    assert not ended(tick(made, 21.0, since=1.0)), "in its very last moment it may still come"
    end = ended(made.step(Tick(), 21.5))
    assert end == EndCluster(139, f"{reason}; step 5 is in there", failure)


def test_rank_that_dies_during_dump_is_not_awaited() -> None:
    made = training(strategies=parse_strategies(("dump",)), dump_s=20.0)
    dies(made, "2", link=2)
    one = dies(made, "1")
    assert members(one) == [("1", 1, NodeState.DEAD)] and not ended(one) and not sent(one, messages.DesiredChildren)
    end = ended(dies(made, "0"))
    assert end is not None and end.reason == "worker:2 on other: killed; no rank could dump its state"


def test_cluster_ends_immediately_if_no_rank_can_dump() -> None:
    made = ready_agents(strategies=parse_strategies(("dump",)))
    end = ended(dies(made, "2", link=2))
    assert end is not None and (end.code, end.reason) == (137, "worker:2 on other: killed")
    assert end.failure is EditableCluster.of(made).recovery.first_failure and made.incidents.records[0].strategy == "exit"


def test_server_death_during_dump_does_not_replace_dump_of_worker() -> None:
    made = served(strategies=parse_strategies(("dump",)))
    made.step(MessageReceived(messages.Heartbeat(Progress(5, "train", in_loop=True)), 11), 1.0)
    assert set(sent(made.step(MessageReceived(messages.StopRequest("enough", dump=True), 9), 1.0), messages.DumpRequest)) == {
        11
    }
    effects = made.step(MessageReceived(messages.ChildExited("0", 1, 137, "killed", role=Role.PSERVER), 1), 1.0)
    assert members(effects) == [("0", 1, NodeState.DEAD)] and not ended(effects)
    end = ended(made.step(MessageReceived(messages.DumpWritten(5, "there"), 11), 1.0))
    assert end is not None and (end.code, end.reason) == (ExitCode.STOPPED, "enough; step 5 is in there")


def test_leaving_host_with_scheduler_requests_dump() -> None:
    made = training(strategies=parse_strategies(("recover", "dump")))
    assert not sent(made.step(MessageReceived(messages.Draining("asked to leave"), 1), 1.0), messages.DumpRequest)
    effects = made.step(MessageReceived(messages.Draining("asked to leave", scheduler_leaves=True), 2), 1.0)
    assert set(sent(effects, messages.DumpRequest)) == {10, 11, 12}
    assert records(effects)[-1].planned_end == Ended(ExitCode.STOPPED, "asked to leave")


def test_leaving_host_without_successor_ends_run_with_worker_code() -> None:
    made = training(strategies=parse_strategies(("recover", "dump")), extra_ranks=0)
    made.step(MessageReceived(messages.Draining("asked to leave"), 2), 0.0)
    effects = made.step(MessageReceived(messages.ChildExited("2", 1, 143), 2), 0.0)
    dumping = records(effects)[-1].planned_end
    assert dumping is not None and (dumping.code, dumping.failure) == (143, None)


# -- how loudly ------------------------------------------------------------------------------------------------------


def test_death_is_published_as_warning_and_leave_is_not() -> None:
    made = ready("0", "1", "2", recovery=True)
    assert warnings(made.step(MessageReceived(messages.Leave(), 1), 1.0)) == []
    assert warnings(made.step(ConnectionLost("reset", 2), 1.0))[0] == "worker:1 died: its connection closed (reset)"
    agents = ready_agents(recovery=True)
    assert warnings(agents.step(ConnectionLost("reset", 2), 1.0)) == ["agent:b out of reach: reset"]
    assert warnings(made.step(MessageReceived(messages.CheckpointFailed(10, "the disk is full"), 3), 1.0)) == [
        "worker:2 unsaved: the disk is full"
    ]


def test_silent_rank_or_lost_host_ends_run_with_peer_failed() -> None:
    for made, effects in (
        (silent := ready("0", "1", node_timeout_s=10.0), tick(silent, 11.0, beats=[1])),
        (lost := ready_agents(), lost.step(ConnectionLost("reset", 2), 1.0)),
    ):
        end = ended(effects)
        assert end is not None and end.failure is not None, made
        assert (end.code, end.failure.code) == (ExitCode.PEER_FAILED, ExitCode.PEER_FAILED)


def test_host_gone_declares_its_workers_dead_with_that_reason() -> None:
    pod = Host("pod-1", "pod-1", "10.0.0.2", life="uid-1")
    raw = machine(2, recovery=True)
    raw.step(MessageReceived(register("x"), 1), 0.0)
    raw.step(MessageReceived(register("y", host=pod), 2), 0.0)
    effects = raw.step(HostGone("uid-1", "its node is lost"), 1.0)
    assert "worker:y died: its node is lost" in warnings(effects)
    first = effects[0]
    assert isinstance(first, Persist) and isinstance(first.record, ClusterRecord), "it is durable before anything follows"
    assert first.record.gone_hosts == ("uid-1",)
    kept_by_an_agent = machine(1)
    kept_by_an_agent.step(MessageReceived(messages.RegisterAgent("b", "life of b", pod, 1), 2), 0.0)
    end = ended(kept_by_an_agent.step(HostGone("uid-1", "its node is lost"), 1.0))
    assert end is not None and end.code == ExitCode.PEER_FAILED
    assert end.reason == "worker:0 on pod-1: the agent on pod-1 is gone (its node is lost)"


def test_exit_after_all_ranks_finished_is_leave() -> None:
    made = ready_agents(strategies=IN_PLACE)
    for rank in range(3):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
    for rank in range(3):
        made.step(
            MessageReceived(messages.SafePointReport(1, completed=messages.CollectiveNumber(9, 0), finished=True), 10 + rank),
            0.0,
        )
    effects = made.step(MessageReceived(messages.ChildExited("1", 1, 1), 1), 1.0)
    assert published(effects) == ["worker:1 left: code 1, after all ranks had finished"] and warnings(effects) == []
    effects = made.step(MessageReceived(messages.ChildExited("0", 1, 139, "signal 11"), 1), 1.0)
    assert published(effects) == ["worker:0 left: signal 11, after all ranks had finished"]


# -- forming ---------------------------------------------------------------------------------------------------------


def test_formation_reason_names_target_during_last_call() -> None:
    made = machine(2, worker_max=4, last_call_s=5.0)
    for link, name in ((1, "a"), (2, "b")):
        made.step(MessageReceived(register(name), link), 0.0)
    assert phase(made) is Phase.FORMING
    assert made.cluster.reason == "all 2 nodes are here, waiting a moment for more: at most 4 workers may join"
    made.step(ConnectionLost("reset", 1), 1.0)
    assert made.cluster.reason == "1 worker missing"


# -- parameter servers -----------------------------------------------------------------------------------------------


def test_death_of_joining_server_rolls_scale_out_back() -> None:
    made = served()
    made.step(MessageReceived(messages.ScaleRequest(servers=3), 9), 1.0)
    effects = made.step(MessageReceived(messages.ChildExited("2", 1, 137, "killed", role=Role.PSERVER), 1), 1.0)
    assert "servers rolled back: pserver:2 did not join: killed; the scale-out is rolled back" in warnings(effects)
    assert made.cluster.size(Role.PSERVER) == 2 and incidents_of(made)[0][3] is Outcome.ROLLED_BACK


def test_dead_server_is_not_in_sync_until_it_reports_again() -> None:
    made = served(strategies=IN_PLACE)
    made.step(MessageReceived(messages.ScaleRequest(servers=3), 9), 1.0)
    serve(made, 2)
    for link in (20, 21):
        made.step(MessageReceived(messages.ServerInSync(0), link), 1.0)
    made.step(MessageReceived(messages.ChildExited("1", 1, 137, "killed", role=Role.PSERVER), 1), 1.0)
    serve(made, 1)
    made.step(MessageReceived(messages.ServerInSync(0), 22), 2.0)
    assert made.cluster.joining_servers == (2,), "rows do not move while a server is not in sync"
    made.step(MessageReceived(messages.ServerInSync(0), 21), 2.0)
    assert not made.cluster.joining_servers and made.cluster.sharding is not None


def test_worker_death_does_not_affect_servers_in_sync() -> None:
    made = served(strategies=IN_PLACE)
    made.step(MessageReceived(messages.Heartbeat(Progress(5, "train", in_loop=True)), 11), 1.0)
    dies(made, "0")
    made.step(MessageReceived(register("0", "second", incarnation=2), 12), 1.0)
    made.step(MessageReceived(messages.RendezvousPut("met", b"", made.cluster.generation), 12), 1.0)
    made.step(MessageReceived(messages.RankResumed(made.cluster.generation, 6), 12), 3.0)
    made.step(MessageReceived(messages.ScaleRequest(more_servers=1), 9), 3.0)
    assert made.cluster.joining_servers == (2,), "no copy is missing"


def test_servers_must_report_in_sync_again_after_full_restart() -> None:
    made = served(strategies=IN_PLACE)
    for life in (1, 2):
        made.step(MessageReceived(messages.ChildExited("1", life, 137, "killed", role=Role.PSERVER), 1), 1.0)
        serve(made, 1)
    assert HostLayout(made.cluster).make_rank_assigned(made.cluster.members[(Role.PSERVER, "1")]).restarts == 2
    lost = messages.ChildExited("1", 3, ExitCode.ROWS_LOST, "its rows are lost", role=Role.PSERVER)
    assert set(sent(made.step(MessageReceived(lost, 1), 1.0), messages.DesiredChildren)) == {1}
    layout = HostLayout(made.cluster)
    assert {layout.make_rank_assigned(m).restarts for m in made.cluster.members_in_role(Role.PSERVER)} == {0}


def test_joining_servers_get_full_time_after_scheduler_restart() -> None:
    made = served()
    effects = made.step(MessageReceived(messages.ScaleRequest(servers=3), 9), 1.0)
    all_records = (MemberRecord.from_member(m) for m in made.cluster.members.values())
    again, _ = restored(
        (*records(effects), *map(AgentRecord.from_agent, made.cluster.agents.values()), *all_records),
        copies=1,
        heartbeats_enabled=False,
    )
    again.step(MessageReceived(messages.RegisterAgent("a", "life of a", BOX, 1, servers=2, cluster_id="c1"), 1), 100.0)
    tick(again, 101.0, since=100.0)
    assert again.cluster.joining_servers == (2,)
    tick(again, 101.0 + JOIN_TIMEOUT_S, since=101.0)
    assert not again.cluster.joining_servers


def test_recovery_of_server_ends_with_rows_and_of_worker_with_all_ranks_resumed() -> None:
    made = served(strategies=IN_PLACE)
    made.step(MessageReceived(messages.Heartbeat(Progress(5, "train", in_loop=True)), 11), 1.0)
    dies(made, "0")
    made.step(MessageReceived(messages.ChildExited("0", 1, 137, "killed", role=Role.PSERVER), 1), 1.0)
    made.step(MessageReceived(register("0", "second", incarnation=2), 12), 1.0)
    made.step(MessageReceived(messages.RendezvousPut("met", b"", made.cluster.generation), 12), 1.0)
    serve(made, 0)
    made.step(MessageReceived(messages.RankResumed(made.cluster.generation, 0), 20), 2.0)
    assert outcomes(made) == [Outcome.RESTARTED, Outcome.OPEN], "the only worker has not resumed"
    made.step(MessageReceived(messages.RankResumed(made.cluster.generation, 6), 12), 3.0)
    assert outcomes(made) == [Outcome.RESTARTED, Outcome.RESUMED]
    made.step(MessageReceived(messages.ChildExited("1", 1, 137, "killed", role=Role.PSERVER), 1), 4.0)
    serve(made, 1)
    effects = made.step(MessageReceived(messages.RankResumed(made.cluster.generation, 0), 21), 5.0)
    assert outcomes(made) == [Outcome.RESTARTED, *[Outcome.RESUMED] * 2], "no worker was replaced with it"
    assert (
        Stage.RESTORED in made.incidents.records[-1].ms
        and sum("cluster recovery: " in line for line in published(effects)) == 1
    )


# -- the scheduler's own death ---------------------------------------------------------------------------------------


def ended_journal(*names: str, **settings: Any) -> tuple[Any, ...]:
    """The journal of raw workers of which the second died, and that was the end."""
    made = machine(len(names), **settings)
    formed: Effects = []
    for link, name in enumerate(names, start=1):
        formed += made.step(MessageReceived(register(name), link), 0.0)
    return journal(formed, made.step(ConnectionLost("reset", 2), 1.0))


def test_restored_ended_scheduler_sends_outcome_to_members() -> None:
    made, effects = restored(ended_journal("a", "b", "c"), node_timeout_s=10.0)
    reason = "worker:b on box: its connection closed (reset)"
    assert warnings(effects) == [f"cluster ended: {reason}; 3 nodes may not have received it"] and not ended(effects)
    assert (phase(made), made.cluster.reason) == (Phase.ENDED, reason)
    first = made.step(MessageReceived(register("a", cluster_id="c1", incarnation=1), 1), 101.0)
    (stop,) = sent(first, messages.ClusterEnded).values()
    assert (stop.reason, stop.code) == (reason, ExitCode.PEER_FAILED) and Close(1) in first and not ended(first)
    assert stop.failure is not None and stop.failure.node_id == "b"
    assert not ended(made.step(MessageReceived(register("b", cluster_id="c1", incarnation=1), 2), 101.0)), (
        "its death was not written"
    )
    last = made.step(MessageReceived(register("c", cluster_id="c1", incarnation=1), 3), 102.0)
    assert ended(last) == EndCluster(ExitCode.PEER_FAILED, reason, stop.failure), "all have heard it"


def test_restored_ended_scheduler_exits_after_node_timeout() -> None:
    made, _ = restored(ended_journal("a", "b", "c"), node_timeout_s=10.0)
    assert made.step(Tick(), 109.5) == []
    end = ended(made.step(Tick(), 110.0))
    assert end is not None and end.code == ExitCode.PEER_FAILED


def test_restored_ended_scheduler_exits_if_all_received_outcome() -> None:
    finished = ClusterRecord("c1", "job", 3, 0, Phase.ENDED, 1, ended=Ended(0, "all 3 workers finished", told=True))
    all_records = [r for r in crashed("a", "b", "c") if isinstance(r, MemberRecord)]
    _, effects = restored((finished, *all_records))
    assert ended(effects) == EndCluster(0, "all 3 workers finished") and warnings(effects) == []


def test_restored_scheduler_waits_for_nodes_of_failed_formation() -> None:
    before = machine(2, topo_timeout_s=10.0)
    before.step(MessageReceived(register("a"), 1), 0.0)
    made, effects = restored(journal(tick(before, 11.0, beats=[1])), node_timeout_s=-1.0)
    said = "not complete within 10 s: 1 worker missing, registered: worker:a"
    assert warnings(effects) == [f"cluster ended: {said}; 1 node may not have received it"] and not ended(effects)
    assert sent(made.step(MessageReceived(register("a"), 1), 101.0), messages.ClusterEnded) == {
        1: messages.ClusterEnded(said, ExitCode.NOT_FORMED)
    }
    assert made.step(Tick(), 100.0 + END_DELIVERY_S - 0.5) == []
    assert ended(made.step(Tick(), 100.0 + END_DELIVERY_S)) == EndCluster(ExitCode.NOT_FORMED, said)


def test_restored_scheduler_states_reason_while_returning_and_ready() -> None:
    made, _ = restored(crashed("a", "b"), recovery=True)
    assert made.cluster.reason == "the scheduler was restarted and waits for 2 members to re-attach"
    held: dict[str, Any] = {"cluster_id": "c1", "incarnation": 1, "generation": 1}
    made.step(MessageReceived(register("a", rank=0, **held), 1), 100.1)
    effects = made.step(MessageReceived(register("b", rank=1, **held), 2), 100.2)
    assert published(effects)[-1] == "cluster ready: all members re-attached"


def restart_scheduler(made: SchedulerMachine, effects: Effects) -> SchedulerMachine:
    """The next scheduler, at 100 s, after all have called."""
    all_records = (MemberRecord.from_member(m) for m in made.cluster.members.values())
    agents = (AgentRecord.from_agent(agent) for agent in made.cluster.agents.values())
    records = [r for r in stored_records(effects) if not isinstance(r, MemberRecord)]
    again, _ = restored((made.cluster.record(), *records, *agents, *all_records), strategies=made.cluster.settings.strategies)
    again.step(MessageReceived(messages.RegisterAgent("a", "life of a", BOX, 3, cluster_id="c1"), 1), 100.0)
    for member in again.cluster.members_in_role(Role.WORKER):
        life = f"{member.node_id}.{member.incarnation}"
        registration = register(member.node_id, life, incarnation=member.incarnation, cluster_id="c1")
        again.step(MessageReceived(registration, 11 + int(member.node_id)), 100.0)
    return again


def test_restored_scheduler_is_ready_when_all_re_attached() -> None:
    made = sharded_under_agent(3)
    again = restart_scheduler(made, [])
    assert phase(again) is Phase.READY and again.cluster.trains


def test_scale_out_gets_full_time_after_scheduler_restart() -> None:
    made = sharded_under_agent(3)
    again = restart_scheduler(made, made.step(MessageReceived(messages.ScaleRequest(workers=4), 9), 1.0))
    assert phase(again) is Phase.HEALING
    assert again.cluster.reason == "all members re-attached, and the resize continues"
    beats = [1, 11, 12, 13, 14]
    tick(again, 100.0 + JOIN_TIMEOUT_S, beats=beats, since=100.0)
    assert workers_of(again) == ["0", "1", "2", "3"]
    tick(again, 101.0 + JOIN_TIMEOUT_S, beats=beats, since=100.0 + JOIN_TIMEOUT_S)
    assert workers_of(again) == ["0", "1", "2"]


def test_returned_member_closes_incident_with_its_stages() -> None:
    made = ready("0", "1", recovery=True)
    made.step(ConnectionLost("reset", 2), 1.0)
    assert made.cluster.reason == "waiting for worker:1 to be restarted with the same variables"
    effects = made.step(MessageReceived(register("1", "second life"), 3), 2.0)
    (incident,) = made.incidents.records
    assert incident.outcome is Outcome.RESUMED and incident.ms[Stage.REFORMED] == 1000.0
    assert published(effects)[-1] == "cluster ready: all ranks are filled again"
    assert EditableCluster.of(made).recovery.first_failure is None


# -- messages that must be ignored -----------------------------------------------------------------------------------


def test_worker_messages_from_agents_and_unknown_connections_are_ignored() -> None:
    made = training(strategies=IN_PLACE)
    generation = made.cluster.generation
    for link in (1, 99):
        assert (
            made.step(MessageReceived(messages.SafePointReport(generation, messages.CollectiveNumber(5, 0)), link), 1.0) == []
        )
        assert made.step(MessageReceived(messages.RankResumed(generation, 9), link), 1.0) == []
        assert made.step(MessageReceived(messages.ServerInSync(0), link), 1.0) == []
    edited = EditableCluster.of(made)
    assert edited.lifecycle.highest_step == 5 and not edited.barrier.safe_point.reports


def test_resumed_rank_shows_its_step() -> None:
    made = training(strategies=IN_PLACE)
    made.step(MessageReceived(messages.RankResumed(made.cluster.generation, 8), 10), 1.0)
    assert made.cluster.progress(made.cluster.members[(Role.WORKER, "0")]) == Progress(8, "train", in_loop=True)


def test_leave_of_last_suspect_makes_cluster_ready() -> None:
    made = ready("0", "1", "2", recovery=True, node_timeout_s=10.0)
    made.step(ConnectionLost("reset", 3), 0.0)
    tick(made, 6.0, beats=[1])
    made.step(MessageReceived(register("2", "second life"), 4), 6.0)
    assert "cluster ready: all members are reachable again" in published(made.step(MessageReceived(messages.Leave(), 2), 6.5))


def test_late_heartbeat_of_last_suspect_makes_cluster_ready() -> None:
    made = ready("0", "1", "2", recovery=True, node_timeout_s=10.0)
    made.step(ConnectionLost("reset", 3), 0.0)
    tick(made, 6.0, beats=[1])
    made.step(MessageReceived(register("2", "second life"), 4), 6.0)
    assert (
        published(made.step(MessageReceived(messages.Heartbeat(), 2), 6.5))[-1]
        == "cluster ready: all members are reachable again"
    )


def test_messages_of_children_of_left_agent_are_ignored() -> None:
    made = training(recovery=True, strategies=parse_strategies(("recover",)), extra_ranks=0)
    effects = made.step(MessageReceived(messages.Leave(143, "SIGTERM"), 2), 1.0)
    assert "agent:b gone: SIGTERM" in warnings(effects)
    assert made.cluster.members[(Role.WORKER, "2")].connection == 0 and made.list_connections() == [10, 11, 1]
