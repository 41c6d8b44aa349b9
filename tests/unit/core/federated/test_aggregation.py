"""Tests of plain and secure aggregation."""

from __future__ import annotations

from covey.core.federated.aggregation import (
    Abandon,
    Aggregation,
    SecureAggregation,
    Unmask,
    make_aggregation,
)
from covey.core.federated.messages import RoundPlan, ServerStatus
from covey.core.federated.secagg.messages import (
    ExchangeKeys,
    GetKeys,
    SecaggPhase,
    SecaggVerdict,
    UnmaskingSecrets,
    UploaderList,
)
from covey.core.federated.secagg.scheduler_round import SecaggOutcome, SecaggRound

SECURE = RoundPlan(threshold=3, secure=True, cipher_window_s=5.0)


def keys(device: str) -> ExchangeKeys:
    name = device.encode()
    return ExchangeKeys(fl_id=device, iteration=1, timestamp=0, data_size=1, ticket="", c_pk=name * 32, s_pk=name * 32)


def with_list(*devices: str) -> SecureAggregation:
    """Return a secure aggregation in its unmasking phase, with these uploaders."""
    uploaders = UploaderList("c/1", 1, 1, devices, 0, dict.fromkeys(devices, b"k"), devices)
    return SecureAggregation(SecaggRound.resume(uploaders, 5.0, 0.0))


def test_plain_aggregation_admits_devices_and_adds_sealed_parts() -> None:
    plain: Aggregation = make_aggregation(RoundPlan(), "c/1")
    assert plain.admits_devices
    assert plain.secagg_round is None
    assert plain.check_deadline(1e9) == plain.on_window_missed("too few") == ""
    assert plain.on_all_sealed([ServerStatus(aggregation_error="ignored")], 0.0) is None
    assert plain.handle_request(keys("a"), is_admitted=True, now=0.0) is None


def test_secure_aggregation_admits_devices_until_key_exchange_ends() -> None:
    secure = make_aggregation(SECURE, "c/1")
    assert secure.admits_devices and secure.secagg_round is not None
    refusal = SecaggOutcome(SecaggVerdict.LATE, "this device was not admitted to the round: call startFLJob first")
    assert secure.handle_request(keys("x"), is_admitted=False, now=0.0) == refusal
    for device in "abc":
        secure.handle_request(keys(device), is_admitted=True, now=0.0)
    assert not secure.admits_devices and secure.secagg_round.phase is SecaggPhase.SHARES
    request = GetKeys(fl_id="a", iteration=1, timestamp=0, data_size=1, ticket="")
    outcome = secure.handle_request(request, is_admitted=False, now=0.0)
    assert outcome is not None and outcome.verdict is SecaggVerdict.ACCEPTED, "a restarted scheduler has no admissions"


def test_missed_window_fails_secure_round_only_after_key_exchange() -> None:
    secure = make_aggregation(SECURE, "c/1")
    assert secure.on_window_missed("too few") == ""
    for device in "abc":
        secure.handle_request(keys(device), is_admitted=True, now=0.0)
    assert secure.on_window_missed("too few") == "too few" == secure.check_deadline(0.0)


def test_phase_timeout_fails_secure_round() -> None:
    secure = make_aggregation(SECURE, "c/1")
    secure.handle_request(keys("a"), is_admitted=True, now=1.0)
    assert secure.check_deadline(5.9) == ""
    assert secure.check_deadline(6.0) == "1 devices sent keys within 5 s, and 3 are needed"


def test_sealed_parts_are_unmasked_before_summing() -> None:
    secure = with_list("a", "b")
    sealed = [ServerStatus(counted_devices=("a",)), ServerStatus(counted_devices=("b",))]
    assert secure.on_all_sealed(sealed, 0.0) == Unmask(is_new_list=False), "a resumed list is already stored"
    assert secure.secagg_round.uploaders is not None
    secure.secagg_round.unmasking = UnmaskingSecrets(secure.secagg_round.uploaders, {}, {})
    assert secure.on_all_sealed(sealed, 0.0) is None


def test_parts_of_other_devices_or_aggregation_error_abandon_round() -> None:
    verdict = with_list("a", "b").on_all_sealed([ServerStatus(counted_devices=("a",))], 0.0)
    assert verdict == Abandon("the sealed parts differ from the list of uploaders that devices received")
    failed = [ServerStatus(counted_devices=("a", "b")), ServerStatus(aggregation_error="a key does not fit")]
    assert with_list("a", "b").on_all_sealed(failed, 0.0) == Abandon("a key does not fit")
