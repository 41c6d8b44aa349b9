"""The ladder, rung by rung, from literal clusters: what follows a death, and why not the rung above."""

from __future__ import annotations

from typing import Any

import pytest

from covey.core.cluster import recovery_strategy, resharding, resize_plan
from covey.core.cluster.recovery_strategy import After, Strategy
from covey.core.cluster.resize_plan import Resizing
from covey.core.cluster.state import Cluster
from covey.core.messages import ScaleAsked
from covey.core.types import Agent, ClusterSettings, Host, Member, NodeState, Phase, Role
from covey.errors import ExitCode, UsageError

HERE, THERE = Host("a", "host-a", "10.0.0.1"), Host("b", "host-b", "10.0.0.2")
ALL = (Strategy.RETRY, Strategy.IN_PLACE, Strategy.RECOVER, Strategy.ELASTIC, Strategy.DUMP, Strategy.EXIT)


def cluster(*rungs: Strategy, servers: int = 0, **settings: Any) -> Cluster:
    """Two hosts with two workers each, all in a training; servers on the first."""
    made = Cluster("c", ClusterSettings(4, servers, strategies=rungs, **settings), phase=Phase.READY, generation=1)
    made.trains = made.heals = made.copied = True
    for name, host, link in (("a", HERE, 1), ("b", THERE, 2)):
        made.agents[name] = Agent(name, f"life of {name}", host, 2, link=link, servers=servers if name == "a" else 0)
    for rank in range(4):
        agent, host = ("a", HERE) if rank < 2 else ("b", THERE)
        made.add(Member(Role.WORKER, str(rank), f"life of {rank}", host, rank=rank, agent=agent, state=NodeState.ALIVE, pid=1))
    for rank in range(servers):
        made.add(Member(Role.PSERVER, str(rank), f"life of s{rank}", HERE, rank=rank, agent="a", state=NodeState.ALIVE))
    return made


def dies(made: Cluster, role: Role = Role.WORKER, rank: int = 3) -> Member:
    member = made.members[(role, str(rank))]
    member.state = NodeState.DEAD
    return member


@pytest.mark.parametrize(
    ("rungs", "changed", "after", "reason"),
    [
        (ALL, {}, After.REPLACE, "worker:3 is started again on host-b; the others stay in their step"),
        (ALL[2:], {"extra_ranks": 1}, After.MOVE, "worker:3 is started again on host-a; the others stay in their step"),
        (ALL[2:3], {"extra_ranks": 0}, After.END, "no host is left that could take worker:3 over (COVEY_EXTRA_RANKS is 0)"),
        (ALL[1:2], {"replacements_max": 0}, After.END, "0 replacements on host-b are used up (--max-restarts)"),
        (
            ALL[3:4],
            {"extra_ranks": 0},
            After.SHRINK,
            "nothing is to be started again (COVEY_STRATEGY): the others go on in a world of 3",
        ),
        ((), {"max_restarts": 2}, After.RESTART_ALL, "restart 1 of 2: all workers start anew"),
        ((), {}, After.END, "no restarts were asked for (--max-restarts)"),
    ],
)
def test_each_rung_is_taken_where_those_above_cannot_be(
    rungs: tuple[Strategy, ...], changed: dict[str, Any], after: After, reason: str
) -> None:
    made = cluster(*rungs, **changed)
    assert recovery_strategy.decide(made, dies(made), 137) == (after, reason)


@pytest.mark.parametrize("code", [ExitCode.BAD_SETTING, ExitCode.BAD_SCRIPT])
def test_a_mistake_is_not_repeated(code: int) -> None:
    made = cluster(*ALL)
    reason = f"worker:3 ended with code {code:d}: another start does not mend that"
    assert recovery_strategy.decide(made, dies(made), code) == (After.END, reason)


def test_restarts_end_and_need_every_host() -> None:
    made = cluster(max_restarts=2)
    made.restarts = 2
    assert recovery_strategy.decide(made, dies(made)) == (After.END, "no restart is left")
    made.restarts = 1
    assert recovery_strategy.decide(made, dies(made))[0] is After.RESTART_ALL
    made.agents["a"].max_restarts = 1
    assert recovery_strategy.decide(made, dies(made))[0] is After.END, "a host may have said less"
    lost = cluster(max_restarts=2)
    del lost.agents["b"]
    assert recovery_strategy.decide(lost, dies(lost)) == (After.END, "nobody is left on host-b to start worker:3 again")
    other = cluster(max_restarts=2)
    del other.agents["a"]
    away = "not all workers can start anew, for the host of some is away or leaves"
    assert recovery_strategy.decide(other, dies(other)) == (After.END, away), "host-a could not start its own"


