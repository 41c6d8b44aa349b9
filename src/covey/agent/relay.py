"""The agent's relay: one link to the scheduler for all its children.

A child connects to a socket in its agent's folder. What it says is carried to the scheduler at once, in an envelope with the
number of its connection, and what it is told comes back the same way. Only beats are gathered: the newest of each child goes
with the agent's own beat, or before it where a child's progress is news. A child that did not beat is left out, so that its
silence is its own.

Numbers belong to one link of the agent's. When that is lost every child is told, and registers anew on the next one.
A child that sends what no child sends, or more than the scheduler takes, is cut off alone.
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
UNSENT_MAX: Final = 16 * 1024 * 1024  # bytes that wait for the scheduler, before a child that says more is cut off
NEVER: Final = float("-inf")


class RelayUplink(Protocol):
    """What the relay needs of the agent's own membership."""

    address: str
    silence_s: float

    @property
    def no_listener(self) -> bool: ...

    def try_send(self, message: Message) -> bool: ...
    def since_last_heard_s(self) -> float: ...
    def unsent_bytes(self) -> int: ...


class ChildConnection:
    """One connection of a child. `number` is 0 until it has registered since the scheduler was reached."""

    __slots__ = ("acknowledged_at", "connection", "last_sent_at", "number", "reported_progress")

    def __init__(self, link: Connection) -> None:
        self.connection = link
        self.number = 0
        self.reported_progress = Progress()
        self.last_sent_at = NEVER  # when its newest sign of life went to the scheduler
        self.acknowledged_at = NEVER  # when one went that surely arrived

    def update_acknowledged(self, acknowledged_at: float) -> None:
        """Its newest sign of life has arrived if the scheduler's host acknowledged anything after it went."""
        if acknowledged_at >= self.last_sent_at:
            self.acknowledged_at = self.last_sent_at


