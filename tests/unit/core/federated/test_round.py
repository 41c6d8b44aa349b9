"""Tests of a round: its stages, and its decisions by the statuses of servers."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from covey.core.effects import PublishEvent
from covey.core.federated.instance import FederatedInstance
from covey.core.federated.messages import (
    AdmitDevices,
    FederationRecord,
    InstanceState,
    RoundPlan,
    RoundStage,
    RoundTotals,
    ServerStatus,
)
from covey.core.federated.outbox import Outbox, PersistFederation, Step
from covey.core.federated.round import NEXT_STAGES, Round
from covey.core.federated.server_roster import Losses, Membership, ServerMember
from covey.core.types import Host

PLAN = RoundPlan(threshold=2, update_window_s=2.0)
RECORD = FederationRecord("c", b"k", 1, (), 1, 1, 0, InstanceState.RUNNING, PLAN, formed=True)


def step(now: float = 0.0) -> Step:
    return Step(now, "c", Outbox(lambda: RECORD))


def server(node_id: str, **status: object) -> ServerMember:
    found = msgspec.structs.replace(ServerStatus(generation=1, round=1, model_round=0, digest="m0"), **status)
    host = Host("h", "h", "127.0.0.1")
    return ServerMember(
        node_id, node_id, host, "http", "peer", "logs", int(node_id), connection=1, is_member=True, status=found
    )


def members(*servers: ServerMember, is_complete: bool = True) -> Membership:
    return Membership(1, list(servers), is_complete)


def opened(plan: RoundPlan = PLAN) -> Round:
    made = Round(FederatedInstance(plan), 0.0)
    made.open_first(step(), server("0"), "formed")
    assert (made.number, made.stage, made.digest, made.source) == (1, RoundStage.OPEN, "m0", "0")
    return made


def counted(count: int, **status: object) -> Membership:
    return members(server("0", totals=RoundTotals(count), **status))


def test_stage_changes_only_along_next_stages() -> None:
    for before, after in product(RoundStage, RoundStage):
        made = Round(FederatedInstance(PLAN), 0.0)
        made.stage = before
        if after is before or after in NEXT_STAGES[before]:
            made._move_to(after)
            assert made.stage is after
        else:
            with pytest.raises(AssertionError):
                made._move_to(after)


def test_round_is_sealed_then_summed_then_next_round_opens() -> None:
    made, now = opened(), step(1.0)
    assert (made.advance(now, counted(1)), made.stage) == (False, RoundStage.OPEN)
    assert (made.advance(now, counted(2)), made.stage) == (True, RoundStage.SEALING)
    assert not made.advance(now, counted(2)), "the part is not sealed"
    assert not made.advance(now, counted(2, sealed=True, generation=0)), "it was sealed in another generation"
    assert not made.advance(now, counted(2, sealed=True)) and made.stage is RoundStage.SUMMING
    assert (made.aggregator, made.expected_totals) == ("0", (("0", RoundTotals(2)),))
    assert not now.out.effects
    assert made.advance(now, counted(2, sealed=True, model_round=1, digest="m1", metrics={"loss": 0.5}))
    assert (made.number, made.stage, made.digest, made.metrics) == (2, RoundStage.OPEN, "m1", {"loss": 0.5})
    (event, persisted) = now.out.effects
    assert event == PublishEvent("round", "done", "iteration 1 with 2 updates") and isinstance(persisted, PersistFederation)


def test_closed_round_waits_for_complete_membership() -> None:
    made = opened()
    made.advance(step(), counted(2))
    lost = members(server("0", totals=RoundTotals(2), sealed=True), is_complete=False)
    assert not made.advance(step(), lost) and made.stage is RoundStage.SEALING


def test_change_of_members_restarts_sealing() -> None:
    made = opened()
    made.reseal()
    assert made.stage is RoundStage.OPEN, "an open round must stay open"
    made.advance(step(), counted(2))
    made.advance(step(), counted(2, sealed=True))
    made.reseal()
    assert (made.stage, made.aggregator, made.expected_totals) == (RoundStage.SEALING, "", ())


def test_lost_part_is_listed_once_and_forgotten_up_to_previous_round() -> None:
    made = opened()
    for _ in range(2):
        made.note_losses(Losses(("0",), updates_forgotten=True))
    assert (made.missing, made.forgotten) == (("0",), 0)
    made.advance(step(), counted(2))
    made.note_losses(Losses(updates_forgotten=True))
    assert made.forgotten == 1, "the model of a closed round may be made already"


def test_round_without_updates_is_abandoned_and_iteration_repeated() -> None:
    made, now = opened(), step()
    made.advance(now, counted(2))
    assert made.advance(now, counted(0, sealed=True)) and made.abandon_reason
    made.advance(now, counted(0, sealed=True))
    assert (made.stage, made.aggregator, made.expected_totals) == (RoundStage.SUMMING, "0", ())
    assert made.advance(now, counted(0, sealed=True, model_round=1))
    assert (made.number, made.iteration, made.stage, made.abandon_reason) == (2, 1, RoundStage.OPEN, "")
    assert made.voided == (1, "all its updates were on servers that were given up")


def test_missed_window_keeps_round_open() -> None:
    made = opened()
    assert not made.advance(step(), counted(1))
    now = step(2.0)
    assert not made.advance(now, counted(1)) and made.stage is RoundStage.OPEN
    assert [effect.what for effect in now.out.effects if isinstance(effect, PublishEvent)] == ["missed"]


def test_devices_of_other_round_are_not_admitted() -> None:
    made = opened()
    assert made.admit(step(), AdmitDevices(1, ("a", "b", "c"))).admitted == ("a", "b")
    assert made.admit(step(), AdmitDevices(2, ("a",))).refused == ("a",)
    made.readmit(["c"])
    assert made.admit(step(), AdmitDevices(1, ("c",))).admitted == ("c",)


def test_restored_secure_round_without_list_is_abandoned() -> None:
    plan = msgspec.structs.replace(PLAN, secure=True)
    made = Round(FederatedInstance(plan), 0.0)
    made.restore(step(), msgspec.structs.replace(RECORD, plan=plan))
    assert made.stage is RoundStage.SEALING
    assert made.abandon_reason == "the scheduler ended before the list of uploaders was stored"
