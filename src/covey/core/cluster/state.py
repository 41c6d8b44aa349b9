"""The cluster as the scheduler knows it: its settings, its phase, and its members found by id or by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.cluster import ranks
from covey.core.parameter_server.sharding import ServerRanks, Sharding, initial_sharding
from covey.core.types import (
    AgentInfo,
    AgentRecord,
    ClusterRecord,
    ClusterSettings,
    Ended,
    FullRestart,
    Member,
    MemberRecord,
    NodeState,
    Phase,
    Record,
    Role,
)

MemberKey = tuple[Role, str]  # role and node id


class ClusterState(msgspec.Struct):
    """Everything the scheduler knows. Only `machine.Machine` changes it; members come and go through `add` and `remove`."""

    cluster_id: str
    settings: ClusterSettings
    job: str = ""
    phase: Phase = Phase.FORMING
    reason: str = "waiting for the first node"
    last_refusal: str = ""  # who was, last, while it forms, and why: the others wait for one that will not come
    generation: int = 0
    restarts: int = 0
    resized: int = 0  # the generation in which the world last changed its size
    next_seat: int = -1  # for who comes after formation; -1: the first
    heals: bool = False  # its program calls covey.init(): workers can wait for a replacement, and be one
    asked: int = 0  # the number of workers that was asked for last, if any was
    trains: bool = False  # a loop has finished a step in this start of everyone: from then on the world may change its size
    sharing: Sharding | None = None  # of the parameter servers' rows, once it has changed
    coming: ServerRanks = ()  # parameter servers that rows are not yet shared with
    moved: bool = True  # every row is where the sharing says
    copied: bool | None = None  # whether a server's rows outlive it, once servers have come or gone
    next_server: int = -1  # for who comes after formation; -1: the first
    ended: Ended | None = None
    gone: tuple[str, ...] = ()  # lives of hosts that are said to be over: nobody of them may come back
    going: tuple[str, ...] = ()  # ids of workers that are to leave when all go on without those who leave now
    dumping: Ended | None = None  # how it ends once its ranks have written down what they hold
    arriving: tuple[str, ...] = ()  # ids of workers that a growth waits for
    full_restart: FullRestart | None = None  # the newest; None if there was none
    members: dict[MemberKey, Member] = {}
    agents: dict[str, AgentInfo] = {}
    _members_by_rank: dict[tuple[Role, int], Member] = {}
    _role_sizes: dict[Role, int] = {}
    _children_by_agent: dict[str, list[Member]] = {}  # by agent

    def add(self, member: Member) -> None:
        """Take a member in, under its id and, where it has one, its rank."""
        group, key = member.role.group, (member.role, member.node_id)
        assert key not in self.members and (group, member.rank) not in self._members_by_rank, f"{member} would be there twice"
        self.members[key] = member
        self._role_sizes[group] = self.size(group) + 1
        if member.agent:
            self._children_by_agent.setdefault(member.agent, []).append(member)
        if member.rank >= 0:
            self._members_by_rank[(group, member.rank)] = member

    def remove(self, member: Member) -> None:
        """Let a member go, before its id or rank changes."""
        group = member.role.group
        del self.members[(member.role, member.node_id)]
        self._role_sizes[group] -= 1
        self._members_by_rank.pop((group, member.rank), None)
        if member.agent:
            self._children_by_agent[member.agent].remove(member)

    def move_to_agent(self, member: Member, agent: AgentInfo) -> None:
        """Give a child to another agent."""
        self._children_by_agent[member.agent].remove(member)
        self._children_by_agent.setdefault(agent.id, []).append(member)
        member.agent, member.host = agent.id, agent.host

    def assign_ranks(self, places: Mapping[str, int]) -> None:
        """Give everyone its rank (by name) and its local rank; a child is called by its rank from now on."""
        everyone = list(self.members.values())
        for member in everyone:
            self.remove(member)
            member.rank, member.state = places[member.name], NodeState.ALIVE
            member.seat = member.rank
            if member.agent:
                member.node_id = str(member.rank)
        for member in everyone:
            self.add(member)
        for group in {member.role.group for member in everyone}:
            local = ranks.assign_local_ranks(self.members_in_role(group))
            for member in self.members_in_role(group):
                member.local_rank = local[member.name]

    def restore_members(self, records: Sequence[Record], now: float) -> None:
        """The members and agents of the journal: whoever was there is suspect until it is heard."""
        world = next((record.world for record in records if isinstance(record, ClusterRecord)), -1)
        for record in records:
            if isinstance(record, AgentRecord):
                agent = record.to_agent()
                agent.last_heartbeat_at = now
                self.agents[agent.id] = agent
            elif isinstance(record, MemberRecord) and self._is_current_record(record, world):
                member = record.to_member()
                member.last_heartbeat_at = now
                if member.is_present:
                    member.state = NodeState.SUSPECT
                self.add(member)

    def _is_current_record(self, record: MemberRecord, world: int) -> bool:
        """Whether a member of the journal is one still."""
        if record.role is Role.WORKER:
            return world < 0 or record.rank < world
        return record.role is not Role.PSERVER or record.rank in {*self.current_sharding.servers, *self.coming}

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def current_sharding(self) -> Sharding:
        return self.sharing or initial_sharding(self.settings.server_num)

    @property
    def is_resharding(self) -> bool:
        """Whether parameter servers come or go."""
        return bool(self.coming) or not self.moved

    @property
    def rows_survive_death(self) -> bool:
        """Whether a parameter server's rows outlive it: one alone has nobody to hold their copy."""
        return self.settings.copies > 0 and self.settings.server_num > 1 if self.copied is None else self.copied

    def members_in_role(self, role: Role) -> list[Member]:
        """The members that count towards the number of this role."""
        return [member for member in self.members.values() if member.role.group is role.group]

    def members_without_spares(self) -> list[Member]:
        """Everyone but the spares, on whom nothing depends."""
        return [member for member in self.members.values() if member.role is not Role.SPARE]

    def size(self, role: Role) -> int:
        return self._role_sizes.get(role.group, 0)

    @property
    def target_workers(self) -> int:
        """How many workers there should be, as soon as there are hosts for them."""
        return self.asked or self.settings.default_target_workers

    def free_slots_by_agent(self, role: Role) -> dict[str, int]:
        """By agent: how many members of a role it could start beyond those it has, of what it came with."""
        found = {}
        for agent in self.agents.values():
            places = agent.slots if role is Role.WORKER else agent.servers
            held = [m for m in self.children(agent.id) if m.role.group is role.group and m.state is not NodeState.DEAD]
            free = places - len(held)
            if agent.connection and not agent.is_leaving and free > 0:
                found[agent.id] = free
        return found

    def member_at_rank(self, role: Role, rank: int) -> Member | None:
        """Who holds this rank, or claims it before the cluster has formed."""
        return self._members_by_rank.get((role.group, rank))

    def children(self, agent: str) -> list[Member]:
        return list(self._children_by_agent.get(agent, ()))

    def record(self) -> ClusterRecord:
        """The cluster as the journal keeps it."""
        settings = self.settings
        return ClusterRecord(
            job=self.job,
            worker_num=settings.worker_num,
            server_num=settings.server_num,
            phase=self.phase,
            world=self.size(Role.WORKER) if self.resized else -1,
            ended=self.ended,
            **{name: getattr(self, name) for name in RECORDED_FIELDS},
        )

    def restore_fields(self, record: ClusterRecord) -> None:
        """What the journal keeps, but for the phase: what follows from that is the machine's to decide."""
        for name in RECORDED_FIELDS:
            setattr(self, name, getattr(record, name))


# What a cluster and its record call by the same name, and a scheduler that comes back goes on with.
RECORDED_FIELDS = tuple(
    name
    for name in ClusterRecord.__struct_fields__
    if name in ClusterState.__struct_fields__ and name not in ("job", "phase", "ended")
)