class ChildRelay:
    """The children's door to the scheduler. Everything here runs in the agent's loop."""

    def __init__(self) -> None:
        self.socket_path = ""  # of its socket
        self.host_count = 1  # that speak to the scheduler as this one does
        self._connections: dict[Connection, ChildConnection] = {}
        self._by_number: dict[int, ChildConnection] = {}
        self._last_number = 0
        self._pending_progress: dict[int, Progress] = {}
        self._flushed_at = NEVER
        self._flush_timer: asyncio.TimerHandle | None = None
        self._uplink: RelayUplink | None = None
        self._scheduler_reachable = False
        self._unreachable_reason = "the agent has not reached it yet"
        self._listeners: list[Listener] = []

    async def open(self, folder: str) -> None:
        """Let children in. Only this user's processes can: the folder is the user's own."""
        self.socket_path = f"{folder}/{SOCKET_NAME}"
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(self.socket_path)
        except OSError as error:
            sock.close()
            raise UsageError(
                f"workers cannot be given a socket at {self.socket_path} ({error}): set TMPDIR to a short path"
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
        """Whether children find it: somebody may have removed it."""
        return Path(self.socket_path).exists()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        for link in list(self._connections):
            link.abort("the agent ended")
        Path(self.socket_path).unlink(missing_ok=True)

    # -- the agent's own link ----------------------------------------------------------------------------------------

    def on_scheduler_connected(self, uplink: RelayUplink) -> None:
        """The scheduler is reached, and the agent has registered."""
        self._uplink, self._scheduler_reachable, self._last_number = uplink, True, 0
        for caller in self._connections.values():
            caller.connection.send(SchedulerReachable(uplink.address, uplink.silence_s))

    def on_scheduler_lost(self, reason: str) -> None:
        self._unreachable_reason = reason
        if not self._scheduler_reachable:
            return
        self._scheduler_reachable = False
        self._by_number.clear()
        self._pending_progress.clear()
        for caller in self._connections.values():
            caller.number, caller.reported_progress = 0, Progress()
            caller.connection.send(SchedulerUnreachable(reason))

    def forward_to_children(self, message: Any) -> bool:
        """What came over the agent's link; whether it was for children alone."""
        if isinstance(message, ToChildrenEnvelope):
            for number in message.children:
                if number in self._by_number:
                    self._by_number[number].connection.send(message.message)
        elif isinstance(message, DisconnectChild):
            caller = self._remove_number(message.child)
            if caller is not None:
                caller.connection.close("the scheduler hung up")
        else:
            if isinstance(message, LeaderHeartbeat):
                for caller in self._by_number.values():
                    caller.connection.send(message)
            return False
        return True

    # -- children ----------------------------------------------------------------------------------------------------

    def _on_child_connected(self, link: Connection) -> None:
        if len(self._connections) >= RELAYED_CONNECTIONS_MAX:
            return link.abort(f"{RELAYED_CONNECTIONS_MAX} connections are open here")
        self._connections[link] = ChildConnection(link)
        if self._uplink is None or not self._scheduler_reachable:
            return link.send(SchedulerUnreachable(self._unreachable_reason))
        return link.send(SchedulerReachable(self._uplink.address, self._uplink.silence_s))

    def _on_child_message(self, link: Connection, message: FromChild | LastHeardRequest) -> None:
        caller = self._connections.get(link)
        if caller is None:  # cut off
            return
        if isinstance(message, LastHeardRequest):
            link.send(LastHeardReply(self._since_child_heard_s(caller)))
        elif isinstance(message, Register) and self._scheduler_reachable:
            if not caller.number:
                self._last_number += 1
                caller.number = self._last_number
                self._by_number[caller.number] = caller
            self._forward_to_scheduler(caller, message)
            caller.last_sent_at = asyncio.get_running_loop().time()
        elif not caller.number:
            return  # said before it knew that the scheduler was lost: it will register, and say again what counts
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(caller, message.progress)
        else:
            self._forward_to_scheduler(caller, message)

    def _forward_to_scheduler(self, caller: ChildConnection, message: FromChild) -> None:
        assert self._uplink is not None
        if self._uplink.unsent_bytes() > UNSENT_MAX:
            return self._disconnect_child(caller, f"it says more than the scheduler takes: {UNSENT_MAX} bytes wait")
        self._uplink.try_send(FromChildEnvelope(caller.number, message))
        return None

    def _disconnect_child(self, caller: ChildConnection, reason: str) -> None:
        log.warning("a worker's connection is closed: %s", reason)
        caller.connection.abort(reason)
        self._on_child_disconnected(caller.connection, reason)

    def _on_child_disconnected(self, link: Connection, reason: str) -> None:
        caller = self._connections.pop(link, None)
        if link.violated_protocol:
            log.warning("a connection to the agent was closed: %s", reason)
        if caller is not None and caller.number:
            assert self._uplink is not None
            self._uplink.try_send(ChildDisconnected(caller.number, reason))
            self._remove_number(caller.number)

    def _remove_number(self, number: int) -> ChildConnection | None:
        self._pending_progress.pop(number, None)
        caller = self._by_number.pop(number, None)
        if caller is not None:
            caller.number = 0
        return caller

    # -- beats -------------------------------------------------------------------------------------------------------

    def _on_heartbeat(self, caller: ChildConnection, progress: Progress) -> None:
        """Keep it for the next word to the scheduler. A loop that has begun changes what a death is answered with, so that is
        said at once."""
        self._pending_progress[caller.number] = progress
        if progress.in_loop and not caller.reported_progress.in_loop:
            self.flush_heartbeats()
        elif progress != caller.reported_progress and self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_at(
                max(loop.time(), self._flushed_at + progress_interval_s(self.host_count)), self.flush_heartbeats
            )

    def flush_heartbeats(self) -> None:
        """Say what has been gathered now, as before the news of a death, which is judged by how far everyone was."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._uplink is not None and self._scheduler_reachable and self._pending_progress:
            self._flushed_at = asyncio.get_running_loop().time()
            self._uplink.try_send(self.take_heartbeats())

    def take_heartbeats(self) -> RelayedHeartbeats:
        """The agent's beat, with those of its children that beat since the last."""
        assert self._uplink is not None
        now = asyncio.get_running_loop().time()
        acknowledged_at = now - self._uplink.since_last_heard_s()
        said, self._pending_progress = self._pending_progress, {}
        for number, progress in said.items():
            caller = self._by_number[number]
            caller.update_acknowledged(acknowledged_at)
            caller.reported_progress, caller.last_sent_at = progress, now
        return RelayedHeartbeats(said)

    # -- whether a child's place is surely its own -------------------------------------------------------------------

    def _since_child_heard_s(self, caller: ChildConnection) -> float:
        """How long ago this child, and not only its agent, was last surely heard. Where no scheduler is, nobody can have given
        its place away since."""
        now = asyncio.get_running_loop().time()
        if self._uplink is None:
            return float("inf")
        if caller.number:
            caller.update_acknowledged(now - self._uplink.since_last_heard_s())
        elif self._uplink.no_listener and caller.acknowledged_at > NEVER:
            caller.acknowledged_at = max(caller.acknowledged_at, now - self._uplink.since_last_heard_s())
        return now - caller.acknowledged_at
