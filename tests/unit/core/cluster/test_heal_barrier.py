"""Heal plans from literal reports, the rendezvous store and the heal barrier."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster, training_cluster

from covey.core.cluster.heal_barrier import (
    COLLECTIVE_RETRIES_MAX,
    DEATH_REPORT_S,
    RendezvousStore,
    SafePoint,
    find_wait_beyond_end,
    make_heal_plans,
)
from covey.core.effects import Persist, SchedulerEffect, Send
from covey.core.messages import (
    CollectiveFailed,
    CollectiveNumber,
    Donor,
    HealPlan,
    NewGeneration,
    RendezvousGet,
    RendezvousPut,
    RendezvousValue,
    SafePointReport,
    SlotHolder,
)
from covey.core.types import ClusterRecord, MemberRecord, NodeState, Progress
from covey.transport.framing import from_node_decoder

NEAR, FAR = "10.0.0.1", "10.0.0.2"


def report(rank: int, completed: tuple[int, int] | None, waits: tuple[int, int] | None = None, **more: Any) -> SafePointReport:
    numbers: dict[str, Any] = {
        "completed": CollectiveNumber(*completed) if completed else None,
        "waiting_in": CollectiveNumber(*waits) if waits else None,
    }
    return SafePointReport(2, port=1000 + rank, token=f"token {rank}", **numbers, **more)


def donor(rank: int, address: str = NEAR) -> HealPlan:
    return HealPlan(2, donor=Donor(rank, address, 1000 + rank, f"token {rank}"))


def test_new_and_behind_ranks_fetch_from_ranks_ahead() -> None:
    reports = {0: report(0, (5, 0), (6, 0)), 1: report(1, (4, 0), (5, 0)), 2: report(2, None, needs_state=True)}
    addresses = dict.fromkeys(range(3), NEAR)
    assert make_heal_plans(2, reports, addresses) == {0: HealPlan(2), 1: donor(0), 2: donor(0)}


def test_donor_on_same_host_is_preferred_and_requests_rotate() -> None:
    reports = {n: report(n, (5, 0), (6, 0)) for n in range(3)} | {n: report(n, None, needs_state=True) for n in (3, 4, 5)}
    addresses = {0: NEAR, 1: FAR, 2: FAR, 3: NEAR, 4: FAR, 5: FAR}
    plans = make_heal_plans(2, reports, addresses)
    assert plans[3] == donor(0)
    assert {plans[4].donor, plans[5].donor} == {donor(1, FAR).donor, donor(2, FAR).donor}


def test_receiver_uses_donor_on_own_host_before_lower_rank() -> None:
    reports = {0: report(0, (5, 0), (6, 0)), 1: report(1, (5, 0), (6, 0)), 2: report(2, None, needs_state=True)}
    assert make_heal_plans(2, reports, {0: FAR, 1: NEAR, 2: NEAR})[2] == donor(1)


def test_rank_without_collective_is_behind_rank_with_first() -> None:
    reports = {0: report(0, None, (0, 0)), 1: report(1, (0, 0), (0, 1))}
    assert make_heal_plans(2, reports, dict.fromkeys(range(2), NEAR)) == {0: donor(1), 1: HealPlan(2)}


def test_no_rank_fetches_if_all_are_new() -> None:
    reports = {n: report(n, None, needs_state=True) for n in range(2)}
    assert make_heal_plans(2, reports, dict.fromkeys(range(2), NEAR)) == dict.fromkeys(range(2), HealPlan(2))


def test_plan_fails_for_ranks_more_than_one_collective_apart() -> None:
    reports = {0: report(0, (5, 0), (6, 0)), 1: report(1, (3, 0), (4, 0))}
    plans = make_heal_plans(2, reports, {0: NEAR, 1: NEAR})
    assert {p.failure for p in plans.values()} == {
        "rank 1 waits in collective 4.0, but another rank has completed 5.0:"
        " all ranks must call the same collectives in the same order"
    }


def test_every_plan_lists_holders_of_sharded_state() -> None:
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


def test_plan_fails_if_no_rank_holds_a_slot() -> None:
    reports = {0: report(0, (5, 0), (5, 1), slot_count=5, held_slots=b"\x19"), 1: report(1, None, needs_state=True)}
    plans = make_heal_plans(2, reports, dict.fromkeys(range(2), NEAR))
    assert {p.failure for p in plans.values()} == {
        "only dead ranks held the optimizer's state of 2 of 5 parameters:"
        " increase ShardedOptimizer(copies=...) to survive more deaths at the same time"
    }


def test_slots_are_little_endian_bits_and_excess_bits_are_ignored() -> None:
    """Of nine slots no rank holds the first and the last; a tenth does not exist."""
    plans = make_heal_plans(2, {0: report(0, (5, 0), (5, 1), slot_count=9, held_slots=b"\xfe\x02")}, {0: NEAR})
    assert plans[0].generation == 2 and plans[0].failure.startswith(
        "only dead ranks held the optimizer's state of 2 of 9 parameters"
    )


def test_plan_fails_if_donor_result_was_changed() -> None:
    reports = {
        0: report(0, (5, 1), (5, 2), is_result_invalid=True),
        1: report(1, (5, 0), (5, 1)),
        2: report(2, None, needs_state=True),
    }
    failed = make_heal_plans(2, reports, dict.fromkeys(range(3), NEAR))[1]
    assert "changed them since" in failed.failure and failed.generation == 2
    assert not make_heal_plans(2, {0: reports[0], 1: reports[2]}, dict.fromkeys(range(2), NEAR))[1].failure, "no rank needs it"


def test_plan_fails_for_new_rank_if_results_were_not_kept() -> None:
    """A rank that is only behind can: it has all but the last."""
    reports = {0: report(0, (5, 0), (6, 0), has_complete_state=False), 1: report(1, None, needs_state=True)}
    plans = make_heal_plans(2, reports, dict.fromkeys(range(2), NEAR))
    assert {(p.generation, p.failure.split(":")[0]) for p in plans.values()} == {(2, "rank 1 cannot join the current step")}
    behind = {0: reports[0], 1: report(1, (4, 0), (5, 0))}
    assert make_heal_plans(2, behind, dict.fromkeys(range(2), NEAR))[1] == donor(0)


def test_repeated_report_returns_plan_again() -> None:
    gathering, reply_to = SafePoint(2), []

    def addresses() -> dict[int, str]:
        reply_to.append(len(gathering.reports))
        return {0: NEAR, 1: NEAR}

    ahead, behind = report(0, (5, 0), (6, 0)), report(1, (4, 0), (5, 0))
    assert gathering.add_report(0, ahead, 2, addresses) == gathering.add_report(0, ahead, 2, addresses) == {}
    assert gathering.add_report(1, behind, 2, addresses) == {0: HealPlan(2), 1: donor(0)}
    assert gathering.add_report(1, behind, 2, addresses) == {1: donor(0)}
    assert reply_to == [2], "addresses are listed once, not at each report"


def test_finished_rank_can_be_donor() -> None:
    gathering = SafePoint(2)
    addresses = {0: NEAR, 1: NEAR}
    assert gathering.add_report(0, report(0, (9, 0), finished=True), 2, lambda: addresses) == {}
    assert gathering.add_report(1, report(1, (8, 0), (9, 0)), 2, lambda: addresses) == {0: HealPlan(2), 1: donor(0)}
    assert not gathering.done
    assert gathering.add_report(1, report(1, (9, 0), finished=True), 2, lambda: addresses) == dict.fromkeys(
        (0, 1), HealPlan(2, done=True)
    )
    assert gathering.done


def test_no_endless_wait_in_collective_that_finished_rank_completed() -> None:
    reports = {2: report(2, (9, 1), finished=True), 1: report(1, (9, 0), finished=True), 0: report(0, (8, 0), (9, 0))}
    assert find_wait_beyond_end(reports, {0: CollectiveNumber(9, 0)}) == "", "both have taken part in that one"
    assert find_wait_beyond_end(reports, {}) == find_wait_beyond_end({0: reports[0]}, {0: CollectiveNumber(9, 0)}) == ""
    assert find_wait_beyond_end(reports, {3: CollectiveNumber(10, 0), 4: CollectiveNumber(9, 0)}) == (
        "rank 1 has finished its script, but rank 3 waits for it in collective 10.0:"
        " all ranks must call the same collectives in the same order"
    )


@pytest.mark.parametrize("slots", [-1, 8 * 65536 + 1, 1 << 40])
def test_slot_count_beyond_mask_size_is_rejected_by_decoder(slots: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        from_node_decoder.decode(msgspec.msgpack.encode(SafePointReport(1, slot_count=slots)))


# -- rendezvous ---------------------------------------------------------------------------------------------------------


def test_put_returns_each_waiter_once() -> None:
    pinned = RendezvousStore()
    assert (
        pinned.add_waiter("addr/1", connection=7)
        and pinned.add_waiter("addr/1", connection=8)
        and pinned.add_waiter("addr/2", connection=7)
    )
    assert pinned.put("addr/1", b"here") == [7, 8]
    assert pinned.put("addr/1", b"moved") == []
    assert pinned.values["addr/1"] == b"moved"


def test_full_store_rejects_more_bytes_but_accepts_smaller_value() -> None:
    pinned = RendezvousStore(bytes_max=4)
    assert pinned.put("a", b"1234") == []
    assert pinned.put("b", b"5") is None
    assert pinned.put("a", b"123") == []
    assert pinned.put("b", b"5") == []
    assert pinned.bytes_used == 4


def test_full_store_rejects_new_keys() -> None:
    pinned = RendezvousStore(keys_max=1)
    assert pinned.put("a", b"") == []
    assert pinned.put("b", b"") is None
    assert pinned.put("a", b"again") == []


def test_number_of_waiters_is_limited_and_answered_ones_are_not_counted() -> None:
    pinned = RendezvousStore(keys_max=2)
    assert pinned.add_waiter("a", 1) and pinned.add_waiter("a", 2)
    assert not pinned.add_waiter("b", 3)
    assert pinned.put("a", b"") == [1, 2]
    assert pinned.add_waiter("b", 3)


# -- the part -----------------------------------------------------------------------------------------------------------


def reports(cluster: EditableCluster, *ranks: int, **more: Any) -> dict[int, HealPlan]:
    """These ranks report in the present generation; returns the plans after the last report."""
    plans: dict[int, HealPlan] = {}
    for rank in ranks:
        report = SafePointReport(cluster.generation, CollectiveNumber(5, 0), CollectiveNumber(6, 0), **more)
        plans = cluster.barrier.add_report(cluster.worker(str(rank)), report)
    return plans


def resumes(cluster: EditableCluster, *ranks: int) -> None:
    for rank in ranks:
        cluster.barrier.add_resumed(rank)


def sent(effects: list[SchedulerEffect]) -> list[tuple[int, Any]]:
    return [(effect.connection, effect.message) for effect in effects if isinstance(effect, Send)]


def test_no_rank_gets_a_plan_before_every_rank_has_reported() -> None:
    cluster = training_cluster()
    assert reports(cluster, 0, 1, 2) == reports(cluster, 2) == {}
    assert reports(cluster, 3) == dict.fromkeys(range(4), HealPlan(1))


def test_new_generation_clears_reports_and_values_and_is_persisted_before_members() -> None:
    cluster = training_cluster(connected=True)
    cluster.barrier.on_rendezvous_put(cluster.step(), 10, RendezvousPut("address", b"here", 1))
    reports(cluster, 0)
    stale = cluster.worker("1")
    cluster.change(stale, pid=42)
    cluster.barrier.start_generation(cluster.step(), stale)
    records = [effect.record for effect in cluster.take_effects() if isinstance(effect, Persist)]
    assert [type(record) for record in records] == [ClusterRecord, MemberRecord]
    assert records == [cluster.record(), MemberRecord.from_member(cluster.worker("1"))] and cluster.generation == 2
    assert (cluster.barrier.safe_point.generation, cluster.barrier.safe_point.reports) == (2, {})
    cluster.barrier.on_rendezvous_get(cluster.step(), 10, RendezvousGet("address", 2))
    assert cluster.take_effects() == [], "it waits for a new value"


def test_values_set_before_formation_are_kept() -> None:
    cluster = training_cluster(connected=True)
    cluster.barrier.on_rendezvous_put(cluster.step(), 10, RendezvousPut("address", b"here", 1))
    cluster.barrier.open_generation(1)
    cluster.barrier.on_rendezvous_get(cluster.step(), 11, RendezvousGet("address", 1))
    assert sent(cluster.take_effects()) == [(11, RendezvousValue("address", b"here", 1))]


def test_value_is_sent_to_waiters_and_only_current_members_may_put() -> None:
    cluster = training_cluster(connected=True)
    barrier, step = cluster.barrier, cluster.step()
    barrier.on_rendezvous_get(step, 11, RendezvousGet("address", 1))
    barrier.on_rendezvous_put(step, 99, RendezvousPut("address", b"a stranger's", 1))
    barrier.on_rendezvous_put(step, 10, RendezvousPut("address", b"an old one", 0))
    assert cluster.take_effects() == [] and not barrier.has_group_met
    barrier.on_rendezvous_put(step, 10, RendezvousPut("address", b"here", 1))
    assert sent(cluster.take_effects()) == [(11, RendezvousValue("address", b"here", 1))] and barrier.has_group_met


def test_new_generation_is_sent_to_reachable_members() -> None:
    cluster = training_cluster(connected=True)
    cluster.change(cluster.worker("1"), state=NodeState.DEAD)
    cluster.table.detach(12)
    cluster.barrier.regroup(cluster.step(), "worker:1 died", cluster.worker("1"))
    published = NewGeneration(2, "worker:1 died")
    assert sent(cluster.take_effects()) == [(10, published), (13, published)]


def test_agreement_is_pending_until_all_ranks_resumed_if_rendezvous_was_used() -> None:
    cluster = training_cluster(connected=True)
    cluster.barrier.require_agreement()
    assert not cluster.barrier.is_agreeing, "ranks that never met do not say that they resumed"
    cluster.barrier.on_rendezvous_put(cluster.step(), 10, RendezvousPut("address", b"here", 1))
    resumes(cluster, 0, 1, 2)
    assert cluster.barrier.is_agreeing and not cluster.barrier.all_resumed
    resumes(cluster, 3)
    assert not cluster.barrier.is_agreeing and cluster.barrier.is_pending
    cluster.barrier.finish_agreement()
    assert not cluster.barrier.is_pending


def test_state_is_lost_if_all_ranks_need_it_and_none_resumed() -> None:
    cluster = training_cluster()
    reports(cluster, 0, 1, 2, needs_state=True)
    assert cluster.barrier.is_state_lost()
    reports(cluster, 3)
    assert not cluster.barrier.is_state_lost(), "rank 3 has it"
    resumed = training_cluster()
    resumes(resumed, 0)
    reports(resumed, 0, 1, 2, 3, needs_state=True)
    assert not resumed.barrier.is_state_lost()


def test_failed_collective_is_unexplained_after_death_report_time() -> None:
    cluster = training_cluster(connected=True)
    barrier = cluster.barrier
    barrier.on_collective_failed(cluster.step(5.0), 99, CollectiveFailed(1, "a stranger's"))
    barrier.on_collective_failed(cluster.step(5.0), 10, CollectiveFailed(0, "an old one"))
    assert not barrier.has_unexplained_failure(100.0)
    barrier.on_collective_failed(cluster.step(5.0), 10, CollectiveFailed(1, "reset"))
    barrier.on_collective_failed(cluster.step(6.0), 11, CollectiveFailed(1, "reset by peer"))
    assert (barrier.safe_point.failed_at, barrier.safe_point.failure_reason) == (5.0, "reset by peer")
    assert not barrier.has_unexplained_failure(5.0 + 0.9 * DEATH_REPORT_S)
    assert barrier.has_unexplained_failure(5.0 + 1.1 * DEATH_REPORT_S)
    barrier.discount_suspension(10.0, 20.0)
    assert barrier.safe_point.failed_at == 15.0, "a suspension explains nothing"


def test_a_collective_is_retried_a_limited_number_of_times_in_a_row() -> None:
    barrier = training_cluster().barrier
    allowed = [barrier.count_retry() for _ in range(COLLECTIVE_RETRIES_MAX + 1)]
    assert allowed == [True] * COLLECTIVE_RETRIES_MAX + [False]
    barrier.reset_retries()
    assert barrier.count_retry()


def test_left_rank_is_marked_resumed_when_all_others_are() -> None:
    cluster = training_cluster(connected=True)
    cluster.barrier.require_all_to_resume()
    reports(cluster, 0, 1, 2, 3)
    cluster.change(cluster.worker("3"), state=NodeState.LEFT)
    resumes(cluster, 0, 1)
    assert not cluster.barrier.count_left_ranks(cluster.step())
    resumes(cluster, 2)
    assert cluster.barrier.count_left_ranks(cluster.step()) and cluster.barrier.all_resumed
    assert not cluster.barrier.count_left_ranks(cluster.step()), "once"


def test_left_rank_is_marked_finished_when_all_others_are() -> None:
    cluster = training_cluster(connected=True)
    cluster.change(cluster.worker("3"), state=NodeState.LEFT)
    reports(cluster, 0, 1, 2, finished=True)
    assert not cluster.barrier.count_left_ranks(cluster.step()), "no rank is marked as resumed by that"
    assert sent(cluster.take_effects()) == [(link, HealPlan(1, done=True)) for link in (10, 11, 12)]
    assert cluster.barrier.safe_point.done


def test_barrier_stays_done_if_a_report_is_repeated() -> None:
    """Rank 3 left without a report, and the others finished. Rank 0 lost its connection, and with it the plan."""
    cluster = training_cluster(connected=True)
    cluster.change(cluster.worker("3"), state=NodeState.LEFT)
    reports(cluster, 0, 1, 2, finished=True)
    cluster.barrier.count_left_ranks(cluster.step())
    assert reports(cluster, 0, finished=True) == {0: HealPlan(1, done=True)}
    assert cluster.barrier.safe_point.done


def test_wait_for_left_rank_is_endless() -> None:
    cluster = training_cluster(connected=True)
    assert cluster.barrier.find_endless_wait(cluster.step(), 3, "in collective 6.0", 30.0) == ""
    cluster.change(cluster.worker("3"), state=NodeState.LEFT)
    assert cluster.barrier.find_endless_wait(cluster.step(), 2, "in collective 6.0", 30.0) == "", "rank 2 does not wait"
    said = "worker:3 left before the run was finished: all other ranks wait in collective 6.0"
    assert cluster.barrier.find_endless_wait(cluster.step(), 3, "in collective 6.0", 30.0) == said
    reports(cluster, 0, 1, 2)
    said = "worker:3 left before the run was finished: all other ranks wait to resume"
    assert cluster.barrier.find_endless_wait(cluster.step(), 0, "", 30.0) == said


def test_wait_for_finished_rank_is_endless() -> None:
    cluster = training_cluster(connected=True)
    reports(cluster, 0, finished=True)
    cluster.heartbeats.note_progress(cluster.worker("1"), Progress(7, waiting_in="7.0"), 0.0)
    assert cluster.barrier.find_endless_wait(cluster.step(), 0, "", 30.0).startswith(
        "rank 0 has finished its script, but rank 1 waits for it in collective 7.0"
    )


def test_wait_to_resume_with_left_rank_ends_after_limit_extended_by_suspension() -> None:
    cluster = training_cluster(connected=True)
    cluster.barrier.require_all_to_resume()
    reports(cluster, 0, 1, 2, 3)
    cluster.change(cluster.worker("3"), state=NodeState.LEFT)

    def found(now: float) -> str:
        return cluster.barrier.find_endless_wait(cluster.step(now), 0, "", 30.0)

    assert found(1.0) == found(31.0) == ""
    cluster.barrier.discount_suspension(5.0, 31.0)
    assert found(36.0) == ""
    assert found(36.1) == "worker:3 left before the run was finished: all other ranks have waited to resume for over 30 s"


def test_the_limit_begins_again_when_a_rank_that_left_is_missed_again() -> None:
    cluster = training_cluster(connected=True)
    cluster.barrier.require_all_to_resume()
    reports(cluster, 0, 1, 2, 3)
    left = cluster.change(cluster.worker("3"), state=NodeState.LEFT)
    assert cluster.barrier.find_endless_wait(cluster.step(1.0), 0, "", 30.0) == ""
    cluster.change(left, state=NodeState.ALIVE)
    assert cluster.barrier.find_endless_wait(cluster.step(20.0), 0, "", 30.0) == ""
    cluster.change(left, state=NodeState.LEFT)
    assert cluster.barrier.find_endless_wait(cluster.step(40.0), 0, "", 30.0) == "", "the first time is over"
    assert cluster.barrier.find_endless_wait(cluster.step(70.1), 0, "", 30.0) != ""
