"""Orders of events that are rare, and that a cluster must outlive all the same."""

from __future__ import annotations

import asyncio
from typing import cast

from tests.unit.core.cluster.editable_cluster import EditableCluster
from tests.unit.core.cluster.test_scheduler_machine import (
    BOX,
    OTHER,
    ended,
    lose_state,
    machine,
    phase,
    published,
    ready,
    ready_agents,
    register,
    restored,
    sent,
    sharded_under_agent,
    start_processes,
    tick,
    training,
)

from covey.core import messages
from covey.core.cluster.registration import DEFERRED_INSTANCES_MAX
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.effects import Persist, Send
from covey.core.events import ConnectionLost, MessageReceived, Tick
from covey.core.strategy_ladder import parse_strategies
from covey.core.types import AgentRecord, Host, MemberRecord, Phase, Progress, Record, Role
from covey.errors import ExitCode
from covey.runtime.node_runtime import NodeRuntime, SchedulerAddress
from covey.settings import load_settings
from covey.worker.membership_thread import MembershipThread

THIRD = Host("boot-third", "third", "10.0.0.3")


# -- hosts that go ---------------------------------------------------------------------------------------------------


def test_leaving_host_without_successor_ends_run_after_it_left() -> None:
    made = training(strategies=parse_strategies(["retry", "recover-in-place"]))
    made.step(MessageReceived(messages.Draining("asked to leave"), 2), 1.0)
    assert not ended(made.step(MessageReceived(messages.ChildExited("2", 1, 143, "exit code 143"), 2), 2.0)), (
        "its other workers finish their step"
    )
    end = ended(made.step(MessageReceived(messages.Leave(143, "asked to leave"), 2), 3.0))
    assert end is not None
    assert end.code == 143 and end.reason.startswith("worker:2 on other: the agent on other is gone (asked to leave); not rec")


def test_repeated_draining_of_host_is_ignored() -> None:
    made = training(strategies=parse_strategies(["recover-in-place", "dump"]))
    effects = made.step(MessageReceived(messages.Draining("asked to leave", scheduler_leaves=True), 1), 1.0)
    assert set(sent(effects, messages.DumpRequest)) == {10, 11, 12}
    made.step(MessageReceived(messages.DumpWritten(5, "here"), 10), 1.0)
    assert made.step(MessageReceived(messages.Draining("asked to leave", scheduler_leaves=True), 1), 2.0) == [], (
        "its connection had broken, and it was heard before"
    )


def test_host_may_join_after_host_left_if_recovery_waits() -> None:
    made = training(strategies=parse_strategies(["recover-in-place"]), recovery=True)
    made.step(MessageReceived(messages.Draining("asked to leave"), 2), 1.0)
    made.step(MessageReceived(messages.ChildExited("2", 1, 143, "exit code 143"), 2), 2.0)
    made.step(MessageReceived(messages.Leave(143, "asked to leave"), 2), 3.0)
    assert phase(made) is Phase.HEALING
    effects = made.step(MessageReceived(messages.RegisterAgent("c", "life of c", THIRD, 1), 3), 4.0)
    assert messages.Assignment("2", 2, 2, 0) in [
        a for start in sent(effects, messages.DesiredChildren).values() for a in start.assignments
    ]


def servers_of_three_hosts() -> SchedulerMachine:
    """A worker and a server on the first host, a server on each of the others; hosts are over links 1, 2 and 3."""
    made = machine(1, server_num=3, strategies=("recover-in-place",), recovery=True, agents_return=False)
    for link, (name, host) in enumerate((("a", BOX), ("b", OTHER), ("c", THIRD)), start=1):
        made.step(MessageReceived(messages.RegisterAgent(name, f"life of {name}", host, int(link == 1), servers=1), link), 0.0)
    made.step(MessageReceived(register("0", incarnation=1), 10), 0.0)
    return made


def test_lost_rows_end_run_while_host_of_other_server_is_gone() -> None:
    made = servers_of_three_hosts()
    made.step(ConnectionLost("reset", 2), 1.0)
    assert phase(made) is Phase.HEALING, "another host may come for its server"
    rank = next(m.node_id for m in made.cluster.members_in_role(Role.PSERVER) if m.agent == "c")
    end = ended(made.step(MessageReceived(messages.ChildExited(rank, 1, ExitCode.ROWS_LOST, role=Role.PSERVER), 3), 2.0))
    assert end is not None and end.code == ExitCode.ROWS_LOST


