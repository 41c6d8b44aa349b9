"""One connection between a node and its scheduler, over TCP, with or without TLS; or between a child and its agent.

A link greets, then carries messages both ways until one side closes. It reports what happened by three calls and decides
nothing. Limits: the greeting must be over in `GREETING_S`, and a peer that does not read what it is sent is cut off. Where too
many connect and say nothing, the oldest of them makes room: those keep nobody else out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

import msgspec

from covey.core.messages import Message
from covey.errors import PeerError
from covey.transport import address, tls
from covey.transport.address import BACKLOG
from covey.transport.framing import Frames, frame, from_agent, from_node, from_scheduler
from covey.transport.handshake import ClientGreeting, GreetingError, SecretNotRequired, ServerGreeting, is_mindspore
from covey.wall_clock import wall

GREETING_S: Final = 10.0
HOLD_S: Final = 1.0  # for a caller's first bytes, after which it is greeted all the same; covey's nodes send theirs at once
CONNECT_S: Final = 10.0
HANDSHAKES_MAX: Final = 2000  # TLS handshakes under way at once; further callers are closed and call again
SILENT_MAX: Final = 2 * BACKLOG  # a whole queue of the kernel's is accepted before anybody's first word is read
UNREAD_MAX: Final = 64 * 1024 * 1024  # bytes waiting for a peer that does not read

CROWDED: Final = "too many connect, and it said nothing yet"
LAST_ACK: Final = slice(56, 60)  # of the kernel's tcp_info: milliseconds since the other side last acknowledged anything


T = TypeVar("T")


class Silent(Generic[T]):
    """Those who connected and never said a word, the oldest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # 0: nobody is counted
        self._found: dict[T, None] = {}

    def join(self, one: T) -> T | None:
        """Whoever has to make room for this one."""
        if not self._limit:
            return None
        self._found[one] = None
        if len(self._found) <= self._limit:
            return None
        oldest = next(iter(self._found))
        self.leave(oldest)
        return oldest

    def leave(self, one: T) -> None:
        self._found.pop(one, None)


class NobodyListens(PeerError):
    """The other host answered: no scheduler is there."""


