"""What is answered to who asks for another size, or comes to a cluster that has formed."""

from __future__ import annotations

import pytest

from covey.core.cluster import recovery_strategy, resize_plan
from covey.core.cluster.admission import Admission, decide_agent_admission
from covey.core.cluster.state import ClusterState
from covey.core.messages import RegisterAgent, ScaleRequest
from covey.core.strategy_ladder import parse_strategies
from covey.core.types import AgentInfo, ClusterSettings, Host, Member, NodeState, Phase, Role

HERE, THERE = Host("a", "host-a", "10.0.0.1"), Host("b", "host-b", "10.0.0.2")


def formed(workers: int = 4, worker_max: int = 0) -> ClusterState:
    """Two hosts, the second half of the workers on the other one."""
    cluster = ClusterState("c", ClusterSettings(workers, worker_max=worker_max), phase=Phase.READY, trains=True, heals=True)
    for name, host, link in (("a", HERE, 1), ("b", THERE, 2)):
        cluster.agents[name] = AgentInfo(name, f"life of {name}", host, workers // 2, connection=link)
    for rank in range(workers):
        agent, host = ("a", HERE) if rank < workers // 2 else ("b", THERE)
        cluster.add(Member(Role.WORKER, str(rank), "", host, rank=rank, seat=rank, agent=agent, state=NodeState.ALIVE))
    return cluster


def comes(slots: int = 2, first_rank: int = -1, host: Host = THERE) -> RegisterAgent:
    return RegisterAgent("c", "life of c", host, slots, first_rank)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (ScaleRequest(0), "a world of 0 workers is not possible: 1 to 6 are"),
        (ScaleRequest(7), "a world of 7 workers is not possible: 1 to 6 are"),
        (ScaleRequest(more_workers=3), "a world of 7 workers is not possible: 1 to 6 are"),
        (ScaleRequest(4), "there are 4 workers already"),
        (ScaleRequest(node_ids=["9"]), "The node id:9 is illegal. The workers are 0, 1, 2, 3"),
        (ScaleRequest(node_ids=["pserver:0"]), "The node id:pserver:0 is illegal. The workers are 0, 1, 2, 3"),
        (ScaleRequest(node_ids=["0", "worker:1", "2", "3"]), "not all workers can go: covey stop ends a cluster"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(asked: ScaleRequest, sentence: str) -> None:
    assert resize_plan.plan_resize(formed(worker_max=6), asked) == (None, sentence)


def test_nothing_changes_while_the_cluster_heals_or_when_somebody_has_finished() -> None:
    healing = formed()
    healing.phase, healing.reason = Phase.HEALING, "worker:1 died"
    assert resize_plan.plan_resize(healing, ScaleRequest(5))[1] == "The cluster is not ready. It is healing: worker:1 died"
    leaving = formed()
    leaving.members[(Role.WORKER, "2")].state = NodeState.LEFT
    assert resize_plan.plan_resize(leaving, ScaleRequest(3)) == (None, "some workers have finished and left already")


def test_a_host_that_comes_late_is_taken_where_it_is_of_use() -> None:
    assert decide_agent_admission(formed(), comes()).admission is Admission.REFUSE
    assert decide_agent_admission(formed(worker_max=6), comes()).admission is Admission.ADMIT
    lost = formed()
    lost.members[(Role.WORKER, "3")].state = NodeState.DEAD
    assert decide_agent_admission(lost, comes()).admission is Admission.ADMIT
    away = formed()
    away.agents["b"].connection = 0
    assert decide_agent_admission(away, comes()).admission is Admission.DEFER


def test_the_world_grows_by_what_is_offered_up_to_its_goal() -> None:
    cluster = formed(worker_max=5)
    cluster.agents["c"] = AgentInfo("c", "life of c", THERE, 2, connection=3)
    plan, reason = resize_plan.plan_growth(cluster)
    assert plan is not None and plan.agents == ["c"]
    assert reason == "the world grows from 4 to 5 workers, as host-b came"
    cluster.asked = 4
    assert resize_plan.plan_growth(cluster)[0] is None


@pytest.mark.parametrize(("first_rank", "host", "taken"), [(2, HERE, "2"), (-1, THERE, "2"), (0, THERE, "0"), (-1, HERE, "0")])
def test_a_host_takes_back_the_very_ranks_it_had(first_rank: int, host: Host, taken: str) -> None:
    cluster = formed()
    for node_id in ("0", "2"):
        cluster.members[(Role.WORKER, node_id)].state = NodeState.DEAD
    cluster.agents = {"c": AgentInfo("c", "life of c", host, 1, first_rank, connection=3)}
    assert [(member.node_id, agent.id) for member, agent in recovery_strategy.replacement_hosts(cluster)] == [(taken, "c")]


@pytest.mark.parametrize("raw", [False, True])
def test_a_world_that_shrinks_at_once_waits_for_nobody(raw: bool) -> None:
    strategies = parse_strategies(("recover", "elastic-training"))
    for shrink_after_s, trains, after in (
        (30.0, True, recovery_strategy.RecoveryAction.WAIT),
        (0.0, True, recovery_strategy.RecoveryAction.SHRINK),
        (0.0, False, recovery_strategy.RecoveryAction.WAIT),  # no step is finished, so it cannot shrink
    ):
        cluster = formed()
        settings = ClusterSettings(4, recovery=True, strategies=strategies, extra_ranks=0, shrink_after_s=shrink_after_s)
        cluster.settings, cluster.trains = settings, trains
        del cluster.agents["b"]
        lost = cluster.members[(Role.WORKER, "3")]
        lost.agent, lost.state = "" if raw else "b", NodeState.DEAD
        assert recovery_strategy.choose_action(cluster, lost)[0] is after
