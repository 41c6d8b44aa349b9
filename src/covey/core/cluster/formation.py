"""When is the cluster complete, who gets which place in it, and what is each node told about its place?"""

from __future__ import annotations

import msgspec

from covey.core.cluster import ranks
from covey.core.cluster.admission import names
from covey.core.cluster.state import Cluster
from covey.core.messages import Assignment, Formed, Start
from covey.core.parameter_server.sharding import Sharing
from covey.core.plurals import be, every, many
from covey.core.types import Agent, Member, Role

COUNTED = (Role.WORKER, Role.PSERVER)  # a federated server counts with the parameter servers


class Plan(msgspec.Struct, frozen=True):
    """Rank by member name, as registered."""

    ranks: dict[str, int]


def decide(cluster: Cluster) -> tuple[Plan | None, str]:
    """Complete as soon as every role has its least number; then everyone's rank follows from who they are."""
    missing = [f"{many(short, role)} missing" for role in COUNTED if (short := _short(cluster, role)) > 0]
    if missing:
        return None, ", ".join(missing) + _refused(cluster)
    table: dict[str, int] = {}
    for role in COUNTED:
        table |= ranks.assign(cluster.of(role), cluster.size(role))
    return Plan(table), f"{every(len(table), 'node')} {be(len(table))} here"


def missing(cluster: Cluster) -> str:
    """Who is here and how many are not, for everyone who waited in vain."""
    found = (
        f"{many(short, role)} missing, here: {names(cluster.of(role))}"
        for role in COUNTED
        if (short := _short(cluster, role)) > 0
    )
    return "; ".join(found) + _refused(cluster)


def _refused(cluster: Cluster) -> str:
    return f"; {cluster.refused}" if cluster.refused else ""


def _short(cluster: Cluster, role: Role) -> int:
    return cluster.settings.wanted(role) - cluster.size(role)


class Layout:
    """How a formed cluster lies on its hosts. Made once per change of membership, so that telling all of it is O(N)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._workers = sorted(cluster.of(Role.WORKER), key=lambda m: m.rank)
        self._local_worlds: dict[tuple[Role, str], int] = {}
        self._children: dict[str, list[Member]] = {}
        for member in cluster.members.values():
            where = (member.role.group, member.host.id)
            self._local_worlds[where] = self._local_worlds.get(where, 0) + 1
        others = sorted((*cluster.of(Role.PSERVER), *cluster.of(Role.SPARE)), key=lambda m: (m.role, m.rank))
        for member in (*self._workers, *others):
            self._children.setdefault(member.agent, []).append(member)
        hosts = dict.fromkeys(m.agent or m.host.id for m in self._workers)
        self._hosts = {host: index for index, host in enumerate(hosts)}

    def formed(self, member: Member) -> Formed:
        """What a node is told about its place."""
        if member.role is Role.SPARE:
            beside = self._local_worlds.get((Role.WORKER, member.host.id), 0)
            return Formed(self._cluster.generation, -1, len(self._workers), -1, beside, sharing=self._cluster.sharing)
        world = len(self._workers) if member.role is Role.WORKER else self._cluster.size(member.role)
        local_world = self._local_worlds[(member.role.group, member.host.id)]
        seat = member.seat if member.seat != member.rank else -1
        server = member.role is Role.PSERVER
        lives = member.lives if server else member.restarts
        place = (member.rank, world, member.local_rank, local_world, lives, seat, member.since)
        taken = (member.node_id, member.incarnation) if member.process else ("", 0)
        return Formed(self._cluster.generation, *place, len(self._workers) if server else 0, self._sharing(member), *taken)

    def _sharing(self, member: Member) -> Sharing | None:
        """One that is coming learns with whom it will share rows, and the others when it is here."""
        cluster = self._cluster
        if member.role is Role.PSERVER and member.rank in cluster.coming:
            now = cluster.sharing_now
            return msgspec.structs.replace(now, ring=tuple(sorted({*now.ring, *cluster.coming})))
        return cluster.sharing

    def start(self, agent: Agent) -> Start:
        """What an agent is told to let run."""
        cluster, first = self._cluster, self._workers[0]
        mine = [m for m in self._children.get(agent.id, []) if m.present]
        return Start(
            generation=cluster.generation,
            world=len(self._workers),
            assignments=[Assignment(m.node_id, m.rank, m.incarnation, m.local_rank, m.role, m.process) for m in mine],
            master_address=first.host.address,
            master_port=cluster.agents.get(first.agent, agent).meet_port,
            host_index=self._hosts.get(agent.id, 0),
            host_count=len(self._hosts),
            local_world=self._local_worlds.get((Role.WORKER, agent.host.id), 0),
            restarts=cluster.restarts,
            max_restarts=cluster.settings.max_restarts,
        )
