"""Thousands of light-weight agents in one process, each with one TCP connection for all the workers of its host.

As `bench.flock`, through agents: a worker here is what the scheduler can see of it behind its agent's link. It registers when
its agent was told to start it, beats with the others of its host, dies (its agent says so), is started again, and leaves.
"""

from __future__ import annotations

import random
from typing import Any

from bench.flock import PER_HOST, Flock, Node
from covey.core.messages import (
    Assignment,
    ChildDisconnected,
    ChildExited,
    ChildStarted,
    ClusterEnded,
    DesiredChildren,
    FromChildEnvelope,
    Leave,
    LeaveAcknowledged,
    NewGeneration,
    RankAssigned,
    Refused,
    Register,
    RegisterAgent,
    Registered,
    RelayedHeartbeats,
    ToChildrenEnvelope,
)
from covey.core.types import Progress, Role
from covey.transport.connection import Connection

KILLED = 137


class Agent(Node):
    """One host. `children` are its workers by the number of their connection."""

    __slots__ = ("children", "held", "host", "last", "started")

    def __init__(self, flock: Hosts, number: int) -> None:
        super().__init__(flock, number * PER_HOST)
        self.host = self.wish.host
        self.children: dict[int, Assignment] = {}
        self.started: dict[str, int] = {}  # by node id: the newest incarnation
        self.last = 0
        self.held: list[Assignment] | None = None  # what is to be started, while that is put off

    def kill_one(self) -> None:
        """One worker dies; what takes its place is held back until `revive_one`."""
        child, life = next(iter(self.children.items()))
        del self.children[child]
        self.held = []
        self.send(ChildDisconnected(child, "closed by the other side"))
        self.send(ChildExited(life.node_id, life.incarnation, KILLED, "killed by SIGKILL"))

    def revive_one(self) -> None:
        assert self.held is not None
        held, self.held = self.held, None
        self.start(held)

    def leave(self) -> None:
        self._rest()
        for child in self.children:
            self.send(FromChildEnvelope(child, Leave()))

    def start(self, assignments: list[Assignment]) -> None:
        """As an agent does: what is new among what should run."""
        for life in assignments:
            if self.started.get(life.node_id, 0) >= life.incarnation:
                continue
            if self.held is not None:
                self.held.append(life)
                continue
            self.started[life.node_id] = life.incarnation
            self.last += 1
            self.children[self.last] = life
            self.send(ChildStarted(life.node_id, life.incarnation, self.last))
            self.send(FromChildEnvelope(self.last, self.registration(life)))

    def registration(self, life: Assignment) -> Register:
        return Register(
            role=Role.WORKER,
            node_id=life.node_id,
            instance_id=f"{random.getrandbits(128):032x}",
            host=self.host,
            fingerprint=self.wish.fingerprint,
            incarnation=life.incarnation,
            pid=self.last,
        )

    def send(self, message: Any) -> None:
        assert self.link is not None
        self.link.send(message)

    def _opened(self, link: Connection) -> None:
        self.link = link
        name = f"agent-{self.number}"
        link.send(RegisterAgent(name, name, self.host, PER_HOST, fingerprint=self.wish.fingerprint))

    def _heard(self, link: Connection, message: Any) -> None:
        if isinstance(message, ToChildrenEnvelope):
            for child in message.children:
                self._told(child, message.message)
        elif isinstance(message, Registered):
            self._beat_later()
        elif isinstance(message, DesiredChildren):
            self.start(message.assignments)
        elif isinstance(message, ClusterEnded):
            self._rest()
            link.close()
        elif isinstance(message, Refused):
            self.flock.refusal = message.reason

    def _told(self, child: int, message: Any) -> None:
        if isinstance(message, RankAssigned):
            self.flock.formed.add()
        elif isinstance(message, NewGeneration):
            self.flock.news.add()
        elif isinstance(message, LeaveAcknowledged):
            life = self.children.pop(child)
            self.send(ChildDisconnected(child, "closed by the other side"))
            self.send(ChildExited(life.node_id, life.incarnation, 0))
            self.flock.gone.add()
        elif isinstance(message, Refused):
            self.flock.refusal = message.reason

    def _beat(self) -> None:
        progress = Progress(step=1 + self.flock.beats // self.flock.size, phase="train")
        self.send(RelayedHeartbeats(dict.fromkeys(self.children, progress)))
        self.flock.beats += len(self.children)
        self._beat_later()


class Hosts(Flock):
    """All agents of one cluster of `size` workers."""

    nodes: list[Agent]
    tells_returns = False  # who takes a dead worker's place belongs to the generation that began with the death

    @staticmethod
    def connections(size: int) -> int:
        return size // PER_HOST

    def populate(self) -> None:
        self.nodes = [Agent(self, number) for number in range(self.size // PER_HOST)]

    def kill(self, number: int) -> None:
        self.nodes[number // PER_HOST].kill_one()

    async def revive(self, number: int) -> None:
        self.nodes[number // PER_HOST].revive_one()
