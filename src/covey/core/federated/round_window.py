"""Who may take part in a round, and when it has waited long enough: its admissions and its clocks.

A window that ends with too little is *missed*: it begins again, the round keeps what it has, and as many further devices are
taken in as did not deliver.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from covey.core.federated.messages import RoundPlan
from covey.core.plurals import count_noun

UNLIMITED_DEVICES = 10**9


class ThresholdReached(msgspec.Struct, frozen=True):
    """The round may close."""

    reason: str


class WindowMissed(msgspec.Struct, frozen=True):
    """A window ended too early; the round stays open."""

    reason: str


class RoundWindow:
    """Of one round."""

    def __init__(self, plan: RoundPlan, now: float) -> None:
        self.admitted: dict[str, None] = {}
        self.missed_count = 0
        # An asynchronous round takes all: whoever is late counts in the next.
        self._capacity = UNLIMITED_DEVICES if plan.staleness else plan.threshold
        self._plan = plan
        self._opened_at = now
        self._first_join_at = -1.0
        self._first_update_at = -1.0

    @property
    def is_full(self) -> bool:
        return len(self.admitted) >= self._capacity

    def admit(self, devices: Iterable[str]) -> None:
        """Add devices; those that are admitted already keep their place."""
        self.admitted.update(dict.fromkeys(devices))

    def start_join_window(self, now: float) -> None:
        """A device would come: from the first of them on, the window for devices runs."""
        if self._first_join_at < 0:
            self._first_join_at = now

    def decide_closing(self, counted: int, now: float) -> ThresholdReached | WindowMissed | None:
        """What so many updates mean at this moment."""
        found = self._decide_closing(counted, now)
        self.missed_count += isinstance(found, WindowMissed)
        return found

    def _decide_closing(self, counted: int, now: float) -> ThresholdReached | WindowMissed | None:
        plan, came = self._plan, len(self.admitted)
        if came:
            self.start_join_window(now)
        if counted and self._first_update_at < 0:
            self._first_update_at = now
        if counted >= plan.needed_updates:
            return ThresholdReached(f"{count_noun(counted, 'update')} of {plan.needed_updates} needed")
        if counted and now - self._first_update_at >= plan.update_window_s:
            if 0 < plan.update_min <= counted:
                return ThresholdReached(f"{count_noun(counted, 'update')} when the window ended, {plan.update_min} are enough")
            self._first_update_at = now
            self._admit_more(plan.needed_updates - counted)
            return WindowMissed(f"{counted} of {plan.needed_updates} updates came within {plan.update_window_s:g} s")
        if came < plan.threshold and 0 <= self._first_join_at <= now - plan.start_window_s:
            self._first_join_at = now
            return WindowMissed(f"{came} of {plan.threshold} devices came within {plan.start_window_s:g} s")
        if now - self._opened_at >= plan.iteration_window_s:
            self._opened_at = now
            self._admit_more(plan.needed_updates - counted)
            return WindowMissed(f"the iteration took longer than {plan.iteration_window_s:g} s")
        return None

    def _admit_more(self, devices: int) -> None:
        if self.is_full:
            self._capacity = len(self.admitted) + devices