def test_a_lost_host_is_waited_for_where_one_may_come() -> None:
    made = cluster(Strategy.IN_PLACE, recovery=True)
    del made.agents["b"]
    after, reason = recovery_strategy.decide(made, dies(made))
    assert after is After.WAIT and reason.endswith(": waiting for one to come")
    shrinks = cluster(Strategy.IN_PLACE, Strategy.ELASTIC, shrink_after_s=5.0)
    del shrinks.agents["b"]
    after, reason = recovery_strategy.decide(shrinks, dies(shrinks))
    assert after is After.WAIT and reason.endswith(": waiting for one to come; the world shrinks after 5 s")
    shrinks.members[(Role.WORKER, "0")].state = NodeState.LEFT
    assert recovery_strategy.decide(shrinks, dies(shrinks))[0] is not After.WAIT, "nobody could be in step with who has left"


LOST = "the rows of pserver:0 were lost"


@pytest.mark.parametrize(
    ("changed", "after", "reason"),
    [
        ({}, After.RESTART_ALL, f"{LOST}, for the holder of their copy died as well: all start anew, from the last checkpoint"),
        (
            {"heals": False},
            After.END,
            f"{LOST}, for the holder of their copy died as well: start the cluster again, it goes on from its last checkpoint",
        ),
        (
            {"restarts": 3},
            After.END,
            f"{LOST}, for the holder of their copy died as well, and all were started anew 3 times already",
        ),
    ],
)
def test_lost_rows_start_everyone_anew_while_that_helps(changed: dict[str, Any], after: After, reason: str) -> None:
    made = cluster(Strategy.IN_PLACE, servers=2)
    for name, value in changed.items():
        setattr(made, name, value)
    assert recovery_strategy.decide(made, dies(made, Role.PSERVER, 0), ExitCode.ROWS_LOST) == (after, reason)


def test_rows_without_a_copy_are_lost_with_their_server() -> None:
    made = cluster(Strategy.RECOVER, servers=1, copies=0)
    made.copied = False
    after, reason = recovery_strategy.decide(made, dies(made, Role.PSERVER, 0), 137)
    assert after is After.END
    assert reason == f"{LOST} with it, for they had no copy, and recover-in-place is not among the strategies"


def test_who_could_write_down_what_it_holds_and_who_can_be_killed() -> None:
    made = cluster(*ALL)
    assert recovery_strategy.can_dump(made) == (set(), "no rank is in a covey.Loop, which alone can write down what it holds")
    member = made.members[(Role.WORKER, "2")]
    assert recovery_strategy.victim(made, "worker:2") == (member, "process 1 of worker:2 on host-b is killed")
    assert recovery_strategy.victim(made, "worker:9") == (None, "there is no node 'worker:9': GET /nodes lists them")
    made.phase, made.reason = Phase.ENDED, "all 4 workers finished"
    assert recovery_strategy.can_dump(made) == (set(), "the cluster has ended: all 4 workers finished")
    assert recovery_strategy.victim(made, "worker:2") == (None, "the cluster has ended: all 4 workers finished")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (ScaleAsked(servers=2), "there are 2 parameter servers already"),
        (ScaleAsked(servers=0), "0 parameter servers are not possible: 1 to 256 are"),
        (ScaleAsked(more_servers=2000), "2002 parameter servers are not possible: 1 to 256 are"),
        (ScaleAsked(workers=3, servers=3), "the parameter servers count on 4 workers: only the number of servers can change"),
        (ScaleAsked(more=1, more_servers=1), "the parameter servers count on 4 workers: only the number of servers can change"),
        (
            ScaleAsked(node_ids=["9"]),
            "The node id:9 is illegal. The parameter servers are pserver:0, pserver:1, and only they can go",
        ),
        (ScaleAsked(node_ids=["0", "pserver:1"]), "not all parameter servers can go: covey stop ends a cluster"),
    ],
)
def test_servers_that_cannot_come_or_go(asked: ScaleAsked, sentence: str) -> None:
    made = cluster(Strategy.IN_PLACE, servers=2)
    assert resharding.meant(made, asked) and resharding.decide(made, {0, 1}, asked) == (None, sentence)


def test_servers_come_and_go_only_while_all_is_in_its_place() -> None:
    made = cluster(Strategy.IN_PLACE, servers=2)
    assert resharding.decide(made, {0}, ScaleAsked(servers=3))[1] == (
        "the rows of pserver:1 have no copy yet: ask again in a moment"
    )
    made.coming = (2,)
    assert resharding.decide(made, {0, 1}, ScaleAsked(servers=3))[1].startswith("parameter servers come or go already")
    made.coming, made.phase, made.reason = (), Phase.HEALING, "worker:1 died"
    assert resharding.decide(made, {0, 1}, ScaleAsked(servers=3))[1] == "The cluster is not ready. It is healing: worker:1 died"
    bare = cluster(Strategy.IN_PLACE)
    assert resharding.decide(bare, set(), ScaleAsked(servers=3)) == (None, "this cluster has no parameter servers")
    assert not resharding.meant(bare, ScaleAsked(node_ids=["1"])), "where there are none, an id is a worker's"


