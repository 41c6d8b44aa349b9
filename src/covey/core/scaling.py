"""How a world changes its size: who goes, who moves, and who is told what.

A member's *seat* is its number for life: it is given when the member comes, its replacements keep it, and nobody else ever has
it. Its *rank* says where it stands in the world as it is now: ranks have no holes, so when one is gone, the highest fills it,
and everyone else keeps their own. Ranks in the middle of a step work out from the seats who is gone and what did not count.
"""

from __future__ import annotations

import re

import msgspec

from covey.core import ranks
from covey.core.cluster import Cluster
from covey.core.messages import ScaleAsked, Seating
from covey.core.model import Member, NodeState, Phase, Role

WORLD_MAX = 4096  # workers
ARRIVE_S = 300.0  # how long those who are to come may take, before the growth is taken back


class Shrinking(msgspec.Struct, frozen=True):
    """One member goes; `filler`, where there is one, takes its rank."""

    gone: Member
    filler: Member | None


def shrink(cluster: Cluster, gone: Member) -> tuple[Shrinking | None, str]:
    """May the others go on in a world that is smaller by this member?"""
    workers = cluster.of(Role.WORKER)
    others = [m for m in workers if m is not gone]
    if gone.role is not Role.WORKER or not others:
        return None, f"without {gone.name} nobody is left"
    if any(m.state is NodeState.LEFT for m in others):
        return None, "others have finished and left already"
    if not cluster.trains:
        return None, f"no step was finished before {gone.name} died, and a world shrinks only in a covey.Loop's steps"
    highest = max(workers, key=lambda m: m.rank)
    return Shrinking(gone, highest if highest is not gone else None), f"the others go on in a world of {len(others)}"


def carry_out(cluster: Cluster, plan: Shrinking) -> list[Member]:
    """The smaller cluster; returns whose rank changed."""
    rank = plan.gone.rank
    cluster.remove(plan.gone)
    if plan.filler is None:
        return []
    cluster.remove(plan.filler)
    plan.filler.rank = rank
    cluster.add(plan.filler)
    return [plan.filler]


class Resizing(msgspec.Struct, frozen=True):
    """What was asked for, as it can be done: the agents of those who come, or who goes."""

    agents: list[str]
    leavers: list[Member]


def why_not(cluster: Cluster) -> str:
    """Why the world cannot change its size now; "" where it can."""
    if cluster.phase is not Phase.READY:
        return f"The cluster is not ready. It is {cluster.phase}: {cluster.reason}"
    if cluster.settings.worker_num == 1 or not cluster.trains:
        return "only the world of a covey.Loop that has finished a step, with two workers or more, can change its size"
    return ""


def decide(cluster: Cluster, asked: ScaleAsked) -> tuple[Resizing | None, str]:
    """May the world change as asked, and how?"""
    workers = sorted(cluster.of(Role.WORKER), key=lambda m: m.rank)
    world = len(workers)
    if reason := why_not(cluster):
        return None, reason
    if asked.node_ids:
        return _without(workers, asked.node_ids)
    wanted = asked.workers if asked.workers >= 0 else world + asked.more
    if wanted == world:
        return None, f"there are {world} workers already"
    if not 1 <= wanted <= WORLD_MAX:
        return None, f"a world of {wanted} workers is not possible: 1 to {WORLD_MAX} are"
    if wanted < world:
        return Resizing([], workers[wanted:]), f"the world shrinks from {world} to {wanted} workers, as asked"
    load = {agent.id: len(cluster.children(agent.id)) for agent in cluster.agents.values() if agent.link and not agent.leaving}
    if not load:
        return None, "no agent is there that could start a worker: only under covey run can a world grow"
    agents = []
    for _ in range(wanted - world):
        agents.append(min(load, key=lambda agent: (load[agent], agent)))
        load[agents[-1]] += 1
    return Resizing(agents, []), f"the world grows from {world} to {wanted} workers, as asked"


def _without(workers: list[Member], node_ids: list[str]) -> tuple[Resizing | None, str]:
    named = {re.sub("^worker:", "", node_id) for node_id in node_ids}
    known = {m.node_id for m in workers}
    if unknown := sorted(named - known):
        return None, f"The node id:{unknown[0]} is illegal. The workers are {', '.join(sorted(known, key=ranks.natural))}"
    if named == known:
        return None, "not all workers can go: covey stop ends a cluster"
    going = [m for m in workers if m.node_id in named]
    return Resizing([], going), f"the world shrinks from {len(workers)} to {len(workers) - len(going)} workers, as asked"


def admit(cluster: Cluster, agents: list[str], now: float) -> list[Member]:
    """Places for those who come, in the next generation."""
    found = []
    for agent in agents:
        host, rank = cluster.agents[agent].host, cluster.size(Role.WORKER)
        seat = max(cluster.next_seat, cluster.settings.worker_num)
        cluster.next_seat = seat + 1
        member = Member(Role.WORKER, str(seat), "", host, agent=agent, rank=rank, seat=seat, joined_at=now, beat_at=now)
        member.local_rank = ranks.free_local(cluster.of(Role.WORKER), host)
        member.state, member.since = NodeState.ALIVE, cluster.generation + 1
        cluster.add(member)
        found.append(member)
    return found


def seating(cluster: Cluster) -> Seating:
    """Everyone's seat, in order of rank."""
    workers = sorted(cluster.of(Role.WORKER), key=lambda m: m.rank)
    return Seating(cluster.resized, [m.seat for m in workers])
