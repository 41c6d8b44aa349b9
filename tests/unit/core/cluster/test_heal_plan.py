"""How ranks go on together after a change of membership: the plan, from literal reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from covey.core.cluster.heal_plan import HealBarrier, find_endless_wait, make_heal_plans
from covey.core.messages import CollectiveNumber, Donor, HealPlan, SafePointReport, SlotHolder
from covey.transport.framing import from_node_decoder

NEAR, FAR = "10.0.0.1", "10.0.0.2"


def report(rank: int, completed: tuple[int, int] | None, waits: tuple[int, int] | None = None, **more: Any) -> SafePointReport:
    numbers: dict[str, Any] = {
        "completed": CollectiveNumber(*completed) if completed else None,
        "waiting_in": CollectiveNumber(*waits) if waits else None,
    }
    return SafePointReport(2, port=1000 + rank, token=f"token {rank}", **numbers, **more)


def giver(rank: int, address: str = NEAR) -> HealPlan:
    return HealPlan(2, donor=Donor(rank, address, 1000 + rank, f"token {rank}"))


def test_who_is_new_or_behind_fetches_from_who_is_ahead() -> None:
    reports = {0: report(0, (5, 0), (6, 0)), 1: report(1, (4, 0), (5, 0)), 2: report(2, None, needs_state=True)}
    addresses = dict.fromkeys(range(3), NEAR)
    assert make_heal_plans(2, reports, addresses) == {0: HealPlan(2), 1: giver(0), 2: giver(0)}


def test_a_giver_on_the_same_host_is_preferred_and_askers_take_turns() -> None:
    reports = {n: report(n, (5, 0), (6, 0)) for n in range(3)} | {n: report(n, None, needs_state=True) for n in (3, 4, 5)}
    addresses = {0: NEAR, 1: FAR, 2: FAR, 3: NEAR, 4: FAR, 5: FAR}
    plans = make_heal_plans(2, reports, addresses)
    assert plans[3] == giver(0)
    assert {plans[4].donor, plans[5].donor} == {giver(1, FAR).donor, giver(2, FAR).donor}


def test_an_asker_takes_the_giver_on_its_own_host_though_another_comes_first() -> None:
    reports = {0: report(0, (5, 0), (6, 0)), 1: report(1, (5, 0), (6, 0)), 2: report(2, None, needs_state=True)}
    assert make_heal_plans(2, reports, {0: FAR, 1: NEAR, 2: NEAR})[2] == giver(1)


def test_who_has_completed_nothing_is_behind_who_has_completed_the_first() -> None:
    reports = {0: report(0, None, (0, 0)), 1: report(1, (0, 0), (0, 1))}
    assert make_heal_plans(2, reports, dict.fromkeys(range(2), NEAR)) == {0: giver(1), 1: HealPlan(2)}


def test_where_all_are_new_nobody_fetches_anything() -> None:
    reports = {n: report(n, None, needs_state=True) for n in range(2)}
    assert make_heal_plans(2, reports, dict.fromkeys(range(2), NEAR)) == dict.fromkeys(range(2), HealPlan(2))


def test_ranks_further_apart_than_one_collective_are_not_led_together() -> None:
    reports = {0: report(0, (5, 0), (6, 0)), 1: report(1, (3, 0), (4, 0))}
    plans = make_heal_plans(2, reports, {0: NEAR, 1: NEAR})
    assert {p.failure for p in plans.values()} == {
        "rank 1 waits in collective 4.0, but another has completed 5.0: do all ranks call the same ones, in one order?"
    }


def test_everyone_is_told_who_holds_which_part_of_a_cut_state() -> None:
    """Five slots, three ranks, one copy: rank 2 died."""
    reports = {
        0: report(0, (5, 0), (5, 1), slot_count=5, held_slots=b"\x19"),
        1: report(1, (5, 0), (5, 1), slot_count=5, held_slots=b"\x07"),
        2: report(2, None, needs_state=True),
    }
    holders = [SlotHolder(Donor(rank, NEAR, 1000 + rank, f"token {rank}"), reports[rank].held_slots) for rank in (0, 1)]
    plans = make_heal_plans(2, reports, dict.fromkeys(range(3), NEAR))
    assert [plans[rank].slot_holders for rank in range(3)] == [holders] * 3
    assert [plans[rank].donor for rank in range(3)] == [None, None, holders[0].donor]


def test_a_part_of_the_state_that_nobody_has_ends_the_way_forward() -> None:
    reports = {0: report(0, (5, 0), (5, 1), slot_count=5, held_slots=b"\x19"), 1: report(1, None, needs_state=True)}
    plans = make_heal_plans(2, reports, dict.fromkeys(range(2), NEAR))
    assert {p.failure for p in plans.values()} == {
        "the optimizer's state of 2 of 5 parameters was on no rank but the dead"
        " (ShardedOptimizer(copies=...) says how many deaths at once it outlives)"
    }


def test_slots_are_bits_from_the_lowest_of_the_first_byte_on_and_none_counts_beyond_the_last() -> None:
    """Of nine slots the first and the last are nobody's; a tenth does not exist."""
    plans = make_heal_plans(2, {0: report(0, (5, 0), (5, 1), slot_count=9, held_slots=b"\xfe\x02")}, {0: NEAR})
    assert plans[0].generation == 2 and plans[0].failure.startswith("the optimizer's state of 2 of 9 parameters was on no rank")


