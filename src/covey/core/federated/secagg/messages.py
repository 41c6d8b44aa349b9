"""Messages of a secure round between devices, servers and scheduler, and records of the protocol.

Fields that MindSpore's protocol has too have MindSpore's names. Bytes are base64 in JSON and raw bytes in msgpack.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.federated.secagg import shamir
from covey.core.messages import Message, Sentence

DEVICE_ID_MAX = 200  # characters
DEVICES_MAX = 10_000  # of one secure round, so that their ids fit into one message
PUBLIC_KEY_BYTES = 32
SEALED_SHARE_BYTES = 2 * shamir.SHARE_BYTES + 16  # two shares and a tag

Signature = Annotated[bytes, Meta(max_length=1024)]
CertificateChain = Annotated[tuple[Annotated[bytes, Meta(max_length=4096)], ...], Meta(max_length=3)]
FlId = Annotated[str, Meta(min_length=1, max_length=DEVICE_ID_MAX)]
PublicKey = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
SealedShareBytes = Annotated[bytes, Meta(min_length=SEALED_SHARE_BYTES, max_length=SEALED_SHARE_BYTES)]
ShareBytes = Annotated[bytes, Meta(min_length=shamir.SHARE_BYTES, max_length=shamir.SHARE_BYTES)]
Milliseconds = Annotated[int, Meta(description="Milliseconds since 1970.")]
WaitMilliseconds = Annotated[int, Meta(ge=0, le=60_000, description="Time in ms by which the server may delay a refusal.")]


def min_count_for_share(count: int, share: float) -> int:
    """Return `count * share` rounded up, after rounding to 9 decimals: 100 and 0.55 give 55 in spite of the float error."""
    return math.ceil(round(count * share, 9))


class SecaggPhase(StrEnum):
    """Phase of a secure round; `scheduler_round` describes the phases."""

    KEYS = "keys"
    SHARES = "shares"
    UPDATES = "updates"
    UNMASKING = "unmasking"


class SecaggVerdict(StrEnum):
    """Result of a device's request in a secure round."""

    ACCEPTED = "taken"  # the payload, if there is one, is the requested data
    WAIT = "wait"  # not possible yet: the device must retry
    DONE = "done"  # the round is complete and has its model
    LATE = "late"  # no longer possible in this round
    INVALID = "wrong"  # not allowed in this phase or for this device, or with wrong content


# -- requests of devices ---------------------------------------------------------------------------------------------


class SecaggRequest(Message, frozen=True, kw_only=True):
    """Fields of every request of a device in a secure round."""

    fl_id: FlId
    iteration: int
    timestamp: Milliseconds
    data_size: int
    ticket: Annotated[str, Meta(max_length=64, description="From the reply to startFLJob.")]
    wait: WaitMilliseconds = 0


class ExchangeKeys(SecaggRequest, frozen=True, kw_only=True):
    """POST /exchangeKeys: this device's public keys for this round."""

    c_pk: Annotated[PublicKey, Meta(description="X25519, for shares.")]
    s_pk: Annotated[PublicKey, Meta(description="X25519, for masks.")]
    signature: Annotated[Signature, Meta(description="Of both keys, with pki_verify.")] = b""
    certificate_chain: CertificateChain = ()


class GetKeys(SecaggRequest, frozen=True):
    """POST /getKeys: request the keys of the device's neighbours."""


class SealedShare(msgspec.Struct, frozen=True):
    """Encrypted shares of two secrets of one device for another; `fl_id` is the receiver in requests, the sender in replies."""

    fl_id: FlId
    share: SealedShareBytes


class ShareSecrets(SecaggRequest, frozen=True, kw_only=True):
    """POST /shareSecrets: encrypted shares of this device's two secrets, one pair for each neighbour."""

    encrypted_shares: Annotated[tuple[SealedShare, ...], Meta(max_length=DEVICES_MAX)]


class GetSecrets(SecaggRequest, frozen=True):
    """POST /getSecrets: request the encrypted shares that neighbours made for this device."""


class GetClientList(SecaggRequest, frozen=True):
    """POST /getClientList: request the list of devices whose updates are in the sum."""


class PushListSign(SecaggRequest, frozen=True, kw_only=True):
    """POST /pushListSign: this device's signature of the list that it received (with pki_verify)."""

    signature: Signature