def test_servers_come_where_there_are_fewest_and_go_from_the_last_or_by_name() -> None:
    made = cluster(Strategy.IN_PLACE, servers=2)
    change, reason = resharding.decide(made, {0, 1}, ScaleAsked(more_servers=2))
    assert change == Resizing(["b", "b"], []) and reason == "the parameter servers become more, from 2 to 4, as asked"
    change, reason = resharding.decide(made, {0, 1}, ScaleAsked(servers=1))
    assert change == Resizing([], [made.members[(Role.PSERVER, "1")]])
    assert reason == "the parameter servers become fewer, from 2 to 1, as asked"
    change, _ = resharding.decide(made, {0, 1}, ScaleAsked(node_ids=["pserver:0"]))
    assert change == Resizing([], [made.members[(Role.PSERVER, "0")]])
    for agent in made.agents.values():
        agent.link = 0
    nobody = "no agent is there that could start a server: only under covey run can there be more"
    assert resharding.decide(made, {0, 1}, ScaleAsked(servers=3)) == (None, nobody)


def test_workers_need_an_agent_and_room() -> None:
    made = cluster(Strategy.IN_PLACE, worker_max=5)
    assert resize_plan.room(made, 1) == (5, "there is place for 5 workers, as asked")
    assert resize_plan.room(made, 2) == (None, "a world of 6 workers is not possible: 1 to 5 are")
    assert resize_plan.decide(made, ScaleAsked(5))[1] == "the world grows from 4 to 5 workers, as asked"
    for agent in made.agents.values():
        agent.leaving = True
    nobody = "no agent is there that could start a worker: only under covey run can a world grow"
    assert resize_plan.decide(made, ScaleAsked(5)) == (None, nobody)
    made.phase, made.reason = Phase.HEALING, "worker:1 died"
    assert resize_plan.room(made, 1) == (None, "The cluster is not ready. It is healing: worker:1 died")


def test_a_newcomer_gets_no_name_that_somebody_chose() -> None:
    made = cluster(Strategy.IN_PLACE)
    made.next_seat = 4
    made.add(Member(Role.WORKER, "4", "life", HERE, rank=4, state=NodeState.ALIVE))
    assert resize_plan.child(made, "b", 0.0).node_id == "5"


def test_the_ladder_has_one_order_ends_with_exit_and_knows_its_rungs() -> None:
    assert recovery_strategy.ladder([" dump", "retry", ""]) == (Strategy.RETRY, Strategy.DUMP, Strategy.EXIT)
    with pytest.raises(UsageError) as refused:
        recovery_strategy.ladder(["hope"])
    assert str(refused.value) == f"the strategy hope is not known: {', '.join(Strategy)} are"


def test_a_refuge_is_the_host_with_the_fewest_extra_ranks_that_stays() -> None:
    made = cluster(Strategy.RECOVER, extra_ranks=2)
    for name, link, slots in (("c", 3, 0), ("d", 4, 0), ("e", 5, 0)):
        made.agents[name] = Agent(name, f"life of {name}", HERE, slots, link=link)
    made.add(Member(Role.WORKER, "4", "life", HERE, rank=4, agent="c", state=NodeState.ALIVE))
    made.agents["a"].leaving, made.agents["d"].link = True, 0
    assert recovery_strategy.refuge(made, dies(made)) is made.agents["e"], "a leaves, d is not heard, c has one already"
    made.agents["e"].leaving = True
    assert recovery_strategy.refuge(made, dies(made)) is made.agents["c"]
    made.agents["c"].leaving = True
    assert recovery_strategy.refuge(made, dies(made)) is None, "never the host it died on"


def test_why_nobody_starts_it_again() -> None:
    made = cluster()
    made.heals = False
    assert recovery_strategy.decide(made, dies(made))[1] == (
        "no restarts were asked for (--max-restarts), and none can be replaced alone, for no worker has called covey.init()"
    )
    raw = cluster()
    member = dies(raw)
    member.agent = ""
    assert recovery_strategy.decide(raw, member) == (After.END, "recovery is off")
    never = cluster(Strategy.IN_PLACE)
    never.agents["b"].max_restarts = 0
    assert recovery_strategy.decide(never, dies(never))[1] == "0 replacements on host-b are used up (--max-restarts)"
