"""Parameter servers come and go while the training runs.

Growing has two parts. First the newcomers come, each with a holder for its copy. Until all servers have said that they are
*settled*, nothing has changed for anyone, and a newcomer that dies or does not come takes the growth back. Then rows are shared
anew: from there on there is no way back and none is needed, because the servers move slots until every slot is with its owner,
in whichever life. Shrinking is that second part alone; who leaves goes when all are settled again. No generation changes: the
workers' group does not notice.
"""

from __future__ import annotations

import re

import msgspec

from covey.core import ranks, scaling
from covey.core.cluster import Cluster
from covey.core.effects import Level
from covey.core.incidents import SERVERS, Outcome
from covey.core.messages import ScaleAsked, Settled, Shared, Stop
from covey.core.model import Member, MemberRecord, NodeState, Phase, Role
from covey.core.resizing import Resizable
from covey.core.shards import SLOTS, Servers, Sharing, rescale
from covey.core.words import be, many


class Change(msgspec.Struct, frozen=True):
    """What was asked for, as it can be done: the agents of those who come, or who goes."""

    agents: list[str]
    leavers: Servers


def meant(cluster: Cluster, asked: ScaleAsked) -> bool:
    """Whether a wish is about servers. Where there are any, a bare id is one's: the number of workers is theirs to count on."""
    named = bool(asked.node_ids) and cluster.size(Role.PSERVER) > 0
    return asked.servers >= 0 or asked.more_servers != 0 or named


def decide(cluster: Cluster, settled: set[int], asked: ScaleAsked) -> tuple[Change | None, str]:
    """May the servers become more or fewer as asked, and how? `settled`: those where all is in its place."""
    here = sorted(member.rank for member in cluster.of(Role.PSERVER))
    count = len(here)
    if cluster.phase is not Phase.READY:
        return None, f"The cluster is not ready. It is {cluster.phase}: {cluster.reason}"
    if not count:
        return None, "this cluster has no parameter servers"
    if cluster.moving:
        return None, "parameter servers come or go already: wait until that is over"
    if unsettled := [f"pserver:{rank}" for rank in here if rank not in settled]:
        return None, f"the rows of {', '.join(unsettled)} have no copy yet: ask again in a moment"
    if asked.more or asked.workers >= 0:
        workers = many(cluster.size(Role.WORKER), "worker")
        return None, f"the parameter servers count on {workers}: only the number of servers can change"
    if asked.node_ids:
        return _without(here, asked.node_ids)
    wanted = asked.servers if asked.servers >= 0 else count + asked.more_servers
    if wanted == count:
        return None, f"there {be(count)} {many(count, 'parameter server')} already"
    if not 1 <= wanted <= SLOTS:
        return None, f"{wanted} parameter servers are not possible: 1 to {SLOTS} are"
    if wanted < count:
        return Change([], tuple(here[wanted:])), f"the parameter servers become fewer, from {count} to {wanted}, as asked"
    agents = scaling.emptiest(cluster, wanted - count)
    if not agents:
        return None, "no agent is there that could start a server: only under covey run can there be more"
    return Change(agents, ()), f"the parameter servers become more, from {count} to {wanted}, as asked"


def _without(here: list[int], node_ids: list[str]) -> tuple[Change | None, str]:
    named = {re.sub("^pserver:", "", node_id) for node_id in node_ids}
    known = {str(rank) for rank in here}
    if unknown := sorted(named - known):
        listed = ", ".join(f"pserver:{rank}" for rank in here)
        return None, f"The node id:{unknown[0]} is illegal. The parameter servers are {listed}, and only they can go"
    if named == known:
        return None, "not all parameter servers can go: covey stop ends a cluster"
    leavers = tuple(rank for rank in here if str(rank) in named)
    return Change([], leavers), f"the parameter servers become fewer, from {len(here)} to {len(here) - len(leavers)}, as asked"


