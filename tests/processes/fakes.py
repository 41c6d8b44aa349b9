"""Faulty peers: a scheduler that sends only what a test specifies, and sockets that never reply."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from covey.core.messages import Message
from covey.transport.connection import Connection
from covey.transport.framing import from_node_decoder
from covey.transport.handshake import ServerHandshake

Reply = Callable[[Any], list[Message]]


class FakeScheduler:
    """Completes handshakes like a scheduler, records messages, and replies as `reply` says."""

    def __init__(self, reply: Reply) -> None:
        self.messages: list[tuple[int, Any]] = []  # number of the connection, message
        self._reply = reply
        self._connections: list[Connection] = []

    def received(self, kind: type, node_id: str = "") -> list[Any]:
        """Return the messages of a type; with a node id, only those on connections on which that node registered."""
        numbers = {number for number, m in self.messages if getattr(m, "node_id", None) == node_id}
        return [m for number, m in list(self.messages) if isinstance(m, kind) and (not node_id or number in numbers)]

    def connection_count(self) -> int:
        """Return the number of completed handshakes."""
        return len(self._connections)

    def close_connections(self) -> None:
        for connection in self._connections:
            connection.abort("the test is over")

    def on_open(self, connection: Connection) -> None:
        self._connections.append(connection)
        connection.id = len(self._connections)

    def on_message(self, connection: Connection, message: Any) -> None:
        self.messages.append((connection.id, message))
        for reply in self._reply(message):
            connection.send(reply)

    def on_close(self, connection: Connection, reason: str) -> None:
        pass


@contextlib.contextmanager
def fake_scheduler(port: int, reply: Reply = lambda _: []) -> Iterator[FakeScheduler]:
    """Yield a fake scheduler that serves on its own thread."""
    fake = FakeScheduler(reply)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    def make_connection() -> Connection:
        return Connection(
            ServerHandshake(""), from_node_decoder, on_open=fake.on_open, on_message=fake.on_message, on_close=fake.on_close
        )

    async def serve() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(make_connection, sock=listener(port))
        started.set_result((loop, done))
        await done.wait()
        server.close()
        fake.close_connections()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, done = started.result(timeout=30)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def listener(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens and accepts nothing."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(1024)
    return sock


def accept_and_close(port: int, count: int) -> None:
    """Accept `count` connections and close each immediately."""
    with listener(port) as server:
        server.settimeout(60)
        for _ in range(count):
            server.accept()[0].close()
