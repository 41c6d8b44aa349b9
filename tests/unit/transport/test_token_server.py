"""Ports under callers who say nothing, over real sockets: the oldest of them makes room, and keeps nobody else out."""

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
from covey.transport import connection as link
from covey.transport import tls, token_server
from covey.transport.connection import Connection, Listener, connect
from covey.transport.local_ca import make_authority
from covey.transport.token_server import TokenServer

WAIT_S = 60.0


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> TokenServer:
    monkeypatch.setattr(token_server, "UNAUTHENTICATED_MAX", 2)
    return TokenServer("127.0.0.1", lambda connection: connection.sendall(connection.recv(5)), "echo", first_s=WAIT_S)


def called(port: int, words: bytes = b"") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), WAIT_S)
    found.sendall(words)
    return found


def test_who_knows_the_token_is_served_however_many_say_nothing(echo: TokenServer) -> None:
    silent = [called(echo.port) for _ in range(6)]
    assert [sock.recv(1) for sock in silent[:4]] == [b""] * 4, "the oldest made room"
    with called(echo.port, echo.token.encode() + b"hello") as polite:
        assert polite.recv(5) == b"hello"
    silent[5].sendall(echo.token.encode() + b"later")
    assert silent[5].recv(5) == b"later"
    for sock in silent:
        sock.close()


def test_a_wrong_token_is_hung_up_on_and_one_in_drops_is_taken(echo: TokenServer) -> None:
    with called(echo.port, b"x" * 32) as wrong, called(echo.port, echo.token.encode()[:7]) as slow:
        assert wrong.recv(1) == b""
        slow.sendall(echo.token.encode()[7:] + b"hello")
        assert slow.recv(5) == b"hello"


@pytest.mark.parametrize("encrypted", [False, True])
def test_links_that_say_nothing_make_room(encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "UNAUTHENTICATED_MAX", 2)
    if not encrypted:
        return asyncio.run(_play(None, None))
    make_authority(tmp_path, names=["127.0.0.1"], password="word")
    files = tls.read_config(tmp_path / "config.json")
    made = tls.build_contexts(files, server_password="word", client_password="word", now=datetime.now(UTC))
    return asyncio.run(_play(made.server, made.client))


async def _play(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    where = sock.getsockname()
    lost: asyncio.Queue[str] = asyncio.Queue()
    opened = asyncio.Event()
    calls: dict[str, Any] = {"on_message": None, "on_close": lambda link, reason: lost.put_nowait(reason)}
    listener = Listener([sock], "known", server, on_open=lambda link: None, **calls)
    await listener.open()
    silent = [await asyncio.open_connection(*where) for _ in range(4)]
    async with asyncio.timeout(WAIT_S):
        for reader, _ in silent[:2]:
            while await reader.read(100):  # its greeting; then it is hung up on
                pass
        assert [await lost.get() for _ in range(2)] == [link.TOO_MANY_UNAUTHENTICATED] * 2
        meant: Connection = await connect(where[0], where[1], "known", client, on_open=lambda link: opened.set(), **calls)
        await opened.wait()
    meant.close()
    for _, writer in silent:
        writer.close()
    listener.close()


def test_the_operators_numbers_are_there_beside_those_who_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_metrics, "CONNECTIONS_MAX", 2)

    async def play() -> None:
        server = await operator_metrics.serve_metrics(operator_metrics.OperatorMetrics(), "127.0.0.1", 0, lambda: True)
        where = server.sockets[0].getsockname()
        silent = [await asyncio.open_connection(*where) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*where)
        writer.write(b"GET /readyz HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.read()).endswith(b"\r\n\r\nok\n")
            with contextlib.suppress(ConnectionError):
                assert await silent[0][0].read() == b"", "the oldest made room"
        for _, other in (*silent, (reader, writer)):
            other.close()
        server.close()

    asyncio.run(play())
