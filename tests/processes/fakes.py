"""Peers that do not behave: a scheduler that says only what a test lets it say, and doors that nobody answers."""

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

Answer = Callable[[Any], list[Message]]


class FakeScheduler:
    """Greets like a scheduler, keeps what it hears, and answers as told."""

    def __init__(self, answer: Answer) -> None:
        self.heard: list[tuple[int, Any]] = []  # (which connection, message)
        self._answer = answer
        self._links: list[Connection] = []

    def of(self, kind: type, node_id: str = "") -> list[Any]:
        """The messages of a kind; with a node id, only those of the connections on which that node registered."""
        said = {number for number, m in self.heard if getattr(m, "node_id", None) == node_id}
        return [m for number, m in list(self.heard) if isinstance(m, kind) and (not node_id or number in said)]

    def links(self) -> int:
        """How many connections have been greeted so far."""
        return len(self._links)

    def hang_up(self) -> None:
        for link in self._links:
            link.abort("the test is over")

    def on_open(self, link: Connection) -> None:
        self._links.append(link)
        link.id = len(self._links)

    def on_message(self, link: Connection, message: Any) -> None:
        self.heard.append((link.id, message))
        for answer in self._answer(message):
            link.send(answer)

    def on_close(self, link: Connection, reason: str) -> None:
        pass


@contextlib.contextmanager
def fake_scheduler(port: int, answer: Answer = lambda _: []) -> Iterator[FakeScheduler]:
    """A fake that serves in a thread of its own while the test goes on."""
    fake = FakeScheduler(answer)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    def link() -> Connection:
        return Connection(
            ServerHandshake(""), from_node_decoder, on_open=fake.on_open, on_message=fake.on_message, on_close=fake.on_close
        )

    async def serve() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(link, sock=listener(port))
        started.set_result((loop, done))
        await done.wait()
        server.close()
        fake.hang_up()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, done = started.result(timeout=30)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def listener(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A socket that listens and does nothing more."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(1024)
    return sock


def turned_away(port: int, count: int) -> None:
    """Wait until somebody has knocked `count` times; each time the door is opened and shut again."""
    with listener(port) as door:
        door.settimeout(60)
        for _ in range(count):
            door.accept()[0].close()
