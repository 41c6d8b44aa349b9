"""Facts in the past tense: everything that can happen to the scheduler's machine or to a node's.

The shells turn sockets, timers and journals into these; the simulation makes them up.
"""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.types import Record, ScriptError


class MessageReceived(msgspec.Struct, frozen=True):
    """A message arrived over a link. For a node there is one link, to its scheduler."""

    message: Any  # FromNode at the scheduler, FromScheduler at a node
    connection: int = 0


class ConnectionLost(msgspec.Struct, frozen=True):
    """A connection closed, for the reason the transport gave."""

    reason: str
    connection: int = 0


class SchedulerRefused(msgspec.Struct, frozen=True):
    """A node refuses what listens at the scheduler's address, and a retry would give the same result."""

    reason: str


class Connected(msgspec.Struct, frozen=True):
    """A node reached its scheduler and was greeted. One that has standbys lets itself be heard at least every `silence_s`."""

    silence_s: float = -1.0


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. The scheduler's shell says so several times a second; a node's when its `due` has come."""


class JournalRead(msgspec.Struct, frozen=True):
    """The journal was read. No records: this is the cluster's first start."""

    records: tuple[Record, ...] = ()


class HostGone(msgspec.Struct, frozen=True):
    """This life of a host is over, says somebody who can know: what looks after the hosts, never a node."""

    host_life: str
    reason: str


class MindSporeDetected(msgspec.Struct, frozen=True):
    """The process of this worker, or one of its children, speaks MindSpore's own protocol to the scheduler's port."""

    worker: str  # "worker:0"


class LeaveRequested(msgspec.Struct, frozen=True):
    """This node is to go: its program ended, or someone asked it to."""

    code: int = 0
    reason: str = ""
    error: ScriptError | None = None  # the exception that ended the program


SchedulerEvent = MessageReceived | ConnectionLost | Tick | JournalRead | HostGone | MindSporeDetected
NodeEvent = Connected | ConnectionLost | SchedulerRefused | MessageReceived | Tick | LeaveRequested