def test_a_result_that_was_changed_since_is_not_handed_over() -> None:
    reports = {
        0: report(0, (5, 1), (5, 2), is_result_invalid=True),
        1: report(1, (5, 0), (5, 1)),
        2: report(2, None, needs_state=True),
    }
    failed = make_heal_plans(2, reports, dict.fromkeys(range(3), NEAR))[1]
    assert "changed them since" in failed.failure and failed.generation == 2
    assert not make_heal_plans(2, {0: reports[0], 1: reports[2]}, dict.fromkeys(range(2), NEAR))[1].failure, "nobody needs it"


def test_who_is_new_cannot_join_a_step_whose_results_were_not_kept() -> None:
    """A rank that is only behind can: it has all but the last."""
    reports = {0: report(0, (5, 0), (6, 0), has_complete_state=False), 1: report(1, None, needs_state=True)}
    plans = make_heal_plans(2, reports, dict.fromkeys(range(2), NEAR))
    assert {(p.generation, p.failure.split(":")[0]) for p in plans.values()} == {
        (2, "rank 1 cannot join the others in their step")
    }
    behind = {0: reports[0], 1: report(1, (4, 0), (5, 0))}
    assert make_heal_plans(2, behind, dict.fromkeys(range(2), NEAR))[1] == giver(0)


def test_who_missed_its_plan_is_told_again() -> None:
    gathering, asked = HealBarrier(2), []

    def addresses() -> dict[int, str]:
        asked.append(len(gathering.reports))
        return {0: NEAR, 1: NEAR}

    ahead, behind = report(0, (5, 0), (6, 0)), report(1, (4, 0), (5, 0))
    assert gathering.add_report(0, ahead, 2, addresses) == gathering.add_report(0, ahead, 2, addresses) == {}
    assert gathering.add_report(1, behind, 2, addresses) == {0: HealPlan(2), 1: giver(0)}
    assert gathering.add_report(1, behind, 2, addresses) == {1: giver(0)}
    assert asked == [2], "everyone is looked at once, not at each report"


def test_the_last_results_may_come_from_one_who_waits_at_the_end() -> None:
    gathering = HealBarrier(2)
    addresses = {0: NEAR, 1: NEAR}
    assert gathering.add_report(0, report(0, (9, 0), finished=True), 2, lambda: addresses) == {}
    assert gathering.add_report(1, report(1, (8, 0), (9, 0)), 2, lambda: addresses) == {0: HealPlan(2), 1: giver(0)}
    assert not gathering.done
    assert gathering.add_report(1, report(1, (9, 0), finished=True), 2, lambda: addresses) == dict.fromkeys(
        (0, 1), HealPlan(2, done=True)
    )
    assert gathering.done


def test_nobody_waits_for_ever_whom_a_rank_at_its_end_has_already_joined() -> None:
    reports = {2: report(2, (9, 1), finished=True), 1: report(1, (9, 0), finished=True), 0: report(0, (8, 0), (9, 0))}
    assert find_endless_wait(reports, {0: CollectiveNumber(9, 0)}) == "", "both have taken part in that one"
    assert find_endless_wait(reports, {}) == find_endless_wait({0: reports[0]}, {0: CollectiveNumber(9, 0)}) == ""
    assert find_endless_wait(reports, {3: CollectiveNumber(10, 0), 4: CollectiveNumber(9, 0)}) == (
        "rank 1 has come to the end of its program, but rank 3 waits for it in collective 10.0:"
        " do all ranks call the same ones, in one order?"
    )


@pytest.mark.parametrize("slots", [-1, 8 * 65536 + 1, 1 << 40])
def test_a_count_for_which_no_mask_has_bits_is_refused_where_bytes_become_messages(slots: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        from_node_decoder.decode(msgspec.msgpack.encode(SafePointReport(1, slot_count=slots)))
