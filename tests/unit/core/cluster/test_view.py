from __future__ import annotations

import pytest
from tests.unit.core.cluster.editable_cluster import EditableCluster

from covey.core.cluster.incident_log import IncidentLog
from covey.core.cluster.view import (
    RECOVERIES_SHOWN_MAX,
    ClusterView,
    NodeView,
    make_cluster_view,
    median_step_s,
    straggler_ratio,
)
from covey.core.incidents import Outcome
from covey.core.parameter_server.settings import ConsistencyMode, parse_mode
from covey.core.types import AgentInfo, ClusterSettings, Host, Member, NodeState, Phase, Progress, Role

SCHEDULER = NodeView(Role.SCHEDULER, "0", 0, "host", "127.0.0.1", "alive", True)


def test_median_step_is_over_reported_values() -> None:
    assert median_step_s([0.1, 0.2, 0.9, 0.0]) == 0.2


def test_median_step_is_over_present_workers() -> None:
    cluster = EditableCluster(ClusterSettings(4), phase=Phase.READY, generation=1)
    for rank, busy_s in enumerate((0.1, 0.1, 0.4, 0.1)):
        state = NodeState.DEAD if rank == 3 else NodeState.ALIVE
        member = Member(Role.WORKER, str(rank), "life", Host("h", "h", "h"), rank=rank, state=state)
        cluster.add(member, progress=Progress(busy_s=busy_s))
    seen = make_cluster_view(cluster, scheduler=SCHEDULER, started_at=1.0, wall=2.0, now=10.0).nodes[1:]
    assert [node.straggles for node in seen] == [0.0, 0.0, pytest.approx(4.0), 0.0]
    cluster.change(cluster.worker("0"), state=NodeState.DEAD)
    seen = make_cluster_view(cluster, scheduler=SCHEDULER, started_at=1.0, wall=2.0, now=10.0).nodes[1:]
    assert [node.straggles for node in seen] == [0.0] * 4, "two workers are too few to find a straggler"


def test_no_straggler_among_two_workers() -> None:
    assert median_step_s([0.1, 0.9]) == 0.0
    assert straggler_ratio(0.9, 0.0) == 0.0


@pytest.mark.parametrize(
    ("busy_s", "usual_s", "times"),
    [
        (0.4, 0.1, 4.0),
        (0.15, 0.1, 0.0),  # not much slower
        (0.004, 0.001, 0.0),  # too little to notice
    ],
)
def test_straggler_exceeds_ratio_and_margin(busy_s: float, usual_s: float, times: float) -> None:
    assert straggler_ratio(busy_s, usual_s) == pytest.approx(times)


@pytest.mark.parametrize(
    ("text", "mode"),
    [("sync", (ConsistencyMode.SYNC, 0)), (" async ", (ConsistencyMode.ASYNC, 0)), ("bounded:3", (ConsistencyMode.BOUNDED, 3))],
)
def test_how_rows_are_served(text: str, mode: tuple[ConsistencyMode, int]) -> None:
    assert parse_mode(text) == mode


@pytest.mark.parametrize("text", ["bounded", "bounded:-1", "sync:3", "bounded:", "never"])
def test_invalid_serving_settings_are_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_mode(text)


def test_node_view_has_node_and_log_path() -> None:
    host = Host("h", "host", "127.0.0.1")
    cluster = EditableCluster(ClusterSettings(1), phase=Phase.READY, generation=1)
    cluster.add_agent(AgentInfo("a", "life of a", host, 1, logs="logs/{rank}.log"), last_heartbeat_at=7.0)
    cluster.add(Member(Role.WORKER, "0", "", host, rank=0, agent="a", state=NodeState.ALIVE, pid=42))
    cluster.add(Member(Role.SPARE, "s", "life", host, rank=0, agent="a", state=NodeState.ALIVE), last_heartbeat_at=9.0)
    seen = make_cluster_view(cluster, scheduler=SCHEDULER, started_at=1.0, wall=2.0, now=10.0)
    assert [(node.role, node.log, node.beat_age_s) for node in seen.nodes[1:]] == [
        (Role.SPARE, "", 1.0),
        (Role.WORKER, "logs/0.log", 3.0),
    ]


