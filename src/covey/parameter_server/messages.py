"""Requests to parameter servers, their replies, and the encoding of both.

A connection starts with the server's token. Then it carries frames: a fixed header, a message, and raw arrays. If a request
cannot be decoded, or its arrays are too large, the reply is `RequestFailed` and the connection stays open. A header with a
wrong magic number, or with more than `ENCODED_MESSAGE_MAX` bytes of message, closes the connection.
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
COALESCE_BYTES_MAX: Final = 1 << 16  # arrays of at most this size in total are copied and sent together with the message
SENDMSG_ARRAYS_MAX: Final = 512  # buffers per call; the kernel's limit is 1024
SKIP_BUFFER_BYTES: Final = 1 << 20
DTYPES: Final = {"float32": np.float32, "float64": np.float64}
ROWS_MAX: Final = 1 << 40
WIDTH_MAX: Final = 1 << 24
ALL: Final = -1  # as row_count: all rows of the server

ParameterName = Annotated[str, Meta(min_length=1, max_length=500)]
FolderPath = Annotated[str, Meta(max_length=4000)]
Dtype = Literal["float32", "float64"]


class ParameterMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base class of all messages; the tag in the encoding is the class name."""


class InitialValues(msgspec.Struct, frozen=True):
    """Initial values of a parameter. Random values do not depend on the number of servers."""

    kind: Literal["given", "zeros", "normal", "uniform"] = "zeros"  # given: a worker sends them with the declaration
    scale: float = 0.01  # normal: standard deviation; uniform: from -scale to scale
    seed: int = 0


class ParameterSpec(msgspec.Struct, frozen=True):
    """Declaration of a parameter: a table whose rows are pulled and pushed by number (`striped`), or an array that is pulled
    and pushed as a whole, with one number per row (`width` 1)."""

    name: ParameterName
    rows: Annotated[int, Meta(ge=1, le=ROWS_MAX)]
    width: Annotated[int, Meta(ge=1, le=WIDTH_MAX)]
    dtype: Dtype
    striped: bool
    rule: OptimizerRule
    begin: InitialValues = InitialValues()


