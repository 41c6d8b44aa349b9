"""Runs a node's machine in an event loop: the shell shared by workers and agents.

Here a node has a link of its own to the scheduler; `child_runtime` is for those that have an agent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from covey.core.cluster.node_machine import NodeMachine, NodeSettings
from covey.core.effects import Close, Connect, Deliver, EndMembership, NodeEffect, PublishEvent, Send, SendHeartbeat
from covey.core.events import Connected, ConnectionLost, LeaveRequested, MessageReceived, NodeEvent, SchedulerRefused, Tick
from covey.core.messages import FromScheduler, Heartbeat, Message, Refused, Register, RegisterAgent, RelayedHeartbeats
from covey.core.types import ScriptError
from covey.errors import PeerError
from covey.log import log_event
from covey.settings import Settings
from covey.transport import address
from covey.transport.connection import Connection, NoListenerError, connect

TIMER_MAX_S: Final = 3600.0
HEARTBEATS_PER_TIMEOUT: Final = 4  # at least so many beats fit into the silence after which a node is dead
PROGRESS_INTERVAL_MIN_S: Final = 0.5  # shortest time between two progress reports of one sender
PROGRESS_REPORTS_PER_S: Final = 500  # limit of all senders together


def progress_interval_s(senders: int) -> float:
    """Return the seconds between two progress reports of one of `senders` senders."""
    return max(PROGRESS_INTERVAL_MIN_S, senders / PROGRESS_REPORTS_PER_S)


class RelayCallbacks(Protocol):
    """Calls from the runtime of an agent to the relay of its children."""

    def on_scheduler_connected(self, uplink: NodeRuntime) -> None: ...
    def on_scheduler_lost(self, reason: str) -> None: ...
    def forward_to_children(self, message: Any) -> bool:
        """Forward a message of the scheduler; return whether it was for children alone."""


class SchedulerAddress(msgspec.Struct, frozen=True):
    """Where the scheduler is and what opens it; `others` are where its standbys are."""

    host: str
    port: int
    secret: str = ""
    secret_required: bool = (
        False  # the secret was configured, or made for this run: a scheduler that does not require it is refused
    )
    ssl_context: Any = None  # ssl.SSLContext | None: msgspec has no schema for it
    standby_addresses: tuple[tuple[str, int], ...] = ()
    relay_path: str = ""  # the socket of this process's agent, through which it speaks

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [(self.host, self.port), *self.standby_addresses]

    @property
    def name(self) -> str:
        return ",".join(address.join_host_port(host, port) for host, port in self.addresses)


def make_node_settings(settings: Settings, door: SchedulerAddress) -> NodeSettings:
    """What a node's machine needs of the effective settings. Whoever shortens the silence allowed shortens the beat with it.
    A child beats twice as often, since what it says waits for its agent's beat."""
    limits = [limit for limit in (settings.node_timeout_s, settings.stuck_s) if limit > 0]
    often = min(limits, default=float("inf")) / (HEARTBEATS_PER_TIMEOUT * (2 if door.relay_path else 1))
    return NodeSettings(
        address=door.name,
        topo_timeout_s=settings.topo_timeout_s,
        node_timeout_s=settings.node_timeout_s,
        receive_timeout_s=settings.receive_timeout_s,
        retry_lower_s=min(settings.retry_lower_s, often),
        retry_upper_s=min(settings.retry_upper_s, often),
        recovery=settings.recovery or settings.uses_leader_election,
        heartbeats_enabled=not settings.disable_heartbeat,
    )


