"""The ladder, rung by rung, from literal clusters: what follows a death, and why not the rung above."""

from __future__ import annotations

from typing import Any

import pytest

from covey.core.cluster import recovery_strategy, resharding, resize_plan
from covey.core.cluster.recovery_strategy import RecoveryAction
from covey.core.cluster.resize_plan import ResizePlan
from covey.core.cluster.state import ClusterState
from covey.core.messages import ScaleRequest
from covey.core.strategy_ladder import RecoveryStrategy
from covey.core.types import AgentInfo, ClusterSettings, Host, Member, NodeState, Phase, Role
from covey.errors import ExitCode

HERE, THERE = Host("a", "host-a", "10.0.0.1"), Host("b", "host-b", "10.0.0.2")
ALL = (
    RecoveryStrategy.RETRY,
    RecoveryStrategy.IN_PLACE,
    RecoveryStrategy.RECOVER,
    RecoveryStrategy.ELASTIC,
    RecoveryStrategy.DUMP,
    RecoveryStrategy.EXIT,
)


def cluster(*rungs: RecoveryStrategy, servers: int = 0, **settings: Any) -> ClusterState:
    """Two hosts with two workers each, all in a training; servers on the first."""
    made = ClusterState("c", ClusterSettings(4, servers, strategies=rungs, **settings), phase=Phase.READY, generation=1)
    made.trains = made.heals = made.copied = True
    for name, host, link in (("a", HERE, 1), ("b", THERE, 2)):
        made.agents[name] = AgentInfo(name, f"life of {name}", host, 2, connection=link, servers=servers if name == "a" else 0)
    for rank in range(4):
        agent, host = ("a", HERE) if rank < 2 else ("b", THERE)
        made.add(Member(Role.WORKER, str(rank), f"life of {rank}", host, rank=rank, agent=agent, state=NodeState.ALIVE, pid=1))
    for rank in range(servers):
        made.add(Member(Role.PSERVER, str(rank), f"life of s{rank}", HERE, rank=rank, agent="a", state=NodeState.ALIVE))
    return made


def dies(made: ClusterState, role: Role = Role.WORKER, rank: int = 3) -> Member:
    member = made.members[(role, str(rank))]
    member.state = NodeState.DEAD
    return member


@pytest.mark.parametrize(
    ("rungs", "changed", "after", "reason"),
    [
        (ALL, {}, RecoveryAction.REPLACE, "worker:3 is started again on host-b; the others stay in their step"),
        (
            ALL[2:],
            {"extra_ranks": 1},
            RecoveryAction.MOVE,
            "worker:3 is started again on host-a; the others stay in their step",
        ),
        (
            ALL[2:3],
            {"extra_ranks": 0},
            RecoveryAction.END,
            "no host is left that could take worker:3 over (COVEY_EXTRA_RANKS is 0)",
        ),
        (ALL[1:2], {"replacements_max": 0}, RecoveryAction.END, "0 replacements on host-b are used up (--max-restarts)"),
        (
            ALL[3:4],
            {"extra_ranks": 0},
            RecoveryAction.SHRINK,
            "nothing is to be started again (COVEY_STRATEGY): the others go on in a world of 3",
        ),
        ((), {"max_restarts": 2}, RecoveryAction.RESTART_ALL, "restart 1 of 2: all workers start anew"),
        ((), {}, RecoveryAction.END, "no restarts were asked for (--max-restarts)"),
    ],
)
def test_each_rung_is_taken_where_those_above_cannot_be(
    rungs: tuple[RecoveryStrategy, ...], changed: dict[str, Any], after: RecoveryAction, reason: str
) -> None:
    made = cluster(*rungs, **changed)
    assert recovery_strategy.choose_action(made, dies(made), 137) == (after, reason)


@pytest.mark.parametrize("code", [ExitCode.BAD_SETTING, ExitCode.BAD_SCRIPT])
def test_a_mistake_is_not_repeated(code: int) -> None:
    made = cluster(*ALL)
    reason = f"worker:3 ended with code {code:d}: another start does not mend that"
    assert recovery_strategy.choose_action(made, dies(made), code) == (RecoveryAction.END, reason)


def test_restarts_end_and_need_every_host() -> None:
    made = cluster(max_restarts=2)
    made.restarts = 2
    assert recovery_strategy.choose_action(made, dies(made)) == (RecoveryAction.END, "no restart is left")
    made.restarts = 1
    assert recovery_strategy.choose_action(made, dies(made))[0] is RecoveryAction.RESTART_ALL
    made.agents["a"].max_restarts = 1
    assert recovery_strategy.choose_action(made, dies(made))[0] is RecoveryAction.END, "a host may have said less"
    lost = cluster(max_restarts=2)
    del lost.agents["b"]
    assert recovery_strategy.choose_action(lost, dies(lost)) == (
        RecoveryAction.END,
        "nobody is left on host-b to start worker:3 again",
    )
    other = cluster(max_restarts=2)
    del other.agents["a"]
    away = "not all workers can start anew, for the host of some is away or leaves"
    assert recovery_strategy.choose_action(other, dies(other)) == (RecoveryAction.END, away), "host-a could not start its own"


