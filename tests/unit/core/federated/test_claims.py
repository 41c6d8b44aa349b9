"""Claims: who may count an update, told with literal messages."""

from __future__ import annotations

import msgspec

from covey.core.federated.claims import CLAIM_RETRY_S, Claims, RejectUpdate, SendToServer, StoreUpdate, UpdateOutcome
from covey.core.federated.messages import (
    Claim,
    ClaimReply,
    HeldUpdates,
    InstanceState,
    ReleaseClaim,
    RoundPlan,
    RoundStage,
    ServerInfo,
    ServerInstructions,
    claim_owner,
)
from covey.core.federated.secagg.messages import DEVICE_ID_MAX

MEMBERS = (ServerInfo("a", 0), ServerInfo("b", 1))


def orders(generation: int = 1, round_number: int = 5, **more: object) -> ServerInstructions:
    given = {
        "stage": RoundStage.OPEN,
        "instance": InstanceState.RUNNING,
        "plan": RoundPlan(),
        "base": 0,
        "members": MEMBERS,
        **more,
    }
    return ServerInstructions(generation=generation, round=round_number, **given)  # type: ignore[arg-type]


def device_of(node_id: str, skip: int = 0) -> str:
    """A device whose owner this is."""
    return [f"d{n}" for n in range(100) if claim_owner(f"d{n}", MEMBERS) == node_id][skip]


def ready(node_id: str, other: str) -> Claims:
    claims = Claims(node_id)
    claims.apply_instructions(orders(), 0.0)
    claims.on_message(other, HeldUpdates(1, 5, is_complete=True), 0.0)
    assert claims.has_all_reports
    return claims


def test_an_id_of_ones_own_is_stored_at_once_and_counted_once() -> None:
    claims, device = ready("a", "b"), device_of("a")
    assert claims.on_update_received(5, device, 0.0) == [StoreUpdate(5, device)]
    assert not claims.is_fully_logged(5)
    claims.on_update_logged(5, device)
    assert claims.is_fully_logged(5)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, counted=(device,)))]


def test_anothers_id_is_claimed_and_the_verdict_decides() -> None:
    claims, device = ready("a", "b"), device_of("b")
    assert claims.on_update_received(5, device, 0.0) == [SendToServer("b", Claim(1, 5, (device,)))]
    assert claims.on_message("b", ClaimReply(1, 5, granted=(device,)), 0.0) == [StoreUpdate(5, device)]
    assert claims.on_update_logged(5, device) == [SendToServer("b", HeldUpdates(1, 5, (device,)))]


def test_nothing_is_granted_before_everyone_has_told_what_it_holds() -> None:
    claims, device = Claims("a"), device_of("a")
    claims.apply_instructions(orders(), 0.0)
    assert claims.on_update_received(5, device, 0.0) == []
    claims.on_message("b", HeldUpdates(1, 5, (device,), is_complete=True), 0.0)
    assert claims.tick(1.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]


def test_what_another_was_granted_but_has_not_logged_is_not_known_yet() -> None:
    claims, device = ready("a", "b"), device_of("a")
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, granted=(device,)))]
    assert claims.on_update_received(5, device, 0.0) == []
    claims.on_message("b", ReleaseClaim(1, 5, (device,)), 0.0)
    assert claims.tick(1.0) == [StoreUpdate(5, device)]


def test_holdings_of_a_generation_one_has_not_heard_of_are_not_lost() -> None:
    claims, device = Claims("a"), device_of("a")
    claims.on_message("b", HeldUpdates(1, 5, (device,)), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    claims.apply_instructions(orders(), 0.0)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]


def test_whoever_has_not_heard_asks_and_is_told() -> None:
    claims = ready("a", "b")
    device = device_of("b")
    claims.restore(5, [device])
    told = claims.on_message("b", HeldUpdates(1, 5, is_complete=True, reply_requested=True), 0.0)
    assert told == [SendToServer("b", HeldUpdates(1, 5, (device,))), SendToServer("b", HeldUpdates(1, 5, is_complete=True))]


