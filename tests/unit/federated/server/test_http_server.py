"""The device port's patience, over real sockets: half a request, silence, another protocol."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

import pytest

from covey.federated.server.http_server import (
    BYTES_PER_SECOND_MIN,
    IDLE_TIMEOUT_S,
    REFUSED_LINGER_S,
    REQUEST_TIMEOUT_S,
    DeviceConnection,
    DeviceHttpServer,
    DeviceRequest,
)

WAIT_S = 60.0
ROUNDED_UP = 90.449  # a time t for which t + 60.0 - t > 60.0
INCOMPLETE = {"a head": b"POST /updateModel HT", "a body": b"POST /updateModel HTTP/1.1\r\ncontent-length: 10\r\n\r\n12345"}


class Port:
    """A device HTTP server that replies "well" to every request."""

    def __init__(self) -> None:
        self.server = DeviceHttpServer(
            self._receive, lambda status, reason: reason.encode(), body_max=1_000_000, connections_max=3
        )

    def _receive(self, request: DeviceRequest) -> None:
        request.reply([b"well"])

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.create_server(("127.0.0.1", 0))
        await self.server.open([sock], None)
        return await asyncio.open_connection(*sock.getsockname())

    async def connection(self, received: int) -> DeviceConnection:
        """Return the server's connection when it has received this number of bytes."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for found in self.server.connections:
                    if found._buffered_bytes + found._body_received == received:
                        return found
                await asyncio.sleep(0)

    async def check_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send a complete request and check its reply."""
        writer.write(b"GET /well HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\nwell")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("part", INCOMPLETE)
def test_incomplete_request_gets_408_after_timeout(part: str) -> None:
    async def play() -> None:
        port = Port()
        reader, writer = await port.open()
        writer.write(INCOMPLETE[part])
        connection = await port.connection(len(INCOMPLETE[part]) if part == "a head" else 5)
        connection.period_started_at = ROUNDED_UP
        connection.check_timeouts(connection.period_started_at + REQUEST_TIMEOUT_S)
        assert not connection._is_refused
        connection.check_timeouts(connection.period_started_at + REQUEST_TIMEOUT_S + 1)
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert answer.endswith(b"the request was not complete after 60 s")
        assert port.server.bytes_in_flight == 0
        connection.check_timeouts(time.monotonic() + REFUSED_LINGER_S + 1)
        async with asyncio.timeout(WAIT_S):
            while port.server.connections:
                await asyncio.sleep(0)
        writer.close()
        port.server.close()

    asyncio.run(play())


def test_idle_connection_is_closed_after_timeout() -> None:
    async def play() -> None:
        port = Port()
        reader, writer = await port.open()
        connection = await port.connection(0)
        connection.check_timeouts(connection.period_started_at + IDLE_TIMEOUT_S - 1)
        assert not connection._transport.is_closing()
        connection.check_timeouts(connection.period_started_at + IDLE_TIMEOUT_S + 1)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()
        port.server.close()

    asyncio.run(play())


def test_tls_handshake_at_plain_port_gets_400() -> None:
    async def play() -> None:
        port = Port()
        reader, writer = await port.open()
        hello = ssl.MemoryBIO()
        with pytest.raises(ssl.SSLWantReadError):
            ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="covey").do_handshake()
        writer.write(hello.read())
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ") and b"expects plain HTTP but received a TLS handshake" in answer
        writer.close()
        port.server.close()

    asyncio.run(play())


def test_request_timeout_grows_with_received_bytes() -> None:
    async def play() -> None:
        port = Port()
        _, writer = await port.open()
        received_bytes = 2 * BYTES_PER_SECOND_MIN
        writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (received_bytes + 1) + bytes(received_bytes))
        connection = await port.connection(received_bytes)
        connection.check_timeouts(connection.period_started_at + (REQUEST_TIMEOUT_S + 2))
        assert not connection._is_refused
        connection.check_timeouts(connection.period_started_at + (REQUEST_TIMEOUT_S + 3))
        assert connection._is_refused
        writer.close()
        port.server.close()

    asyncio.run(play())


def test_new_connection_replaces_oldest_silent_one_at_limit() -> None:
    async def play() -> None:
        port = Port()
        active = await port.open()
        where = active[1].get_extra_info("peername")
        await port.check_request(*active)
        silent = [await asyncio.open_connection(*where) for _ in range(4)]
        async with asyncio.timeout(WAIT_S):
            assert [await reader.read() for reader, _ in silent[:2]] == [b"", b""], (
                "the oldest silent connections must be closed"
            )
        await port.check_request(*silent[3])
        await port.check_request(*active)
        await port.check_request(*silent[2])
        late, writer = await asyncio.open_connection(*where)
        async with asyncio.timeout(WAIT_S):
            assert (await late.read()).startswith(b"HTTP/1.1 503 ")
        for _, other in (*silent, active, (late, writer)):
            other.close()
        port.server.close()

    asyncio.run(play())
