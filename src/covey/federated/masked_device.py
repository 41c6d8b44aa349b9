"""A device's part in a secure round: `Session` decides what is said, the server's paths carry it.

Whatever ends a round early (a phase that closed, a round that was abandoned) is no error: the device joins the next one. What
a server must never ask for is one, and nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from covey.core.secure import (
    ExchangeKeys,
    GetClientList,
    GetKeys,
    GetSecrets,
    KeyList,
    ReconstructSecrets,
    ShareList,
    ShareSecrets,
)
from covey.federated.model import MASKED, Floats
from covey.federated.privacy import ring
from covey.federated.privacy.noise import clipped
from covey.federated.privacy.ring import Told
from covey.federated.privacy.session import Session, units
from covey.federated.protocol import Code, SecureAnswer, now_ms

if TYPE_CHECKING:
    from covey.federated.device import Device, Task

WAIT_MS = 20_000


class Late(Exception):
    """The round goes on without this device, or not at all."""


def send(device: Device, task: Task, change: Floats, told: Told) -> bool:
    """Take part with this difference to the model; True once it is in the model, False if the round went on without it."""
    try:
        _send(device, task, change, told)
    except Late:
        return False
    return True


def _send(device: Device, task: Task, change: Floats, told: Told) -> None:
    session = Session(device.fl_id)

    def ask(path: str, kind: Any, **fields: Any) -> SecureAnswer:
        return _asked(device, task, path, kind, fields)

    ask("exchangeKeys", ExchangeKeys, c_pk=session.c_pk, s_pk=session.s_pk)
    listed = ask("getKeys", GetKeys)
    keys = KeyList(listed.session, listed.index, listed.needed, listed.devices, listed.samples, listed.remote_publickeys)
    cipher, weight = task.plan.cipher, device.data_size
    if cipher.noise is not None:  # the servers cannot: they never see it
        change, told, weight = clipped(change, cipher.noise.clip), Told(), 1
    words = ring.encode(change, told, weight, units(keys, cipher.reach))
    ask("shareSecrets", ShareSecrets, encrypted_shares=session.share(keys))
    shares = ask("getSecrets", GetSecrets)
    session.take(ShareList(shares.encrypted_shares))
    hidden = session.mask(words)
    fields = {**task.fields, "ticket": shares.ticket}
    if not device.update({MASKED: hidden}, fields):
        raise Late
    listed = ask("getClientList", GetClientList)
    if not listed.done:
        ask("reconstructSecrets", ReconstructSecrets, reconstruct_secret_shares=session.reveal(listed.clients))


def _asked(device: Device, task: Task, path: str, kind: Any, fields: dict[str, Any]) -> SecureAnswer:
    """The answer to one request, which is repeated while nothing is wrong and nothing decided."""
    while True:
        said = kind(
            fl_id=device.fl_id,
            iteration=task.iteration,
            timestamp=now_ms(),
            data_size=device.data_size,
            ticket=task.ticket,
            wait=WAIT_MS,
            **fields,
        )
        answer = device.phase(path, msgspec.msgpack.encode(said))
        if answer.done and not isinstance(said, GetClientList | ReconstructSecrets):
            raise Late  # before this device's update came
        if answer.retcode == Code.SUCCEED:
            return answer
        if answer.retcode != Code.NOT_READY:
            raise Late
