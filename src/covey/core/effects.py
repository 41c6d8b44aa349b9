"""Effects: the outputs of the state machines, named in the imperative.

The order is a contract. Effects are carried out in the order given, and a `Persist` must be durable before any later effect is
carried out. A runtime may group consecutive writes of one turn of its loop, but never moves a write behind a send.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from covey.core.incidents import Outcome
from covey.core.messages import FromScheduler
from covey.core.types import Failure, Record


class Level(StrEnum):
    DETAIL = "detail"
    NOTE = "note"
    WARNING = "warning"

    @classmethod
    def from_exit_code(cls, code: int) -> Level:
        """Return the level of an event about a process that ended with this exit code: a warning unless it is 0."""
        return cls.WARNING if code else cls.NOTE


class Persist(msgspec.Struct, frozen=True):
    """Make the record durable before the next effect is carried out."""

    record: Record


class Send(msgspec.Struct, frozen=True):
    """Send a message over a connection. A node has one connection, to the scheduler."""

    message: Any  # FromScheduler at the scheduler, FromNode at a node
    connection: int = 0


class Close(msgspec.Struct, frozen=True):
    """Close a connection after all messages queued on it were sent."""

    connection: int = 0


class PublishEvent(msgspec.Struct, frozen=True):
    """Add an event to the log, the journal's event log and the console, with the same text in all of them."""

    node: str
    what: str
    reason: str
    level: Level = Level.NOTE
    outcome: Outcome | None = None  # of the incident that a "recovery" event closes; None for other events


class EndCluster(msgspec.Struct, frozen=True):
    """End the scheduler with this exit code after its connections are closed."""

    code: int
    reason: str
    failure: Failure | None = None


class Connect(msgspec.Struct, frozen=True):
    """Node only: make one attempt to connect to the scheduler."""


class SendHeartbeat(msgspec.Struct, frozen=True):
    """Node only: send a `Heartbeat` with the current progress."""


class Deliver(msgspec.Struct, frozen=True):
    """Node only: hand a message to the program: a rank, a rendezvous value, a new generation, or an agent's children."""

    message: FromScheduler


class EndMembership(msgspec.Struct, frozen=True):
    """Node only: end the membership. Code 0: the node left on its own request."""

    code: int
    reason: str
    message: FromScheduler | None = None


SchedulerEffect = Persist | Send | Close | PublishEvent | EndCluster
NodeEffect = Connect | Send | SendHeartbeat | Close | Deliver | EndMembership | PublishEvent
