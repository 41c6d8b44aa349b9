"""What visitors ask of a cluster, and the whole answer: over the connection that asked, with its number and its reason."""

from __future__ import annotations

from tests.unit.core.cluster.test_after_death import IN_PLACE
from tests.unit.core.cluster.test_scheduler_machine import (
    cut_under_an_agent,
    ready,
    sent,
    told,
    training,
)
from tests.unit.core.cluster.test_scheduler_machine_effects import records, served, warnings

from covey.core.cluster.scheduler_machine import Machine
from covey.core.effects import Send
from covey.core.events import Heard
from covey.core.incidents import Outcome
from covey.core.messages import (
    Agreed,
    Exited,
    Kill,
    KillAsked,
    Refused,
    ScaleAsked,
    Scaling,
    Started,
    StopAsked,
)
from covey.core.types import Phase, Role

VISITOR = 9


def asked(made: Machine, wish: ScaleAsked | StopAsked | KillAsked) -> Scaling | Agreed | Refused:
    """What the visitor was sent, and nobody else."""
    effects = made.step(Heard(wish, VISITOR), 1.0)
    answers = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Scaling | Agreed | Refused)]
    assert [answer.link for answer in answers] == [VISITOR] and answers[0].message == made.answered
    return made.answered


def test_another_size_is_promised_with_its_operation_or_refused_with_the_reason() -> None:
    made = cut_under_an_agent(3)
    assert asked(made, ScaleAsked(workers=3)) == Refused("there are 3 workers already")
    assert asked(made, ScaleAsked(workers=4)) == Scaling(1, "the world grows from 3 to 4 workers, as asked")
    assert asked(made, ScaleAsked(roll_back=True)) == Scaling(2, "asked to; the growth is taken back")
    assert asked(made, ScaleAsked(roll_back=True)) == Refused("no growth is under way that could be taken back")


def test_another_number_of_servers_is_too() -> None:
    made = served()
    assert asked(made, ScaleAsked(servers=2)) == Refused("there are 2 parameter servers already")
    assert asked(made, ScaleAsked(servers=3)) == Scaling(1, "the parameter servers become more, from 2 to 3, as asked")


def test_a_growth_of_servers_that_is_taken_back_is_named_by_its_own_number() -> None:
    made = served(strategies=IN_PLACE)
    asked(made, ScaleAsked(servers=3))
    made.step(Heard(Exited("0", 1, 137, "killed"), 1), 1.0)
    assert [(i.number, i.node) for i in made.incidents.kept] == [(1, "servers"), (2, "worker:0")]
    effects = made.step(Heard(ScaleAsked(roll_back=True), VISITOR), 1.0)
    assert made.answered == Scaling(1, "the servers that were to come do not")
    assert "servers rolled back: asked to; the growth is taken back" in warnings(effects)
    assert [i.outcome for i in made.incidents.kept] == [Outcome.ROLLED_BACK, Outcome.RESTARTED]


def test_room_is_told_and_is_no_operation() -> None:
    made = ready("a", "b")
    refused = asked(made, ScaleAsked(more=1, start=False))
    assert isinstance(refused, Refused) and refused.reason.startswith("only the world of a covey.Loop that has finished a step")
    made.cluster.trains = True
    effects = made.step(Heard(ScaleAsked(more=1, start=False), VISITOR), 1.0)
    assert isinstance(made.answered, Scaling) and made.answered.operation == 0 and made.answered.reason
    assert told(effects) == [f"cluster room: {made.answered.reason}"] and records(effects)[-1].asked == 3


def test_a_dump_is_agreed_to_once_with_how_many_can() -> None:
    made = training()
    assert asked(made, StopAsked("enough", dump=True)) == Agreed("what 3 ranks can write down is written, and the run ends")
    assert asked(made, StopAsked("enough", dump=True)) == Refused("the ranks write down what they hold already")
    early = ready("0", "1")
    why = "no rank is in a covey.Loop, which alone can write down what it holds"
    assert asked(early, StopAsked("enough", dump=True)) == Refused(why) and early.cluster.phase is Phase.READY


def test_a_kill_is_a_warning_and_is_agreed_to_with_what_is_killed() -> None:
    made = served()
    made.step(Heard(Started("1", 1, 42, Role.PSERVER), 1), 1.0)
    effects = made.step(Heard(KillAsked("pserver:1", "to see"), VISITOR), 1.0)
    why = "process 42 of pserver:1 on box is killed"
    assert sent(effects, Kill) == {1: Kill("1", 1, Role.PSERVER)} and sent(effects, Agreed) == {VISITOR: Agreed(why)}
    assert warnings(effects) == [f"pserver:1 to be killed: to see: {why}"]
    assert asked(made, KillAsked("worker:7")) == Refused("there is no node 'worker:7': GET /nodes lists them")
