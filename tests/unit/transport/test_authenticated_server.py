"""Ports with idle clients, over real sockets: the oldest idle client is closed, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from covey.kubernetes import operator_metrics
from covey.transport import authenticated_server, tls
from covey.transport import connection as connection_module
from covey.transport.authenticated_server import AuthenticatedServer
from covey.transport.connection import Connection, Listener, connect
from covey.transport.local_ca import make_authority

WAIT_S = 60.0


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> AuthenticatedServer:
    monkeypatch.setattr(authenticated_server, "UNAUTHENTICATED_MAX", 2)
    return AuthenticatedServer("127.0.0.1", lambda connection: connection.sendall(connection.recv(5)), "echo", first_s=WAIT_S)


def connect_client(port: int, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
    sock.sendall(data)
    return sock


def test_client_with_token_is_served_despite_idle_clients(echo: AuthenticatedServer) -> None:
    silent = [connect_client(echo.port) for _ in range(6)]
    assert [sock.recv(1) for sock in silent[:4]] == [b""] * 4, "the oldest idle client must be closed"
    with connect_client(echo.port, echo.token.encode() + b"hello") as client:
        assert client.recv(5) == b"hello"
    silent[5].sendall(echo.token.encode() + b"later")
    assert silent[5].recv(5) == b"later"
    for sock in silent:
        sock.close()


def test_wrong_token_is_disconnected_and_split_token_is_accepted(echo: AuthenticatedServer) -> None:
    with connect_client(echo.port, b"x" * 32) as wrong, connect_client(echo.port, echo.token.encode()[:7]) as slow:
        assert wrong.recv(1) == b""
        slow.sendall(echo.token.encode()[7:] + b"hello")
        assert slow.recv(5) == b"hello"


@pytest.mark.parametrize("encrypted", [False, True])
def test_listener_closes_oldest_idle_connections(encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "UNAUTHENTICATED_MAX", 2)
    if not encrypted:
        return asyncio.run(_check_listener(None, None))
    make_authority(tmp_path, names=["127.0.0.1"], password="word")
    files = tls.read_config(tmp_path / "config.json")
    contexts = tls.build_contexts(files, server_password="word", client_password="word", now=datetime.now(UTC))
    return asyncio.run(_check_listener(contexts.server, contexts.client))


async def _check_listener(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    address = sock.getsockname()
    lost: asyncio.Queue[str] = asyncio.Queue()
    opened = asyncio.Event()
    calls: dict[str, Any] = {"on_message": None, "on_close": lambda connection_module, reason: lost.put_nowait(reason)}
    listener = Listener([sock], "known", server, on_open=lambda connection_module: None, **calls)
    await listener.open()
    silent = [await asyncio.open_connection(*address) for _ in range(4)]
    async with asyncio.timeout(WAIT_S):
        for reader, _ in silent[:2]:
            while await reader.read(100):  # the first line of the handshake, then the end
                pass
        assert [await lost.get() for _ in range(2)] == [connection_module.TOO_MANY_UNAUTHENTICATED] * 2
        meant: Connection = await connect(
            address[0], address[1], "known", client, on_open=lambda connection_module: opened.set(), **calls
        )
        await opened.wait()
    meant.close()
    for _, writer in silent:
        writer.close()
    listener.close()


def test_operator_metrics_are_served_despite_idle_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_metrics, "CONNECTIONS_MAX", 2)

    async def check() -> None:
        server = await operator_metrics.serve_metrics(operator_metrics.OperatorMetrics(), "127.0.0.1", 0, lambda: True)
        address = server.sockets[0].getsockname()
        silent = [await asyncio.open_connection(*address) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /readyz HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.read()).endswith(b"\r\n\r\nok\n")
            with contextlib.suppress(ConnectionError):
                assert await silent[0][0].read() == b"", "the oldest idle client must be closed"
        for _, other in (*silent, (reader, writer)):
            other.close()
        server.close()

    asyncio.run(check())
