"""Effects: the outputs of the scheduler's and the node's state machine, named in the imperative.

The order is a contract. A runtime carries effects out in the order given, and a `Persist` must be durable before any later
effect is carried out. A runtime may write records earlier: before all other effects of the same turn of its loop.
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
        """Return the level of an event about the end of a process or run: NOTE if the exit code is 0, else WARNING."""
        return cls.WARNING if code else cls.NOTE


class Persist(msgspec.Struct, frozen=True):
    """Scheduler only: write the record to the journal, durably, before the next effect. No effect if there is no journal."""

    record: Record


class Send(msgspec.Struct, frozen=True):
    """Send a message over a connection, or drop it if the connection is not open. A node's only connection is 0."""

    message: Any  # FromScheduler at the scheduler, FromNode at a node
    connection: int = 0


class Close(msgspec.Struct, frozen=True):
    """Close a connection after the messages queued on it were sent. A node's only connection is 0."""

    connection: int = 0


class PublishEvent(msgspec.Struct, frozen=True):
    """Write an event to the process log. A scheduler also adds it to the event log, and to the journal if there is one."""

    node: str  # what the event is about, such as "worker:1" or "cluster"
    what: str  # a keyword, such as "died"
    reason: str
    level: Level = Level.NOTE
    outcome: Outcome | None = None  # of the incident that a "recovery" event closes; None for other events


class EndCluster(msgspec.Struct, frozen=True):
    """Scheduler only: end the scheduler with this code, once members and agents have disconnected or a grace period is over."""

    code: int
    reason: str
    failure: Failure | None = None


class Connect(msgspec.Struct, frozen=True):
    """Node only: make one attempt to connect to the scheduler or a standby; the result follows as an event."""


class SendHeartbeat(msgspec.Struct, frozen=True):
    """Node only: send a heartbeat with the current progress: `Heartbeat`, or `RelayedHeartbeats` if the node is an agent."""


class Deliver(msgspec.Struct, frozen=True):
    """Node only: pass a message of the scheduler to the worker, parameter server, spare or agent that this node is."""

    message: FromScheduler


class EndMembership(msgspec.Struct, frozen=True):
    """Node only: the membership has ended, for `reason`. `code` is the exit code for the process."""

    code: int
    reason: str
    message: FromScheduler | None = None  # the `ClusterEnded` that ended it; None: another cause


SchedulerEffect = Persist | Send | Close | PublishEvent | EndCluster
NodeEffect = Connect | Send | SendHeartbeat | Close | Deliver | EndMembership | PublishEvent
