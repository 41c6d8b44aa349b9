"""Wishes in the imperative: everything a machine may want done.

Order is a contract: effects are carried out in the order given, and a `Persist` must be durable before any effect after it
is carried out. A shell may group the writes of one turn of its loop, never reorder them behind a send.
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
        """How loudly an end with this exit code is told."""
        return cls.WARNING if code else cls.NOTE


class Persist(msgspec.Struct, frozen=True):
    """Make this durable before going on."""

    record: Record


class Send(msgspec.Struct, frozen=True):
    """Send a message over a link (at a node: to the scheduler)."""

    message: Any  # FromScheduler at the scheduler, FromNode at a node
    connection: int = 0


class Close(msgspec.Struct, frozen=True):
    """Close a link once what was sent has left."""

    connection: int = 0


class PublishEvent(msgspec.Struct, frozen=True):
    """Something worth telling: it reaches the log, the journal's story and the console in the same words."""

    node: str
    what: str
    reason: str
    level: Level = Level.NOTE
    outcome: Outcome | None = None  # of the incident that a "recovery" event closes; None for other events


class EndCluster(msgspec.Struct, frozen=True):
    """The cluster is over: the scheduler ends with this code once its links are closed."""

    code: int
    reason: str
    failure: Failure | None = None


class Connect(msgspec.Struct, frozen=True):
    """A node: try to reach the scheduler once."""


class SendHeartbeat(msgspec.Struct, frozen=True):
    """A node: send a `Beat` with the freshest progress."""


class Deliver(msgspec.Struct, frozen=True):
    """A node: hand this to the program (its rank, a value from the board, a new generation, work for an agent)."""

    message: FromScheduler


class EndMembership(msgspec.Struct, frozen=True):
    """A node: its membership is over. Code 0: it left as it meant to."""

    code: int
    reason: str
    message: FromScheduler | None = None


SchedulerEffect = Persist | Send | Close | PublishEvent | EndCluster
NodeEffect = Connect | Send | SendHeartbeat | Close | Deliver | EndMembership | PublishEvent
