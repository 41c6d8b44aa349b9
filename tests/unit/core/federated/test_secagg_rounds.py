"""Secure rounds in the scheduler's machine: what is kept before what is said, and rounds that are abandoned."""

from __future__ import annotations

import msgspec
from tests.unit.core.federated.secagg.secure_devices import Sim
from tests.unit.core.federated.test_rounds import PLAN, Bench
from tests.unit.core.federated.test_rounds_effects import told

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
from covey.core.federated.secagg.protocol import SecaggOutcome, SecaggRound

SECURE = msgspec.structs.replace(PLAN, threshold=4, ratio=0.75, secure=True, cipher_window_s=5.0, update_window_s=2.0)
NAMES = tuple(f"device-{number}" for number in range(4))


class Masks(Sim):
    """The devices of a test, who speak through the machine's second server."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(4)
        self.bench = bench
        bench.hear(1, AdmitDevices(bench.machine.round.number, NAMES))

    def ask(self, kind: type, name: str, **more: object) -> SecaggOutcome:
        ask = kind(fl_id=name, iteration=1, timestamp=0, data_size=self.sizes[name], ticket="", **more)
        (sent,) = secured(self.bench.hear(2, SecaggForward(7, self.bench.machine.round.number, ask)))
        assert sent.serial == 7, "the server knows by it whom the answer is for"
        self.round = secagg_round(self.bench)
        return SecaggOutcome(sent.verdict, sent.reason, sent.payload)

    def _wait(self) -> None:
        self.bench.tick(0.1)

    def upload(self, names: list[str]) -> None:
        fix, self.round.fix_uploaders = self.round.fix_uploaders, lambda clients, now: None  # type: ignore[method-assign]
        super().upload(names)
        self.round.fix_uploaders = fix  # type: ignore[method-assign]
        for link, part in ((1, names[:1]), (2, names[1:])):
            self.bench.stand(link, round=self.bench.machine.round.number, totals=RoundTotals(len(part), len(part)))
        for link, part in ((1, names[:1]), (2, names[1:])):
            self.bench.stand(link, sealed=True, counted_devices=tuple(part))


def secagg_round(bench: Bench) -> SecaggRound:
    aggregation = bench.machine.round.aggregation
    assert isinstance(aggregation, SecureAggregation)
    return aggregation.secagg_round


def secured(effects: list[FederationEffect]) -> list[SecaggReply]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, SecaggReply)]


def begun(names: int = 4) -> tuple[Bench, Masks]:
    bench = Bench(plan=SECURE).form()
    sim = Masks(bench)
    sim.keys(list(NAMES))
    sim.shares(list(NAMES))
    assert bench.orders().secagg_phase is SecaggPhase.UPDATES
    sim.upload(list(NAMES[:names]))
    return bench, sim


def test_the_list_is_kept_before_any_device_can_hear_of_it() -> None:
    bench, sim = begun(3)
    assert bench.stage() is RoundStage.UNMASKING
    kept = [n for n, e in enumerate(bench.out) if isinstance(e, PersistFederation) and e.record.uploaders is not None]
    told = [
        n
        for n, e in enumerate(bench.out)
        if isinstance(e, Send) and isinstance(e.message, ServerInstructions) and e.message.stage is RoundStage.UNMASKING
    ]
    assert kept and told and kept[0] < told[0]
    assert not any(isinstance(answer.payload, ClientList) for answer in secured(bench.out[: kept[0]]))
    sim.reveal(list(NAMES[:3]))
    orders = bench.orders()
    assert orders.stage is RoundStage.SUMMING and orders.unmasking is not None
    assert orders.unmasking.keys.keys() == {"device-3"} and orders.unmasking.seeds.keys() == set(NAMES[:3])
    lists = {
        e.record.uploaders.clients for e in bench.out if isinstance(e, PersistFederation) and e.record.uploaders is not None
    }
    assert len(lists) == 1
    bench.stand(int(orders.aggregator) + 1, model_round=1, digest="m1")
    assert (
        bench.machine.round.number == 2
        and bench.machine.record().uploaders is None
        and bench.orders().secagg_phase is SecaggPhase.KEYS
    )


def test_a_part_that_is_not_the_one_of_the_list_abandons_the_round() -> None:
    bench, _ = begun()
    bench.stand(2, counted_devices=("device-1", "device-2"))
    assert "differ from the list" in bench.said("abandoned")[0]
    orders = bench.orders()
    assert (
        orders.stage is RoundStage.SUMMING and orders.is_abandoned and orders.expected_totals == () and orders.unmasking is None
    )


def test_an_abandoned_round_repeats_its_iteration_under_the_next_number() -> None:
    bench = Bench(plan=SECURE).form()
    sim = Masks(bench)
    sim.keys(list(NAMES))
    sim.shares(list(NAMES[:2]))
    bench.tick(6.0)
    assert bench.said("abandoned") == [
        "iteration 1 is repeated and its updates are discarded: 2 devices shared their secrets within 5 s, and 4 are needed"
    ]
    for link in (1, 2):
        bench.stand(link, round=1, sealed=True)
    orders = bench.orders()
    assert orders.is_abandoned and orders.stage is RoundStage.SUMMING
    bench.stand(int(orders.aggregator) + 1, model_round=1, digest="m0")
    orders = bench.orders()
    assert (orders.round, orders.base, orders.round - orders.base) == (2, 1, 1) and orders.stage is RoundStage.OPEN
    assert orders.voided[0] == 1 and "2 devices" in orders.voided[1]
    asks = GetSecrets(fl_id="device-0", iteration=1, timestamp=0, data_size=1, ticket="")
    late = bench.answer_secagg(SecaggForward(1, 1, asks))
    assert late.verdict is SecaggVerdict.LATE and late.reason.startswith("the round was abandoned: 2 devices")


def test_nobody_joins_a_round_that_has_its_keys() -> None:
    bench = Bench(plan=SECURE).form()
    sim = Masks(bench)
    assert bench.admit(AdmitDevices(1, NAMES[:1])).admitted == NAMES[:1], "it may ask again"
    sim.keys(list(NAMES))
    late = bench.admit(AdmitDevices(1, NAMES[:1]))
    assert late.refused == NAMES[:1] and "has completed its key exchange" in late.reason


def test_a_window_of_updates_that_ends_with_too_few_abandons_the_round() -> None:
    """Nobody can take the place of a device that is missing: its masks are in the others' updates."""
    bench = Bench(plan=SECURE).form()
    sim = Masks(bench)
    sim.keys(list(NAMES))
    sim.shares(list(NAMES))
    bench.stand(1, round=1, totals=RoundTotals(2, 2))
    bench.tick(3.0)
    assert "2 of 3 updates arrived within 2 s" in bench.said("abandoned")[0]


