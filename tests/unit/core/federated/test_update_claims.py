"""Tests of claims, with literal messages."""

from __future__ import annotations

import msgspec

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
from covey.core.federated.update_claims import CLAIM_RETRY_S, Claims, RejectUpdate, SendToServer, StoreUpdate, UpdateOutcome

MEMBERS = (ServerInfo("a", 0), ServerInfo("b", 1))


def instructions(generation: int = 1, round_number: int = 5, **more: object) -> ServerInstructions:
    given = {
        "stage": RoundStage.OPEN,
        "instance": InstanceState.RUNNING,
        "plan": RoundPlan(),
        "base": 0,
        "members": MEMBERS,
        **more,
    }
    return ServerInstructions(generation=generation, round=round_number, **given)  # type: ignore[arg-type]


def device_owned_by(node_id: str, skip: int = 0) -> str:
    """Return a device id that this server owns; `skip` selects a later one."""
    return [f"d{n}" for n in range(100) if claim_owner(f"d{n}", MEMBERS) == node_id][skip]


def ready(node_id: str, other: str) -> Claims:
    claims = Claims(node_id)
    claims.apply_instructions(instructions(), 0.0)
    claims.on_message(other, HeldUpdates(1, 5, is_complete=True), 0.0)
    assert claims.has_all_reports
    return claims


def test_update_of_own_id_is_stored_immediately_and_counted_once() -> None:
    claims, device = ready("a", "b"), device_owned_by("a")
    assert claims.on_update_received(5, device, 0.0) == [StoreUpdate(5, device)]
    assert not claims.is_fully_logged(5)
    claims.on_update_logged(5, device)
    assert claims.is_fully_logged(5)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, counted=(device,)))]


def test_update_of_foreign_id_is_stored_after_owner_grants_claim() -> None:
    claims, device = ready("a", "b"), device_owned_by("b")
    assert claims.on_update_received(5, device, 0.0) == [SendToServer("b", Claim(1, 5, (device,)))]
    assert claims.on_message("b", ClaimReply(1, 5, granted=(device,)), 0.0) == [StoreUpdate(5, device)]
    assert claims.on_update_logged(5, device) == [SendToServer("b", HeldUpdates(1, 5, (device,)))]


def test_owner_grants_no_claim_before_all_members_report() -> None:
    claims, device = Claims("a"), device_owned_by("a")
    claims.apply_instructions(instructions(), 0.0)
    assert claims.on_update_received(5, device, 0.0) == []
    claims.on_message("b", HeldUpdates(1, 5, (device,), is_complete=True), 0.0)
    assert claims.tick(1.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]


def test_claim_on_update_granted_to_other_server_is_undecided() -> None:
    claims, device = ready("a", "b"), device_owned_by("a")
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, granted=(device,)))]
    assert claims.on_update_received(5, device, 0.0) == []
    claims.on_message("b", ReleaseClaim(1, 5, (device,)), 0.0)
    assert claims.tick(1.0) == [StoreUpdate(5, device)]


def test_report_of_later_generation_is_kept_until_instructions_arrive() -> None:
    claims, device = Claims("a"), device_owned_by("a")
    claims.on_message("b", HeldUpdates(1, 5, (device,)), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    claims.apply_instructions(instructions(), 0.0)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]


def test_server_sends_its_report_when_reply_is_requested() -> None:
    claims = ready("a", "b")
    device = device_owned_by("b")
    claims.restore(5, [device])
    told = claims.on_message("b", HeldUpdates(1, 5, is_complete=True, reply_requested=True), 0.0)
    assert told == [SendToServer("b", HeldUpdates(1, 5, (device,))), SendToServer("b", HeldUpdates(1, 5, is_complete=True))]


