"""Connections between servers.

A server connects to another one when it has something to send. Chunks and acknowledgements of replicas are sent back over the
connection of their request. Other messages, also replies to claims, are sent over the connection that the sender opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from covey.core.federated.messages import (
    BetweenServers,
    Chunk,
    FetchChunk,
    PeerHello,
    ReplicateUpdate,
    ServerInfo,
    UpdateReplicated,
)
from covey.core.messages import Message
from covey.errors import PeerError
from covey.log import log
from covey.runtime.credentials import Credentials
from covey.transport import address
from covey.transport.connection import Connection, Listener, connect

CHUNK_BYTES_MAX: Final = 4 * 1024 * 1024
REPLICATIONS_IN_FLIGHT_MAX: Final = 8  # records sent at once; a connection with too many unsent bytes would be closed
PEER_REPLY_TIMEOUT_S: Final = 30.0  # for one chunk
RETRY_S: Final = 0.1
_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(BetweenServers)

BytesLike = bytes | memoryview


class ServerLinks:
    """Connections to the other servers. `send_to_server` is best effort; `fetch` and `copy` raise `PeerError` if they fail."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        on_message: Callable[[str, Message], None],
        on_connected: Callable[[str], None],
        read_chunk: Callable[[str, int], BytesLike | None],
        copy: Callable[[str, ReplicateUpdate], None],
    ) -> None:
        self._credentials = credentials
        self._on_peer_message = on_message
        self._on_peer_connected = on_connected
        self._read_for_peer = read_chunk
        self._store_replica = copy
        self._node_id = ""
        self._members: dict[str, ServerInfo] = {}
        self._connections: dict[str, Connection] = {}  # outbound ones, by node id
        self._inbound_node_ids: dict[int, str] = {}  # by the identity of a connection: the server that connected
        self._connect_tasks: dict[str, asyncio.Task[None]] = {}
        self._pending_chunks: dict[tuple[str, str, int, int], asyncio.Future[Chunk]] = {}
        self._pending_replications: dict[int, asyncio.Future[None]] = {}
        self._refusal_reasons: dict[str, str] = {}  # by node id: why this server refuses to use that one; logged once
        self._listener: Listener | None = None
        self._serial = 0
        self._small_record_slots = asyncio.Semaphore(REPLICATIONS_IN_FLIGHT_MAX)
        self._large_record_lock = asyncio.Lock()
        self._partial_records: dict[int, bytearray] = {}  # by the identity of a connection: the record received so far

    async def open(self, sockets: list[socket.socket]) -> None:
        self._listener = Listener(
            sockets,
            self._credentials.secret,
            self._credentials.server_context,
            decoder=_decoder,
            on_open=lambda connection: None,
            on_message=self._on_inbound_message,
            on_close=self._on_inbound_closed,
        )
        await self._listener.open()

    def close(self) -> None:
        for task in self._connect_tasks.values():
            task.cancel()
        for connection in list(self._connections.values()):
            connection.close()
        if self._listener is not None:
            self._listener.close()

    def set_members(self, node_id: str, members: tuple[ServerInfo, ...]) -> None:
        """Set this server's id and the members. Close outbound connections to members whose address has changed."""
        self._node_id = node_id
        for peer in members:
            old = self._members.get(peer.node_id)
            if old is not None and old.peer_address != peer.peer_address and peer.node_id in self._connections:
                self._connections.pop(peer.node_id).close("the server has a new address")
        self._members = {peer.node_id: peer for peer in members if peer.node_id != node_id}

    def send_to_server(self, node_id: str, message: Message) -> None:
        """Send to a server. Without a connection, drop the message and, if the server is a member, start to connect."""
        connection = self._connections.get(node_id)
        if connection is not None:
            connection.send(message)
        elif node_id in self._members and node_id not in self._connect_tasks:
            task = asyncio.get_running_loop().create_task(self._connect(node_id))
            self._connect_tasks[node_id] = task
            task.add_done_callback(lambda _: self._connect_tasks.pop(node_id, None))

    async def fetch(self, node_id: str, what: str, round_number: int) -> bytearray:
        """Return a complete resource of a member, named as in `FetchChunk`.

        Raise `PeerError` if the member is unreachable or lacks the resource, or a chunk takes longer than PEER_REPLY_TIMEOUT_S.
        """
        content = bytearray()
        async for chunk in self.fetch_chunks(node_id, what, round_number):
            content += chunk
        return content

    async def fetch_chunks(self, node_id: str, what: str, round_number: int) -> AsyncIterator[bytes]:
        """Yield the chunks of a member's resource in order. Raise `PeerError` as `fetch`."""
        start = 0
        while True:
            chunk = await self._fetch_chunk(node_id, what, round_number, start)
            if chunk.total < 0 or (not chunk.data and start < chunk.total):
                raise PeerError(f"server {node_id} has no {what} of round {round_number}")
            yield chunk.data
            start += len(chunk.data)
            if start >= chunk.total:
                return

    async def copy(self, node_id: str, instance_id: str, round_number: int, record: bytes) -> None:
        """Store a replica of a log record on a member, in chunks if it is large.

        Raise `PeerError` if the member is unreachable, a connection is lost, or the member does not acknowledge a chunk within
        PEER_REPLY_TIMEOUT_S.
        """
        if len(record) <= CHUNK_BYTES_MAX:
            async with self._small_record_slots:
                return await self._replicate_chunk(node_id, instance_id, round_number, record)
        async with self._large_record_lock:
            for start in range(0, len(record), CHUNK_BYTES_MAX):
                chunk = record[start : start + CHUNK_BYTES_MAX]
                rest = len(record) - start - len(chunk)
                await self._replicate_chunk(node_id, instance_id, round_number, chunk, start, rest)
        return None

    async def _replicate_chunk(
        self, node_id: str, instance_id: str, round_number: int, record: bytes, offset: int = 0, rest: int = 0
    ) -> None:
        self._serial += 1
        serial = self._serial
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending_replications[serial] = waiting
        try:
            connection = await self._get_connection(node_id)
            connection.send(ReplicateUpdate(instance_id, round_number, serial, record, offset, rest))
            async with asyncio.timeout(PEER_REPLY_TIMEOUT_S):
                await waiting
        except TimeoutError:
            raise PeerError(f"server {node_id} did not store a replica within {PEER_REPLY_TIMEOUT_S:g} s") from None
        finally:
            self._pending_replications.pop(serial, None)

    async def _fetch_chunk(self, node_id: str, what: str, round_number: int, offset: int) -> Chunk:
        key = (node_id, what, round_number, offset)
        waiting = self._pending_chunks.get(key)
        try:
            if waiting is None:
                waiting = self._pending_chunks[key] = asyncio.get_running_loop().create_future()
                connection = await self._get_connection(node_id)
                connection.send(FetchChunk(what, round_number, offset))
            async with asyncio.timeout(PEER_REPLY_TIMEOUT_S):
                return await asyncio.shield(waiting)
        except TimeoutError:
            raise PeerError(f"server {node_id} did not send its {what} within {PEER_REPLY_TIMEOUT_S:g} s") from None
        finally:
            self._pending_chunks.pop(key, None)

    async def _get_connection(self, node_id: str) -> Connection:
        for _ in range(20):
            if node_id in self._connections:
                return self._connections[node_id]
            self.send_to_server(node_id, PeerHello(self._node_id))
            task = self._connect_tasks.get(node_id)
            if task is not None:
                with contextlib.suppress(PeerError):
                    await asyncio.shield(task)
            if node_id not in self._connections:
                await asyncio.sleep(RETRY_S)
        raise PeerError(f"server {node_id} is unreachable")

    async def _connect(self, node_id: str) -> None:
        host, port = address.split_host_port(self._members[node_id].peer_address)
        opened: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

        def closed(connection: Connection, reason: str) -> None:
            if not opened.done():
                opened.set_exception(PeerError(reason))
            if connection.peer_requires_no_secret and self._refusal_reasons.get(node_id) != reason:
                self._refusal_reasons[node_id] = reason
                log.warning("server %s is not used as a peer: %s", node_id, reason)
            self._on_connection_lost(node_id, connection, reason)

        try:
            await connect(
                host,
                port,
                self._credentials.secret,
                self._credentials.client_context,
                insist=self._credentials.secret_configured,
                role="server",
                decoder=_decoder,
                on_open=lambda connection: None if opened.done() else opened.set_result(connection),
                on_message=lambda _, message: self._on_reply(node_id, message),
                on_close=closed,
            )
            connection = await opened
        except PeerError:
            return  # the next message connects again
        connection.send(PeerHello(self._node_id))
        self._connections[node_id] = connection
        self._on_peer_connected(node_id)

    def _on_connection_lost(self, node_id: str, connection: Connection, reason: str) -> None:
        if self._connections.get(node_id) is connection:
            del self._connections[node_id]
        error = PeerError(f"the connection to server {node_id} was lost ({reason})")
        for key, waiting in self._pending_chunks.items():
            if key[0] == node_id and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # marks it as retrieved, in case no task awaits it any more
        for copied in self._pending_replications.values():  # the record is sent again, possibly to another server
            if not copied.done():
                copied.set_exception(error)
                copied.exception()

    def _on_reply(self, node_id: str, message: Message) -> None:
        if isinstance(message, Chunk):
            waiting = self._pending_chunks.get((node_id, message.resource, message.round, message.offset))
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, UpdateReplicated):
            copied = self._pending_replications.get(message.serial)
            if copied is not None and not copied.done():
                copied.set_result(None)

    def _on_inbound_closed(self, connection: Connection, reason: str) -> None:
        self._inbound_node_ids.pop(id(connection), None)
        self._partial_records.pop(id(connection), None)

    def _on_replica_chunk(self, connection: Connection, sender: str, message: ReplicateUpdate) -> None:
        """Collect the chunks of a replica, and store it when it is complete.

        Raise `PeerError` if a chunk is missing or the replica cannot be stored.
        """
        if message.offset or message.remaining_bytes:
            record = self._partial_records.pop(id(connection), bytearray()) if message.offset else bytearray()
            if len(record) != message.offset:
                raise PeerError(f"received a replica's chunk at offset {message.offset}: expected offset {len(record)}")
            record += message.record
            if message.remaining_bytes:
                self._partial_records[id(connection)] = record
                return
            message = msgspec.structs.replace(message, record=bytes(record))
        self._store_replica(sender, message)

    def _on_inbound_message(self, connection: Connection, message: Message) -> None:
        if isinstance(message, PeerHello):
            self._inbound_node_ids[id(connection)] = message.node_id
            return
        sender = self._inbound_node_ids.get(id(connection))
        if sender is None:
            connection.close("the first message was not PeerHello")
        elif isinstance(message, FetchChunk):
            content = self._read_for_peer(message.resource, message.round)
            if content is None:
                connection.send(Chunk(message.resource, message.round, message.offset, -1))
            else:
                data = bytes(content[message.offset : message.offset + CHUNK_BYTES_MAX])
                connection.send(Chunk(message.resource, message.round, message.offset, len(content), data))
        elif isinstance(message, ReplicateUpdate):
            try:
                self._on_replica_chunk(connection, sender, message)
            except PeerError as error:
                connection.close(str(error))
            else:
                connection.send(UpdateReplicated(message.serial))
        else:
            self._on_peer_message(sender, message)
