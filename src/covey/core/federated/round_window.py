"""Who may take part in a round, and when it has waited long enough: its admissions and its clocks.

A window that ends with too little is *missed*: it begins again, the round keeps what it has, and as many further devices are
taken in as did not deliver.
"""

from __future__ import annotations

import msgspec

from covey.core.federated.messages import Plan
from covey.core.plurals import many

EVERYONE = 10**9


class Enough(msgspec.Struct, frozen=True):
    """The round may close."""

    reason: str


class Missed(msgspec.Struct, frozen=True):
    """A window ended too early; the round stays open."""

    reason: str


class Window:
    """Of one round."""

    def __init__(self, plan: Plan, now: float) -> None:
        self.admitted: dict[str, None] = {}
        self.missed = 0
        # An asynchronous round takes all: whoever is late counts in the next.
        self._room = EVERYONE if plan.staleness else plan.threshold
        self._plan = plan
        self._opened_at = now
        self._first_join_at = -1.0
        self._first_update_at = -1.0

    @property
    def full(self) -> bool:
        return len(self.admitted) >= self._room

    def asked(self, now: float) -> None:
        """A device would come: from the first of them on, the window for devices runs."""
        if self._first_join_at < 0:
            self._first_join_at = now

    def judge(self, counted: int, now: float) -> Enough | Missed | None:
        """What so many updates mean at this moment."""
        found = self._judge(counted, now)
        self.missed += isinstance(found, Missed)
        return found

    def _judge(self, counted: int, now: float) -> Enough | Missed | None:
        plan, came = self._plan, len(self.admitted)
        if came:
            self.asked(now)
        if counted and self._first_update_at < 0:
            self._first_update_at = now
        if counted >= plan.needed:
            return Enough(f"{many(counted, 'update')} of {plan.needed} needed")
        if counted and now - self._first_update_at >= plan.update_window_s:
            if 0 < plan.update_min <= counted:
                return Enough(f"{many(counted, 'update')} when the window ended, {plan.update_min} are enough")
            self._first_update_at = now
            self._take_more(plan.needed - counted)
            return Missed(f"{counted} of {plan.needed} updates came within {plan.update_window_s:g} s")
        if came < plan.threshold and 0 <= self._first_join_at <= now - plan.start_window_s:
            self._first_join_at = now
            return Missed(f"{came} of {plan.threshold} devices came within {plan.start_window_s:g} s")
        if now - self._opened_at >= plan.iteration_window_s:
            self._opened_at = now
            self._take_more(plan.needed - counted)
            return Missed(f"the iteration took longer than {plan.iteration_window_s:g} s")
        return None

    def _take_more(self, devices: int) -> None:
        if self.full:
            self._room = len(self.admitted) + devices