def test_a_scheduler_that_comes_back_goes_on_from_the_list_or_abandons() -> None:
    bench, sim = begun()
    record = [e.record for e in bench.out if isinstance(e, PersistFederation)][-1]
    assert record.uploaders is not None
    second = resumed(record)
    assert second.stage() is RoundStage.UNMASKING and second.machine.record().uploaders == record.uploaders
    sim.bench, sim.round = second, secagg_round(second)
    sim.reveal(list(NAMES))
    assert second.stage() is RoundStage.SUMMING
    first = next(e.record for e in bench.out if isinstance(e, PersistFederation))
    assert first.uploaders is None
    for instance in (
        InstanceState.RUNNING,
        InstanceState.DISABLED,
    ):  # what its servers hold is masked with keys that nobody knows
        third = resumed(msgspec.structs.replace(first, instance=instance))
        assert third.orders().is_abandoned and "before the list of uploaders was stored" in third.machine.round.abandon_reason


def test_a_model_that_an_earlier_scheduler_requested_ends_a_round_that_is_unmasking() -> None:
    bench, _ = begun()
    assert bench.stage() is RoundStage.UNMASKING
    bench.stand(1, model_round=1, digest="m1")
    assert (bench.machine.round.number, bench.orders().stage, bench.orders().digest) == (2, RoundStage.OPEN, "m1")


def resumed(record: FederationRecord) -> Bench:
    bench = Bench(plan=SECURE, record=record)
    for link, devices in ((1, NAMES[:1]), (2, NAMES[1:])):
        bench.come(link, str(link - 1))
        bench.stand(link, round=1, sealed=True, counted_devices=devices, totals=RoundTotals(len(devices), 1))
    for link in (1, 2):
        bench.stand(link)
    return bench


def test_a_key_that_does_not_fit_abandons_the_round() -> None:
    bench, sim = begun(3)
    sim.reveal(list(NAMES[:3]))
    summer = int(bench.orders().aggregator) + 1
    bench.stand(summer, aggregation_error="the key of device-3 that its neighbours revealed is not its own")
    assert bench.said("abandoned")[0].endswith("is not its own")


def test_a_round_refuses_a_threshold_that_keys_do_not_allow() -> None:
    round_ = SecaggRound("s", wanted=6, least=3, share_ratio=0.5, reconstruct=3, window_s=10.0)
    sim = Sim(6)
    sim.round = round_
    sim.keys(sim.names)
    assert "more than half" in round_.failure_reason


def asks(name: str = "device-0") -> GetSecrets:
    return GetSecrets(fl_id=name, iteration=1, timestamp=0, data_size=1, ticket="")


