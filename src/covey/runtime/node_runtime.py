"""Runs a node's machine in an event loop: the shell shared by workers and agents.

Here a node has a link of its own to the scheduler; `child_runtime` is for those that have an agent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from covey.agent.relay import Relay
from covey.core.cluster.node_machine import NodeMachine, NodeSettings
from covey.core.effects import Close, Connect, Deliver, EndMembership, NodeEffect, PublishEvent, Send, SendHeartbeat
from covey.core.events import Connected, ConnectionLost, LeaveRequested, MessageReceived, NodeEvent, SchedulerRefused, Tick
from covey.core.messages import FromScheduler, Heartbeat, Message, Refused, Register, RegisterAgent, RelayedHeartbeats
from covey.core.types import ScriptError
from covey.errors import PeerError
from covey.log import tell
from covey.settings import Settings
from covey.transport import address
from covey.transport.connection import Link, NobodyListens, connect

TIMER_MAX_S: Final = 3600.0
BEATS_PER_SILENCE: Final = 4  # at least so many beats fit into the silence after which a node is dead


class Door(msgspec.Struct, frozen=True):
    """Where the scheduler is and what opens it; `others` are where its standbys are."""

    host: str
    port: int
    secret: str = ""
    insist: bool = False  # the secret was configured, or made for this run: a scheduler that does not require it is refused
    context: Any = None  # ssl.SSLContext | None: msgspec has no schema for it
    others: tuple[tuple[str, int], ...] = ()
    relay: str = ""  # the socket of this process's agent, through which it speaks

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [(self.host, self.port), *self.others]

    @property
    def name(self) -> str:
        return ",".join(address.join(host, port) for host, port in self.addresses)


def node_settings(settings: Settings, door: Door) -> NodeSettings:
    """What a node's machine needs of the effective settings. Whoever shortens the silence allowed shortens the beat with it.
    A child beats twice as often, since what it says waits for its agent's beat."""
    limits = [limit for limit in (settings.node_timeout_s, settings.stuck_s) if limit > 0]
    often = min(limits, default=float("inf")) / (BEATS_PER_SILENCE * (2 if door.relay else 1))
    return NodeSettings(
        address=door.name,
        topo_timeout_s=settings.topo_timeout_s,
        node_timeout_s=settings.node_timeout_s,
        receive_timeout_s=settings.receive_timeout_s,
        retry_lower_s=min(settings.retry_lower_s, often),
        retry_upper_s=min(settings.retry_upper_s, often),
        recovery=settings.recovery or settings.stands_by,
        heartbeats_enabled=not settings.disable_heartbeat,
    )


