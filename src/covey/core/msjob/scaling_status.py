"""States of the resize of a running job, stored in `status.scaling`.

    NONE       no resize is in progress
    WAITING    since the time `since` a resize to `to` Worker pods is wanted; no action has been taken yet
    GROWING    scale-out from `from` Worker pods: the workers of the new pods have not all joined
    SHRINKING  scale-in: at the time `asked` the scheduler was last requested to release the workers of the last pods
    FAILED     the scale-out was rolled back, with the reason in `failed`; a different number starts a new resize

The fields that are present determine the state. Two more fields limit repetition and belong to no state: `said` is the time at
which the scheduler was last sent the number of additional workers, `told` is the last warning that a resize is unsupported.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from covey.core.msjob.timestamps import format_timestamp, parse_timestamp


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
    """Only writer of `status.scaling`. `fields` is that dictionary and is changed in place; `now` is in seconds since 1970."""

    def __init__(self, fields: dict[str, Any], now: float) -> None:
        self._fields = fields
        self._now = now

    @property
    def state(self) -> ScalingState:
        return next((state for field, state in STATE_BY_FIELD.items() if field in self._fields), ScalingState.NONE)

    @property
    def target(self) -> int | None:
        """Number of Worker pods in the spec when the resize or the last announcement began; None if there was neither."""
        target: int | None = self._fields.get("to")
        return target

    @property
    def previous(self) -> int:
        """Number of Worker pods before the scale-out. Raise `KeyError` in other states than GROWING."""
        return int(self._fields["from"])

    def read_time(self, field: str) -> float | None:
        return parse_timestamp(self._fields.get(field))

    def wait(self, target: int) -> None:
        self._enter(ScalingState.WAITING, to=target, since=format_timestamp(self._now))

    def grow(self, previous: int) -> None:
        self._enter(ScalingState.GROWING, **{"from": previous})

    def request_release(self) -> None:
        """Record the time of a request to release workers, the first or a repetition."""
        self._enter(ScalingState.SHRINKING, asked=format_timestamp(self._now))

    def fail(self, reason: str) -> None:
        self._enter(ScalingState.FAILED, failed=reason)
        del self._fields["from"]

    def reset(self) -> None:
        self._fields.clear()

    def announce(self, target: int | None) -> None:
        """Record that the scheduler is sent the number of additional workers at this time.

        `target` is the number of Worker pods in the spec; None: it has no such role.
        """
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
