"""The members of the cluster, their agents, connections, heartbeats and ranks.

At formation, a node id of digits claims that rank, and an agent with --node-rank claims ranks for its workers. The other
members get the free ranks in order of their hosts and node ids. Without claims, the ranks of a host are therefore contiguous.

`Member` and `AgentInfo` are frozen records, and only `Members` replaces them. A record that was read earlier may be stale.
Methods that change a member or agent take any version of its record and use the current one, which they find by `uid`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from covey.core.messages import NAMES_MAX, Assignment, DesiredChildren, RankAssigned, Register, RegisterAgent
from covey.core.parameter_server.sharding import Sharding
from covey.core.types import (
    AgentInfo,
    AgentRecord,
    ClusterRecord,
    ClusterSettings,
    Host,
    Member,
    MemberRecord,
    NodeState,
    Progress,
    Record,
    Role,
    ScriptError,
)

if TYPE_CHECKING:
    from covey.core.cluster.state import ClusterState, Outbox, Step

MemberKey = tuple[Role, str]  # role and node id
FIRST_PROGRESS_S = 30.0  # a new process without progress (imports, model, state) is not stuck before this time
NO_PROGRESS = Progress()
GONE_HOSTS_MAX = 4096  # remembered host instances that are gone; older ones are forgotten
replace = msgspec.structs.replace


# -- ranks --------------------------------------------------------------------------------------------------------------


def parse_rank_claim(node_id: str) -> int | None:
    """Return the rank that a node id of digits claims; None for any other id."""
    return int(node_id) if node_id.isascii() and node_id.isdigit() else None


def assign_ranks(members: Iterable[Member], world: int) -> dict[str, int]:
    """Return the rank of each member, by name. `Member.rank` is the rank that a member claims, or -1.

    There are at most `world` members, and their claims are distinct. A claim of `world` or above is ignored.
    """
    known = list(members)
    claims = {m.name: m.rank for m in known if 0 <= m.rank < world}
    taken = set(claims.values())
    assert len(known) <= world and len(taken) == len(claims)
    free = (rank for rank in range(world) if rank not in taken)
    automatic = _sort_by_host([m for m in known if m.name not in claims])
    return claims | {member.name: next(free) for member in automatic}


def assign_local_ranks(members: Iterable[Member]) -> dict[str, int]:
    """Return the local rank of each member, by name: its position among the members with the same host id, in order of rank."""
    counts: dict[str, int] = {}
    found: dict[str, int] = {}
    for member in sorted(members, key=lambda m: m.rank):
        found[member.name] = counts.get(member.host.id, 0)
        counts[member.host.id] = found[member.name] + 1
    return found


def find_free_local_rank(members: Iterable[Member], host: Host) -> int:
    """Return the lowest local rank that none of these members has on this host."""
    taken = {m.local_rank for m in members if m.host.id == host.id}
    return next(rank for rank in range(len(taken) + 1) if rank not in taken)


def _sort_by_host(members: list[Member]) -> list[Member]:
    home: dict[str, tuple[int, int]] = {}
    for member in members:
        address = _address_sort_key(member.host)
        home[member.host.id] = min(home.get(member.host.id, address), address)
    return sorted(members, key=lambda m: (home[m.host.id], m.host.id, natural_sort_key(m.node_id), m.node_id, m.role))


def _address_sort_key(host: Host) -> tuple[int, int]:
    try:
        address = ipaddress.ip_address(host.address)
    except ValueError:
        return (0, 0)
    return (address.version, int(address))


def natural_sort_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which "node-10" comes after "node-2"."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts]


def describe_members(members: Iterable[Member]) -> str:
    """Return the names of these members in natural order, at most `NAMES_MAX`, and how many more; "none" without members."""
    sorted_names = sorted((member.name for member in members), key=natural_sort_key)
    shown = ", ".join(sorted_names[:NAMES_MAX])
    more = len(sorted_names) - NAMES_MAX
    return f"{shown} and {more} more" if more > 0 else shown or "none"


# -- activity ------------------------------------------------------------------------------------------------------------


class Heartbeats:
    """Times of the last heartbeat of every member and agent, and the progress of every member, by uid.

    They are not fields of the records, so that a heartbeat does not copy a record.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        self._first_progress_s = max(0.0, FIRST_PROGRESS_S - settings.stuck_s)
        self._last_heartbeat_at: dict[int, float] = {}
        self._progress: dict[int, Progress] = {}
        self._progress_changed_at: dict[int, float] = {}

    def last_heartbeat_at(self, node: Member | AgentInfo) -> float:
        """Return the time from which the node's silence is measured, usually that of its last heartbeat; 0: none."""
        return self._last_heartbeat_at.get(node.uid, 0.0)

    def progress(self, member: Member) -> Progress:
        return self._progress.get(member.uid, NO_PROGRESS)

    def progress_changed_at(self, member: Member) -> float:
        """Return the time from which missing progress is measured, usually that of the last progress; 0: none."""
        return self._progress_changed_at.get(member.uid, 0.0)

    def add(self, node: Member | AgentInfo, now: float) -> None:
        """Add a node with a heartbeat at `now` (0: none yet) and without progress."""
        self._last_heartbeat_at[node.uid], self._progress_changed_at[node.uid] = now, 0.0

    def note_heartbeat(self, node: Member | AgentInfo, now: float) -> None:
        self._last_heartbeat_at[node.uid] = now

    def note_progress(self, member: Member, progress: Progress, now: float) -> None:
        if self.progress(member) != progress:
            self._progress[member.uid], self._progress_changed_at[member.uid] = progress, now

    def note_resumed(self, member: Member, step: int, now: float) -> None:
        """Set the step at which a rank resumed; its time without progress is measured from now at the earliest."""
        self._progress[member.uid] = replace(self.progress(member), step=step)
        self._progress_changed_at[member.uid] = max(self.progress_changed_at(member), now)

    def begin_life(self, member: Member, now: float) -> None:
        """Reset the progress for a new process. Without progress, it is not stuck before `FIRST_PROGRESS_S` have passed."""
        self._progress[member.uid], self._progress_changed_at[member.uid] = NO_PROGRESS, now + self._first_progress_s

    def clear_progress(self, member: Member) -> None:
        self._progress[member.uid] = NO_PROGRESS

    def discount_suspension(self, slept_s: float, now: float) -> None:
        """Move times in the past forward by the seconds in which the scheduler was suspended, at most to now."""
        for uid, at in self._last_heartbeat_at.items():
            self._last_heartbeat_at[uid] = min(at + slept_s, now)
        for uid, at in self._progress_changed_at.items():
            self._progress_changed_at[uid] = min(at + slept_s, max(at, now))

    def forget(self, node: Member | AgentInfo) -> None:
        for table in (self._last_heartbeat_at, self._progress, self._progress_changed_at):
            table.pop(node.uid, None)


