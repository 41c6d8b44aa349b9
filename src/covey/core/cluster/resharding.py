"""Parameter servers come and go while the training runs.

Growing has two parts. First the newcomers come, each with a holder for its copy. Until all servers have said that they are
*settled*, nothing has changed for anyone, and a newcomer that dies or does not come takes the growth back. Then rows are shared
anew: from there on there is no way back and none is needed, because the servers move slots until every slot is with its owner,
in whichever life. Shrinking is that second part alone; who leaves goes when all are settled again. No generation changes: the
workers' group does not notice.
"""

from __future__ import annotations

import msgspec

from covey.core.cluster import ranks, resize_plan
from covey.core.cluster.resize import Resizable
from covey.core.cluster.state import ClusterState
from covey.core.effects import Level
from covey.core.incidents import SERVERS_NODE, Outcome
from covey.core.messages import ClusterEnded, ScaleRequest, ServerInSync, ShardingAssigned
from covey.core.parameter_server.sharding import SLOTS, ServerRanks, Sharding, rebalance_slots
from covey.core.plurals import count_noun, is_or_are
from covey.core.types import Member, MemberRecord, NodeState, Phase, Role


def is_server_request(cluster: ClusterState, asked: ScaleRequest) -> bool:
    """Whether a wish is about servers. Where there are any, ids are theirs: the number of workers cannot change then."""
    named = bool(asked.node_ids) and cluster.size(Role.PSERVER) > 0
    return asked.servers >= 0 or asked.more_servers != 0 or named


def plan_server_resize(
    cluster: ClusterState, settled: set[int], asked: ScaleRequest
) -> tuple[resize_plan.ResizePlan | None, str]:
    """May the servers become more or fewer as asked, and how? `settled`: those where all is in its place."""
    servers = sorted(cluster.members_in_role(Role.PSERVER), key=lambda m: m.rank)
    count = len(servers)
    if cluster.phase is not Phase.READY:
        return None, f"The cluster is not ready. It is {cluster.phase}: {cluster.reason}"
    if not count:
        return None, "this cluster has no parameter servers"
    if cluster.is_resharding:
        return None, "parameter servers come or go already: wait until that is over"
    if unsettled := [f"pserver:{m.rank}" for m in servers if m.rank not in settled]:
        return None, f"the rows of {', '.join(unsettled)} have no copy yet: ask again in a moment"
    if asked.more_workers or asked.workers >= 0:
        workers = count_noun(cluster.size(Role.WORKER), "worker")
        return None, f"the parameter servers count on {workers}: only the number of servers can change"
    wanted = asked.servers if asked.servers >= 0 else count + asked.more_servers
    leavers = servers[wanted:]
    if asked.node_ids:
        known = {str(m.rank): m for m in servers}
        listed = f"{', '.join(f'pserver:{rank}' for rank in known)}, and only they can go"
        leavers, reason = resize_plan.select_departing(asked.node_ids, Role.PSERVER, known, "parameter servers", listed)
        if not leavers:
            return None, reason
        wanted = count - len(leavers)
    if wanted == count:
        return None, f"there {is_or_are(count)} {count_noun(count, 'parameter server')} already"
    if not 1 <= wanted <= SLOTS:
        return None, f"{wanted} parameter servers are not possible: 1 to {SLOTS} are"
    if wanted < count:
        return resize_plan.ResizePlan([], leavers), f"the parameter servers become fewer, from {count} to {wanted}, as asked"
    agents = resize_plan.least_loaded_agents(cluster, wanted - count)
    if not agents:
        return None, "no agent is there that could start a server: only under covey run can there be more"
    return resize_plan.ResizePlan(agents, []), f"the parameter servers become more, from {count} to {wanted}, as asked"


