"""Connections that carry messages in both directions after a handshake: over TCP, with or without TLS, or a Unix socket.

A connection reports to its owner by callbacks. Its handshake must be complete within `HANDSHAKE_TIMEOUT_S`. It is aborted if
more than `WRITE_BUFFER_MAX` bytes are queued, because the peer does not read. A listener limits the peers that have not sent
anything: to `UNAUTHENTICATED_MAX`, or half the limit of open files if that is lower. Above the limit the oldest one is closed.
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

from covey.core.addresses import is_loopback
from covey.core.messages import Message
from covey.errors import PeerError
from covey.transport import address, tls
from covey.transport.address import BACKLOG
from covey.transport.framing import FrameDecoder, encode_frame, from_agent_decoder, from_node_decoder, from_scheduler_decoder
from covey.transport.handshake import ClientHandshake, HandshakeError, SecretNotRequired, ServerHandshake, is_mindspore
from covey.wall_clock import wall_time

HANDSHAKE_TIMEOUT_S: Final = 10.0
# The server sends its first line after the client's first bytes, or after this time; covey's nodes send theirs immediately.
FIRST_BYTES_TIMEOUT_S: Final = 1.0
CONNECT_TIMEOUT_S: Final = 10.0
TLS_HANDSHAKES_MAX: Final = 2000  # concurrent TLS handshakes; further clients are closed and retry
UNAUTHENTICATED_MAX: Final = 2 * BACKLOG  # more than a full backlog, which is accepted before the first bytes are read
WRITE_BUFFER_MAX: Final = 64 * 1024 * 1024  # bytes queued for a peer that does not read

TOO_MANY_UNAUTHENTICATED: Final = "too many connections, and it has not sent anything"
TCP_INFO_LAST_ACK: Final = slice(56, 60)  # field of the kernel's tcp_info: milliseconds since the last acknowledgement


T = TypeVar("T")


class SilentPeers(Generic[T]):
    """Peers that connected and have not sent anything, the oldest first; always empty if `limit` is 0."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # 0: no limit
        self._peers: dict[T, None] = {}

    def add_and_evict(self, peer: T) -> T | None:
        """Add a peer. If there are now more than the limit, remove and return the oldest one, else return None."""
        if not self._limit:
            return None
        self._peers[peer] = None
        if len(self._peers) <= self._limit:
            return None
        oldest = next(iter(self._peers))
        self.remove(oldest)
        return oldest

    def remove(self, peer: T) -> None:
        self._peers.pop(peer, None)


class NoListenerError(PeerError):
    """The host refused the connection; usually no process listens on the port. If a host name has several addresses and all
    refuse, `connect` raises a plain `PeerError` instead."""


