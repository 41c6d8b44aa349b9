"""Device side of a secure round: requests to servers, with the keys, shares and masks of `SecaggSession`.

A device that misses a phase, or whose round is abandoned, can join the next round. If a server's reply would make the device
reveal more than the sum, the device raises `PeerError` and sends nothing more in this round.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from covey.core.federated.secagg import messages
from covey.errors import PeerError, UsageError
from covey.federated.device_protocol import Code, SecureAnswer, now_ms
from covey.federated.model_codec import MASKED_TENSOR, Floats
from covey.federated.privacy import fixed_point_ring
from covey.federated.privacy.device_certificates import PublicKey, encode_keys_to_sign, encode_list_to_sign, is_valid_signature
from covey.federated.privacy.dp_noise import clip_update
from covey.federated.privacy.fixed_point_ring import DeviceMetrics
from covey.federated.privacy.secagg_device_state import SecaggSession, make_round_scale

if TYPE_CHECKING:
    from covey.federated.device.client import Device, Task

LONG_POLL_MS = 20_000


class RoundMissed(Exception):
    """The round continues or ended without this device, or was abandoned, or a server failed."""


def send_masked_update(device: Device, task: Task, change: Floats, metrics: DeviceMetrics) -> bool:
    """Take part in a secure round with the difference `change` to the model; return False after `RoundMissed`, else True.

    Raise `PeerError` if the server's lists are unsafe or no server replies in time, `RequestRefused` if a server refuses a
    request, and `UsageError` if a value is out of range or certificates are required and missing. Raise `ValueError` if an
    update to be clipped is not finite, or the server's numbers of samples, devices or indices are invalid.
    """
    try:
        _run_secagg_round(device, task, change, metrics)
    except RoundMissed:
        return False
    return True


def _run_secagg_round(device: Device, task: Task, change: Floats, metrics: DeviceMetrics) -> None:
    session, cipher, weight = SecaggSession(device.fl_id), task.plan.cipher, device.data_size
    if cipher.noise is not None:  # clipped here, because servers never receive the unmasked update
        change, metrics, weight = clip_update(change, cipher.noise.clip), DeviceMetrics(), 1
    fixed_point_ring.check_reach(change, cipher.reach)  # fail before other devices depend on this one

    def request(path: str, kind: Any, **fields: Any) -> SecureAnswer:
        return _request_until_decided(device, task, path, kind, fields)

    signatures = DeviceSignatures(device, task)
    request("exchangeKeys", messages.ExchangeKeys, c_pk=session.c_pk, s_pk=session.s_pk, **signatures.sign_keys(session))
    listed = request("getKeys", messages.GetKeys)
    signatures.verify_keys(listed.remote_publickeys)
    keys = messages.KeyList(
        listed.session, listed.index, listed.needed, listed.devices, listed.samples, listed.remote_publickeys
    )
    words = fixed_point_ring.encode_update(change, metrics, weight, make_round_scale(keys, cipher.reach))
    request("shareSecrets", messages.ShareSecrets, encrypted_shares=session.make_shares(keys))
    shares = request("getSecrets", messages.GetSecrets)
    session.accept_shares(messages.ShareList(shares.encrypted_shares))
    masked = session.mask_update(words)
    fields = {**task.update_metadata, "ticket": shares.ticket}
    if not device.update({MASKED_TENSOR: masked}, fields):
        raise RoundMissed
    listed = request("getClientList", messages.GetClientList)
    if not listed.done:
        if signatures.is_required:
            signature = signatures.sign_client_list(keys.session, listed.clients)
            request("pushListSign", messages.PushListSign, signature=signature)
            signatures.verify_client_list(
                request("getListSign", messages.GetListSign, signature=signature), keys, listed.clients
            )
        request(
            "reconstructSecrets", messages.ReconstructSecrets, reconstruct_secret_shares=session.reveal_shares(listed.clients)
        )


class DeviceSignatures:
    """Signatures by which devices verify each other's keys and client lists, if the plan requires them.

    The constructor raises `UsageError` if the plan requires signatures and the device has no identity or no trust.
    """

    def __init__(self, device: Device, task: Task) -> None:
        self.is_required = task.plan.cipher.signed
        self._iteration = task.iteration
        self._device = device
        self._verified_keys: dict[str, PublicKey] = {}
        if self.is_required and (device.identity is None or device.trust is None):
            raise UsageError("the cluster has pki_verify and secure rounds: pass Device(identity=..., trust=...)")

    def sign_keys(self, session: SecaggSession) -> dict[str, Any]:
        """Return the fields of `ExchangeKeys` that sign this device's keys; {} if signatures are not required."""
        identity = self._device.identity
        if not self.is_required or identity is None:
            return {}
        signed = encode_keys_to_sign(session.fl_id, self._iteration, session.c_pk, session.s_pk)
        return {"signature": identity.sign(signed), "certificate_chain": identity.chain}

    def verify_keys(self, others: tuple[messages.RemoteKeys, ...]) -> None:
        """Raise `PeerError` unless each device's keys are signed by that device. Do nothing if signatures are not required."""
        if not self.is_required or self._device.trust is None:
            return
        for other in others:
            try:
                name, key = self._device.trust.verify(other.certificate_chain, datetime.now(UTC))
            except ValueError as error:
                raise PeerError(f"{error}: nothing was sent") from None
            signed = encode_keys_to_sign(other.fl_id, self._iteration, other.c_pk, other.s_pk)
            if name != other.fl_id or not is_valid_signature(key, other.signature, signed):
                raise PeerError(f"the keys that the server sent for {other.fl_id} are not signed by it: nothing was sent")
            self._verified_keys[name] = key

    def sign_client_list(self, session: str, clients: tuple[str, ...]) -> bytes:
        assert self._device.identity is not None
        return self._device.identity.sign(encode_list_to_sign(session, clients))

    def verify_client_list(self, answer: SecureAnswer, keys: messages.KeyList, clients: tuple[str, ...]) -> None:
        """Raise `PeerError` if fewer than `keys.needed` devices signed the list `clients`. Do nothing if the round is done.

        This device counts, and so does each neighbour whose keys were verified and whose signature in `answer` is valid.
        """
        signed = encode_list_to_sign(keys.session, clients)
        same = {
            entry.fl_id
            for entry in answer.client_list_sign
            if entry.fl_id in self._verified_keys
            and is_valid_signature(self._verified_keys[entry.fl_id], entry.signature, signed)
        }
        if not answer.done and len(same) + 1 < keys.needed:
            raise PeerError(f"{len(same) + 1} devices signed the list, and {keys.needed} are needed: no share was sent")


def _request_until_decided(device: Device, task: Task, path: str, kind: Any, fields: dict[str, Any]) -> SecureAnswer:
    """Repeat a request while the reply is NOT_READY, and return the reply if it is SUCCEED.

    Raise `RequestRefused` for REQUEST_ERROR, `PeerError` if no server replies, and `RoundMissed` for any other code or if the
    round was complete before this device's update.
    """
    while True:
        request = kind(
            fl_id=device.fl_id,
            iteration=task.iteration,
            timestamp=now_ms(),
            data_size=device.data_size,
            ticket=task.ticket,
            wait=LONG_POLL_MS,
            **fields,
        )
        answer = device.phase(path, msgspec.msgpack.encode(request))
        if answer.done and not isinstance(
            request, messages.GetClientList | messages.PushListSign | messages.GetListSign | messages.ReconstructSecrets
        ):
            raise RoundMissed  # the round was complete before this device's update
        if answer.retcode == Code.SUCCEED:
            return answer
        if answer.retcode != Code.NOT_READY:
            raise RoundMissed
