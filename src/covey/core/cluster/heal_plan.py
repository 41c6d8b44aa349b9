"""How the ranks of a new generation go on together: the plan that follows from what each of them reports.

Every rank reports at a safe point which collective it completed last. The highest completed number wins. Who completed it can
give its result; who did not was waiting in exactly that one, because a collective's result depends on every rank; who is new
receives state. Ranks cannot be further apart, and a report that says so is a bug in the program or in us: it ends the run.

Where an optimizer's state is cut into slots, one for each parameter, no rank has all of it. Then everyone is told who has
which, and there must be a holder of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from covey.core.messages import Giver, HealPlan, Holder, Number, Report
from covey.core.types import Ended


def plan(generation: int, reports: Mapping[int, Report], addresses: Mapping[int, str]) -> dict[int, HealPlan]:
    """What each rank is to do, by rank; `reports` holds one of each rank. Finished ranks wait, and can give."""
    if all(report.finished for report in reports.values()):
        return dict.fromkeys(reports, HealPlan(generation, done=True))
    highest = max((_order(r.completed) for r in reports.values() if not r.needs_state), default=_order(None))
    givers = [rank for rank, r in sorted(reports.items()) if not r.needs_state and _order(r.completed) == highest]
    if trouble := _apart(reports, highest) or _lost(reports):
        return dict.fromkeys(reports, HealPlan(generation, failure=trouble))
    holders = [Holder(_giver(rank, reports, addresses), r.holds) for rank, r in sorted(reports.items()) if r.holds]
    plans: dict[int, HealPlan] = {}
    turn = 0
    for rank, report in sorted(reports.items()):
        behind = not report.needs_state and _order(report.completed) < highest
        if not givers or not (report.needs_state or behind):
            plans[rank] = HealPlan(generation, holders=holders)
            continue
        giver = _nearest(rank, givers, addresses, turn)
        turn += 1
        if report.needs_state and not reports[giver].whole:
            reason = (
                f"rank {rank} cannot join the others in their step: its results were too large to keep (COVEY_KEEP_BYTES),"
                " or something else than the loop's optimizer changed parameters in it"
            )
            return dict.fromkeys(reports, HealPlan(generation, failure=reason))
        if behind and reports[giver].spoiled:
            reason = f"rank {rank} cannot be handed the step's parameters: the others' programs have changed them since"
            return dict.fromkeys(reports, HealPlan(generation, failure=reason))
        plans[rank] = HealPlan(generation, giver=_giver(giver, reports, addresses), holders=holders)
    return plans


def _giver(rank: int, reports: Mapping[int, Report], addresses: Mapping[int, str]) -> Giver:
    return Giver(rank, addresses[rank], reports[rank].port, reports[rank].token)


def _order(number: Number | None) -> tuple[int, int]:
    return (number.step, number.n) if number is not None else (-2, 0)


def _apart(reports: Mapping[int, Report], highest: tuple[int, int]) -> str:
    """Why these ranks cannot go on together; "" when they can."""
    for rank, report in sorted(reports.items()):
        behind = not report.needs_state and _order(report.completed) < highest
        if behind and report.waits is not None and _order(report.waits) != highest:
            where = f"rank {rank} waits in collective {report.waits}"
            return (
                f"{where}, but another has completed {highest[0]}.{highest[1]}: do all ranks call the same ones, in one order?"
            )
    return ""


def left_alone(reports: Mapping[int, Report], waits: Mapping[int, Number]) -> str:
    """Why some wait for ever: a rank at the end of its program takes part in no other collective. "" if nobody does."""
    ends = {rank: _order(report.completed) for rank, report in reports.items() if report.finished}
    if not ends or not waits:
        return ""
    first, last = min(ends, key=lambda rank: ends[rank]), max(waits, key=lambda rank: waits[rank])
    if _order(waits[last]) <= ends[first]:
        return ""
    return (
        f"rank {first} has come to the end of its program, but rank {last} waits for it in collective {waits[last]}:"
        " do all ranks call the same ones, in one order?"
    )


def _lost(reports: Mapping[int, Report]) -> str:
    """Why these ranks cannot go on: nobody has some of the optimizer's state. "" when somebody has each slot."""
    held, slots = 0, max(report.slots for report in reports.values())
    for report in reports.values():
        held |= int.from_bytes(report.holds, "little")
    if missing := slots - (held & ((1 << slots) - 1)).bit_count():
        return (
            f"the optimizer's state of {missing} of {slots} parameters was on no rank but the dead"
            " (ShardedOptimizer(copies=...) says how many deaths at once it outlives)"
        )
    return ""


def _nearest(rank: int, givers: list[int], addresses: Mapping[int, str], turn: int) -> int:
    """A giver on the same host where there is one; several askers take turns."""
    near = [giver for giver in givers if addresses[giver] == addresses[rank]] or givers
    return near[turn % len(near)]


class Gathering:
    """The reports of one generation, until there is one of every rank."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.reports: dict[int, Report] = {}
        self.resumed: set[int] = set()
        self.broke_at = float("inf")
        self.broke_reason = ""
        self.done = False  # every rank is at the end of its program, and was told that all are
        self._plans: dict[int, HealPlan] = {}

    def add(self, rank: int, report: Report, world: int, addresses: Callable[[], Mapping[int, str]]) -> dict[int, HealPlan]:
        """Take a report in; returns the plans once they can be made, and again when everyone is at the end. Who reports again
        meanwhile may have missed its plan with a lost link: it is told once more. `addresses` is asked when all have said
        theirs: looking at all at each report costs N²."""
        self.reports[rank] = report
        complete = len(self.reports) == world
        self.done = complete and all(r.finished for r in self.reports.values())
        if self._plans and not self.done:
            return {rank: self._plans[rank]}
        if complete:
            plans = plan(self.generation, self.reports, addresses())
            held = self.resumed and not self.done  # a plan, of a scheduler before: what speaks against it now is old
            self._plans = {} if held and any(found.failure for found in plans.values()) else plans
        return self._plans


class Dump:
    """A dying gasp under way, and whose word is awaited."""

    def __init__(self, then: Ended, waiting: set[int], by: float) -> None:
        self.then = then
        self.waiting = waiting
        self.by = by
