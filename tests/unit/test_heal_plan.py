"""How ranks go on together after a change of membership: the plan, from literal reports."""

from __future__ import annotations

from typing import Any

from covey.core.healing import Gathering, plan
from covey.core.messages import Giver, HealPlan, Number, Report

NEAR, FAR = "10.0.0.1", "10.0.0.2"


def report(rank: int, completed: tuple[int, int] | None, waits: tuple[int, int] | None = None, **more: Any) -> Report:
    numbers: dict[str, Any] = {
        "completed": Number(*completed) if completed else None,
        "waits": Number(*waits) if waits else None,
    }
    return Report(2, port=1000 + rank, token=f"token {rank}", **numbers, **more)


def giver(rank: int, address: str = NEAR) -> HealPlan:
    return HealPlan(2, giver=Giver(rank, address, 1000 + rank, f"token {rank}"))


def test_who_is_new_or_behind_fetches_from_who_is_ahead() -> None:
    reports = {0: report(0, (5, 0), (6, 0)), 1: report(1, (4, 0), (5, 0)), 2: report(2, None, needs_state=True)}
    addresses = dict.fromkeys(range(3), NEAR)
    assert plan(2, reports, addresses) == {0: HealPlan(2), 1: giver(0), 2: giver(0)}


def test_a_giver_on_the_same_host_is_preferred_and_askers_take_turns() -> None:
    reports = {n: report(n, (5, 0), (6, 0)) for n in range(3)} | {n: report(n, None, needs_state=True) for n in (3, 4, 5)}
    addresses = {0: NEAR, 1: FAR, 2: FAR, 3: NEAR, 4: FAR, 5: FAR}
    plans = plan(2, reports, addresses)
    assert plans[3] == giver(0)
    assert {plans[4].giver, plans[5].giver} == {giver(1, FAR).giver, giver(2, FAR).giver}


def test_ranks_further_apart_than_one_collective_are_not_led_together() -> None:
    reports = {0: report(0, (5, 0), (6, 0)), 1: report(1, (3, 0), (4, 0))}
    plans = plan(2, reports, {0: NEAR, 1: NEAR})
    assert {p.failure for p in plans.values()} == {
        "rank 1 waits in collective 4.0, but another has completed 5.0: do all ranks call the same ones, in one order?"
    }


def test_who_missed_its_plan_is_told_again() -> None:
    gathering, addresses = Gathering(2), {0: NEAR, 1: NEAR}
    ahead, behind = report(0, (5, 0), (6, 0)), report(1, (4, 0), (5, 0))
    assert gathering.add(0, ahead, addresses) == gathering.add(0, ahead, addresses) == {}
    assert gathering.add(1, behind, addresses) == {0: HealPlan(2), 1: giver(0)}
    assert gathering.add(1, behind, addresses) == {1: giver(0)}


def test_the_last_results_may_come_from_one_who_waits_at_the_end() -> None:
    gathering = Gathering(2)
    addresses = {0: NEAR, 1: NEAR}
    assert gathering.add(0, report(0, (9, 0), finished=True), addresses) == {}
    assert gathering.add(1, report(1, (8, 0), (9, 0)), addresses) == {0: HealPlan(2), 1: giver(0)}
    assert not gathering.done
    assert gathering.add(1, report(1, (9, 0), finished=True), addresses) == dict.fromkeys((0, 1), HealPlan(2, done=True))
    assert gathering.done
