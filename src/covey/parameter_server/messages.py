"""Messages between workers and servers, and their encoding.

A frame is a fixed header, a message, and raw arrays: row numbers first (eight bytes each), then values. Arrays are sent from
the sender's memory and received into the receiver's, without copies. A connection starts with the server's token, which a peer
can only get from the scheduler. An invalid message is answered with `RequestFailed`; the connection stays open.
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
COALESCE_BYTES_MAX: Final = 1 << 16  # up to this size arrays are sent in one call with the message
SENDMSG_ARRAYS_MAX: Final = 512  # arrays per call; the kernel's limit is 1024
SKIP_BUFFER_BYTES: Final = 1 << 20
DTYPES: Final = {"float32": np.float32, "float64": np.float64}
ROWS_MAX: Final = 1 << 40
WIDTH_MAX: Final = 1 << 24
ALL: Final = -1  # as row_count: all rows of the server

ParameterName = Annotated[str, Meta(min_length=1, max_length=500)]
FolderPath = Annotated[str, Meta(max_length=4000)]
Dtype = Literal["float32", "float64"]


class ParameterMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base class; the tag is the class name."""


class InitialValues(msgspec.Struct, frozen=True):
    """Initial values of a parameter. Random ones are a function of the seed and the row number."""

    kind: Literal["given", "zeros", "normal", "uniform"] = "zeros"
    scale: float = 0.01
    seed: int = 0


class ParameterSpec(msgspec.Struct, frozen=True):
    """A parameter. If not striped it is flat: its rows are single numbers, always pulled and pushed completely."""

    name: ParameterName
    rows: Annotated[int, Meta(ge=1, le=ROWS_MAX)]
    width: Annotated[int, Meta(ge=1, le=WIDTH_MAX)]
    dtype: Dtype
    striped: bool
    rule: OptimizerRule
    begin: InitialValues = InitialValues()


