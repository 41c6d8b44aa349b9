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

HEADER_BYTES_MAX: Final = 16 * 1024
BYTES_IN_FLIGHT_MAX: Final = 2**30  # bytes of bodies at once, whoever sends them
REQUEST_TIMEOUT_S: Final = 60.0  # from its first byte to its last, and more for what has come,
BYTES_PER_SECOND_MIN: Final = 10_000  # bytes a second: a slow link is not a stuck one
IDLE_TIMEOUT_S: Final = 600.0
REFUSED_LINGER_S: Final = 5.0  # for a device to read why
SWEEP_INTERVAL_S: Final = 5.0
_STATUS_PHRASES: Final = {
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
_TLS_HANDSHAKE_BYTE: Final = 0x16  # what a TLS handshake begins with

BytesLike = bytes | memoryview


class DeviceRequest:
    """One request. Answer it exactly once."""

    __slots__ = ("_connection", "_headers", "accept", "body", "content_type", "device", "method", "path")

    def __init__(
        self, connection: DeviceConnection, method: str, path: str, headers: dict[bytes, bytes], body: memoryview
    ) -> None:
        self._headers = headers
        self.device = ""  # who asks, where that is proven
        self._connection = connection
        self.method = method
        self.path = path
        self.content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().decode("latin-1")
        self.accept = headers.get(b"accept", b"").decode("latin-1")
        self.body = body

    def reply(self, pieces: Sequence[BytesLike], content_type: str = "application/json", status: int = 200) -> None:
        """Send the answer; a device that is gone does not hear it."""
        self._connection.send_response(status, content_type, pieces)

    def set_device(self, device: str) -> None:
        """Name the device whose identity is proven."""
        self.device = device

    def header(self, name: str) -> str:
        """One of ours: `x-covey-NAME`."""
        return self._headers.get(b"x-covey-" + name.encode(), b"").decode("latin-1")

    @property
    def peer_address(self) -> str:
        """The address it comes from."""
        return self._connection.peer_address

    @property
    def is_disconnected(self) -> bool:
        return self._connection.closed


class DeviceConnection(asyncio.BufferedProtocol):
    """One device's connection."""

    def __init__(self, site: DeviceHttpServer) -> None:
        self._server = site
        self._transport: Any = None
        self._header_buffer = bytearray()  # until something comes
        self._header_view = memoryview(self._header_buffer)
        self._buffered_bytes = 0
        self._body: memoryview | None = None
        self._body_received = 0
        self._awaiting_reply = False
        self._close_after_reply = False
        self._is_refused = False  # what still comes is not looked at
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._method = ""
        self.period_started_at = time.monotonic()
        self.closed = False
        self.peer_address = ""

    # -- asyncio's calls ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.peer_address = str((transport.get_extra_info("peername") or ("",))[0])
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._server.add_connection(self):
            self._send_refusal(503, "there are too many connections: try again")

    def abort(self) -> None:
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._server.remove_connection(self)
        self._release_body()

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._header_buffer:
            self._header_buffer = bytearray(HEADER_BYTES_MAX)
            self._header_view = memoryview(self._header_buffer)
        if self._is_refused:
            return self._header_view
        if self._body is not None and not self._awaiting_reply:
            return self._body[self._body_received :]
        return self._header_view[self._buffered_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        self._server.on_bytes_received(self)
        if self._is_refused:
            return
        if self._body is not None and not self._awaiting_reply:
            self._body_received += nbytes
            if self._body_received == len(self._body):
                self._dispatch_request()
            return
        if not self._buffered_bytes and not self._awaiting_reply:
            self.period_started_at = time.monotonic()
        self._buffered_bytes += nbytes
        if not self._awaiting_reply:
            self._parse_head()
        elif self._buffered_bytes == HEADER_BYTES_MAX:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False

    # -- httptools' calls --------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    # -- a request ---------------------------------------------------------------------------------------------------

    def _parse_head(self) -> None:
        """Read a head, if it is complete."""
        if self._header_buffer[0] == _TLS_HANDSHAKE_BYTE:  # it has no end that we would see
            return self._send_refusal(
                400, "this port speaks plain HTTP and a TLS handshake came: ask at http://, or serve with TLS"
            )
        end = self._header_buffer.find(b"\r\n\r\n", 0, self._buffered_bytes)
        if end < 0:
            if self._buffered_bytes == HEADER_BYTES_MAX:
                self._send_refusal(431, f"the headers are longer than {HEADER_BYTES_MAX} bytes")
            return None
        self._url, self._headers = b"", {}
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(bytes(self._header_view[: end + 4]))
            self._method = parser.get_method().decode()
            self._close_after_reply = not parser.should_keep_alive()
            length = int(self._headers.get(b"content-length", b"0"))
        except (httptools.HttpParserError, ValueError):
            return self._send_refusal(400, "this is not a request that HTTP/1.1 allows")
        if b"transfer-encoding" in self._headers:
            return self._send_refusal(411, "send a Content-Length: chunked bodies are not taken")
        if self._headers.get(b"content-encoding", b"identity") != b"identity":
            return self._send_refusal(415, "send the body as it is: a Content-Encoding is not taken")
        if not 0 <= length <= self._server.body_max:
            return self._send_refusal(413, f"the body has {length} bytes, and {self._server.body_max} is the limit")
        if self._server.bytes_in_flight + length > self._server.bytes_in_flight_max:
            return self._send_refusal(503, "too many bodies are under way here: try another")
        return self._start_body(end + 4, length)

    def _start_body(self, start: int, length: int) -> None:
        body = np.empty(length, np.uint8).data
        self._server.reserve_bytes(length)
        early = min(length, self._buffered_bytes - start)
        body[:early] = self._header_view[start : start + early]
        rest = self._buffered_bytes - start - early
        self._header_view[:rest] = bytes(self._header_view[start + early : self._buffered_bytes])
        self._buffered_bytes, self._body, self._body_received = rest, body, early
        if early < length and self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if early == length:
            self._dispatch_request()

    def _dispatch_request(self) -> None:
        assert self._body is not None
        self._awaiting_reply = True
        path = self._url.partition(b"?")[0].decode("latin-1")
        request = DeviceRequest(self, self._method, path, self._headers, self._body)
        self._server.on_request(request)

    def send_response(self, status: int, content_type: str, pieces: Sequence[BytesLike]) -> None:
        if self.closed:
            return
        length = sum(len(piece) for piece in pieces)
        close = "connection: close\r\n" if self._close_after_reply else ""
        head = (
            f"HTTP/1.1 {status} {_STATUS_PHRASES[status]}\r\ncontent-type: {content_type}\r\ncontent-length: "
            f"{length}\r\n{close}\r\n"
        )
        self._transport.writelines([head.encode(), *pieces])
        self._release_body()
        self.period_started_at = time.monotonic()
        if self._is_refused:
            self._transport.write_eof() if self._transport.can_write_eof() else self._transport.close()
        elif self._close_after_reply:
            self._transport.close()
        elif self._buffered_bytes:
            self._transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._parse_buffered_head)

    def _release_body(self) -> None:
        self._server.release_bytes(len(self._body) if self._body is not None else 0)
        self._body, self._awaiting_reply = None, False

    def _parse_buffered_head(self) -> None:
        if not self.closed and not self._awaiting_reply and self._body is None and self._buffered_bytes:
            self._parse_head()

    def _send_refusal(self, status: int, sentence: str) -> None:
        """Say why, and let what is under way run out: a connection closed at once might take the answer with it."""
        self._close_after_reply = self._is_refused = True
        self.send_response(status, "application/json", [self._server.encode_refusal(status, sentence)])

    def check_timeouts(self, now: float) -> None:
        """Refuse a device that takes too long for its request; cut off one that was refused, or has been silent for long."""
        if self._awaiting_reply:
            return
        half = not self._is_refused and (self._buffered_bytes > 0 or self._body is not None)
        patience_s = REQUEST_TIMEOUT_S + (self._body_received / BYTES_PER_SECOND_MIN if self._body is not None else 0)
        limit = REFUSED_LINGER_S if self._is_refused else patience_s if half else IDLE_TIMEOUT_S
        if now > self.period_started_at + limit:
            if half:
                self._send_refusal(408, f"the request was not complete after {patience_s:.0f} s")
            else:
                self._transport.abort()


class DeviceHttpServer:
    """The device port of a server."""

    def __init__(
        self,
        receive: Callable[[DeviceRequest], None],
        refusal: Callable[[int, str], bytes],
        *,
        body_max: int,
        connections_max: int,
    ) -> None:
        self.on_request = receive
        self.encode_refusal = refusal
        self.body_max = body_max
        self.connections_max = connections_max
        self.bytes_in_flight = 0  # bytes of bodies that are not answered yet
        self.bytes_in_flight_max = max(BYTES_IN_FLIGHT_MAX, 2 * body_max)
        self.connections: set[DeviceConnection] = set()
        self.silent_connections: dict[DeviceConnection, None] = {}  # those that never said a word, the oldest first
        self._servers: list[asyncio.Server] = []
        self._sweep_task: asyncio.Task[None] | None = None

    async def open(self, sockets: list[socket.socket], context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        for sock in sockets:
            self._servers.append(await loop.create_server(lambda: DeviceConnection(self), sock=sock, ssl=context, backlog=4096))
        self._sweep_task = loop.create_task(self._sweep_connections())

    def add_connection(self, connection: DeviceConnection) -> bool:
        """Accept a connection, if need be in place of the oldest silent one. Return False if there is no room."""
        self.connections.add(connection)
        if len(self.connections) > self.connections_max:
            oldest = next(iter(self.silent_connections), None)
            if oldest is None:
                return False
            del self.silent_connections[oldest]
            oldest.abort()
        self.silent_connections[connection] = None
        return True

    def on_bytes_received(self, connection: DeviceConnection) -> None:
        self.silent_connections.pop(connection, None)

    def remove_connection(self, connection: DeviceConnection) -> None:
        self.connections.discard(connection)
        self.silent_connections.pop(connection, None)

    def reserve_bytes(self, size: int) -> None:
        self.bytes_in_flight += size

    def release_bytes(self, size: int) -> None:
        self.bytes_in_flight -= size

    async def _sweep_connections(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = time.monotonic()
            for connection in list(self.connections):
                connection.check_timeouts(now)

    def close(self) -> None:
        if self._sweep_task is not None:
            self._sweep_task.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            if connection._transport is not None:
                connection._transport.close()