# -- hosts ---------------------------------------------------------------------------------------------------------------


class HostLayout:
    """Layout of the members on their hosts, reused until the membership changes, so that sending all ranks costs O(N)."""

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
        """Return the message with the rank of a member. A spare gets rank -1."""
        member, cluster, world = self._cluster.current(member), self._cluster, len(self._workers)
        if member.role is Role.SPARE:
            beside = self._local_worlds.get((Role.WORKER, member.host.id), 0)
            return RankAssigned(cluster.generation, -1, world, -1, beside, sharding=cluster.sharding)
        size = world if member.role is Role.WORKER else cluster.size(member.role)
        local_world = self._local_worlds[(member.role.group, member.host.id)]
        member_index = member.member_index if member.member_index != member.rank else -1
        is_server = member.role is Role.PSERVER
        restarts = member.ended_processes if is_server else member.restarts
        ranks = (member.rank, size, member.local_rank, local_world, restarts, member_index, member.since_generation)
        promoted = (member.node_id, member.incarnation) if member.promoted_from else ("", 0)
        return RankAssigned(cluster.generation, *ranks, world if is_server else 0, self._sharding_for(member), *promoted)

    def _sharding_for(self, member: Member) -> Sharding | None:
        """Return the sharding to send to a member; None: the initial one.

        In the sharding for a joining server, the ring includes all joining servers.
        """
        cluster = self._cluster
        if member.role is Role.PSERVER and member.rank in cluster.joining_servers:
            sharding = cluster.current_sharding
            return replace(sharding, ring=tuple(sorted({*sharding.ring, *cluster.joining_servers})))
        return cluster.sharding

    def make_desired_children(self, agent: AgentInfo) -> DesiredChildren:
        """Return the message with the processes that an agent must run: its children that are present."""
        cluster, first = self._cluster, self._cluster.current(self._workers[0])
        children = (cluster.current(m) for m in self._children_by_agent.get(agent.id, ()))
        return DesiredChildren(
            generation=cluster.generation,
            world=len(self._workers),
            assignments=[
                Assignment(m.node_id, m.rank, m.incarnation, m.local_rank, m.role, m.promoted_from)
                for m in children
                if m.is_present
            ],
            master_address=first.host.address,
            master_port=cluster.agents.get(first.agent, agent).meet_port,
            host_index=self._host_indexes.get(agent.id, 0),
            host_count=len(self._host_indexes),
            local_world=self._local_worlds.get((Role.WORKER, agent.host.id), 0),
            restarts=cluster.restarts,
            max_restarts=cluster.settings.max_restarts,
        )