class GetListSign(SecaggRequest, frozen=True, kw_only=True):
    """POST /getListSign: request the neighbours' signatures of the list that /getClientList returned.

    The device may repeat its own signature, because a restarted scheduler has lost it.
    """

    signature: Signature = b""


class PlainShare(msgspec.Struct, frozen=True):
    """A share of one secret of device `fl_id`: of its seed if its update is in the sum, else of its key."""

    fl_id: FlId
    share: ShareBytes


class ReconstructSecrets(SecaggRequest, frozen=True, kw_only=True):
    """POST /reconstructSecrets: the shares, one of this device and of each neighbour, that remove the masks from the sum."""

    reconstruct_secret_shares: Annotated[tuple[PlainShare, ...], Meta(max_length=DEVICES_MAX)]


AnySecaggRequest = (
    ExchangeKeys | GetKeys | ShareSecrets | GetSecrets | GetClientList | PushListSign | GetListSign | ReconstructSecrets
)


# -- replies to devices ----------------------------------------------------------------------------------------------


class RemoteKeys(msgspec.Struct, frozen=True, omit_defaults=True):
    """Public keys of a neighbour."""

    fl_id: FlId
    index: Annotated[
        int, Meta(description="Its index on the ring. Of two devices, the one with the lower index adds their mask.")
    ]
    c_pk: PublicKey
    s_pk: PublicKey
    signature: Signature = b""
    certificate_chain: CertificateChain = ()


class KeyList(Message, frozen=True):
    """Reply to getKeys: the keys of the device's neighbours, and parameters of the round."""

    session: str  # unique to the round
    index: int  # of this device on the ring
    needed: int  # shares that reconstruct a secret
    devices: int  # on the ring
    samples: int  # sum of the weights of all devices on the ring
    remote_publickeys: tuple[RemoteKeys, ...]


class ShareList(Message, frozen=True):
    """Reply to getSecrets: the shares from the neighbours that shared; the device masks its update with exactly these."""

    encrypted_shares: tuple[SealedShare, ...]


class ClientList(Message, frozen=True):
    """Reply to getClientList: the devices whose updates are in the sum; the same list for the whole round."""

    clients: tuple[FlId, ...]


class ListSignature(msgspec.Struct, frozen=True):
    """Signature, by device `fl_id`, of the list of devices that it received."""

    fl_id: FlId
    signature: Signature


class SignatureList(Message, frozen=True):
    """Reply to getListSign: signatures of the list by the device and its neighbours, as many as have arrived."""

    client_list_sign: tuple[ListSignature, ...]


SecaggPayload = KeyList | ShareList | ClientList | SignatureList


class SecaggForward(Message, frozen=True):
    """Server to scheduler: a device's request in this round. The reply is the `SecaggReply` with the same serial."""

    serial: int
    round: int
    request: AnySecaggRequest


class SecaggReply(Message, frozen=True):
    """Scheduler to server: reply to the `SecaggForward` with this serial."""

    serial: int
    verdict: SecaggVerdict
    reason: Sentence = ""
    payload: SecaggPayload | None = None


# -- records ---------------------------------------------------------------------------------------------------------


class DeviceKeys(msgspec.Struct, frozen=True):
    """Keys and weight of a device, from its exchangeKeys."""

    c_pk: bytes
    s_pk: bytes
    data_size: int  # weight: its samples, or 1 if all devices have equal weights
    signature: bytes = b""
    certificate_chain: tuple[bytes, ...] = ()


class UploaderList(msgspec.Struct, frozen=True):
    """List of the devices whose updates are in the sum (`clients`), and the parameters for unmasking.

    The scheduler stores it before devices receive it.
    """

    session: str
    needed: int  # shares that reconstruct a secret
    samples: int  # sum of the weights of all devices on the ring
    ring: tuple[str, ...]
    degree: int  # neighbours of each device
    s_pks: dict[str, bytes]  # of the devices that shared their secrets
    clients: tuple[str, ...]


class UnmaskingSecrets(msgspec.Struct, frozen=True):
    """Reconstructed secrets of the devices that shared, by which the aggregator removes the masks from the sum."""

    uploaders: UploaderList
    seeds: dict[str, bytes]  # of the devices in the sum
    keys: dict[str, bytes]  # of the devices that shared and then dropped out
