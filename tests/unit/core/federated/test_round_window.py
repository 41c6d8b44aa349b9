"""A round's admissions and clocks, with literal times: what so many updates mean at which moment."""

from __future__ import annotations

import msgspec

from covey.core.federated.messages import Plan
from covey.core.federated.round_window import Enough, Missed, Window

PLAN = Plan(threshold=4, ratio=0.5, start_window_s=10.0, update_window_s=2.0, iteration_window_s=60.0)


def window(opened_at: float = 100.0, devices: int = 0, **changed: object) -> Window:
    made = Window(msgspec.structs.replace(PLAN, **changed), opened_at)
    made.admitted.update(dict.fromkeys(f"d{n}" for n in range(devices)))
    return made


def test_a_round_is_over_with_as_many_updates_as_are_needed() -> None:
    assert window().judge(1, 100.0) is None
    assert window().judge(2, 100.0) == Enough("2 updates of 2 needed")
    assert window(ratio=0.25).judge(1, 100.0) == Enough("1 update of 1 needed")


def test_the_window_for_updates_runs_from_the_first_and_begins_anew_when_it_is_missed() -> None:
    made = window(update_min=0)
    said = Missed("1 of 2 updates came within 2 s")
    assert [made.judge(1, now) for now in (101.0, 102.9, 103.0, 104.9, 105.0)] == [None, None, said, None, said]
    assert made.missed == 2
    assert window(0.0).judge(0, 50.0) is None, "without an update it does not run"


def test_at_the_end_of_that_window_fewer_are_enough_where_that_was_said() -> None:
    made = window(update_min=1)
    assert made.judge(1, 100.0) is None
    assert made.judge(1, 102.0) == Enough("1 update when the window ended, 1 are enough") and made.missed == 0


def test_as_many_further_devices_are_taken_as_did_not_deliver() -> None:
    made = window(devices=4)
    assert made.full and made.judge(1, 100.0) is None
    assert isinstance(made.judge(1, 102.0), Missed) and not made.full
    made.admitted["another"] = None
    assert made.full, "two were needed, and one had come"


def test_the_window_for_devices_runs_from_the_first_that_asked_and_until_all_have_come() -> None:
    made = window(0.0)
    made.asked(0.0)
    made.asked(0.5)
    assert made.judge(0, 9.9) is None
    assert made.judge(0, 10.0) == Missed("0 of 4 devices came within 10 s")
    assert made.judge(0, 19.9) is None, "from then on it runs again"
    assert isinstance(made.judge(0, 20.0), Missed)
    complete = window(0.0, devices=4)
    assert complete.judge(0, 0.0) is complete.judge(0, 10.0) is None


def test_an_iteration_has_its_own_limit_from_when_it_was_opened() -> None:
    made = window(devices=4)
    assert made.judge(0, 159.9) is None
    assert made.judge(0, 160.0) == Missed("the iteration took longer than 60 s")
    made.admitted.update({"another": None, "and one more": None})
    assert made.full, "none of two had come"
    assert made.judge(0, 219.9) is None and isinstance(made.judge(0, 220.0), Missed)
    made = window(devices=4, update_window_s=1000.0)
    assert made.judge(1, 100.0) is None and isinstance(made.judge(1, 160.0), Missed)
    made.admitted["another"] = None
    assert made.full, "one of two had come"


def test_an_asynchronous_round_takes_everyone() -> None:
    assert window(devices=4).full and not window(devices=40, staleness=1).full
