"""Transfer of state and cached results between ranks, over a separate connection.

The group is not used, so a transfer overlaps with building the group and can be interrupted. State and results need no lock,
because the donor is at a safe point. Contiguous CPU tensors are sent without a copy; a receiver on the same host reads them
from the donor's memory if the kernel permits that.
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
from covey.training.lazy_torch import torch_module
from covey.training.state import pytree
from covey.training.state.process_memory import (
    MemoryBlock,
    MemoryMarker,
    allocate_buffer,
    is_expected_process,
    read_process_memory,
)
from covey.transport.authenticated_server import AuthenticatedServer

HEADER_MAX: Final = 64 * 1024 * 1024  # bytes
CONNECT_TIMEOUT_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 2.0  # without any byte, until the client's token is complete
IDLE_TIMEOUT_S: Final = 30.0  # without any byte; then the peer is considered gone
TRANSFERS_MAX: Final = 32  # concurrent; further clients wait
SEND_ALL: Final = b"s"  # from a receiver that cannot read the donor's memory
COMPARE_DIGESTS: Final = b"c"  # the same, from a receiver that may have some tensors: their digests follow
RECEIVED: Final = b"t"  # from a receiver that has all tensors
DIGEST_SIZE: Final = 16  # bytes
ALIGNMENT: Final = 64  # bytes; of tensors in the receiver's buffer
SEND_CHUNK_BYTES: Final = 1 << 20
REQUEST_KINDS: Final = {"state": b"s", "results": b"r", "slots": b"p", "follow": b"f"}
REQUEST_BYTES_MAX: Final = 65536  # of a request's argument


class DonatedState(msgspec.Struct, frozen=True):
    """Reply of a donor.

    A replacement gets a position in the training, a state and cached results of collectives; other replies use some of the
    fields.
    """

    step: int = -1  # -1: before the first step
    optimizer_applied: bool = False  # the state is the one after this step's optimizer
    # the last one that the donor completed, whose result is in `results`; None: none, or not a reply to a replacement
    last_collective: CollectiveNumber | None = None
    initial_collectives: int = 0  # number of collectives before the first step
    state: Any = None  # nested plain data and tensors; None if the donor has no state yet
    results: dict[CollectiveNumber, list[Any]] = {}


class ReceiverTensors(msgspec.Struct, frozen=True):
    """Tensors that a receiver already has, by path: memory to receive into, and digests of those that may be current."""

    tensors: Mapping[str, Any] = {}
    digests: Mapping[str, bytes] = {}


NO_TENSORS: Final = ReceiverTensors()


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a tensor, sent before its bytes."""

    path: str  # in the state; "" for a result
    dtype: str
    shape: list[int]
    block: MemoryBlock  # in the donor's memory


class _TransferHeader(msgspec.Struct, frozen=True):
    """A `DonatedState` without the bytes of its tensors, sent before the bytes."""

    step: int
    optimizer_applied: bool
    last_collective: tuple[int, int] | None
    initial_collectives: int
    state: Any
    results: list[tuple[int, int, list[int]]]  # step and index of each collective, and positions in `tensors`
    tensors: list[TensorHeader]
    pid: int
    marker: MemoryBlock
    marker_value: bytes


class TransferServer:
    """Server of transfers to clients that present the token.

    A rank gets the token in the scheduler's heal plan, a spare from the rendezvous store.
    """

    def __init__(self, address: str, **handlers: Callable[[bytes], DonatedState]) -> None:
        """Listen at a free port of `address`; raise `OSError` if that fails.

        `handlers`: by kind of request (`REQUEST_KINDS`), the function that is called with the request's argument, on a thread
        of the client's connection.
        """
        self._handlers = {REQUEST_KINDS[kind]: found for kind, found in handlers.items()}
        self._free_transfers = threading.Semaphore(TRANSFERS_MAX)
        self._server = AuthenticatedServer(address, self._serve, "covey gift", first_s=REQUEST_TIMEOUT_S)
        self.port, self.token = self._server.port, self._server.token

    def close_in_child(self) -> None:
        self._server.close()

    def _serve(self, connection: socket.socket) -> None:
        with self._free_transfers, contextlib.suppress(msgspec.MsgspecError):  # disconnects a client that sends invalid digests
            self._handle_request(connection)

    def _handle_request(self, connection: socket.socket) -> None:
        connection.settimeout(IDLE_TIMEOUT_S)
        kind = bytes(_receive_exactly(connection, bytearray(1)))
        size = int.from_bytes(_receive_exactly(connection, bytearray(4)), "big")
        if kind in self._handlers and size <= REQUEST_BYTES_MAX:
            wanted = bytes(_receive_exactly(connection, bytearray(size)))
            _send_state(connection, self._handlers[kind](wanted))


