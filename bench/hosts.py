"""Thousands of simulated agents in one process, each with one TCP connection for all workers of its host.

Like `bench.flock`, but through agents: a simulated worker does what the scheduler can observe of it behind its agent. It
registers when its agent starts it, sends heartbeats with the other workers of its host, dies (the agent reports it), is started
again, and leaves.
"""

from __future__ import annotations

import random
from typing import Any

from bench.flock import PER_HOST, Node, NodePool
from covey.core import messages
from covey.core.types import Progress, Role
from covey.transport.connection import Connection

KILLED = 137


class Agent(Node):
    """The simulated agent of one host. `children` are its workers by the number of their relayed connection."""

    __slots__ = ("children", "deferred", "host", "last", "started")

    def __init__(self, pool: Hosts, number: int) -> None:
        super().__init__(pool, number * PER_HOST)
        self.host = self.request.host
        self.children: dict[int, messages.Assignment] = {}
        self.started: dict[str, int] = {}  # by node id: the newest incarnation
        self.last = 0
        self.deferred: list[messages.Assignment] | None = None  # assignments whose start is deferred; None: not deferred

    def kill_one(self) -> None:
        """Report the death of one worker; defer the start of its replacement until `revive_one`."""
        child, assignment = next(iter(self.children.items()))
        del self.children[child]
        self.deferred = []
        self.send(messages.ChildDisconnected(child, "closed by the other side"))
        self.send(messages.ChildExited(assignment.node_id, assignment.incarnation, KILLED, "killed by SIGKILL"))

    def revive_one(self) -> None:
        assert self.deferred is not None
        deferred, self.deferred = self.deferred, None
        self.start(deferred)

    def leave(self) -> None:
        self._cancel_heartbeat()
        for child in self.children:
            self.send(messages.FromChildEnvelope(child, messages.Leave()))

    def start(self, assignments: list[messages.Assignment]) -> None:
        """Start the assignments that are new, like an agent."""
        for assignment in assignments:
            if self.started.get(assignment.node_id, 0) >= assignment.incarnation:
                continue
            if self.deferred is not None:
                self.deferred.append(assignment)
                continue
            self.started[assignment.node_id] = assignment.incarnation
            self.last += 1
            self.children[self.last] = assignment
            self.send(messages.ChildStarted(assignment.node_id, assignment.incarnation, self.last))
            self.send(messages.FromChildEnvelope(self.last, self.registration(assignment)))

    def registration(self, assignment: messages.Assignment) -> messages.Register:
        return messages.Register(
            role=Role.WORKER,
            node_id=assignment.node_id,
            instance_id=f"{random.getrandbits(128):032x}",
            host=self.host,
            fingerprint=self.request.fingerprint,
            incarnation=assignment.incarnation,
            pid=self.last,
        )

    def send(self, message: Any) -> None:
        assert self.connection is not None
        self.connection.send(message)

    def _on_open(self, connection: Connection) -> None:
        self.connection = connection
        name = f"agent-{self.number}"
        connection.send(messages.RegisterAgent(name, name, self.host, PER_HOST, fingerprint=self.request.fingerprint))

    def _on_message(self, connection: Connection, message: Any) -> None:
        if isinstance(message, messages.ToChildrenEnvelope):
            for child in message.children:
                self._on_child_message(child, message.message)
        elif isinstance(message, messages.Registered):
            self._beat_later()
        elif isinstance(message, messages.DesiredChildren):
            self.start(message.assignments)
        elif isinstance(message, messages.ClusterEnded):
            self._cancel_heartbeat()
            connection.close()
        elif isinstance(message, messages.Refused):
            self.pool.refusal = message.reason

    def _on_child_message(self, child: int, message: Any) -> None:
        if isinstance(message, messages.RankAssigned):
            self.pool.formed.add()
        elif isinstance(message, messages.NewGeneration):
            self.pool.notified.add()
        elif isinstance(message, messages.LeaveAcknowledged):
            assignment = self.children.pop(child)
            self.send(messages.ChildDisconnected(child, "closed by the other side"))
            self.send(messages.ChildExited(assignment.node_id, assignment.incarnation, 0))
            self.pool.gone.add()
        elif isinstance(message, messages.Refused):
            self.pool.refusal = message.reason

    def _beat(self) -> None:
        progress = Progress(step=1 + self.pool.beats // self.pool.size, phase="train")
        self.send(messages.RelayedHeartbeats(dict.fromkeys(self.children, progress)))
        self.pool.beats += len(self.children)
        self._beat_later()


class Hosts(NodePool):
    """All agents of one cluster of `size` workers."""

    nodes: list[Agent]
    tells_returns = False  # a replacement belongs to the generation that began with the death

    @staticmethod
    def connections(size: int) -> int:
        return size // PER_HOST

    def populate(self) -> None:
        self.nodes = [Agent(self, number) for number in range(self.size // PER_HOST)]

    def kill(self, number: int) -> None:
        self.nodes[number // PER_HOST].kill_one()

    async def revive(self, number: int) -> None:
        self.nodes[number // PER_HOST].revive_one()