def test_is_known_counted_covers_owned_claimed_and_held_updates() -> None:
    claims, mine, theirs = ready("a", "b"), device_owned_by("a"), device_owned_by("b")
    assert not claims.is_known_counted(5, mine) and not claims.is_known_counted(5, theirs)
    claims.on_message("b", HeldUpdates(1, 5, (mine,)), 0.0)
    claims.on_update_received(5, theirs, 0.0)
    claims.on_message("b", ClaimReply(1, 5, counted=(theirs,)), 0.0)
    assert claims.is_known_counted(5, mine) and claims.is_known_counted(5, theirs), "known as owner, and by the owner's reply"
    claims.restore(5, ["held"])
    claims.apply_instructions(instructions(generation=2), 0.0)
    assert (
        claims.is_known_counted(5, "held") and not claims.is_known_counted(5, mine) and not claims.is_known_counted(5, theirs)
    ), "their holders may be lost in the new generation"


def test_grant_of_earlier_generation_is_ignored_and_claim_resent() -> None:
    claims, device = ready("a", "b"), device_owned_by("b")
    claims.on_update_received(5, device, 0.0)
    effects = claims.apply_instructions(instructions(generation=2), 0.0)
    assert SendToServer("b", Claim(2, 5, (device,))) in effects
    assert claims.on_message("b", ClaimReply(1, 5, granted=(device,)), 0.0) == []


def test_grant_of_dropped_request_is_released() -> None:
    claims, device = ready("a", "b"), device_owned_by("b")
    claims.on_update_received(5, device, 0.0)
    claims.on_request_dropped(5, device)
    assert claims.on_message("b", ClaimReply(1, 5, granted=(device,)), 0.0) == [
        SendToServer("b", ReleaseClaim(1, 5, (device,)))
    ]


def test_update_outcome_is_early_late_counted_or_closed() -> None:
    claims, device = ready("a", "b"), device_owned_by("b")
    assert claims.on_update_received(6, device, 0.0) == [RejectUpdate(6, device, UpdateOutcome.EARLY)]
    assert claims.on_update_received(3, device, 0.0) == [RejectUpdate(3, device, UpdateOutcome.LATE)]
    claims.on_update_received(5, device, 0.0)
    assert claims.apply_instructions(instructions(stage=RoundStage.SEALING), 0.0) == [], (
        "the owner decides: another server may have counted it"
    )
    assert claims.on_message("b", ClaimReply(1, 5, late=(device,)), 0.0) == [RejectUpdate(5, device, UpdateOutcome.LATE)]
    assert claims.on_update_received(5, device, 0.0) == [SendToServer("b", Claim(1, 5, (device,)))], (
        "a retry must be claimed too"
    )
    assert claims.on_message("b", ClaimReply(1, 5, counted=(device,)), 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]
    claims.on_update_received(5, device, 0.0)
    released = SendToServer("b", ReleaseClaim(1, 5, (device,)))
    assert claims.on_message("b", ClaimReply(1, 5, granted=(device,)), 0.0) == [
        released,
        RejectUpdate(5, device, UpdateOutcome.LATE),
    ]
    claims.apply_instructions(instructions(leaving=("a",)), 0.0)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.CLOSED)], (
        "a leaving server must not accept updates"
    )
    claims.apply_instructions(instructions(generation=2, members=(ServerInfo("b", 1),)), 0.0)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.CLOSED)]


def test_stale_update_counted_in_earlier_round_is_not_counted_again() -> None:
    claims = Claims("a")
    plan = RoundPlan(staleness=2)
    claims.apply_instructions(instructions(plan=plan), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    device, other = [d for d in (f"d{n}@5" for n in range(99)) if claim_owner(d, MEMBERS) == "a"][:2]
    claims.on_update_received(5, device, 0.0)
    claims.on_update_logged(5, device)
    claims.apply_instructions(instructions(round_number=6, plan=plan), 0.0)
    assert claims.on_update_received(6, device, 0.0) == [RejectUpdate(6, device, UpdateOutcome.COUNTED)]
    assert claims.on_message("b", Claim(1, 6, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 6, counted=(device,)))]
    assert claims.on_update_received(6, other, 0.0) == [StoreUpdate(6, other)]