def test_a_device_that_comes_too_late_is_told_which_round_it_missed() -> None:
    plain = Bench(1).form(1)
    assert plain.hear(1, SecaggForward(7, 1, asks())) == [Send(SecaggReply(7, SecaggVerdict.LATE, "the round is closed"), 1)]
    plain.stand(1, round=1, totals=RoundTotals(2))
    plain.stand(1, sealed=True)
    plain.stand(1, model_round=1, digest="m1")
    assert plain.hear(1, SecaggForward(8, 1, asks())) == [Send(SecaggReply(8, SecaggVerdict.DONE, "the round is done"), 1)]
    assert plain.hear(99, SecaggForward(9, 1, asks())) == [], "nobody speaks over that connection"
    secure = Bench(plan=SECURE).form()
    stranger = "this device was not admitted to the round: call startFLJob first"
    assert secure.hear(2, SecaggForward(7, 1, asks("nobody"))) == [Send(SecaggReply(7, SecaggVerdict.LATE, stranger), 2)]
    secure.hear(1, AdmitDevices(1, NAMES))
    (waits,) = secured(secure.hear(2, SecaggForward(7, 1, asks())))
    assert waits.verdict is not SecaggVerdict.ACCEPTED and waits.reason


def test_rounds_that_are_abandoned_one_after_the_other_stay_one_iteration() -> None:
    bench = Bench(plan=SECURE).form()
    for number in (1, 2):
        sim = Masks(bench)
        sim.keys(list(NAMES))
        bench.tick(6.0)
        why = bench.machine.round.abandon_reason
        assert why and bench.machine.round.reason == f"abandoned: {why}"
        text = f"round abandoned: iteration 1 is repeated and its updates are discarded: {why}"
        assert text in told(bench.out, Level.WARNING)
        assert (bench.orders().aggregator, bench.orders().expected_totals) == ("", ())
        for link in (1, 2):
            bench.stand(link, round=number, sealed=True, totals=RoundTotals())
        bench.stand(int(bench.orders().aggregator) + 1, model_round=number, digest="m0")
        machine = bench.machine
        assert (machine.round.number, machine.instance.base, machine.round.iteration, machine.instance.missed_count) == (
            number + 1,
            number,
            1,
            number,
        )
        assert machine.round.reason == f"iteration 1 is repeated: {why}" and machine.round.voided == (number, why)
        answer = bench.answer_secagg(SecaggForward(7, number, asks()))
        assert answer == SecaggReply(7, SecaggVerdict.LATE, f"the round was abandoned: {why}")
        for link in (1, 2):
            bench.stand(link, sealed=False)


def test_who_comes_to_a_round_that_has_its_keys_is_told_so() -> None:
    bench = Bench(plan=SECURE).form()
    Masks(bench).keys(list(NAMES))
    reason = "iteration 1 has completed its key exchange and admits no more devices"
    assert bench.admit(AdmitDevices(1, NAMES[:1])) == DevicesAdmitted(1, (), NAMES[:1], reason)
    assert bench.admit(AdmitDevices(2, NAMES[:1])).reason == "the round is not open"


def test_why_a_round_was_abandoned_is_said_in_full() -> None:
    few = Bench(plan=SECURE).form()
    sim = Masks(few)
    sim.keys(list(NAMES))
    sim.shares(list(NAMES))
    few.stand(1, round=1, totals=RoundTotals(2, 2))
    few.tick(3.0)
    assert few.machine.round.abandon_reason == "2 of 3 updates arrived within 2 s"
    lost = Bench(1).form(1)
    lost.stand(1, round=1, totals=RoundTotals(2))
    lost.stand(1, sealed=True, totals=RoundTotals())
    assert lost.machine.round.abandon_reason == "all its updates were on servers that were given up"
    record = next(e.record for e in Bench(plan=SECURE).form().out if isinstance(e, PersistFederation))
    assert resumed(record).machine.round.abandon_reason == "the scheduler ended before the list of uploaders was stored"


def test_what_takes_masks_off_is_told_when_it_is_time_to_add() -> None:
    bench, sim = begun()
    assert bench.stage() is RoundStage.UNMASKING and bench.orders().unmasking is None
    sim.reveal(list(NAMES))
    assert bench.stage() is RoundStage.SUMMING and bench.orders().unmasking is not None
    bench.stand(int(bench.orders().aggregator) + 1, aggregation_error="it does not fit")
    assert bench.orders().is_abandoned and bench.orders().unmasking is None


def test_a_plan_s_limits_are_the_secure_rounds() -> None:
    def made(**changed: object) -> SecaggRound:
        found = secagg_round(Bench(plan=msgspec.structs.replace(SECURE, **changed)).form())
        assert found.session == "c/1"
        return found

    assert (made()._devices_max, made()._updates_min, made()._equal_weights, made()._reconstruct_threshold) == (4, 3, False, 0)
    assert made(update_min=2)._updates_min == 2 and made(update_min=9)._updates_min == 3
    assert made(reconstruct=3)._reconstruct_threshold == 3 and made(share_ratio=0.5)._share_ratio == 0.5
    assert made(noise=Noise(local=False, clip=1.0, multiplier=1.0, delta=1e-5))._equal_weights
