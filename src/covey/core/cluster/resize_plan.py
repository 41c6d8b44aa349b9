"""How a world changes its size: who goes, who moves, and who is told what.

A member's *seat* is its number for life: it is given when the member comes, its replacements keep it, and nobody else ever has
it. Its *rank* says where it stands in the world as it is now: ranks have no holes, so when one is gone, the highest fills it,
and everyone else keeps their own. Ranks in the middle of a step work out from the seats who is gone and what did not count.
"""

from __future__ import annotations

import msgspec

from covey.core.cluster import ranks
from covey.core.cluster.state import ClusterState
from covey.core.messages import MemberIndexes, ScaleRequest
from covey.core.plurals import count_noun, is_or_are
from covey.core.types import Member, NodeState, Phase, Role

WORLD_MAX = 4096  # workers
JOIN_TIMEOUT_S = 300.0  # how long those who are to come may take, before the growth is taken back


class ShrinkPlan(msgspec.Struct, frozen=True):
    """One member goes; `filler`, where there is one, takes its rank."""

    departing: Member
    filler: Member | None


def plan_shrink(cluster: ClusterState, gone: Member) -> tuple[ShrinkPlan | None, str]:
    """May the others go on in a world that is smaller by this member?"""
    workers = cluster.members_in_role(Role.WORKER)
    others = [m for m in workers if m is not gone]
    if gone.role is not Role.WORKER or not others:
        return None, f"without {gone.name} nobody is left"
    if cluster.size(Role.PSERVER):
        return None, f"the parameter servers count on {count_noun(len(workers), 'worker')}"
    if has_left_worker(cluster):
        return None, "some workers have finished and left already"
    if not cluster.trains:
        return None, f"no step was finished before {gone.name} died, and a world shrinks only in a covey.Loop's steps"
    highest = max(workers, key=lambda m: m.rank)
    return ShrinkPlan(gone, highest if highest is not gone else None), f"the others go on in a world of {len(others)}"


def remaining_departing(cluster: ClusterState) -> list[Member]:
    """Who is still to leave on request. Where deaths have left nobody else, the lowest of them stays."""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    leavers = [m for m in workers if m.node_id in cluster.going]
    return leavers if len(leavers) < len(workers) else leavers[1:]


def has_left_worker(cluster: ClusterState) -> bool:
    """Whether a worker has ended well before the others: then nobody can be in step with all of them any more."""
    return any(m.state is NodeState.LEFT for m in cluster.members_in_role(Role.WORKER))


def can_roll_back(cluster: ClusterState) -> bool:
    """Whether a growth can be taken back: some must still be there from before, and have the state."""
    before = [m for m in cluster.members_in_role(Role.WORKER) if m.node_id not in cluster.arriving]
    return bool(cluster.arriving) and cluster.trains and any(m.is_present for m in before) and not has_left_worker(cluster)


def apply_shrink(cluster: ClusterState, plan: ShrinkPlan) -> list[Member]:
    """The smaller cluster; returns whose rank changed."""
    rank = plan.departing.rank
    cluster.remove(plan.departing)
    if plan.filler is None:
        return []
    cluster.remove(plan.filler)
    plan.filler.rank = rank
    cluster.add(plan.filler)
    return [plan.filler]


class ResizePlan(msgspec.Struct, frozen=True):
    """More or fewer workers or servers, as it can be done: the agents of those who come, or who goes."""

    agents: list[str]
    departing: list[Member]


def resize_blocker(cluster: ClusterState) -> str:
    """Why the world cannot change its size now; "" where it can."""
    if cluster.phase is not Phase.READY:
        return f"The cluster is not ready. It is {cluster.phase}: {cluster.reason}"
    if cluster.size(Role.PSERVER):
        world = cluster.size(Role.WORKER)
        return f"the parameter servers count on {count_noun(world, 'worker')}: only the number of servers can change"
    if cluster.settings.default_target_workers == 1 or not cluster.trains:
        return "only the world of a covey.Loop that has finished a step, with two workers or more, can change its size"
    if has_left_worker(cluster):
        return "some workers have finished and left already"
    return ""


