"""State and kept results from one rank to another, over a connection of their own.

It does not go through the group: so it overlaps with building the group, can be interrupted, and needs no lock, because the
giver waits in a collective that the receiver has yet to join. Tensors are sent from where they lie.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from covey.core.messages import Number
from covey.errors import PeerError
from covey.train import tree
from covey.train.gloo import torch_module

HEADER_MAX: Final = 64 * 1024 * 1024
CONNECT_S: Final = 10.0
SILENCE_S: Final = 30.0  # a giver that sends nothing for so long is gone
TOKEN_SIZE: Final = 32


class Donation(msgspec.Struct, frozen=True):
    """What a rank gives: where in the training it stands, its state, and the results that are agreed already."""

    step: int = -1
    applied: bool = False  # the state is that after this step's optimizer ran
    last: Number | None = None  # the collective the giver completed last; its result is among these
    before: int = 0  # how many collectives were run before the first step
    state: Any = None  # nested plain data and tensors; None where the giver has none yet
    results: dict[Number, list[Any]] = {}


class _Meta(msgspec.Struct, frozen=True):
    step: int
    applied: bool
    last: tuple[int, int] | None
    before: int
    state: Any
    results: list[tuple[int, int, list[int]]]
    tensors: list[tuple[str, list[int]]]


class Server:
    """Gives on request, to whoever knows the token. The token reaches the receiver through the scheduler's plan."""

    def __init__(self, address: str, state: Callable[[], Donation], results: Callable[[], Donation]) -> None:
        self.token = secrets.token_hex(TOKEN_SIZE // 2)
        self._give = {b"s": state, b"r": results}
        self._socket = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="covey donor", daemon=True).start()

    def close_in_child(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="covey gift", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):  # a receiver that went away asks again
            connection.settimeout(SILENCE_S)
            asked = bytes(_receive(connection, bytearray(TOKEN_SIZE + 1)))
            if not hmac.compare_digest(asked[:TOKEN_SIZE], self.token.encode()) or asked[TOKEN_SIZE:] not in self._give:
                return
            _send(connection, self._give[asked[TOKEN_SIZE:]]())


def fetch(address: str, port: int, token: str, kind: str) -> Donation:
    """Receive all of it or nothing. Raises `PeerError` when the giver is gone."""
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection:
            connection.settimeout(SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token.encode() + (b"s" if kind == "state" else b"r"))
            return _read(connection)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise PeerError(f"the state could not be fetched from {address}: {error}") from None


def _send(connection: socket.socket, given: Donation) -> None:
    skeleton, tensors = tree.pack(given.state)
    results: list[tuple[int, int, list[int]]] = []
    for number, items in given.results.items():
        results.append((number.step, number.n, list(range(len(tensors), len(tensors) + len(items)))))
        tensors += items
    plain = [tensor.detach().cpu().contiguous() for tensor in tensors]
    metas = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in plain]
    last = (given.last.step, given.last.n) if given.last is not None else None
    header = msgspec.msgpack.encode(_Meta(given.step, given.applied, last, given.before, skeleton, results, metas))
    connection.sendall(len(header).to_bytes(8, "big") + header)
    for tensor in plain:
        if tensor.numel():
            connection.sendall(_bytes_of(tensor))


def _read(connection: socket.socket) -> Donation:
    torch = torch_module()
    size = int.from_bytes(_receive(connection, bytearray(8)), "big")
    if size > HEADER_MAX:
        raise EOFError(f"its header has {size} bytes, {HEADER_MAX} is the limit")
    meta = msgspec.msgpack.decode(_receive(connection, bytearray(size)), type=_Meta)
    tensors = []
    for name, shape in meta.tensors:
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        if tensor.numel():
            _receive(connection, _bytes_of(tensor))
        tensors.append(tensor)
    results = {Number(step, n): [tensors[place] for place in places] for step, n, places in meta.results}
    last = Number(*meta.last) if meta.last is not None else None
    return Donation(meta.step, meta.applied, last, meta.before, tree.unpack(meta.state, tensors), results)


def _bytes_of(tensor: Any) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch_module().uint8).numpy())


def _receive(connection: socket.socket, into: Any) -> Any:
    """Fill a buffer from a connection."""
    view = memoryview(into)
    while view.nbytes:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection closed too early")
        view = view[count:]
    return into