def test_a_lost_host_is_waited_for_where_one_may_come() -> None:
    made = cluster(RecoveryStrategy.IN_PLACE, recovery=True)
    del made.agents["b"]
    after, reason = recovery_strategy.choose_action(made, dies(made))
    assert after is RecoveryAction.WAIT and reason.endswith(": waiting for one to come")
    shrinks = cluster(RecoveryStrategy.IN_PLACE, RecoveryStrategy.ELASTIC, shrink_after_s=5.0)
    del shrinks.agents["b"]
    after, reason = recovery_strategy.choose_action(shrinks, dies(shrinks))
    assert after is RecoveryAction.WAIT and reason.endswith(": waiting for one to come; the world shrinks after 5 s")
    shrinks.members[(Role.WORKER, "0")].state = NodeState.LEFT
    assert recovery_strategy.choose_action(shrinks, dies(shrinks))[0] is not RecoveryAction.WAIT, (
        "nobody could be in step with who has left"
    )


LOST = "the rows of pserver:0 were lost"


@pytest.mark.parametrize(
    ("changed", "after", "reason"),
    [
        (
            {},
            RecoveryAction.RESTART_ALL,
            f"{LOST}, for the holder of their copy died as well: all start anew, from the last checkpoint",
        ),
        (
            {"heals": False},
            RecoveryAction.END,
            f"{LOST}, for the holder of their copy died as well: start the cluster again, it goes on from its last checkpoint",
        ),
        (
            {"restarts": 3},
            RecoveryAction.END,
            f"{LOST}, for the holder of their copy died as well, and all were started anew 3 times already",
        ),
    ],
)
def test_lost_rows_start_everyone_anew_while_that_helps(changed: dict[str, Any], after: RecoveryAction, reason: str) -> None:
    made = cluster(RecoveryStrategy.IN_PLACE, servers=2)
    for name, value in changed.items():
        setattr(made, name, value)
    assert recovery_strategy.choose_action(made, dies(made, Role.PSERVER, 0), ExitCode.ROWS_LOST) == (after, reason)


def test_rows_without_a_copy_are_lost_with_their_server() -> None:
    made = cluster(RecoveryStrategy.RECOVER, servers=1, copies=0)
    made.copied = False
    after, reason = recovery_strategy.choose_action(made, dies(made, Role.PSERVER, 0), 137)
    assert after is RecoveryAction.END
    assert reason == f"{LOST} with it, for they had no copy, and recover-in-place is not among the strategies"


def test_who_could_write_down_what_it_holds_and_who_can_be_killed() -> None:
    made = cluster(*ALL)
    assert recovery_strategy.dumpable_ranks(made) == (
        set(),
        "no rank is in a covey.Loop, which alone can write down what it holds",
    )
    member = made.members[(Role.WORKER, "2")]
    assert recovery_strategy.find_kill_target(made, "worker:2") == (member, "process 1 of worker:2 on host-b is killed")
    assert recovery_strategy.find_kill_target(made, "worker:9") == (None, "there is no node 'worker:9': GET /nodes lists them")
    made.phase, made.reason = Phase.ENDED, "all 4 workers finished"
    assert recovery_strategy.dumpable_ranks(made) == (set(), "the cluster has ended: all 4 workers finished")
    assert recovery_strategy.find_kill_target(made, "worker:2") == (None, "the cluster has ended: all 4 workers finished")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (ScaleRequest(servers=2), "there are 2 parameter servers already"),
        (ScaleRequest(servers=0), "0 parameter servers are not possible: 1 to 256 are"),
        (ScaleRequest(more_servers=2000), "2002 parameter servers are not possible: 1 to 256 are"),
        (ScaleRequest(workers=3, servers=3), "the parameter servers count on 4 workers: only the number of servers can change"),
        (
            ScaleRequest(more_workers=1, more_servers=1),
            "the parameter servers count on 4 workers: only the number of servers can change",
        ),
        (
            ScaleRequest(node_ids=["9"]),
            "The node id:9 is illegal. The parameter servers are pserver:0, pserver:1, and only they can go",
        ),
        (ScaleRequest(node_ids=["0", "pserver:1"]), "not all parameter servers can go: covey stop ends a cluster"),
    ],
)
def test_servers_that_cannot_come_or_go(asked: ScaleRequest, sentence: str) -> None:
    made = cluster(RecoveryStrategy.IN_PLACE, servers=2)
    assert resharding.is_server_request(made, asked) and resharding.plan_server_resize(made, {0, 1}, asked) == (None, sentence)