def test_failed_plan_ends_run_while_host_of_server_is_gone() -> None:
    made = servers_of_three_hosts()
    made.step(ConnectionLost("reset", 2), 1.0)
    end = ended(made.step(MessageReceived(messages.SafePointReport(made.cluster.generation, slot_count=1), 10), 2.0))
    assert end is not None and end.reason.startswith("only dead ranks held the optimizer's state of 1 of 1 parameters")


def test_no_full_restart_while_host_is_leaving() -> None:
    made = ready_agents(max_restarts=3)
    made.step(MessageReceived(messages.Draining("asked to leave"), 2), 1.0)
    effects = made.step(MessageReceived(messages.ChildExited("2", 1, 143), 2), 2.0)
    assert not sent(effects, messages.DesiredChildren) and not ended(effects)
    assert "cluster end: not all workers can restart, because the host of some is gone or leaving" in published(effects)
    assert ended(made.step(MessageReceived(messages.Leave(143, "asked to leave"), 2), 3.0))


def test_child_may_report_other_address_than_agent() -> None:
    """In a container with a network of its own, as any command may start one: where it runs is its agent's word."""
    made = ready_agents()
    inside = Host("boot-container", "container", "172.17.0.2")
    effects = made.step(MessageReceived(register("0", host=inside, incarnation=1), 10), 0.0)
    assert sent(effects, messages.RankAssigned) == {10: messages.RankAssigned(1, 0, 3, 0, 2)}
    assert made.cluster.members[(Role.WORKER, "0")].host == Host("boot-box", "box", "172.17.0.2")


# -- full restart ---------------------------------------------------------------------------------------------------


def attach(made: SchedulerMachine, *waits: str, loop: bool = False) -> None:
    """The first lives of ranks 0, 1, ... over links 10, 11, ..., each waiting for this collective."""
    for rank, where in enumerate(waits):
        made.step(MessageReceived(register(str(rank), incarnation=1), 10 + rank), 0.0)
        made.step(MessageReceived(messages.Heartbeat(Progress(5, "train", in_loop=loop, waiting_in=where)), 10 + rank), 0.0)


def test_two_stuck_ranks_cause_one_full_restart() -> None:
    made = ready_agents(max_restarts=1, stuck_s=5.0)
    attach(made, "5.0", "", "")
    effects = tick(made, 8.0)
    assert not ended(effects) and made.cluster.restarts == 1


def test_full_restart_resets_heal_deadline() -> None:
    made = ready_agents(strategies=("recover-in-place",), topo_timeout_s=60.0, stuck_s=-1.0, node_timeout_s=-1.0)
    attach(made, "5.0", "5.0", "5.0", loop=True)
    made.step(MessageReceived(messages.RendezvousPut("met", b"", 1), 10), 0.0)
    made.step(MessageReceived(messages.ChildExited("2", 1, 137, "killed"), 2), 1.0)
    tick(made, 59.0)
    made.step(MessageReceived(register("2", "second life", incarnation=2), 22), 59.0)
    for link, report in (
        (10, messages.SafePointReport(2, messages.CollectiveNumber(4, 0), slot_count=2)),
        (11, messages.SafePointReport(2, messages.CollectiveNumber(4, 0))),
        (22, messages.SafePointReport(2)),
    ):
        effects = made.step(MessageReceived(report, link), 59.0)
    assert set(sent(effects, messages.DesiredChildren)) == {1, 2}, "all workers restart"
    assert not ended(tick(made, 119.0, since=59.0))
    assert ended(tick(made, 120.0, since=119.0))


def restarted_cluster() -> SchedulerMachine:
    """Return a cluster whose two ranks restarted from an earlier checkpoint after step 1000."""
    made = sharded_under_agent(2)
    for link in (11, 12):
        made.step(MessageReceived(messages.Heartbeat(Progress(1000, "train", in_loop=True)), link), 1.0)
    lose_state(made)
    start_processes(made)
    return made


def test_deaths_while_repeating_steps_after_full_restart_are_counted_by_progress() -> None:
    made = restarted_cluster()
    for life, step in enumerate(range(100, 600, 100), start=2):
        for member in made.cluster.members_in_role(Role.WORKER):
            made.step(MessageReceived(messages.Heartbeat(Progress(step, "train", in_loop=True)), member.connection), 1.0)
        made.step(MessageReceived(messages.ChildExited("0", life, 137, "killed"), 1), 1.0)
        start_processes(made)
    assert made.cluster.size(Role.WORKER) == 2 and made.cluster.members[(Role.WORKER, "0")].incarnation == 7


