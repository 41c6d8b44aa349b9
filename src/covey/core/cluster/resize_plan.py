"""How a world changes its size: who goes, who moves, and who is told what.

A member's *seat* is its number for life: it is given when the member comes, its replacements keep it, and nobody else ever has
it. Its *rank* says where it stands in the world as it is now: ranks have no holes, so when one is gone, the highest fills it,
and everyone else keeps their own. Ranks in the middle of a step work out from the seats who is gone and what did not count.
"""

from __future__ import annotations

import msgspec

from covey.core.cluster import ranks
from covey.core.cluster.state import Cluster
from covey.core.messages import ScaleAsked, Seating
from covey.core.plurals import be, many
from covey.core.types import Member, NodeState, Phase, Role

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
    if cluster.size(Role.PSERVER):
        return None, f"the parameter servers count on {many(len(workers), 'worker')}"
    if some_left(cluster):
        return None, "some workers have finished and left already"
    if not cluster.trains:
        return None, f"no step was finished before {gone.name} died, and a world shrinks only in a covey.Loop's steps"
    highest = max(workers, key=lambda m: m.rank)
    return Shrinking(gone, highest if highest is not gone else None), f"the others go on in a world of {len(others)}"


def remaining(cluster: Cluster) -> list[Member]:
    """Who is still to leave on request. Where deaths have left nobody else, the lowest of them stays."""
    workers = sorted(cluster.of(Role.WORKER), key=lambda m: m.rank)
    leavers = [m for m in workers if m.node_id in cluster.going]
    return leavers if len(leavers) < len(workers) else leavers[1:]


def some_left(cluster: Cluster) -> bool:
    """Whether a worker has ended well before the others: then nobody can be in step with all of them any more."""
    return any(m.state is NodeState.LEFT for m in cluster.of(Role.WORKER))


def can_turn_back(cluster: Cluster) -> bool:
    """Whether a growth can be taken back: some must still be there from before, and have the state."""
    before = [m for m in cluster.of(Role.WORKER) if m.node_id not in cluster.arriving]
    return bool(cluster.arriving) and cluster.trains and any(m.present for m in before) and not some_left(cluster)


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
    """More or fewer workers or servers, as it can be done: the agents of those who come, or who goes."""

    agents: list[str]
    leavers: list[Member]


def why_not(cluster: Cluster) -> str:
    """Why the world cannot change its size now; "" where it can."""
    if cluster.phase is not Phase.READY:
        return f"The cluster is not ready. It is {cluster.phase}: {cluster.reason}"
    if cluster.size(Role.PSERVER):
        world = cluster.size(Role.WORKER)
        return f"the parameter servers count on {many(world, 'worker')}: only the number of servers can change"
    if cluster.settings.most == 1 or not cluster.trains:
        return "only the world of a covey.Loop that has finished a step, with two workers or more, can change its size"
    if some_left(cluster):
        return "some workers have finished and left already"
    return ""


def decide(cluster: Cluster, asked: ScaleAsked) -> tuple[Resizing | None, str]:
    """May the world change as asked, and how?"""
    workers = sorted(cluster.of(Role.WORKER), key=lambda m: m.rank)
    world = len(workers)
    if reason := why_not(cluster):
        return None, reason
    wanted = asked.workers if asked.workers >= 0 else world + asked.more
    leavers = workers[wanted:]
    if asked.node_ids:
        known = {m.node_id: m for m in workers}
        leavers, reason = named(asked.node_ids, Role.WORKER, known, "workers", ", ".join(sorted(known, key=ranks.natural)))
        if not leavers:
            return None, reason
        wanted = world - len(leavers)
    if wanted == world:
        return None, f"there {be(world)} {many(world, 'worker')} already"
    if reason := _impossible(cluster, wanted):
        return None, reason
    if wanted < world:
        return Resizing([], leavers), f"the world shrinks from {world} to {many(wanted, 'worker')}, as asked"
    agents = emptiest(cluster, wanted - world)
    if not agents:
        return None, "no agent is there that could start a worker: only under covey run can a world grow"
    return Resizing(agents, []), f"the world grows from {world} to {wanted} workers, as asked"