class RowSelection(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one parameter in a push or pull. `width` and `dtype` must be those of the parameter."""

    name: ParameterName
    row_count: Annotated[int, Meta(ge=ALL, le=ROWS_MAX)]  # number of row numbers in the arrays, or ALL
    width: int = 1
    dtype: str = "float32"
    lr: float = 0.0  # learning rate; only in a push


RowSelections = Annotated[list[RowSelection], Meta(max_length=100_000)]

# -- requests --------------------------------------------------------------------------------------------------------


class ParameterRequest(ParameterMessage, frozen=True, kw_only=True):
    """Base class of workers' requests, with the version of the sharding by which the worker chose the server."""

    sharding_version: Annotated[int, Meta(ge=0)] = 0


class DeclareParameter(ParameterRequest, frozen=True):
    """Declare a parameter. With `has_values` the server creates the parameter unless it exists, and the arrays are the initial
    values if `spec.begin.kind` is "given". Without `has_values`, the reply waits until the parameter exists."""

    spec: ParameterSpec
    has_values: bool


class PushGradients(ParameterRequest, frozen=True):
    """One rank's gradients of a step. The reply `Done` is sent when the replica holder, if any, has the gradients; in sync
    mode, it also waits until all ranks have pushed the step."""

    step: Annotated[int, Meta(ge=0)]
    rank: Annotated[int, Meta(ge=0)]
    generation: int  # of the worker; a push is refused if the rank has pushed in a newer one
    selections: RowSelections


class PullValues(ParameterRequest, frozen=True):
    """Request the values of rows for a step. The reply `RowValues` waits until they can be read (`Shard.is_step_readable`)."""

    step: Annotated[int, Meta(ge=0)]
    selections: RowSelections


class PullChanged(ParameterRequest, frozen=True):
    """Request the values of rows that may have changed since they were cached. The arrays are the row numbers, then for each
    row the version at which it is cached, or -1. The server ignores the versions unless it has the same `replication_id`."""

    step: Annotated[int, Meta(ge=0)]
    selection: RowSelection
    replication_id: str


class QueryRankStep(ParameterRequest, frozen=True):
    """Request the next step that a rank must push to this server."""

    rank: Annotated[int, Meta(ge=0)]


class SaveRows(ParameterRequest, frozen=True):
    """Request to save the server's rows for this step in files below `folder`, and to delete the server's files of all but the
    `keep` highest steps."""

    step: Annotated[int, Meta(ge=0)]
    folder: FolderPath
    keep: Annotated[int, Meta(ge=1)] = 5


class LoadRows(ParameterRequest, frozen=True):
    """Request to replace all rows by those of a saved step, which another number of servers may have saved."""

    step: Annotated[int, Meta(ge=0)]
    folder: FolderPath


class OpenReplication(ParameterMessage, frozen=True):
    """Server to replica holder: start replication on this connection. The reply is the number of changes that the replica has;
    -1 if the holder has no replica with this replication id. The sender then sends `FullReplica` or the missing changes, then
    new ones."""

    server: int
    replication_id: str
    change_count: int  # of the sender; the holder does not use it


class RestoreRows(ParameterMessage, frozen=True):
    """Restarted server to another server: request the replica of its rows. The reply is `FullReplica` or `RequestFailed`."""

    server: int


class RequestReplica(ParameterMessage, frozen=True):
    """Restarted server to another server: send your rows again if the sender is your replica holder. The reply is `Done(1)` if
    it is, else `Done(0)`."""

    holder: int  # the sender


class DropReplica(ParameterMessage, frozen=True):
    """Server to the former holder of its replica: drop the replica."""

    server: int


class HandOverSlots(ParameterMessage, frozen=True):
    """Server to the new owner of slots: their rows. The new owner forwards it to its replica holder."""

    sharding_version: int
    state: Any  # [slot numbers, state as `Shard.pack` returns it]
    generations: list[int]  # by rank: generation of its newest push to the sender


class DetachSlots(ParameterMessage, frozen=True):
    """Server to replica holder: these slots are detached, to be handed over to another server."""

    slots: list[int]


class ReleaseSlots(ParameterMessage, frozen=True):
    """Server to replica holder: drop these detached slots, because another server has received them."""

    slots: list[int]


class FullReplica(ParameterMessage, frozen=True):
    """All rows and state of a server, as reply to `RestoreRows` or to initialize a replica."""

    replication_id: str
    change_count: int
    state: Any  # as `ShardSet.pack` returns it


# -- replies ---------------------------------------------------------------------------------------------------------


class Done(ParameterMessage, frozen=True):
    """Success. `number` is the result, if the request has one: a step, a number of changes, or 1 for yes and 0 for no."""

    number: int = 0


class RowValues(ParameterMessage, frozen=True):
    """The arrays are the requested values, in the order of the request."""

    step: int  # number of steps that the server has applied, in sync mode; clients do not use it


class ChangedRows(ParameterMessage, frozen=True):
    """Reply to `PullChanged`. The arrays are one byte per row (1: it may have changed), then the values of the rows that may
    have changed."""

    replication_id: str  # of the server's rows
    version: int  # at which the rows can be cached; -1: they cannot


class ShardingChanged(ParameterMessage, frozen=True):
    """The request is based on an outdated sharding; `sharding` is the newer one."""

    sharding: Sharding


class RequestFailed(ParameterMessage, frozen=True):
    """The request failed. `is_stale`: its rank has pushed in a newer generation. `is_disk_error`: the server cannot read or
    write checkpoint files."""

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
    """A message exceeds a size limit. It was not sent, or its arrays were discarded; the connection stays usable."""


def send_message(connection: socket.socket, message: ParameterMessage, arrays: Sequence[Any] = ()) -> None:
    """Send one frame, without copying large arrays.

    Raise `MessageTooLarge`, before anything is sent, if the message without arrays is too large; `OSError` if sending fails.
    """
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
    """Return a peer's request and its arrays as bytes. `message_max` limits the bytes of the arrays, except in `HandOverSlots`.

    Raise `MessageTooLarge` or `msgspec.MsgspecError`, after which the connection is usable, or `EOFError` or `OSError`.
    """
    encoded, size = _receive_encoded(connection)
    try:
        request = _request_decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        skip_bytes(connection, size)
        raise msgspec.DecodeError(str(error)) from error
    if size > message_max and not isinstance(request, HandOverSlots):
        skip_bytes(connection, size)
        raise MessageTooLarge(f"a message of {size} bytes exceeds the limit of {message_max}: raise COVEY_PS_MESSAGE_MAX")
    body: Array = np.empty(size, np.uint8)
    receive_into(connection, body.data)
    return request, body


def receive_reply(connection: socket.socket, into: Sequence[Any] = ()) -> tuple[ServerReply, Array]:
    """Return the reply and its arrays as bytes. The arrays of `RowValues` are received into `into` instead.

    Raise `EOFError` if the connection closes or `into` has another size, `msgspec.MsgspecError`, or `OSError`.
    """
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
    """Fill `view` from a connection. Raise `EOFError` if the connection closes before `view` is full, `OSError` if it fails."""
    while view.nbytes:
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]


def skip_bytes(connection: socket.socket, size: int) -> None:
    """Receive and discard bytes, because the peer reads a reply only after it has sent its arrays. Raise as `receive_into`."""
    buffer = memoryview(bytearray(SKIP_BUFFER_BYTES))
    while size:
        part = buffer[: min(size, SKIP_BUFFER_BYTES)]
        receive_into(connection, part)
        size -= part.nbytes


def socket_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tune_connection(connection: socket.socket) -> None:
    """Set TCP options: no delay of small packets, and detection of a lost host."""
    set_tcp_options(connection)