def test_what_is_known_to_be_counted() -> None:
    claims, mine, theirs = ready("a", "b"), device_of("a"), device_of("b")
    assert not claims.is_known_counted(5, mine) and not claims.is_known_counted(5, theirs)
    claims.on_message("b", HeldUpdates(1, 5, (mine,)), 0.0)
    claims.on_update_received(5, theirs, 0.0)
    claims.on_message("b", ClaimReply(1, 5, counted=(theirs,)), 0.0)
    assert claims.is_known_counted(5, mine) and claims.is_known_counted(5, theirs), "as owner, and because the owner said so"
    claims.restore(5, ["held"])
    claims.apply_instructions(orders(generation=2), 0.0)
    assert (
        claims.is_known_counted(5, "held") and not claims.is_known_counted(5, mine) and not claims.is_known_counted(5, theirs)
    ), "who held them may be gone"


def test_a_grant_of_an_earlier_generation_is_void_and_claimed_again() -> None:
    claims, device = ready("a", "b"), device_of("b")
    claims.on_update_received(5, device, 0.0)
    wishes = claims.apply_instructions(orders(generation=2), 0.0)
    assert SendToServer("b", Claim(2, 5, (device,))) in wishes
    assert claims.on_message("b", ClaimReply(1, 5, granted=(device,)), 0.0) == []


def test_a_grant_nobody_wants_any_more_is_given_back() -> None:
    claims, device = ready("a", "b"), device_of("b")
    claims.on_update_received(5, device, 0.0)
    claims.on_request_dropped(5, device)
    assert claims.on_message("b", ClaimReply(1, 5, granted=(device,)), 0.0) == [
        SendToServer("b", ReleaseClaim(1, 5, (device,)))
    ]


def test_late_early_and_elsewhere() -> None:
    claims, device = ready("a", "b"), device_of("b")
    assert claims.on_update_received(6, device, 0.0) == [RejectUpdate(6, device, UpdateOutcome.EARLY)]
    assert claims.on_update_received(3, device, 0.0) == [RejectUpdate(3, device, UpdateOutcome.LATE)]
    claims.on_update_received(5, device, 0.0)
    assert claims.apply_instructions(orders(stage=RoundStage.SEALING), 0.0) == [], (
        "it may be counted elsewhere: its owner knows"
    )
    assert claims.on_message("b", ClaimReply(1, 5, late=(device,)), 0.0) == [RejectUpdate(5, device, UpdateOutcome.LATE)]
    assert claims.on_update_received(5, device, 0.0) == [SendToServer("b", Claim(1, 5, (device,)))], (
        "also if it comes again now"
    )
    assert claims.on_message("b", ClaimReply(1, 5, counted=(device,)), 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]
    claims.on_update_received(5, device, 0.0)
    released = SendToServer("b", ReleaseClaim(1, 5, (device,)))
    assert claims.on_message("b", ClaimReply(1, 5, granted=(device,)), 0.0) == [
        released,
        RejectUpdate(5, device, UpdateOutcome.LATE),
    ]
    claims.apply_instructions(orders(leaving=("a",)), 0.0)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.CLOSED)], "the others take it"
    claims.apply_instructions(orders(generation=2, members=(ServerInfo("b", 1),)), 0.0)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.CLOSED)]


def test_where_updates_may_be_old_one_that_an_earlier_round_counted_is_not_counted_again() -> None:
    claims = Claims("a")
    plan = RoundPlan(staleness=2)
    claims.apply_instructions(orders(plan=plan), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    device, other = [d for d in (f"d{n}@5" for n in range(99)) if claim_owner(d, MEMBERS) == "a"][:2]
    claims.on_update_received(5, device, 0.0)
    claims.on_update_logged(5, device)
    claims.apply_instructions(orders(round_number=6, plan=plan), 0.0)
    assert claims.on_update_received(6, device, 0.0) == [RejectUpdate(6, device, UpdateOutcome.COUNTED)]
    assert claims.on_message("b", Claim(1, 6, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 6, counted=(device,)))]
    assert claims.on_update_received(6, other, 0.0) == [StoreUpdate(6, other)]


