"""State machine of a node: how a worker, parameter server, spare or agent joins its cluster, stays in it and leaves.

The node registers on every new connection. The registration of a member contains what it was assigned (for a worker: cluster,
incarnation, generation and rank), so that a restarted scheduler can re-attach it. A member that loses its connection tries to
reconnect, with exponential backoff, while the script continues.

    CONNECTING → REGISTERING → WAITING → MEMBER → LEAVING → ENDED
         ↑____________↓___________↓________↓  (connection lost)

A member that registers again skips WAITING. LEAVING and ENDED can follow every earlier stage.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from covey.core.effects import Close, Connect, Deliver, EndMembership, Level, NodeEffect, PublishEvent, Send, SendHeartbeat
from covey.core.events import Connected, ConnectionLost, LeaveRequested, MessageReceived, NodeEvent, SchedulerRefused, Tick
from covey.core.messages import (
    ClusterEnded,
    DesiredChildren,
    FromScheduler,
    LeaderHeartbeat,
    Leave,
    LeaveAcknowledged,
    NewGeneration,
    RankAssigned,
    Refused,
    Register,
    RegisterAgent,
    Registered,
)
from covey.core.types import Role
from covey.errors import ExitCode

FIRST_RETRY_S = 0.05  # longest wait before the first attempt to reconnect
MEMBER_RETRY_MAX_S = 0.5  # longest wait of a member between two attempts to reconnect
FORMATION_SLACK_S = 5.0  # extra wait for the scheduler's own message about a failed formation, which names the missing nodes
LEAVE_WAIT_S = 5.0  # longest wait for the acknowledgement of one `Leave`
NEVER = float("inf")


class NodeStage(StrEnum):
    CONNECTING = "connecting"  # no connection
    REGISTERING = "registering"  # connected; the registration has not been accepted yet
    WAITING = "waiting"  # registered; the cluster has not formed
    MEMBER = "member"
    LEAVING = "leaving"
    ENDED = "over"


class NodeSettings(msgspec.Struct, frozen=True):
    """The settings that a node uses. Times are in seconds; a negative timeout (topo, node): no limit."""

    address: str  # of the scheduler, for messages
    topo_timeout_s: float = 1800.0  # until a registration is accepted; then again until the cluster has formed
    node_timeout_s: float = 30.0  # of a member without a scheduler
    receive_timeout_s: float = 300.0  # for the reply to a registration or `Leave`; then the node reconnects
    retry_lower_s: float = 3.0  # shortest time between two heartbeats
    retry_upper_s: float = 5.0  # longest time between two heartbeats, connection attempts or deferred registrations
    recovery: bool = False  # the scheduler may be restarted or replaced: a member waits without a limit
    heartbeats_enabled: bool = True


class NodeMachine:
    """Membership of one node. The runtime calls `step` with each event and carries out the effects.

    `due_at` is the time by which the runtime must pass the next `Tick`. `jitter` returns numbers between 0 and 1.
    """

    def __init__(
        self, registration: Register | RegisterAgent, settings: NodeSettings, *, jitter: Callable[[], float], now: float
    ) -> None:
        self.stage = NodeStage.CONNECTING
        self.registration = registration
        self.due_at = now
        self._settings = settings
        self._jitter = jitter
        self._is_connected = False
        self._last_error = "no answer"
        self._retry_delay_s = FIRST_RETRY_S
        self._deadline = _deadline_after(now, settings.topo_timeout_s)
        self._reply_deadline = NEVER
        self._next_heartbeat_at = NEVER
        self._silence_limit_s = -1.0  # seconds without a message until another scheduler is tried; negative: no limit
        self._silence_deadline = NEVER
        self._connect_at = now
        self._was_member = False
        self._generation = 0
        self._leave_message: Leave | None = None
        self._pending_registered = Registered("")

    def step(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        """Handle one event; return the effects, in order. Return [] for every event after the end of the membership."""
        if self.stage is NodeStage.ENDED:
            return []
        if isinstance(event, Connected):
            out = self._on_connected(event.silence_s, now)
        elif isinstance(event, ConnectionLost) or (isinstance(event, SchedulerRefused) and self._was_member):
            out = self._on_connection_lost(event.reason, now)
        elif isinstance(event, SchedulerRefused):
            out = self._end_membership(
                self._leave_exit_code() if self.stage is NodeStage.LEAVING else ExitCode.REFUSED, event.reason
            )
        elif isinstance(event, MessageReceived):
            out = self._on_message(event.message, now)
        elif isinstance(event, LeaveRequested):
            out = self._on_leave_requested(Leave(event.code, event.reason, event.error), now)
        else:
            assert isinstance(event, Tick)
            out = self._on_tick(now)
        self.due_at = min(
            self._deadline, self._reply_deadline, self._next_heartbeat_at, self._silence_deadline, self._connect_at
        )
        return out

    # -- the connection ----------------------------------------------------------------------------------------------

    def _on_connected(self, silence_s: float, now: float) -> list[NodeEffect]:
        self._is_connected, self._silence_limit_s = True, silence_s
        self._silence_deadline = _deadline_after(now, self._silence_limit_s)
        if self.stage is not NodeStage.LEAVING:
            self.stage = NodeStage.REGISTERING
        return self._send_registration(now)

    def _send_registration(self, now: float) -> list[NodeEffect]:
        self._connect_at = NEVER
        self._reply_deadline = now + self._settings.receive_timeout_s
        return [Send(self.registration)]

    def _on_connection_lost(self, reason: str, now: float) -> list[NodeEffect]:
        is_new, self._last_error = reason != self._last_error, reason
        lost_now, self._is_connected = self._is_connected, False
        self._reply_deadline = self._next_heartbeat_at = self._silence_deadline = NEVER
        if self.stage is NodeStage.LEAVING and not self._must_deliver_leave:
            return self._end_membership(self._leave_exit_code(), f"left; the scheduler did not acknowledge it ({reason})")
        if lost_now:
            self._retry_delay_s = FIRST_RETRY_S
        if self._was_member and lost_now and self.stage is not NodeStage.LEAVING:
            limit = -1.0 if self._settings.recovery else self._settings.node_timeout_s
            self._deadline = _deadline_after(now, limit)
        if self.stage is not NodeStage.LEAVING:
            self.stage = NodeStage.CONNECTING
        ceiling = self._settings.retry_upper_s
        if self._was_member:
            ceiling = min(ceiling, MEMBER_RETRY_MAX_S)
        self._connect_at = now + self._retry_delay_s * (0.5 + self._jitter() / 2)
        self._retry_delay_s = min(self._retry_delay_s * 2, ceiling)
        where = self._settings.address
        if self._was_member:
            text = f"the scheduler at {where} is unreachable ({reason}); the script continues"
            return [PublishEvent("scheduler", "lost", text, Level.WARNING)] if lost_now else []
        text = f"no connection to the scheduler at {where} ({reason}); retrying"
        return [PublishEvent("scheduler", "not reached", text)] if is_new else []

    # -- messages ----------------------------------------------------------------------------------------------------

    def _on_message(self, message: FromScheduler, now: float) -> list[NodeEffect]:
        self._silence_deadline = _deadline_after(now, self._silence_limit_s)
        if isinstance(message, LeaderHeartbeat):
            return []
        if self.stage is NodeStage.LEAVING and isinstance(message, LeaveAcknowledged | ClusterEnded | Refused):
            return self._end_membership(self._leave_exit_code(), "left", message if isinstance(message, ClusterEnded) else None)
        if self.stage is not NodeStage.LEAVING:
            self._reply_deadline = NEVER
        if isinstance(message, Registered):
            return self._on_registered(message, now)
        if isinstance(message, RankAssigned | DesiredChildren | NewGeneration):
            return self._on_generation(message)
        if isinstance(message, Refused):
            return self._on_refused(message, now)
        if isinstance(message, ClusterEnded):
            return self._end_membership(message.code, message.reason, message)
        return [] if isinstance(message, LeaveAcknowledged) else [Deliver(message)]

    def _on_registered(self, registered: Registered, now: float) -> list[NodeEffect]:
        out: list[NodeEffect] = [Deliver(registered)]
        if isinstance(self.registration, Register):
            self.registration = msgspec.structs.replace(self.registration, node_id=registered.node_id)
        if self.stage is NodeStage.LEAVING:
            return [*out, *self._send_leave(now)]
        self.stage = NodeStage.MEMBER if self._was_member else NodeStage.WAITING
        self._retry_delay_s = FIRST_RETRY_S
        self._next_heartbeat_at = self._pick_heartbeat_time(now)
        if self._was_member:
            self._update_registration(cluster_id=registered.cluster_id, incarnation=registered.incarnation)
            self._deadline = NEVER
            out.append(PublishEvent("scheduler", "found again", f"re-attached to {self._settings.address}"))
            # a restarted scheduler decides about the next death by the progress of this node
            if self._settings.heartbeats_enabled:
                out.append(SendHeartbeat())
        else:
            self._pending_registered = registered
            self._deadline = _deadline_after(now, self._settings.topo_timeout_s, FORMATION_SLACK_S)
        return out

    def _on_generation(self, message: RankAssigned | DesiredChildren | NewGeneration) -> list[NodeEffect]:
        if message.generation < self._generation:
            return []
        self._generation = message.generation
        if isinstance(message, NewGeneration):
            self._update_registration(generation=message.generation)
            return [Deliver(message)]
        if self.stage is not NodeStage.LEAVING:
            self.stage = NodeStage.MEMBER
            self._deadline = NEVER
        if not self._was_member:
            self._was_member = True
            self._update_registration(
                cluster_id=self._pending_registered.cluster_id, incarnation=self._pending_registered.incarnation
            )
        if isinstance(message, RankAssigned):
            if message.node_id:  # a spare was promoted
                self._update_registration(role=Role.WORKER, node_id=message.node_id, incarnation=message.incarnation)
            self._update_registration(rank=message.rank, generation=message.generation)
        return [Deliver(message)]

    def _on_refused(self, refused: Refused, now: float) -> list[NodeEffect]:
        if refused.retry_after_s <= 0:
            return self._end_membership(
                ExitCode.REFUSED, f"the scheduler at {self._settings.address} refused: {refused.reason}"
            )
        is_new = refused.reason != self._last_error
        self._last_error = refused.reason
        self._connect_at = now + min(refused.retry_after_s, self._settings.retry_upper_s)
        return [PublishEvent("scheduler", "held off", refused.reason)] if is_new else []

    # -- time and leaving --------------------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[NodeEffect]:
        if now >= self._deadline:
            return self._end_overdue()
        if now >= self._reply_deadline:
            waited = f"no answer within {self._settings.receive_timeout_s:g} s (MS_RECEIVE_MSG_TIMEOUT)"
            return [Close(), *self._on_connection_lost(waited, now)]
        if now >= self._silence_deadline:
            return [
                Close(),
                *self._on_connection_lost(f"it sent nothing for {self._silence_limit_s:g} s (COVEY_LEASE_TIME)", now),
            ]
        if now >= self._connect_at:
            if self._is_connected:
                return self._send_registration(now)
            self._connect_at = NEVER
            return [Connect()]
        if now >= self._next_heartbeat_at:
            self._next_heartbeat_at = self._pick_heartbeat_time(now)
            return [SendHeartbeat()]
        return []

    def _on_leave_requested(self, leave: Leave, now: float) -> list[NodeEffect]:
        if self.stage is NodeStage.LEAVING:
            return []
        self._leave_message = leave
        before, self.stage = self.stage, NodeStage.LEAVING
        if not self._is_connected and not self._must_deliver_leave:
            return self._end_membership(leave.code, "left before it was a member")
        self._deadline = now + max(self._settings.node_timeout_s if self._must_deliver_leave else 0.0, LEAVE_WAIT_S)
        return self._send_leave(now) if self._is_connected and before is not NodeStage.REGISTERING else []

    def _send_leave(self, now: float) -> list[NodeEffect]:
        assert self._leave_message is not None
        self._reply_deadline = now + min(LEAVE_WAIT_S, self._settings.receive_timeout_s)
        return [Send(self._leave_message)]

    @property
    def _must_deliver_leave(self) -> bool:
        """Whether the node reconnects if necessary to deliver its `Leave`."""
        return self._was_member and self._settings.recovery

    def _end_overdue(self) -> list[NodeEffect]:
        where, s = self._settings.address, self._settings
        if self.stage is NodeStage.LEAVING:
            return self._end_membership(
                self._leave_exit_code(), f"left; the scheduler at {where} did not acknowledge it in time"
            )
        if self._was_member:
            reason = f"the scheduler at {where} did not come back within {s.node_timeout_s:g} s ({self._last_error})"
            return self._end_membership(ExitCode.SCHEDULER_LOST, reason)
        if self.stage is NodeStage.WAITING:
            reason = f"registered at {where}, but the cluster was not complete within {s.topo_timeout_s:g} s"
            return self._end_membership(ExitCode.NOT_FORMED, reason)
        reason = (
            f"no scheduler accepted this node at {where} within {s.topo_timeout_s:g} s ({self._last_error}):"
            " start the scheduler, or check MS_SCHED_HOST and MS_SCHED_PORT"
        )
        return self._end_membership(ExitCode.UNREACHABLE, reason)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _end_membership(self, code: int, reason: str, message: FromScheduler | None = None) -> list[NodeEffect]:
        self.stage = NodeStage.ENDED
        self._deadline = self._reply_deadline = self._next_heartbeat_at = self._silence_deadline = self._connect_at = NEVER
        return [EndMembership(code, reason, message), Close()]

    def _update_registration(self, **values: object) -> None:
        """Set fields of the next registration; ignore those that an agent's registration does not have."""
        known = {name: value for name, value in values.items() if hasattr(self.registration, name)}
        self.registration = msgspec.structs.replace(self.registration, **known)

    def _pick_heartbeat_time(self, now: float) -> float:
        if not self._settings.heartbeats_enabled:
            return NEVER
        lower, upper = self._settings.retry_lower_s, self._settings.retry_upper_s
        return now + lower + (upper - lower) * self._jitter()

    def _leave_exit_code(self) -> int:
        return self._leave_message.code if self._leave_message is not None else 0


def _deadline_after(now: float, limit_s: float, slack_s: float = 0.0) -> float:
    return now + limit_s + slack_s if limit_s >= 0 else NEVER