class Link(asyncio.Protocol):
    """Both ends. `on_open`, `on_message` and `on_close` are called in the loop, in that order. `on_mindspore` is called for a
    peer that speaks MindSpore's protocol, while the connection is still open."""

    __slots__ = (
        "_frames",
        "_greeting",
        "_held",
        "_limit",
        "_transport",
        "clock",
        "id",
        "misbehaved",
        "on_close",
        "on_message",
        "on_mindspore",
        "on_open",
        "peer",
        "port",
        "reason",
        "refused",
        "silence_s",
        "silent",
        "token",
        "turned_away",
    )

    def __init__(
        self,
        greeting: ServerGreeting | ClientGreeting,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        on_open: Callable[[Link], None],
        on_message: Callable[[Link, Any], None],
        on_close: Callable[[Link, str], None],
        on_mindspore: Callable[[Link], None] = lambda link: None,
    ) -> None:
        self.id = 0
        self.clock = 0.0  # at a node: the scheduler's wall clock when it greeted
        self.token = 0  # at a node: the scheduler's, as its leader
        self.silence_s = -1.0  # at a node: of the scheduler, after which another one is looked for
        self.peer = ""
        self.port = 0  # of the other side
        self.silent: Silent[Link] = Silent(0)  # at a listener: all that never said a word
        self.reason = ""
        self.misbehaved = False  # it sent what no peer sends
        self.turned_away = False  # the other side will not have us, now or later
        self.refused = False  # this side refuses the other, which does not require the join secret
        self.on_open = on_open
        self.on_message = on_message
        self.on_close = on_close
        self.on_mindspore = on_mindspore
        self._greeting: ServerGreeting | ClientGreeting | None = greeting
        self._frames = Frames(decoder)
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._held: asyncio.TimerHandle | None = None  # at a listener: its greeting, for `HOLD_S` or until the caller speaks

    @property
    def greeted(self) -> bool:
        return self._greeting is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        name = transport.get_extra_info("peername")
        if name and name == transport.get_extra_info("sockname"):
            return self._met_itself(transport.get_extra_info("socket"))
        self.peer, self.port = name[:2] if isinstance(name, tuple) else (str(name or "?"), 0)
        tune(transport.get_extra_info("socket"))
        if (oldest := self.silent.join(self)) is not None:
            oldest.abort(CROWDED)
        loop = asyncio.get_running_loop()
        self._limit = loop.call_later(GREETING_S, self._too_late)
        self._held = loop.call_later(HOLD_S, self._open) if isinstance(self._greeting, ServerGreeting) else None
        return self._open() if self._held is None else None

    def _open(self) -> None:
        """Send the greeting's first line."""
        if self._held is not None:
            self._held.cancel()
            self._held = None
        assert self._greeting is not None
        if isinstance(self._greeting, ClientGreeting) and self.port and not address.is_loopback(self.peer):
            self._greeting.insist()  # every listener beyond loopback requires a secret, also if none was configured
        self._write(self._greeting.opening())

    def _met_itself(self, sock: Any) -> None:
        """A call to a free port of the outgoing range can be answered by its own socket, and must not keep the port busy."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort("nobody listens there")

    def data_received(self, data: bytes) -> None:
        self.silent.leave(self)
        try:
            rest = self._greet(data) if self._greeting is not None else data
            if rest:
                for message in self._frames.feed(rest):
                    self.on_message(self, message)
        except PeerError as error:
            self.misbehaved = True
            if isinstance(error, GreetingError):
                self.turned_away, self.refused = error.final, isinstance(error, SecretNotRequired)
                self._write(error.reply)
            self.close(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.silent.leave(self)
        for timer in (self._limit, self._held):
            if timer is not None:
                timer.cancel()
        reason = self.reason or self._why(exc)
        self._transport = None
        self.on_close(self, reason)

    def send(self, message: Message) -> None:
        """Queue a message. On a closed link it is dropped: the loss has been or will be reported."""
        self._write(frame(message))

    def close(self, reason: str = "closed by this side") -> None:
        """Close once what was sent has left."""
        self.reason = self.reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close now."""
        self.reason = self.reason or reason
        if self._transport is not None:
            self._transport.abort()

    def fileno(self) -> int:
        """The socket's descriptor, or -1 once closed."""
        found = self._transport.get_extra_info("socket") if self._transport is not None else None
        return found.fileno() if found is not None else -1

    def unsent(self) -> int:
        """Bytes that wait for the other side to read."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def unheard_s(self) -> float:
        """How long ago the other side's kernel last acknowledged what was sent."""
        with socket.socket(fileno=os.dup(self.fileno())) as sock:
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK.stop)
        return int.from_bytes(told[LAST_ACK], sys.byteorder) / 1000

    def local_address(self) -> str:
        """The address by which this side reached the other: the one its peers can use."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    def local_port(self) -> int:
        """The port at this side."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("sockname")[1])

    def _greet(self, data: bytes) -> bytes:
        greeting = self._greeting
        if isinstance(greeting, ServerGreeting):
            if is_mindspore(data):
                self.on_mindspore(self)
            elif self._held is not None:
                self._open()
            done = greeting.feed(data, wall())
            if done is None:
                return b""
            reply, rest = done
            self._write(reply)
        else:
            assert greeting is not None
            reply, after = greeting.feed(data)
            if reply:
                self._write(reply)
            if after is None:
                return b""
            rest = after
            self.clock, self.token, self.silence_s = greeting.clock, greeting.token, greeting.silence_s
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        self._greeting = None
        self.on_open(self)
        return rest

    def _why(self, exc: Exception | None) -> str:
        encrypted = self._transport is not None and self._transport.get_extra_info("ssl_object") is not None
        if exc is None and self._greeting is not None and encrypted:
            return tls.explain(EOFError(), connecting=True)  # how TLS 1.3 shows that a certificate was refused
        reason = tls.explain(exc, connecting=False) if exc else "closed by the other side"
        if self._greeting is None:
            return reason
        hint = ": it may expect TLS" if isinstance(self._greeting, ClientGreeting) and not encrypted else ""
        return f"{reason} before the greeting was over{hint}"

    def _too_late(self) -> None:
        self.abort(f"it did not greet within {GREETING_S:g} s")

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > UNREAD_MAX:
            self.abort(f"it does not read: {UNREAD_MAX} bytes wait for it")


def tune(sock: Any) -> None:
    """Small messages leave at once, and a peer whose host vanished is noticed by the kernel."""
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 0), 10),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", 0), 5),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", 0), 30_000),
    )
    for level, option, value in options:
        if sock is not None and option:
            with contextlib.suppress(OSError):  # not a TCP socket, or an option this kernel lacks
                sock.setsockopt(level, option, value)


