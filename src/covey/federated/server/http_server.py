"""HTTP for many devices with large bodies: a body is received straight into the memory it will be read from.

Only what devices need: HTTP/1.1, keep-alive, Content-Length. A request is handed over whole; its answer may be given at once
or later. Heads are read by httptools. Limits: head, body, time per request, connections. Where all places are taken, the oldest
connection that never said a word makes room: those keep nobody else out.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import httptools
import numpy as np

HEAD_MAX: Final = 16 * 1024
RECEIVING_MAX: Final = 2**30  # bytes of bodies at once, whoever sends them
REQUEST_S: Final = 60.0  # from its first byte to its last, and more for what has come,
SLOWEST: Final = 10_000  # bytes a second: a slow link is not a stuck one
IDLE_S: Final = 600.0
REFUSED_S: Final = 5.0  # for a device to read why
SWEEP_S: Final = 5.0
_PHRASES: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_TLS: Final = 0x16  # what a TLS handshake begins with

Piece = bytes | memoryview


class Request:
    """One request. Answer it exactly once."""

    __slots__ = ("_connection", "_headers", "accept", "body", "content_type", "device", "method", "path")

    def __init__(self, connection: Connection, method: str, path: str, headers: dict[bytes, bytes], body: memoryview) -> None:
        self._headers = headers
        self.device = ""  # who asks, where that is proven
        self._connection = connection
        self.method = method
        self.path = path
        self.content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().decode("latin-1")
        self.accept = headers.get(b"accept", b"").decode("latin-1")
        self.body = body

    def reply(self, pieces: Sequence[Piece], content_type: str = "application/json", status: int = 200) -> None:
        """Send the answer; a device that is gone does not hear it."""
        self._connection.answer(status, content_type, pieces)

    def header(self, name: str) -> str:
        """One of ours: `x-covey-NAME`."""
        return self._headers.get(b"x-covey-" + name.encode(), b"").decode("latin-1")

    @property
    def peer(self) -> str:
        """The address it comes from."""
        return self._connection.peer

    @property
    def gone(self) -> bool:
        return self._connection.closed


class Connection(asyncio.BufferedProtocol):
    """One device's connection."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._transport: Any = None
        self._head = bytearray()  # until something comes
        self._view = memoryview(self._head)
        self._filled = 0
        self._body: memoryview | None = None
        self._received = 0
        self._busy = False
        self._close_after = False
        self._refused = False  # what still comes is not looked at
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._method = ""
        self.since = time.monotonic()
        self.closed = False
        self.peer = ""

    # -- asyncio's calls ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._site.connections.add(self)
        if len(self._site.connections) > self._site.connections_max:
            longest = next(iter(self._site.silent), None)
            if longest is None:
                return self._refuse(503, "there are too many connections: try again")
            longest.cut_off()
        self._site.silent[self] = None
        return None

    def cut_off(self) -> None:
        self._site.silent.pop(self, None)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._site.connections.discard(self)
        self._site.silent.pop(self, None)
        self._let_go()

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._head:
            self._head = bytearray(HEAD_MAX)
            self._view = memoryview(self._head)
        if self._refused:
            return self._view
        if self._body is not None and not self._busy:
            return self._body[self._received :]
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._site.silent.pop(self, None)
        if self._refused:
            return
        if self._body is not None and not self._busy:
            self._received += nbytes
            if self._received == len(self._body):
                self._complete()
            return
        if not self._filled and not self._busy:
            self.since = time.monotonic()
        self._filled += nbytes
        if not self._busy:
            self._look()
        elif self._filled == HEAD_MAX:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False

    # -- httptools' calls --------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    # -- a request ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read a head, if it is complete."""
        if self._head[0] == _TLS:  # it has no end that we would see
            return self._refuse(400, "this port speaks plain HTTP and a TLS handshake came: ask at http://, or serve with TLS")
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == HEAD_MAX:
                self._refuse(431, f"the headers are longer than {HEAD_MAX} bytes")
            return None
        self._url, self._headers = b"", {}
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(bytes(self._view[: end + 4]))
            self._method = parser.get_method().decode()
            self._close_after = not parser.should_keep_alive()
            length = int(self._headers.get(b"content-length", b"0"))
        except (httptools.HttpParserError, ValueError):
            return self._refuse(400, "this is not a request that HTTP/1.1 allows")
        if b"transfer-encoding" in self._headers:
            return self._refuse(411, "send a Content-Length: chunked bodies are not taken")
        if self._headers.get(b"content-encoding", b"identity") != b"identity":
            return self._refuse(415, "send the body as it is: a Content-Encoding is not taken")
        if not 0 <= length <= self._site.body_max:
            return self._refuse(413, f"the body has {length} bytes, and {self._site.body_max} is the limit")
        if self._site.receiving + length > self._site.receiving_max:
            return self._refuse(503, "too many bodies are under way here: try another")
        return self._start_body(end + 4, length)

    def _start_body(self, start: int, length: int) -> None:
        body = np.empty(length, np.uint8).data
        self._site.receiving += length
        early = min(length, self._filled - start)
        body[:early] = self._view[start : start + early]
        rest = self._filled - start - early
        self._view[:rest] = bytes(self._view[start + early : self._filled])
        self._filled, self._body, self._received = rest, body, early
        if early < length and self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if early == length:
            self._complete()

    def _complete(self) -> None:
        assert self._body is not None
        self._busy = True
        path = self._url.partition(b"?")[0].decode("latin-1")
        request = Request(self, self._method, path, self._headers, self._body)
        self._site.receive(request)

    def answer(self, status: int, content_type: str, pieces: Sequence[Piece]) -> None:
        if self.closed:
            return
        length = sum(len(piece) for piece in pieces)
        close = "connection: close\r\n" if self._close_after else ""
        head = (
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n{close}\r\n"
        )
        self._transport.writelines([head.encode(), *pieces])
        self._let_go()
        self.since = time.monotonic()
        if self._refused:
            self._transport.write_eof() if self._transport.can_write_eof() else self._transport.close()
        elif self._close_after:
            self._transport.close()
        elif self._filled:
            self._transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._look_again)

    def _let_go(self) -> None:
        self._site.receiving -= len(self._body) if self._body is not None else 0
        self._body, self._busy = None, False

    def _look_again(self) -> None:
        if not self.closed and not self._busy and self._body is None and self._filled:
            self._look()

    def _refuse(self, status: int, sentence: str) -> None:
        """Say why, and let what is under way run out: a connection closed at once might take the answer with it."""
        self._close_after = self._refused = True
        self.answer(status, "application/json", [self._site.refusal(status, sentence)])

    def sweep(self, now: float) -> None:
        """Refuse a device that takes too long for its request; cut off one that was refused, or has been silent for long."""
        if self._busy:
            return
        half = not self._refused and (self._filled > 0 or self._body is not None)
        patience_s = REQUEST_S + (self._received / SLOWEST if self._body is not None else 0)
        limit = REFUSED_S if self._refused else patience_s if half else IDLE_S
        if now > self.since + limit:
            if half:
                self._refuse(408, f"the request was not complete after {patience_s:.0f} s")
            else:
                self._transport.abort()


class Site:
    """The device port of a server."""

    def __init__(
        self,
        receive: Callable[[Request], None],
        refusal: Callable[[int, str], bytes],
        *,
        body_max: int,
        connections_max: int,
    ) -> None:
        self.receive = receive
        self.refusal = refusal
        self.body_max = body_max
        self.connections_max = connections_max
        self.receiving = 0  # bytes of bodies that are not answered yet
        self.receiving_max = max(RECEIVING_MAX, 2 * body_max)
        self.connections: set[Connection] = set()
        self.silent: dict[Connection, None] = {}  # those that never said a word, the oldest first
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self, sockets: list[socket.socket], context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        for sock in sockets:
            self._servers.append(await loop.create_server(lambda: Connection(self), sock=sock, ssl=context, backlog=4096))
        self._sweeper = loop.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for connection in list(self.connections):
                connection.sweep(now)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            if connection._transport is not None:
                connection._transport.close()
