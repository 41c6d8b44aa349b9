"""Runtime of a node or agent with its own connection to the scheduler: it runs the state machine of its membership.

`relayed_node_runtime` is the variant for children of an agent.
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
HEARTBEATS_PER_TIMEOUT: Final = 4  # least number of heartbeats within the shorter of MS_NODE_TIMEOUT and COVEY_STUCK
PROGRESS_INTERVAL_MIN_S: Final = 0.5  # shortest time between two progress reports of one sender
PROGRESS_REPORTS_PER_S: Final = 500  # limit for all senders together


def progress_interval_s(senders: int) -> float:
    """Return the least seconds between two progress reports of one sender if the cluster has `senders` senders."""
    return max(PROGRESS_INTERVAL_MIN_S, senders / PROGRESS_REPORTS_PER_S)


class RelayCallbacks(Protocol):
    """Interface of the relay of an agent's children, as the agent's runtime calls it."""

    def on_scheduler_connected(self, uplink: NodeRuntime) -> None: ...
    def on_scheduler_lost(self, reason: str) -> None: ...
    def forward_to_children(self, message: Any) -> bool:
        """Forward a message of the scheduler to the children concerned; return whether it is for children only."""


class SchedulerAddress(msgspec.Struct, frozen=True):
    """Addresses of the scheduler and its standbys, and the credentials for them."""

    host: str
    port: int
    secret: str = ""
    # the secret was configured, or made for this run: refuse a scheduler that does not require it
    secret_required: bool = False
    ssl_context: Any = None  # ssl.SSLContext | None: msgspec has no schema for it
    standby_addresses: tuple[tuple[str, int], ...] = ()
    relay_path: str = ""  # socket of this process's agent; empty: connect directly

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [(self.host, self.port), *self.standby_addresses]

    @property
    def name(self) -> str:
        return ",".join(address.join_host_port(host, port) for host, port in self.addresses)


def make_node_settings(settings: Settings, scheduler_address: SchedulerAddress) -> NodeSettings:
    """Return the settings of the node's state machine.

    The heartbeat interval is at most a quarter of MS_NODE_TIMEOUT and of COVEY_STUCK, if these are positive; for a child of an
    agent an eighth, because its heartbeat waits for the agent's.
    """
    limits = [limit for limit in (settings.node_timeout_s, settings.stuck_s) if limit > 0]
    interval_s = min(limits, default=float("inf")) / (HEARTBEATS_PER_TIMEOUT * (2 if scheduler_address.relay_path else 1))
    return NodeSettings(
        address=scheduler_address.name,
        topo_timeout_s=settings.topo_timeout_s,
        node_timeout_s=settings.node_timeout_s,
        receive_timeout_s=settings.receive_timeout_s,
        retry_lower_s=min(settings.retry_lower_s, interval_s),
        retry_upper_s=min(settings.retry_upper_s, interval_s),
        recovery=settings.recovery or settings.uses_leader_election,
        heartbeats_enabled=not settings.disable_heartbeat,
    )


class NodeRuntime:
    """Runtime of a `NodeMachine`: passes events to it and carries out its effects.

    Its creation starts the first connection attempt. It belongs to the event loop in which it is created; other threads may
    only read its properties.
    """

    def __init__(
        self,
        registration: Register | RegisterAgent,
        settings: NodeSettings,
        scheduler_address: SchedulerAddress,
        *,
        deliver: Callable[[FromScheduler], None],
        finished: Callable[[EndMembership], None],
        make_heartbeat: Callable[[], Heartbeat | RelayedHeartbeats],
        relay: RelayCallbacks | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheduler_address = scheduler_address
        self._connect_attempts = 0  # failed attempts and lost connections; each makes the next attempt use the next address
        self._leader_token = 0  # highest fencing token of a leader so far
        self._deliver = deliver
        self._on_membership_end = finished
        self._make_heartbeat = make_heartbeat
        self._relay = relay
        self._connection: Connection | None = None
        self.silence_s = -1.0  # seconds without a message after which the scheduler is lost; negative: no limit
        self.no_listener = False  # the last attempt to connect was refused, because no process listens on the port
        self._last_contact_at = self._loop.time()  # of the last message or refused connection; at first, of the creation
        self._timer: asyncio.TimerHandle | None = None
        self._connect_task: asyncio.Task[None] | None = None
        self.address = registration.host.address  # MS_WORKER_IP, else the local address of the last connection; "" before it
        self._has_fixed_address = bool(registration.host.address)
        # The random module's generator belongs to the script, which runs in the same process.
        self._machine = NodeMachine(registration, settings, jitter=random.Random().random, now=self._loop.time())
        self._step_machine(Tick())

    @property
    def registration(self) -> Register | RegisterAgent:
        return self._machine.registration

    def leave(self, code: int = 0, reason: str = "", error: ScriptError | None = None) -> None:
        """Request to leave the cluster; a second call has no effect.

        `finished` is called when the membership has ended, with or without an acknowledgement, perhaps before this returns.
        """
        self._step_machine(LeaveRequested(code, reason, error))

    def try_send(self, message: Message) -> bool:
        """Queue a message to the scheduler; return False and drop it if there is no connection."""
        if self._connection is None:
            return False
        self._connection.send(message)
        return True

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the scheduler, direct or through an agent."""
        return self._connection is not None

    def unsent_bytes(self) -> int:
        """Return the number of bytes queued for the scheduler; 0 without a connection."""
        return self._connection.unsent_bytes() if self._connection is not None else 0

    async def query_since_last_heard_s(self) -> float:
        """Return `since_last_heard_s`; the relayed runtime queries its agent for it."""
        return self.since_last_heard_s()

    def since_last_heard_s(self) -> float:
        """Return the seconds since the scheduler's host last sent something to this node or acknowledged its data (TCP), or
        since this object was created. A `NoListenerError` counts too, because only a running scheduler can reassign the
        rank."""
        silent = self._loop.time() - self._last_contact_at
        return min(silent, self._connection.since_last_ack_s()) if self._connection is not None else silent

    def connection_fd(self) -> int:
        """Return the file descriptor of the connection, which a forked child must close; -1 if there is none."""
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
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._notify_relay_lost("closed by this side")

    def _notify_relay_lost(self, reason: str) -> None:
        if self._relay is not None:
            self._relay.on_scheduler_lost(reason)

    async def _connect(self) -> None:
        scheduler_address = self._scheduler_address
        host, port = scheduler_address.addresses[self._connect_attempts % len(scheduler_address.addresses)]
        try:
            await connect(
                host,
                port,
                scheduler_address.secret,
                scheduler_address.ssl_context,
                insist=scheduler_address.secret_required,
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

    def _on_connected(self, connection: Connection) -> None:
        if connection.leader_token < self._leader_token:
            return connection.abort(
                f"its fencing token {connection.leader_token} is older than {self._leader_token} of another leader"
            )
        self._leader_token, self.silence_s = connection.leader_token, connection.silence_s
        self._connection = connection
        self.no_listener = False
        if not self._has_fixed_address:
            self.address = connection.local_address()
        self._step_machine(Connected(self.silence_s))
        if self._relay is not None:
            self._relay.on_scheduler_connected(self)
        return None

    def _on_message(self, connection: Connection, message: Any) -> None:
        if connection is self._connection:
            self._last_contact_at = self._loop.time()
            if self._relay is None or not self._relay.forward_to_children(message):
                self._step_machine(MessageReceived(message))

    def _on_connection_closed(self, connection: Connection, reason: str) -> None:
        if connection.peer_requires_no_secret:
            self._step_machine(SchedulerRefused(reason))
        elif connection.refused_by_peer:
            self._step_machine(MessageReceived(Refused(reason)))
        elif connection is self._connection or self._connection is None:
            self._connection = None
            self._connect_attempts += 1
            self._notify_relay_lost(reason)
            self._step_machine(ConnectionLost(reason))

    def _with_address(self, message: Message) -> Message:
        """Add this node's address to a registration, because it may be unknown before the connection."""
        if isinstance(message, Register | RegisterAgent):
            host = msgspec.structs.replace(message.host, address=self.address)
            return msgspec.structs.replace(message, host=host)
        return message
