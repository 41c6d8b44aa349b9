"""A device's part in a secure round: `SecaggSession` decides what is said, the server's paths carry it.

Whatever ends a round early (a phase that closed, a round that was abandoned) is no error: the device joins the next one. What
a server must never ask for is one, and nothing is sent.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from covey.core.federated.secagg.messages import (
    ExchangeKeys,
    GetClientList,
    GetKeys,
    GetListSign,
    GetSecrets,
    KeyList,
    PushListSign,
    ReconstructSecrets,
    RemoteKeys,
    ShareList,
    ShareSecrets,
)
from covey.errors import PeerError, UsageError
from covey.federated.model_codec import MASKED_TENSOR, Floats
from covey.federated.privacy import fixed_point_ring
from covey.federated.privacy.device_identity import PublicKey, encode_keys_to_sign, encode_list_to_sign, is_valid_signature
from covey.federated.privacy.dp_noise import clip_update
from covey.federated.privacy.fixed_point_ring import DeviceMetrics
from covey.federated.privacy.secagg_session import SecaggSession, make_round_scale
from covey.federated.protocol import Code, SecureAnswer, now_ms

if TYPE_CHECKING:
    from covey.federated.device.client import Device, Task

LONG_POLL_MS = 20_000


class RoundMissed(Exception):
    """The round goes on without this device, or not at all."""


def send_masked_update(device: Device, task: Task, change: Floats, told: DeviceMetrics) -> bool:
    """Take part with this difference to the model; True once it is in the model, False if the round went on without it."""
    try:
        _run_secagg_round(device, task, change, told)
    except RoundMissed:
        return False
    return True


def _run_secagg_round(device: Device, task: Task, change: Floats, told: DeviceMetrics) -> None:
    session, cipher, weight = SecaggSession(device.fl_id), task.plan.cipher, device.data_size
    if cipher.noise is not None:  # the servers cannot: they never see it
        change, told, weight = clip_update(change, cipher.noise.clip), DeviceMetrics(), 1
    fixed_point_ring.check_reach(change, cipher.reach)  # before others wait for this device

    def ask(path: str, kind: Any, **fields: Any) -> SecureAnswer:
        return _request_until_decided(device, task, path, kind, fields)

    names = DeviceSignatures(device, task)
    ask("exchangeKeys", ExchangeKeys, c_pk=session.c_pk, s_pk=session.s_pk, **names.sign_keys(session))
    listed = ask("getKeys", GetKeys)
    names.verify_keys(listed.remote_publickeys)
    keys = KeyList(listed.session, listed.index, listed.needed, listed.devices, listed.samples, listed.remote_publickeys)
    words = fixed_point_ring.encode_update(change, told, weight, make_round_scale(keys, cipher.reach))
    ask("shareSecrets", ShareSecrets, encrypted_shares=session.make_shares(keys))
    shares = ask("getSecrets", GetSecrets)
    session.accept_shares(ShareList(shares.encrypted_shares))
    hidden = session.mask_update(words)
    fields = {**task.update_metadata, "ticket": shares.ticket}
    if not device.update({MASKED_TENSOR: hidden}, fields):
        raise RoundMissed
    listed = ask("getClientList", GetClientList)
    if not listed.done:
        if names.is_required:
            signature = names.sign_client_list(keys.session, listed.clients)
            ask("pushListSign", PushListSign, signature=signature)
            names.verify_client_list(ask("getListSign", GetListSign, signature=signature), keys, listed.clients)
        ask("reconstructSecrets", ReconstructSecrets, reconstruct_secret_shares=session.reveal_shares(listed.clients))


class DeviceSignatures:
    """Who the other devices are, where they have certificates: an operator cannot put keys or lists of its own between."""

    def __init__(self, device: Device, task: Task) -> None:
        self.is_required = task.plan.cipher.signed
        self._iteration = task.iteration
        self._device = device
        self._verified_keys: dict[str, PublicKey] = {}
        if self.is_required and (device.identity is None or device.trust is None):
            raise UsageError("devices sign for each other here (pki_verify): give Device(identity=..., trust=...)")

    def sign_keys(self, session: SecaggSession) -> dict[str, Any]:
        """This device's keys in its own hand."""
        identity = self._device.identity
        if not self.is_required or identity is None:
            return {}
        said = encode_keys_to_sign(session.fl_id, self._iteration, session.c_pk, session.s_pk)
        return {"signature": identity.sign(said), "certificate_chain": identity.chain}

    def verify_keys(self, others: tuple[RemoteKeys, ...]) -> None:
        """That keys are those of devices, not of a server."""
        if not self.is_required or self._device.trust is None:
            return
        for other in others:
            try:
                name, key = self._device.trust.verify(other.certificate_chain, datetime.now(UTC))
            except ValueError as error:
                raise PeerError(f"{error}: nothing was sent") from None
            said = encode_keys_to_sign(other.fl_id, self._iteration, other.c_pk, other.s_pk)
            if name != other.fl_id or not is_valid_signature(key, other.signature, said):
                raise PeerError(f"the keys that the server gave for {other.fl_id} are not signed by it: nothing was sent")
            self._verified_keys[name] = key

    def sign_client_list(self, session: str, clients: tuple[str, ...]) -> bytes:
        assert self._device.identity is not None
        return self._device.identity.sign(encode_list_to_sign(session, clients))

    def verify_client_list(self, answer: SecureAnswer, keys: KeyList, clients: tuple[str, ...]) -> None:
        """That as many others as are needed were given the same list."""
        said = encode_list_to_sign(keys.session, clients)
        same = {
            one.fl_id
            for one in answer.client_list_sign
            if one.fl_id in self._verified_keys and is_valid_signature(self._verified_keys[one.fl_id], one.signature, said)
        }
        if not answer.done and len(same) + 1 < keys.needed:
            raise PeerError(f"{len(same) + 1} devices signed the list, and {keys.needed} are needed: no share was told")


def _request_until_decided(device: Device, task: Task, path: str, kind: Any, fields: dict[str, Any]) -> SecureAnswer:
    """The answer to one request, which is repeated while nothing is wrong and nothing decided."""
    while True:
        said = kind(
            fl_id=device.fl_id,
            iteration=task.iteration,
            timestamp=now_ms(),
            data_size=device.data_size,
            ticket=task.ticket,
            wait=LONG_POLL_MS,
            **fields,
        )
        answer = device.phase(path, msgspec.msgpack.encode(said))
        if answer.done and not isinstance(said, GetClientList | PushListSign | GetListSign | ReconstructSecrets):
            raise RoundMissed  # before this device's update came
        if answer.retcode == Code.SUCCEED:
            return answer
        if answer.retcode != Code.NOT_READY:
            raise RoundMissed
