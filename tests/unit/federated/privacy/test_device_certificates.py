"""Tests of device certificates and signatures."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.federated.privacy.certificates import Authority

from covey.core.federated.secagg.messages import KeyList, ListSignature, RemoteKeys
from covey.errors import PeerError, UsageError
from covey.federated import Device
from covey.federated.device.secagg_client import DeviceSignatures
from covey.federated.device_protocol import SecureAnswer
from covey.federated.privacy.device_certificates import (
    DeviceIdentity,
    DeviceTrust,
    encode_keys_to_sign,
    encode_list_to_sign,
    encode_request_to_sign,
    is_valid_signature,
)
from covey.federated.privacy.secagg_device_state import SecaggSession

FIRST, SECOND, UNTRUSTED = Authority("first"), Authority("second"), Authority("untrusted")
MAKER = Authority("maker", SECOND)


def verify(trust: DeviceTrust, identity: DeviceIdentity) -> str:
    name, key = trust.verify(identity.chain, datetime.now(UTC))
    message = encode_request_to_sign("/x", "n", "1", b"digest")
    assert is_valid_signature(key, identity.sign(message), message) and not is_valid_signature(
        key, identity.sign(message), message + b"!"
    )
    return name


def test_chain_of_either_root_or_intermediate_is_verified() -> None:
    trust = DeviceTrust([FIRST.pem, SECOND.pem])
    assert verify(trust, FIRST.device("a")) == "a"
    assert verify(trust, MAKER.device("b")) == "b" and len(MAKER.device("b").chain) == 2


def test_untrusted_expired_and_invalid_chains_are_refused() -> None:
    trust = DeviceTrust([FIRST.pem, SECOND.pem])
    with pytest.raises(ValueError, match="not issued by a trusted authority"):
        verify(trust, UNTRUSTED.device("a"))
    with pytest.raises(ValueError, match="expired or not valid yet"):
        verify(trust, FIRST.device("a", days=-1))
    device = FIRST.device("a")
    forged = MAKER.device("b")
    forged.chain = (forged.chain[0], device.chain[0])  # a device must not act as authority
    with pytest.raises(ValueError, match="not issued by a trusted authority"):
        verify(trust, forged)
    for chain in ((), device.chain * 4, (b"nonsense",)):
        with pytest.raises(ValueError, match="chain"):
            trust.verify(chain, datetime.now(UTC))


def test_revoked_certificate_and_expired_or_forged_crl_are_refused() -> None:
    bad, good = MAKER.device("bad"), MAKER.device("good")
    trust = DeviceTrust([FIRST.pem, SECOND.pem], [MAKER.revoked(bad), FIRST.revoked()])
    assert verify(trust, good) == "good"
    with pytest.raises(ValueError, match="bad was revoked"):
        verify(trust, bad)
    with pytest.raises(ValueError, match="out of date"):
        verify(DeviceTrust([SECOND.pem], [MAKER.revoked(days=-1)]), good)
    forger = Authority("maker")
    with pytest.raises(ValueError, match="not signed by it"):
        verify(DeviceTrust([SECOND.pem], [forger.revoked()]), good)


def test_signed_messages_of_different_purposes_differ() -> None:
    texts = [
        encode_request_to_sign("/a", "1", "2", b"d"),
        encode_request_to_sign("/a", "12", "", b"d"),
        encode_keys_to_sign("a", 1, b"c", b"s"),
        encode_list_to_sign("s", ["a", "b"]),
        encode_list_to_sign("s", ["ab"]),
    ]
    assert len(set(texts)) == len(texts)


def make_signatures(identity: DeviceIdentity | None) -> DeviceSignatures:
    asking = Device("http://127.0.0.1:1", "a", data_size=1, identity=identity, trust=DeviceTrust([FIRST.pem]))
    task: Any = SimpleNamespace(plan=SimpleNamespace(cipher=SimpleNamespace(signed=True)), iteration=3)
    return DeviceSignatures(asking, task)


def test_substituted_keys_and_lists_are_refused() -> None:
    with pytest.raises(UsageError, match="has pki_verify and secure rounds"):
        make_signatures(None)
    mine = make_signatures(FIRST.device("a"))
    others = [FIRST.device(name) for name in ("b", "c")]
    given = []
    for number, other in enumerate(others):
        session = SecaggSession(other.name)
        vouched = make_signatures(FIRST.device("a"))
        vouched._device.identity = other
        given.append(RemoteKeys(other.name, number, session.c_pk, session.s_pk, **vouched.sign_keys(session)))
    mine.verify_keys(tuple(given))
    swapped = msgspec.structs.replace(given[0], s_pk=SecaggSession("x").s_pk)
    with pytest.raises(PeerError, match="for b are not signed by it"):
        mine.verify_keys((swapped, given[1]))
    with pytest.raises(PeerError, match="not issued by a trusted authority"):
        mine.verify_keys((msgspec.structs.replace(given[0], certificate_chain=UNTRUSTED.device("b").chain),))
    keys, clients = KeyList("s", 2, 3, 3, 3, tuple(given)), ("a", "b", "c")
    right = [ListSignature(other.name, other.sign(encode_list_to_sign("s", clients))) for other in others]
    wrong = ListSignature("c", others[1].sign(encode_list_to_sign("s", ("a", "c"))))
    mine.verify_client_list(SecureAnswer(200, "", 0, client_list_sign=tuple(right)), keys, clients)
    with pytest.raises(PeerError, match="2 devices signed the list, and 3 are needed"):
        mine.verify_client_list(SecureAnswer(200, "", 0, client_list_sign=(right[0], wrong)), keys, clients)
