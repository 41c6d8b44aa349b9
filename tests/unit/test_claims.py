"""Claims: who may count an update, told with literal messages."""

from __future__ import annotations

import msgspec

from covey.core.claims import Answer, Claims, Outcome, Store, Tell
from covey.core.federation import Claim, Held, Instance, Orders, Peer, Plan, Release, Stage, Verdict, owner
from covey.core.secure import DEVICE_ID_MAX

MEMBERS = (Peer("a", 0), Peer("b", 1))


def orders(generation: int = 1, round_number: int = 5, **more: object) -> Orders:
    given = {"stage": Stage.OPEN, "instance": Instance.RUNNING, "plan": Plan(), "base": 0, "members": MEMBERS, **more}
    return Orders(generation=generation, round=round_number, **given)  # type: ignore[arg-type]


def device_of(node_id: str, skip: int = 0) -> str:
    """A device whose owner this is."""
    return [f"d{n}" for n in range(100) if owner(f"d{n}", MEMBERS) == node_id][skip]


def ready(node_id: str, other: str) -> Claims:
    claims = Claims(node_id)
    claims.follow(orders(), 0.0)
    claims.heard(other, Held(1, 5, whole=True), 0.0)
    assert claims.ready
    return claims


def test_an_id_of_ones_own_is_stored_at_once_and_counted_once() -> None:
    claims, device = ready("a", "b"), device_of("a")
    assert claims.came(5, device, 0.0) == [Store(5, device)]
    assert not claims.settled(5)
    claims.logged(5, device)
    assert claims.settled(5)
    assert claims.came(5, device, 0.0) == [Answer(5, device, Outcome.COUNTED)]
    assert claims.heard("b", Claim(1, 5, (device,)), 0.0) == [Tell("b", Verdict(1, 5, counted=(device,)))]


def test_anothers_id_is_claimed_and_the_verdict_decides() -> None:
    claims, device = ready("a", "b"), device_of("b")
    assert claims.came(5, device, 0.0) == [Tell("b", Claim(1, 5, (device,)))]
    assert claims.heard("b", Verdict(1, 5, granted=(device,)), 0.0) == [Store(5, device)]
    assert claims.logged(5, device) == [Tell("b", Held(1, 5, (device,)))]


def test_nothing_is_granted_before_everyone_has_told_what_it_holds() -> None:
    claims, device = Claims("a"), device_of("a")
    claims.follow(orders(), 0.0)
    assert claims.came(5, device, 0.0) == []
    claims.heard("b", Held(1, 5, (device,), whole=True), 0.0)
    assert claims.tick(1.0) == [Answer(5, device, Outcome.COUNTED)]


def test_what_another_was_granted_but_has_not_logged_is_not_known_yet() -> None:
    claims, device = ready("a", "b"), device_of("a")
    assert claims.heard("b", Claim(1, 5, (device,)), 0.0) == [Tell("b", Verdict(1, 5, granted=(device,)))]
    assert claims.came(5, device, 0.0) == []
    claims.heard("b", Release(1, 5, (device,)), 0.0)
    assert claims.tick(1.0) == [Store(5, device)]


def test_holdings_of_a_generation_one_has_not_heard_of_are_not_lost() -> None:
    claims, device = Claims("a"), device_of("a")
    claims.heard("b", Held(1, 5, (device,)), 0.0)
    claims.heard("b", Held(1, 5, whole=True), 0.0)
    claims.follow(orders(), 0.0)
    assert claims.came(5, device, 0.0) == [Answer(5, device, Outcome.COUNTED)]


def test_whoever_has_not_heard_asks_and_is_told() -> None:
    claims = ready("a", "b")
    device = device_of("b")
    claims.restore(5, [device])
    told = claims.heard("b", Held(1, 5, whole=True, asks=True), 0.0)
    assert told == [Tell("b", Held(1, 5, (device,))), Tell("b", Held(1, 5, whole=True))]


def test_what_is_known_to_be_counted() -> None:
    claims, mine, theirs = ready("a", "b"), device_of("a"), device_of("b")
    assert not claims.knows(5, mine) and not claims.knows(5, theirs)
    claims.heard("b", Held(1, 5, (mine,)), 0.0)
    claims.came(5, theirs, 0.0)
    claims.heard("b", Verdict(1, 5, counted=(theirs,)), 0.0)
    assert claims.knows(5, mine) and claims.knows(5, theirs), "as owner, and because the owner said so"
    claims.restore(5, ["held"])
    claims.follow(orders(generation=2), 0.0)
    assert claims.knows(5, "held") and not claims.knows(5, mine) and not claims.knows(5, theirs), "who held them may be gone"