def test_stale_update_that_began_in_forgotten_round_is_late() -> None:
    claims, plan = Claims("a"), RoundPlan(staleness=2)
    claims.apply_instructions(instructions(plan=plan), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    old, new = (next(d for d in (f"d{n}@{began}" for n in range(99)) if claim_owner(d, MEMBERS) == "a") for began in (4, 5))
    claims.apply_instructions(instructions(generation=2, plan=plan, forgotten=4), 0.0)
    claims.on_message("b", HeldUpdates(2, 5, is_complete=True), 0.0)
    assert claims.on_update_received(5, old, 0.0) == [RejectUpdate(5, old, UpdateOutcome.LATE)]
    assert claims.on_update_received(5, new, 0.0) == [StoreUpdate(5, new)]


def test_unused_grant_of_earlier_round_is_not_counted() -> None:
    claims, plan = Claims("a"), RoundPlan(staleness=2)
    claims.apply_instructions(instructions(plan=plan), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    device = next(d for d in (f"d{n}@5" for n in range(99)) if claim_owner(d, MEMBERS) == "a")
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, granted=(device,)))]
    claims.apply_instructions(instructions(round_number=6, plan=plan), 0.0)
    assert claims.on_update_received(6, device, 0.0) == []  # b may log it or release it
    assert claims.on_message("b", Claim(1, 6, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 6, granted=(device,)))]


def test_longest_asynchronous_device_id_fits_into_claim() -> None:
    claim = Claim(1, 5, (f"{'x' * DEVICE_ID_MAX}@{10**18}",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(claim), type=Claim) == claim


# -- lost and repeated messages --------------------------------------------------------------------------------------


def test_server_without_instructions_rejects_updates() -> None:
    claims, device = Claims("a"), device_owned_by("a")
    assert not claims.has_all_reports and claims.holdings_for("b") == []
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.CLOSED)]


def test_repeated_request_of_device_is_claimed_once() -> None:
    claims, device = ready("a", "b"), device_owned_by("b")
    assert claims.on_update_received(5, device, 0.0) and claims.on_update_received(5, device, 0.0) == [], (
        "the claim was already sent"
    )
    granted = ClaimReply(1, 5, granted=(device,))
    assert claims.on_message("b", granted, 0.0) == [StoreUpdate(5, device)]
    assert claims.on_update_received(5, device, 0.0) == [], "it is being stored"
    assert claims.on_message("b", granted, 0.0) == [], "a repeated grant of a held update must not be released"
    claims.on_update_logged(5, device)
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)]


def test_failed_store_releases_claim() -> None:
    claims, mine, theirs = ready("a", "b"), device_owned_by("a"), device_owned_by("b")
    assert claims.on_update_received(5, mine, 0.0) == [StoreUpdate(5, mine)]
    assert claims.on_store_failed(5, mine) == [] and claims.is_fully_logged(5), "a failed store must not block sealing"
    assert claims.on_message("b", Claim(1, 5, (mine,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, granted=(mine,)))]
    claims.on_update_received(5, theirs, 0.0)
    claims.on_message("b", ClaimReply(1, 5, granted=(theirs,)), 0.0)
    assert claims.on_store_failed(5, theirs) == [SendToServer("b", ReleaseClaim(1, 5, (theirs,)))]
    assert claims.on_update_received(5, theirs, 0.0) == [SendToServer("b", Claim(1, 5, (theirs,)))]


def test_device_is_counted_once_in_each_round() -> None:
    claims, device = ready("a", "b"), device_owned_by("a")
    claims.on_update_received(5, device, 0.0)
    claims.on_update_logged(5, device)
    claims.apply_instructions(instructions(round_number=6), 0.0)
    assert claims.on_update_received(6, device, 0.0) == [StoreUpdate(6, device)]
    assert claims.on_update_received(5, device, 0.0) == [RejectUpdate(5, device, UpdateOutcome.COUNTED)], (
        "the previous round must still be known"
    )