def test_where_updates_may_be_old_one_of_a_time_nobody_knows_any_more_is_late() -> None:
    claims, plan = Claims("a"), RoundPlan(staleness=2)
    claims.apply_instructions(orders(plan=plan), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    old, new = (next(d for d in (f"d{n}@{began}" for n in range(99)) if claim_owner(d, MEMBERS) == "a") for began in (4, 5))
    claims.apply_instructions(orders(generation=2, plan=plan, forgotten=4), 0.0)
    claims.on_message("b", HeldUpdates(2, 5, is_complete=True), 0.0)
    assert claims.on_update_received(5, old, 0.0) == [RejectUpdate(5, old, UpdateOutcome.LATE)]
    assert claims.on_update_received(5, new, 0.0) == [StoreUpdate(5, new)]


def test_a_grant_of_an_earlier_round_that_was_not_used_does_not_count() -> None:
    claims, plan = Claims("a"), RoundPlan(staleness=2)
    claims.apply_instructions(orders(plan=plan), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    device = next(d for d in (f"d{n}@5" for n in range(99)) if claim_owner(d, MEMBERS) == "a")
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, granted=(device,)))]
    claims.apply_instructions(orders(round_number=6, plan=plan), 0.0)
    assert claims.on_update_received(6, device, 0.0) == []  # b may hold it, or give it back
    assert claims.on_message("b", Claim(1, 6, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 6, granted=(device,)))]


def test_the_longest_device_id_of_an_asynchronous_round_fits_into_a_claim() -> None:
    claim = Claim(1, 5, (f"{'x' * DEVICE_ID_MAX}@{10**18}",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(claim), type=Claim) == claim


# -- once, whatever is lost or repeated ------------------------------------------------------------------------------


def test_a_server_that_has_heard_nothing_takes_nothing() -> None:
    claims, device = Claims("a"), device_of("a")
    assert not claims.has_all_reports and claims.holdings_for("b") == []
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.CLOSED)]


def test_the_first_of_two_requests_of_a_device_decides_for_both() -> None:
    claims, device = ready("a", "b"), device_of("b")
    assert claims.on_update_received(5, device, 0.0) and claims.on_update_received(5, device, 0.0) == [], "the owner was asked"
    granted = ClaimReply(1, 5, granted=(device,))
    assert claims.on_message("b", granted, 0.0) == [StoreUpdate(5, device)]
    assert claims.on_update_received(5, device, 0.0) == [], "it is being stored"
    assert claims.on_message("b", granted, 0.0) == [], "what is held is not given back because its grant was said twice"
    claims.on_update_logged(5, device)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]


def test_what_could_not_be_stored_is_held_by_nobody_and_the_next_may_have_it() -> None:
    claims, mine, theirs = ready("a", "b"), device_of("a"), device_of("b")
    assert claims.on_update_received(5, mine, 0.0) == [StoreUpdate(5, mine)]
    assert claims.on_store_failed(5, mine) == [] and claims.is_fully_logged(5), "there is nothing left to wait for"
    assert claims.on_message("b", Claim(1, 5, (mine,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, granted=(mine,)))]
    claims.on_update_received(5, theirs, 0.0)
    claims.on_message("b", ClaimReply(1, 5, granted=(theirs,)), 0.0)
    assert claims.on_store_failed(5, theirs) == [SendToServer("b", ReleaseClaim(1, 5, (theirs,)))]
    assert claims.on_update_received(5, theirs, 0.0) == [SendToServer("b", Claim(1, 5, (theirs,)))]


def test_a_device_counts_in_every_round() -> None:
    claims, device = ready("a", "b"), device_of("a")
    claims.on_update_received(5, device, 0.0)
    claims.on_update_logged(5, device)
    claims.apply_instructions(orders(round_number=6), 0.0)
    assert claims.on_update_received(6, device, 0.0) == [StoreUpdate(6, device)]
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)], (
        "and the last one is still known"
    )