class NodeRuntime:
    """Carries facts to a `NodeMachine` and its wishes to a link. Everything here runs in one loop."""

    def __init__(
        self,
        wish: Register | RegisterAgent,
        settings: NodeSettings,
        door: SchedulerAddress,
        *,
        deliver: Callable[[FromScheduler], None],
        finished: Callable[[EndMembership], None],
        beat: Callable[[], Heartbeat | RelayedHeartbeats],
        relay: RelayCallbacks | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheduler_address = door
        self._connect_attempts = 0  # so far: each to the next address
        self._leader_token = 0  # the highest of a leader that this node has heard of
        self._deliver = deliver
        self._on_membership_end = finished
        self._make_heartbeat = beat
        self._relay = relay
        self._connection: Connection | None = None
        self.silence_s = -1.0  # of the scheduler, at most, as it said itself
        self.no_listener = False  # the last call was answered: nobody listens there
        self._last_contact_at = self._loop.time()  # when the scheduler, or its host, last let this node hear anything
        self._timer: asyncio.TimerHandle | None = None
        self._connect_task: asyncio.Task[None] | None = None
        self.address = wish.host.address  # by which others reach this node: MS_WORKER_IP, else that of the link
        self._has_fixed_address = bool(wish.host.address)
        # The module's generator belongs to the program, which draws from it in the same process.
        self._machine = NodeMachine(wish, settings, jitter=random.Random().random, now=self._loop.time())
        self._step_machine(Tick())

    @property
    def registration(self) -> Register | RegisterAgent:
        """The registration as it stands: identity, and what the cluster gave."""
        return self._machine.registration

    def leave(self, code: int = 0, reason: str = "", error: ScriptError | None = None) -> None:
        """Say goodbye; `finished` follows."""
        self._step_machine(LeaveRequested(code, reason, error))

    def try_send(self, message: Message) -> bool:
        """Send to the scheduler if it can be reached now."""
        if self._connection is None:
            return False
        self._connection.send(message)
        return True

    @property
    def is_connected(self) -> bool:
        """Whether the scheduler can be reached now."""
        return self._connection is not None

    def unsent_bytes(self) -> int:
        """Bytes that wait for the scheduler to read."""
        return self._connection.unsent_bytes() if self._connection is not None else 0

    async def query_since_last_heard_s(self) -> float:
        """`unheard_s`, by whoever knows it."""
        return self.since_last_heard_s()

    def since_last_heard_s(self) -> float:
        """How long ago the scheduler's host was last known to hear this node. One that says nobody listens there counts: only a
        scheduler that lives can give this node's place away."""
        silent = self._loop.time() - self._last_contact_at
        return min(silent, self._connection.since_last_ack_s()) if self._connection is not None else silent

    def connection_fd(self) -> int:
        """The link's file descriptor, -1 if there is none: a forked child must close it."""
        return self._connection.fileno() if self._connection is not None else -1

    def _step_machine(self, event: NodeEvent) -> None:
        for effect in self._machine.step(event, self._loop.time()):
            self._apply_effect(effect)
        if self._timer is not None:
            self._timer.cancel()
        wait = min(max(self._machine.due_at - self._loop.time(), 0.0), TIMER_MAX_S)
        self._timer = self._loop.call_later(wait, self._step_machine, Tick()) if self._machine.due_at < float("inf") else None

    def _apply_effect(self, effect: NodeEffect) -> None:
        if isinstance(effect, Connect):
            self._connect_task = self._loop.create_task(self._connect())
        elif isinstance(effect, Send):
            self.try_send(self._with_address(effect.message))
        elif isinstance(effect, SendHeartbeat):
            self.try_send(self._make_heartbeat())
        elif isinstance(effect, Deliver):
            self._deliver(effect.message)
        elif isinstance(effect, PublishEvent):
            log_event(effect)
        elif isinstance(effect, Close):
            self._disconnect()
        else:
            self._on_membership_end(effect)

    def _disconnect(self) -> None:
        link, self._connection = self._connection, None
        if link is not None:
            link.close()
        self._notify_relay_lost("closed by this side")

    def _notify_relay_lost(self, reason: str) -> None:
        if self._relay is not None:
            self._relay.on_scheduler_lost(reason)

    async def _connect(self) -> None:
        door = self._scheduler_address
        host, port = door.addresses[self._connect_attempts % len(door.addresses)]
        try:
            await connect(
                host,
                port,
                door.secret,
                door.ssl_context,
                insist=door.secret_required,
                on_open=self._on_connected,
                on_message=self._on_message,
                on_close=self._on_connection_closed,
            )
        except PeerError as error:
            self.no_listener = isinstance(error, NoListenerError)
            if self.no_listener:
                self._last_contact_at = self._loop.time()
            self._connect_attempts += 1
            self._notify_relay_lost(str(error))
            self._step_machine(ConnectionLost(str(error)))

    def _on_connected(self, link: Connection) -> None:
        if link.leader_token < self._leader_token:
            return link.abort(f"it leads by token {link.leader_token}, and another by {self._leader_token} has been heard of")
        self._leader_token, self.silence_s = link.leader_token, link.silence_s
        self._connection = link
        self.no_listener = False
        if not self._has_fixed_address:
            self.address = link.local_address()
        self._step_machine(Connected(self.silence_s))
        if self._relay is not None:
            self._relay.on_scheduler_connected(self)
        return None

    def _on_message(self, link: Connection, message: Any) -> None:
        if link is self._connection:
            self._last_contact_at = self._loop.time()
            if self._relay is None or not self._relay.forward_to_children(message):
                self._step_machine(MessageReceived(message))

    def _on_connection_closed(self, link: Connection, reason: str) -> None:
        if link.peer_requires_no_secret:
            self._step_machine(SchedulerRefused(reason))
        elif link.refused_by_peer:
            self._step_machine(MessageReceived(Refused(reason)))
        elif link is self._connection or self._connection is None:
            self._connection = None
            self._connect_attempts += 1
            self._notify_relay_lost(reason)
            self._step_machine(ConnectionLost(reason))

    def _with_address(self, message: Message) -> Message:
        """Registrations carry the address by which the scheduler was reached, unless MS_WORKER_IP names one."""
        if isinstance(message, Register | RegisterAgent):
            host = msgspec.structs.replace(message.host, address=self.address)
            return msgspec.structs.replace(message, host=host)
        return message
