"""State shared by the parts of the scheduler's state machine.

`Step` has the time, the readable state and the outbox for one event; it is not a step of the training. `Outbox` collects the
effects of the event in order. `Lifecycle` owns the phase and the generation. `ClusterState` is a read-only view of the parts,
from which pure functions decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from covey.core.effects import Close, EndCluster, Level, Persist, PublishEvent, SchedulerEffect, Send
from covey.core.incidents import Outcome
from covey.core.parameter_server.sharding import ServerRanks, Sharding
from covey.core.types import (
    AgentInfo,
    ClusterRecord,
    ClusterSettings,
    Ended,
    FullRestart,
    Member,
    NodeState,
    Phase,
    Record,
    Role,
)

if TYPE_CHECKING:
    from covey.core.cluster.incident_log import IncidentLog
    from covey.core.cluster.members import Heartbeats, MemberKey, Members
    from covey.core.cluster.registration import Registration
    from covey.core.cluster.resize import Resize
    from covey.core.cluster.server_resize import ServerResize
    from covey.core.cluster.shutdown import Shutdown

CAUSE_MAX = 1000  # characters of a full restart's cause
NEVER = float("inf")
PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.READY, Phase.ENDED, Phase.RETURNING}),
    Phase.READY: frozenset({Phase.HEALING, Phase.ENDED}),
    Phase.HEALING: frozenset({Phase.READY, Phase.ENDED}),
    Phase.RETURNING: frozenset({Phase.READY, Phase.HEALING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Outbox:
    """Effects of the event that is being handled, in order; and counters for metrics."""

    def __init__(self, make_cluster_record: Callable[[], ClusterRecord]) -> None:
        self._make_cluster_record = make_cluster_record
        self._effects: list[SchedulerEffect] = []
        self.counters: dict[str, float] = {}

    def send(self, connection: int, message: Any) -> None:
        self._effects.append(Send(message, connection))

    def close(self, connection: int) -> None:
        self._effects.append(Close(connection))

    def persist(self, record: Record) -> None:
        self._effects.append(Persist(record))

    def persist_cluster(self) -> None:
        self._effects.append(Persist(self._make_cluster_record()))  # the state at the time of this call

    def publish(self, node: str, what: str, reason: str, level: Level = Level.NOTE, *, outcome: Outcome | None = None) -> None:
        self._effects.append(PublishEvent(node, what, reason, level, outcome))

    def end(self, ended: Ended) -> None:
        self._effects.append(EndCluster(ended.code, ended.reason, ended.failure))

    def count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def take_effects(self) -> list[SchedulerEffect]:
        """Return the effects collected since the last call, and clear them."""
        effects, self._effects = self._effects, []
        return effects


class Step(msgspec.Struct, frozen=True):
    """Argument of the handlers: the time, the state they may read, and the outbox for their effects."""

    now: float  # seconds on the machine's clock
    cluster: ClusterState
    out: Outbox


class BaseParts(msgspec.Struct, frozen=True):
    """The settings, and the parts that all parts constructed later may call."""

    settings: ClusterSettings
    lifecycle: Lifecycle
    heartbeats: Heartbeats
    members: Members
    incidents: IncidentLog


class Lifecycle:
    """The phase of the cluster and its reason, the generation, the full restarts, and what is known about the script."""

    def __init__(self, cluster_id: str, settings: ClusterSettings) -> None:
        self._settings = settings
        self.cluster_id = cluster_id
        self.phase = Phase.FORMING
        self.reason = "waiting for the first node"
        self.generation = 0  # 0: the cluster has not formed
        self.resized_generation = 0  # the generation in which the world size last changed; 0: never
        self.restarts = 0  # full restarts by the agents
        self.full_restart: FullRestart | None = None  # the newest one; None: there was none
        self.heals = False  # a child of an agent has called covey.init(), so a single worker of an agent can be replaced
        self.trains = False  # a covey.Loop has reported progress since this was last reset; required for a resize
        self.highest_step = -1  # highest step reported to this scheduler since the agents last restarted all workers; -1: none
        self.heal_deadline = NEVER  # time after which members that are still absent in HEALING or RETURNING end the cluster

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def is_restarting(self) -> bool:
        """Whether ranks have yet to resume after the newest full restart; False if there was none."""
        return self.full_restart is not None and not self.full_restart.resumed

    def set_phase(self, phase: Phase, reason: str) -> None:
        assert phase in PHASE_TRANSITIONS[self.phase], f"no transition from {self.phase} to {phase}"
        self.phase, self.reason = phase, reason

    def set_reason(self, reason: str) -> None:
        self.reason = reason

    def begin_healing(self, reason: str, now: float) -> None:
        """Enter HEALING for `reason`, and set its deadline to `topo_timeout_s` from now (`NEVER` if that is negative).

        If the cluster is HEALING already, only the deadline changes.
        """
        self.renew_heal_deadline(now)
        if self.phase is not Phase.HEALING:
            self.set_phase(Phase.HEALING, reason)

    def renew_heal_deadline(self, now: float) -> None:
        limit = self._settings.topo_timeout_s
        self.heal_deadline = now + limit if limit >= 0 else NEVER

    def advance_generation(self) -> int:
        self.generation += 1
        return self.generation

    def note_resize(self) -> None:
        """Record that the next generation has another world size."""
        self.resized_generation = self.generation + 1

    def note_init(self) -> bool:
        """Record that a child of an agent called covey.init(); return whether that was not known before."""
        is_first, self.heals = not self.heals, True
        return is_first

    def note_loop(self) -> bool:
        """Record that a covey.Loop has reported progress; return whether `trains` was false before."""
        is_first, self.trains = not self.trains, True
        return is_first

    def note_step(self, step: int) -> None:
        self.highest_step = max(self.highest_step, step)

    def note_full_restart(self, cause: str) -> None:
        """Record a full restart (from a checkpoint or from step 0). The caller persists the cluster."""
        before = self.full_restart
        self.full_restart = FullRestart(before.count + 1 if before else 1, cause[:CAUSE_MAX])

    def note_restart_step(self, step: int) -> bool:
        """Record `step` as the step from which the loops started after the newest full restart; return whether it was recorded.

        It is recorded only if there was a full restart, its step is not known yet, and `step` is not negative.
        """
        if self.full_restart is None or not self.full_restart.step < 0 <= step:
            return False
        self.full_restart = msgspec.structs.replace(self.full_restart, step=step)
        return True

    def note_restart_resumed(self) -> bool:
        """Record that all ranks have resumed; return whether that completed a full restart."""
        if self.full_restart is None or self.full_restart.resumed:
            return False
        self.full_restart = msgspec.structs.replace(self.full_restart, resumed=True)
        return True

    def note_state_lost(self, cause: str) -> None:
        """Record a full restart because no rank holds the training state; reset `trains`. The caller persists the cluster."""
        self.trains = False
        self.note_full_restart(cause)

    def reset_for_restart(self, cause: str) -> None:
        """Record a full restart by the agents and reset `trains` and `highest_step`. The caller persists the cluster."""
        self.note_full_restart(cause)
        self.restarts += 1
        self.trains, self.highest_step = False, -1

    def postpone(self, by_s: float) -> None:
        self.heal_deadline += by_s

    def restore(self, record: ClusterRecord) -> None:
        """Restore the fields that the journal stores, except the phase."""
        self.cluster_id, self.generation, self.restarts = record.cluster_id, record.generation, record.restarts
        self.resized_generation, self.heals, self.trains = record.resized_generation, record.heals, record.trains
        self.full_restart = record.full_restart


class ClusterState:
    """Read-only view of the settings and of the parts of the scheduler's state machine, for decisions."""

    def __init__(
        self,
        base: BaseParts,
        job: str,
        resize: Resize,
        server_resize: ServerResize,
        shutdown: Shutdown,
        registration: Registration,
    ) -> None:
        members, heartbeats = base.members, base.heartbeats
        self.settings, self.job = base.settings, job
        self._lifecycle, self._members, self._resize = base.lifecycle, members, resize
        self._server_resize, self._shutdown, self._registration = server_resize, shutdown, registration
        self.members: Mapping[MemberKey, Member] = members.members
        self.agents: Mapping[str, AgentInfo] = members.agents
        self.current = members.current
        self.members_in_role = members.members_in_role
        self.members_without_spares = members.members_without_spares
        self.size = members.size
        self.member_at_rank = members.member_at_rank
        self.children = members.children
        self.progress = heartbeats.progress
        self.last_heartbeat_at = heartbeats.last_heartbeat_at

    # -- of Lifecycle ------------------------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        return self._lifecycle.cluster_id

    @property
    def phase(self) -> Phase:
        return self._lifecycle.phase

    @property
    def has_ended(self) -> bool:
        return self._lifecycle.has_ended

    @property
    def reason(self) -> str:
        return self._lifecycle.reason

    @property
    def generation(self) -> int:
        return self._lifecycle.generation

    @property
    def resized_generation(self) -> int:
        return self._lifecycle.resized_generation

    @property
    def restarts(self) -> int:
        return self._lifecycle.restarts

    @property
    def full_restart(self) -> FullRestart | None:
        return self._lifecycle.full_restart

    @property
    def heals(self) -> bool:
        return self._lifecycle.heals

    @property
    def trains(self) -> bool:
        return self._lifecycle.trains

    # -- of Members --------------------------------------------------------------------------------------------------

    @property
    def gone_hosts(self) -> tuple[str, ...]:
        return self._members.gone_hosts

    @property
    def next_member_index(self) -> int:
        return self._members.next_member_index

    def free_slots_by_agent(self, role: Role) -> dict[str, int]:
        """Return the number of free slots for workers (role WORKER) or parameter servers (role PSERVER), by agent id.

        Agents that have none, are leaving or are not connected are omitted. A child occupies a slot unless it is dead.
        """
        found = {}
        for agent in self.agents.values():
            slots = agent.slots if role is Role.WORKER else agent.servers
            children = self.children(agent.id)
            free = slots - sum(m.role.group is role.group and m.state is not NodeState.DEAD for m in children)
            if agent.connection and not agent.is_leaving and free > 0:
                found[agent.id] = free
        return found

    # -- of Registration ---------------------------------------------------------------------------------------------

    @property
    def last_refusal(self) -> str:
        return self._registration.last_refusal

    # -- of Resize ---------------------------------------------------------------------------------------------------

    @property
    def requested_workers(self) -> int:
        return self._resize.requested_workers

    @property
    def departing_ids(self) -> tuple[str, ...]:
        return self._resize.departing_ids

    @property
    def joining_ids(self) -> tuple[str, ...]:
        return self._resize.joining_ids

    @property
    def target_workers(self) -> int:
        return self.requested_workers or self.settings.default_target_workers

    # -- of ServerResize -----------------------------------------------------------------------------------------------

    @property
    def sharding(self) -> Sharding | None:
        return self._server_resize.sharding

    @property
    def is_resharding(self) -> bool:
        return self._server_resize.is_resharding

    @property
    def joining_servers(self) -> ServerRanks:
        return self._server_resize.joining_servers

    @property
    def rows_in_place(self) -> bool:
        return self._server_resize.rows_in_place

    @property
    def has_row_copies(self) -> bool | None:
        return self._server_resize.has_row_copies

    @property
    def next_server_number(self) -> int:
        return self._server_resize.next_server_number

    @property
    def current_sharding(self) -> Sharding:
        return self._server_resize.current_sharding

    @property
    def rows_survive_death(self) -> bool:
        return self._server_resize.rows_survive_death

    # -- of Shutdown -------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> Ended | None:
        return self._shutdown.ended

    @property
    def planned_end(self) -> Ended | None:
        return self._shutdown.planned_end

    # -- the journal -------------------------------------------------------------------------------------------------

    def record(self) -> ClusterRecord:
        """Return the record of the cluster for the journal."""
        return ClusterRecord(
            worker_num=self.settings.worker_num,
            server_num=self.settings.server_num,
            world=self.size(Role.WORKER) if self.resized_generation else -1,
            **{name: getattr(self, name) for name in RECORDED_FIELDS},
        )


RECORDED_FIELDS = tuple(name for name in ClusterRecord.__struct_fields__ if name not in ("worker_num", "server_num", "world"))