def test_of_a_round_that_has_just_closed_its_owner_says_whether_it_counts() -> None:
    claims, mine, theirs = ready("a", "b"), device_of("a"), device_of("b")
    assert claims.on_update_received(4, theirs, 0.0) == [SendToServer("b", Claim(1, 4, (theirs,)))]
    assert claims.on_update_received(4, mine, 0.0) == [RejectUpdate(4, mine, UpdateOutcome.LATE)]
    assert claims.on_message("b", Claim(1, 4, (mine,)), 0.0) == [SendToServer("b", ClaimReply(1, 4, late=(mine,)))]
    assert claims.apply_instructions(orders(), 0.0) == [], "it is still asked"
    assert claims.apply_instructions(orders(round_number=6), 0.0) == [RejectUpdate(4, theirs, UpdateOutcome.LATE)], (
        "and now no longer"
    )
    assert claims.on_message("b", Claim(1, 7, (mine,)), 0.0) == [], "of one that is to come nothing is known"


def test_who_waits_is_told_when_this_server_takes_no_more() -> None:
    for change in ({"leaving": ("a",)}, {"instance": InstanceState.DISABLED}):
        claims, device = ready("a", "b"), device_of("b")
        claims.on_update_received(5, device, 0.0)
        assert claims.apply_instructions(orders(**change), 0.0) == [RejectUpdate(5, device, UpdateOutcome.CLOSED)]
        assert claims.tick(1.0) == []


def test_what_was_not_answered_is_asked_for_again_after_a_while() -> None:
    claims, device = ready("a", "b"), device_of("b")
    claims.on_update_received(5, device, 100.0)
    assert claims.tick(100.05) == []
    assert claims.tick(100.2) == [SendToServer("b", Claim(1, 5, (device,)))]
    assert claims.tick(100.2 + CLAIM_RETRY_S / 2) == [], "it was asked just now"


def test_a_new_generation_begins_with_what_everyone_holds() -> None:
    claims, logged, stored, theirs = Claims("a"), device_of("a"), device_of("a", 1), device_of("b")
    claims.restore(5, [logged, theirs])
    claims.held_updates[5][stored] = False
    assert claims.apply_instructions(orders(), 0.0) == [
        SendToServer("b", HeldUpdates(1, 5, (theirs,))),
        SendToServer("b", HeldUpdates(1, 5, is_complete=True, reply_requested=True)),
    ]
    assert claims.on_message("b", Claim(1, 5, (logged,)), 0.0) == [], "not all have told what they hold"
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    assert claims.on_message("b", Claim(1, 5, (logged, stored)), 0.0) == [
        SendToServer("b", ClaimReply(1, 5, counted=(logged,)))
    ]
    claims.held_updates[5][theirs] = False
    assert claims.holdings_for("b") == [
        SendToServer("b", HeldUpdates(1, 5, (), (theirs,))),
        SendToServer("b", HeldUpdates(1, 5, is_complete=True)),
    ]


def test_everyone_is_told_and_what_waits_is_claimed_anew_in_one_message() -> None:
    claims, two = ready("a", "b"), (device_of("b"), device_of("b", 1))
    for device in two:
        claims.on_update_received(5, device, 0.0)
    assert claims.apply_instructions(orders(generation=2), 50.0) == [
        SendToServer("b", HeldUpdates(2, 5, is_complete=True, reply_requested=True)),
        SendToServer("b", Claim(2, 5, two)),
    ]
    assert claims.tick(50.0) == [], "they were asked just now"
    three = (*MEMBERS, ServerInfo("c", 2))
    told = claims.apply_instructions(orders(generation=3, members=three), 50.0)
    assert [wish.node_id for wish in told if isinstance(wish, SendToServer) and isinstance(wish.message, HeldUpdates)] == [
        "b",
        "c",
    ]


def test_only_members_tell_members_what_they_hold() -> None:
    claims = ready("a", "b")
    assert claims.holdings_for("a") == claims.holdings_for("z") == []
    claims.apply_instructions(orders(generation=2, members=(ServerInfo("b", 1), ServerInfo("c", 2))), 0.0)
    assert claims.holdings_for("b") == []


