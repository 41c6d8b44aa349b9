"""Scaling of the parameter servers during training.

Rows of parameters are grouped into slots; the *sharding* has the owner of each slot, and the servers that hold replicas.

STABLE → ARRIVING: a scale-out starts new servers. No row has moved yet.
ARRIVING → STABLE: the scale-out is rolled back, on request, because a new server died, or because not all servers were in sync
in time.
ARRIVING → MOVING: all servers, old and new, are in sync, and the scheduler persists and sends the new sharding. The scale-out
can no longer be rolled back: servers move slots, across restarts, until every slot is at its owner.
STABLE → MOVING: a scale-in begins.
MOVING → STABLE: all servers are in sync again, and the departing ones leave.

The generation does not change, because the workers' group is not affected.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from covey.core.cluster.resize import JOIN_TIMEOUT_S, ResizePlan, least_loaded_agents, select_departing
from covey.core.cluster.state import NEVER, BaseParts, ClusterState, Step
from covey.core.effects import Level
from covey.core.incidents import SERVERS_NODE, Outcome
from covey.core.messages import ClusterEnded, Refused, ScaleAccepted, ScaleRequest, ServerInSync, ShardingAssigned
from covey.core.parameter_server.sharding import SLOTS, ServerRanks, Sharding, initial_sharding, rebalance_slots
from covey.core.plurals import count_noun, is_or_are
from covey.core.types import ClusterRecord, Member, MemberRecord, Phase, Role


class ServerResizeState(StrEnum):
    STABLE = "stable"
    ARRIVING = "arriving"  # new servers are starting
    MOVING = "moving"  # rows move to their new owners


TRANSITIONS: dict[ServerResizeState, frozenset[ServerResizeState]] = {
    ServerResizeState.STABLE: frozenset({ServerResizeState.ARRIVING, ServerResizeState.MOVING}),
    ServerResizeState.ARRIVING: frozenset({ServerResizeState.STABLE, ServerResizeState.MOVING}),
    ServerResizeState.MOVING: frozenset({ServerResizeState.STABLE}),
}


def is_server_request(cluster: ClusterState, request: ScaleRequest) -> bool:
    """Return whether a request is about parameter servers.

    In a cluster with servers, node ids name servers, because the number of workers is fixed there.
    """
    named = bool(request.node_ids) and cluster.size(Role.PSERVER) > 0
    return request.servers >= 0 or request.more_servers != 0 or named


def plan_server_resize(cluster: ClusterState, in_sync: set[int], request: ScaleRequest) -> tuple[ResizePlan | None, str]:
    """Return the plan for a request about servers, or None if it is not possible now; and the reason.

    `in_sync` has the ranks of the servers that are in sync.
    """
    servers = sorted(cluster.members_in_role(Role.PSERVER), key=lambda m: m.rank)
    count = len(servers)
    if cluster.phase is not Phase.READY:
        return None, f"The cluster is not ready. It is {cluster.phase}: {cluster.reason}"
    if not count:
        return None, "this cluster has no parameter servers"
    if cluster.is_resharding:
        return None, "parameter servers are already being added or removed: wait until that is complete"
    if not_in_sync := [f"pserver:{m.rank}" for m in servers if m.rank not in in_sync]:
        return None, f"the rows of {', '.join(not_in_sync)} have no replica yet: try again in a moment"
    if request.more_workers or request.workers >= 0:
        workers = cluster.size(Role.WORKER)
        return None, f"the number of workers ({workers}) is fixed with parameter servers: only the number of servers can change"
    wanted = request.servers if request.servers >= 0 else count + request.more_servers
    departing = servers[wanted:]
    if request.node_ids:
        known = {str(m.rank): m for m in servers}
        listed = f"{', '.join(f'pserver:{rank}' for rank in known)}, and only they can be removed"
        departing, reason = select_departing(request.node_ids, Role.PSERVER, known, "parameter servers", listed)
        if not departing:
            return None, reason
        wanted = count - len(departing)
    if wanted == count:
        return None, f"there {is_or_are(count)} {count_noun(count, 'parameter server')} already"
    if not 1 <= wanted <= SLOTS:
        return None, f"{wanted} parameter servers are not possible: expected 1 to {SLOTS}"
    if wanted < count:
        return ResizePlan([], departing), f"the number of parameter servers decreases from {count} to {wanted}, as requested"
    agents = least_loaded_agents(cluster, wanted - count)
    if not agents:
        return None, "no agent can start a server: only covey run can add servers"
    return ResizePlan(agents, []), f"the number of parameter servers increases from {count} to {wanted}, as requested"


class ServerResize:
    """Sharding of the rows over the parameter servers, and its changes."""

    def __init__(self, base: BaseParts) -> None:
        self._settings, self._lifecycle = base.settings, base.lifecycle
        self._members, self._incidents = base.members, base.incidents
        self.state = ServerResizeState.STABLE
        self.sharding: Sharding | None = None  # None: the initial sharding
        self.joining_servers: ServerRanks = ()  # while ARRIVING: ranks of the new servers; else ()
        self.has_row_copies: bool | None = None  # whether rows have a replica; None: as configured, no slot was ever moved
        self.next_server_number = -1  # rank of the next new server; -1: none was added since formation
        self._in_sync: set[int] = set()  # ranks of the servers that are in sync with the current sharding
        self._join_deadline = NEVER

    @property
    def is_resharding(self) -> bool:
        return self.state is not ServerResizeState.STABLE

    @property
    def rows_in_place(self) -> bool:
        return self.state is not ServerResizeState.MOVING

    @property
    def current_sharding(self) -> Sharding:
        return self.sharding or initial_sharding(self._settings.server_num)

    @property
    def rows_survive_death(self) -> bool:
        """Whether rows have a replica, so that they survive the death of one parameter server. A single server has none."""
        if self.has_row_copies is None:
            return self._settings.copies > 0 and self._settings.server_num > 1
        return self.has_row_copies

    def server_ranks(self) -> set[int]:
        """Return the ranks of all servers of the cluster, including joining and departing ones; an empty set if it has none."""
        if self.sharding is None and not self._settings.server_num:
            return set()
        return {*self.current_sharding.servers, *self.joining_servers}

    def _set_state(self, state: ServerResizeState) -> None:
        assert state in TRANSITIONS[self.state], f"no transition from {self.state} to {state}"
        self.state = state

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, step: Step, request: ScaleRequest) -> ScaleAccepted | Refused:
        """Start a scale-out or scale-in of the parameter servers; return the reply, `Refused` if that is not possible now."""
        plan, reason = plan_server_resize(step.cluster, self._in_sync, request)
        if plan is None:
            return Refused(reason)
        kind = "scale-out" if plan.agents else "scale-in"
        step.out.count(f"server_{kind.replace('-', '_')}")
        step.out.publish("servers", kind, reason)
        if plan.agents:
            self._start_scale_out(step, plan.agents)
        else:
            self._start_moving(step, tuple(m.rank for m in plan.departing))
        # opened after the change was persisted, and closed before its end is: a restarted scheduler finds no open incident
        # without a change, which it would never close
        return ScaleAccepted(self._incidents.open(step, kind, reason, "requested", node=SERVERS_NODE), reason)

    def request_roll_back(self, step: Step) -> ScaleAccepted:
        number = max((i.number for i in self._incidents.records if i.node == SERVERS_NODE), default=0)
        self._roll_back(step, "requested")
        return ScaleAccepted(number, "the scale-out is rolled back")

    # -- adding and removing -----------------------------------------------------------------------------------------

    def _start_scale_out(self, step: Step, agents: list[str]) -> None:
        self._set_state(ServerResizeState.ARRIVING)
        for agent in agents:
            number = max(self.next_server_number, self._settings.server_num)
            self.next_server_number = number + 1
            member = self._members.admit_server(agent, number, self._lifecycle.generation, step.now)
            self.joining_servers = (*self.joining_servers, number)
            step.out.persist(MemberRecord.from_member(member))
        step.out.persist_cluster()  # after its members: members that this record does not list are ignored
        self._join_deadline = step.now + JOIN_TIMEOUT_S
        self._members.send_desired_children(step, set(agents))

    def note_in_sync(self, step: Step, member: Member, report: ServerInSync) -> None:
        """Record that a server is in sync; when all servers are, start to move rows (ARRIVING) or finish the change (MOVING).

        A report about another sharding than the current one is ignored.
        """
        if report.sharding_version != self.current_sharding.version:
            return
        self._in_sync.add(member.rank)
        if not self._in_sync >= {m.rank for m in self._members.members_in_role(Role.PSERVER)}:
            return
        if self.state is ServerResizeState.ARRIVING:
            self._start_moving(step, ())
        elif self.state is ServerResizeState.MOVING:
            self._finish(step)

    def _start_moving(self, step: Step, departing: ServerRanks) -> None:
        self._set_state(ServerResizeState.MOVING)
        ring = tuple(sorted(m.rank for m in self._members.members_in_role(Role.PSERVER) if m.rank not in departing))
        sharding = self.current_sharding
        owners, moves = rebalance_slots(sharding.owners, ring)
        self.joining_servers = ()
        self.has_row_copies = self._settings.copies > 0 and min(len(ring), len(sharding.ring)) > 1
        self.sharding = Sharding(sharding.version + 1, owners, ring, departing)
        self._in_sync = set()
        step.out.publish("servers", "shared anew", f"{len(moves)} of {SLOTS} slots move")
        self._send_sharding(step, self.sharding)

    def _finish(self, step: Step) -> None:
        self._set_state(ServerResizeState.STABLE)
        sharding = self.current_sharding
        departing = [m for m in self._members.members_in_role(Role.PSERVER) if m.rank in sharding.leaving]
        self.sharding = msgspec.structs.replace(sharding, leaving=())
        self.has_row_copies = self._settings.copies > 0 and len(sharding.ring) > 1
        for member in departing:
            self._members.ignore_connection(member)
            self._members.remove(member)
        servers = count_noun(len(sharding.ring), "parameter server")
        step.out.publish("servers", "settled", f"all rows are distributed over {servers}")
        self._incidents.close(step, Outcome.RESUMED, node=SERVERS_NODE)
        self._send_sharding(step, self.sharding)
        for member in departing:
            if member.connection:
                step.out.send(
                    member.connection, ClusterEnded(f"{member.name} leaves: its rows have moved to the other servers")
                )

    def _send_sharding(self, step: Step, sharding: Sharding) -> None:
        step.out.persist_cluster()  # first: a restarted scheduler must know each sharding that a server has received
        for member in self._members.reachable():
            step.out.send(member.connection, ShardingAssigned(sharding))

    # -- deaths ------------------------------------------------------------------------------------------------------

    def roll_back_if_joining(self, step: Step, member: Member, reason: str) -> bool:
        """Record that a dead server is not in sync. If it is in `joining_servers`, roll the scale-out back and return True."""
        self._in_sync.discard(member.rank)
        if member.rank not in self.joining_servers:
            return False
        self._roll_back(step, f"{member.name} did not join: {reason}")
        return True

    def roll_back_if_overdue(self, step: Step) -> bool:
        """Roll the scale-out back if not all servers are in sync within `JOIN_TIMEOUT_S`; return whether that happened."""
        if self.state is not ServerResizeState.ARRIVING or step.now <= self._join_deadline:
            return False
        self._roll_back(step, f"not all joined within {JOIN_TIMEOUT_S:g} s")
        return True

    def _roll_back(self, step: Step, reason: str) -> None:
        self._set_state(ServerResizeState.STABLE)
        joining = [m for m in self._members.members_in_role(Role.PSERVER) if m.rank in self.joining_servers]
        for member in joining:
            self._members.close_connection(member.connection, step.out)
            self._members.remove(member)
        self.joining_servers = ()
        reason = f"{reason}; the scale-out is rolled back"
        step.out.publish("servers", "rolled back", reason, Level.WARNING)
        self._incidents.close(step, Outcome.ROLLED_BACK, node=SERVERS_NODE, reason=reason)
        step.out.persist_cluster()
        self._members.send_desired_children(step, {m.agent for m in joining})

    def reset_for_restart(self) -> None:
        """Require every server to report again that it is in sync, after a full restart."""
        self._in_sync = set()

    def postpone(self, by_s: float) -> None:
        self._join_deadline += by_s

    def restore(self, record: ClusterRecord, now: float) -> None:
        self.sharding, self.joining_servers, self.has_row_copies = (
            record.sharding,
            record.joining_servers,
            record.has_row_copies,
        )
        self.next_server_number, self._join_deadline = record.next_server_number, now + JOIN_TIMEOUT_S
        if record.joining_servers:
            self.state = ServerResizeState.ARRIVING
        elif not record.rows_in_place:
            self.state = ServerResizeState.MOVING