class RowSelection(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one parameter, in a message for several. `row_count` is ALL, or the number of row numbers that follow."""

    name: ParameterName
    row_count: Annotated[int, Meta(ge=ALL, le=ROWS_MAX)]
    width: int = 1
    dtype: str = "float32"
    lr: float = 0.0


RowSelections = Annotated[list[RowSelection], Meta(max_length=100_000)]

# -- requests --------------------------------------------------------------------------------------------------------


class ParameterRequest(ParameterMessage, frozen=True, kw_only=True):
    """Base class of workers' requests, with the version of the sharding they are based on."""

    sharding_version: Annotated[int, Meta(ge=0)] = 0


class DeclareParameter(ParameterRequest, frozen=True):
    """Declare a parameter. With `has_values` its initial values follow; else the reply waits until a worker has sent them."""

    spec: ParameterSpec
    has_values: bool


class PushGradients(ParameterRequest, frozen=True):
    """Gradients of one rank's step. Acknowledged when they are replicated; in sync mode, when every rank's are."""

    step: Annotated[int, Meta(ge=0)]
    rank: Annotated[int, Meta(ge=0)]
    generation: int
    selections: RowSelections


class PullValues(ParameterRequest, frozen=True):
    """Request values for a step."""

    step: Annotated[int, Meta(ge=0)]
    selections: RowSelections


class PullChanged(ParameterRequest, frozen=True):
    """Request the values of rows that changed. The row numbers are followed by the version at which each row is cached;
    versions are valid for `replication_id` only."""

    step: Annotated[int, Meta(ge=0)]
    selection: RowSelection
    replication_id: str


class QueryRankStep(ParameterRequest, frozen=True):
    """Request the next step of a rank."""

    rank: Annotated[int, Meta(ge=0)]


class SaveRows(ParameterRequest, frozen=True):
    """Request to write all rows at this step to files and to keep the `keep` newest."""

    step: Annotated[int, Meta(ge=0)]
    folder: FolderPath
    keep: Annotated[int, Meta(ge=1)] = 5


class LoadRows(ParameterRequest, frozen=True):
    """Request to load the rows of this step from files, which any number of servers wrote."""

    step: Annotated[int, Meta(ge=0)]
    folder: FolderPath


class OpenReplication(ParameterMessage, frozen=True):
    """Server to replica holder: start replication, at this number of changes. Changes follow on this connection."""

    server: int
    replication_id: str
    change_count: int


class RestoreRows(ParameterMessage, frozen=True):
    """Restarted server: return the replica of my rows."""

    server: int


class RequestReplica(ParameterMessage, frozen=True):
    """Restarted server: if I hold your replica, send me all of your rows. The reply is 1 if so, else 0."""

    holder: int


class DropReplica(ParameterMessage, frozen=True):
    """Server: drop the replica of my rows, because it has another holder now."""

    server: int


class HandOverSlots(ParameterMessage, frozen=True):
    """Slots that the receiver owns under this sharding, and the newest generation of each rank's pushes."""

    sharding_version: int
    state: Any  # as `Shard.pack` returns it, after the slots
    generations: list[int]


class DetachSlots(ParameterMessage, frozen=True):
    """To the replica holder: these slots are detached, to be handed over to another server."""

    slots: list[int]


class ReleaseSlots(ParameterMessage, frozen=True):
    """To the replica holder: another server has received these slots."""

    slots: list[int]


class FullReplica(ParameterMessage, frozen=True):
    """All rows and state of a server, as reply to `RestoreRows` or to initialize a replica."""

    replication_id: str
    change_count: int
    state: Any  # as `ShardSet.pack` returns it


# -- replies ---------------------------------------------------------------------------------------------------------


class Done(ParameterMessage, frozen=True):
    """Success. `number` is the requested number, if the request has one."""

    number: int = 0


class RowValues(ParameterMessage, frozen=True):
    """The requested values follow, in the order of the request."""

    step: int


class ChangedRows(ParameterMessage, frozen=True):
    """Reply to `PullChanged`: one byte per row (whether it changed), the values of changed rows, and the table's version."""

    replication_id: str
    version: int


class ShardingChanged(ParameterMessage, frozen=True):
    """The request's sharding is outdated: slots have moved. This is the newer sharding."""

    sharding: Sharding


class RequestFailed(ParameterMessage, frozen=True):
    """The request failed. `is_stale`: its rank has a newer process. `is_disk_error`: the server cannot write."""

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
ReplicatedChange = DeclareParameter | PushGradients | HandOverSlots | DetachSlots | ReleaseSlots  # sent to the replica
ServerReply = Done | RowValues | ChangedRows | ShardingChanged | RequestFailed | FullReplica
_request_decoder = msgspec.msgpack.Decoder(ServerRequest)
_reply_decoder = msgspec.msgpack.Decoder(ServerReply)
_encoder = msgspec.msgpack.Encoder()


class MessageTooLarge(UsageError):
    """A message beyond the size limit. Its arrays were skipped; the connection stays usable."""


def send_message(connection: socket.socket, message: ParameterMessage, arrays: Sequence[Any] = ()) -> None:
    """Send one frame, without copying large arrays. Raise `MessageTooLarge`."""
    views = [memoryview(array).cast("B") for array in arrays if memoryview(array).nbytes]
    encoded = _encoder.encode(message)
    if len(encoded) > ENCODED_MESSAGE_MAX:
        raise MessageTooLarge(
            f"a message of {len(encoded)} bytes without arrays exceeds the limit of {ENCODED_MESSAGE_MAX}:"
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
    """Return a peer's request and its arrays as bytes.

    Raise `MessageTooLarge` or `msgspec.MsgspecError`, after which the connection is usable, or `EOFError` and `OSError`.
    """
    encoded, size = _receive_encoded(connection)
    try:
        request = _request_decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        skip_bytes(connection, size)
        raise msgspec.DecodeError(str(error)) from error
    if size > message_max and not isinstance(request, HandOverSlots):  # slots have no size limit
        skip_bytes(connection, size)
        raise MessageTooLarge(f"a message of {size} bytes exceeds the limit of {message_max}: raise COVEY_PS_MESSAGE_MAX")
    body: Array = np.empty(size, np.uint8)
    receive_into(connection, body.data)
    return request, body


def receive_reply(connection: socket.socket, into: Sequence[Any] = ()) -> tuple[ServerReply, Array]:
    """Return the reply. The arrays of `RowValues` are received into `into`; others are returned as bytes."""
    encoded, size = _receive_encoded(connection)
    reply = _reply_decoder.decode(encoded)
    if isinstance(reply, RowValues):
        views = [memoryview(array).cast("B") for array in into]
        if sum(view.nbytes for view in views) != size:
            raise EOFError(f"received {size} bytes, expected {sum(view.nbytes for view in views)}")
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
        raise EOFError("the peer does not use this protocol")
    encoded = bytearray(length)
    receive_into(connection, memoryview(encoded))
    return bytes(encoded), size


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill memory from a connection. Raise `EOFError` if it closes before."""
    while view.nbytes:
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]


def skip_bytes(connection: socket.socket, size: int) -> None:
    """Read and discard bytes: a reply would not arrive while the peer still sends."""
    buffer = memoryview(bytearray(SKIP_BUFFER_BYTES))
    while size:
        part = buffer[: min(size, SKIP_BUFFER_BYTES)]
        receive_into(connection, part)
        size -= part.nbytes


def socket_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tune_connection(connection: socket.socket) -> None:
    """Set TCP options: no delay, and detection of a dead peer."""
    set_tcp_options(connection)