def test_full_restart_does_not_count_as_replacement() -> None:
    made = restarted_cluster()
    EditableCluster.of(made).change_agent("a", max_restarts=1)
    effects = made.step(MessageReceived(messages.ChildExited("0", 2, 137, "killed"), 1), 1.0)
    assert "cluster recover-in-place: worker:0 is restarted on box; the other ranks wait in their step" in published(effects)
    start_processes(made)
    effects = made.step(MessageReceived(messages.ChildExited("0", 3, 137, "killed"), 1), 1.0)
    assert "1 replacements on box are used up" in " ".join(published(effects))


# -- the scheduler was away ------------------------------------------------------------------------------------------


def test_suspension_makes_no_rank_stuck() -> None:
    made = ready_agents(strategies=("recover-in-place",), stuck_s=60.0, node_timeout_s=-1.0)
    attach(made, "5.0", "5.0", "")
    effects = made.step(Tick(), 0.5) + made.step(Tick(), 300.0)
    assert published(effects) == ["scheduler slept: suspended for 299.5 s: all timeouts are extended by that time"]
    assert "worker:2 died: stuck" in " ".join(published(tick(made, 362.0, since=300.0)))


def test_suspension_extends_dump_and_death_report_time() -> None:
    made = training(strategies=parse_strategies(["retry", "dump"]))
    made.step(MessageReceived(messages.CollectiveFailed(1, "connection reset"), 10), 0.5)
    assert not sent(made.step(Tick(), 300.0), messages.NewGeneration), "the news of a death may wait in a socket"
    assert sent(made.step(Tick(), 300.5), messages.NewGeneration)
    made.step(MessageReceived(messages.StopRequest("enough", dump=True), 9), 301.0)
    assert not ended(made.step(Tick(), 600.0))
    for link in (10, 11, 12):
        effects = made.step(MessageReceived(messages.DumpWritten(5, "here"), link), 600.1)
    end = ended(effects)
    assert end is not None and end.reason == "enough; step 5 is in here"


def restored_in_generation_two() -> SchedulerMachine:
    """A scheduler that comes back to three ranks, of which the third has been replaced long ago; links are 10, 11 and 12."""
    before = training(strategies=("recover-in-place",), recovery=True)
    died = before.step(MessageReceived(messages.ChildExited("2", 1, 137, "killed"), 2), 1.0)
    found: dict[object, Record] = {
        member.rank: MemberRecord.from_member(member) for member in before.cluster.members_in_role(Role.WORKER)
    }
    found |= {agent.id: AgentRecord.from_agent(agent) for agent in before.cluster.agents.values()}
    assert any(isinstance(effect, Persist) for effect in died)
    made, _ = restored((*found.values(), before.cluster.record()), strategies=("recover-in-place",), recovery=True)
    for link, (name, host, slots) in enumerate((("a", BOX, 2), ("b", OTHER, 1)), start=1):
        made.step(MessageReceived(messages.RegisterAgent(name, f"life of {name}", host, slots, cluster_id="c1"), link), 100.0)
    for rank in range(3):
        life = "second life" if rank == 2 else ""
        made.step(MessageReceived(register(str(rank), life, incarnation=1 + (rank == 2), generation=2), 10 + rank), 100.0)
    assert (phase(made), made.cluster.generation) == (Phase.READY, 2)
    return made


def test_stale_reports_do_not_cause_rollback_to_checkpoint() -> None:
    """Ranks 0 and 1 say again what they reported when the third was replaced, the third that it is at its end meanwhile."""
    made = restored_in_generation_two()
    old = messages.SafePointReport(2, messages.CollectiveNumber(4, 0), waiting_in=messages.CollectiveNumber(5, 0))
    for link, report in (
        (12, messages.SafePointReport(2, messages.CollectiveNumber(99, 0), finished=True)),
        (10, old),
        (11, old),
    ):
        made.step(MessageReceived(messages.RankResumed(2, 5), link), 100.0)
        effects = made.step(MessageReceived(report, link), 100.0)
        assert not sent(effects, messages.DesiredChildren) and "roll back" not in " ".join(published(effects))
    for link in (10, 11):
        effects = made.step(
            MessageReceived(messages.SafePointReport(2, messages.CollectiveNumber(99, 0), finished=True), link), 101.0
        )
    assert sent(effects, messages.HealPlan) == dict.fromkeys((10, 11, 12), messages.HealPlan(2, done=True)), "and all may go"


