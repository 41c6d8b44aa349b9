"""Thousands of light-weight nodes in one process, each with its own TCP connection and the real protocol.

A node here is what a scheduler can see of a worker: it greets, registers, beats, hears, dies and leaves by the messages of
`covey.core.messages` over `covey.transport.connection`. What it lacks is what a scheduler cannot see: a process and a training
loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from covey.core.cluster.node_machine import NodeSettings
from covey.core.messages import (
    ClusterEnded,
    Heartbeat,
    Leave,
    LeaveAcknowledged,
    NewGeneration,
    RankAssigned,
    Refused,
    Register,
    Registered,
)
from covey.core.types import Host, Progress, Role
from covey.errors import PeerError
from covey.transport.connection import Connection, connect

ADDRESS = "127.0.0.1"
PER_HOST = 8  # nodes that share a host identity
CONNECTING_MAX = 1000  # connections being made at once
RETRY_S = 0.2
_BEAT = NodeSettings(address="")  # the default interval


class Late(Exception):
    """A stage did not come to its end within its limit."""


class Tally:
    """When each expected thing happened, and an event for the last."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.times: list[float] = []
        self._done = asyncio.Event()

    def add(self) -> None:
        self.times.append(time.monotonic())
        if len(self.times) >= self.wanted:
            self._done.set()

    async def all(self, limit_s: float) -> float:
        """The time of the last one. Raises `TimeoutError`."""
        await asyncio.wait_for(self._done.wait(), limit_s)
        return self.times[-1]


class Node:
    """One node. Every second one claims the rank of its number; the others take what the scheduler gives."""

    __slots__ = ("flock", "link", "number", "timer", "wish")

    def __init__(self, flock: Flock, number: int) -> None:
        host = number // PER_HOST
        self.flock = flock
        self.number = number
        self.link: Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.wish = Register(
            role=Role.WORKER,
            node_id=str(number) if number % 2 else "",
            instance_id=f"{random.getrandbits(128):032x}",
            host=Host(f"host-{host:06}", f"host-{host}", f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"),
            fingerprint={"MS_WORKER_NUM": str(flock.size), "MS_SERVER_NUM": "0"},
            pid=number + 1,
        )

    async def join(self) -> None:
        calls: dict[str, Callable[..., None]] = {"on_open": self._opened, "on_message": self._heard, "on_close": self._closed}
        while True:
            try:
                self.link = await connect(ADDRESS, self.flock.port, "", None, **calls)
                return
            except PeerError:
                self.flock.retries += 1
                await asyncio.sleep(RETRY_S)

    def die(self) -> None:
        """As a killed process does: the kernel closes its socket, and nothing is said."""
        self._rest()
        assert self.link is not None
        self.link.abort("killed")

    def leave(self) -> None:
        self._rest()
        assert self.link is not None
        self.link.send(Leave())

    def _opened(self, link: Connection) -> None:
        link.send(self.wish)

    def _heard(self, link: Connection, message: Any) -> None:
        if isinstance(message, Registered):
            self._beat_later()
        elif isinstance(message, RankAssigned):
            self.flock.formed.add()
        elif isinstance(message, NewGeneration):
            self.flock.news.add()
        elif isinstance(message, LeaveAcknowledged):
            self.flock.gone.add()
            link.close()
        elif isinstance(message, ClusterEnded):
            self._rest()
            self.flock.news.add()
            link.close()
        elif isinstance(message, Refused):
            self.flock.refusal = message.reason

    def _closed(self, link: Connection, reason: str) -> None:
        """One that came so late to its greeting that it was cut off calls again, as a real node does."""
        self._rest()
        if not link.has_finished_handshake:
            self.flock.retries += 1
            self.flock.calling.add(asyncio.get_running_loop().create_task(self.join()))

    def _beat_later(self) -> None:
        wait = random.uniform(_BEAT.retry_lower_s, _BEAT.retry_upper_s)
        self.timer = asyncio.get_running_loop().call_later(wait, self._beat)

    def _beat(self) -> None:
        assert self.link is not None
        self.link.send(Heartbeat(Progress(step=1 + self.flock.beats // self.flock.size, phase="train")))
        self.flock.beats += 1
        self._beat_later()

    def _rest(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Flock:
    """All nodes of one cluster. Each stage takes a limit in seconds and raises `Late`."""

    nodes: list[Any]  # those that have a connection
    tells_returns = True  # a return is a new generation, of which all others hear

    def __init__(self, port: int, size: int) -> None:
        self.port = port
        self.size = size
        self.beats = 0
        self.retries = 0
        self.calling: set[asyncio.Task[None]] = set()
        self.refusal = ""
        self.formed = Tally(size)
        self.news = Tally(0)
        self.gone = Tally(size)
        self.populate()

    @staticmethod
    def connections(size: int) -> int:
        return size

    def populate(self) -> None:
        self.nodes = [Node(self, number) for number in range(self.size)]

    async def form(self, limit_s: float) -> float:
        """Seconds from the first connect to the last node that knows its rank."""
        order = list(self.nodes)
        random.Random(self.size).shuffle(order)
        began = time.monotonic()
        joining = asyncio.create_task(self._join(order))
        try:
            return await self._all("formed", self.formed, limit_s) - began
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _all(self, what: str, tally: Tally, limit_s: float) -> float:
        try:
            return await tally.all(limit_s)
        except TimeoutError:
            said = f" (the scheduler refused: {self.refusal})" if self.refusal else ""
            raise Late(f"{len(tally.times)} of {tally.wanted} {what} within {limit_s:g} s{said}") from None

    async def _join(self, order: list[Any]) -> None:
        gate = asyncio.Semaphore(CONNECTING_MAX)

        async def through(node: Any) -> None:
            async with gate:
                await node.join()

        async with asyncio.TaskGroup() as tasks:
            for node in order:
                tasks.create_task(through(node))

    async def all_beating(self) -> None:
        """Wait until the first beats are behind, and beats come evenly."""
        await asyncio.sleep(_BEAT.retry_upper_s + 0.5)

    def kill(self, number: int) -> None:
        self.nodes[number].die()

    async def lose(self, number: int, limit_s: float) -> tuple[float, float]:
        """Kill one node; seconds until half of the others, and until all of them, heard the news."""
        self.news = Tally(self.size - 1)
        began = time.monotonic()
        self.kill(number)
        last = await self._all("heard of the death", self.news, limit_s)
        return self.news.times[len(self.news.times) // 2] - began, last - began

    async def revive(self, number: int) -> None:
        node = self.nodes[number] = Node(self, number)
        await node.join()

    async def bring_back(self, number: int, limit_s: float) -> float:
        """The next life of a lost node; seconds until it has its rank and all others heard."""
        self.formed, self.news = Tally(1), Tally(self.size - 1)
        began = time.monotonic()
        await self.revive(number)
        back = await self._all("formed again", self.formed, limit_s)
        return (await self._all("heard of the return", self.news, limit_s) if self.tells_returns else back) - began

    async def leave(self, limit_s: float) -> float:
        """Everyone says goodbye; seconds until the last one was answered."""
        began = time.monotonic()
        for node in self.nodes:
            node.leave()
        return await self._all("left", self.gone, limit_s) - began
