"""Exceptions of the script: which are recovered, which end the run, and what a full restart reports."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster
from tests.unit.core.cluster.test_scheduler_machine import BOX, OTHER, Effects, ended, machine, register, training
from tests.unit.core.cluster.test_scheduler_machine_effects import incidents_of, warnings

from covey.core.cluster import recovery
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.events import MessageReceived
from covey.core.incidents import Outcome
from covey.core.messages import (
    ChildExited,
    CollectiveNumber,
    Heartbeat,
    RankResumed,
    RegisterAgent,
    RendezvousPut,
    SafePointReport,
)
from covey.core.strategy_ladder import parse_strategies
from covey.core.types import ClusterSettings, FullRestart, Member, NodeState, Phase, Progress, Role, ScriptError

IN_PLACE = parse_strategies(("recover-in-place",))
ERROR = ScriptError("NameError", "name 'los' is not defined", "train.py:4", "Traceback ...", step=5, loop=True)


def raises(made: SchedulerMachine, node_id: str, error: ScriptError | None = ERROR) -> Effects:
    member = made.cluster.members[(Role.WORKER, node_id)]
    link = made.cluster.agents[member.agent].connection
    return made.step(MessageReceived(ChildExited(node_id, member.incarnation, 1, "exit code 1", error=error), link), 1.0)


def changed(error: ScriptError, **fields: object) -> ScriptError:
    return msgspec.structs.replace(error, **fields)


def test_exception_that_a_rank_raises_again_without_a_step_ends_the_run() -> None:
    made = training(strategies=IN_PLACE)
    assert not ended(raises(made, "1"))
    end = ended(raises(made, "1", changed(ERROR, text="another text", step=6)))
    assert end is not None and end.code == 1 and end.failure is not None and end.failure.error is not None
    assert end.reason == (
        "worker:1 on box: exit code 1, NameError at train.py:4, step 6: another text;"
        " not recovered: worker:1 raised NameError at the same place again without completing a step: correct the script"
    )


@pytest.mark.parametrize(
    "second",
    [changed(ERROR, completed=1, step=6), changed(ERROR, place="train.py:5"), changed(ERROR, kind="OSError"), None],
    ids=["after a step", "another place", "another kind", "killed"],
)
def test_other_failure_of_the_same_rank_is_recovered(second: ScriptError | None) -> None:
    made = training(strategies=IN_PLACE)
    for error in (ERROR, second):
        assert not ended(raises(made, "1", error))


def test_replacement_that_repeats_earlier_steps_makes_no_progress_by_them() -> None:
    """A script without a loop runs from its beginning, with the results that other ranks kept."""
    made = training(strategies=IN_PLACE)
    raises(made, "1", changed(ERROR, loop=False))
    resume(made)
    link = made.cluster.members[(Role.WORKER, "1")].connection
    made.step(MessageReceived(Heartbeat(Progress(3, steps_completed=3)), link), 3.0)
    end = ended(raises(made, "1", changed(ERROR, completed=5, loop=False)))
    assert end is not None and "NameError at train.py:4, last reported step 5: " in end.reason


def test_error_of_parameter_server_is_not_a_script_error() -> None:
    made = EditableCluster(ClusterSettings(1, 1, strategies=IN_PLACE), phase=Phase.READY, generation=1, heals=True)
    server = Member(Role.PSERVER, "0", "life", BOX, rank=0, agent="a", state=NodeState.DEAD, error=ERROR)
    server = made.add(server)
    assert "correct the script" not in recovery.choose_action(made, server, 1, ERROR)[1]


def test_exception_of_all_ranks_ends_the_run() -> None:
    made = training(strategies=IN_PLACE)
    assert not ended(raises(made, "0")) and not ended(raises(made, "2"))
    end = ended(raises(made, "1"))
    assert end is not None and end.reason.endswith("all 3 ranks raised NameError at the same place: correct the script")


def test_exceptions_of_all_ranks_in_different_steps_are_recovered() -> None:
    made = training(strategies=IN_PLACE)
    for step, rank in enumerate("021"):
        assert not ended(raises(made, rank, changed(ERROR, step=step)))


def test_elastic_training_does_not_shrink_for_an_error_of_the_script() -> None:
    made = training(strategies=parse_strategies(("recover-in-place", "elastic-training")))
    raises(made, "1")
    assert ended(raises(made, "1"))


def test_script_without_init_is_restarted_up_to_max_restarts() -> None:
    made = training(max_restarts=3)
    EditableCluster.of(made).set(heals=False)
    for _ in range(3):
        assert not ended(raises(made, "1"))
    assert ended(raises(made, "1"))


def replaced(made: SchedulerMachine) -> None:
    """The processes that were started again register."""
    for member in [m for m in made.cluster.members_in_role(Role.WORKER) if not m.connection]:
        host = BOX if member.agent == made.cluster.members[(Role.WORKER, "0")].agent else OTHER
        registration = register(
            member.node_id, f"{member.node_id}.{member.incarnation}", host=host, incarnation=member.incarnation
        )
        made.step(MessageReceived(registration, 20 + int(member.node_id)), 1.0)


def resume(made: SchedulerMachine) -> None:
    """All ranks complete a collective of the newest generation."""
    replaced(made)
    for member in made.cluster.members_in_role(Role.WORKER):
        made.step(MessageReceived(RendezvousPut("address", b"", made.cluster.generation), member.connection), 2.0)
        made.step(MessageReceived(RankResumed(made.cluster.generation, 5), member.connection), 2.0)


def test_recovery_from_an_exception_is_resumed_when_the_rank_has_completed_a_step() -> None:
    made = training(strategies=IN_PLACE)
    raises(made, "1")
    resume(made)
    assert made.cluster.phase is Phase.READY and incidents_of(made)[0][-1] is Outcome.OPEN, "it may be raised again"
    link = made.cluster.members[(Role.WORKER, "1")].connection
    made.step(MessageReceived(Heartbeat(Progress(5, "train")), link), 3.0)
    assert incidents_of(made)[0][-1] is Outcome.OPEN
    made.step(MessageReceived(Heartbeat(Progress(6, "train", in_loop=True, steps_completed=1)), link), 3.0)
    assert incidents_of(made)[0][-1] is Outcome.RESUMED
    assert not ended(raises(made, "1")), "a step was completed since"


def test_script_without_steps_makes_progress_by_collectives() -> None:
    made = training(strategies=IN_PLACE)
    stepless = changed(ERROR, step=-1)
    raises(made, "1", stepless)
    resume(made)
    assert incidents_of(made)[0][-1] is Outcome.RESUMED and not ended(raises(made, "1", stepless))


# -- full restarts ---------------------------------------------------------------------------------------------------


def test_full_restart_reports_cause_and_step_and_is_part_of_the_end() -> None:
    made = training(strategies=IN_PLACE)
    made.step(MessageReceived(RendezvousPut("address", b"", 1), 10), 0.0)
    for rank in "012":
        made.step(MessageReceived(ChildExited(rank, 1, 137, "killed"), 2 if rank == "2" else 1), 1.0)
    replaced(made)
    generation, effects = made.cluster.generation, []
    for member in made.cluster.members_in_role(Role.WORKER):
        effects += made.step(MessageReceived(SafePointReport(generation, None, needs_state=True), member.connection), 2.0)
    assert made.cluster.full_restart == FullRestart(1, "no rank holds the training state any more")
    assert [outcome for *_, outcome in incidents_of(made)] == [Outcome.RESTARTED] * 3, "not resumed"
    resume(made)
    effects = made.step(
        MessageReceived(
            Heartbeat(Progress(30, "train", first_step=30)), made.cluster.members_in_role(Role.WORKER)[0].connection
        ),
        3.0,
    )
    started = "all ranks started from step 30, the newest checkpoint"
    published = f"full restart 1: {started}; cause: no rank holds the training state any more"
    assert warnings(effects) == [f"cluster restarted: {published}"]
    for rank in "012":
        effects = made.step(MessageReceived(ChildExited(rank, 2, 0), 2 if rank == "2" else 1), 4.0)
    end = ended(effects)
    assert end is not None and end.reason == f"all 3 workers finished; {published}"


def test_death_of_the_only_rank_is_a_full_restart() -> None:
    made = machine(workers=1, strategies=IN_PLACE)
    made.step(MessageReceived(RegisterAgent("a", "life of a", BOX, 1), 1), 0.0)
    made.step(MessageReceived(register("0", incarnation=1), 10), 0.0)
    made.step(MessageReceived(ChildExited("0", 1, 137, "killed"), 1), 1.0)
    assert made.cluster.full_restart == FullRestart(1, "worker:0 died: killed")
    assert incidents_of(made)[0][-1] is Outcome.RESTARTED


def test_death_during_a_full_restart_is_not_another_one() -> None:
    made = training(max_restarts=2)
    EditableCluster.of(made).set(heals=False)
    made.step(MessageReceived(ChildExited("1", 1, 137, "killed"), 1), 1.0)
    replaced(made)
    for member in made.cluster.members_in_role(Role.WORKER):
        made.step(
            MessageReceived(
                SafePointReport(made.cluster.generation, CollectiveNumber(0, 0), needs_state=True), member.connection
            ),
            2.0,
        )
    assert made.cluster.full_restart is not None and made.cluster.full_restart.count == 1
    started = "all ranks started from step 0, because no checkpoint could be used"
    assert str(FullRestart(2, "x", 0)) == f"full restart 2: {started}; cause: x"