class Connection(asyncio.Protocol):
    """One end of a connection. The callbacks are called in the event loop: `on_open` after the handshake, `on_message` for each
    message, and `on_close` once, with the reason, also if the handshake failed. At a listener, `on_mindspore` is called before
    `on_close` if the peer's first bytes are MindSpore's."""

    __slots__ = (
        "_frame_decoder",
        "_handshake",
        "_handshake_timer",
        "_hello_timer",
        "_transport",
        "close_reason",
        "id",
        "leader_token",
        "on_close",
        "on_message",
        "on_mindspore",
        "on_open",
        "peer_address",
        "peer_port",
        "peer_requires_no_secret",
        "refused_by_peer",
        "scheduler_clock",
        "silence_s",
        "unauthenticated_peers",
        "violated_protocol",
    )

    def __init__(
        self,
        handshake: ServerHandshake | ClientHandshake,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        on_open: Callable[[Connection], None],
        on_message: Callable[[Connection, Any], None],
        on_close: Callable[[Connection, str], None],
        on_mindspore: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        self.id = 0  # set by the owner
        self.scheduler_clock = 0.0  # at a node: the scheduler's wall clock during the handshake, seconds since 1970
        self.leader_token = 0  # at a node: the scheduler's fencing token; 0: no standbys
        self.silence_s = -1.0  # at a node: seconds without a message after which the scheduler is lost; negative: no limit
        self.peer_address = ""  # IP address; "?" or a path for a Unix socket
        self.peer_port = 0  # 0 for a Unix socket
        self.unauthenticated_peers: SilentPeers[Connection] = SilentPeers(0)  # one object for all connections of a listener
        self.close_reason = ""  # the first reason that this side gave to `close` or `abort`
        self.violated_protocol = False  # the handshake failed, or the peer sent something invalid
        self.refused_by_peer = False  # the handshake failed, and a retry would fail in the same way
        self.peer_requires_no_secret = False  # this side refused the peer, which does not require the join secret
        self.on_open = on_open
        self.on_message = on_message
        self.on_close = on_close
        self.on_mindspore = on_mindspore
        self._handshake: ServerHandshake | ClientHandshake | None = handshake
        self._frame_decoder = FrameDecoder(decoder)
        self._transport: asyncio.Transport | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._hello_timer: asyncio.TimerHandle | None = None  # at a listener: delays its first line

    @property
    def has_finished_handshake(self) -> bool:
        return self._handshake is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        name = transport.get_extra_info("peername")
        if name and name == transport.get_extra_info("sockname"):
            return self._abort_self_connection(transport.get_extra_info("socket"))
        self.peer_address, self.peer_port = name[:2] if isinstance(name, tuple) else (str(name or "?"), 0)
        set_tcp_options(transport.get_extra_info("socket"))
        if (oldest := self.unauthenticated_peers.add_and_evict(self)) is not None:
            oldest.abort(TOO_MANY_UNAUTHENTICATED)
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(HANDSHAKE_TIMEOUT_S, self._on_handshake_timeout)
        self._hello_timer = (
            loop.call_later(FIRST_BYTES_TIMEOUT_S, self._send_hello) if isinstance(self._handshake, ServerHandshake) else None
        )
        return self._send_hello() if self._hello_timer is None else None

    def _send_hello(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        assert self._handshake is not None
        if isinstance(self._handshake, ClientHandshake) and self.peer_port and not is_loopback(self.peer_address):
            self._handshake.insist()  # every listener beyond loopback requires a secret, even if none was configured
        self._write(self._handshake.first_line())

    def _abort_self_connection(self, sock: Any) -> None:
        """Abort a connection of a socket to itself, which TCP can make if no process listens on an ephemeral port."""
        # Without this, the port would stay in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort("no process listens there")

    def data_received(self, data: bytes) -> None:
        self.unauthenticated_peers.remove(self)
        try:
            rest = self._continue_handshake(data) if self._handshake is not None else data
            if rest:
                for message in self._frame_decoder.feed(rest):
                    self.on_message(self, message)
        except PeerError as error:
            self.violated_protocol = True
            if isinstance(error, HandshakeError):
                self.refused_by_peer, self.peer_requires_no_secret = error.final, isinstance(error, SecretNotRequired)
                self._write(error.reply)
            self.close(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.unauthenticated_peers.remove(self)
        for timer in (self._handshake_timer, self._hello_timer):
            if timer is not None:
                timer.cancel()
        reason = self.close_reason or self._describe_loss(exc)
        self._transport = None
        self.on_close(self, reason)

    def send(self, message: Message) -> None:
        """Queue a message; drop it if the connection is closed or closing. If more than `WRITE_BUFFER_MAX` bytes are then
        queued, the connection is aborted."""
        self._write(encode_frame(message))

    def close(self, reason: str = "closed by this side") -> None:
        """Close after the queued messages are sent. `on_close` receives the first reason given here or to `abort`."""
        self.close_reason = self.close_reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close immediately and drop the queued messages. `on_close` receives the first reason given here or to `close`."""
        self.close_reason = self.close_reason or reason
        if self._transport is not None:
            self._transport.abort()

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 if the connection is closed."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        return sock.fileno() if sock is not None else -1

    def unsent_bytes(self) -> int:
        """Return the number of bytes that are queued and not yet passed to the kernel; 0 if the connection is closed."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def since_last_ack_s(self) -> float:
        """Return the seconds since the last acknowledgement by the peer's kernel, also of a keepalive.

        Raises `OSError` on a closed connection and on a Unix socket.
        """
        with socket.socket(fileno=os.dup(self.fileno())) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_LAST_ACK.stop)
        return int.from_bytes(info[TCP_INFO_LAST_ACK], sys.byteorder) / 1000

    def local_address(self) -> str:
        """Return the local IP address of an open TCP connection."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    def local_port(self) -> int:
        assert self._transport is not None
        return int(self._transport.get_extra_info("sockname")[1])

    def _continue_handshake(self, data: bytes) -> bytes:
        handshake = self._handshake
        if isinstance(handshake, ServerHandshake):
            if is_mindspore(data):
                self.on_mindspore(self)
            elif self._hello_timer is not None:
                self._send_hello()
            done = handshake.feed(data, wall_time())
            if done is None:
                return b""
            reply, rest = done
            self._write(reply)
        else:
            assert handshake is not None
            reply, after = handshake.feed(data)
            if reply:
                self._write(reply)
            if after is None:
                return b""
            rest = after
            self.scheduler_clock, self.leader_token, self.silence_s = (
                handshake.scheduler_clock,
                handshake.leader_token,
                handshake.silence_s,
            )
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
            self._handshake_timer = None
        self._handshake = None
        self.on_open(self)
        return rest

    def _describe_loss(self, exc: Exception | None) -> str:
        encrypted = self._transport is not None and self._transport.get_extra_info("ssl_object") is not None
        if exc is None and self._handshake is not None and encrypted:
            return tls.explain_connection_error(EOFError(), connecting=True)  # TLS 1.3 reports a refused certificate like this
        reason = tls.explain_connection_error(exc, connecting=False) if exc else "closed by the other side"
        if self._handshake is None:
            return reason
        hint = ": it may expect TLS" if isinstance(self._handshake, ClientHandshake) and not encrypted else ""
        return f"{reason} during the handshake{hint}"

    def _on_handshake_timeout(self) -> None:
        self.abort(f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s")

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > WRITE_BUFFER_MAX:
            self.abort(f"it does not read: more than {WRITE_BUFFER_MAX} bytes are queued")


def set_tcp_options(sock: Any) -> None:
    """Set the options by which the kernel detects a lost host: keepalive after 10 s without data, then every 5 s, and an error
    if data is not acknowledged for 30 s. Disable Nagle's algorithm. Options that the socket lacks are skipped; `sock` may be
    None."""
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
    """A server on bound sockets, from `open` to `close`. `calls` are the callbacks of each `Connection`. If a TLS handshake
    fails, `on_close` is called with a `Connection` that was never open. Unix sockets do not use TLS."""

    def __init__(
        self,
        sockets: list[socket.socket],
        secret: str,
        context: ssl.SSLContext | None,
        *,
        decoder: Any = from_node_decoder,
        token: int = 0,
        silence_s: float = -1.0,
        **calls: Any,
    ) -> None:
        silent_max = min(UNAUTHENTICATED_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._sockets = sockets
        self._leader_info = (token, silence_s)
        self._decoder = decoder
        self._secret = secret
        self._tls_context = context
        self._callbacks = calls
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: SilentPeers[Connection] = SilentPeers(silent_max)
        # TLS connections that have not sent anything
        self._awaiting_first_bytes: SilentPeers[asyncio.Future[None]] = SilentPeers(silent_max)
        self._tls_handshakes = 0

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            if sock.family == socket.AF_UNIX:
                self._servers.append(await loop.create_unix_server(self._make_connection, sock=sock, backlog=BACKLOG))
            elif self._tls_context is None:
                self._servers.append(await loop.create_server(self._make_connection, sock=sock, backlog=BACKLOG))
            else:
                self._start_task(self._accept_tls(sock))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()

    def _make_connection(self) -> Connection:
        connection = Connection(ServerHandshake(self._secret, *self._leader_info), self._decoder, **self._callbacks)
        connection.unauthenticated_peers = self._unauthenticated
        return connection

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_tls(self, sock: socket.socket) -> None:
        """Accept TLS connections until cancelled. Replaces asyncio's server, which does not report failed handshakes."""
        while True:
            try:
                accepted, peer = await asyncio.get_running_loop().sock_accept(sock)
            except OSError:  # out of descriptors, or the peer has disconnected
                await asyncio.sleep(0.05)
                continue
            self._start_task(self._run_tls_handshake(accepted, str(peer[0])))

    async def _run_tls_handshake(self, accepted: socket.socket, peer: str) -> None:
        try:
            await self._wait_for_first_bytes(accepted)
            self._tls_handshakes += 1
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_connection, accepted, ssl=self._tls_context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                )
            finally:
                self._tls_handshakes -= 1
        except (OSError, ssl.SSLError, PeerError) as error:
            accepted.close()
            connection = self._make_connection()
            connection.peer_address = peer
            connection.on_close(
                connection,
                str(error) if isinstance(error, PeerError) else tls.explain_connection_error(error, connecting=False),
            )

    async def _wait_for_first_bytes(self, accepted: socket.socket) -> None:
        """Wait for the first bytes, so that an idle connection does not count as a TLS handshake. Raises `PeerError` if the
        connection must be closed instead."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        if (oldest := self._awaiting_first_bytes.add_and_evict(readable)) is not None:
            oldest.cancel(TOO_MANY_UNAUTHENTICATED)

        def on_readable() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(accepted, on_readable)
        try:
            await asyncio.wait([readable], timeout=HANDSHAKE_TIMEOUT_S)
        finally:
            loop.remove_reader(accepted)
            self._awaiting_first_bytes.remove(readable)
        if readable.cancelled() or self._tls_handshakes >= TLS_HANDSHAKES_MAX:
            raise PeerError(TOO_MANY_UNAUTHENTICATED)
        if not readable.done():
            raise PeerError(f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s")


async def connect(
    host: str,
    port: int,
    secret: str,
    context: ssl.SSLContext | None,
    *,
    insist: Any = False,
    role: Any = "scheduler",
    decoder: Any = from_scheduler_decoder,
    **calls: Any,
) -> Connection:
    """Connect to a scheduler, or to another peer that `role` names in messages; return after TLS and before the handshake.

    `calls` are the callbacks of the `Connection`. The handshake fails if this side has a secret, the peer does not require one,
    and `insist` is set or the peer is beyond loopback. Raises `PeerError` if connecting fails or takes longer than
    `CONNECT_TIMEOUT_S`, and `NoListenerError` if the host refuses the connection.
    """
    loop = asyncio.get_running_loop()
    where = f"the {role} at {address.join_host_port(host, port)}"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(ClientHandshake(secret, insist=insist, where=where), decoder, **calls),
                host,
                port,
                ssl=context,
            )
    except TimeoutError:
        raise PeerError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
    except ConnectionRefusedError as error:
        raise NoListenerError(tls.explain_connection_error(error, connecting=True)) from None
    except (OSError, ssl.SSLError) as error:
        raise PeerError(tls.explain_connection_error(error, connecting=True)) from None
    return connection


async def connect_to_agent(path: str, **calls: Any) -> Connection:
    """Connect to an agent at the path of its Unix socket, and return before the handshake. `calls` are the callbacks of the
    `Connection`. Raises `PeerError` if connecting fails or takes longer than `CONNECT_TIMEOUT_S`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_unix_connection(
                lambda: Connection(ClientHandshake(""), from_agent_decoder, **calls), path
            )
    except (OSError, TimeoutError) as error:
        raise PeerError(f"the agent does not answer at {path} ({error or 'timeout'})") from None
    return connection
