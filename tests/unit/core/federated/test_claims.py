"""Claims: who may count an update, told with literal messages."""

from __future__ import annotations

import msgspec

from covey.core.federated.claims import RETRY_S, Answer, Claims, Outcome, Store, Tell
from covey.core.federated.messages import Claim, Held, Instance, Orders, Peer, Plan, Release, Stage, Verdict, owner
from covey.core.federated.secagg.messages import DEVICE_ID_MAX

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


# -- once, whatever is lost or repeated ------------------------------------------------------------------------------


def test_a_server_that_has_heard_nothing_takes_nothing() -> None:
    claims, device = Claims("a"), device_of("a")
    assert not claims.ready and claims.greet("b") == []
    assert claims.came(5, device, 0.0) == [Answer(5, device, Outcome.CLOSED)]


def test_the_first_of_two_requests_of_a_device_decides_for_both() -> None:
    claims, device = ready("a", "b"), device_of("b")
    assert claims.came(5, device, 0.0) and claims.came(5, device, 0.0) == [], "the owner was asked"
    granted = Verdict(1, 5, granted=(device,))
    assert claims.heard("b", granted, 0.0) == [Store(5, device)]
    assert claims.came(5, device, 0.0) == [], "it is being stored"
    assert claims.heard("b", granted, 0.0) == [], "what is held is not given back because its grant was said twice"
    claims.logged(5, device)
    assert claims.came(5, device, 0.0) == [Answer(5, device, Outcome.COUNTED)]


def test_what_could_not_be_stored_is_held_by_nobody_and_the_next_may_have_it() -> None:
    claims, mine, theirs = ready("a", "b"), device_of("a"), device_of("b")
    assert claims.came(5, mine, 0.0) == [Store(5, mine)]
    assert claims.failed(5, mine) == [] and claims.settled(5), "there is nothing left to wait for"
    assert claims.heard("b", Claim(1, 5, (mine,)), 0.0) == [Tell("b", Verdict(1, 5, granted=(mine,)))]
    claims.came(5, theirs, 0.0)
    claims.heard("b", Verdict(1, 5, granted=(theirs,)), 0.0)
    assert claims.failed(5, theirs) == [Tell("b", Release(1, 5, (theirs,)))]
    assert claims.came(5, theirs, 0.0) == [Tell("b", Claim(1, 5, (theirs,)))]


def test_a_device_counts_in_every_round() -> None:
    claims, device = ready("a", "b"), device_of("a")
    claims.came(5, device, 0.0)
    claims.logged(5, device)
    claims.follow(orders(round_number=6), 0.0)
    assert claims.came(6, device, 0.0) == [Store(6, device)]
    assert claims.came(5, device, 0.0) == [Answer(5, device, Outcome.COUNTED)], "and the last one is still known"


def test_of_a_round_that_has_just_closed_its_owner_says_whether_it_counts() -> None:
    claims, mine, theirs = ready("a", "b"), device_of("a"), device_of("b")
    assert claims.came(4, theirs, 0.0) == [Tell("b", Claim(1, 4, (theirs,)))]
    assert claims.came(4, mine, 0.0) == [Answer(4, mine, Outcome.LATE)]
    assert claims.heard("b", Claim(1, 4, (mine,)), 0.0) == [Tell("b", Verdict(1, 4, late=(mine,)))]
    assert claims.follow(orders(), 0.0) == [], "it is still asked"
    assert claims.follow(orders(round_number=6), 0.0) == [Answer(4, theirs, Outcome.LATE)], "and now no longer"
    assert claims.heard("b", Claim(1, 7, (mine,)), 0.0) == [], "of one that is to come nothing is known"


def test_who_waits_is_told_when_this_server_takes_no_more() -> None:
    for change in ({"leaving": ("a",)}, {"instance": Instance.DISABLED}):
        claims, device = ready("a", "b"), device_of("b")
        claims.came(5, device, 0.0)
        assert claims.follow(orders(**change), 0.0) == [Answer(5, device, Outcome.CLOSED)]
        assert claims.tick(1.0) == []


def test_what_was_not_answered_is_asked_for_again_after_a_while() -> None:
    claims, device = ready("a", "b"), device_of("b")
    claims.came(5, device, 100.0)
    assert claims.tick(100.05) == []
    assert claims.tick(100.2) == [Tell("b", Claim(1, 5, (device,)))]
    assert claims.tick(100.2 + RETRY_S / 2) == [], "it was asked just now"


def test_a_new_generation_begins_with_what_everyone_holds() -> None:
    claims, logged, stored, theirs = Claims("a"), device_of("a"), device_of("a", 1), device_of("b")
    claims.restore(5, [logged, theirs])
    claims.held[5][stored] = False
    assert claims.follow(orders(), 0.0) == [
        Tell("b", Held(1, 5, (theirs,))),
        Tell("b", Held(1, 5, whole=True, asks=True)),
    ]
    assert claims.heard("b", Claim(1, 5, (logged,)), 0.0) == [], "not all have told what they hold"
    claims.heard("b", Held(1, 5, whole=True), 0.0)
    assert claims.heard("b", Claim(1, 5, (logged, stored)), 0.0) == [Tell("b", Verdict(1, 5, counted=(logged,)))]
    claims.held[5][theirs] = False
    assert claims.greet("b") == [Tell("b", Held(1, 5, (), (theirs,))), Tell("b", Held(1, 5, whole=True))]


