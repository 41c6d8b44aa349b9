"""Tests of secure aggregation without a network: masks, dropouts in every phase, refused requests."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.documents import ROOT
from tests.unit.core.federated.secagg.secure_devices import REACH, SecaggSimulation

from covey.core.federated.secagg import messages, neighbor_graph, shamir
from covey.core.federated.secagg.scheduler_round import SecaggRound
from covey.errors import PeerError, UsageError
from covey.federated.privacy import fixed_point_ring, secagg_crypto
from covey.federated.privacy.fixed_point_ring import DeviceMetrics
from covey.federated.privacy.secagg_device_state import SecaggSession, make_round_scale
from covey.federated.simulation.privacy_pipeline import PrivacyOptions
from covey.federated.simulation.simulator import simulate
from covey.federated.strategies import FedAvg

VECTORS = ROOT / "tests" / "vectors" / "secure.json"


@given(st.integers(1, 50), st.integers(1, 2**20), st.floats(0.001, 1000))
def test_sum_of_extreme_updates_does_not_overflow(devices: int, samples: int, reach: float) -> None:
    """Every device sends the greatest allowed value, with the same sign."""
    scale = fixed_point_ring.make_scale(reach, devices * samples, devices)
    edge = np.array([np.float32(reach)], np.float32)
    edge = np.minimum(edge, np.nextafter(np.float32(reach), np.float32(0)))
    one = fixed_point_ring.encode_update(edge, DeviceMetrics(1.0, 1024.0), samples, scale)
    total = np.zeros_like(one)
    for _ in range(devices):
        total += one
    values, told = fixed_point_ring.decode_sum(total, scale)
    assert values[0] == pytest.approx(float(edge[0]) * samples * devices, abs=devices / scale.value_factor)
    assert told.loss == pytest.approx(1024.0 * samples * devices, abs=devices / scale.metric_factor)


@pytest.mark.parametrize("value", [16.5, -16.5, float("nan"), float("inf")])
def test_values_out_of_reach_are_refused(value: float) -> None:
    with pytest.raises(UsageError, match="nothing was sent"):
        fixed_point_ring.encode_update(
            np.array([1.0, value], np.float32), DeviceMetrics(), 5, fixed_point_ring.make_scale(REACH, 100, 10)
        )


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(4, 9))
def test_dropouts_in_any_phase_leave_exact_sum_or_failure_reason(data: st.DataObject, count: int) -> None:
    """Any devices may drop out in each phase. With enough left the sum is exact, else the round fails with a reason."""
    sim = SecaggSimulation(count, seed=count)

    def some(names: list[str]) -> list[str]:
        kept: list[str] = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True))
        return kept

    keyed = some(sim.names)
    sim.keys(keyed)
    if len(keyed) < 3:
        return  # devices refuse a round of fewer than 3
    sharing = some(keyed)
    sim.shares(sharing)
    needed = neighbor_graph.default_share_threshold(len(keyed))
    if len(sharing) < needed:
        with pytest.raises(PeerError, match="shared secrets"):
            sim.upload(sharing)
        return
    sending = some(sharing)
    sim.upload(sending)
    if len(sending) < needed:
        assert "are needed for unmasking" in sim.round.failure_reason and sim.round.uploaders is None
        return
    revealing = some(sending)
    sim.reveal(revealing)
    if len(revealing) < needed:
        assert f"{needed} are needed" in sim.round.failure_reason and sim.round.unmasking is None
        return
    assert np.array_equal(sim.unmasked(), sim.plain)
    values, told = fixed_point_ring.decode_sum(sim.unmasked(), make_round_scale(sim.sessions[sending[0]].keys, REACH))
    wanted = sum(sim.values[name].astype(float) * sim.sizes[name] for name in sending)
    assert values == pytest.approx(wanted, abs=1e-4)
    assert told.loss == pytest.approx(0.5 * sum(sim.sizes[name] for name in sending), abs=1e-2)


def test_large_round_uses_sparse_graph_and_sum_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [neighbor_graph.choose_degree(count) for count in (100, 200, 1000, 10_000)] == [99, 199, 78, 96]
    monkeypatch.setattr(neighbor_graph, "choose_degree", lambda count: 10)
    sim = SecaggSimulation(40)
    sim.keys(sim.names)
    assert len(sim.round._build_key_list("device-0").remote_publickeys) == 10
    sim.shares(sim.names)
    gone = sim.round._ring[3], sim.round._ring[20]
    sending = [name for name in sim.names if name not in gone]
    sim.upload(sending)
    sim.reveal(sending)
    assert np.array_equal(sim.unmasked(), sim.plain)


@given(st.integers(2, 60), st.integers(1, 30))
def test_ring_neighbors_are_symmetric(size: int, half: int) -> None:
    names = [str(number) for number in range(size)]
    near = [neighbor_graph.ring_neighbors(names, place, 2 * half) for place in range(size)]
    assert all(place in near[other] for place in range(size) for other in near[place])
    assert all(len(found) == min(2 * half, size - 1) and place not in found for place, found in enumerate(near))


def test_masked_upload_is_uniformly_distributed() -> None:
    """The same values, masked in two rounds, look like noise both times."""
    first, second = SecaggSimulation(3, 4000), SecaggSimulation(3, 4000)
    for sim in (first, second):
        sim.values = {name: np.zeros(4000, np.float32) for name in sim.names}
        sim.keys(sim.names)
        sim.shares(sim.names)
        sim.upload(sim.names)
        counts = np.bincount(sim.uploads["device-0"].view(np.uint8), minlength=256)
        assert counts.min() > 30, "every byte value occurs about 62 times"
    assert (first.uploads["device-0"] != second.uploads["device-0"]).mean() > 0.99


def test_session_reveals_shares_for_one_list_only() -> None:
    sim = SecaggSimulation(5)
    sim.keys(sim.names)
    sim.shares(sim.names)
    sim.upload(sim.names)
    one = sim.sessions["device-0"]
    all_names = tuple(sim.names)
    told = one.reveal_shares(all_names)
    assert one.reveal_shares(all_names) == told, "the same list may be requested again"
    with pytest.raises(PeerError, match="second list"):
        one.reveal_shares(all_names[:4])


def test_session_refuses_unsafe_lists_and_thresholds() -> None:
    sim = SecaggSimulation(6)
    sim.keys(sim.names)
    sim.shares(sim.names)
    sim.upload(sim.names)
    one = sim.sessions["device-0"]
    with pytest.raises(PeerError, match="lacks this device"):
        one.reveal_shares(tuple(sim.names[1:]))
    with pytest.raises(PeerError, match="are needed: no share was sent"):
        one.reveal_shares(tuple(sim.names[:3]))
    keys = one.keys
    for wrong in (3, 7):
        with pytest.raises(PeerError, match="expected more than half"):
            SecaggSession("device-0").make_shares(
                messages.KeyList("s", keys.index, wrong, keys.devices, keys.samples, keys.remote_publickeys)
            )
    low = (
        *keys.remote_publickeys[:4],
        messages.RemoteKeys("x", 9, bytes(32), bytes(32)),
    )  # a low-order point is not a valid key
    with pytest.raises(PeerError, match="the keys of x are invalid"):
        SecaggSession("device-0").make_shares(messages.KeyList("s", keys.index, 4, keys.devices, keys.samples, low))
    twice = (*keys.remote_publickeys[:4], messages.RemoteKeys("device-0", 1, one.c_pk, one.s_pk))
    with pytest.raises(PeerError, match="twice"):
        SecaggSession("device-0").make_shares(messages.KeyList("s", keys.index, 4, keys.devices, keys.samples, twice))


def test_sealed_shares_open_only_for_receiver_and_unmodified() -> None:
    sim = SecaggSimulation(4)
    sim.keys(sim.names)
    sim.shares(sim.names)
    shares = sim.request(messages.GetSecrets, "device-1").payload
    with pytest.raises(PeerError, match="were not made by it"):
        sim.sessions["device-2"].accept_shares(shares)  # type: ignore[arg-type]
    a, b = bytes(range(32)), bytes(range(32, 64))
    sealed = bytearray(secagg_crypto.seal_shares(b"x" * 66, a, secagg_crypto.derive_public_key(b), "s", "a", "b"))
    assert secagg_crypto.unseal_shares(bytes(sealed), b, secagg_crypto.derive_public_key(a), "s", "a", "b") == b"x" * 66
    for wrong in (("t", "a", "b"), ("s", "b", "a")):
        with pytest.raises(ValueError, match="were not made"):
            secagg_crypto.unseal_shares(bytes(sealed), b, secagg_crypto.derive_public_key(a), *wrong)
    sealed[3] ^= 1
    with pytest.raises(ValueError, match="were not made"):
        secagg_crypto.unseal_shares(bytes(sealed), b, secagg_crypto.derive_public_key(a), "s", "a", "b")


def test_uploader_list_is_fixed_and_resumed_round_continues_from_it() -> None:
    sim = SecaggSimulation(6)
    sim.keys(sim.names)
    sim.shares(sim.names)
    sim.upload(sim.names[1:])
    kept = sim.round.uploaders
    assert kept is not None
    sim.round = SecaggRound.resume(kept, 10.0, sim.now)
    assert sim.round.fix_uploaders(set(sim.names[1:]), sim.now) == kept and not sim.round.failure_reason
    assert sim.request(messages.GetKeys, sim.names[0]).verdict is messages.SecaggVerdict.LATE, "a resumed round has no keys"
    sim.reveal(sim.names[1:])
    assert np.array_equal(sim.unmasked(), sim.plain)
    other = SecaggRound.resume(kept, 10.0, sim.now)
    other.fix_uploaders(set(sim.names[2:]), sim.now)
    assert "differ from the list" in other.failure_reason


def test_requests_out_of_order_or_of_unknown_devices_are_rejected() -> None:
    sim = SecaggSimulation(4)
    assert sim.request(messages.GetSecrets, "device-0").verdict is messages.SecaggVerdict.WAIT
    sim.keys(sim.names)
    assert sim.request(messages.ShareSecrets, "device-0", encrypted_shares=()).verdict is messages.SecaggVerdict.INVALID
    sim.shares(sim.names[1:])
    assert sim.request(messages.ShareSecrets, "device-0", encrypted_shares=()).verdict is messages.SecaggVerdict.LATE
    assert sim.request(messages.GetSecrets, "device-0").verdict is messages.SecaggVerdict.LATE
    assert (
        sim.request(messages.ReconstructSecrets, "device-1", reconstruct_secret_shares=()).verdict
        is messages.SecaggVerdict.INVALID
    )
    sim.upload(sim.names[1:])
    share = (messages.PlainShare("device-1", bytes(33)),)
    assert (
        sim.request(messages.ReconstructSecrets, "device-1", reconstruct_secret_shares=share).verdict
        is messages.SecaggVerdict.INVALID
    )
    sim.sizes["unknown"] = 1
    assert sim.request(messages.GetSecrets, "unknown").verdict is messages.SecaggVerdict.LATE


def test_only_listed_devices_sign_and_signatures_are_sent_when_enough() -> None:
    sim = SecaggSimulation(4)
    sim.keys(sim.names)
    sim.shares(sim.names)
    assert sim.request(messages.GetClientList, "device-1").verdict is messages.SecaggVerdict.WAIT
    assert sim.request(messages.PushListSign, "device-1", signature=b"early").verdict is messages.SecaggVerdict.INVALID
    sim.upload(sim.names[1:])
    assert sim.request(messages.GetClientList, "device-0").verdict is messages.SecaggVerdict.LATE
    assert sim.request(messages.PushListSign, "device-0", signature=b"not on it").verdict is messages.SecaggVerdict.INVALID
    needed = sim.round._shares_needed
    for name in sim.names[1:needed]:
        assert sim.request(messages.PushListSign, name, signature=name.encode()).verdict is messages.SecaggVerdict.ACCEPTED
    assert sim.request(messages.GetListSign, "device-1").verdict is messages.SecaggVerdict.WAIT, "one signature is missing"
    said = sim.request(messages.GetListSign, sim.names[needed], signature=b"the last")
    assert isinstance(said.payload, messages.SignatureList) and len(said.payload.client_list_sign) == needed


def test_round_fails_with_too_few_keys_shares_or_updates() -> None:
    few = SecaggSimulation(4, least=3)
    few.keys(few.names[:2])
    assert few.round.failure_reason == "2 devices sent keys within 10 s, and 3 are needed"
    late = SecaggSimulation(4)
    assert late.request(messages.ShareSecrets, "device-0", encrypted_shares=()).verdict is messages.SecaggVerdict.INVALID, (
        "shares must follow the key exchange"
    )
    late.keys(late.names)
    late.shares(late.names)
    late.round.tick(late.now + 20.0)
    assert late.round.failure_reason == "the updates did not arrive within 10 s"
    strange = SecaggSimulation(4)
    strange.keys(strange.names)
    strange.shares(strange.names[1:])
    assert strange.round.fix_uploaders({"device-0"}, 0.0) is None
    assert strange.round.failure_reason == "1 update from devices that shared no secrets"
    alone = SecaggSimulation(4, least=3)
    alone.keys(alone.names)
    alone.shares(alone.names)
    assert alone.round.fix_uploaders({"device-0"}, 0.0) is None
    assert alone.round.failure_reason == "1 update arrived, and 3 are needed for unmasking"


def test_invalid_revealed_share_fails_round() -> None:
    sim = SecaggSimulation(3, reconstruct=3)
    sim.keys(sim.names)
    sim.shares(sim.names)
    sim.upload(sim.names)
    for number, name in enumerate(sim.names):
        told = sim.sessions[name].reveal_shares(sim.round.uploaders.clients)  # type: ignore[union-attr]
        wrong = tuple(messages.PlainShare(one.fl_id, b"\xff" * 33) for one in told) if number == 2 else told
        assert (
            sim.request(messages.ReconstructSecrets, name, reconstruct_secret_shares=wrong).verdict
            is messages.SecaggVerdict.ACCEPTED
        )
    assert sim.round.failure_reason == "the secret of a device cannot be reconstructed: a share is not an element of the field"


def test_restarted_device_may_replace_keys_until_key_exchange_ends() -> None:
    sim = SecaggSimulation(3)
    sim.keys(sim.names[:2])
    sim.round.phase = messages.SecaggPhase.KEYS  # as if its window had not ended
    sim.sessions["device-0"] = SecaggSession("device-0")
    sim.keys([*sim.names[:1], *sim.names[2:]])
    given = sim.round._build_key_list("device-1").remote_publickeys
    assert sim.sessions["device-0"].s_pk in {one.s_pk for one in given} and len(given) == 2
    again = SecaggSession("device-0")
    assert (
        sim.request(messages.ExchangeKeys, "device-0", c_pk=again.c_pk, s_pk=again.s_pk).verdict is messages.SecaggVerdict.LATE
    )


def test_unmasking_with_wrong_key_of_dropped_device_raises() -> None:
    sim = SecaggSimulation(6)
    sim.keys(sim.names)
    sim.shares(sim.names)
    sim.upload(sim.names[1:])
    sim.reveal(sim.names[1:])
    assert sim.round.unmasking is not None
    sim.round.unmasking.keys["device-0"] = bytes(32)
    with pytest.raises(ValueError, match="is not its own"):
        sim.unmasked()


def test_implementation_matches_published_vectors() -> None:
    found = json.loads(VECTORS.read_text())
    raw = {name: base64.b64decode(value) for name, value in found["bytes"].items()}
    session = found["session"]
    assert secagg_crypto.derive_public_key(raw["private_a"]) == raw["public_a"]
    assert secagg_crypto.agree_secret(raw["private_a"], raw["public_b"]) == secagg_crypto.agree_secret(
        raw["private_b"], raw["public_a"]
    )
    assert secagg_crypto.agree_secret(raw["private_a"], raw["public_b"]) == raw["agreed"]
    assert secagg_crypto.make_pair_mask(raw["private_a"], raw["public_b"], session, 5).tolist() == found["pair_mask"]
    assert secagg_crypto.make_self_mask(raw["seed"], session, 5).tolist() == found["self_mask"]
    assert secagg_crypto.seal_shares(raw["shares"], raw["private_a"], raw["public_b"], session, "ä", "b") == raw["sealed"]
    assert raw["public_a"] != raw["public_b"]
    split = shamir.split_secret(raw["seed"], found["places"], [int(number) for number in found["coefficients"]])
    assert {str(place): base64.b64encode(share).decode() for place, share in split.items()} == found["split"]
    scale = fixed_point_ring.make_scale(found["reach"], found["samples"], found["devices"])
    assert list(scale) == found["units"]
    words = fixed_point_ring.encode_update(
        np.array(found["values"], np.float32), DeviceMetrics(*found["told"]), found["weight"], scale
    )
    assert words.tolist() == found["words"]


def test_simulated_secure_federation_matches_plain_accuracy() -> None:
    plain = list(simulate(6, 2, FedAvg(), epochs=1))
    masked = list(simulate(6, 2, FedAvg(), epochs=1, treatment=PrivacyOptions(secure=True)))
    assert [one.accuracy for one in masked] == pytest.approx([one.accuracy for one in plain], abs=0.003)
