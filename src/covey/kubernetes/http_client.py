"""HTTP/1.1 to one server over a few kept connections: just what the Kubernetes API needs, parsed by httptools.

A general client spends a millisecond of CPU on each request, more than everything else the operator does for it; this spends a
fifth. No redirects, no compression, no cookies. A connection that breaks is an OSError; nothing is sent twice here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlencode, urlsplit

import httptools

IDLE_MAX = 32  # connections kept for the next request
BACKLOG_MAX = 16_000_000  # bytes of a stream that nobody has read yet; then the sender has to wait
LINE_MAX = 16_000_000
BODY_MAX = 256_000_000  # bytes of one answer


class Answer:
    """Status and body of one response."""

    __slots__ = ("body", "status")

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body


class _Connection(asyncio.Protocol):
    """One request at a time. The parser calls the `on_...` methods."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle = True
        self.keep = True
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._chunks: deque[bytes] | None = None  # of a stream
        self._backlog = 0
        self._over = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.connection_lost(ConnectionError(f"not understood: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.keep = False
        self._error = error or ConnectionError("the server closed the connection")
        self._wake()
        if self.transport is not None:
            self.transport.abort()

    # -- the parser's words ------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keep = self._parser.should_keep_alive()
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._backlog += len(body)
        if self._chunks is None:
            self._body.append(body)
            if self._backlog > BODY_MAX:
                self.connection_lost(ConnectionError(f"an answer of more than {BODY_MAX} bytes"))
            return
        self._chunks.append(body)
        if self._backlog > BACKLOG_MAX and self.transport is not None:
            self.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self._over = True
        self._wake()

    # -- one request -------------------------------------------------------------------------------------------------

    def send(self, data: bytes, *, stream: bool) -> None:
        assert self.transport is not None
        self.idle, self._over, self.status, self._error = False, False, 0, None
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._chunks, self._backlog = [], deque() if stream else None, 0
        self.transport.write(data)

    async def headers(self) -> int:
        while not self.status:
            await self._wait()
        return self.status

    async def body(self) -> bytes:
        while not self._over:
            await self._wait()
        return b"".join(self._body if self._chunks is None else self._chunks)

    async def chunks(self) -> AsyncIterator[bytes]:
        assert self._chunks is not None and self.transport is not None
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._backlog -= len(chunk)
                yield chunk
            if self._over:
                return
            self.transport.resume_reading()
            await self._wait()

    def drop(self) -> None:
        """Let go of it. Bytes that still come in are not read: uvloop would complain that nobody is there for them."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
            self.transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Http:
    """One server, at most so many requests at once."""

    def __init__(self, server: str, context: ssl.SSLContext | None, *, timeout_s: float) -> None:
        parts = urlsplit(server)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._context = context if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._name = f"{self._host}:{self._port}"

    async def ask(
        self, method: str, path: str, query: Mapping[str, str] | None, headers: Mapping[str, str], body: bytes | None
    ) -> Answer:
        """One request and its whole answer."""
        async with asyncio.timeout(self._timeout_s):
            connection = await self._connection()
            try:
                connection.send(self._head(method, path, query, headers, body), stream=False)
                await connection.headers()
                answer = Answer(connection.status, await connection.body())
            except BaseException:
                connection.keep = False
                raise
            finally:
                self._give_back(connection)
        return answer

    async def lines(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str], silence_s: float | None
    ) -> AsyncIterator[Answer | bytes]:
        """First the status (with the body, where it is an error), then line by line, for as long as they come."""
        async with asyncio.timeout(self._timeout_s):
            connection = await self._connection()
            connection.send(self._head("GET", path, query, headers, None), stream=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await connection.headers()
                body = await connection.body() if status >= 400 else b""
            yield Answer(status, body)
            if status >= 400:
                return
            rest = b""
            chunks = connection.chunks()
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line
                if len(rest) > LINE_MAX:
                    raise ConnectionError(f"a line of more than {LINE_MAX} bytes")
            if rest:
                yield rest
        finally:
            connection.keep = False  # what is left of a stream is not waited for
            self._give_back(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.drop()
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.keep and connection.transport is not None and not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        name = self._host if self._context is not None else None
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._context, server_hostname=name)
        return made

    def _give_back(self, connection: _Connection) -> None:
        if connection.keep and len(self._idle) < IDLE_MAX:
            connection.idle = True
            self._idle.append(connection)
        else:
            connection.drop()

    def _head(
        self, method: str, path: str, query: Mapping[str, str] | None, headers: Mapping[str, str], body: bytes | None
    ) -> bytes:
        target = f"{self._base}{path}" + (f"?{urlencode(query)}" if query else "")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._name}"]
        lines += [f"{name}: {value}" for name, value in ({"Accept": "application/json"} | dict(headers)).items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