def test_everyone_is_told_and_what_waits_is_claimed_anew_in_one_message() -> None:
    claims, two = ready("a", "b"), (device_of("b"), device_of("b", 1))
    for device in two:
        claims.came(5, device, 0.0)
    assert claims.follow(orders(generation=2), 50.0) == [
        Tell("b", Held(2, 5, whole=True, asks=True)),
        Tell("b", Claim(2, 5, two)),
    ]
    assert claims.tick(50.0) == [], "they were asked just now"
    three = (*MEMBERS, Peer("c", 2))
    told = claims.follow(orders(generation=3, members=three), 50.0)
    assert [wish.node_id for wish in told if isinstance(wish, Tell) and isinstance(wish.message, Held)] == ["b", "c"]


def test_only_members_tell_members_what_they_hold() -> None:
    claims = ready("a", "b")
    assert claims.greet("a") == claims.greet("z") == []
    claims.follow(orders(generation=2, members=(Peer("b", 1), Peer("c", 2))), 0.0)
    assert claims.greet("b") == []


def test_what_another_is_about_to_log_is_its_own_even_if_it_said_so_early() -> None:
    claims, device = Claims("a"), device_of("a")
    claims.heard("b", Held(1, 5, granted=(device,)), 0.0)
    claims.heard("b", Held(1, 5, whole=True), 0.0)
    claims.follow(orders(), 0.0)
    assert claims.came(5, device, 0.0) == [], "b holds it, or gives it back"
    assert claims.heard("b", Claim(1, 5, (device,)), 0.0) == [Tell("b", Verdict(1, 5, granted=(device,)))]


def test_what_is_logged_stays_counted_though_another_says_it_was_granted() -> None:
    claims, device = ready("a", "b"), device_of("a")
    claims.came(5, device, 0.0)
    claims.logged(5, device)
    claims.heard("b", Held(1, 5, granted=(device,)), 0.0)
    claims.heard("b", Release(1, 5, (device,)), 0.0)
    claims.heard("b", Release(1, 3, (device,)), 0.0)
    assert claims.heard("b", Claim(1, 5, (device,)), 0.0) == [Tell("b", Verdict(1, 5, counted=(device,)))]


def test_each_device_of_a_verdict_is_judged_for_itself() -> None:
    claims = ready("a", "b")
    gone, waits, another = (device_of("b", skip) for skip in range(3))
    claims.came(5, gone, 0.0)
    claims.dropped(5, gone)
    claims.came(5, waits, 0.0)
    granted = claims.heard("b", Verdict(1, 5, granted=(gone, waits), counted=(another,)), 0.0)
    assert granted == [Tell("b", Release(1, 5, (gone,))), Store(5, waits)], "and of the third nobody asked"
    for device in (gone, another):
        claims.came(5, device, 0.0)
    claims.follow(orders(stage=Stage.SEALING), 0.0)
    late = claims.heard("b", Verdict(1, 5, granted=(gone, another)), 0.0)
    assert [wish.device for wish in late if wish == Answer(5, getattr(wish, "device", ""), Outcome.LATE)] == [gone, another]
    assert [wish.message.ids for wish in late if isinstance(wish, Tell) and isinstance(wish.message, Release)] == [
        (gone,),
        (another,),
    ]


def test_what_another_owner_said_is_counted_is_known_for_its_round() -> None:
    claims, device = ready("a", "b"), device_of("b")
    claims.came(5, device, 0.0)
    claims.heard("b", Verdict(1, 5, counted=(device,)), 0.0)
    claims.follow(orders(stage=Stage.SEALING), 0.0)
    assert claims.knows(5, device)
    claims.follow(orders(round_number=6), 0.0)
    assert not claims.knows(5, device)


def test_where_updates_may_be_old_a_logged_one_goes_before_a_grant_that_was_not_used() -> None:
    claims, plan = Claims("a"), Plan(staleness=2)
    claims.follow(orders(plan=plan), 0.0)
    claims.heard("b", Held(1, 5, whole=True), 0.0)
    device = next(d for d in (f"d{n}@5" for n in range(99)) if owner(d, MEMBERS) == "a")
    claims.heard("b", Claim(1, 5, (device,)), 0.0)
    claims.logged(6, device)
    claims.follow(orders(round_number=6, plan=plan), 0.0)
    assert claims.heard("b", Claim(1, 6, (device,)), 0.0) == [Tell("b", Verdict(1, 6, counted=(device,)))]


def test_what_waited_is_asked_of_every_owner_at_once_and_nobody_else_gets_what_is_being_stored() -> None:
    claims, mine, theirs = Claims("a"), device_of("a"), device_of("b")
    claims.follow(orders(), 0.0)
    for device in (theirs, mine):
        claims.came(5, device, 0.0)
    claims.heard("b", Held(1, 5, whole=True), 0.0)
    assert claims.tick(1.0) == [Tell("b", Claim(1, 5, (theirs,))), Store(5, mine)]
    assert claims.heard("b", Claim(1, 5, (mine,)), 1.0) == []


def test_grants_that_nobody_wants_are_all_given_back() -> None:
    claims, two = ready("a", "b"), (device_of("b"), device_of("b", 1))
    given_back = claims.heard("b", Verdict(1, 5, granted=two), 0.0)
    assert given_back == [Tell("b", Release(1, 5, (device,))) for device in two]
