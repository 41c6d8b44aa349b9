"""What workers and servers say to each other about parameters, and how it lies in bytes.

A frame is a fixed header, a message, and raw arrays: numbers of rows first (eight bytes each), then values. Arrays are sent
from where they lie and received where they belong. A connection begins with the server's token, which a peer can only have
from the scheduler. Whatever is wrong with a message is said in a `RequestFailed`, and the connection goes on.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from covey.core.parameter_server.sharding import Sharding
from covey.errors import CoveyError, PeerError, StoreError, UsageError
from covey.parameter_server.optimizers import Array, OptimizerRule
from covey.transport.connection import set_tcp_options

MAGIC: Final = b"cvp1"
HEADER: Final = struct.Struct("<4sIQ")  # magic, bytes of the message, bytes of the arrays
ENCODED_MESSAGE_MAX: Final = 16 << 20  # bytes of a message without its arrays
COALESCE_BYTES_MAX: Final = 1 << 16  # small arrays are sent in one piece with the message
SENDMSG_ARRAYS_MAX: Final = 512  # arrays that the kernel takes in one call; it knows a limit of 1024
SKIP_BUFFER_BYTES: Final = 1 << 20
DTYPES: Final = {"float32": np.float32, "float64": np.float64}
ROWS_MAX: Final = 1 << 40
WIDTH_MAX: Final = 1 << 24
ALL: Final = -1  # rows: those of the server, every one

ParameterName = Annotated[str, Meta(min_length=1, max_length=500)]
FolderPath = Annotated[str, Meta(max_length=4000)]
Dtype = Literal["float32", "float64"]


class ParameterMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The base of all; the tag is the class name."""


class InitialValues(msgspec.Struct, frozen=True):
    """The values a parameter begins with. Those that are drawn are a function of the seed and the row's number."""

    kind: Literal["given", "zeros", "normal", "uniform"] = "zeros"
    scale: float = 0.01
    seed: int = 0


class ParameterSpec(msgspec.Struct, frozen=True):
    """A parameter. One that is not striped is flat: its rows are single numbers, pulled and pushed as a whole."""

    name: ParameterName
    rows: Annotated[int, Meta(ge=1, le=ROWS_MAX)]
    width: Annotated[int, Meta(ge=1, le=WIDTH_MAX)]
    dtype: Dtype
    striped: bool
    rule: OptimizerRule
    begin: InitialValues = InitialValues()