class Listener:
    """Accepts links on bound sockets until closed."""

    def __init__(
        self,
        sockets: list[socket.socket],
        secret: str,
        context: ssl.SSLContext | None,
        *,
        decoder: Any = from_node,
        token: int = 0,
        silence_s: float = -1.0,
        **calls: Any,
    ) -> None:
        silent_max = min(SILENT_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._sockets = sockets
        self._leads = (token, silence_s)
        self._decoder = decoder
        self._secret = secret
        self._context = context
        self._calls = calls
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: Silent[Link] = Silent(silent_max)
        self._unshaken: Silent[asyncio.Future[None]] = Silent(silent_max)  # TLS: before the handshake
        self._shaking = 0

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            if sock.family == socket.AF_UNIX:
                self._servers.append(await loop.create_unix_server(self._link, sock=sock, backlog=BACKLOG))
            elif self._context is None:
                self._servers.append(await loop.create_server(self._link, sock=sock, backlog=BACKLOG))
            else:
                self._keep(self._accept(sock))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()

    def _link(self) -> Link:
        link = Link(ServerGreeting(self._secret, *self._leads), self._decoder, **self._calls)
        link.silent = self._silent
        return link

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, sock: socket.socket) -> None:
        """asyncio's own server keeps failed handshakes to itself; accepting by hand lets us say why a peer was turned away."""
        while True:
            try:
                accepted, peer = await asyncio.get_running_loop().sock_accept(sock)
            except OSError:  # out of descriptors, or the peer is gone already
                await asyncio.sleep(0.05)
                continue
            self._keep(self._shake_hands(accepted, str(peer[0])))

    async def _shake_hands(self, accepted: socket.socket, peer: str) -> None:
        try:
            await self._first_word(accepted)
            self._shaking += 1
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._link, accepted, ssl=self._context, ssl_handshake_timeout=GREETING_S
                )
            finally:
                self._shaking -= 1
        except (OSError, ssl.SSLError, PeerError) as error:
            accepted.close()
            link = self._link()
            link.peer = peer
            link.on_close(link, str(error) if isinstance(error, PeerError) else tls.explain(error, connecting=False))

    async def _first_word(self, accepted: socket.socket) -> None:
        """Who says nothing takes no place among the handshakes."""
        loop = asyncio.get_running_loop()
        said: asyncio.Future[None] = loop.create_future()
        if (oldest := self._unshaken.join(said)) is not None:
            oldest.cancel(CROWDED)

        def heard() -> None:
            if not said.done():
                said.set_result(None)

        loop.add_reader(accepted, heard)
        try:
            await asyncio.wait([said], timeout=GREETING_S)
        finally:
            loop.remove_reader(accepted)
            self._unshaken.leave(said)
        if said.cancelled() or self._shaking >= HANDSHAKES_MAX:
            raise PeerError(CROWDED)
        if not said.done():
            raise PeerError(f"it did not greet within {GREETING_S:g} s")


async def connect(
    host: str,
    port: int,
    secret: str,
    context: ssl.SSLContext | None,
    *,
    insist: Any = False,
    role: Any = "scheduler",
    decoder: Any = from_scheduler,
    **calls: Any,
) -> Link:
    """Reach a scheduler, or a peer of another `role`, once. Raises `PeerError` with a sentence; success means connected, not
    yet greeted.

    `insist`: the secret was configured, so a peer that does not require it is refused. Beyond loopback it is refused as well if
    the secret is the user's own file.
    """
    loop = asyncio.get_running_loop()
    where = f"the {role} at {address.join(host, port)}"
    try:
        async with asyncio.timeout(CONNECT_S):
            _, link = await loop.create_connection(
                lambda: Link(ClientGreeting(secret, insist=insist, where=where), decoder, **calls), host, port, ssl=context
            )
    except TimeoutError:
        raise PeerError(f"no answer within {CONNECT_S:g} s") from None
    except ConnectionRefusedError as error:
        raise NobodyListens(tls.explain(error, connecting=True)) from None
    except (OSError, ssl.SSLError) as error:
        raise PeerError(tls.explain(error, connecting=True)) from None
    return link


async def connect_to_agent(path: str, **calls: Any) -> Link:
    """Reach the agent of this process, at its socket. Raises `PeerError` with a sentence."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, link = await loop.create_unix_connection(lambda: Link(ClientGreeting(""), from_agent, **calls), path)
    except (OSError, TimeoutError) as error:
        raise PeerError(f"the agent does not answer at {path} ({error or 'too late'})") from None
    return link