def plan_resize(cluster: ClusterState, asked: ScaleRequest) -> tuple[ResizePlan | None, str]:
    """May the world change as asked, and how?"""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    world = len(workers)
    if reason := resize_blocker(cluster):
        return None, reason
    wanted = asked.workers if asked.workers >= 0 else world + asked.more_workers
    leavers = workers[wanted:]
    if asked.node_ids:
        known = {m.node_id: m for m in workers}
        leavers, reason = select_departing(
            asked.node_ids, Role.WORKER, known, "workers", ", ".join(sorted(known, key=ranks.natural_sort_key))
        )
        if not leavers:
            return None, reason
        wanted = world - len(leavers)
    if wanted == world:
        return None, f"there {is_or_are(world)} {count_noun(world, 'worker')} already"
    if reason := _world_size_blocker(cluster, wanted):
        return None, reason
    if wanted < world:
        return ResizePlan([], leavers), f"the world shrinks from {world} to {count_noun(wanted, 'worker')}, as asked"
    agents = least_loaded_agents(cluster, wanted - world)
    if not agents:
        return None, "no agent is there that could start a worker: only under covey run can a world grow"
    return ResizePlan(agents, []), f"the world grows from {world} to {wanted} workers, as asked"


def least_loaded_agents(cluster: ClusterState, count: int) -> list[str]:
    """The agents of so many who come: each on the host that has the fewest then. Empty where there is no agent."""
    load = {
        agent.id: len(cluster.children(agent.id))
        for agent in cluster.agents.values()
        if agent.connection and not agent.is_leaving
    }
    agents: list[str] = []
    for _ in range(count if load else 0):
        agents.append(min(load, key=lambda agent: (load[agent], agent)))
        load[agents[-1]] += 1
    return agents


def target_with_extra(cluster: ClusterState, more: int) -> tuple[int | None, str]:
    """How many workers there should be, if so many more may come by themselves."""
    if reason := resize_blocker(cluster):
        return None, reason
    wanted = cluster.size(Role.WORKER) + more
    if reason := _world_size_blocker(cluster, wanted):
        return None, reason
    return wanted, f"there is place for {wanted} workers, as asked"


def _world_size_blocker(cluster: ClusterState, wanted: int) -> str:
    """Why there cannot be so many workers; "" where there can."""
    most = cluster.settings.worker_max or WORLD_MAX
    return "" if 1 <= wanted <= most else f"a world of {wanted} workers is not possible: 1 to {most} are"


def select_departing(
    node_ids: list[str], role: Role, known: dict[str, Member], what: str, listed: str
) -> tuple[list[Member], str]:
    """The members with these ids ("2" or "worker:2"), who are to go; none, and why, if one is unknown or all would go."""
    ids = {node_id.removeprefix(f"{role}:") for node_id in node_ids}
    if unknown := sorted(ids - known.keys()):
        return [], f"The node id:{unknown[0]} is illegal. The {what} are {listed}"
    if ids == known.keys():
        return [], f"not all {what} can go: covey stop ends a cluster"
    return [member for node_id, member in known.items() if node_id in ids], ""


def plan_growth(cluster: ClusterState) -> tuple[ResizePlan | None, str]:
    """May the world grow by itself, because hosts have come that offer more workers than it has, and can start them
    at once?"""
    world = cluster.size(Role.WORKER)
    if world >= cluster.target_workers:
        return None, f"there are {world} workers, as there should be"
    if reason := resize_blocker(cluster):
        return None, reason
    offers = {
        agent: free
        for agent, free in cluster.free_slots_by_agent(Role.WORKER).items()
        if not cluster.agents[agent].template_importing
    }
    offered = [agent for agent, free in offers.items() for _ in range(free)][: cluster.target_workers - world]
    hosts = ", ".join(dict.fromkeys(cluster.agents[agent].host.name for agent in offered))
    return (ResizePlan(offered, []) if offered else None), (
        f"the world grows from {world} to {world + len(offered)} workers, as {hosts} came"
    )


def new_agent_worker(cluster: ClusterState, agent: str, now: float) -> Member:
    """A worker that an agent is to start, called by the seat it will have."""
    name = str(_next_member_index(cluster))
    return Member(Role.WORKER, name, "", cluster.agents[agent].host, agent=agent, joined_at=now, last_heartbeat_at=now)


def add_joining_worker(cluster: ClusterState, member: Member) -> None:
    """A place for one who comes, in the next generation."""
    member.rank, member.seat = cluster.size(Role.WORKER), _next_member_index(cluster)
    member.local_rank = ranks.find_free_local_rank(cluster.members_in_role(Role.WORKER), member.host)
    member.state, member.since = NodeState.ALIVE, cluster.generation + 1
    cluster.next_seat = member.seat + 1
    cluster.add(member)


def _next_member_index(cluster: ClusterState) -> int:
    seat = max(cluster.next_seat, cluster.settings.worker_num)
    while (Role.WORKER, str(seat)) in cluster.members:  # somebody chose that for a name
        seat += 1
    return seat


def make_member_indexes(cluster: ClusterState) -> MemberIndexes:
    """Everyone's seat, in order of rank."""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    return MemberIndexes(cluster.resized, [m.seat for m in workers])