class RowSelection(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of one parameter, in a message that carries several. `row_count` is ALL, or how many rows are numbered."""

    name: ParameterName
    row_count: Annotated[int, Meta(ge=ALL, le=ROWS_MAX)]
    width: int = 1
    dtype: str = "float32"
    lr: float = 0.0


RowSelections = Annotated[list[RowSelection], Meta(max_length=100_000)]

# -- asked -----------------------------------------------------------------------------------------------------------


class ParameterRequest(ParameterMessage, frozen=True, kw_only=True):
    """What workers ask, by the sharing they know."""

    sharding_version: Annotated[int, Meta(ge=0)] = 0


class DeclareParameter(ParameterRequest, frozen=True):
    """There is this parameter. With `values`, its first ones follow; without, wait until somebody has given them."""

    spec: ParameterSpec
    has_values: bool


class PushGradients(ParameterRequest, frozen=True):
    """Gradients of one rank's step. Answered when they are safe and, in sync mode, when every rank's are here."""

    step: Annotated[int, Meta(ge=0)]
    rank: Annotated[int, Meta(ge=0)]
    generation: int
    selections: RowSelections


class PullValues(ParameterRequest, frozen=True):
    """Values for a step."""

    step: Annotated[int, Meta(ge=0)]
    selections: RowSelections


class PullChanged(ParameterRequest, frozen=True):
    """Values of some rows for a step, those alone that changed: after the rows come the numbers of the change at which each is
    known, of the rows' origin that is named."""

    step: Annotated[int, Meta(ge=0)]
    selection: RowSelection
    replication_id: str


class QueryRankStep(ParameterRequest, frozen=True):
    """Where does this rank stand?"""

    rank: Annotated[int, Meta(ge=0)]


class SaveRows(ParameterRequest, frozen=True):
    """Write your rows down, as they are at this step; of older ones keep so many."""

    step: Annotated[int, Meta(ge=0)]
    folder: FolderPath
    keep: Annotated[int, Meta(ge=1)] = 5


class LoadRows(ParameterRequest, frozen=True):
    """Take your rows from what was written down at this step, by any number of servers."""

    step: Annotated[int, Meta(ge=0)]
    folder: FolderPath


class OpenReplication(ParameterMessage, frozen=True):
    """A server: you hold the copy of my rows, and this is how far I am. What I do comes over this connection."""

    server: int
    replication_id: str
    change_count: int


class RestoreRows(ParameterMessage, frozen=True):
    """A server in its next life: give me my rows back."""

    server: int


class RequestReplica(ParameterMessage, frozen=True):
    """A server in its next life: if I am the holder of your copy, send me all of your rows. Answered with 1 if it is."""

    holder: int


class DropReplica(ParameterMessage, frozen=True):
    """A server whose copy has another holder now."""

    server: int


class HandOverSlots(ParameterMessage, frozen=True):
    """Slots of mine that are yours by this sharing, and what I know of their ranks' generations."""

    sharding_version: int
    state: Any  # as `Shard.pack` returns it, after the slots
    generations: list[int]


class DetachSlots(ParameterMessage, frozen=True):
    """To a copy: these slots are set aside for another server."""

    slots: list[int]


class ReleaseSlots(ParameterMessage, frozen=True):
    """To a copy: the other server has them."""

    slots: list[int]


class FullReplica(ParameterMessage, frozen=True):
    """All of a server's rows, and all it knows: in answer to `RestoreRows`, and to bring a copy up to date."""

    replication_id: str
    change_count: int
    state: Any  # as `ShardSet.pack` returns it


# -- answered --------------------------------------------------------------------------------------------------------


class Done(ParameterMessage, frozen=True):
    """Done. `number` is what was asked for, where it is a number."""

    number: int = 0


class RowValues(ParameterMessage, frozen=True):
    """Their bytes follow, in the order asked."""

    step: int


class ChangedRows(ParameterMessage, frozen=True):
    """To `PullChanged`: a byte for each row, whether it changed, and the values of those; and the number of the last change."""

    replication_id: str
    version: int


class ShardingChanged(ParameterMessage, frozen=True):
    """Not by that sharing: rows have moved, and this is the newer one."""

    sharding: Sharding


class RequestFailed(ParameterMessage, frozen=True):
    """Not done, and why. `stale`: the asker is the life of a rank that is over. `disk`: the server's disk refuses."""

    reason: str
    is_stale: bool = False
    is_disk_error: bool = False

    def to_exception(self) -> CoveyError:
        kind = PeerError if self.is_stale else StoreError if self.is_disk_error else UsageError
        return kind(self.reason)


WorkerRequest = DeclareParameter | PushGradients | PullValues | PullChanged | QueryRankStep | SaveRows | LoadRows
ServerRequest = (
    WorkerRequest
    | OpenReplication
    | RestoreRows
    | RequestReplica
    | DropReplica
    | FullReplica
    | HandOverSlots
    | DetachSlots
    | ReleaseSlots
)
ReplicatedChange = DeclareParameter | PushGradients | HandOverSlots | DetachSlots | ReleaseSlots  # what a copy repeats
ServerReply = Done | RowValues | ChangedRows | ShardingChanged | RequestFailed | FullReplica
_request_decoder = msgspec.msgpack.Decoder(ServerRequest)
_reply_decoder = msgspec.msgpack.Decoder(ServerReply)
_encoder = msgspec.msgpack.Encoder()


class MessageTooLarge(UsageError):
    """A message beyond the limit: its arrays were skipped, and the connection goes on."""


def send_message(connection: socket.socket, message: ParameterMessage, arrays: Sequence[Any] = ()) -> None:
    """One frame; the arrays from where they lie."""
    views = [memoryview(array).cast("B") for array in arrays if memoryview(array).nbytes]
    encoded = _encoder.encode(message)
    if len(encoded) > ENCODED_MESSAGE_MAX:
        raise MessageTooLarge(
            f"a message that names {len(encoded)} bytes is larger than the limit of {ENCODED_MESSAGE_MAX}:"
            " serve fewer parameters"
        )
    size = sum(view.nbytes for view in views)
    head = HEADER.pack(MAGIC, len(encoded), size) + encoded
    if size <= COALESCE_BYTES_MAX:
        connection.sendall(b"".join([head, *views]))
        return
    left = [memoryview(head), *views]
    while left:
        sent = connection.sendmsg(left[:SENDMSG_ARRAYS_MAX])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


def receive_request(connection: socket.socket, message_max: int) -> tuple[ServerRequest, Array]:
    """What a peer asks, and its arrays as bytes.

    Raises `MessageTooLarge`, `EOFError` and `OSError`, or `msgspec.MsgspecError`.
    """
    encoded, size = _receive_encoded(connection)
    try:
        request = _request_decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        skip_bytes(connection, size)
        raise msgspec.DecodeError(str(error)) from error
    if size > message_max and not isinstance(request, HandOverSlots):  # what moves is as large as it is
        skip_bytes(connection, size)
        raise MessageTooLarge(f"a message of {size} bytes is larger than the limit of {message_max} (COVEY_PS_MESSAGE_MAX)")
    body: Array = np.empty(size, np.uint8)
    receive_into(connection, body.data)
    return request, body


def receive_reply(connection: socket.socket, into: Sequence[Any] = ()) -> tuple[ServerReply, Array]:
    """The answer; its arrays go where they belong if that is known, else they are returned as bytes."""
    encoded, size = _receive_encoded(connection)
    reply = _reply_decoder.decode(encoded)
    if isinstance(reply, RowValues):
        views = [memoryview(array).cast("B") for array in into]
        if sum(view.nbytes for view in views) != size:
            raise EOFError(f"{size} bytes came where {sum(view.nbytes for view in views)} were expected")
        for view in views:
            receive_into(connection, view)
        return reply, np.empty(0, np.uint8)
    body: Array = np.empty(size, np.uint8)
    receive_into(connection, body.data)
    return reply, body


def _receive_encoded(connection: socket.socket) -> tuple[bytes, int]:
    header = bytearray(HEADER.size)
    receive_into(connection, memoryview(header))
    magic, length, size = HEADER.unpack(header)
    if magic != MAGIC or length > ENCODED_MESSAGE_MAX:
        raise EOFError("the other side does not speak this protocol")
    encoded = bytearray(length)
    receive_into(connection, memoryview(encoded))
    return bytes(encoded), size


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill memory from a connection."""
    while view.nbytes:
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the connection closed")
        view = view[count:]


def skip_bytes(connection: socket.socket, size: int) -> None:
    """Read and forget: an answer would not arrive while the other side still sends."""
    buffer = memoryview(bytearray(SKIP_BUFFER_BYTES))
    while size:
        part = buffer[: min(size, SKIP_BUFFER_BYTES)]
        receive_into(connection, part)
        size -= part.nbytes


def socket_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tune_connection(connection: socket.socket) -> None:
    """No waiting for more to send, and an end that is noticed."""
    set_tcp_options(connection)