class Sharable(Resizable):
    """A cluster whose parameter servers can become more and fewer."""

    def _scale_servers(self, plan: Change, reason: str) -> int:
        """Begin; returns the operation's number. Its incident is opened after what it is about, and closed before it."""
        kind = "scale-out" if plan.agents else "scale-in"
        self._count(f"server_{kind.replace('-', '_')}")
        self._publish("servers", kind, reason)
        if plan.agents:
            came = [self._admit_server(agent) for agent in plan.agents]
            self.cluster.coming = tuple(member.rank for member in came)
            self._persist(self.cluster.record())  # after its members: one that is not coming does not count
            self._deadlines.servers = self._now + scaling.ARRIVE_S
            self._layout = None
            self._tell_agents(set(plan.agents))
        else:
            self._share(plan.leavers)
        self._open_incident(kind, reason, "asked for", since=self._now, known=self._now, node=SERVERS)
        return self.incidents.kept[-1].number

    def _admit_server(self, agent: str) -> Member:
        cluster = self.cluster
        number = max(cluster.next_server, cluster.settings.server_num)
        cluster.next_server = number + 1
        host = cluster.agents[agent].host
        member = Member(Role.PSERVER, str(number), "", host, agent=agent, rank=number, seat=number)
        member.joined_at = member.beat_at = self._now
        member.local_rank = ranks.free_local(cluster.of(Role.PSERVER), host)
        member.state, member.since = NodeState.ALIVE, cluster.generation
        cluster.add(member)
        self._begin_life(member)
        self._persist(MemberRecord.of(member))
        return member

    def _server_settled(self, member: Member, said: Settled) -> None:
        """A server: everything is where it belongs, as far as it can tell."""
        cluster = self.cluster
        if said.sharing != cluster.sharing_now.version:
            return
        self._settled.add(member.rank)
        if not self._settled >= {m.rank for m in cluster.of(Role.PSERVER)}:
            return
        if cluster.coming:
            self._share(())
        elif cluster.moving:
            self._shared()

    def _share(self, leavers: Servers) -> None:
        """Rows are shared among all servers but these. Durable first: a server never learns what its scheduler may forget."""
        cluster = self.cluster
        ring = tuple(sorted(m.rank for m in cluster.of(Role.PSERVER) if m.rank not in leavers))
        now = cluster.sharing_now
        owners, moves = rescale(now.owners, ring)
        cluster.coming, cluster.moved = (), False
        cluster.copied = cluster.settings.copies > 0 and min(len(ring), len(now.ring)) > 1
        cluster.sharing = Sharing(now.version + 1, owners, ring, leavers)
        self._settled = set()
        self._publish("servers", "shared anew", f"{len(moves)} of {SLOTS} slots move")
        self._tell_sharing()

    def _shared(self) -> None:
        """Everything is in its place: who has nothing left goes."""
        cluster, sharing = self.cluster, self.cluster.sharing_now
        leavers = [m for m in cluster.of(Role.PSERVER) if m.rank in sharing.leaving]
        cluster.sharing = msgspec.structs.replace(sharing, leaving=())
        cluster.moved = True
        cluster.copied = cluster.settings.copies > 0 and len(sharing.ring) > 1
        for member in leavers:
            self._speakers.pop(member.link, None)
            cluster.remove(member)
        self._layout = None
        self._publish("servers", "settled", f"all rows are shared by {many(len(sharing.ring), 'parameter server')}")
        self._close_incidents(Outcome.RESUMED, node=SERVERS)
        self._tell_sharing()
        for member in leavers:
            if member.link:
                self._send(member.link, Stop(f"{member.name} leaves: its rows are with others"))

    def _turn_servers_back(self, reason: str) -> None:
        """Those who were to come do not: nothing has changed for anyone else."""
        leavers = [m for m in self.cluster.of(Role.PSERVER) if m.rank in self.cluster.coming]
        for member in leavers:
            self._silence(member.link)
            self.cluster.remove(member)
        self.cluster.coming, self._layout = (), None
        self._publish("servers", "rolled back", f"{reason}; the growth is taken back", Level.WARNING)
        self._close_incidents(Outcome.ROLLED_BACK, node=SERVERS)
        self._persist(self.cluster.record())
        self._tell_agents({m.agent for m in leavers})

    def _tell_sharing(self) -> None:
        assert self.cluster.sharing is not None
        self._persist(self.cluster.record())
        for member in self.cluster.members.values():
            if member.link and member.present:
                self._send(member.link, Shared(self.cluster.sharing))
