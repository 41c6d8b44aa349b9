"""The resize of a running job, as its `status.scaling` records it.

    NONE       no resize is under way
    WAITING    the spec asks for `to` Worker pods `since` a time, and nothing has been done about it yet
    GROWING    there were `from` Worker pods; the workers of the new ones have not all joined
    SHRINKING  the job's scheduler was `asked`, at that time, to release the workers of the pods that leave
    FAILED     the growth was rolled back, for the reason in `failed`; a different number starts a new resize

Which of these fields are present determines the state. Two more fields limit repetition and belong to no state: `said` is when
the scheduler was last sent the number of additional workers, `told` is the last warning that a resize is unsupported.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from covey.core.jobs.timestamps import format_timestamp, parse_timestamp


class ScalingState(StrEnum):
    NONE = "none"
    WAITING = "waiting"
    GROWING = "growing"
    SHRINKING = "shrinking"
    FAILED = "failed"


STATE_BY_FIELD = {  # the first field that is present determines the state
    "failed": ScalingState.FAILED,
    "from": ScalingState.GROWING,
    "asked": ScalingState.SHRINKING,
    "since": ScalingState.WAITING,
}
TRANSITIONS = {  # besides `reset`, which leads from every state to NONE
    ScalingState.NONE: {ScalingState.WAITING},
    ScalingState.WAITING: {ScalingState.GROWING, ScalingState.SHRINKING},
    ScalingState.GROWING: {ScalingState.FAILED},
    ScalingState.SHRINKING: {ScalingState.SHRINKING},  # the request is repeated
    ScalingState.FAILED: set[ScalingState](),
}


class Scaling:
    """The owner of `status.scaling`. `fields` is the dictionary in the status that is written."""

    def __init__(self, fields: dict[str, Any], now: float) -> None:
        self._fields = fields
        self._now = now

    @property
    def state(self) -> ScalingState:
        return next((state for field, state in STATE_BY_FIELD.items() if field in self._fields), ScalingState.NONE)

    @property
    def target(self) -> int | None:
        """Number of Worker pods that the resize leads to; None if no resize was begun."""
        target: int | None = self._fields.get("to")
        return target

    @property
    def previous(self) -> int:
        """Number of Worker pods before the growth; only in GROWING."""
        return int(self._fields["from"])

    def read_time(self, field: str) -> float | None:
        return parse_timestamp(self._fields.get(field))

    def wait(self, target: int) -> None:
        self._enter(ScalingState.WAITING, to=target, since=format_timestamp(self._now))

    def grow(self, previous: int) -> None:
        self._enter(ScalingState.GROWING, **{"from": previous})

    def request_release(self) -> None:
        """Record that the scheduler is now asked to release workers, for the first time or again."""
        self._enter(ScalingState.SHRINKING, asked=format_timestamp(self._now))

    def fail(self, reason: str) -> None:
        self._enter(ScalingState.FAILED, failed=reason)
        del self._fields["from"]

    def reset(self) -> None:
        self._fields.clear()

    def announce(self, target: int | None) -> None:
        """Record that the scheduler is now sent the number of additional workers."""
        self._fields |= {"to": target, "said": format_timestamp(self._now)}

    def end_announcement(self) -> None:
        self._fields.pop("said", None)

    def warn_unsupported(self, message: str) -> bool:
        """Record a warning that the resize is unsupported. Return whether it differs from the last one."""
        is_new = self._fields.get("told") != message
        self._fields["told"] = message
        return is_new

    def _enter(self, state: ScalingState, **fields: Any) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self._fields |= fields