def test_a_grant_of_an_earlier_generation_is_void_and_claimed_again() -> None:
    claims, device = ready("a", "b"), device_of("b")
    claims.came(5, device, 0.0)
    wishes = claims.follow(orders(generation=2), 0.0)
    assert Tell("b", Claim(2, 5, (device,))) in wishes
    assert claims.heard("b", Verdict(1, 5, granted=(device,)), 0.0) == []


def test_a_grant_nobody_wants_any_more_is_given_back() -> None:
    claims, device = ready("a", "b"), device_of("b")
    claims.came(5, device, 0.0)
    claims.dropped(5, device)
    assert claims.heard("b", Verdict(1, 5, granted=(device,)), 0.0) == [Tell("b", Release(1, 5, (device,)))]


def test_late_early_and_elsewhere() -> None:
    claims, device = ready("a", "b"), device_of("b")
    assert claims.came(6, device, 0.0) == [Answer(6, device, Outcome.EARLY)]
    assert claims.came(3, device, 0.0) == [Answer(3, device, Outcome.LATE)]
    claims.came(5, device, 0.0)
    assert claims.follow(orders(stage=Stage.SEALING), 0.0) == [], "it may be counted elsewhere: its owner knows"
    assert claims.heard("b", Verdict(1, 5, late=(device,)), 0.0) == [Answer(5, device, Outcome.LATE)]
    assert claims.came(5, device, 0.0) == [Tell("b", Claim(1, 5, (device,)))], "also if it comes again now"
    assert claims.heard("b", Verdict(1, 5, counted=(device,)), 0.0) == [Answer(5, device, Outcome.COUNTED)]
    claims.came(5, device, 0.0)
    released = Tell("b", Release(1, 5, (device,)))
    assert claims.heard("b", Verdict(1, 5, granted=(device,)), 0.0) == [released, Answer(5, device, Outcome.LATE)]
    claims.follow(orders(leaving=("a",)), 0.0)
    assert claims.came(5, device, 0.0) == [Answer(5, device, Outcome.CLOSED)], "the others take it"
    claims.follow(orders(generation=2, members=(Peer("b", 1),)), 0.0)
    assert claims.came(5, device, 0.0) == [Answer(5, device, Outcome.CLOSED)]


def test_where_updates_may_be_old_one_that_an_earlier_round_counted_is_not_counted_again() -> None:
    claims = Claims("a")
    plan = Plan(staleness=2)
    claims.follow(orders(plan=plan), 0.0)
    claims.heard("b", Held(1, 5, whole=True), 0.0)
    device, other = [d for d in (f"d{n}@5" for n in range(99)) if owner(d, MEMBERS) == "a"][:2]
    claims.came(5, device, 0.0)
    claims.logged(5, device)
    claims.follow(orders(round_number=6, plan=plan), 0.0)
    assert claims.came(6, device, 0.0) == [Answer(6, device, Outcome.COUNTED)]
    assert claims.heard("b", Claim(1, 6, (device,)), 0.0) == [Tell("b", Verdict(1, 6, counted=(device,)))]
    assert claims.came(6, other, 0.0) == [Store(6, other)]


def test_where_updates_may_be_old_one_of_a_time_nobody_knows_any_more_is_late() -> None:
    claims, plan = Claims("a"), Plan(staleness=2)
    claims.follow(orders(plan=plan), 0.0)
    claims.heard("b", Held(1, 5, whole=True), 0.0)
    old, new = (next(d for d in (f"d{n}@{began}" for n in range(99)) if owner(d, MEMBERS) == "a") for began in (4, 5))
    claims.follow(orders(generation=2, plan=plan, forgotten=4), 0.0)
    claims.heard("b", Held(2, 5, whole=True), 0.0)
    assert claims.came(5, old, 0.0) == [Answer(5, old, Outcome.LATE)]
    assert claims.came(5, new, 0.0) == [Store(5, new)]


def test_a_grant_of_an_earlier_round_that_was_not_used_does_not_count() -> None:
    claims, plan = Claims("a"), Plan(staleness=2)
    claims.follow(orders(plan=plan), 0.0)
    claims.heard("b", Held(1, 5, whole=True), 0.0)
    device = next(d for d in (f"d{n}@5" for n in range(99)) if owner(d, MEMBERS) == "a")
    assert claims.heard("b", Claim(1, 5, (device,)), 0.0) == [Tell("b", Verdict(1, 5, granted=(device,)))]
    claims.follow(orders(round_number=6, plan=plan), 0.0)
    assert claims.came(6, device, 0.0) == []  # b may hold it, or give it back
    assert claims.heard("b", Claim(1, 6, (device,)), 0.0) == [Tell("b", Verdict(1, 6, granted=(device,)))]


def test_the_longest_device_id_of_an_asynchronous_round_fits_into_a_claim() -> None:
    claim = Claim(1, 5, (f"{'x' * DEVICE_ID_MAX}@{10**18}",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(claim), type=Claim) == claim
