"""The lifecycle of a cluster: its phases by the table, its generation, and its full restarts."""

from __future__ import annotations

from itertools import product

import pytest

from covey.core.cluster.state import CAUSE_MAX, NEVER, PHASE_TRANSITIONS, Lifecycle
from covey.core.types import ClusterRecord, ClusterSettings, FullRestart, Phase


def lifecycle(phase: Phase = Phase.FORMING, topo_timeout_s: float = 30.0) -> Lifecycle:
    made = Lifecycle("c", ClusterSettings(2, topo_timeout_s=topo_timeout_s))
    made.phase, made.reason = phase, "before"
    return made


ALLOWED = [(before, after) for before, phases in PHASE_TRANSITIONS.items() for after in sorted(phases)]
FORBIDDEN = sorted(set(product(Phase, Phase)) - set(ALLOWED))


def test_every_phase_can_end_and_ended_is_final() -> None:
    assert set(PHASE_TRANSITIONS) == set(Phase)
    assert PHASE_TRANSITIONS[Phase.ENDED] == frozenset()
    assert all(Phase.ENDED in PHASE_TRANSITIONS[phase] for phase in Phase if phase is not Phase.ENDED)


@pytest.mark.parametrize(("before", "after"), ALLOWED)
def test_an_allowed_transition_sets_the_phase_and_its_reason(before: Phase, after: Phase) -> None:
    made = lifecycle(before)
    made.set_phase(after, "why")
    assert (made.phase, made.reason, made.has_ended) == (after, "why", after is Phase.ENDED)


@pytest.mark.parametrize(("before", "after"), FORBIDDEN)
def test_a_forbidden_transition_fails_and_changes_nothing(before: Phase, after: Phase) -> None:
    made = lifecycle(before)
    with pytest.raises(AssertionError, match=f"no transition from {before} to {after}"):
        made.set_phase(after, "why")
    assert (made.phase, made.reason) == (before, "before")


def test_a_further_fault_while_healing_renews_the_deadline_and_keeps_the_reason() -> None:
    made = lifecycle(Phase.READY)
    made.begin_healing("worker:0 died", 10.0)
    made.begin_healing("worker:1 died", 15.0)
    assert (made.phase, made.reason, made.heal_deadline) == (Phase.HEALING, "worker:0 died", 45.0)
    made.postpone(5.0)
    assert made.heal_deadline == 50.0


def test_healing_has_no_deadline_with_negative_limit() -> None:
    made = lifecycle(Phase.READY, topo_timeout_s=-1.0)
    made.begin_healing("worker:0 died", 10.0)
    assert made.heal_deadline == NEVER


def test_generation_increases_by_one_and_resize_is_of_next_generation() -> None:
    made = lifecycle()
    assert [made.advance_generation() for _ in range(3)] == [1, 2, 3]
    made.note_resize()
    assert made.resized_generation == 4 == made.advance_generation()


def test_the_first_call_of_init_and_the_first_finished_step_are_reported_once() -> None:
    made = lifecycle()
    assert [made.note_init(), made.note_init()] == [True, False] and made.heals
    assert [made.note_loop(), made.note_loop()] == [True, False] and made.trains
    made.reset_for_restart("worker:0 died")
    assert made.heals and not made.trains
    assert made.note_loop() and not made.note_init(), "all workers started again"


def test_the_highest_step_is_that_of_any_rank_since_all_started() -> None:
    made = lifecycle()
    for step in (3, 7, 5):
        made.note_step(step)
    assert made.highest_step == 7
    made.reset_for_restart("worker:0 died")
    assert (made.highest_step, made.restarts) == (-1, 1)


def test_full_restart_gets_step_once_and_completes_once() -> None:
    made = lifecycle()
    assert not made.note_restart_step(4) and not made.note_restart_resumed() and not made.is_restarting
    made.note_full_restart("x" * (CAUSE_MAX + 1))
    assert made.full_restart == FullRestart(1, "x" * CAUSE_MAX) and made.is_restarting
    assert [made.note_restart_step(step) for step in (-1, 4, 5)] == [False, True, False]
    assert [made.note_restart_resumed(), made.note_restart_resumed()] == [True, False] and not made.is_restarting
    made.note_full_restart("again")
    assert made.full_restart == FullRestart(2, "again")


def test_a_lost_state_is_a_full_restart_that_counts_no_restart_of_all_workers() -> None:
    made = lifecycle()
    made.note_loop()
    made.note_step(5)
    made.note_state_lost("no rank has it")
    assert (made.trains, made.restarts, made.highest_step) == (False, 0, 5)
    assert made.full_restart == FullRestart(1, "no rank has it")


def test_the_phase_of_the_journal_is_not_restored() -> None:
    made = lifecycle()
    made.restore(ClusterRecord("d", "job", 2, 0, Phase.HEALING, 7, restarts=2, heals=True, resized_generation=3, trains=True))
    assert (made.phase, made.cluster_id, made.generation, made.restarts) == (Phase.FORMING, "d", 7, 2)
    assert (made.heals, made.resized_generation, made.trains) == (True, 3, True)
