"""Numbered connections of the scheduler: direct ones, and those of an agent's children, which share the agent's connection.

The state machine uses only the numbers, so it does not distinguish the two kinds. Successive sends of one message object to
children of the same agent are merged into one envelope until `flush`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from covey.core.events import ConnectionLost, MessageReceived
from covey.core.messages import (
    RELAYED_CONNECTIONS_MAX,
    ChildDisconnected,
    DisconnectChild,
    FromChildEnvelope,
    Heartbeat,
    RelayedHeartbeats,
    ToChildrenEnvelope,
)
from covey.errors import PeerError
from covey.transport.connection import Connection

AGENT_HEARTBEAT: Final = Heartbeat()


class RelayedConnections:
    """Connections that one agent relays: their numbers in the `ConnectionTable`, by the agent's own numbers."""

    __slots__ = ("newest_child", "numbers_by_child")

    def __init__(self) -> None:
        self.numbers_by_child: dict[int, int] = {}
        self.newest_child = 0  # highest number so far; the agent counts upwards, so lower ones without an entry are closed


class ConnectionTable:
    """Open connections by number. Numbers count from 1 and are not reused."""

    def __init__(self) -> None:
        self.direct_connections: dict[int, Connection] = {}
        self._relayed_by_agent: dict[int, RelayedConnections] = {}  # by the number of the agent's connection
        # Of a relayed connection: number of the agent's connection, and the agent's number for the child's.
        self._child_routes: dict[int, tuple[int, int]] = {}
        self._last_number = 0
        self._pending_envelope: tuple[int, Any, list[int]] | None = None  # agent's connection, message, children

    def open(self, connection: Connection) -> None:
        """Add a direct connection and assign its number."""
        connection.id = self._next_number()
        self.direct_connections[connection.id] = connection

    def on_connection_lost(self, connection: Connection) -> list[int]:
        """Remove a direct connection and the ones relayed over it; return their numbers, the relayed ones first."""
        del self.direct_connections[connection.id]
        relayed = self._relayed_by_agent.pop(connection.id, RelayedConnections())
        for number in relayed.numbers_by_child.values():
            del self._child_routes[number]
        return [*relayed.numbers_by_child.values(), connection.id]

    def filter_open(self, numbers: set[int]) -> set[int]:
        return {number for number in numbers if number in self.direct_connections or number in self._child_routes}

    def split_agent_message(
        self, connection: Connection, message: FromChildEnvelope | ChildDisconnected | RelayedHeartbeats
    ) -> Iterator[MessageReceived | ConnectionLost]:
        """Yield the events in a message of an agent. A child's first envelope opens its relayed connection; messages of closed
        connections are dropped. Raises `PeerError`, during the iteration, if the agent relays more than
        `RELAYED_CONNECTIONS_MAX` connections."""
        relayed = self._relayed_by_agent.setdefault(connection.id, RelayedConnections())
        if isinstance(message, RelayedHeartbeats):
            yield MessageReceived(AGENT_HEARTBEAT, connection.id)
            for child, progress in message.children.items():
                if child in relayed.numbers_by_child:
                    yield MessageReceived(Heartbeat(progress), relayed.numbers_by_child[child])
        elif isinstance(message, ChildDisconnected):
            if message.child in relayed.numbers_by_child:
                yield ConnectionLost(message.reason, self._remove_child(relayed, message.child))
        elif message.child in relayed.numbers_by_child:
            yield MessageReceived(message.message, relayed.numbers_by_child[message.child])
        elif message.child > relayed.newest_child:
            if len(relayed.numbers_by_child) >= RELAYED_CONNECTIONS_MAX:
                raise PeerError(f"the agent relays more than {RELAYED_CONNECTIONS_MAX} connections")
            relayed.newest_child = message.child
            number = relayed.numbers_by_child[message.child] = self._next_number()
            self._child_routes[number] = (connection.id, message.child)
            yield MessageReceived(message.message, number)

    def send(self, number: int, message: Any) -> bool:
        """Send a message; return False if the connection is not open. A message to a child may be held back until `flush`."""
        if number in self._child_routes:
            agent, child = self._child_routes[number]
            if (
                self._pending_envelope is not None
                and self._pending_envelope[0] == agent
                and self._pending_envelope[1] is message
            ):
                self._pending_envelope[2].append(child)
            else:
                self.flush()
                self._pending_envelope = (agent, message, [child])
            return True
        if number in self.direct_connections:
            self.flush()
            self.direct_connections[number].send(message)
            return True
        return False

    def close(self, number: int) -> None:
        """Close a connection after the messages sent on it; ignore a number that is not open."""
        self.flush()
        if number in self._child_routes:
            agent, child = self._child_routes[number]
            self._remove_child(self._relayed_by_agent[agent], child)
            self.direct_connections[agent].send(DisconnectChild(child))
        elif number in self.direct_connections:
            self.direct_connections[number].close()

    def flush(self) -> None:
        """Send the message that is held back, if any; drop it if the agent's connection is closed."""
        if self._pending_envelope is not None:
            agent, message, children = self._pending_envelope
            self._pending_envelope = None
            if agent in self.direct_connections:
                self.direct_connections[agent].send(ToChildrenEnvelope(children, message))

    def _remove_child(self, relayed: RelayedConnections, child: int) -> int:
        number = relayed.numbers_by_child.pop(child)
        del self._child_routes[number]
        return number

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number
