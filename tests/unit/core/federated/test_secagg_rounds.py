"""Tests of secure rounds in the federation state machine: order of persist and send, abandoned rounds."""

from __future__ import annotations

import msgspec
from tests.unit.core.federated.secagg.secure_devices import SecaggSimulation
from tests.unit.core.federated.test_rounds import PLAN, Harness
from tests.unit.core.federated.test_rounds_effects import published

from covey.core.effects import Level, Send
from covey.core.federated.aggregation import SecureAggregation
from covey.core.federated.dp_accounting import Noise
from covey.core.federated.messages import (
    AdmitDevices,
    DevicesAdmitted,
    FederationRecord,
    InstanceState,
    RoundStage,
    RoundTotals,
    ServerInstructions,
)
from covey.core.federated.outbox import FederationEffect, PersistFederation
from covey.core.federated.secagg.messages import ClientList, GetSecrets, SecaggForward, SecaggPhase, SecaggReply, SecaggVerdict
from covey.core.federated.secagg.scheduler_round import SecaggOutcome, SecaggRound

SECURE = msgspec.structs.replace(PLAN, threshold=4, ratio=0.75, secure=True, cipher_window_s=5.0, update_window_s=2.0)
NAMES = tuple(f"device-{number}" for number in range(4))


class SecaggDevices(SecaggSimulation):
    """Devices that send their requests through the second server."""

    def __init__(self, harness: Harness) -> None:
        super().__init__(4)
        self.harness = harness
        harness.receive(1, AdmitDevices(harness.machine.round.number, NAMES))

    def request(self, kind: type, name: str, **more: object) -> SecaggOutcome:
        ask = kind(fl_id=name, iteration=1, timestamp=0, data_size=self.sizes[name], ticket="", **more)
        (sent,) = secagg_replies(self.harness.receive(2, SecaggForward(7, self.harness.machine.round.number, ask)))
        assert sent.serial == 7, "the reply must have the serial number of the request"
        self.round = secagg_round(self.harness)
        return SecaggOutcome(sent.verdict, sent.reason, sent.payload)

    def _wait(self) -> None:
        self.harness.tick(0.1)

    def upload(self, names: list[str]) -> None:
        fix, self.round.fix_uploaders = self.round.fix_uploaders, lambda clients, now: None  # type: ignore[method-assign]
        super().upload(names)
        self.round.fix_uploaders = fix  # type: ignore[method-assign]
        for connection, part in ((1, names[:1]), (2, names[1:])):
            self.harness.report(connection, round=self.harness.machine.round.number, totals=RoundTotals(len(part), len(part)))
        for connection, part in ((1, names[:1]), (2, names[1:])):
            self.harness.report(connection, sealed=True, counted_devices=tuple(part))


def secagg_round(harness: Harness) -> SecaggRound:
    aggregation = harness.machine.round.aggregation
    assert isinstance(aggregation, SecureAggregation)
    return aggregation.secagg_round


def secagg_replies(effects: list[FederationEffect]) -> list[SecaggReply]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, SecaggReply)]


def start_round_with_uploads(names: int = 4) -> tuple[Harness, SecaggDevices]:
    harness = Harness(plan=SECURE).form()
    sim = SecaggDevices(harness)
    sim.keys(list(NAMES))
    sim.shares(list(NAMES))
    assert harness.instructions().secagg_phase is SecaggPhase.UPDATES
    sim.upload(list(NAMES[:names]))
    return harness, sim


