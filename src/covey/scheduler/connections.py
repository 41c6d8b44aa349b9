"""The scheduler's lines: whom it can speak to, by number. A line is a link, or a child's way through its agent's link.

The machine knows numbers only, so a child behind an agent is to it what a node with a link of its own is. One message for
several children of one agent, wished for in a row, goes out once.
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
    """The children behind one link: the line of each, by the agent's own number for it."""

    __slots__ = ("newest_child", "numbers_by_child")

    def __init__(self) -> None:
        self.numbers_by_child: dict[int, int] = {}
        self.newest_child = 0  # numbers go upwards: one that is not above this and has no line is over


class ConnectionTable:
    """All lines that are open."""

    def __init__(self) -> None:
        self.direct_connections: dict[int, Connection] = {}
        self._relayed_by_agent: dict[int, RelayedConnections] = {}  # by the agent's line
        self._child_routes: dict[int, tuple[int, int]] = {}  # by the child's line: its agent's, and the agent's number for it
        self._last_number = 0
        self._pending_envelope: tuple[int, Any, list[int]] | None = None  # the agent's line, what is to be told, to whom

    def open(self, link: Connection) -> None:
        """A link was made: give it its number."""
        link.id = self._next_number()
        self.direct_connections[link.id] = link

    def on_connection_lost(self, link: Connection) -> list[int]:
        """A link was lost: the lines that are lost with it, those behind it first."""
        del self.direct_connections[link.id]
        behind = self._relayed_by_agent.pop(link.id, RelayedConnections())
        for line in behind.numbers_by_child.values():
            del self._child_routes[line]
        return [*behind.numbers_by_child.values(), link.id]

    def filter_open(self, lines: set[int]) -> set[int]:
        return {line for line in lines if line in self.direct_connections or line in self._child_routes}

    def split_agent_message(
        self, link: Connection, said: FromChildEnvelope | ChildDisconnected | RelayedHeartbeats
    ) -> Iterator[MessageReceived | ConnectionLost]:
        """What an agent's word is, line by line. Raises `PeerError` for what no agent says."""
        behind = self._relayed_by_agent.setdefault(link.id, RelayedConnections())
        if isinstance(said, RelayedHeartbeats):
            yield MessageReceived(AGENT_HEARTBEAT, link.id)
            for child, progress in said.children.items():
                if child in behind.numbers_by_child:
                    yield MessageReceived(Heartbeat(progress), behind.numbers_by_child[child])
        elif isinstance(said, ChildDisconnected):
            if said.child in behind.numbers_by_child:
                yield ConnectionLost(said.reason, self._remove_child(behind, said.child))
        elif said.child in behind.numbers_by_child:
            yield MessageReceived(said.message, behind.numbers_by_child[said.child])
        elif said.child > behind.newest_child:
            if len(behind.numbers_by_child) >= RELAYED_CONNECTIONS_MAX:
                raise PeerError(f"an agent speaks for more than {RELAYED_CONNECTIONS_MAX} connections")
            behind.newest_child = said.child
            line = behind.numbers_by_child[said.child] = self._next_number()
            self._child_routes[line] = (link.id, said.child)
            yield MessageReceived(said.message, line)

    def send(self, line: int, message: Any) -> bool:
        """Say something over a line; False if it is not open. For a child it may wait until the next `flush`."""
        if line in self._child_routes:
            agent, child = self._child_routes[line]
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
        if line in self.direct_connections:
            self.flush()
            self.direct_connections[line].send(message)
            return True
        return False

    def close(self, line: int) -> None:
        """Close a line once what was sent has left."""
        self.flush()
        if line in self._child_routes:
            agent, child = self._child_routes[line]
            self._remove_child(self._relayed_by_agent[agent], child)
            self.direct_connections[agent].send(DisconnectChild(child))
        elif line in self.direct_connections:
            self.direct_connections[line].close()

    def flush(self) -> None:
        """Send what waits."""
        if self._pending_envelope is not None:
            agent, message, children = self._pending_envelope
            self._pending_envelope = None
            if agent in self.direct_connections:
                self.direct_connections[agent].send(ToChildrenEnvelope(children, message))

    def _remove_child(self, behind: RelayedConnections, child: int) -> int:
        line = behind.numbers_by_child.pop(child)
        del self._child_routes[line]
        return line

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number