def emptiest(cluster: Cluster, count: int) -> list[str]:
    """The agents of so many who come: each on the host that has the fewest then. Empty where there is no agent."""
    load = {agent.id: len(cluster.children(agent.id)) for agent in cluster.agents.values() if agent.link and not agent.leaving}
    agents: list[str] = []
    for _ in range(count if load else 0):
        agents.append(min(load, key=lambda agent: (load[agent], agent)))
        load[agents[-1]] += 1
    return agents


def room(cluster: Cluster, more: int) -> tuple[int | None, str]:
    """How many workers there should be, if so many more may come by themselves."""
    if reason := why_not(cluster):
        return None, reason
    wanted = cluster.size(Role.WORKER) + more
    if reason := _impossible(cluster, wanted):
        return None, reason
    return wanted, f"there is place for {wanted} workers, as asked"


def _impossible(cluster: Cluster, wanted: int) -> str:
    """Why there cannot be so many workers; "" where there can."""
    most = cluster.settings.worker_max or WORLD_MAX
    return "" if 1 <= wanted <= most else f"a world of {wanted} workers is not possible: 1 to {most} are"


def named(node_ids: list[str], role: Role, known: dict[str, Member], what: str, listed: str) -> tuple[list[Member], str]:
    """The members with these ids ("2" or "worker:2"), who are to go; none, and why, if one is unknown or all would go."""
    ids = {node_id.removeprefix(f"{role}:") for node_id in node_ids}
    if unknown := sorted(ids - known.keys()):
        return [], f"The node id:{unknown[0]} is illegal. The {what} are {listed}"
    if ids == known.keys():
        return [], f"not all {what} can go: covey stop ends a cluster"
    return [member for node_id, member in known.items() if node_id in ids], ""


def growth(cluster: Cluster) -> tuple[Resizing | None, str]:
    """May the world grow by itself, because hosts have come that offer more workers than it has, and can start them
    at once?"""
    world = cluster.size(Role.WORKER)
    if world >= cluster.goal:
        return None, f"there are {world} workers, as there should be"
    if reason := why_not(cluster):
        return None, reason
    offers = {agent: free for agent, free in cluster.offers(Role.WORKER).items() if not cluster.agents[agent].cold}
    offered = [agent for agent, free in offers.items() for _ in range(free)][: cluster.goal - world]
    hosts = ", ".join(dict.fromkeys(cluster.agents[agent].host.name for agent in offered))
    return (Resizing(offered, []) if offered else None), (
        f"the world grows from {world} to {world + len(offered)} workers, as {hosts} came"
    )


def child(cluster: Cluster, agent: str, now: float) -> Member:
    """A worker that an agent is to start, called by the seat it will have."""
    name = str(_next_seat(cluster))
    return Member(Role.WORKER, name, "", cluster.agents[agent].host, agent=agent, joined_at=now, beat_at=now)


def admit(cluster: Cluster, member: Member) -> None:
    """A place for one who comes, in the next generation."""
    member.rank, member.seat = cluster.size(Role.WORKER), _next_seat(cluster)
    member.local_rank = ranks.free_local(cluster.of(Role.WORKER), member.host)
    member.state, member.since = NodeState.ALIVE, cluster.generation + 1
    cluster.next_seat = member.seat + 1
    cluster.add(member)


def _next_seat(cluster: Cluster) -> int:
    seat = max(cluster.next_seat, cluster.settings.worker_num)
    while (Role.WORKER, str(seat)) in cluster.members:  # somebody chose that for a name
        seat += 1
    return seat


def seating(cluster: Cluster) -> Seating:
    """Everyone's seat, in order of rank."""
    workers = sorted(cluster.of(Role.WORKER), key=lambda m: m.rank)
    return Seating(cluster.resized, [m.seat for m in workers])