class Sharable(Resizable):
    """A cluster whose parameter servers can become more and fewer."""

    def _apply_server_resize(self, plan: resize_plan.ResizePlan, reason: str) -> int:
        """Begin; returns the operation's number. Its incident is opened after what it is about, and closed before it."""
        kind = "scale-out" if plan.agents else "scale-in"
        self._increment_counter(f"server_{kind.replace('-', '_')}")
        self._publish("servers", kind, reason)
        if plan.agents:
            came = [self._admit_server(agent) for agent in plan.agents]
            self.cluster.coming = tuple(member.rank for member in came)
            self._persist(self.cluster.record())  # after its members: one that is not coming does not count
            self._deadlines.joining_servers = self._now + resize_plan.JOIN_TIMEOUT_S
            self._layout = None
            self._send_desired_children(set(plan.agents))
        else:
            self._start_resharding(tuple(m.rank for m in plan.departing))
        self._open_incident(kind, reason, "asked for", since=self._now, known=self._now, node=SERVERS_NODE)
        return self.incidents.records[-1].number

    def _admit_server(self, agent: str) -> Member:
        cluster = self.cluster
        number = max(cluster.next_server, cluster.settings.server_num)
        cluster.next_server = number + 1
        host = cluster.agents[agent].host
        member = Member(Role.PSERVER, str(number), "", host, agent=agent, rank=number, seat=number)
        member.joined_at = member.last_heartbeat_at = self._now
        member.local_rank = ranks.find_free_local_rank(cluster.members_in_role(Role.PSERVER), host)
        member.state, member.since = NodeState.ALIVE, cluster.generation
        cluster.add(member)
        self._reset_progress(member)
        self._persist(MemberRecord.from_member(member))
        return member

    def _note_server_in_sync(self, member: Member, said: ServerInSync) -> None:
        """A server: everything is where it belongs, as far as it can tell."""
        cluster = self.cluster
        if said.sharding_version != cluster.current_sharding.version:
            return
        self._servers_in_sync.add(member.rank)
        if not self._servers_in_sync >= {m.rank for m in cluster.members_in_role(Role.PSERVER)}:
            return
        if cluster.coming:
            self._start_resharding(())
        elif cluster.is_resharding:
            self._finish_resharding()

    def _start_resharding(self, leavers: ServerRanks) -> None:
        """Rows are shared among all servers but these. Durable first: a server never learns what its scheduler may forget."""
        cluster = self.cluster
        ring = tuple(sorted(m.rank for m in cluster.members_in_role(Role.PSERVER) if m.rank not in leavers))
        now = cluster.current_sharding
        owners, moves = rebalance_slots(now.owners, ring)
        cluster.coming, cluster.moved = (), False
        cluster.copied = cluster.settings.copies > 0 and min(len(ring), len(now.ring)) > 1
        cluster.sharing = Sharding(now.version + 1, owners, ring, leavers)
        self._servers_in_sync = set()
        self._publish("servers", "shared anew", f"{len(moves)} of {SLOTS} slots move")
        self._send_sharding()

    def _finish_resharding(self) -> None:
        """Everything is in its place: who has nothing left goes."""
        cluster, sharing = self.cluster, self.cluster.current_sharding
        leavers = [m for m in cluster.members_in_role(Role.PSERVER) if m.rank in sharing.leaving]
        cluster.sharing = msgspec.structs.replace(sharing, leaving=())
        cluster.moved = True
        cluster.copied = cluster.settings.copies > 0 and len(sharing.ring) > 1
        for member in leavers:
            self._by_connection.pop(member.connection, None)
            cluster.remove(member)
        self._layout = None
        self._publish("servers", "settled", f"all rows are shared by {count_noun(len(sharing.ring), 'parameter server')}")
        self._close_incidents(Outcome.RESUMED, node=SERVERS_NODE)
        self._send_sharding()
        for member in leavers:
            if member.connection:
                self._send(member.connection, ClusterEnded(f"{member.name} leaves: its rows are with others"))

    def _rollback_server_growth(self, reason: str) -> None:
        """Those who were to come do not: nothing has changed for anyone else."""
        leavers = [m for m in self.cluster.members_in_role(Role.PSERVER) if m.rank in self.cluster.coming]
        for member in leavers:
            self._drop_connection(member.connection)
            self.cluster.remove(member)
        self.cluster.coming, self._layout = (), None
        reason = f"{reason}; the growth is taken back"
        self._publish("servers", "rolled back", reason, Level.WARNING)
        self._close_incidents(Outcome.ROLLED_BACK, node=SERVERS_NODE, reason=reason)
        self._persist(self.cluster.record())
        self._send_desired_children({m.agent for m in leavers})

    def _send_sharding(self) -> None:
        assert self.cluster.sharing is not None
        self._persist(self.cluster.record())
        for member in self.cluster.members.values():
            if member.connection and member.is_present:
                self._send(member.connection, ShardingAssigned(self.cluster.sharing))