class Members:
    """Owns the records of members and agents, their connections, and the indexes over them.

    A connection belongs to at most one member or agent. No two members have the same role and node id, or the same role and
    rank (except -1).
    """

    def __init__(self, settings: ClusterSettings, heartbeats: Heartbeats) -> None:
        self._settings, self._heartbeats = settings, heartbeats
        self.members: dict[MemberKey, Member] = {}
        self.agents: dict[str, AgentInfo] = {}
        self.gone_hosts: tuple[str, ...] = ()  # host instances that were reported gone: their nodes are not admitted again
        self.next_member_index = -1  # for workers that join after formation; -1: not formed yet
        self._last_uid = 0
        self._keys: dict[int, MemberKey] = {}  # of members, by uid
        self._agent_ids: dict[int, str] = {}  # by uid
        self._by_connection: dict[int, int] = {}  # uid of the member or agent
        self._by_rank: dict[tuple[Role, int], int] = {}  # uid
        self._role_sizes: dict[Role, int] = {}
        self._children_by_agent: dict[str, list[int]] = {}  # uids
        self._layout: HostLayout | None = None  # None: to be built, because the membership changed

    # -- queries -----------------------------------------------------------------------------------------------------

    def current(self, member: Member) -> Member:
        """Return the current record of this member; the given one if the member was removed."""
        key = self._keys.get(member.uid)
        return self.members[key] if key is not None else member

    def contains(self, member: Member) -> bool:
        return member.uid in self._keys

    def members_in_role(self, role: Role) -> list[Member]:
        """Return the members of this role, in any state. Parameter servers and federated servers are one role here."""
        return [member for member in self.members.values() if member.role.group is role.group]

    def members_without_spares(self) -> list[Member]:
        return [member for member in self.members.values() if member.role is not Role.SPARE]

    def size(self, role: Role) -> int:
        return self._role_sizes.get(role.group, 0)

    def member_at_rank(self, role: Role, rank: int) -> Member | None:
        """Return the member that has this rank, or claims it before formation; None if there is none."""
        uid = self._by_rank.get((role.group, rank))
        return self.members[self._keys[uid]] if uid is not None else None

    def children(self, agent: str) -> list[Member]:
        return [self.members[self._keys[uid]] for uid in self._children_by_agent.get(agent, ())]

    def reachable(self) -> list[Member]:
        """Return the members that are present and connected."""
        return [member for member in self.members.values() if member.connection and member.is_present]

    def member_at(self, connection: int) -> Member | None:
        key = self._keys.get(self._by_connection.get(connection, 0))
        return self.members[key] if key is not None else None

    def agent_at(self, connection: int) -> AgentInfo | None:
        name = self._agent_ids.get(self._by_connection.get(connection, 0))
        return self.agents[name] if name is not None else None

    def is_connected(self, connection: int) -> bool:
        """Return whether this connection belongs to a member or agent, and its messages are not ignored."""
        return connection in self._by_connection

    def connections(self) -> list[int]:
        """Return all connections, members before agents, so that a child receives a message before its agent ends it."""
        return sorted(self._by_connection, key=lambda connection: self._by_connection[connection] in self._agent_ids)

    # -- sending -----------------------------------------------------------------------------------------------------

    def layout(self, step: Step) -> HostLayout:
        if self._layout is None:
            self._layout = HostLayout(step.cluster)
        return self._layout

    def send_rank(self, step: Step, member: Member) -> None:
        step.out.send(self.current(member).connection, self.layout(step).make_rank_assigned(member))

    def send_assignments(self, step: Step) -> None:
        """Send `RankAssigned` to every connected member and `DesiredChildren` to every connected agent."""
        for member in self.members.values():
            if member.connection:
                self.send_rank(step, member)
        for agent in self.agents.values():
            self._send_children_of(step, agent)

    def send_desired_children(self, step: Step, agents: set[str]) -> None:
        """Send `DesiredChildren` to these agents, except those that were removed or are not connected."""
        for name in sorted(agents & self.agents.keys()):
            self._send_children_of(step, self.agents[name])

    def _send_children_of(self, step: Step, agent: AgentInfo) -> None:
        if agent.connection:
            step.out.send(agent.connection, self.layout(step).make_desired_children(agent))

    # -- members -----------------------------------------------------------------------------------------------------

    def add(self, member: Member, heartbeat_at: float = 0.0) -> Member:
        """Add a new member under its id and its rank, if it has one; return it with its uid. `heartbeat_at` 0: none yet."""
        self._last_uid += 1
        member = self._index(replace(member, uid=self._last_uid))
        self._heartbeats.add(member, heartbeat_at)
        return member

    def remove(self, member: Member) -> Member:
        """Remove a member; return its last record. The caller must close or ignore its connection."""
        member = self._unindex(member)
        self._heartbeats.forget(member)
        return member

    def _index(self, member: Member) -> Member:
        group, key = member.role.group, (member.role, member.node_id)
        assert key not in self.members and (group, member.rank) not in self._by_rank, f"{member} would be there twice"
        self.members[key] = member
        self._keys[member.uid] = key
        self._role_sizes[group] = self.size(group) + 1
        if member.agent:
            self._children_by_agent.setdefault(member.agent, []).append(member.uid)
        if member.rank >= 0:
            self._by_rank[(group, member.rank)] = member.uid
        self._layout = None
        return member

    def _unindex(self, member: Member) -> Member:
        member = self.members.pop(self._keys.pop(member.uid))
        group = member.role.group
        self._role_sizes[group] -= 1
        self._by_rank.pop((group, member.rank), None)
        if member.agent:
            self._children_by_agent[member.agent].remove(member.uid)
        self._layout = None
        return member

    def _change(self, member: Member, **changes: Any) -> Member:
        key = self._keys.get(member.uid)
        changed = replace(self.current(member), **changes)
        if key is not None:
            self.members[key] = changed
        return changed

    def _current_agent(self, agent: AgentInfo) -> AgentInfo:
        return self.agents[agent.id] if agent.uid in self._agent_ids else agent

    def _change_agent(self, agent: AgentInfo, **changes: Any) -> AgentInfo:
        changed = replace(self._current_agent(agent), **changes)
        if agent.uid in self._agent_ids:
            self.agents[agent.id] = changed
        return changed

    def set_ranks(self, ranks: Mapping[str, int]) -> None:
        """Set the ranks (by member name) and local ranks at formation, and mark all members as alive.

        The rank is also the member index and, for a child of an agent, the node id.
        """
        ranked = []
        for member in list(self.members.values()):
            member, rank = self._unindex(member), ranks[member.name]
            node_id = str(rank) if member.agent else member.node_id
            ranked.append(replace(member, rank=rank, member_index=rank, state=NodeState.ALIVE, node_id=node_id))
        for member in ranked:
            self._index(member)
        for group in {member.role.group for member in ranked}:
            local = assign_local_ranks(self.members_in_role(group))
            for member in self.members_in_role(group):
                self._change(member, local_rank=local[member.name])
        self.next_member_index = self.size(Role.WORKER)

    def change_rank(self, member: Member, rank: int) -> Member:
        return self._index(replace(self._unindex(member), rank=rank))

    def admit_node(self, registration: Register, node_id: str, now: float) -> Member:
        """Add a node without an agent that registered while the cluster forms, with the rank that its id claims, if any."""
        claim = parse_rank_claim(registration.node_id)
        member = self.add(_make_member(registration, node_id, rank=claim if claim is not None else -1))
        self._heartbeats.begin_life(member, now)
        return member

    def admit_joining_node(self, registration: Register, node_id: str, generation: int) -> Member:
        """Add a worker without an agent that registered after formation. It joins in `generation`, with the highest rank."""
        return self._add_last_worker(_make_member(registration, node_id), generation, 0.0)

    def admit_joining_child(self, agent: str, generation: int, now: float) -> Member:
        """Add a worker that an agent must start; it joins in `generation`, with the highest rank and its member index as
        node id."""
        member = Member(Role.WORKER, str(self._free_member_index()), "", self.agents[agent].host, agent=agent)
        return self._add_last_worker(member, generation, now)

    def _add_last_worker(self, member: Member, generation: int, now: float) -> Member:
        index, rank = self._free_member_index(), self.size(Role.WORKER)
        local_rank = find_free_local_rank(self.members_in_role(Role.WORKER), member.host)
        self.next_member_index = index + 1
        member = replace(
            member, rank=rank, member_index=index, local_rank=local_rank, state=NodeState.ALIVE, since_generation=generation
        )
        return self.add(member, now)

    def _free_member_index(self) -> int:
        index = max(self.next_member_index, self._settings.worker_num)
        while (Role.WORKER, str(index)) in self.members:  # a node chose that as its id
            index += 1
        return index

    def admit_server(self, agent: str, number: int, generation: int, now: float) -> Member:
        """Add a parameter server that an agent must start; `number` is its rank and its node id."""
        host = self.agents[agent].host
        local_rank = find_free_local_rank(self.members_in_role(Role.PSERVER), host)
        member = Member(
            Role.PSERVER, str(number), "", host, agent=agent, rank=number, member_index=number, local_rank=local_rank
        )
        member = self.add(replace(member, state=NodeState.ALIVE, since_generation=generation), now)
        self._heartbeats.begin_life(member, now)
        return member

    def admit_spare(self, agent: AgentInfo, now: float) -> Member:
        """Add a spare that an agent must start."""
        number = self.size(Role.SPARE)
        member = Member(Role.SPARE, str(number), "", agent.host, agent=agent.id, rank=number, member_index=number)
        return self.add(replace(member, state=NodeState.ALIVE), now)

    def admit_children(self, agent: AgentInfo) -> None:
        """Add the workers and servers of an agent while the cluster forms; its workers claim the ranks from its `first_rank`
        on, if that is not -1."""
        for role, count in ((Role.WORKER, agent.slots), (Role.PSERVER, agent.servers)):
            for slot in range(count):
                rank = agent.first_rank + slot if role is Role.WORKER and agent.first_rank >= 0 else -1
                self.add(Member(role, f"{agent.id}/{slot}", "", agent.host, agent=agent.id, rank=rank))

    def move_to_agent(self, member: Member, agent: AgentInfo) -> Member:
        """Move a child to this agent and its host, with a local rank that is free there."""
        member = self.current(member)
        others = (m for m in self.members_in_role(member.role) if m.uid != member.uid)
        local_rank = find_free_local_rank(others, agent.host)
        self._children_by_agent[member.agent].remove(member.uid)
        self._children_by_agent.setdefault(agent.id, []).append(member.uid)
        self._layout = None
        return self._change(member, local_rank=local_rank, agent=agent.id, host=agent.host)

    def admit_next_incarnation(self, member: Member, registration: Register, node_id: str, now: float) -> Member:
        """Replace the process of a dead member without an agent by a node that registered, as the next incarnation."""
        old = self._unindex(member)
        local_rank = old.local_rank
        if registration.host.id != old.host.id:
            local_rank = find_free_local_rank(self.members_in_role(old.role), registration.host)
        new = replace(
            old,
            role=registration.role,
            node_id=node_id,
            instance_id=registration.instance_id,
            host=registration.host,
            pid=registration.pid,
            local_rank=local_rank,
            incarnation=old.incarnation + 1,
            restarts=old.restarts + 1,
            ended_processes=old.ended_processes + 1,
            state=NodeState.ALIVE,
        )
        self._heartbeats.begin_life(new, now)
        return self._index(new)

    # -- agents ------------------------------------------------------------------------------------------------------

    def add_agent(self, registration: RegisterAgent) -> AgentInfo:
        """Add an agent. An earlier one with the same id is replaced, and its children belong to the new one."""
        if (earlier := self.agents.get(registration.agent)) is not None:
            self._forget_agent(earlier)
        self._last_uid += 1
        agent = AgentInfo(
            registration.agent,
            registration.instance_id,
            registration.host,
            registration.slots,
            registration.first_rank,
            registration.meet_port,
            registration.logs,
            registration.servers,
            registration.max_restarts,
            registration.spares,
            template_importing=registration.template_importing,
            uid=self._last_uid,
        )
        return self._index_agent(agent, 0.0)

    def _index_agent(self, agent: AgentInfo, heartbeat_at: float) -> AgentInfo:
        self.agents[agent.id] = agent
        self._agent_ids[agent.uid] = agent.id
        self._heartbeats.add(agent, heartbeat_at)
        return agent

    def remove_agent(self, agent: AgentInfo) -> None:
        self._forget_agent(self.agents.pop(agent.id))

    def _forget_agent(self, agent: AgentInfo) -> None:
        del self._agent_ids[agent.uid]
        self._heartbeats.forget(agent)

    def mark_template_ready(self, agent: AgentInfo) -> None:
        self._change_agent(agent, template_importing=False)

    def mark_agent_leaving(self, agent: AgentInfo) -> None:
        self._change_agent(agent, is_leaving=True)

    def limit_slots(self, agent: AgentInfo) -> AgentInfo:
        """Reduce the agent's slots to the number of its workers, so that no worker is started in place of a removed one."""
        workers = sum(m.role is Role.WORKER for m in self.children(agent.id))
        return self._change_agent(agent, slots=min(self._current_agent(agent).slots, workers))

    def mark_children_alive(self, agent: AgentInfo, now: float) -> None:
        """Mark the suspect children of a re-attached agent as alive, except connected ones."""
        for member in self.children(agent.id):  # connected ones send heartbeats; the agent reports those that exited
            if member.state is NodeState.SUSPECT and not member.connection:
                self._change(member, state=NodeState.ALIVE)
                self._heartbeats.note_heartbeat(member, now)

    def mark_host_gone(self, host_life: str) -> None:
        self.gone_hosts = (*self.gone_hosts, host_life)[-GONE_HOSTS_MAX:]

    # -- processes ---------------------------------------------------------------------------------------------------

    def prepare_next_incarnation(self, member: Member, now: float) -> Member:
        """Advance a child of a registered agent to its next incarnation, and ignore further messages of its old process."""
        old = self.current(member)
        self._by_connection.pop(old.connection, None)
        is_agent_connected = self.agents[old.agent].connection
        self._heartbeats.begin_life(old, now)
        return self._change(
            old,
            incarnation=old.incarnation + 1,
            restarts=old.restarts + 1,
            ended_processes=old.ended_processes + 1,
            instance_id="",
            connection=0,
            pid=0,
            leave_reason="",
            promoted_from="",
            state=NodeState.ALIVE if is_agent_connected else NodeState.SUSPECT,  # SUSPECT until the agent re-attaches
        )

    def reset_for_restart(self, member: Member, now: float) -> Member:
        """Advance a child to its next incarnation for a full restart; reset its deaths, ended processes, exception and
        member index."""
        old = self.current(member)
        self.prepare_next_incarnation(old, now)
        return self._change(
            old,
            handovers=old.handovers + (old.state is not NodeState.DEAD),  # not a failure unless it died
            deaths_without_progress=0,
            died_at_step=-2,
            error=None,
            ended_processes=0,
            member_index=old.rank,
        )

    def promote_spare(self, spare: Member, member: Member) -> int:
        """Make the process of a spare the process of this member, and mark the spare as left.

        Return the connection of the process, which the caller must attach to the member after the change was persisted.
        """
        spare = self.current(spare)
        self._change(member, promoted_from=f"{spare.name}.{spare.incarnation}", instance_id=spare.instance_id, pid=spare.pid)
        self._change(spare, handovers=spare.handovers + 1)
        self.vacate_spare(spare)
        return spare.connection

    def vacate_spare(self, spare: Member) -> Member:
        """Mark a spare as left, without a process or connection."""
        self._by_connection.pop(self.current(spare).connection, None)
        self._heartbeats.clear_progress(spare)
        return self._change(spare, instance_id="", connection=0, pid=0, state=NodeState.LEFT)

    def set_state(self, member: Member, state: NodeState) -> Member:
        return self._change(member, state=state)

    def set_pid(self, member: Member, pid: int) -> None:
        self._change(member, pid=pid)

    def set_leave_reason(self, member: Member, reason: str) -> None:
        """Record that the process of the member leaves on request, for this reason; its exit is not a failure."""
        self._change(member, leave_reason=reason)

    def set_error(self, member: Member, error: ScriptError | None) -> Member:
        return self._change(member, error=error)

    def set_deaths_without_progress(self, member: Member, count: int) -> Member:
        return self._change(member, deaths_without_progress=count)

    def count_failure(self, member: Member, highest_step: int) -> Member:
        """Count a death of the member; start over at 1 if `highest_step` is higher than it was at the member's last death."""
        member = self.current(member)
        deaths = member.deaths_without_progress + 1 if highest_step <= member.died_at_step else 1
        return self._change(member, deaths_without_progress=deaths, died_at_step=highest_step)

    def count_handover(self, member: Member) -> Member:
        return self._change(member, handovers=self.current(member).handovers + 1)

    # -- connections -------------------------------------------------------------------------------------------------

    def attach_member(self, connection: int, member: Member, now: float) -> Member:
        """Make this the connection of the member. This counts as a heartbeat."""
        self._by_connection[connection] = member.uid
        self._heartbeats.note_heartbeat(member, now)
        return self._change(member, connection=connection)

    def attach_agent(self, connection: int, agent: AgentInfo, now: float) -> AgentInfo:
        """Make this the connection of the agent. This counts as a heartbeat."""
        self._by_connection[connection] = agent.uid
        self._heartbeats.note_heartbeat(agent, now)
        return self._change_agent(agent, connection=connection)

    def identify(self, member: Member, registration: Register) -> Member:
        """Set the instance id, process id and host address of a member from its registration; keep the host's other fields."""
        host = replace(self.current(member).host, address=registration.host.address)
        return self._change(member, instance_id=registration.instance_id, pid=registration.pid, host=host)

    def forget_instance(self, member: Member) -> None:
        """Clear the instance id of a child that sent `Leave`; its agent will report the exit."""
        self._change(member, instance_id="")

    def detach(self, connection: int) -> Member | AgentInfo | None:
        """Remove a connection; return the new record of the member or agent that had it, or None if none had."""
        member, agent = self.member_at(connection), self.agent_at(connection)
        self._by_connection.pop(connection, None)
        if member is not None:
            return self._change(member, connection=0)
        return self._change_agent(agent, connection=0) if agent is not None else None

    def detach_member(self, member: Member) -> Member:
        self._by_connection.pop(self.current(member).connection, None)
        return self._change(member, connection=0)

    def ignore_connection(self, member: Member) -> None:
        """Ignore further messages on the member's connection. Messages can still be sent on it."""
        self._by_connection.pop(self.current(member).connection, None)

    def close_connection(self, connection: int, out: Outbox) -> None:
        """Ignore further messages on a connection and close it; do nothing for 0."""
        if connection:
            self._by_connection.pop(connection, None)
            out.close(connection)

    def close_member(self, member: Member, connection: int, out: Outbox) -> None:
        """Close a connection of a member, and detach it unless the member has another one by now."""
        self.close_connection(connection, out)
        if self.current(member).connection == connection:
            self._change(member, connection=0)

    def close_agent(self, agent: AgentInfo, out: Outbox) -> None:
        self.close_connection(self._current_agent(agent).connection, out)
        self._change_agent(agent, connection=0)

    # -- the journal -------------------------------------------------------------------------------------------------

    def restore_members(self, records: Sequence[Record], cluster: ClusterRecord, servers: Iterable[int], now: float) -> None:
        """Restore members and agents from the journal. Members that were present become suspect.

        Skip workers whose rank is not below the recorded world size (if there is one), and parameter servers whose rank is not
        in `servers`.
        """
        known_servers = set(servers)
        for record in records:
            if isinstance(record, AgentRecord):
                self._last_uid += 1
                self._index_agent(replace(record.to_agent(), uid=self._last_uid), now)
            elif isinstance(record, MemberRecord) and _is_current(record, cluster.world, known_servers):
                member = record.to_member()
                self.add(replace(member, state=NodeState.SUSPECT if member.is_present else member.state), now)

    def restore(self, record: ClusterRecord) -> None:
        self.gone_hosts, self.next_member_index = record.gone_hosts, record.next_member_index


def _make_member(registration: Register, node_id: str, rank: int = -1) -> Member:
    return Member(registration.role, node_id, registration.instance_id, registration.host, pid=registration.pid, rank=rank)


def _is_current(record: MemberRecord, world: int, servers: set[int]) -> bool:
    if record.role is Role.WORKER:
        return world < 0 or record.rank < world
    return record.role is not Role.PSERVER or record.rank in servers
