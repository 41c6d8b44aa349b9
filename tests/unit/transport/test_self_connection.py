"""A connection attempt to a free port of the ephemeral range can connect to its own socket."""

from __future__ import annotations

import asyncio
import socket

from covey.transport.connection import Connection
from covey.transport.framing import from_scheduler_decoder
from covey.transport.handshake import ClientHandshake


def connected_to_itself() -> socket.socket:
    """Return a socket connected to itself (TCP simultaneous open)."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.connect(sock.getsockname())
    return sock


def test_connection_to_itself_is_closed_and_frees_the_port() -> None:
    async def connect() -> tuple[str, int]:
        closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        sock = connected_to_itself()
        port = int(sock.getsockname()[1])

        def make_connection() -> Connection:
            return Connection(
                ClientHandshake(""),
                from_scheduler_decoder,
                on_open=lambda connection: closed.set_result("opened"),
                on_message=lambda connection, message: None,
                on_close=lambda connection, reason: closed.set_result(reason),
            )

        await asyncio.get_running_loop().create_connection(make_connection, sock=sock)
        return await asyncio.wait_for(closed, 60), port

    reason, port = asyncio.run(connect())
    assert reason == "no process listens there"
    with socket.socket() as scheduler:
        scheduler.bind(("127.0.0.1", port))
        scheduler.listen()