def test_uploader_list_is_persisted_before_devices_receive_it() -> None:
    harness, sim = start_round_with_uploads(3)
    assert harness.stage() is RoundStage.UNMASKING
    kept = [n for n, e in enumerate(harness.out) if isinstance(e, PersistFederation) and e.record.uploaders is not None]
    told = [
        n
        for n, e in enumerate(harness.out)
        if isinstance(e, Send) and isinstance(e.message, ServerInstructions) and e.message.stage is RoundStage.UNMASKING
    ]
    assert kept and told and kept[0] < told[0]
    assert not any(isinstance(answer.payload, ClientList) for answer in secagg_replies(harness.out[: kept[0]]))
    sim.reveal(list(NAMES[:3]))
    instructions = harness.instructions()
    assert instructions.stage is RoundStage.SUMMING and instructions.unmasking is not None
    assert instructions.unmasking.keys.keys() == {"device-3"} and instructions.unmasking.seeds.keys() == set(NAMES[:3])
    lists = {
        e.record.uploaders.clients for e in harness.out if isinstance(e, PersistFederation) and e.record.uploaders is not None
    }
    assert len(lists) == 1
    harness.report(int(instructions.aggregator) + 1, model_round=1, digest="m1")
    assert (
        harness.machine.round.number == 2
        and harness.machine.record().uploaders is None
        and harness.instructions().secagg_phase is SecaggPhase.KEYS
    )


def test_part_that_differs_from_uploader_list_abandons_round() -> None:
    harness, _ = start_round_with_uploads()
    harness.report(2, counted_devices=("device-1", "device-2"))
    assert "differ from the list" in harness.reasons("abandoned")[0]
    instructions = harness.instructions()
    assert (
        instructions.stage is RoundStage.SUMMING
        and instructions.is_abandoned
        and instructions.expected_totals == ()
        and instructions.unmasking is None
    )


def test_abandoned_round_repeats_iteration_under_next_number() -> None:
    harness = Harness(plan=SECURE).form()
    sim = SecaggDevices(harness)
    sim.keys(list(NAMES))
    sim.shares(list(NAMES[:2]))
    harness.tick(6.0)
    assert harness.reasons("abandoned") == [
        "iteration 1 is repeated and its updates are discarded: 2 devices shared their secrets within 5 s, and 4 are needed"
    ]
    for connection in (1, 2):
        harness.report(connection, round=1, sealed=True)
    instructions = harness.instructions()
    assert instructions.is_abandoned and instructions.stage is RoundStage.SUMMING
    harness.report(int(instructions.aggregator) + 1, model_round=1, digest="m0")
    instructions = harness.instructions()
    assert (instructions.round, instructions.base, instructions.round - instructions.base) == (
        2,
        1,
        1,
    ) and instructions.stage is RoundStage.OPEN
    assert instructions.voided[0] == 1 and "2 devices" in instructions.voided[1]
    asks = GetSecrets(fl_id="device-0", iteration=1, timestamp=0, data_size=1, ticket="")
    late = harness.answer_secagg(SecaggForward(1, 1, asks))
    assert late.verdict is SecaggVerdict.LATE and late.reason.startswith("the round was abandoned: 2 devices")


def test_device_is_not_admitted_after_key_exchange() -> None:
    harness = Harness(plan=SECURE).form()
    sim = SecaggDevices(harness)
    assert harness.admit(AdmitDevices(1, NAMES[:1])).admitted == NAMES[:1], "a repeated request must be admitted"
    sim.keys(list(NAMES))
    late = harness.admit(AdmitDevices(1, NAMES[:1]))
    assert late.refused == NAMES[:1] and "has completed its key exchange" in late.reason


def test_missed_update_window_abandons_secure_round() -> None:
    """No device can replace a missing one, because its masks are in the other devices' updates."""
    harness = Harness(plan=SECURE).form()
    sim = SecaggDevices(harness)
    sim.keys(list(NAMES))
    sim.shares(list(NAMES))
    harness.report(1, round=1, totals=RoundTotals(2, 2))
    harness.tick(3.0)
    assert "2 of 3 updates arrived within 2 s" in harness.reasons("abandoned")[0]


