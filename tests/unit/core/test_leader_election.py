"""Leader election: at most one leader, with suspended or disconnected candidates and late replies of the store."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.leader_election import (
    CHECKS_PER_LEASE,
    STEP_DOWN_FRACTION,
    Candidate,
    LeaseRecord,
    ReadLease,
    WriteLease,
    can_take_lease,
    renew_interval_s,
    step_down_after_s,
)

D = 3.0


class Store:
    """A cell with versions, and what is on its way to it."""

    def __init__(self) -> None:
        self.cell, self.version = LeaseRecord(), 0

    def put(self, cell: LeaseRecord, version: int) -> bool:
        if version != self.version:
            return False
        self.cell, self.version = cell, self.version + 1
        return True


class Replica:
    """A candidate, and the version of the cell as it knows it."""

    def __init__(self, name: str, store: Store, now: float = 0.0, cluster: str = "ours") -> None:
        self.candidate = Candidate(name, f"http://{name}", cluster=cluster, duration_s=D, now=now)
        self.store, self.version = store, 0

    def act(self, began: float, written: bool, answered: float | None) -> None:
        """One round trip: whether it reaches the store, and when its answer arrives, if it does."""
        registration = self.candidate.next_action(began)
        if isinstance(registration, ReadLease):
            if answered is None:
                return self.candidate.on_store_failed()
            self.version = self.store.version
            return self.candidate.on_lease_read(self.store.cell, answered)
        done = written and self.store.put(registration.record, self.version)
        if answered is None or not written:
            return self.candidate.on_store_failed()
        self.version = self.store.version if done else self.version
        return self.candidate.on_lease_written(registration.record, done)

    def settle(self, now: float, times: int = 3) -> None:
        for _ in range(times):
            self.act(now, True, now)


def pair() -> tuple[Store, Replica, Replica]:
    store = Store()
    first, second = Replica("a", store), Replica("b", store)
    first.settle(0.0)
    second.settle(0.0)
    return store, first, second


def test_first_candidate_leads_and_second_waits() -> None:
    store, first, second = pair()
    assert first.candidate.is_leader(0.0) and not second.candidate.is_leader(0.0)
    assert store.cell.holder == "a" and store.cell.where == "http://a" and first.candidate.token == 1


def test_suspended_leader_is_replaced_and_has_stepped_down_when_it_wakes() -> None:
    _, first, second = pair()
    second.settle(D - 0.1)
    assert not second.candidate.is_leader(D - 0.1)
    second.settle(D + 0.1)
    assert second.candidate.is_leader(D + 0.1) and second.candidate.token == 2
    assert not first.candidate.is_leader(D + 0.1)
    first.settle(D + 0.2)
    assert not first.candidate.is_leader(D + 0.2) and first.candidate.token == 0


def test_token_never_decreases_after_lease_was_removed() -> None:
    store, _, second = pair()
    second.settle(D + 0.1)
    store.cell, store.version = LeaseRecord(), 0
    second.settle(D + 0.2)
    assert second.candidate.token == 3


def test_released_lease_is_taken_immediately() -> None:
    store, first, second = pair()
    registration = first.candidate.release_lease()
    assert isinstance(registration, WriteLease) and store.put(registration.record, first.version)
    second.settle(0.1)
    assert second.candidate.is_leader(0.1) and not first.candidate.is_leader(0.1)


def test_no_candidate_leads_without_store_and_last_leader_resumes() -> None:
    _, first, second = pair()
    for now in (1.0, 2.0, 2.5):
        first.act(now, False, None)
        second.act(now, False, None)
    assert not first.candidate.is_leader(D * STEP_DOWN_FRACTION) and not second.candidate.is_leader(D * STEP_DOWN_FRACTION)
    first.settle(4.0)
    assert first.candidate.is_leader(4.0) and first.candidate.token == 2, "a new term: what it did before may be half known"


def test_leader_stays_leader_after_lost_reply_of_renewal() -> None:
    store, first, _ = pair()
    first.act(0.5, True, None)
    assert store.cell.beat > first.candidate.last_record.beat
    first.settle(0.6)
    assert first.candidate.is_leader(1.0) and first.candidate.token == 1


def test_next_token_is_above_that_of_journal() -> None:
    _, first, second = pair()
    second.candidate.raise_token(7)
    second.settle(0.1)
    assert first.candidate.is_leader(0.1) and not second.candidate.is_leader(0.1), "the second candidate does not interfere"
    first.candidate.raise_token(7)
    assert not first.candidate.is_leader(0.1)
    first.settle(0.2)
    assert first.candidate.is_leader(0.2) and first.candidate.token == 8


def other_cluster_of(replica: Replica) -> str:
    return replica.candidate.other_cluster


def test_lease_of_other_cluster_is_reported_once_its_holder_is_alive() -> None:
    store, first, second = pair()
    other = Replica("c", store, cluster="theirs")
    other.settle(0.1)
    assert other_cluster_of(other) == "", "it may be what is left of one that has ended"
    first.act(0.2, True, 0.2)
    other.settle(0.3)
    second.settle(0.3)
    assert other_cluster_of(other) == "ours" and other_cluster_of(second) == ""
    other.settle(0.4 + D)
    assert other_cluster_of(other) == "" and other.candidate.is_leader(0.4 + D), "the lease of a dead holder is free"


# -- one candidate, with a literal cell ------------------------------------------------------------------------------


def candidate(now: float = 100.0) -> Candidate:
    return Candidate("a", "http://a", duration_s=D, now=now)


def leader(now: float = 100.0) -> Candidate:
    made = candidate(now)
    made.on_lease_read(LeaseRecord(), now)
    registration = made.next_action(now)
    assert registration == WriteLease(LeaseRecord(1, "a", 0, "http://a"))
    made.on_lease_written(LeaseRecord(1, "a", 0, "http://a"), True)
    return made


OTHER = LeaseRecord(4, "b", 7)


def test_new_candidate_reads_first_and_takes_free_lease_immediately() -> None:
    made = candidate()
    assert made.due_at == 100.0 and made.next_action(100.0) == ReadLease()
    assert made.due_at == 100.0 + D / CHECKS_PER_LEASE
    made.on_lease_read(LeaseRecord(), 100.1)
    assert made.due_at == 100.1, "no wait is needed"
    waits = candidate()
    waits.next_action(100.0)
    waits.on_lease_read(OTHER, 100.1)
    assert waits.due_at == 100.0 + D / CHECKS_PER_LEASE and waits.next_action(waits.due_at) == ReadLease()


def test_leader_renews_and_leads_for_two_thirds_from_start_of_write() -> None:
    made = leader()
    until = 100.0 + D * STEP_DOWN_FRACTION
    assert made.is_leader(until - 0.01) and not made.is_leader(until)
    assert made.next_action(100.5) == WriteLease(LeaseRecord(1, "a", 1, "http://a"))
    made.on_lease_written(LeaseRecord(1, "a", 1, "http://a"), True)
    assert made.is_leader(until) and not made.is_leader(100.5 + D * STEP_DOWN_FRACTION)
    assert made.next_action(100.5 + D * STEP_DOWN_FRACTION) == WriteLease(LeaseRecord(2, "a", 0, "http://a")), (
        "too late for a beat: a new term"
    )


def test_candidate_waits_full_duration_after_last_seen_change() -> None:
    made = candidate()
    made.on_lease_read(OTHER, 100.0)
    made.on_lease_read(LeaseRecord(4, "b", 8), 102.0)
    assert made.next_action(102.0 + D - 0.1) == ReadLease()
    assert made.next_action(102.0 + D) == WriteLease(LeaseRecord(5, "a", 0, "http://a"))


def test_lease_is_released_only_by_leader_with_known_record() -> None:
    made = candidate()
    made.on_lease_read(OTHER, 100.0)
    assert made.release_lease() is None
    unsure = leader()
    unsure.on_store_failed()
    assert unsure.release_lease() is None and not unsure.is_leader(100.0)
    assert leader().release_lease() == WriteLease(LeaseRecord(1, "", 0, "http://a"))


def test_end_is_seen_only_by_candidates_that_saw_a_holder() -> None:
    end = LeaseRecord(4, "", 9, over=True, code=3)
    stood_by = candidate()
    stood_by.on_lease_read(OTHER, 100.0)
    assert not stood_by.has_ended
    stood_by.on_lease_read(end, 101.0)
    assert stood_by.has_ended and stood_by.next_action(101.0 + 2 * D) == ReadLease(), "nothing is left to lead"
    led = leader()
    led.on_lease_read(end, 101.0)
    assert led.has_ended and not led.is_leader(101.0)
    late = candidate()
    late.on_lease_read(end, 101.0)
    assert not late.has_ended and late.next_action(101.0) == WriteLease(LeaseRecord(5, "a", 0, "http://a"))


def test_leader_steps_down_when_it_reads_another_holder() -> None:
    for cell in (OTHER, LeaseRecord(2, "a"), LeaseRecord(1, "b")):
        made = leader()
        made.on_lease_read(cell, 100.5)
        assert not made.is_leader(100.5), cell
    made = leader()
    made.on_lease_read(LeaseRecord(1, "a", 5), 100.5)
    assert made.is_leader(100.5) and made.due_at == 100.5, "its own renewal, whose reply was lost"


rounds = st.lists(
    st.tuples(
        st.integers(0, 2),  # index of the replica
        st.floats(0.0, 1.2),  # seconds until it acts
        st.booleans(),  # its write reaches the store
        st.one_of(st.none(), st.floats(0.0, 4.0)),  # seconds until it is answered
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(rounds)
def test_at_most_one_leader_and_tokens_increase(script: list[tuple[int, float, bool, float | None]]) -> None:
    store = Store()
    replicas = [Replica(name, store) for name in "abc"]
    busy_until = [0.0, 0.0, 0.0]
    spans: list[tuple[int, float, float, int]] = []
    now, newest = 0.0, 0

    def believed(candidate: Any) -> float:
        return float(candidate._leads_until)

    for index, pause, reaches, answer in script:
        now += pause
        if now < busy_until[index]:
            continue
        replica = replicas[index]
        at = now + (answer or 0.0)
        busy_until[index] = at
        replica.act(now, reaches, None if answer is None else at)
        if replica.candidate.is_leader(at):
            spans.append((index, at, believed(replica.candidate), replica.candidate.token))
        assert store.cell.token >= newest
        newest = store.cell.token
    for one, begin, end, token in spans:
        for other, other_begin, other_end, other_token in spans:
            if one != other:
                assert end <= other_begin or other_end <= begin, "two believed at once"
                assert token != other_token


def test_free_or_own_lease_may_be_taken_immediately() -> None:
    assert can_take_lease("a", "", unchanged_s=0.0, duration_s=5.0)
    assert can_take_lease("a", "a", unchanged_s=0.0, duration_s=5.0)


def test_lease_of_other_holder_may_be_taken_if_unchanged_for_duration() -> None:
    assert not can_take_lease("a", "b", unchanged_s=4.9, duration_s=5.0)
    assert can_take_lease("a", "b", unchanged_s=5.0, duration_s=5.0)


def test_leader_renews_several_times_and_steps_down_before_takeover() -> None:
    assert 2 * renew_interval_s(15.0) < step_down_after_s(15.0) < 15.0
