from __future__ import annotations

import pytest

from covey.core.cluster import Cluster
from covey.core.model import Agent, ClusterSettings, Host, Member, NodeState, Phase, Progress, Role
from covey.core.serving import Mode, parse_mode
from covey.core.view import NodeView, show, straggles, usual_step


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


@pytest.mark.parametrize(
    ("text", "mode"), [("sync", (Mode.SYNC, 0)), (" async ", (Mode.ASYNC, 0)), ("bounded:3", (Mode.BOUNDED, 3))]
)
def test_how_rows_are_served(text: str, mode: tuple[Mode, int]) -> None:
    assert parse_mode(text) == mode


@pytest.mark.parametrize("text", ["bounded", "bounded:-1", "sync:3", "bounded:", "never"])
def test_what_is_no_way_to_serve_rows(text: str) -> None:
    with pytest.raises(ValueError):
        parse_mode(text)


def test_what_is_shown_of_a_node_and_its_log() -> None:
    host = Host("h", "host", "127.0.0.1")
    cluster = Cluster("c", ClusterSettings(1), phase=Phase.READY, generation=1)
    cluster.agents["a"] = Agent("a", "life of a", host, 1, logs="logs/{rank}.log", beat_at=7.0)
    cluster.add(Member(Role.WORKER, "0", "", host, rank=0, agent="a", state=NodeState.ALIVE, pid=42))
    cluster.add(Member(Role.SPARE, "s", "life", host, rank=0, agent="a", state=NodeState.ALIVE, beat_at=9.0))
    scheduler = NodeView(Role.SCHEDULER, "0", 0, "host", "127.0.0.1", "alive", True)
    seen = show(cluster, scheduler=scheduler, started_at=1.0, wall=2.0, now=10.0)
    assert [(node.role, node.log, node.beat_age_s) for node in seen.nodes[1:]] == [
        (Role.SPARE, "", 1.0),
        (Role.WORKER, "logs/0.log", 3.0),
    ]