def test_what_another_is_about_to_log_is_its_own_even_if_it_said_so_early() -> None:
    claims, device = Claims("a"), device_of("a")
    claims.on_message("b", HeldUpdates(1, 5, granted=(device,)), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    claims.apply_instructions(orders(), 0.0)
    assert claims.on_update_received(5, device, 0.0) == [], "b holds it, or gives it back"
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, granted=(device,)))]


def test_what_is_logged_stays_counted_though_another_says_it_was_granted() -> None:
    claims, device = ready("a", "b"), device_of("a")
    claims.on_update_received(5, device, 0.0)
    claims.on_update_logged(5, device)
    claims.on_message("b", HeldUpdates(1, 5, granted=(device,)), 0.0)
    claims.on_message("b", ReleaseClaim(1, 5, (device,)), 0.0)
    claims.on_message("b", ReleaseClaim(1, 3, (device,)), 0.0)
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, counted=(device,)))]


def test_each_device_of_a_verdict_is_judged_for_itself() -> None:
    claims = ready("a", "b")
    gone, waits, another = (device_of("b", skip) for skip in range(3))
    claims.on_update_received(5, gone, 0.0)
    claims.on_request_dropped(5, gone)
    claims.on_update_received(5, waits, 0.0)
    granted = claims.on_message("b", ClaimReply(1, 5, granted=(gone, waits), counted=(another,)), 0.0)
    assert granted == [SendToServer("b", ReleaseClaim(1, 5, (gone,))), StoreUpdate(5, waits)], "and of the third nobody asked"
    for device in (gone, another):
        claims.on_update_received(5, device, 0.0)
    claims.apply_instructions(orders(stage=RoundStage.SEALING), 0.0)
    late = claims.on_message("b", ClaimReply(1, 5, granted=(gone, another)), 0.0)
    assert [wish.device for wish in late if wish == RejectUpdate(5, getattr(wish, "device", ""), UpdateOutcome.LATE)] == [
        gone,
        another,
    ]
    assert [wish.message.ids for wish in late if isinstance(wish, SendToServer) and isinstance(wish.message, ReleaseClaim)] == [
        (gone,),
        (another,),
    ]


def test_what_another_owner_said_is_counted_is_known_for_its_round() -> None:
    claims, device = ready("a", "b"), device_of("b")
    claims.on_update_received(5, device, 0.0)
    claims.on_message("b", ClaimReply(1, 5, counted=(device,)), 0.0)
    claims.apply_instructions(orders(stage=RoundStage.SEALING), 0.0)
    assert claims.is_known_counted(5, device)
    claims.apply_instructions(orders(round_number=6), 0.0)
    assert not claims.is_known_counted(5, device)


def test_where_updates_may_be_old_a_logged_one_goes_before_a_grant_that_was_not_used() -> None:
    claims, plan = Claims("a"), RoundPlan(staleness=2)
    claims.apply_instructions(orders(plan=plan), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    device = next(d for d in (f"d{n}@5" for n in range(99)) if claim_owner(d, MEMBERS) == "a")
    claims.on_message("b", Claim(1, 5, (device,)), 0.0)
    claims.on_update_logged(6, device)
    claims.apply_instructions(orders(round_number=6, plan=plan), 0.0)
    assert claims.on_message("b", Claim(1, 6, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 6, counted=(device,)))]


def test_what_waited_is_asked_of_every_owner_at_once_and_nobody_else_gets_what_is_being_stored() -> None:
    claims, mine, theirs = Claims("a"), device_of("a"), device_of("b")
    claims.apply_instructions(orders(), 0.0)
    for device in (theirs, mine):
        claims.on_update_received(5, device, 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    assert claims.tick(1.0) == [SendToServer("b", Claim(1, 5, (theirs,))), StoreUpdate(5, mine)]
    assert claims.on_message("b", Claim(1, 5, (mine,)), 1.0) == []


def test_grants_that_nobody_wants_are_all_given_back() -> None:
    claims, two = ready("a", "b"), (device_of("b"), device_of("b", 1))
    given_back = claims.on_message("b", ClaimReply(1, 5, granted=two), 0.0)
    assert given_back == [SendToServer("b", ReleaseClaim(1, 5, (device,))) for device in two]
