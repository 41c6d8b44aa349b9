"""A round's admissions and clocks, with literal times: what so many updates mean at which moment."""

from __future__ import annotations

import msgspec

from covey.core.federated.messages import RoundPlan
from covey.core.federated.round_window import RoundWindow, ThresholdReached, WindowMissed

PLAN = RoundPlan(threshold=4, ratio=0.5, start_window_s=10.0, update_window_s=2.0, iteration_window_s=60.0)


def window(opened_at: float = 100.0, devices: int = 0, **changed: object) -> RoundWindow:
    made = RoundWindow(msgspec.structs.replace(PLAN, **changed), opened_at)
    made.admit(f"d{n}" for n in range(devices))
    return made


def test_a_round_is_over_with_as_many_updates_as_are_needed() -> None:
    assert window().decide_closing(1, 100.0) is None
    assert window().decide_closing(2, 100.0) == ThresholdReached("2 updates of 2 needed")
    assert window(ratio=0.25).decide_closing(1, 100.0) == ThresholdReached("1 update of 1 needed")


def test_the_window_for_updates_runs_from_the_first_and_begins_anew_when_it_is_missed() -> None:
    made = window(update_min=0)
    said = WindowMissed("1 of 2 updates arrived within 2 s")
    assert [made.decide_closing(1, now) for now in (101.0, 102.9, 103.0, 104.9, 105.0)] == [None, None, said, None, said]
    assert made.missed_count == 2
    assert window(0.0).decide_closing(0, 50.0) is None, "without an update it does not run"


def test_at_the_end_of_that_window_fewer_are_enough_where_that_was_said() -> None:
    made = window(update_min=1)
    assert made.decide_closing(1, 100.0) is None
    assert (
        made.decide_closing(1, 102.0) == ThresholdReached("1 update at the end of the window, at least 1 required")
        and made.missed_count == 0
    )


def test_as_many_further_devices_are_taken_as_did_not_deliver() -> None:
    made = window(devices=4)
    assert made.is_full and made.decide_closing(1, 100.0) is None
    assert isinstance(made.decide_closing(1, 102.0), WindowMissed) and not made.is_full
    made.admitted["another"] = None
    assert made.is_full, "two were needed, and one had come"


def test_the_window_for_devices_runs_from_the_first_that_asked_and_until_all_have_come() -> None:
    made = window(0.0)
    made.start_join_window(0.0)
    made.start_join_window(0.5)
    assert made.decide_closing(0, 9.9) is None
    assert made.decide_closing(0, 10.0) == WindowMissed("0 of 4 devices joined within 10 s")
    assert made.decide_closing(0, 19.9) is None, "from then on it runs again"
    assert isinstance(made.decide_closing(0, 20.0), WindowMissed)
    complete = window(0.0, devices=4)
    assert complete.decide_closing(0, 0.0) is complete.decide_closing(0, 10.0) is None


def test_an_iteration_has_its_own_limit_from_when_it_was_opened() -> None:
    made = window(devices=4)
    assert made.decide_closing(0, 159.9) is None
    assert made.decide_closing(0, 160.0) == WindowMissed("the iteration took longer than 60 s")
    made.admitted.update({"another": None, "and one more": None})
    assert made.is_full, "none of two had come"
    assert made.decide_closing(0, 219.9) is None and isinstance(made.decide_closing(0, 220.0), WindowMissed)
    made = window(devices=4, update_window_s=1000.0)
    assert made.decide_closing(1, 100.0) is None and isinstance(made.decide_closing(1, 160.0), WindowMissed)
    made.admitted["another"] = None
    assert made.is_full, "one of two had come"


def test_an_asynchronous_round_takes_everyone() -> None:
    assert window(devices=4).is_full and not window(devices=40, staleness=1).is_full
