"""Admissions and time windows of one round: for devices to join, for updates, and for the whole round.

A window that ends with too few devices or updates is *missed*. The window restarts, and a full round then admits one further
device for each missing update.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from covey.core.federated.messages import RoundPlan
from covey.core.plurals import count_noun

UNLIMITED_DEVICES = 10**9  # capacity of an asynchronous round


class ThresholdReached(msgspec.Struct, frozen=True):
    """Verdict: enough updates are counted, so the round closes."""

    reason: str


class WindowMissed(msgspec.Struct, frozen=True):
    """Verdict: a window ended with too few devices or updates."""

    reason: str


class RoundWindow:
    """Admitted devices and time windows of one round. Times are in seconds of one clock."""

    def __init__(self, plan: RoundPlan, now: float) -> None:
        self.admitted: dict[str, None] = {}
        self.missed_count = 0
        # An asynchronous round admits all devices, because a late update is counted in the next round.
        self._capacity = UNLIMITED_DEVICES if plan.staleness else plan.threshold
        self._plan = plan
        self._opened_at = now
        self._first_join_at = -1.0  # start of the window for devices; negative: not started
        self._first_update_at = -1.0  # start of the window for updates; negative: not started

    @property
    def is_full(self) -> bool:
        return len(self.admitted) >= self._capacity

    def admit(self, devices: Iterable[str]) -> None:
        """Admit devices, regardless of capacity. Devices that are already admitted keep their position."""
        self.admitted.update(dict.fromkeys(devices))

    def start_join_window(self, now: float) -> None:
        """Start the window in which devices must join, unless it is running."""
        if self._first_join_at < 0:
            self._first_join_at = now

    def decide_closing(self, counted: int, now: float) -> ThresholdReached | WindowMissed | None:
        """Return whether the round closes with `counted` updates or has missed a window; None if neither.

        A missed window is counted and restarts.
        """
        found = self._decide_closing(counted, now)
        self.missed_count += isinstance(found, WindowMissed)
        return found

    def _decide_closing(self, counted: int, now: float) -> ThresholdReached | WindowMissed | None:
        plan, admitted = self._plan, len(self.admitted)
        if admitted:
            self.start_join_window(now)
        if counted and self._first_update_at < 0:
            self._first_update_at = now
        if counted >= plan.needed_updates:
            return ThresholdReached(f"{count_noun(counted, 'update')} of {plan.needed_updates} needed")
        if counted and now - self._first_update_at >= plan.update_window_s:
            if 0 < plan.update_min <= counted:
                return ThresholdReached(
                    f"{count_noun(counted, 'update')} at the end of the window, at least {plan.update_min} required"
                )
            self._first_update_at = now
            self._admit_more(plan.needed_updates - counted)
            return WindowMissed(f"{counted} of {plan.needed_updates} updates arrived within {plan.update_window_s:g} s")
        if admitted < plan.threshold and 0 <= self._first_join_at <= now - plan.start_window_s:
            self._first_join_at = now
            return WindowMissed(f"{admitted} of {plan.threshold} devices joined within {plan.start_window_s:g} s")
        if now - self._opened_at >= plan.iteration_window_s:
            self._opened_at = now
            self._admit_more(plan.needed_updates - counted)
            return WindowMissed(f"the iteration took longer than {plan.iteration_window_s:g} s")
        return None

    def _admit_more(self, devices: int) -> None:
        """Raise the capacity of a full round, so that it can admit this number of further devices."""
        if self.is_full:
            self._capacity = len(self.admitted) + devices
