"""State and kept results from one rank to another, over a connection of their own.

It does not go through the group: so it overlaps with building the group, can be interrupted, and needs no lock, because the
giver waits in a collective that the receiver has yet to join. Tensors are sent from where they lie; a receiver on the same host
reads them there itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from covey.core.messages import CollectiveNumber, Donor
from covey.errors import PeerError
from covey.training.collectives.gloo_group import torch_module
from covey.training.state import pytree
from covey.training.state.process_memory import Mark, Piece, pull, recognised, room
from covey.transport.token_server import Callers

HEADER_MAX: Final = 64 * 1024 * 1024
CONNECT_S: Final = 10.0
ASK_S: Final = 2.0  # who has said nothing by then wants nothing
SILENCE_S: Final = 30.0  # a giver that sends nothing for so long is gone
GIFTS_MAX: Final = 32  # at the same time
SEND: Final = b"s"  # from a receiver that cannot read the giver's memory
COMPARE: Final = b"c"  # the same, from one that has some of it perhaps: their digests follow
THANKS: Final = b"t"
DIGEST_SIZE: Final = 16
ALIGNED: Final = 64  # bytes
PIECE: Final = 1 << 20  # bytes that are sent at once
KINDS: Final = {"state": b"s", "results": b"r", "slots": b"p", "follow": b"f"}
WANTED_MAX: Final = 65536  # bytes


class Donation(msgspec.Struct, frozen=True):
    """What a rank gives: where in the training it stands, its state, and the results that are agreed already."""

    step: int = -1
    applied: bool = False  # the state is that after this step's optimizer ran
    last: CollectiveNumber | None = None  # the collective the giver completed last; its result is among these
    before: int = 0  # how many collectives were run before the first step
    state: Any = None  # nested plain data and tensors; None where the giver has none yet
    results: dict[CollectiveNumber, list[Any]] = {}


class Known(msgspec.Struct, frozen=True):
    """What a receiver has already, by its names in the state: memory to receive into, and the digests of what may be right."""

    tensors: Mapping[str, Any] = {}
    digests: Mapping[str, bytes] = {}


NOTHING: Final = Known()


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """What is to be known of a tensor before its bytes come."""

    path: str  # its name in the state; "" for a result
    dtype: str
    shape: list[int]
    piece: Piece  # where it lies in the giver's memory


class _Meta(msgspec.Struct, frozen=True):
    step: int
    applied: bool
    last: tuple[int, int] | None
    before: int
    state: Any
    results: list[tuple[int, int, list[int]]]
    tensors: list[Tensor]
    pid: int
    mark: Piece
    mark_value: bytes


class Server:
    """Gives on request, to whoever knows the token. The token reaches the receiver through the scheduler's plan."""

    def __init__(self, address: str, **give: Callable[[bytes], Donation]) -> None:
        """`give` has what to call for each of `KINDS`; it is told what is wanted of it."""
        self._give = {KINDS[kind]: found for kind, found in give.items()}
        self._free = threading.Semaphore(GIFTS_MAX)
        self._callers = Callers(address, self._serve, "covey gift", first_s=ASK_S)
        self.port, self.token = self._callers.port, self._callers.token

    def close_in_child(self) -> None:
        self._callers.close()

    def _serve(self, connection: socket.socket) -> None:
        with self._free, contextlib.suppress(msgspec.MsgspecError):  # a receiver that went away asks again
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(SILENCE_S)
        kind = bytes(_receive(connection, bytearray(1)))
        size = int.from_bytes(_receive(connection, bytearray(4)), "big")
        if kind in self._give and size <= WANTED_MAX:
            wanted = bytes(_receive(connection, bytearray(size)))
            _send(connection, self._give[kind](wanted))


