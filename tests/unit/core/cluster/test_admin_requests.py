"""What visitors ask of a cluster, and the whole answer: over the connection that asked, with its number and its reason."""

from __future__ import annotations

from tests.unit.core.cluster.editable_cluster import EditableCluster, training_cluster
from tests.unit.core.cluster.test_after_death import IN_PLACE
from tests.unit.core.cluster.test_scheduler_machine import (
    published,
    ready,
    reply,
    sent,
    sharded_under_agent,
    training,
)
from tests.unit.core.cluster.test_scheduler_machine_effects import records, served, warnings

from covey.core.cluster.scheduler_machine import SchedulerMachine, find_kill_target
from covey.core.effects import Send
from covey.core.events import MessageReceived
from covey.core.incidents import Outcome
from covey.core.messages import (
    ChildExited,
    ChildStarted,
    KillChild,
    KillRequest,
    Refused,
    RequestAccepted,
    ScaleAccepted,
    ScaleRequest,
    StopRequest,
)
from covey.core.types import Phase, Role

VISITOR = 9


def reply_to(
    made: SchedulerMachine, registration: ScaleRequest | StopRequest | KillRequest
) -> ScaleAccepted | RequestAccepted | Refused:
    """Return the reply to the client; no other connection may receive one."""
    effects = made.step(MessageReceived(registration, VISITOR), 1.0)
    answer = reply(effects)
    assert Send(answer, VISITOR) in effects
    return answer


def test_scale_request_returns_operation_or_refusal_with_reason() -> None:
    made = sharded_under_agent(3)
    assert reply_to(made, ScaleRequest(workers=3)) == Refused("there are 3 workers already")
    assert reply_to(made, ScaleRequest(workers=4)) == ScaleAccepted(1, "the world grows from 3 to 4 workers, as requested")
    assert reply_to(made, ScaleRequest(roll_back=True)) == ScaleAccepted(2, "requested; the scale-out is rolled back")
    assert reply_to(made, ScaleRequest(roll_back=True)) == Refused("no scale-out is in progress that could be rolled back")


def test_server_scale_request_returns_operation_or_refusal_with_reason() -> None:
    made = served()
    assert reply_to(made, ScaleRequest(servers=2)) == Refused("there are 2 parameter servers already")
    assert reply_to(made, ScaleRequest(servers=3)) == ScaleAccepted(
        1, "the number of parameter servers increases from 2 to 3, as requested"
    )


def test_rolled_back_server_scale_out_returns_its_own_operation_number() -> None:
    made = served(strategies=IN_PLACE)
    reply_to(made, ScaleRequest(servers=3))
    made.step(MessageReceived(ChildExited("0", 1, 137, "killed"), 1), 1.0)
    assert [(i.number, i.node) for i in made.incidents.records] == [(1, "servers"), (2, "worker:0")]
    effects = made.step(MessageReceived(ScaleRequest(roll_back=True), VISITOR), 1.0)
    assert reply(effects) == ScaleAccepted(1, "the scale-out is rolled back")
    assert "servers rolled back: requested; the scale-out is rolled back" in warnings(effects)
    assert [i.outcome for i in made.incidents.records] == [Outcome.ROLLED_BACK, Outcome.RESTARTED]


def test_raised_target_is_published_without_operation() -> None:
    made = ready("a", "b")
    refused = reply_to(made, ScaleRequest(more_workers=1, start_processes=False))
    assert isinstance(refused, Refused) and refused.reason.startswith(
        "only a world of two or more workers whose covey.Loop has completed a step"
    )
    EditableCluster.of(made).set(trains=True)
    effects = made.step(MessageReceived(ScaleRequest(more_workers=1, start_processes=False), VISITOR), 1.0)
    accepted = reply(effects)
    assert isinstance(accepted, ScaleAccepted) and accepted.operation == 0 and accepted.reason
    assert published(effects) == [f"cluster room: {accepted.reason}"] and records(effects)[-1].requested_workers == 3


def test_dump_request_is_accepted_once_with_number_of_ranks() -> None:
    made = training()
    assert reply_to(made, StopRequest("enough", dump=True)) == RequestAccepted(
        "a dump was requested from 3 ranks; the run ends after it"
    )
    assert reply_to(made, StopRequest("enough", dump=True)) == Refused("a dump is already in progress")
    early = ready("0", "1")
    why = "no rank is in a covey.Loop, so no rank can dump its state"
    assert reply_to(early, StopRequest("enough", dump=True)) == Refused(why) and early.cluster.phase is Phase.READY


def test_kill_request_publishes_warning_and_returns_killed_process() -> None:
    made = served()
    made.step(MessageReceived(ChildStarted("1", 1, 42, Role.PSERVER), 1), 1.0)
    effects = made.step(MessageReceived(KillRequest("pserver:1", "to see"), VISITOR), 1.0)
    why = "process 42 of pserver:1 on box is killed"
    assert sent(effects, KillChild) == {1: KillChild("1", 1, Role.PSERVER)} and sent(effects, RequestAccepted) == {
        VISITOR: RequestAccepted(why)
    }
    assert warnings(effects) == [f"pserver:1 to be killed: to see: {why}"]
    assert reply_to(made, KillRequest("worker:7")) == Refused("there is no node 'worker:7': GET /nodes lists them")


def test_kill_target_must_run_under_connected_agent() -> None:
    made = training_cluster()
    assert find_kill_target(made, "worker:2") == (made.worker("2"), "process 1 of worker:2 on host-b is killed")
    assert find_kill_target(made, "worker:9") == (None, "there is no node 'worker:9': GET /nodes lists them")
    made.set(phase=Phase.ENDED, reason="all 4 workers finished")
    assert find_kill_target(made, "worker:2") == (None, "the cluster has ended: all 4 workers finished")
