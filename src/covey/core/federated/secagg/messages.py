"""What is said in a secure round: by devices, by the server that relays it, by the scheduler; and what is kept of it.

The fields' names are MindSpore's. Bytes are base64 in JSON and themselves in msgpack.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.federated.secagg import shamir
from covey.core.messages import Message, Sentence

DEVICE_ID_MAX = 200
DEVICES_MAX = 10_000  # of one secure round: their names fit into one message
PUBLIC_KEY_BYTES = 32
SEALED_SHARE_BYTES = 2 * shamir.SHARE_BYTES + 16  # two shares and a tag

Signature = Annotated[bytes, Meta(max_length=1024)]
CertificateChain = Annotated[tuple[Annotated[bytes, Meta(max_length=4096)], ...], Meta(max_length=3)]
FlId = Annotated[str, Meta(min_length=1, max_length=DEVICE_ID_MAX)]
PublicKey = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
SealedShareBytes = Annotated[bytes, Meta(min_length=SEALED_SHARE_BYTES, max_length=SEALED_SHARE_BYTES)]
ShareBytes = Annotated[bytes, Meta(min_length=shamir.SHARE_BYTES, max_length=shamir.SHARE_BYTES)]
Milliseconds = Annotated[int, Meta(description="Milliseconds since 1970.")]
WaitMilliseconds = Annotated[int, Meta(ge=0, le=60_000, description="How long the server may wait for a better answer, in ms.")]


def min_count_for_share(count: int, share: float) -> int:
    """How many are at least this share of so many: 55 are 0.55 of 100, though the product of the floats is a little more."""
    return math.ceil(round(count * share, 9))


class SecaggPhase(StrEnum):
    """Where a secure round stands."""

    KEYS = "keys"
    SHARES = "shares"
    UPDATES = "updates"
    UNMASKING = "unmasking"


class SecaggVerdict(StrEnum):
    """What becomes of a request."""

    ACCEPTED = "taken"
    WAIT = "wait"  # nothing is wrong: ask again
    DONE = "done"  # the round is over, and has its model
    LATE = "late"  # not in this round any more
    INVALID = "wrong"


# -- what devices say ------------------------------------------------------------------------------------------------


class SecaggRequest(Message, frozen=True, kw_only=True):
    """What every request of a secure round says."""

    fl_id: FlId
    iteration: int
    timestamp: Milliseconds
    data_size: int
    ticket: Annotated[str, Meta(max_length=64, description="From the answer to startFLJob.")]
    wait: WaitMilliseconds = 0


class ExchangeKeys(SecaggRequest, frozen=True, kw_only=True):
    """POST /exchangeKeys: this device's public keys for this round."""

    c_pk: Annotated[PublicKey, Meta(description="X25519, for shares.")]
    s_pk: Annotated[PublicKey, Meta(description="X25519, for masks.")]
    signature: Annotated[Signature, Meta(description="Of both keys, with pki_verify.")] = b""
    certificate_chain: CertificateChain = ()


class GetKeys(SecaggRequest, frozen=True):
    """POST /getKeys: the keys of those to mask with."""


class SealedShare(msgspec.Struct, frozen=True):
    """Shares of two secrets on their way to (or from) a device."""

    fl_id: FlId
    share: SealedShareBytes


class ShareSecrets(SecaggRequest, frozen=True, kw_only=True):
    """POST /shareSecrets: a share for each neighbour."""

    encrypted_shares: Annotated[tuple[SealedShare, ...], Meta(max_length=DEVICES_MAX)]


class GetSecrets(SecaggRequest, frozen=True):
    """POST /getSecrets: the shares that neighbours made for this device."""


class GetClientList(SecaggRequest, frozen=True):
    """POST /getClientList: whose updates are in the sum."""


class PushListSign(SecaggRequest, frozen=True, kw_only=True):
    """POST /pushListSign: this device was given that list (with pki_verify)."""

    signature: Signature


class GetListSign(SecaggRequest, frozen=True, kw_only=True):
    """POST /getListSign: which others were given the same. Its own signature comes again, for a scheduler that lost it."""

    signature: Signature = b""


class PlainShare(msgspec.Struct, frozen=True):
    """A share of one of a device's secrets: of its seed if its update is in the sum, else of its key."""

    fl_id: FlId
    share: ShareBytes


class ReconstructSecrets(SecaggRequest, frozen=True, kw_only=True):
    """POST /reconstructSecrets: the shares that take the masks off."""

    reconstruct_secret_shares: Annotated[tuple[PlainShare, ...], Meta(max_length=DEVICES_MAX)]


AnySecaggRequest = (
    ExchangeKeys | GetKeys | ShareSecrets | GetSecrets | GetClientList | PushListSign | GetListSign | ReconstructSecrets
)


# -- what they are told ----------------------------------------------------------------------------------------------


class RemoteKeys(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another device's keys."""

    fl_id: FlId
    index: Annotated[int, Meta(description="Its place: of two devices the one with the lower adds their mask.")]
    c_pk: PublicKey
    s_pk: PublicKey
    signature: Signature = b""
    certificate_chain: CertificateChain = ()


class KeyList(Message, frozen=True):
    """With whom to mask, and the round's numbers."""

    session: str
    index: int
    needed: int  # shares that give a secret back
    devices: int  # on the whole ring
    samples: int  # of all of them
    remote_publickeys: tuple[RemoteKeys, ...]


class ShareList(Message, frozen=True):
    """Shares from those neighbours that shared: the ones to mask with."""

    encrypted_shares: tuple[SealedShare, ...]


class ClientList(Message, frozen=True):
    """Whose updates are in the sum. It never changes."""

    clients: tuple[FlId, ...]


class ListSignature(msgspec.Struct, frozen=True):
    """That a device was given the list."""

    fl_id: FlId
    signature: Signature


class SignatureList(Message, frozen=True):
    """Who else was given the list, in their own hand."""

    client_list_sign: tuple[ListSignature, ...]


SecaggPayload = KeyList | ShareList | ClientList | SignatureList


class SecaggForward(Message, frozen=True):
    """A server: a device of this round says this."""

    serial: int
    round: int
    request: AnySecaggRequest


class SecaggReply(Message, frozen=True):
    """The scheduler: this is the answer."""

    serial: int
    verdict: SecaggVerdict
    reason: Sentence = ""
    payload: SecaggPayload | None = None


# -- what is kept and handed on --------------------------------------------------------------------------------------


class DeviceKeys(msgspec.Struct, frozen=True):
    """What a device gave."""

    c_pk: bytes
    s_pk: bytes
    data_size: int
    signature: bytes = b""
    certificate_chain: tuple[bytes, ...] = ()


class UploaderList(msgspec.Struct, frozen=True):
    """The list, with all that is needed to go on from it. Kept before anyone is asked to unmask."""

    session: str
    needed: int
    samples: int
    ring: tuple[str, ...]
    degree: int
    s_pks: dict[str, bytes]  # of those that shared
    clients: tuple[str, ...]


class UnmaskingSecrets(msgspec.Struct, frozen=True):
    """What takes the masks off the sum."""

    uploaders: UploaderList
    seeds: dict[str, bytes]  # of those in the sum
    keys: dict[str, bytes]  # of those that shared and dropped out