def fetch_from_donor(
    donor: Donor,
    kind: str,
    destinations: Mapping[str, Any] = MappingProxyType({}),
    *,
    wanted: bytes = b"",
    known: ReceiverTensors = NO_TENSORS,
    begin: Callable[[], None] = lambda: None,
) -> DonatedState:
    """Send a request of `kind` (one of `REQUEST_KINDS`) with the argument `wanted`, and return the reply.

    A tensor is received into the tensor of the same path in `destinations` or `known`, if that fits. `destinations` is ignored
    if the reply is a state after the optimizer (`optimizer_applied`). The donor need not send a tensor whose digest in `known`
    matches. `begin` is called before memory is written. Raise `PeerError` if the transfer fails; destination tensors may then
    be partly written.
    """
    try:
        with socket.create_connection((donor.address, donor.port), CONNECT_TIMEOUT_S) as connection:
            connection.settimeout(IDLE_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(donor.token.encode() + REQUEST_KINDS[kind] + len(wanted).to_bytes(4, "big") + wanted)
            return _receive_state(connection, destinations, known, begin)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise PeerError(f"the state could not be fetched from {donor.address}: {error}") from None


def _send_state(connection: socket.socket, donation: DonatedState) -> None:
    skeleton, named = pytree.pack(donation.state)
    tensors = list(named.items())
    results: list[tuple[int, int, list[int]]] = []
    for number, items in donation.results.items():
        results.append((number.step, number.index, list(range(len(tensors), len(tensors) + len(items)))))
        tensors += [("", item) for item in items]
    plain = [(path, tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()) for path, tensor in tensors]
    last = (donation.last_collective.step, donation.last_collective.index) if donation.last_collective is not None else None
    marker = MemoryMarker()
    header = _TransferHeader(
        step=donation.step,
        optimizer_applied=donation.optimizer_applied,
        last_collective=last,
        initial_collectives=donation.initial_collectives,
        state=skeleton,
        results=results,
        tensors=[_tensor_header(path, tensor) for path, tensor in plain],
        pid=os.getpid(),
        marker=marker.block,
        marker_value=marker.value,
    )
    encoded = msgspec.msgpack.encode(header)
    connection.sendall(len(encoded).to_bytes(8, "big") + encoded)
    if (answer := bytes(_receive_exactly(connection, bytearray(1)))) != RECEIVED:
        same = _match_digests(connection, [tensor for _, tensor in plain]) if answer == COMPARE_DIGESTS else set()
        for index, (_, tensor) in enumerate(plain):
            if tensor.numel() and index not in same:
                _send_bytes(connection, _tensor_bytes(tensor))
        _receive_exactly(connection, bytearray(1))
    # The receiver may read memory until here, so `plain` and `marker` must stay referenced.


def _send_bytes(connection: socket.socket, view: memoryview) -> None:
    """Send in chunks, so that the connection's timeout applies to each chunk and not to the total time."""
    for start in range(0, view.nbytes, SEND_CHUNK_BYTES):
        connection.sendall(view[start : start + SEND_CHUNK_BYTES])


def _match_digests(connection: socket.socket, tensors: list[Any]) -> set[int]:
    """Receive digests of the receiver's tensors, reply which of them match, and return the numbers of the tensors that
    match."""
    size = int.from_bytes(_receive_exactly(connection, bytearray(8)), "big")
    if size > HEADER_MAX:
        raise EOFError(f"the digests have {size} bytes, the limit is {HEADER_MAX}")
    offered = msgspec.msgpack.decode(_receive_exactly(connection, bytearray(size)), type=dict[int, bytes])
    same = {number for number, found in offered.items() if number < len(tensors) and tensor_digest(tensors[number]) == found}
    connection.sendall(bytes(number in same for number in range(len(tensors))))
    return same


def tensor_digest(tensor: Any) -> bytes:
    """Return a digest of the bytes of a CPU tensor: the first `DIGEST_SIZE` bytes of their SHA-256."""
    return hashlib.sha256(_tensor_bytes(tensor)).digest()[:DIGEST_SIZE]


def _tensor_header(path: str, tensor: Any) -> TensorHeader:
    block = MemoryBlock(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return TensorHeader(path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), block)


def _receive_state(
    connection: socket.socket, destinations: Mapping[str, Any], known: ReceiverTensors, begin: Callable[[], None]
) -> DonatedState:
    size = int.from_bytes(_receive_exactly(connection, bytearray(8)), "big")
    if size > HEADER_MAX:
        raise EOFError(f"the header has {size} bytes, the limit is {HEADER_MAX}")
    header = msgspec.msgpack.decode(_receive_exactly(connection, bytearray(size)), type=_TransferHeader)
    begin()
    # A state after the optimizer is loaded twice, so it must not be in the model's own tensors.
    tensors = _destination_tensors(header.tensors, {**known.tensors, **({} if header.optimizer_applied else destinations)})
    into = [_tensor_bytes(tensor) for tensor in tensors]
    if is_expected_process(header.pid, header.marker, header.marker_value):
        filled = [number for number, view in enumerate(into) if view.nbytes]
        read_process_memory(
            header.pid, [header.tensors[number].block for number in filled], [into[number] for number in filled]
        )
    else:
        same = _request_tensors(connection, header.tensors, known)
        for number, view in enumerate(into):
            if number not in same:
                _receive_exactly(connection, view)
            elif (own := known.tensors[header.tensors[number].path]) is not tensors[number]:
                view[:] = _tensor_bytes(own)
    connection.sendall(RECEIVED)
    results = {CollectiveNumber(step, n): [tensors[index] for index in indices] for step, n, indices in header.results}
    last = CollectiveNumber(*header.last_collective) if header.last_collective is not None else None
    return DonatedState(
        header.step, header.optimizer_applied, last, header.initial_collectives, pytree.unpack(header.state, tensors), results
    )


def _request_tensors(connection: socket.socket, described: list[TensorHeader], known: ReceiverTensors) -> set[int]:
    """Request all tensors except those whose digest the donor confirms, and return the numbers of the confirmed ones."""
    offered = {
        number: known.digests[wanted.path]
        for number, wanted in enumerate(described)
        if wanted.path in known.digests and _fits(known.tensors[wanted.path], wanted)
    }
    if not offered:
        connection.sendall(SEND_ALL)
        return set()
    body = msgspec.msgpack.encode(offered)
    connection.sendall(COMPARE_DIGESTS + len(body).to_bytes(8, "big") + body)
    answer = _receive_exactly(connection, bytearray(len(described)))
    return {number for number in offered if answer[number]}


def _destination_tensors(described: list[TensorHeader], destinations: Mapping[str, Any]) -> list[Any]:
    torch = torch_module()
    found: list[Any] = []
    fresh = allocate_buffer(
        sum(wanted.block.size + ALIGNMENT for wanted in described if not _fits(destinations.get(wanted.path), wanted))
    )
    offset = 0
    for wanted in described:
        destination, kind = destinations.get(wanted.path), getattr(torch, wanted.dtype)
        if _fits(destination, wanted):
            found.append(destination)
        elif wanted.block.size:
            found.append(torch.frombuffer(fresh[offset : offset + wanted.block.size], dtype=kind).view(wanted.shape))
            offset += (wanted.block.size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        else:
            found.append(torch.empty(wanted.shape, dtype=kind))
    return found


def _fits(destination: Any, wanted: TensorHeader) -> bool:
    return (
        destination is not None
        and str(destination.dtype) == f"torch.{wanted.dtype}"
        and list(destination.shape) == wanted.shape
        and destination.device.type == "cpu"
        and destination.is_contiguous()
    )


def _tensor_bytes(tensor: Any) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch_module().uint8).numpy())


def _receive_exactly(connection: socket.socket, into: Any) -> Any:
    """Fill the buffer `into` and return it; raise `EOFError` if the connection is closed first, `OSError` if it fails or times
    out."""
    view = memoryview(into)
    while view.nbytes:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed during the transfer")
        view = view[count:]
    return into
