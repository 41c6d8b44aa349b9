"""Events: the inputs of the scheduler's and the node's state machine, named in the past tense.

The federation machine uses `MessageReceived`, `ConnectionLost` and `Tick` too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.types import Record, ScriptError


class MessageReceived(msgspec.Struct, frozen=True):
    """A message arrived over a connection. A node's only connection is 0."""

    message: Any  # FromNode at the scheduler, FromScheduler at a node
    connection: int = 0  # at the scheduler, 0: a request of its own process, such as REST


class ConnectionLost(msgspec.Struct, frozen=True):
    """A connection was lost or closed; at a node also: an attempt to connect failed. A node's only connection is 0."""

    reason: str
    connection: int = 0


class SchedulerRefused(msgspec.Struct, frozen=True):
    """The node rejected the process at the scheduler's address: the node has a join secret, and that process requires none."""

    reason: str


class Connected(msgspec.Struct, frozen=True):
    """A node is connected to its scheduler, directly or through its agent.

    After `silence_s` seconds without a message the node closes the connection and connects again; negative: never.
    """

    silence_s: float = -1.0


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. A scheduler's runtime sends it several times a second, a node's when `due_at` is reached or earlier."""


class JournalRead(msgspec.Struct, frozen=True):
    """The first event of a scheduler: the records of its journal; none at the first start, or without a journal."""

    records: tuple[Record, ...] = ()


class HostGone(msgspec.Struct, frozen=True):
    """A host is permanently gone, as reported by the system that manages hosts, such as the operator."""

    host_life: str  # COVEY_HOST_LIFE of the host, such as a pod's UID
    reason: str


class MindSporeDetected(msgspec.Struct, frozen=True):
    """A worker on the scheduler's host, or a process below it, used MindSpore's own protocol on the scheduler's port."""

    worker: str  # "worker:0"


class LeaveRequested(msgspec.Struct, frozen=True):
    """The node must leave the cluster: its process is about to exit with `code`, for `reason`."""

    code: int = 0
    reason: str = ""
    error: ScriptError | None = None  # the exception that ended the script; None: there was none


SchedulerEvent = MessageReceived | ConnectionLost | Tick | JournalRead | HostGone | MindSporeDetected
NodeEvent = Connected | ConnectionLost | SchedulerRefused | MessageReceived | Tick | LeaveRequested
