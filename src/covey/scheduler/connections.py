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
from covey.transport.connection import Link

AGENT_LIVES: Final = Heartbeat()


class Behind:
    """The children behind one link: the line of each, by the agent's own number for it."""

    __slots__ = ("lines", "newest")

    def __init__(self) -> None:
        self.lines: dict[int, int] = {}
        self.newest = 0  # numbers go upwards: one that is not above this and has no line is over


class Lines:
    """All lines that are open."""

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self._behind: dict[int, Behind] = {}  # by the agent's line
        self._children: dict[int, tuple[int, int]] = {}  # by the child's line: its agent's, and the agent's number for it
        self._last = 0
        self._waiting: tuple[int, Any, list[int]] | None = None  # the agent's line, what is to be told, to whom

    def open(self, link: Link) -> None:
        """A link was made: give it its number."""
        link.id = self._next()
        self.links[link.id] = link

    def closed(self, link: Link) -> list[int]:
        """A link was lost: the lines that are lost with it, those behind it first."""
        del self.links[link.id]
        behind = self._behind.pop(link.id, Behind())
        for line in behind.lines.values():
            del self._children[line]
        return [*behind.lines.values(), link.id]

    def open_among(self, lines: set[int]) -> set[int]:
        return {line for line in lines if line in self.links or line in self._children}

    def unwrap(
        self, link: Link, said: FromChildEnvelope | ChildDisconnected | RelayedHeartbeats
    ) -> Iterator[MessageReceived | ConnectionLost]:
        """What an agent's word is, line by line. Raises `PeerError` for what no agent says."""
        behind = self._behind.setdefault(link.id, Behind())
        if isinstance(said, RelayedHeartbeats):
            yield MessageReceived(AGENT_LIVES, link.id)
            for child, progress in said.children.items():
                if child in behind.lines:
                    yield MessageReceived(Heartbeat(progress), behind.lines[child])
        elif isinstance(said, ChildDisconnected):
            if said.child in behind.lines:
                yield ConnectionLost(said.reason, self._forget(behind, said.child))
        elif said.child in behind.lines:
            yield MessageReceived(said.message, behind.lines[said.child])
        elif said.child > behind.newest:
            if len(behind.lines) >= RELAYED_CONNECTIONS_MAX:
                raise PeerError(f"an agent speaks for more than {RELAYED_CONNECTIONS_MAX} connections")
            behind.newest = said.child
            line = behind.lines[said.child] = self._next()
            self._children[line] = (link.id, said.child)
            yield MessageReceived(said.message, line)

    def send(self, line: int, message: Any) -> bool:
        """Say something over a line; False if it is not open. For a child it may wait until the next `flush`."""
        if line in self._children:
            agent, child = self._children[line]
            if self._waiting is not None and self._waiting[0] == agent and self._waiting[1] is message:
                self._waiting[2].append(child)
            else:
                self.flush()
                self._waiting = (agent, message, [child])
            return True
        if line in self.links:
            self.flush()
            self.links[line].send(message)
            return True
        return False

    def close(self, line: int) -> None:
        """Close a line once what was sent has left."""
        self.flush()
        if line in self._children:
            agent, child = self._children[line]
            self._forget(self._behind[agent], child)
            self.links[agent].send(DisconnectChild(child))
        elif line in self.links:
            self.links[line].close()

    def flush(self) -> None:
        """Send what waits."""
        if self._waiting is not None:
            agent, message, children = self._waiting
            self._waiting = None
            if agent in self.links:
                self.links[agent].send(ToChildrenEnvelope(children, message))

    def _forget(self, behind: Behind, child: int) -> int:
        line = behind.lines.pop(child)
        del self._children[line]
        return line

    def _next(self) -> int:
        self._last += 1
        return self._last
