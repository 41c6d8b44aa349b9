"""HTTP/1.1 client for one server with keep-alive connections, parsed by httptools.

It supports no redirects, compression, cookies or retries, and therefore needs less CPU time than a general client. A connection
error is an OSError.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlencode, urlsplit

import httptools

IDLE_CONNECTIONS_MAX = 32  # further connections are closed after their request
UNREAD_BYTES_MAX = 16_000_000  # of a stream; above it, reading from the socket is paused
LINE_MAX = 16_000_000  # bytes of one line of a stream
BODY_MAX = 256_000_000  # bytes of one response


class HttpResponse:
    """Status and body of one response."""

    __slots__ = ("body", "status")

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body


class _Connection(asyncio.Protocol):
    """A connection that carries one request at a time. The parser calls the `on_...` methods."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_idle = True
        self.keep_alive = True
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._chunks: deque[bytes] | None = None  # unread parts of a stream; None: not a stream
        self._unread_bytes = 0
        self._is_complete = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.connection_lost(ConnectionError(f"invalid HTTP response: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.keep_alive = False
        self._error = error or ConnectionError("the server closed the connection")
        self._wake_waiter()
        if self.transport is not None:
            self.transport.abort()

    # -- callbacks of the parser -------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keep_alive = self._parser.should_keep_alive()
        self._wake_waiter()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes += len(body)
        if self._chunks is None:
            self._body.append(body)
            if self._unread_bytes > BODY_MAX:
                self.connection_lost(ConnectionError(f"the response has more than {BODY_MAX} bytes"))
            return
        self._chunks.append(body)
        if self._unread_bytes > UNREAD_BYTES_MAX and self.transport is not None:
            self.transport.pause_reading()
        self._wake_waiter()

    def on_message_complete(self) -> None:
        self._is_complete = True
        self._wake_waiter()

    # -- one request -------------------------------------------------------------------------------------------------

    def send(self, data: bytes, *, stream: bool) -> None:
        assert self.transport is not None
        self.is_idle, self._is_complete, self.status, self._error = False, False, 0, None
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._chunks, self._unread_bytes = [], deque() if stream else None, 0
        self.transport.write(data)

    async def wait_for_status(self) -> int:
        while not self.status:
            await self._wait_for_data()
        return self.status

    async def read_body(self) -> bytes:
        while not self._is_complete:
            await self._wait_for_data()
        return b"".join(self._body if self._chunks is None else self._chunks)

    async def read_chunks(self) -> AsyncIterator[bytes]:
        assert self._chunks is not None and self.transport is not None
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._unread_bytes -= len(chunk)
                yield chunk
            if self._is_complete:
                return
            self.transport.resume_reading()
            await self._wait_for_data()

    def abort(self) -> None:
        """Close the connection without reading further bytes, about which uvloop would log an error."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
            self.transport.abort()

    async def _wait_for_data(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HttpClient:
    """Client of one server; `context` is used for https URLs. The number of concurrent requests is not limited here.

    A request, and the wait for the status of a stream, raise TimeoutError after `timeout_s`.
    """

    def __init__(self, server: str, context: ssl.SSLContext | None, *, timeout_s: float) -> None:
        parts = urlsplit(server)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl_context = context if parts.scheme == "https" else None
        self._path_prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._idle_connections: list[_Connection] = []
        self._host_header = f"{self._host}:{self._port}"

    async def request(
        self, method: str, path: str, query: Mapping[str, str] | None, headers: Mapping[str, str], body: bytes | None
    ) -> HttpResponse:
        """Send a request and return the complete response, of any status."""
        async with asyncio.timeout(self._timeout_s):
            connection = await self._acquire_connection()
            try:
                connection.send(self._encode_request(method, path, query, headers, body), stream=False)
                await connection.wait_for_status()
                response = HttpResponse(connection.status, await connection.read_body())
            except BaseException:
                connection.keep_alive = False
                raise
            finally:
                self._release_connection(connection)
        return response

    async def stream_lines(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str], silence_s: float | None
    ) -> AsyncIterator[HttpResponse | bytes]:
        """Send a GET request; yield the response with an empty body, then each line of the body.

        If the status is an error, yield only the response, with its body. Raise TimeoutError if no data arrives for `silence_s`
        seconds; None: no limit.
        """
        async with asyncio.timeout(self._timeout_s):
            connection = await self._acquire_connection()
            connection.send(self._encode_request("GET", path, query, headers, None), stream=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await connection.wait_for_status()
                body = await connection.read_body() if status >= 400 else b""
            yield HttpResponse(status, body)
            if status >= 400:
                return
            rest = b""
            chunks = connection.read_chunks()
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line
                if len(rest) > LINE_MAX:
                    raise ConnectionError(f"a line of the response has more than {LINE_MAX} bytes")
            if rest:
                yield rest
        finally:
            connection.keep_alive = False  # the rest of the stream is not read
            self._release_connection(connection)

    def close(self) -> None:
        for connection in self._idle_connections:
            connection.abort()
        self._idle_connections.clear()

    async def _acquire_connection(self) -> _Connection:
        while self._idle_connections:
            connection = self._idle_connections.pop()
            if connection.keep_alive and connection.transport is not None and not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        name = self._host if self._ssl_context is not None else None
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._ssl_context, server_hostname=name
        )
        return connection

    def _release_connection(self, connection: _Connection) -> None:
        if connection.keep_alive and len(self._idle_connections) < IDLE_CONNECTIONS_MAX:
            connection.is_idle = True
            self._idle_connections.append(connection)
        else:
            connection.abort()

    def _encode_request(
        self, method: str, path: str, query: Mapping[str, str] | None, headers: Mapping[str, str], body: bytes | None
    ) -> bytes:
        target = f"{self._path_prefix}{path}" + (f"?{urlencode(query)}" if query else "")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._host_header}"]
        lines += [f"{name}: {value}" for name, value in ({"Accept": "application/json"} | dict(headers)).items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
