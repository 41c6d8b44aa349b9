"""The agent's relay: one connection to the scheduler for all children of the agent.

A child connects to a Unix socket in the agent's directory. The relay forwards the child's messages to the scheduler in an
envelope with the number of the child's connection, and the scheduler's messages back to the child. Heartbeats are batched: the
newest of each child is sent with the agent's own heartbeat, or earlier if the child's progress has changed. A child that sends
no heartbeat is not in the batch, so the scheduler detects its silence although the agent's heartbeats arrive.

The numbers are valid for one connection of the agent. After that connection is lost, children register again over the next one;
their messages to the scheduler are dropped until then.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, Final, Protocol

from covey.core.messages import (
    RELAYED_CONNECTIONS_MAX,
    ChildDisconnected,
    DisconnectChild,
    FromChild,
    FromChildEnvelope,
    Heartbeat,
    LastHeardReply,
    LastHeardRequest,
    LeaderHeartbeat,
    Message,
    Register,
    RelayedHeartbeats,
    SchedulerReachable,
    SchedulerUnreachable,
    ToChildrenEnvelope,
)
from covey.core.types import Progress
from covey.errors import UsageError
from covey.log import log
from covey.runtime.node_runtime import progress_interval_s
from covey.transport.connection import Connection, Listener
from covey.transport.framing import from_child_decoder

SOCKET_NAME: Final = "relay"
UNSENT_MAX: Final = 16 * 1024 * 1024  # bytes waiting for the scheduler, above which a child that sends is disconnected
NEVER: Final = float("-inf")


class RelayUplink(Protocol):
    """Interface of the agent's connection to the scheduler, as the relay uses it."""

    address: str
    silence_s: float

    @property
    def no_listener(self) -> bool: ...

    def try_send(self, message: Message) -> bool: ...
    def since_last_heard_s(self) -> float: ...
    def unsent_bytes(self) -> int: ...


class ChildConnection:
    """One connection of a child to the relay. `number` is 0 while the child is not registered over the agent's present
    connection."""

    __slots__ = ("acknowledged_at", "connection", "last_sent_at", "number", "reported_progress")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.number = 0
        self.reported_progress = Progress()
        self.last_sent_at = NEVER  # loop time at which its newest heartbeat or registration was sent
        self.acknowledged_at = NEVER  # loop time at which the newest acknowledged one was sent; NEVER: none

    def update_acknowledged(self, acknowledged_at: float) -> None:
        """Mark the child's newest heartbeat or registration as acknowledged, unless it was sent after `acknowledged_at`, the
        loop time at which the scheduler's host last answered the agent."""
        if acknowledged_at >= self.last_sent_at:
            self.acknowledged_at = self.last_sent_at


