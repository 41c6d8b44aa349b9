"""Tests of a round's admissions and time windows, with literal times."""

from __future__ import annotations

import msgspec

from covey.core.federated.messages import RoundPlan
from covey.core.federated.round_window import RoundWindow, ThresholdReached, WindowMissed

PLAN = RoundPlan(threshold=4, ratio=0.5, start_window_s=10.0, update_window_s=2.0, iteration_window_s=60.0)


def window(opened_at: float = 100.0, devices: int = 0, **changed: object) -> RoundWindow:
    made = RoundWindow(msgspec.structs.replace(PLAN, **changed), opened_at)
    made.admit(f"d{n}" for n in range(devices))
    return made


def test_threshold_is_reached_with_needed_updates() -> None:
    assert window().decide_closing(1, 100.0) is None
    assert window().decide_closing(2, 100.0) == ThresholdReached("2 updates of 2 needed")
    assert window(ratio=0.25).decide_closing(1, 100.0) == ThresholdReached("1 update of 1 needed")


def test_update_window_starts_with_first_update_and_restarts_when_missed() -> None:
    made = window(update_min=0)
    missed = WindowMissed("1 of 2 updates arrived within 2 s")
    assert [made.decide_closing(1, now) for now in (101.0, 102.9, 103.0, 104.9, 105.0)] == [None, None, missed, None, missed]
    assert made.missed_count == 2
    assert window(0.0).decide_closing(0, 50.0) is None, "the window must not start without an update"


def test_update_min_closes_round_at_end_of_window() -> None:
    made = window(update_min=1)
    assert made.decide_closing(1, 100.0) is None
    assert (
        made.decide_closing(1, 102.0) == ThresholdReached("1 update at the end of the window, at least 1 required")
        and made.missed_count == 0
    )


def test_missed_window_admits_as_many_devices_as_updates_are_missing() -> None:
    made = window(devices=4)
    assert made.is_full and made.decide_closing(1, 100.0) is None
    assert isinstance(made.decide_closing(1, 102.0), WindowMissed) and not made.is_full
    made.admitted["another"] = None
    assert made.is_full, "one of two updates is missing"


def test_join_window_starts_with_first_device_and_ends_at_threshold() -> None:
    made = window(0.0)
    made.start_join_window(0.0)
    made.start_join_window(0.5)
    assert made.decide_closing(0, 9.9) is None
    assert made.decide_closing(0, 10.0) == WindowMissed("0 of 4 devices joined within 10 s")
    assert made.decide_closing(0, 19.9) is None, "the window must restart"
    assert isinstance(made.decide_closing(0, 20.0), WindowMissed)
    complete = window(0.0, devices=4)
    assert complete.decide_closing(0, 0.0) is complete.decide_closing(0, 10.0) is None


def test_iteration_window_starts_when_round_opens() -> None:
    made = window(devices=4)
    assert made.decide_closing(0, 159.9) is None
    assert made.decide_closing(0, 160.0) == WindowMissed("the iteration took longer than 60 s")
    made.admitted.update({"another": None, "and one more": None})
    assert made.is_full, "two of two updates are missing"
    assert made.decide_closing(0, 219.9) is None and isinstance(made.decide_closing(0, 220.0), WindowMissed)
    made = window(devices=4, update_window_s=1000.0)
    assert made.decide_closing(1, 100.0) is None and isinstance(made.decide_closing(1, 160.0), WindowMissed)
    made.admitted["another"] = None
    assert made.is_full, "one of two updates is missing"


def test_asynchronous_round_is_never_full() -> None:
    assert window(devices=4).is_full and not window(devices=40, staleness=1).is_full