def test_claim_of_closed_round_is_decided_by_owner() -> None:
    claims, mine, theirs = ready("a", "b"), device_owned_by("a"), device_owned_by("b")
    assert claims.on_update_received(4, theirs, 0.0) == [SendToServer("b", Claim(1, 4, (theirs,)))]
    assert claims.on_update_received(4, mine, 0.0) == [RejectUpdate(4, mine, UpdateOutcome.LATE)]
    assert claims.on_message("b", Claim(1, 4, (mine,)), 0.0) == [SendToServer("b", ClaimReply(1, 4, late=(mine,)))]
    assert claims.apply_instructions(instructions(), 0.0) == [], "the claim must stay pending"
    assert claims.apply_instructions(instructions(round_number=6), 0.0) == [RejectUpdate(4, theirs, UpdateOutcome.LATE)], (
        "the round is too old to be claimed"
    )
    assert claims.on_message("b", Claim(1, 7, (mine,)), 0.0) == [], "claims of a future round must not be decided"


def test_pending_updates_are_rejected_when_server_closes() -> None:
    for change in ({"leaving": ("a",)}, {"instance": InstanceState.DISABLED}):
        claims, device = ready("a", "b"), device_owned_by("b")
        claims.on_update_received(5, device, 0.0)
        assert claims.apply_instructions(instructions(**change), 0.0) == [RejectUpdate(5, device, UpdateOutcome.CLOSED)]
        assert claims.tick(1.0) == []


def test_undecided_claim_is_repeated_after_retry_interval() -> None:
    claims, device = ready("a", "b"), device_owned_by("b")
    claims.on_update_received(5, device, 100.0)
    assert claims.tick(100.05) == []
    assert claims.tick(100.2) == [SendToServer("b", Claim(1, 5, (device,)))]
    assert claims.tick(100.2 + CLAIM_RETRY_S / 2) == [], "the claim was just sent"


def test_new_generation_starts_with_reports_of_held_updates() -> None:
    claims, logged, stored, theirs = Claims("a"), device_owned_by("a"), device_owned_by("a", 1), device_owned_by("b")
    claims.restore(5, [logged, theirs])
    claims.held_updates[5][stored] = False
    assert claims.apply_instructions(instructions(), 0.0) == [
        SendToServer("b", HeldUpdates(1, 5, (theirs,))),
        SendToServer("b", HeldUpdates(1, 5, is_complete=True, reply_requested=True)),
    ]
    assert claims.on_message("b", Claim(1, 5, (logged,)), 0.0) == [], "not all members have reported"
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    assert claims.on_message("b", Claim(1, 5, (logged, stored)), 0.0) == [
        SendToServer("b", ClaimReply(1, 5, counted=(logged,)))
    ]
    claims.held_updates[5][theirs] = False
    assert claims.holdings_for("b") == [
        SendToServer("b", HeldUpdates(1, 5, (), (theirs,))),
        SendToServer("b", HeldUpdates(1, 5, is_complete=True)),
    ]


def test_new_generation_reports_to_all_members_and_resends_claims_in_one_message() -> None:
    claims, two = ready("a", "b"), (device_owned_by("b"), device_owned_by("b", 1))
    for device in two:
        claims.on_update_received(5, device, 0.0)
    assert claims.apply_instructions(instructions(generation=2), 50.0) == [
        SendToServer("b", HeldUpdates(2, 5, is_complete=True, reply_requested=True)),
        SendToServer("b", Claim(2, 5, two)),
    ]
    assert claims.tick(50.0) == [], "the claims were just sent"
    three = (*MEMBERS, ServerInfo("c", 2))
    told = claims.apply_instructions(instructions(generation=3, members=three), 50.0)
    assert [
        effect.node_id for effect in told if isinstance(effect, SendToServer) and isinstance(effect.message, HeldUpdates)
    ] == [
        "b",
        "c",
    ]


def test_only_members_report_and_only_to_other_members() -> None:
    claims = ready("a", "b")
    assert claims.holdings_for("a") == claims.holdings_for("z") == []
    claims.apply_instructions(instructions(generation=2, members=(ServerInfo("b", 1), ServerInfo("c", 2))), 0.0)
    assert claims.holdings_for("b") == []


def test_early_report_of_granted_update_keeps_the_grant() -> None:
    claims, device = Claims("a"), device_owned_by("a")
    claims.on_message("b", HeldUpdates(1, 5, granted=(device,)), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    claims.apply_instructions(instructions(), 0.0)
    assert claims.on_update_received(5, device, 0.0) == [], "b may log it or release it"
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, granted=(device,)))]


