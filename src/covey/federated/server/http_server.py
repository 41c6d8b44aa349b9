"""HTTP server for many devices with large bodies. A body is received into the memory from which it is decoded.

The server has what devices need: HTTP/1.1, keep-alive, Content-Length. The handler receives complete requests and may reply
later. The sizes of headers and bodies, the time to receive a request, and the number of connections are limited. If there are
too many connections, a new one replaces the oldest that has sent no byte, or is refused if there is none.
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
BYTES_IN_FLIGHT_MAX: Final = 2**30  # bytes of all bodies that are being received or processed
REQUEST_TIMEOUT_S: Final = 60.0  # to receive a request; a body adds its received bytes divided by:
BYTES_PER_SECOND_MIN: Final = 10_000  # so that a slow connection is not treated as a stuck one
IDLE_TIMEOUT_S: Final = 600.0
REFUSED_LINGER_S: Final = 5.0  # for a device to read the reason
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
_TLS_HANDSHAKE_BYTE: Final = 0x16  # first byte of a TLS handshake

BytesLike = bytes | memoryview


class DeviceRequest:
    """One complete request. The handler must call `reply` once."""

    __slots__ = ("_connection", "_headers", "accept", "body", "content_type", "device", "method", "path")

    def __init__(
        self, connection: DeviceConnection, method: str, path: str, headers: dict[bytes, bytes], body: memoryview
    ) -> None:
        self._headers = headers
        self.device = ""  # id of the authenticated device; "" without authentication
        self._connection = connection
        self.method = method
        self.path = path
        self.content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().decode("latin-1")
        self.accept = headers.get(b"accept", b"").decode("latin-1")
        self.body = body

    def reply(self, pieces: Sequence[BytesLike], content_type: str = "application/json", status: int = 200) -> None:
        """Send the reply; do nothing if the device has disconnected."""
        self._connection.send_response(status, content_type, pieces)

    def set_device(self, device: str) -> None:
        """Set `device`, the id of the authenticated device."""
        self.device = device

    def header(self, name: str) -> str:
        """Return the header `x-covey-NAME`; "" if it is missing."""
        return self._headers.get(b"x-covey-" + name.encode(), b"").decode("latin-1")

    @property
    def peer_address(self) -> str:
        """IP address from which the request came; "" if unknown."""
        return self._connection.peer_address

    @property
    def is_disconnected(self) -> bool:
        return self._connection.closed


class DeviceConnection(asyncio.BufferedProtocol):
    """HTTP connection of one device."""

    def __init__(self, server: DeviceHttpServer) -> None:
        self._server = server
        self._transport: Any = None
        self._header_buffer = bytearray()  # allocated when the first bytes arrive
        self._header_view = memoryview(self._header_buffer)
        self._buffered_bytes = 0
        self._body: memoryview | None = None
        self._body_received = 0
        self._awaiting_reply = False
        self._close_after_reply = False
        self._is_refused = False  # further bytes are discarded
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._method = ""
        self.period_started_at = time.monotonic()
        self.closed = False
        self.peer_address = ""

    # -- callbacks of asyncio ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.peer_address = str((transport.get_extra_info("peername") or ("",))[0])
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._server.add_connection(self):
            self._send_refusal(503, "this server has too many connections: retry later")

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

    # -- callbacks of httptools --------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    # -- a request ---------------------------------------------------------------------------------------------------

    def _parse_head(self) -> None:
        """If the headers are complete, parse them and start to receive the body; refuse an invalid request."""
        if self._header_buffer[0] == _TLS_HANDSHAKE_BYTE:  # it never contains the end of HTTP headers
            return self._send_refusal(
                400, "this port expects plain HTTP but received a TLS handshake: use http://, or start the server with TLS"
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
            return self._send_refusal(400, "the request is not valid HTTP/1.1")
        if b"transfer-encoding" in self._headers:
            return self._send_refusal(411, "chunked bodies are not supported: send a Content-Length")
        if self._headers.get(b"content-encoding", b"identity") != b"identity":
            return self._send_refusal(415, "Content-Encoding is not supported: send the body unencoded")
        if not 0 <= length <= self._server.body_max:
            return self._send_refusal(413, f"the body has {length} bytes, and {self._server.body_max} is the limit")
        if self._server.bytes_in_flight + length > self._server.bytes_in_flight_max:
            return self._send_refusal(503, "this server is receiving too many bodies: try another server")
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

    def _send_refusal(self, status: int, reason: str) -> None:
        """Send the reason and half-close the connection, as a full close could lose the reply; with TLS, close it."""
        self._close_after_reply = self._is_refused = True
        self.send_response(status, "application/json", [self._server.encode_refusal(status, reason)])

    def check_timeouts(self, now: float) -> None:
        """Refuse a request that is not complete in time; close a connection some time after a refusal.

        Also close a connection that is idle for too long. While a request awaits its reply there is no limit. `now` is that of
        `time.monotonic`.
        """
        if self._awaiting_reply:
            return
        is_incomplete = not self._is_refused and (self._buffered_bytes > 0 or self._body is not None)
        request_limit_s = REQUEST_TIMEOUT_S + (self._body_received / BYTES_PER_SECOND_MIN if self._body is not None else 0)
        limit_s = REFUSED_LINGER_S if self._is_refused else request_limit_s if is_incomplete else IDLE_TIMEOUT_S
        if now > self.period_started_at + limit_s:
            if is_incomplete:
                self._send_refusal(408, f"the request was not complete after {request_limit_s:.0f} s")
            else:
                self._transport.abort()


class DeviceHttpServer:
    """HTTP server of one device port."""

    def __init__(
        self,
        on_request: Callable[[DeviceRequest], None],
        encode_refusal: Callable[[int, str], bytes],
        *,
        body_max: int,
        connections_max: int,
    ) -> None:
        self.on_request = on_request
        self.encode_refusal = encode_refusal
        self.body_max = body_max
        self.connections_max = connections_max
        self.bytes_in_flight = 0  # bytes of bodies without a reply yet
        self.bytes_in_flight_max = max(BYTES_IN_FLIGHT_MAX, 2 * body_max)
        self.connections: set[DeviceConnection] = set()
        self.silent_connections: dict[DeviceConnection, None] = {}  # those that have sent no byte, the oldest first
        self._servers: list[asyncio.Server] = []
        self._sweep_task: asyncio.Task[None] | None = None

    async def open(self, sockets: list[socket.socket], context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        for sock in sockets:
            self._servers.append(await loop.create_server(lambda: DeviceConnection(self), sock=sock, ssl=context, backlog=4096))
        self._sweep_task = loop.create_task(self._sweep_connections())

    def add_connection(self, connection: DeviceConnection) -> bool:
        """Add a connection; above the limit, close the oldest one that has sent no byte.

        Return False if the limit is exceeded and there is none to close; the caller must then refuse the connection.
        """
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