class ChildRelay:
    """The relay of one agent. Its methods run in the agent's event loop."""

    def __init__(self) -> None:
        self.socket_path = ""
        self.host_count = 1  # hosts of the cluster; sets the interval of progress updates
        self._connections: dict[Connection, ChildConnection] = {}
        self._by_number: dict[int, ChildConnection] = {}
        self._last_number = 0
        self._pending_progress: dict[int, Progress] = {}
        self._flushed_at = NEVER
        self._flush_timer: asyncio.TimerHandle | None = None
        self._uplink: RelayUplink | None = None
        self._scheduler_reachable = False
        self._unreachable_reason = "the agent has not connected to it yet"
        self._listeners: list[Listener] = []

    async def open(self, folder: str) -> None:
        """Listen for children at a Unix socket in `folder`. Raises `UsageError` if the socket cannot be bound."""
        self.socket_path = f"{folder}/{SOCKET_NAME}"
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(self.socket_path)
        except OSError as error:
            sock.close()
            raise UsageError(
                f"cannot listen for workers at {self.socket_path} ({error}): set TMPDIR to a shorter path"
            ) from None
        calls: dict[str, Any] = {
            "on_open": self._on_child_connected,
            "on_message": self._on_child_message,
            "on_close": self._on_child_disconnected,
        }
        self._listeners.append(Listener([sock], "", None, decoder=from_child_decoder, **calls))
        await self._listeners[-1].open()

    @property
    def has_socket(self) -> bool:
        return Path(self.socket_path).exists()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        for connection in list(self._connections):
            connection.abort("the agent ended")
        Path(self.socket_path).unlink(missing_ok=True)

    # -- the agent's own connection ----------------------------------------------------------------------------------

    def on_scheduler_connected(self, uplink: RelayUplink) -> None:
        """Notify the children that the agent has connected to the scheduler; number their registrations from 1 again."""
        self._uplink, self._scheduler_reachable, self._last_number = uplink, True, 0
        for child in self._connections.values():
            child.connection.send(SchedulerReachable(uplink.address, uplink.silence_s))

    def on_scheduler_lost(self, reason: str) -> None:
        self._unreachable_reason = reason
        if not self._scheduler_reachable:
            return
        self._scheduler_reachable = False
        self._by_number.clear()
        self._pending_progress.clear()
        for child in self._connections.values():
            child.number, child.reported_progress = 0, Progress()
            child.connection.send(SchedulerUnreachable(reason))

    def forward_to_children(self, message: Any) -> bool:
        """Forward the message in a `ToChildrenEnvelope`, and each `LeaderHeartbeat`, to children; on `DisconnectChild`, close
        the child's connection. Return False if the agent must handle the message, as it must a `LeaderHeartbeat`."""
        if isinstance(message, ToChildrenEnvelope):
            for number in message.children:
                if number in self._by_number:
                    self._by_number[number].connection.send(message.message)
        elif isinstance(message, DisconnectChild):
            child = self._remove_number(message.child)
            if child is not None:
                child.connection.close("the scheduler closed the connection")
        else:
            if isinstance(message, LeaderHeartbeat):
                for child in self._by_number.values():
                    child.connection.send(message)
            return False
        return True

    # -- children ----------------------------------------------------------------------------------------------------

    def _on_child_connected(self, connection: Connection) -> None:
        if len(self._connections) >= RELAYED_CONNECTIONS_MAX:
            return connection.abort(f"the agent has {RELAYED_CONNECTIONS_MAX} connections, which is the limit")
        self._connections[connection] = ChildConnection(connection)
        if self._uplink is None or not self._scheduler_reachable:
            return connection.send(SchedulerUnreachable(self._unreachable_reason))
        return connection.send(SchedulerReachable(self._uplink.address, self._uplink.silence_s))

    def _on_child_message(self, connection: Connection, message: FromChild | LastHeardRequest) -> None:
        child = self._connections.get(connection)
        if child is None:  # disconnected
            return
        if isinstance(message, LastHeardRequest):
            connection.send(LastHeardReply(self._since_child_heard_s(child)))
        elif isinstance(message, Register) and self._scheduler_reachable:
            if not child.number:
                self._last_number += 1
                child.number = self._last_number
                self._by_number[child.number] = child
            self._forward_to_scheduler(child, message)
            child.last_sent_at = asyncio.get_running_loop().time()
        elif not child.number:
            return  # sent before the child received SchedulerUnreachable: it will register and resend what matters
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(child, message.progress)
        else:
            self._forward_to_scheduler(child, message)

    def _forward_to_scheduler(self, child: ChildConnection, message: FromChild) -> None:
        assert self._uplink is not None
        if self._uplink.unsent_bytes() > UNSENT_MAX:
            return self._disconnect_child(child, f"more than {UNSENT_MAX} bytes are waiting to be sent to the scheduler")
        self._uplink.try_send(FromChildEnvelope(child.number, message))
        return None

    def _disconnect_child(self, child: ChildConnection, reason: str) -> None:
        log.warning("worker connection closed: %s", reason)
        child.connection.abort(reason)
        self._on_child_disconnected(child.connection, reason)

    def _on_child_disconnected(self, connection: Connection, reason: str) -> None:
        child = self._connections.pop(connection, None)
        if connection.violated_protocol:
            log.warning("connection to the agent closed: %s", reason)
        if child is not None and child.number:
            assert self._uplink is not None
            self._uplink.try_send(ChildDisconnected(child.number, reason))
            self._remove_number(child.number)

    def _remove_number(self, number: int) -> ChildConnection | None:
        self._pending_progress.pop(number, None)
        child = self._by_number.pop(number, None)
        if child is not None:
            child.number = 0
        return child

    # -- heartbeats --------------------------------------------------------------------------------------------------

    def _on_heartbeat(self, child: ChildConnection, progress: Progress) -> None:
        self._pending_progress[child.number] = progress
        if progress.in_loop and not child.reported_progress.in_loop:  # it changes how the scheduler handles a failure
            self.flush_heartbeats()
        elif progress != child.reported_progress and self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_at(
                max(loop.time(), self._flushed_at + progress_interval_s(self.host_count)), self.flush_heartbeats
            )

    def flush_heartbeats(self) -> None:
        """Send the queued progress now, if there is any and the scheduler is connected."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._uplink is not None and self._scheduler_reachable and self._pending_progress:
            self._flushed_at = asyncio.get_running_loop().time()
            self._uplink.try_send(self.take_heartbeats())

    def take_heartbeats(self) -> RelayedHeartbeats:
        """Return the agent's heartbeat with the queued heartbeats of its children; clear the queue."""
        assert self._uplink is not None
        now = asyncio.get_running_loop().time()
        acknowledged_at = now - self._uplink.since_last_heard_s()
        heartbeats, self._pending_progress = self._pending_progress, {}
        for number, progress in heartbeats.items():
            child = self._by_number[number]
            child.update_acknowledged(acknowledged_at)
            child.reported_progress, child.last_sent_at = progress, now
        return RelayedHeartbeats(heartbeats)

    # -- last contact of a child -------------------------------------------------------------------------------------

    def _since_child_heard_s(self, child: ChildConnection) -> float:
        """Return the seconds since the child sent its newest acknowledged heartbeat or registration, or since a connection
        attempt of the agent was refused because no scheduler listens, if that was later; infinite if none was acknowledged."""
        now = asyncio.get_running_loop().time()
        if self._uplink is None:
            return float("inf")
        if child.number:
            child.update_acknowledged(now - self._uplink.since_last_heard_s())
        elif self._uplink.no_listener and child.acknowledged_at > NEVER:  # only a running scheduler can reassign the rank
            child.acknowledged_at = max(child.acknowledged_at, now - self._uplink.since_last_heard_s())
        return now - child.acknowledged_at
