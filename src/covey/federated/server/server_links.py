"""Links between servers: each calls each other, says who it is, and sends; what is asked for comes back the same way."""

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

PIECE_MAX: Final = 4 * 1024 * 1024
COPIES_MAX: Final = 8  # records on their way at once: a link that holds more than it can send is cut
FETCH_S: Final = 30.0  # for one piece
RETRY_S: Final = 0.1
_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(BetweenServers)

Bytes = bytes | memoryview


class Peers:
    """The other servers. What cannot be sent is dropped: whoever says something that matters says it again."""

    def __init__(
        self,
        guard: Credentials,
        *,
        heard: Callable[[str, Message], None],
        reached: Callable[[str], None],
        give: Callable[[str, int], Bytes | None],
        copy: Callable[[str, ReplicateUpdate], None],
    ) -> None:
        self._guard = guard
        self._heard = heard
        self._reached = reached
        self._give = give
        self._copy = copy
        self._me = ""
        self._members: dict[str, ServerInfo] = {}
        self._links: dict[str, Connection] = {}  # called by us, greeted
        self._callers: dict[int, str] = {}  # by the identity of a link: who called
        self._calling: dict[str, asyncio.Task[None]] = {}
        self._pieces: dict[tuple[str, str, int, int], asyncio.Future[Chunk]] = {}
        self._copies: dict[int, asyncio.Future[None]] = {}
        self._refused: dict[str, str] = {}  # by node id: why this server refuses to use that one; logged once
        self._listener: Listener | None = None
        self._serial = 0
        self._small = asyncio.Semaphore(COPIES_MAX)
        self._large = asyncio.Lock()
        self._partial: dict[int, bytearray] = {}  # by the identity of a link: the record that is coming in pieces

    async def open(self, sockets: list[socket.socket]) -> None:
        self._listener = Listener(
            sockets,
            self._guard.secret,
            self._guard.server_context,
            decoder=_decoder,
            on_open=lambda link: None,
            on_message=self._from_caller,
            on_close=self._caller_gone,
        )
        await self._listener.open()

    def close(self) -> None:
        for task in self._calling.values():
            task.cancel()
        for link in list(self._links.values()):
            link.close()
        if self._listener is not None:
            self._listener.close()

    def follow(self, me: str, members: tuple[ServerInfo, ...]) -> None:
        """Whom to know from now on."""
        self._me = me
        for peer in members:
            old = self._members.get(peer.node_id)
            if old is not None and old.peer_address != peer.peer_address and peer.node_id in self._links:
                self._links.pop(peer.node_id).close("it has another address now")
        self._members = {peer.node_id: peer for peer in members if peer.node_id != me}

    def tell(self, node_id: str, message: Message) -> None:
        """Send to a member, calling it first where there is no link yet: then the message is lost, and said again."""
        link = self._links.get(node_id)
        if link is not None:
            link.send(message)
        elif node_id in self._members and node_id not in self._calling:
            task = asyncio.get_running_loop().create_task(self._call(node_id))
            self._calling[node_id] = task
            task.add_done_callback(lambda _: self._calling.pop(node_id, None))

    async def fetch(self, node_id: str, what: str, round_number: int) -> bytearray:
        """The whole of something a member has. Raises `PeerError`."""
        found = bytearray()
        async for piece in self.pieces(node_id, what, round_number):
            found += piece
        return found

    async def pieces(self, node_id: str, what: str, round_number: int) -> AsyncIterator[bytes]:
        """The same, one piece after the other."""
        start = 0
        while True:
            piece = await self._piece(node_id, what, round_number, start)
            if piece.total < 0 or (not piece.data and start < piece.total):
                raise PeerError(f"server {node_id} has no {what} of round {round_number}")
            yield piece.data
            start += len(piece.data)
            if start >= piece.total:
                return

    async def copy(self, node_id: str, life: str, round_number: int, record: bytes) -> None:
        """Have a member keep a record too. Raises `PeerError`."""
        if len(record) <= PIECE_MAX:
            async with self._small:
                return await self._copy_piece(node_id, life, round_number, record)
        async with self._large:
            for start in range(0, len(record), PIECE_MAX):
                piece = record[start : start + PIECE_MAX]
                rest = len(record) - start - len(piece)
                await self._copy_piece(node_id, life, round_number, piece, start, rest)
        return None

    async def _copy_piece(
        self, node_id: str, life: str, round_number: int, record: bytes, offset: int = 0, rest: int = 0
    ) -> None:
        self._serial += 1
        serial = self._serial
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._copies[serial] = waiting
        try:
            link = await self._linked(node_id)
            link.send(ReplicateUpdate(life, round_number, serial, record, offset, rest))
            async with asyncio.timeout(FETCH_S):
                await waiting
        except TimeoutError:
            raise PeerError(f"server {node_id} did not keep a copy within {FETCH_S:g} s") from None
        finally:
            self._copies.pop(serial, None)

    async def _piece(self, node_id: str, what: str, round_number: int, offset: int) -> Chunk:
        key = (node_id, what, round_number, offset)
        waiting = self._pieces.get(key)
        try:
            if waiting is None:
                waiting = self._pieces[key] = asyncio.get_running_loop().create_future()
                link = await self._linked(node_id)
                link.send(FetchChunk(what, round_number, offset))
            async with asyncio.timeout(FETCH_S):
                return await asyncio.shield(waiting)
        except TimeoutError:
            raise PeerError(f"server {node_id} did not give its {what} within {FETCH_S:g} s") from None
        finally:
            self._pieces.pop(key, None)

    async def _linked(self, node_id: str) -> Connection:
        for _ in range(20):
            if node_id in self._links:
                return self._links[node_id]
            self.tell(node_id, PeerHello(self._me))
            task = self._calling.get(node_id)
            if task is not None:
                with contextlib.suppress(PeerError):
                    await asyncio.shield(task)
            if node_id not in self._links:
                await asyncio.sleep(RETRY_S)
        raise PeerError(f"server {node_id} cannot be reached")

    async def _call(self, node_id: str) -> None:
        host, port = address.split_host_port(self._members[node_id].peer_address)
        opened: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

        def closed(link: Connection, reason: str) -> None:
            if not opened.done():
                opened.set_exception(PeerError(reason))
            if link.peer_requires_no_secret and self._refused.get(node_id) != reason:
                self._refused[node_id] = reason
                log.warning("server %s is not used as a peer: %s", node_id, reason)
            self._lost(node_id, link, reason)

        try:
            await connect(
                host,
                port,
                self._guard.secret,
                self._guard.client_context,
                insist=self._guard.secret_configured,
                role="server",
                decoder=_decoder,
                on_open=lambda link: None if opened.done() else opened.set_result(link),
                on_message=lambda _, message: self._from_called(node_id, message),
                on_close=closed,
            )
            link = await opened
        except PeerError:
            return  # the tick calls again
        link.send(PeerHello(self._me))
        self._links[node_id] = link
        self._reached(node_id)

    def _lost(self, node_id: str, link: Connection, reason: str) -> None:
        if self._links.get(node_id) is link:
            del self._links[node_id]
        error = PeerError(f"server {node_id} went away ({reason})")
        for key, waiting in self._pieces.items():
            if key[0] == node_id and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # it may be that nobody waits any more
        for copied in self._copies.values():  # the record is sent again to whoever follows
            if not copied.done():
                copied.set_exception(error)
                copied.exception()

    def _from_called(self, node_id: str, message: Message) -> None:
        if isinstance(message, Chunk):
            waiting = self._pieces.get((node_id, message.resource, message.round, message.offset))
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, UpdateReplicated):
            copied = self._copies.get(message.serial)
            if copied is not None and not copied.done():
                copied.set_result(None)

    def _caller_gone(self, link: Connection, reason: str) -> None:
        self._callers.pop(id(link), None)
        self._partial.pop(id(link), None)

    def _kept(self, link: Connection, caller: str, message: ReplicateUpdate) -> None:
        """Keep a copy once it is whole."""
        if message.offset or message.remaining_bytes:
            whole = self._partial.pop(id(link), bytearray()) if message.offset else bytearray()
            if len(whole) != message.offset:
                raise PeerError(f"a copy's piece at {message.offset} came after {len(whole)} bytes")
            whole += message.record
            if message.remaining_bytes:
                self._partial[id(link)] = whole
                return
            message = msgspec.structs.replace(message, record=bytes(whole))
        self._copy(caller, message)

    def _from_caller(self, link: Connection, message: Message) -> None:
        if isinstance(message, PeerHello):
            self._callers[id(link)] = message.node_id
            return
        caller = self._callers.get(id(link))
        if caller is None:
            link.close("it did not say who it is")
        elif isinstance(message, FetchChunk):
            whole = self._give(message.resource, message.round)
            if whole is None:
                link.send(Chunk(message.resource, message.round, message.offset, -1))
            else:
                data = bytes(whole[message.offset : message.offset + PIECE_MAX])
                link.send(Chunk(message.resource, message.round, message.offset, len(whole), data))
        elif isinstance(message, ReplicateUpdate):
            try:
                self._kept(link, caller, message)
            except PeerError as error:
                link.close(str(error))
            else:
                link.send(UpdateReplicated(message.serial))
        else:
            self._heard(caller, message)
