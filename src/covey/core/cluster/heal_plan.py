"""How the ranks of a new generation go on together: the plan that follows from what each of them reports.

Every rank reports at a safe point which collective it completed last. The highest completed number wins. Who completed it can
give its result; who did not was waiting in exactly that one, because a collective's result depends on every rank; who is new
receives state. Ranks cannot be further apart, and a report that says so is a bug in the program or in us: it ends the run.

Where an optimizer's state is cut into slots, one for each parameter, no rank has all of it. Then everyone is told who has
which, and there must be a holder of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from covey.core.messages import CollectiveNumber, Donor, HealPlan, SafePointReport, SlotHolder
from covey.core.types import Ended


def make_heal_plans(
    generation: int, reports: Mapping[int, SafePointReport], addresses: Mapping[int, str]
) -> dict[int, HealPlan]:
    """What each rank is to do, by rank; `reports` holds one of each rank. Finished ranks wait, and can give."""
    if all(report.finished for report in reports.values()):
        return dict.fromkeys(reports, HealPlan(generation, done=True))
    highest = max(
        (_number_sort_key(r.completed) for r in reports.values() if not r.needs_state), default=_number_sort_key(None)
    )
    givers = [rank for rank, r in sorted(reports.items()) if not r.needs_state and _number_sort_key(r.completed) == highest]
    if trouble := _divergence_blocker(reports, highest) or _missing_slots_blocker(reports):
        return dict.fromkeys(reports, HealPlan(generation, failure=trouble))
    holders = [
        SlotHolder(_make_donor(rank, reports, addresses), r.held_slots) for rank, r in sorted(reports.items()) if r.held_slots
    ]
    plans: dict[int, HealPlan] = {}
    turn = 0
    for rank, report in sorted(reports.items()):
        behind = not report.needs_state and _number_sort_key(report.completed) < highest
        if not givers or not (report.needs_state or behind):
            plans[rank] = HealPlan(generation, slot_holders=holders)
            continue
        giver = _choose_donor(rank, givers, addresses, turn)
        turn += 1
        if report.needs_state and not reports[giver].has_complete_state:
            reason = (
                f"rank {rank} cannot join the others in their step: its results were too large to keep (COVEY_KEEP_BYTES),"
                " or something else than the loop's optimizer changed parameters in it"
            )
            return dict.fromkeys(reports, HealPlan(generation, failure=reason))
        if behind and reports[giver].is_result_invalid:
            reason = f"rank {rank} cannot be handed the step's parameters: the others' programs have changed them since"
            return dict.fromkeys(reports, HealPlan(generation, failure=reason))
        plans[rank] = HealPlan(generation, donor=_make_donor(giver, reports, addresses), slot_holders=holders)
    return plans


def _make_donor(rank: int, reports: Mapping[int, SafePointReport], addresses: Mapping[int, str]) -> Donor:
    return Donor(rank, addresses[rank], reports[rank].port, reports[rank].token)


def _number_sort_key(number: CollectiveNumber | None) -> tuple[int, int]:
    return (number.step, number.index) if number is not None else (-2, 0)


def _divergence_blocker(reports: Mapping[int, SafePointReport], highest: tuple[int, int]) -> str:
    """Why these ranks cannot go on together; "" when they can."""
    for rank, report in sorted(reports.items()):
        behind = not report.needs_state and _number_sort_key(report.completed) < highest
        if behind and report.waiting_in is not None and _number_sort_key(report.waiting_in) != highest:
            where = f"rank {rank} waits in collective {report.waiting_in}"
            return (
                f"{where}, but another has completed {highest[0]}.{highest[1]}: do all ranks call the same ones, in one order?"
            )
    return ""


def find_endless_wait(reports: Mapping[int, SafePointReport], waits: Mapping[int, CollectiveNumber]) -> str:
    """Why some wait for ever: a rank at the end of its program takes part in no other collective. "" if nobody does."""
    ends = {rank: _number_sort_key(report.completed) for rank, report in reports.items() if report.finished}
    if not ends or not waits:
        return ""
    first, last = min(ends, key=lambda rank: ends[rank]), max(waits, key=lambda rank: waits[rank])
    if _number_sort_key(waits[last]) <= ends[first]:
        return ""
    return (
        f"rank {first} has come to the end of its program, but rank {last} waits for it in collective {waits[last]}:"
        " do all ranks call the same ones, in one order?"
    )


def _missing_slots_blocker(reports: Mapping[int, SafePointReport]) -> str:
    """Why these ranks cannot go on: nobody has some of the optimizer's state. "" when somebody has each slot."""
    held, slots = 0, max(report.slot_count for report in reports.values())
    for report in reports.values():
        held |= int.from_bytes(report.held_slots, "little")
    if missing := slots - (held & ((1 << slots) - 1)).bit_count():
        return (
            f"the optimizer's state of {missing} of {slots} parameters was on no rank but the dead"
            " (ShardedOptimizer(copies=...) says how many deaths at once it outlives)"
        )
    return ""


def _choose_donor(rank: int, givers: list[int], addresses: Mapping[int, str], turn: int) -> int:
    """A giver on the same host where there is one; several askers take turns."""
    near = [giver for giver in givers if addresses[giver] == addresses[rank]] or givers
    return near[turn % len(near)]


class HealBarrier:
    """The reports of one generation, until there is one of every rank."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.reports: dict[int, SafePointReport] = {}
        self.resumed: set[int] = set()
        self.failed_at = float("inf")
        self.failure_reason = ""
        self.done = False  # every rank is at the end of its program, and was told that all are
        self._plans: dict[int, HealPlan] = {}

    def add_report(
        self, rank: int, report: SafePointReport, world: int, addresses: Callable[[], Mapping[int, str]]
    ) -> dict[int, HealPlan]:
        """Take a report in; returns the plans once they can be made, and again when everyone is at the end. Who reports again
        meanwhile may have missed its plan with a lost link: it is told once more. `addresses` is asked when all have said
        theirs: looking at all at each report costs N²."""
        self.reports[rank] = report
        complete = len(self.reports) == world
        self.done = complete and all(r.finished for r in self.reports.values())
        if self._plans and not self.done:
            return {rank: self._plans[rank]}
        if complete:
            plans = make_heal_plans(self.generation, self.reports, addresses())
            held = self.resumed and not self.done  # a plan, of a scheduler before: what speaks against it now is old
            self._plans = {} if held and any(found.failure for found in plans.values()) else plans
        return self._plans


class DumpInProgress:
    """A dying gasp under way, and whose word is awaited."""

    def __init__(self, then: Ended, waiting: set[int], by: float) -> None:
        self.planned_end = then
        self.waiting_ranks = waiting
        self.deadline = by