def test_restored_secure_round_continues_from_list_or_is_abandoned() -> None:
    harness, sim = start_round_with_uploads()
    record = [e.record for e in harness.out if isinstance(e, PersistFederation)][-1]
    assert record.uploaders is not None
    second = resumed(record)
    assert second.stage() is RoundStage.UNMASKING and second.machine.record().uploaders == record.uploaders
    sim.harness, sim.round = second, secagg_round(second)
    sim.reveal(list(NAMES))
    assert second.stage() is RoundStage.SUMMING
    first = next(e.record for e in harness.out if isinstance(e, PersistFederation))
    assert first.uploaders is None
    for instance in (
        InstanceState.RUNNING,
        InstanceState.DISABLED,
    ):  # the held updates cannot be unmasked, because the keys are lost
        third = resumed(msgspec.structs.replace(first, instance=instance))
        assert (
            third.instructions().is_abandoned
            and "before the list of uploaders was stored" in third.machine.round.abandon_reason
        )


def test_model_requested_by_previous_scheduler_completes_unmasking_round() -> None:
    harness, _ = start_round_with_uploads()
    assert harness.stage() is RoundStage.UNMASKING
    harness.report(1, model_round=1, digest="m1")
    assert (harness.machine.round.number, harness.instructions().stage, harness.instructions().digest) == (
        2,
        RoundStage.OPEN,
        "m1",
    )


def resumed(record: FederationRecord) -> Harness:
    harness = Harness(plan=SECURE, record=record)
    for connection, devices in ((1, NAMES[:1]), (2, NAMES[1:])):
        harness.register(connection, str(connection - 1))
        harness.report(connection, round=1, sealed=True, counted_devices=devices, totals=RoundTotals(len(devices), 1))
    for connection in (1, 2):
        harness.report(connection)
    return harness


def test_aggregation_error_abandons_round() -> None:
    harness, sim = start_round_with_uploads(3)
    sim.reveal(list(NAMES[:3]))
    aggregator = int(harness.instructions().aggregator) + 1
    harness.report(aggregator, aggregation_error="the key of device-3 that its neighbours revealed is not its own")
    assert harness.reasons("abandoned")[0].endswith("is not its own")


def test_round_fails_if_threshold_is_half_of_the_devices() -> None:
    round_ = SecaggRound("s", wanted=6, least=3, share_ratio=0.5, reconstruct=3, window_s=10.0)
    sim = SecaggSimulation(6)
    sim.round = round_
    sim.keys(sim.names)
    assert "more than half" in round_.failure_reason


def asks(name: str = "device-0") -> GetSecrets:
    return GetSecrets(fl_id=name, iteration=1, timestamp=0, data_size=1, ticket="")


def test_late_secagg_request_gets_verdict_of_its_round() -> None:
    plain = Harness(1).form(1)
    assert plain.receive(1, SecaggForward(7, 1, asks())) == [Send(SecaggReply(7, SecaggVerdict.LATE, "the round is closed"), 1)]
    plain.report(1, round=1, totals=RoundTotals(2))
    plain.report(1, sealed=True)
    plain.report(1, model_round=1, digest="m1")
    assert plain.receive(1, SecaggForward(8, 1, asks())) == [Send(SecaggReply(8, SecaggVerdict.DONE, "the round is done"), 1)]
    assert plain.receive(99, SecaggForward(9, 1, asks())) == [], "that connection has no server"
    secure = Harness(plan=SECURE).form()
    not_admitted = "this device was not admitted to the round: call startFLJob first"
    assert secure.receive(2, SecaggForward(7, 1, asks("stranger"))) == [
        Send(SecaggReply(7, SecaggVerdict.LATE, not_admitted), 2)
    ]
    secure.receive(1, AdmitDevices(1, NAMES))
    (waits,) = secagg_replies(secure.receive(2, SecaggForward(7, 1, asks())))
    assert waits.verdict is not SecaggVerdict.ACCEPTED and waits.reason


