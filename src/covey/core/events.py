"""Events: the inputs of the scheduler's and the node's state machine, named in the past tense.

The runtimes make them from sockets, timers and journals; the simulation generates them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.types import Record, ScriptError


class MessageReceived(msgspec.Struct, frozen=True):
    """A message arrived over a connection. A node has one connection, to its scheduler."""

    message: Any  # FromNode at the scheduler, FromScheduler at a node
    connection: int = 0


class ConnectionLost(msgspec.Struct, frozen=True):
    """A connection closed, for the reason the transport gave."""

    reason: str
    connection: int = 0


class SchedulerRefused(msgspec.Struct, frozen=True):
    """The node rejects the process that listens at the scheduler's address; a retry would give the same result."""

    reason: str


class Connected(msgspec.Struct, frozen=True):
    """A node connected to its scheduler and received the greeting.

    After `silence_s` seconds without a message the node connects to another scheduler; negative: never.
    """

    silence_s: float = -1.0


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. The scheduler's runtime sends it several times a second, a node's runtime when `due_at` is reached."""


class JournalRead(msgspec.Struct, frozen=True):
    """The journal was read. It has no records at the first start of a cluster."""

    records: tuple[Record, ...] = ()


class HostGone(msgspec.Struct, frozen=True):
    """A host instance is permanently gone, reported by the system that manages hosts (the operator), never by a node."""

    host_life: str
    reason: str


class MindSporeDetected(msgspec.Struct, frozen=True):
    """The process of this worker, or one of its children, used MindSpore's own protocol on the scheduler's port."""

    worker: str  # "worker:0"


class LeaveRequested(msgspec.Struct, frozen=True):
    """The node must leave: its script ended, or it was asked to leave."""

    code: int = 0
    reason: str = ""
    error: ScriptError | None = None  # the exception that ended the script


SchedulerEvent = MessageReceived | ConnectionLost | Tick | JournalRead | HostGone | MindSporeDetected
NodeEvent = Connected | ConnectionLost | SchedulerRefused | MessageReceived | Tick | LeaveRequested