def test_node_resends_resumed_before_report() -> None:
    """By that a scheduler knows an old report from a new one."""
    said: list[object] = []

    class Collecting:
        def try_send(self, message: object) -> bool:
            said.append(message)
            return True

    async def event_log_of() -> None:
        node = MembershipThread(load_settings({}).settings, SchedulerAddress("127.0.0.1", 1))
        node._loop, node._runtime = asyncio.get_running_loop(), cast("NodeRuntime", Collecting())
        node._on_scheduler_message(messages.RankAssigned(2, 0, 2, 0, 2))
        for message in (
            messages.SafePointReport(2, messages.CollectiveNumber(4, 0)),
            messages.RankResumed(2, 5),
            messages.SafePointReport(1),
        ):
            node.send_to_scheduler(message)
        node.send_to_scheduler(messages.SafePointReport(2, messages.CollectiveNumber(9, 0), finished=True))
        await asyncio.sleep(0)
        said.clear()
        node._on_scheduler_message(messages.RankAssigned(2, 0, 2, 0, 2))
        await asyncio.sleep(0)

    asyncio.run(event_log_of())
    assert said == [messages.RankResumed(2, 5), messages.SafePointReport(2, messages.CollectiveNumber(9, 0), finished=True)]


def test_resumed_ranks_after_full_restart_have_not_lost_state() -> None:
    made = restored_in_generation_two()
    for link in (10, 11, 12):
        made.step(MessageReceived(messages.Heartbeat(Progress(50, "train", in_loop=True)), link), 100.0)
        made.step(MessageReceived(messages.RankResumed(2, 5), link), 100.0)
        effects = made.step(MessageReceived(messages.SafePointReport(2, needs_state=True), link), 100.0)
    assert made.cluster.trains and "state lost" not in " ".join(published(effects))


# -- the last rung ---------------------------------------------------------------------------------------------------


def test_remaining_ranks_dump_if_no_host_joined_in_time() -> None:
    limits = {"topo_timeout_s": 60.0, "node_timeout_s": -1.0}
    made = training(strategies=parse_strategies(["recover-in-place", "dump"]), recovery=True, **limits)
    made.step(ConnectionLost("reset", 2), 0.0)
    assert phase(made) is Phase.HEALING
    effects = tick(made, 61.0)
    assert set(sent(effects, messages.DumpRequest)) == {10, 11} and not ended(effects)
    for link in (10, 11):
        effects = made.step(MessageReceived(messages.DumpWritten(122, "here"), link), 61.0)
    end = ended(effects)
    assert end is not None and end.reason == "worker:2 did not come back within 60 s; step 122 is in here"


def test_collective_that_cannot_be_retried_ends_run_after_dump() -> None:
    made = training(strategies=parse_strategies(["dump"]))
    tick(made, 1.0)
    made.step(MessageReceived(messages.CollectiveFailed(1, "connection reset"), 10), 1.0)
    effects = tick(made, 1.5, since=1.0)
    assert set(sent(effects, messages.DumpRequest)) == {10, 11, 12} and not ended(effects)


# -- repeated registrations ------------------------------------------------------------------------------------------


def test_deferred_registrations_are_limited_in_event_log() -> None:
    made = ready("0", "1", recovery=True, node_timeout_s=60.0)
    tick(made, 31.0)
    said: list[str] = []
    for number in range(DEFERRED_INSTANCES_MAX + 50):
        effects = made.step(MessageReceived(register("1", f"life {number}"), 3), 31.0)
        said += published(effects)
        assert sent(effects, messages.Refused)[3].retry_after_s > 0
    assert len(said) == DEFERRED_INSTANCES_MAX


# -- joining servers -------------------------------------------------------------------------------------------------


def cluster_with_joining_server() -> SchedulerMachine:
    """A worker (link 10) and a server (link 20) of one agent, and a second server that is to come."""
    made = machine(1, server_num=1, strategies=("recover-in-place",))
    made.step(MessageReceived(messages.RegisterAgent("a", "life of a", BOX, 1, servers=1), 1), 0.0)
    made.step(MessageReceived(register("0", incarnation=1), 10), 0.0)
    made.step(MessageReceived(messages.Register(Role.PSERVER, "0", "life of the server", BOX, incarnation=1), 20), 0.0)
    made.step(MessageReceived(messages.ServerInSync(0), 20), 0.0)
    assert sent(made.step(MessageReceived(messages.ScaleRequest(servers=2), 9), 1.0), messages.ScaleAccepted)[9].operation == 1
    return made


def test_rollback_is_refused_after_end() -> None:
    made = cluster_with_joining_server()
    made.step(MessageReceived(messages.StopRequest("enough"), 9), 1.0)
    effects = made.step(MessageReceived(messages.ScaleRequest(roll_back=True), 9), 1.0)
    assert effects == [Send(messages.Refused("no scale-out is in progress that could be rolled back"), 9)]
