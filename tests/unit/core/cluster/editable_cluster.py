"""A cluster whose state a test sets directly, for tests of pure decisions and of single parts."""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.cluster.failure_detector import FailureDetector
from covey.core.cluster.heal_barrier import HealBarrier
from covey.core.cluster.incident_log import IncidentLog
from covey.core.cluster.members import Heartbeats, Members
from covey.core.cluster.recovery import Recovery
from covey.core.cluster.registration import Registration
from covey.core.cluster.resize import Resize
from covey.core.cluster.scheduler_machine import SchedulerMachine
from covey.core.cluster.server_resize import ServerResize, ServerResizeState
from covey.core.cluster.shutdown import Shutdown
from covey.core.cluster.state import BaseParts, ClusterState, Lifecycle, Outbox, Step
from covey.core.effects import SchedulerEffect
from covey.core.types import AgentInfo, ClusterSettings, Host, Member, NodeState, Phase, Progress, Role

HERE, THERE = Host("a", "host-a", "10.0.0.1"), Host("b", "host-b", "10.0.0.2")
INDEXED_FIELDS = frozenset({"role", "node_id", "rank", "agent"})  # a change of these changes the indexes over the members


class EditableCluster(ClusterState):
    """The parts of a cluster, their state, and methods that set it. Only tests write the fields of several parts.

    The parts are new, or those of a machine (`of`).
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        cluster_id: str = "c",
        job: str = "",
        machine: SchedulerMachine | None = None,
        **fields: Any,
    ) -> None:
        if machine is None:  # the parts alone, each with those below it
            self.lifecycle = Lifecycle(cluster_id, settings)
            self.heartbeats = Heartbeats(settings)
            self.table = Members(settings, self.heartbeats)
            self.incidents = IncidentLog(wall_zero=0.0)
            base = BaseParts(settings, self.lifecycle, self.heartbeats, self.table, self.incidents)
            self.barrier = HealBarrier(base)
            self.resize = Resize(base, self.barrier)
            self.server_resize = ServerResize(base)
            self.shutdown = Shutdown(base, self.resize)
            self.recovery = Recovery(base, self.barrier, self.resize, self.server_resize, self.shutdown)
            self.detector = FailureDetector(base, self.barrier, self.shutdown, self.recovery, now=0.0)
            self.registration = Registration(base, self.barrier, self.resize, self.shutdown, self.recovery, now=0.0)
        else:
            self.lifecycle, self.heartbeats, self.table = machine._lifecycle, machine._heartbeats, machine._members
            self.barrier, self.resize, self.server_resize = machine._barrier, machine._resize, machine._server_resize
            self.incidents, self.shutdown, self.recovery = machine.incidents, machine._shutdown, machine._recovery
            self.detector, self.registration = machine._detector, machine._registration
        base = BaseParts(settings, self.lifecycle, self.heartbeats, self.table, self.incidents)
        super().__init__(base, job, self.resize, self.server_resize, self.shutdown, self.registration)
        self.out = Outbox(self.record)
        self.set(**fields)

    @classmethod
    def of(cls, machine: SchedulerMachine) -> EditableCluster:
        """The state of this machine."""
        return cls(machine.cluster.settings, job=machine.cluster.job, machine=machine)

    def set(self, **fields: Any) -> None:
        """Set fields of the parts by the names under which `ClusterState` shows them."""
        owners = (self.lifecycle, self.table, self.resize, self.server_resize, self.shutdown, self.registration)
        for name, value in fields.items():
            if name == "rows_in_place":
                self.server_resize.state = ServerResizeState.STABLE if value else ServerResizeState.MOVING
                continue
            setattr(next(part for part in owners if name in vars(part)), name, value)
            if name == "joining_servers":
                self.server_resize.state = ServerResizeState.ARRIVING if value else ServerResizeState.STABLE

    def add(self, member: Member, *, progress: Progress | None = None, last_heartbeat_at: float = 0.0) -> Member:
        """Add a member; returns it with its uid."""
        member = self.table.add(member, last_heartbeat_at)
        if progress is not None:
            self.heartbeats.note_progress(member, progress, last_heartbeat_at)
        if member.connection:
            self.table.attach_member(member.connection, member, last_heartbeat_at)
        return member

    def add_agent(self, agent: AgentInfo, *, last_heartbeat_at: float = 0.0) -> AgentInfo:
        """Add an agent, in place of an earlier one of the same name; returns it with its uid."""
        self.remove_agent(agent.id)
        self.table._last_uid += 1
        agent = self.table._index_agent(msgspec.structs.replace(agent, uid=self.table._last_uid), last_heartbeat_at)
        return self.table.attach_agent(agent.connection, agent, last_heartbeat_at) if agent.connection else agent

    def remove_agent(self, agent: str) -> None:
        """Remove an agent, if it is known; its children stay."""
        if agent in self.agents:
            self.table.remove_agent(self.agents[agent])

    def worker(self, node_id: str) -> Member:
        """The current record of a worker."""
        return self.members[(Role.WORKER, node_id)]

    def change(self, member: Member, **changes: Any) -> Member:
        """Replace fields of a member's record; returns the new record."""
        if changes.keys() & INDEXED_FIELDS:
            return self.table._index(msgspec.structs.replace(self.table._unindex(member), **changes))
        return self.table._change(member, **changes)

    def change_agent(self, agent: str, **changes: Any) -> AgentInfo:
        """Replace fields of an agent's record; returns the new record."""
        return self.table._change_agent(self.agents[agent], **changes)

    def step(self, now: float = 0.0) -> Step:
        """A step for calling a part; its effects are in `self.out`."""
        return Step(now, self, self.out)

    def take_effects(self) -> list[SchedulerEffect]:
        """The effects since the last call, in order."""
        return self.out.take_effects()


def training_cluster(*rungs: str, servers: int = 0, connected: bool = False, **settings: Any) -> EditableCluster:
    """Two hosts with two workers each, all in a training; servers on the first. The connections of the agents are 1 and 2;
    where members are connected, those of workers are 10, 11, ... and those of servers 20, 21, ..."""
    made = EditableCluster(ClusterSettings(4, servers, strategies=rungs, **settings), phase=Phase.READY, generation=1)
    made.set(trains=True, heals=True, has_row_copies=True)
    made.barrier.open_generation(1)
    for name, host, connection in (("a", HERE, 1), ("b", THERE, 2)):
        offered = servers if name == "a" else 0
        made.add_agent(AgentInfo(name, f"life of {name}", host, 2, connection=connection, servers=offered))
    places = [(Role.WORKER, rank, *(("a", HERE) if rank < 2 else ("b", THERE))) for rank in range(4)]
    for role, rank, agent, host in places + [(Role.PSERVER, rank, "a", HERE) for rank in range(servers)]:
        connection, pid = (10 + rank, 1) if role is Role.WORKER else (20 + rank, 0)
        member = Member(role, str(rank), f"life of {role}:{rank}", host, rank=rank, member_index=rank, agent=agent, pid=pid)
        member = made.add(msgspec.structs.replace(member, state=NodeState.ALIVE, connection=connection if connected else 0))
    return made
