"""A node's machine: how a worker or an agent joins its cluster, stays in it and leaves.

Theory of operation. A node keeps one link to its scheduler. It registers on every new link, at first with its wish, later
with what it holds (cluster, incarnation, generation, rank), so that a restarted scheduler finds its members as they were.
While it is a member a lost link stops nothing: the program goes on, and the node calls again, first after 50 ms, then less
and less often. Where there are standbys a scheduler lets itself be heard all the time: one that is silent is left for another.

    CONNECTING → REGISTERING → WAITING → MEMBER → LEAVING → OVER
         ↑____________↓___________↓________↓  (link lost)

`due` is when it wants the next `Ticked`; `step` is the only mutator. Jitter comes from the caller, a function that returns
numbers between 0 and 1, so that nothing here is random.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from covey.core.effects import Close, Connect, Deliver, Finish, Level, NodeEffect, Publish, Send, SendBeat
from covey.core.events import Heard, LeaveAsked, LinkLost, LinkMade, NodeEvent, SchedulerRefused, Ticked
from covey.core.messages import (
    Formed,
    FromScheduler,
    Goodbye,
    Leave,
    Pulse,
    Refused,
    Register,
    RegisterAgent,
    Regrouped,
    Start,
    Stop,
    Welcome,
)
from covey.core.types import Role
from covey.errors import ExitCode

FIRST_RETRY_S = 0.05
MEMBER_RETRY_MAX_S = 0.5  # a member calls a scheduler that went away at least this often, to find it soon after its return
VERDICT_SLACK_S = 5.0  # the scheduler's verdict on a formation names who is missing: wait this much longer for it
LEAVE_WAIT_S = 5.0
NEVER = float("inf")


class Stage(StrEnum):
    CONNECTING = "connecting"
    REGISTERING = "registering"
    WAITING = "waiting"
    MEMBER = "member"
    LEAVING = "leaving"
    OVER = "over"


class NodeSettings(msgspec.Struct, frozen=True):
    """What a node needs of the effective settings. Seconds; a negative limit never ends."""

    address: str  # of the scheduler, for sentences
    topo_timeout_s: float = 1800.0
    node_timeout_s: float = 30.0
    receive_timeout_s: float = 300.0
    retry_lower_s: float = 3.0
    retry_upper_s: float = 5.0
    recovery: bool = False
    beats: bool = True


class NodeMachine:
    """One node's membership. The shell calls `step` with what happened and carries out what comes back."""

    def __init__(
        self, wish: Register | RegisterAgent, settings: NodeSettings, *, jitter: Callable[[], float], now: float
    ) -> None:
        self.stage = Stage.CONNECTING
        self.wish = wish
        self.due = now
        self._settings = settings
        self._jitter = jitter
        self._linked = False
        self._trouble = "nothing answered"
        self._retry_s = FIRST_RETRY_S
        self._deadline = _after(now, settings.topo_timeout_s)
        self._answer_by = NEVER
        self._beat_at = NEVER
        self._silence_s = -1.0  # of the scheduler, after which another one is looked for: it said so itself
        self._silent_at = NEVER
        self._connect_at = now
        self._was_member = False
        self._generation = 0
        self._leave: Leave | None = None
        self._pending = Welcome("")

    def step(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        """Take one fact; return what is to be done about it, in order."""
        if self.stage is Stage.OVER:
            return []
        if isinstance(event, LinkMade):
            out = self._link_made(event.silence_s, now)
        elif isinstance(event, LinkLost) or (isinstance(event, SchedulerRefused) and self._was_member):
            out = self._link_lost(event.reason, now)
        elif isinstance(event, SchedulerRefused):
            out = self._finish(self._leave_code() if self.stage is Stage.LEAVING else ExitCode.REFUSED, event.reason)
        elif isinstance(event, Heard):
            out = self._heard(event.message, now)
        elif isinstance(event, LeaveAsked):
            out = self._leave_asked(Leave(event.code, event.reason, event.error), now)
        else:
            assert isinstance(event, Ticked)
            out = self._tick(now)
        self.due = min(self._deadline, self._answer_by, self._beat_at, self._silent_at, self._connect_at)
        return out

    # -- the link ----------------------------------------------------------------------------------------------------

    def _link_made(self, silence_s: float, now: float) -> list[NodeEffect]:
        self._linked, self._silence_s = True, silence_s
        self._silent_at = _after(now, self._silence_s)
        if self.stage is not Stage.LEAVING:
            self.stage = Stage.REGISTERING
        return self._register(now)

    def _register(self, now: float) -> list[NodeEffect]:
        self._connect_at = NEVER
        self._answer_by = now + self._settings.receive_timeout_s
        return [Send(self.wish)]

    def _link_lost(self, reason: str, now: float) -> list[NodeEffect]:
        news, self._trouble = reason != self._trouble, reason
        lost_now, self._linked = self._linked, False
        self._answer_by = self._beat_at = self._silent_at = NEVER
        if self.stage is Stage.LEAVING and not self._insists:
            return self._finish(self._leave_code(), f"left; the scheduler did not hear it ({reason})")
        if lost_now:
            self._retry_s = FIRST_RETRY_S
        if self._was_member and lost_now and self.stage is not Stage.LEAVING:
            limit = -1.0 if self._settings.recovery else self._settings.node_timeout_s
            self._deadline = _after(now, limit)
        if self.stage is not Stage.LEAVING:
            self.stage = Stage.CONNECTING
        ceiling = self._settings.retry_upper_s
        if self._was_member:
            ceiling = min(ceiling, MEMBER_RETRY_MAX_S)
        self._connect_at = now + self._retry_s * (0.5 + self._jitter() / 2)
        self._retry_s = min(self._retry_s * 2, ceiling)
        where = self._settings.address
        if self._was_member:
            said = f"the scheduler at {where} is out of reach ({reason}); the program goes on"
            return [Publish("scheduler", "lost", said, Level.WARNING)] if lost_now else []
        said = f"{where} does not let this node in ({reason}); it is tried again"
        return [Publish("scheduler", "not reached", said)] if news else []

    # -- messages ----------------------------------------------------------------------------------------------------

    def _heard(self, message: FromScheduler, now: float) -> list[NodeEffect]:
        self._silent_at = _after(now, self._silence_s)
        if isinstance(message, Pulse):
            return []
        if self.stage is Stage.LEAVING and isinstance(message, Goodbye | Stop | Refused):
            return self._finish(self._leave_code(), "left", message if isinstance(message, Stop) else None)
        if self.stage is not Stage.LEAVING:
            self._answer_by = NEVER
        if isinstance(message, Welcome):
            return self._welcomed(message, now)
        if isinstance(message, Formed | Start | Regrouped):
            return self._placed(message)
        if isinstance(message, Refused):
            return self._refused(message, now)
        if isinstance(message, Stop):
            return self._finish(message.code, message.reason, message)
        return [] if isinstance(message, Goodbye) else [Deliver(message)]

    def _welcomed(self, welcome: Welcome, now: float) -> list[NodeEffect]:
        out: list[NodeEffect] = [Deliver(welcome)]
        if isinstance(self.wish, Register):
            self.wish = msgspec.structs.replace(self.wish, node_id=welcome.node_id)
        if self.stage is Stage.LEAVING:
            return [*out, *self._say_leave(now)]
        self.stage = Stage.MEMBER if self._was_member else Stage.WAITING
        self._retry_s = FIRST_RETRY_S
        self._beat_at = self._next_beat(now)
        if self._was_member:
            self._hold(cluster_id=welcome.cluster_id, incarnation=welcome.incarnation)
            self._deadline = NEVER
            out.append(Publish("scheduler", "found again", f"re-attached to {self._settings.address}"))
            if self._settings.beats:  # by what this node does the next death is judged, and a new scheduler knows nothing of it
                out.append(SendBeat())
        else:
            self._pending = welcome
            self._deadline = _after(now, self._settings.topo_timeout_s, VERDICT_SLACK_S)
        return out

    def _placed(self, message: Formed | Start | Regrouped) -> list[NodeEffect]:
        """News of a generation. What is older than the news before it is no news."""
        if message.generation < self._generation:
            return []
        self._generation = message.generation
        if isinstance(message, Regrouped):
            self._hold(generation=message.generation)
            return [Deliver(message)]
        if self.stage is not Stage.LEAVING:
            self.stage = Stage.MEMBER
            self._deadline = NEVER
        if not self._was_member:
            self._was_member = True
            self._hold(cluster_id=self._pending.cluster_id, incarnation=self._pending.incarnation)
        if isinstance(message, Formed):
            if message.node_id:  # a spare is a worker from now on
                self._hold(role=Role.WORKER, node_id=message.node_id, incarnation=message.incarnation)
            self._hold(rank=message.rank, generation=message.generation)
        return [Deliver(message)]

    def _refused(self, refused: Refused, now: float) -> list[NodeEffect]:
        if refused.retry_after_s <= 0:
            return self._finish(ExitCode.REFUSED, f"the scheduler at {self._settings.address} refused: {refused.reason}")
        news = refused.reason != self._trouble
        self._trouble = refused.reason
        self._connect_at = now + min(refused.retry_after_s, self._settings.retry_upper_s)
        return [Publish("scheduler", "held off", refused.reason)] if news else []

    # -- time and leaving --------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[NodeEffect]:
        if now >= self._deadline:
            return self._give_up()
        if now >= self._answer_by:
            waited = f"no answer within {self._settings.receive_timeout_s:g} s (MS_RECEIVE_MSG_TIMEOUT)"
            return [Close(), *self._link_lost(waited, now)]
        if now >= self._silent_at:
            return [Close(), *self._link_lost(f"it said nothing for {self._silence_s:g} s (COVEY_LEASE_TIME)", now)]
        if now >= self._connect_at:
            if self._linked:
                return self._register(now)
            self._connect_at = NEVER
            return [Connect()]
        if now >= self._beat_at:
            self._beat_at = self._next_beat(now)
            return [SendBeat()]
        return []

    def _leave_asked(self, leave: Leave, now: float) -> list[NodeEffect]:
        if self.stage is Stage.LEAVING:
            return []
        self._leave = leave
        before, self.stage = self.stage, Stage.LEAVING
        if not self._linked and not self._insists:
            return self._finish(leave.code, "left before it was a member")
        self._deadline = now + max(self._settings.node_timeout_s if self._insists else 0.0, LEAVE_WAIT_S)
        return self._say_leave(now) if self._linked and before is not Stage.REGISTERING else []

    def _say_leave(self, now: float) -> list[NodeEffect]:
        assert self._leave is not None
        self._answer_by = now + min(LEAVE_WAIT_S, self._settings.receive_timeout_s)
        return [Send(self._leave)]

    @property
    def _insists(self) -> bool:
        """Whether a restarted scheduler should hear that this one finished, though it must be called for that."""
        return self._was_member and self._settings.recovery

    def _give_up(self) -> list[NodeEffect]:
        where, s = self._settings.address, self._settings
        if self.stage is Stage.LEAVING:
            return self._finish(self._leave_code(), f"left; the scheduler at {where} did not hear it in time")
        if self._was_member:
            reason = f"the scheduler at {where} did not come back within {s.node_timeout_s:g} s ({self._trouble})"
            return self._finish(ExitCode.SCHEDULER_LOST, reason)
        if self.stage is Stage.WAITING:
            reason = f"registered at {where}, but the cluster was not complete within {s.topo_timeout_s:g} s"
            return self._finish(ExitCode.NOT_FORMED, reason)
        reason = (
            f"no scheduler took this node at {where} within {s.topo_timeout_s:g} s ({self._trouble}):"
            " start it, or check MS_SCHED_HOST and MS_SCHED_PORT"
        )
        return self._finish(ExitCode.UNREACHABLE, reason)

    # -- small moves -------------------------------------------------------------------------------------------------

    def _finish(self, code: int, reason: str, message: FromScheduler | None = None) -> list[NodeEffect]:
        self.stage = Stage.OVER
        self._deadline = self._answer_by = self._beat_at = self._silent_at = self._connect_at = NEVER
        return [Finish(code, reason, message), Close()]

    def _hold(self, **held: object) -> None:
        """Remember what the next registration must say."""
        known = {name: value for name, value in held.items() if hasattr(self.wish, name)}
        self.wish = msgspec.structs.replace(self.wish, **known)

    def _next_beat(self, now: float) -> float:
        if not self._settings.beats:
            return NEVER
        lower, upper = self._settings.retry_lower_s, self._settings.retry_upper_s
        return now + lower + (upper - lower) * self._jitter()

    def _leave_code(self) -> int:
        return self._leave.code if self._leave is not None else 0


def _after(now: float, limit_s: float, slack_s: float = 0.0) -> float:
    return now + limit_s + slack_s if limit_s >= 0 else NEVER