def test_servers_come_and_go_only_while_all_is_in_its_place() -> None:
    made = cluster(RecoveryStrategy.IN_PLACE, servers=2)
    assert resharding.plan_server_resize(made, {0}, ScaleRequest(servers=3))[1] == (
        "the rows of pserver:1 have no copy yet: ask again in a moment"
    )
    made.coming = (2,)
    assert resharding.plan_server_resize(made, {0, 1}, ScaleRequest(servers=3))[1].startswith(
        "parameter servers come or go already"
    )
    made.coming, made.phase, made.reason = (), Phase.HEALING, "worker:1 died"
    assert (
        resharding.plan_server_resize(made, {0, 1}, ScaleRequest(servers=3))[1]
        == "The cluster is not ready. It is healing: worker:1 died"
    )
    bare = cluster(RecoveryStrategy.IN_PLACE)
    assert resharding.plan_server_resize(bare, set(), ScaleRequest(servers=3)) == (
        None,
        "this cluster has no parameter servers",
    )
    assert not resharding.is_server_request(bare, ScaleRequest(node_ids=["1"])), "where there are none, an id is a worker's"


def test_servers_come_where_there_are_fewest_and_go_from_the_last_or_by_name() -> None:
    made = cluster(RecoveryStrategy.IN_PLACE, servers=2)
    change, reason = resharding.plan_server_resize(made, {0, 1}, ScaleRequest(more_servers=2))
    assert change == ResizePlan(["b", "b"], []) and reason == "the parameter servers become more, from 2 to 4, as asked"
    change, reason = resharding.plan_server_resize(made, {0, 1}, ScaleRequest(servers=1))
    assert change == ResizePlan([], [made.members[(Role.PSERVER, "1")]])
    assert reason == "the parameter servers become fewer, from 2 to 1, as asked"
    change, _ = resharding.plan_server_resize(made, {0, 1}, ScaleRequest(node_ids=["pserver:0"]))
    assert change == ResizePlan([], [made.members[(Role.PSERVER, "0")]])
    for agent in made.agents.values():
        agent.connection = 0
    nobody = "no agent is there that could start a server: only under covey run can there be more"
    assert resharding.plan_server_resize(made, {0, 1}, ScaleRequest(servers=3)) == (None, nobody)


def test_workers_need_an_agent_and_room() -> None:
    made = cluster(RecoveryStrategy.IN_PLACE, worker_max=5)
    assert resize_plan.target_with_extra(made, 1) == (5, "there is place for 5 workers, as asked")
    assert resize_plan.target_with_extra(made, 2) == (None, "a world of 6 workers is not possible: 1 to 5 are")
    assert resize_plan.plan_resize(made, ScaleRequest(5))[1] == "the world grows from 4 to 5 workers, as asked"
    for agent in made.agents.values():
        agent.is_leaving = True
    nobody = "no agent is there that could start a worker: only under covey run can a world grow"
    assert resize_plan.plan_resize(made, ScaleRequest(5)) == (None, nobody)
    made.phase, made.reason = Phase.HEALING, "worker:1 died"
    assert resize_plan.target_with_extra(made, 1) == (None, "The cluster is not ready. It is healing: worker:1 died")


def test_a_newcomer_gets_no_name_that_somebody_chose() -> None:
    made = cluster(RecoveryStrategy.IN_PLACE)
    made.next_seat = 4
    made.add(Member(Role.WORKER, "4", "life", HERE, rank=4, state=NodeState.ALIVE))
    assert resize_plan.new_agent_worker(made, "b", 0.0).node_id == "5"


def test_a_refuge_is_the_host_with_the_fewest_extra_ranks_that_stays() -> None:
    made = cluster(RecoveryStrategy.RECOVER, extra_ranks=2)
    for name, link, slots in (("c", 3, 0), ("d", 4, 0), ("e", 5, 0)):
        made.agents[name] = AgentInfo(name, f"life of {name}", HERE, slots, connection=link)
    made.add(Member(Role.WORKER, "4", "life", HERE, rank=4, agent="c", state=NodeState.ALIVE))
    made.agents["a"].is_leaving, made.agents["d"].connection = True, 0
    assert recovery_strategy.host_with_capacity(made, dies(made)) is made.agents["e"], (
        "a leaves, d is not heard, c has one already"
    )
    made.agents["e"].is_leaving = True
    assert recovery_strategy.host_with_capacity(made, dies(made)) is made.agents["c"]
    made.agents["c"].is_leaving = True
    assert recovery_strategy.host_with_capacity(made, dies(made)) is None, "never the host it died on"


def test_why_nobody_starts_it_again() -> None:
    made = cluster()
    made.heals = False
    assert recovery_strategy.choose_action(made, dies(made))[1] == (
        "no restarts were asked for (--max-restarts), and none can be replaced alone, for no worker has called covey.init()"
    )
    raw = cluster()
    member = dies(raw)
    member.agent = ""
    assert recovery_strategy.choose_action(raw, member) == (RecoveryAction.END, "recovery is off")
    never = cluster(RecoveryStrategy.IN_PLACE)
    never.agents["b"].max_restarts = 0
    assert recovery_strategy.choose_action(never, dies(never))[1] == "0 replacements on host-b are used up (--max-restarts)"
