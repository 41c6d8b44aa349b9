"""Thousands of simulated nodes in one process, each with its own TCP connection and the real protocol.

A simulated node does what a scheduler can observe of a worker: handshake, registration, heartbeats, death and leaving, with the
messages of `covey.core.messages` over `covey.transport.connection`. It has no process of its own and no training loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from covey.core import messages
from covey.core.cluster.node_machine import NodeSettings
from covey.core.types import Host, Progress, Role
from covey.errors import PeerError
from covey.transport.connection import Connection, connect

ADDRESS = "127.0.0.1"
PER_HOST = 8  # nodes that share a host identity
CONNECTING_MAX = 1000  # connection attempts at the same time
RETRY_S = 0.2
_BEAT = NodeSettings(address="")  # for the default heartbeat interval


class Late(Exception):
    """A stage did not finish within its limit."""


class Tally:
    """Times of an expected number of occurrences."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.times: list[float] = []
        self._done = asyncio.Event()

    def add(self) -> None:
        self.times.append(time.monotonic())
        if len(self.times) >= self.wanted:
            self._done.set()

    async def all(self, limit_s: float) -> float:
        """Wait for the last occurrence and return its time. Raise `TimeoutError` after `limit_s`."""
        await asyncio.wait_for(self._done.wait(), limit_s)
        return self.times[-1]


class Node:
    """One simulated node. Nodes with odd numbers claim their number as node id; the scheduler assigns the others'."""

    __slots__ = ("connection", "number", "pool", "request", "timer")

    def __init__(self, pool: NodePool, number: int) -> None:
        host = number // PER_HOST
        self.pool = pool
        self.number = number
        self.connection: Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.request = messages.Register(
            role=Role.WORKER,
            node_id=str(number) if number % 2 else "",
            instance_id=f"{random.getrandbits(128):032x}",
            host=Host(f"host-{host:06}", f"host-{host}", f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"),
            fingerprint={"MS_WORKER_NUM": str(pool.size), "MS_SERVER_NUM": "0"},
            pid=number + 1,
        )

    async def join(self) -> None:
        calls: dict[str, Callable[..., None]] = {
            "on_open": self._on_open,
            "on_message": self._on_message,
            "on_close": self._on_close,
        }
        while True:
            try:
                self.connection = await connect(ADDRESS, self.pool.port, "", None, **calls)
                return
            except PeerError:
                self.pool.retries += 1
                await asyncio.sleep(RETRY_S)

    def die(self) -> None:
        """Abort the connection without a message, as the kernel does for a killed process."""
        self._cancel_heartbeat()
        assert self.connection is not None
        self.connection.abort("killed")

    def leave(self) -> None:
        self._cancel_heartbeat()
        assert self.connection is not None
        self.connection.send(messages.Leave())

    def _on_open(self, connection: Connection) -> None:
        connection.send(self.request)

    def _on_message(self, connection: Connection, message: Any) -> None:
        if isinstance(message, messages.Registered):
            self._beat_later()
        elif isinstance(message, messages.RankAssigned):
            self.pool.formed.add()
        elif isinstance(message, messages.NewGeneration):
            self.pool.notified.add()
        elif isinstance(message, messages.LeaveAcknowledged):
            self.pool.gone.add()
            connection.close()
        elif isinstance(message, messages.ClusterEnded):
            self._cancel_heartbeat()
            self.pool.notified.add()
            connection.close()
        elif isinstance(message, messages.Refused):
            self.pool.refusal = message.reason

    def _on_close(self, connection: Connection, reason: str) -> None:
        """Connect again, like a real node, if the scheduler closed the connection before the handshake was complete."""
        self._cancel_heartbeat()
        if not connection.has_finished_handshake:
            self.pool.retries += 1
            self.pool.calling.add(asyncio.get_running_loop().create_task(self.join()))

    def _beat_later(self) -> None:
        wait = random.uniform(_BEAT.retry_lower_s, _BEAT.retry_upper_s)
        self.timer = asyncio.get_running_loop().call_later(wait, self._beat)

    def _beat(self) -> None:
        assert self.connection is not None
        self.connection.send(messages.Heartbeat(Progress(step=1 + self.pool.beats // self.pool.size, phase="train")))
        self.pool.beats += 1
        self._beat_later()

    def _cancel_heartbeat(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class NodePool:
    """All nodes of one cluster. Each stage has a limit in seconds and raises `Late`."""

    nodes: list[Any]  # one per connection
    tells_returns = True  # the return of a node starts a generation, which is sent to all other nodes

    def __init__(self, port: int, size: int) -> None:
        self.port = port
        self.size = size
        self.beats = 0
        self.retries = 0
        self.calling: set[asyncio.Task[None]] = set()
        self.refusal = ""
        self.formed = Tally(size)
        self.notified = Tally(0)
        self.gone = Tally(size)
        self.populate()

    @staticmethod
    def connections(size: int) -> int:
        return size

    def populate(self) -> None:
        self.nodes = [Node(self, number) for number in range(self.size)]

    async def form(self, limit_s: float) -> float:
        """Return the seconds from the first connect until the last node has received its rank."""
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
            refused = f" (the scheduler refused: {self.refusal})" if self.refusal else ""
            raise Late(f"{len(tally.times)} of {tally.wanted} {what} within {limit_s:g} s{refused}") from None

    async def _join(self, order: list[Any]) -> None:
        slots = asyncio.Semaphore(CONNECTING_MAX)

        async def join(node: Any) -> None:
            async with slots:
                await node.join()

        async with asyncio.TaskGroup() as tasks:
            for node in order:
                tasks.create_task(join(node))

    async def all_beating(self) -> None:
        """Wait until every node has sent a heartbeat, so that heartbeats are evenly distributed."""
        await asyncio.sleep(_BEAT.retry_upper_s + 0.5)

    def kill(self, number: int) -> None:
        self.nodes[number].die()

    async def lose(self, number: int, limit_s: float) -> tuple[float, float]:
        """Kill one node; return the seconds until half of the others, and until all of them, were notified."""
        self.notified = Tally(self.size - 1)
        began = time.monotonic()
        self.kill(number)
        last = await self._all("were notified of the death", self.notified, limit_s)
        return self.notified.times[len(self.notified.times) // 2] - began, last - began

    async def revive(self, number: int) -> None:
        node = self.nodes[number] = Node(self, number)
        await node.join()

    async def bring_back(self, number: int, limit_s: float) -> float:
        """Start the next incarnation of a lost node; return the seconds until it has its rank and all others were notified."""
        self.formed, self.notified = Tally(1), Tally(self.size - 1)
        began = time.monotonic()
        await self.revive(number)
        back = await self._all("formed again", self.formed, limit_s)
        return (await self._all("were notified of the return", self.notified, limit_s) if self.tells_returns else back) - began

    async def leave(self, limit_s: float) -> float:
        """Let all nodes leave; return the seconds until the last one was acknowledged."""
        began = time.monotonic()
        for node in self.nodes:
            node.leave()
        return await self._all("left", self.gone, limit_s) - began