class NodeRuntime:
    """Carries facts to a `NodeMachine` and its wishes to a link. Everything here runs in one loop."""

    def __init__(
        self,
        wish: Register | RegisterAgent,
        settings: NodeSettings,
        door: Door,
        *,
        deliver: Callable[[FromScheduler], None],
        finished: Callable[[EndMembership], None],
        beat: Callable[[], Heartbeat | RelayedHeartbeats],
        relay: Relay | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._door = door
        self._calls = 0  # so far: each to the next address
        self._token = 0  # the highest of a leader that this node has heard of
        self._deliver = deliver
        self._finished = finished
        self._beat = beat
        self._relay = relay
        self._link: Link | None = None
        self.silence_s = -1.0  # of the scheduler, at most, as it said itself
        self.vacant = False  # the last call was answered: nobody listens there
        self._answered_at = self._loop.time()  # when the scheduler, or its host, last let this node hear anything
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.address = wish.host.address  # by which others reach this node: MS_WORKER_IP, else that of the link
        self._fixed_address = bool(wish.host.address)
        # The module's generator belongs to the program, which draws from it in the same process.
        self._machine = NodeMachine(wish, settings, jitter=random.Random().random, now=self._loop.time())
        self._do(Tick())

    @property
    def member(self) -> Register | RegisterAgent:
        """The registration as it stands: identity, and what the cluster gave."""
        return self._machine.registration

    def leave(self, code: int = 0, reason: str = "", error: ScriptError | None = None) -> None:
        """Say goodbye; `finished` follows."""
        self._do(LeaveRequested(code, reason, error))

    def say(self, message: Message) -> bool:
        """Send to the scheduler if it can be reached now."""
        if self._link is None:
            return False
        self._link.send(message)
        return True

    @property
    def linked(self) -> bool:
        """Whether the scheduler can be reached now."""
        return self._link is not None

    def unsent(self) -> int:
        """Bytes that wait for the scheduler to read."""
        return self._link.unsent() if self._link is not None else 0

    async def ask_unheard_s(self) -> float:
        """`unheard_s`, by whoever knows it."""
        return self.unheard_s()

    def unheard_s(self) -> float:
        """How long ago the scheduler's host was last known to hear this node. One that says nobody listens there counts: only a
        scheduler that lives can give this node's place away."""
        silent = self._loop.time() - self._answered_at
        return min(silent, self._link.unheard_s()) if self._link is not None else silent

    def descriptor(self) -> int:
        """The link's file descriptor, -1 if there is none: a forked child must close it."""
        return self._link.fileno() if self._link is not None else -1

    def _do(self, event: NodeEvent) -> None:
        for effect in self._machine.step(event, self._loop.time()):
            self._carry_out(effect)
        if self._timer is not None:
            self._timer.cancel()
        wait = min(max(self._machine.due_at - self._loop.time(), 0.0), TIMER_MAX_S)
        self._timer = self._loop.call_later(wait, self._do, Tick()) if self._machine.due_at < float("inf") else None

    def _carry_out(self, effect: NodeEffect) -> None:
        if isinstance(effect, Connect):
            self._connecting = self._loop.create_task(self._connect())
        elif isinstance(effect, Send):
            self.say(self._with_address(effect.message))
        elif isinstance(effect, SendHeartbeat):
            self.say(self._beat())
        elif isinstance(effect, Deliver):
            self._deliver(effect.message)
        elif isinstance(effect, PublishEvent):
            tell(effect)
        elif isinstance(effect, Close):
            self._hang_up()
        else:
            self._finished(effect)

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._lost("closed by this side")

    def _lost(self, reason: str) -> None:
        if self._relay is not None:
            self._relay.lost(reason)

    async def _connect(self) -> None:
        door = self._door
        host, port = door.addresses[self._calls % len(door.addresses)]
        try:
            await connect(
                host,
                port,
                door.secret,
                door.context,
                insist=door.insist,
                on_open=self._opened,
                on_message=self._heard,
                on_close=self._closed,
            )
        except PeerError as error:
            self.vacant = isinstance(error, NobodyListens)
            if self.vacant:
                self._answered_at = self._loop.time()
            self._calls += 1
            self._lost(str(error))
            self._do(ConnectionLost(str(error)))

    def _opened(self, link: Link) -> None:
        if link.token < self._token:
            return link.abort(f"it leads by token {link.token}, and another by {self._token} has been heard of")
        self._token, self.silence_s = link.token, link.silence_s
        self._link = link
        self.vacant = False
        if not self._fixed_address:
            self.address = link.local_address()
        self._do(Connected(self.silence_s))
        if self._relay is not None:
            self._relay.made(self)
        return None

    def _heard(self, link: Link, message: Any) -> None:
        if link is self._link:
            self._answered_at = self._loop.time()
            if self._relay is None or not self._relay.heard(message):
                self._do(MessageReceived(message))

    def _closed(self, link: Link, reason: str) -> None:
        if link.refused:
            self._do(SchedulerRefused(reason))
        elif link.turned_away:
            self._do(MessageReceived(Refused(reason)))
        elif link is self._link or self._link is None:
            self._link = None
            self._calls += 1
            self._lost(reason)
            self._do(ConnectionLost(reason))

    def _with_address(self, message: Message) -> Message:
        """Registrations carry the address by which the scheduler was reached, unless MS_WORKER_IP names one."""
        if isinstance(message, Register | RegisterAgent):
            host = msgspec.structs.replace(message.host, address=self.address)
            return msgspec.structs.replace(message, host=host)
        return message
