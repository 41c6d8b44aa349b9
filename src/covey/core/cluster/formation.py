"""When is the cluster complete, who gets which place in it, and what is each node told about its place?"""

from __future__ import annotations

import msgspec

from covey.core.cluster import ranks
from covey.core.cluster.admission import describe_members
from covey.core.cluster.state import ClusterState
from covey.core.messages import Assignment, DesiredChildren, RankAssigned
from covey.core.parameter_server.sharding import Sharding
from covey.core.plurals import count_noun, describe_all, is_or_are
from covey.core.types import AgentInfo, Member, Role

COUNTED_ROLES = (Role.WORKER, Role.PSERVER)  # a federated server counts with the parameter servers


class FormationPlan(msgspec.Struct, frozen=True):
    """Rank by member name, as registered."""

    ranks: dict[str, int]


def decide_formation(cluster: ClusterState) -> tuple[FormationPlan | None, str]:
    """Complete as soon as every role has its least number; then everyone's rank follows from who they are."""
    missing = [f"{count_noun(short, role)} missing" for role in COUNTED_ROLES if (short := _count_missing(cluster, role)) > 0]
    if missing:
        return None, ", ".join(missing) + _describe_refusal(cluster)
    table: dict[str, int] = {}
    for role in COUNTED_ROLES:
        table |= ranks.assign_ranks(cluster.members_in_role(role), cluster.size(role))
    return FormationPlan(table), f"{describe_all(len(table), 'node')} {is_or_are(len(table))} here"


def describe_missing(cluster: ClusterState) -> str:
    """Who is here and how many are not, for everyone who waited in vain."""
    found = (
        f"{count_noun(short, role)} missing, here: {describe_members(cluster.members_in_role(role))}"
        for role in COUNTED_ROLES
        if (short := _count_missing(cluster, role)) > 0
    )
    return "; ".join(found) + _describe_refusal(cluster)


def _describe_refusal(cluster: ClusterState) -> str:
    return f"; {cluster.last_refusal}" if cluster.last_refusal else ""


def _count_missing(cluster: ClusterState, role: Role) -> int:
    return cluster.settings.required_count(role) - cluster.size(role)


class HostLayout:
    """How a formed cluster lies on its hosts. Made once per change of membership, so that telling all of it is O(N)."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
        self._local_worlds: dict[tuple[Role, str], int] = {}
        self._children_by_agent: dict[str, list[Member]] = {}
        for member in cluster.members.values():
            where = (member.role.group, member.host.id)
            self._local_worlds[where] = self._local_worlds.get(where, 0) + 1
        others = sorted(
            (*cluster.members_in_role(Role.PSERVER), *cluster.members_in_role(Role.SPARE)), key=lambda m: (m.role, m.rank)
        )
        for member in (*self._workers, *others):
            self._children_by_agent.setdefault(member.agent, []).append(member)
        hosts = dict.fromkeys(m.agent or m.host.id for m in self._workers)
        self._host_indexes = {host: index for index, host in enumerate(hosts)}

    def make_rank_assigned(self, member: Member) -> RankAssigned:
        """What a node is told about its place."""
        if member.role is Role.SPARE:
            beside = self._local_worlds.get((Role.WORKER, member.host.id), 0)
            return RankAssigned(self._cluster.generation, -1, len(self._workers), -1, beside, sharding=self._cluster.sharing)
        world = len(self._workers) if member.role is Role.WORKER else self._cluster.size(member.role)
        local_world = self._local_worlds[(member.role.group, member.host.id)]
        seat = member.seat if member.seat != member.rank else -1
        server = member.role is Role.PSERVER
        lives = member.lives if server else member.restarts
        place = (member.rank, world, member.local_rank, local_world, lives, seat, member.since)
        taken = (member.node_id, member.incarnation) if member.process else ("", 0)
        return RankAssigned(
            self._cluster.generation, *place, len(self._workers) if server else 0, self._sharding_for(member), *taken
        )

    def _sharding_for(self, member: Member) -> Sharding | None:
        """One that is coming learns with whom it will share rows, and the others when it is here."""
        cluster = self._cluster
        if member.role is Role.PSERVER and member.rank in cluster.coming:
            now = cluster.current_sharding
            return msgspec.structs.replace(now, ring=tuple(sorted({*now.ring, *cluster.coming})))
        return cluster.sharing

    def make_desired_children(self, agent: AgentInfo) -> DesiredChildren:
        """What an agent is told to let run."""
        cluster, first = self._cluster, self._workers[0]
        mine = [m for m in self._children_by_agent.get(agent.id, []) if m.is_present]
        return DesiredChildren(
            generation=cluster.generation,
            world=len(self._workers),
            assignments=[Assignment(m.node_id, m.rank, m.incarnation, m.local_rank, m.role, m.process) for m in mine],
            master_address=first.host.address,
            master_port=cluster.agents.get(first.agent, agent).meet_port,
            host_index=self._host_indexes.get(agent.id, 0),
            host_count=len(self._host_indexes),
            local_world=self._local_worlds.get((Role.WORKER, agent.host.id), 0),
            restarts=cluster.restarts,
            max_restarts=cluster.settings.max_restarts,
        )