def test_logged_update_stays_counted_despite_later_grant_report_or_release() -> None:
    claims, device = ready("a", "b"), device_owned_by("a")
    claims.on_update_received(5, device, 0.0)
    claims.on_update_logged(5, device)
    claims.on_message("b", HeldUpdates(1, 5, granted=(device,)), 0.0)
    claims.on_message("b", ReleaseClaim(1, 5, (device,)), 0.0)
    claims.on_message("b", ReleaseClaim(1, 3, (device,)), 0.0)
    assert claims.on_message("b", Claim(1, 5, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 5, counted=(device,)))]


def test_each_id_of_claim_reply_is_handled_separately() -> None:
    claims = ready("a", "b")
    gone, waits, another = (device_owned_by("b", skip) for skip in range(3))
    claims.on_update_received(5, gone, 0.0)
    claims.on_request_dropped(5, gone)
    claims.on_update_received(5, waits, 0.0)
    granted = claims.on_message("b", ClaimReply(1, 5, granted=(gone, waits), counted=(another,)), 0.0)
    assert granted == [SendToServer("b", ReleaseClaim(1, 5, (gone,))), StoreUpdate(5, waits)], "the third was not claimed"
    for device in (gone, another):
        claims.on_update_received(5, device, 0.0)
    claims.apply_instructions(instructions(stage=RoundStage.SEALING), 0.0)
    late = claims.on_message("b", ClaimReply(1, 5, granted=(gone, another)), 0.0)
    assert [
        effect.device for effect in late if effect == RejectUpdate(5, getattr(effect, "device", ""), UpdateOutcome.LATE)
    ] == [
        gone,
        another,
    ]
    assert [
        effect.message.ids for effect in late if isinstance(effect, SendToServer) and isinstance(effect.message, ReleaseClaim)
    ] == [
        (gone,),
        (another,),
    ]


def test_counted_reply_is_remembered_until_next_round() -> None:
    claims, device = ready("a", "b"), device_owned_by("b")
    claims.on_update_received(5, device, 0.0)
    claims.on_message("b", ClaimReply(1, 5, counted=(device,)), 0.0)
    claims.apply_instructions(instructions(stage=RoundStage.SEALING), 0.0)
    assert claims.is_known_counted(5, device)
    claims.apply_instructions(instructions(round_number=6), 0.0)
    assert not claims.is_known_counted(5, device)


def test_logged_stale_update_takes_precedence_over_unused_grant() -> None:
    claims, plan = Claims("a"), RoundPlan(staleness=2)
    claims.apply_instructions(instructions(plan=plan), 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    device = next(d for d in (f"d{n}@5" for n in range(99)) if claim_owner(d, MEMBERS) == "a")
    claims.on_message("b", Claim(1, 5, (device,)), 0.0)
    claims.on_update_logged(6, device)
    claims.apply_instructions(instructions(round_number=6, plan=plan), 0.0)
    assert claims.on_message("b", Claim(1, 6, (device,)), 0.0) == [SendToServer("b", ClaimReply(1, 6, counted=(device,)))]


def test_pending_claims_are_sent_to_each_owner_and_stored_id_is_not_granted_again() -> None:
    claims, mine, theirs = Claims("a"), device_owned_by("a"), device_owned_by("b")
    claims.apply_instructions(instructions(), 0.0)
    for device in (theirs, mine):
        claims.on_update_received(5, device, 0.0)
    claims.on_message("b", HeldUpdates(1, 5, is_complete=True), 0.0)
    assert claims.tick(1.0) == [SendToServer("b", Claim(1, 5, (theirs,))), StoreUpdate(5, mine)]
    assert claims.on_message("b", Claim(1, 5, (mine,)), 1.0) == []


def test_all_unrequested_grants_are_released() -> None:
    claims, two = ready("a", "b"), (device_owned_by("b"), device_owned_by("b", 1))
    given_back = claims.on_message("b", ClaimReply(1, 5, granted=two), 0.0)
    assert given_back == [SendToServer("b", ReleaseClaim(1, 5, (device,))) for device in two]