def fetch(
    giver: Donor,
    kind: str,
    homes: Mapping[str, Any] = MappingProxyType({}),
    *,
    wanted: bytes = b"",
    known: Known = NOTHING,
    begin: Callable[[], None] = lambda: None,
) -> Donation:
    """Receive all of it. Raises `PeerError` when the giver is gone; then what is received directly may be there in part.

    `homes` are tensors of this process by their names in the state: what fits is received straight into them, which spares
    fresh memory and a copy. Not if the state is that after the optimizer: it is needed twice, and must stay as it is. `begin`
    is called when the giver has answered, before anything is written to memory that is `known`.
    """
    try:
        with socket.create_connection((giver.address, giver.port), CONNECT_S) as connection:
            connection.settimeout(SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(giver.token.encode() + KINDS[kind] + len(wanted).to_bytes(4, "big") + wanted)
            return _read(connection, homes, known, begin)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise PeerError(f"the state could not be fetched from {giver.address}: {error}") from None


def _send(connection: socket.socket, given: Donation) -> None:
    skeleton, named = pytree.pack(given.state)
    tensors = list(named.items())
    results: list[tuple[int, int, list[int]]] = []
    for number, items in given.results.items():
        results.append((number.step, number.index, list(range(len(tensors), len(tensors) + len(items)))))
        tensors += [("", item) for item in items]
    plain = [(path, tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()) for path, tensor in tensors]
    last = (given.last.step, given.last.index) if given.last is not None else None
    mark = Mark()
    meta = _Meta(
        step=given.step,
        applied=given.applied,
        last=last,
        before=given.before,
        state=skeleton,
        results=results,
        tensors=[_described(path, tensor) for path, tensor in plain],
        pid=os.getpid(),
        mark=mark.piece,
        mark_value=mark.value,
    )
    header = msgspec.msgpack.encode(meta)
    connection.sendall(len(header).to_bytes(8, "big") + header)
    if (answer := bytes(_receive(connection, bytearray(1)))) != THANKS:
        same = _compare(connection, [tensor for _, tensor in plain]) if answer == COMPARE else set()
        for place, (_, tensor) in enumerate(plain):
            if tensor.numel() and place not in same:
                _send_bytes(connection, _bytes_of(tensor))
        _receive(connection, bytearray(1))
    # Only now may what was read move: `plain` and `mark` have been kept until here.


def _send_bytes(connection: socket.socket, view: memoryview) -> None:
    """In pieces: what has a limit is how long the other side takes nothing, and not how long all of it takes."""
    for start in range(0, view.nbytes, PIECE):
        connection.sendall(view[start : start + PIECE])


def _compare(connection: socket.socket, tensors: list[Any]) -> set[int]:
    """Which of the tensors, by number, the receiver has already."""
    size = int.from_bytes(_receive(connection, bytearray(8)), "big")
    if size > HEADER_MAX:
        raise EOFError(f"its digests have {size} bytes, {HEADER_MAX} is the limit")
    asked = msgspec.msgpack.decode(_receive(connection, bytearray(size)), type=dict[int, bytes])
    same = {number for number, found in asked.items() if number < len(tensors) and digest(tensors[number]) == found}
    connection.sendall(bytes(number in same for number in range(len(tensors))))
    return same


def digest(tensor: Any) -> bytes:
    """By which two processes find out that they have the same bytes."""
    return hashlib.sha256(_bytes_of(tensor)).digest()[:DIGEST_SIZE]


def _described(path: str, tensor: Any) -> Tensor:
    piece = Piece(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return Tensor(path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), piece)


def _read(connection: socket.socket, homes: Mapping[str, Any], known: Known, begin: Callable[[], None]) -> Donation:
    size = int.from_bytes(_receive(connection, bytearray(8)), "big")
    if size > HEADER_MAX:
        raise EOFError(f"its header has {size} bytes, {HEADER_MAX} is the limit")
    meta = msgspec.msgpack.decode(_receive(connection, bytearray(size)), type=_Meta)
    begin()
    tensors = _places(meta.tensors, {**known.tensors, **({} if meta.applied else homes)})
    into = [_bytes_of(tensor) for tensor in tensors]
    if recognised(meta.pid, meta.mark, meta.mark_value):
        filled = [number for number, view in enumerate(into) if view.nbytes]
        pull(meta.pid, [meta.tensors[number].piece for number in filled], [into[number] for number in filled])
    else:
        same = _offer(connection, meta.tensors, known)
        for number, view in enumerate(into):
            if number not in same:
                _receive(connection, view)
            elif (mine := known.tensors[meta.tensors[number].path]) is not tensors[number]:
                view[:] = _bytes_of(mine)
    connection.sendall(THANKS)
    results = {CollectiveNumber(step, n): [tensors[place] for place in places] for step, n, places in meta.results}
    last = CollectiveNumber(*meta.last) if meta.last is not None else None
    return Donation(meta.step, meta.applied, last, meta.before, pytree.unpack(meta.state, tensors), results)


def _offer(connection: socket.socket, described: list[Tensor], known: Known) -> set[int]:
    """Ask for all but what is here already, as the giver finds by its digest; returns the numbers of that."""
    offered = {
        number: known.digests[wanted.path]
        for number, wanted in enumerate(described)
        if wanted.path in known.digests and _fits(known.tensors[wanted.path], wanted)
    }
    if not offered:
        connection.sendall(SEND)
        return set()
    body = msgspec.msgpack.encode(offered)
    connection.sendall(COMPARE + len(body).to_bytes(8, "big") + body)
    answer = _receive(connection, bytearray(len(described)))
    return {number for number in offered if answer[number]}


def _places(described: list[Tensor], homes: Mapping[str, Any]) -> list[Any]:
    """For each tensor the one at home, if it fits; the others share one piece of fresh memory."""
    torch = torch_module()
    found: list[Any] = []
    fresh = room(sum(wanted.piece.size + ALIGNED for wanted in described if not _fits(homes.get(wanted.path), wanted)))
    offset = 0
    for wanted in described:
        home, kind = homes.get(wanted.path), getattr(torch, wanted.dtype)
        if _fits(home, wanted):
            found.append(home)
        elif wanted.piece.size:
            found.append(torch.frombuffer(fresh[offset : offset + wanted.piece.size], dtype=kind).view(wanted.shape))
            offset += (wanted.piece.size + ALIGNED - 1) // ALIGNED * ALIGNED
        else:
            found.append(torch.empty(wanted.shape, dtype=kind))
    return found


def _fits(home: Any, wanted: Tensor) -> bool:
    return (
        home is not None
        and str(home.dtype) == f"torch.{wanted.dtype}"
        and list(home.shape) == wanted.shape
        and home.device.type == "cpu"
        and home.is_contiguous()
    )


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
