from __future__ import annotations

import pytest

from covey.core.model import Host, Member, NodeState, Progress, Role
from covey.core.view import straggles, usual_step


def worker(busy_s: float, state: NodeState = NodeState.ALIVE) -> Member:
    return Member(Role.WORKER, "w", "life", Host("h", "h", "127.0.0.1"), state=state, progress=Progress(busy_s=busy_s))


def test_the_usual_step_is_the_median_of_those_who_live_and_have_said_it() -> None:
    assert usual_step([worker(0.1), worker(0.2), worker(0.9), worker(0.0), worker(5.0, NodeState.DEAD)]) == 0.2


def test_of_two_nobody_can_say_who_is_slow() -> None:
    assert usual_step([worker(0.1), worker(0.9)]) == 0.0
    assert straggles(0.9, 0.0) == 0.0


@pytest.mark.parametrize(
    ("busy_s", "usual_s", "times"),
    [
        (0.4, 0.1, 4.0),
        (0.15, 0.1, 0.0),  # not much slower
        (0.004, 0.001, 0.0),  # too little to notice
    ],
)
def test_a_straggler_takes_notably_longer_than_the_usual(busy_s: float, usual_s: float, times: float) -> None:
    assert straggles(busy_s, usual_s) == pytest.approx(times)