def test_node_view_has_all_fields() -> None:
    box = Host("id", "box", "10.0.0.1", life="uid")
    cluster = EditableCluster(ClusterSettings(3), phase=Phase.READY, generation=1)
    cluster.add_agent(AgentInfo("a", "life of a", box, 3, logs="logs/{rank}.log"))
    for rank, busy_s in enumerate((0.1, 0.1, 0.4)):
        progress = Progress(7, "backward", busy_s=busy_s, loss=0.5)
        member = Member(Role.WORKER, str(rank), "life", box, 3, rank, agent="a", restarts=2, pid=42)
        member = cluster.add(member, progress=progress, last_heartbeat_at=8.0)
        cluster.change(member, state=NodeState.ALIVE)
    seen = make_cluster_view(cluster, scheduler=SCHEDULER, started_at=1.0, wall=2.0, now=10.0)
    assert seen.nodes[0] == SCHEDULER and seen.nodes[3] == NodeView(
        role=Role.WORKER,
        node_id="2",
        rank=2,
        host="box",
        address="10.0.0.1",
        state="alive",
        alive=True,
        step=7,
        phase="backward",
        beat_age_s=2.0,
        restarts=2,
        incarnation=3,
        pid=42,
        agent="a",
        log="logs/2.log",
        busy_s=0.4,
        straggles=4.0,
        loss=0.5,
        host_id="id",
        host_life="uid",
    )
    assert seen.nodes[3].name == "worker:2" and [node.straggles for node in seen.nodes[1:3]] == [0.0, 0.0]


def test_cluster_view_has_all_fields() -> None:
    settings = ClusterSettings(2, 3, job="named", worker_max=4)
    cluster = EditableCluster(settings, reason="all are here", generation=5, restarts=2, heals=True, trains=True)
    incidents = IncidentLog(0.0)
    for number in range(RECOVERIES_SHOWN_MAX + 1):
        incidents.open(cluster.step(1.0), "recover", "", f"death {number}", node="n")
        incidents.close(cluster.step(2.0), Outcome.RESUMED)
    cluster.set(phase=Phase.READY)
    seen = make_cluster_view(
        cluster, scheduler=SCHEDULER, started_at=1.0, wall=2.0, now=10.0, incidents=incidents, log_dir="logs"
    )
    assert (
        seen
        == ClusterView(
            cluster_id="c",
            phase=Phase.READY,
            reason="all are here",
            generation=5,
            worker_num=2,
            server_num=0,  # present servers
            started_at=1.0,
            now=2.0,
            nodes=[SCHEDULER],
            restarts=2,
            log_dir="logs",
            recoveries=incidents.records[1:],
            recovery_totals=list(incidents.totals.values()),
            resizable=True,
            goal=4,
            heals=True,
            job="named",
            trains=True,
        )
    )
    cluster.set(generation=0, trains=False)
    early = make_cluster_view(cluster, scheduler=SCHEDULER, started_at=1.0, wall=2.0, now=10.0)
    assert early.server_num == 3, "before formation, the required number"
    assert not early.resizable and early.recoveries == []


def test_nodes_are_sorted_by_role_and_rank_and_have_no_age_without_heartbeat() -> None:
    cluster = EditableCluster(ClusterSettings(2))
    for name, rank in (("b", -1), ("a", -1), ("z", 0)):
        cluster.add(
            Member(Role.WORKER, name, "life", Host("h", "h", "h"), rank=rank), last_heartbeat_at=0.0 if name == "a" else 11.0
        )
    cluster.add(Member(Role.WORKER, "child", "", Host("h", "h", "h"), rank=1, agent="gone"))
    seen = make_cluster_view(cluster, scheduler=SCHEDULER, started_at=1.0, wall=2.0, now=10.0).nodes[1:]
    assert [node.node_id for node in seen] == ["a", "b", "z", "child"]
    assert [node.beat_age_s for node in seen] == [-1.0, 0.0, 0.0, -1.0]
    assert [node.log for node in seen] == [""] * 4


def test_rank_at_threshold_is_not_a_straggler() -> None:
    assert straggler_ratio(1.5, 1.0) == 0.0 and straggler_ratio(0.010, 0.005) == 0.0
    assert median_step_s([1.0, 2.0, 3.0]) == 2.0