def test_consecutive_abandoned_rounds_repeat_one_iteration() -> None:
    harness = Harness(plan=SECURE).form()
    for number in (1, 2):
        sim = SecaggDevices(harness)
        sim.keys(list(NAMES))
        harness.tick(6.0)
        why = harness.machine.round.abandon_reason
        assert why and harness.machine.round.reason == f"abandoned: {why}"
        text = f"round abandoned: iteration 1 is repeated and its updates are discarded: {why}"
        assert text in published(harness.out, Level.WARNING)
        assert (harness.instructions().aggregator, harness.instructions().expected_totals) == ("", ())
        for connection in (1, 2):
            harness.report(connection, round=number, sealed=True, totals=RoundTotals())
        harness.report(int(harness.instructions().aggregator) + 1, model_round=number, digest="m0")
        machine = harness.machine
        assert (machine.round.number, machine.instance.base, machine.round.iteration, machine.instance.missed_count) == (
            number + 1,
            number,
            1,
            number,
        )
        assert machine.round.reason == f"iteration 1 is repeated: {why}" and machine.round.voided == (number, why)
        answer = harness.answer_secagg(SecaggForward(7, number, asks()))
        assert answer == SecaggReply(7, SecaggVerdict.LATE, f"the round was abandoned: {why}")
        for connection in (1, 2):
            harness.report(connection, sealed=False)


def test_refused_admission_after_key_exchange_has_reason() -> None:
    harness = Harness(plan=SECURE).form()
    SecaggDevices(harness).keys(list(NAMES))
    reason = "iteration 1 has completed its key exchange and admits no more devices"
    assert harness.admit(AdmitDevices(1, NAMES[:1])) == DevicesAdmitted(1, (), NAMES[:1], reason)
    assert harness.admit(AdmitDevices(2, NAMES[:1])).reason == "the round is not open"


def test_abandon_reason_names_cause() -> None:
    few = Harness(plan=SECURE).form()
    sim = SecaggDevices(few)
    sim.keys(list(NAMES))
    sim.shares(list(NAMES))
    few.report(1, round=1, totals=RoundTotals(2, 2))
    few.tick(3.0)
    assert few.machine.round.abandon_reason == "2 of 3 updates arrived within 2 s"
    lost = Harness(1).form(1)
    lost.report(1, round=1, totals=RoundTotals(2))
    lost.report(1, sealed=True, totals=RoundTotals())
    assert lost.machine.round.abandon_reason == "all its updates were on servers that were given up"
    record = next(e.record for e in Harness(plan=SECURE).form().out if isinstance(e, PersistFederation))
    assert resumed(record).machine.round.abandon_reason == "the scheduler ended before the list of uploaders was stored"


def test_unmasking_secrets_are_sent_only_while_summing() -> None:
    harness, sim = start_round_with_uploads()
    assert harness.stage() is RoundStage.UNMASKING and harness.instructions().unmasking is None
    sim.reveal(list(NAMES))
    assert harness.stage() is RoundStage.SUMMING and harness.instructions().unmasking is not None
    harness.report(int(harness.instructions().aggregator) + 1, aggregation_error="it does not fit")
    assert harness.instructions().is_abandoned and harness.instructions().unmasking is None


def test_secure_round_uses_limits_of_plan() -> None:
    def made(**changed: object) -> SecaggRound:
        found = secagg_round(Harness(plan=msgspec.structs.replace(SECURE, **changed)).form())
        assert found.session == "c/1"
        return found

    assert (made()._devices_max, made()._updates_min, made()._equal_weights, made()._reconstruct_threshold) == (4, 3, False, 0)
    assert made(update_min=2)._updates_min == 2 and made(update_min=9)._updates_min == 3
    assert made(reconstruct=3)._reconstruct_threshold == 3 and made(share_ratio=0.5)._share_ratio == 0.5
    assert made(noise=Noise(local=False, clip=1.0, multiplier=1.0, delta=1e-5))._equal_weights
