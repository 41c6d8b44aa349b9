"""What the scheduler's machine remembers of its cluster, and the small moves by which that changes.

A cluster lives through phases: FORMING until every role has its number, then READY; a death moves it to HEALING (when the
place may be filled again), to a new generation of everyone (torchrun's restarts) or to ENDED. A restarted scheduler is
RETURNING until its members have re-attached or are overdue. The table `PHASE_TRANSITIONS` lists the moves that exist; any other
is a bug.

The machine is one object, cut into rooms that each know only those before them: the `Ledger` here, `resizing` (the world
changes its size), `sharing` (parameter servers come and go), `spares` (who waits to stand in), `lifecycle` (forming, dying,
healing, coming back, ending), `watch` (what follows from time alone), `joining` (who comes, and as whom), `asking` (what
visitors want) and `machine` (what members say, and the door to it all).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from covey.core.cluster import formation
from covey.core.cluster.heal_plan import DumpInProgress, HealBarrier
from covey.core.cluster.rendezvous import RendezvousStore
from covey.core.cluster.state import ClusterState
from covey.core.effects import Close, EndCluster, Level, Persist, PublishEvent, SchedulerEffect, Send
from covey.core.incidents import Incidents, Outcome
from covey.core.messages import ClusterEnded, NewGeneration, Refused, RequestAccepted, ScaleAccepted
from covey.core.types import (
    AgentInfo,
    ClusterSettings,
    Ended,
    Failure,
    FullRestart,
    Member,
    MemberRecord,
    NodeState,
    Phase,
    Progress,
    Record,
    Role,
)

CAUSE_MAX = 1000  # characters of a full restart's reason
PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.READY, Phase.ENDED, Phase.RETURNING}),
    Phase.READY: frozenset({Phase.HEALING, Phase.ENDED}),
    Phase.HEALING: frozenset({Phase.READY, Phase.ENDED}),
    Phase.RETURNING: frozenset({Phase.READY, Phase.HEALING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
NEVER = float("inf")
END_DELIVERY_S = 30.0  # how long members out of reach may take to come and hear of the end, where their silence has no limit
FIRST_PROGRESS_S = (
    30.0  # until its first sign of progress a life imports, builds and restores: it is not called stuck before this
)


class Deadlines(msgspec.Struct):
    """By when something is to have happened; what nobody waits for has none."""

    last_call: float = NEVER  # a last call for more workers than are needed
    heal: float = NEVER  # every place is filled, and heard
    shrink: float = NEVER  # a host came for who is lost
    joining_workers: float = NEVER  # those of a growth have come
    joining_servers: float = NEVER  # those of a growth have come
    resume: float = NEVER  # all others go on, though somebody left before it said so

    def postpone(self, by_s: float) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + by_s)


class Ledger:
    """The cluster, the links that speak for its members, and what is wished for in this step."""

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float, wall: float) -> None:
        self.cluster = ClusterState(cluster_id=cluster_id, settings=settings, job=job)
        self.counters: dict[str, float] = {}
        self.incidents = Incidents(wall - now)
        self.last_reply: ScaleAccepted | RequestAccepted | Refused = Refused(
            "nothing was asked for"
        )  # to a visitor's last wish
        self.first_failure: Failure | None = None
        self._forming_since = self._last_tick_at = self._now = now
        self._deadlines = Deadlines()
        self._by_connection: dict[int, Member | AgentInfo] = {}
        self._deferred_instances: set[str] = set()  # lives that are held off, to say so once
        self._rendezvous = RendezvousStore()
        self._heal_barrier = HealBarrier(0)
        self._dump: DumpInProgress | None = None
        self._newest_dump = (-1, "")  # the newest step that somebody has written down on its way out, and where
        self._highest_step = -1  # the highest step that any rank has shown
        self._last_rollback_step = -2  # what had been reached at the last return to a checkpoint
        self._collective_retries = 0  # since all ranks last went on
        self._replacement_running = False  # a rank was started again, and not all ranks have gone on since
        self._group_formed = False  # a group has met: only then will ranks say that they have gone on
        self._servers_in_sync: set[int] = set()  # parameter servers where all is in its place, by the sharing of now
        self._layout: formation.HostLayout | None = None
        self._unfinished_worker: Member | None = None  # a worker that has not left
        self._suspect_member: Member | None = None  # a place that was not heard when it was last asked
        self._end_message: ClusterEnded | None = None
        self._end_undelivered: set[str] | None = (
            None  # lives that have not heard of the end, for as long as they are waited for
        )
        self._end_delivery_deadline = NEVER
        self._effects: list[SchedulerEffect] = []

    # -- places ------------------------------------------------------------------------------------------------------

    def _send_assignments(self) -> None:
        places = self._current_layout()
        for member in self.cluster.members.values():
            if member.connection:
                self._send(member.connection, places.make_rank_assigned(member))
        for agent in self.cluster.agents.values():
            if agent.connection:
                self._send(agent.connection, places.make_desired_children(agent))

    def _current_layout(self) -> formation.HostLayout:
        if self._layout is None:
            self._layout = formation.HostLayout(self.cluster)
        return self._layout

    def _send_desired_children(self, agents: set[str]) -> None:
        for name in sorted(agents & self.cluster.agents.keys()):
            agent = self.cluster.agents[name]
            if agent.connection:
                self._send(agent.connection, self._current_layout().make_desired_children(agent))

    # -- lives and generations ---------------------------------------------------------------------------------------

    def _reset_progress(self, member: Member) -> None:
        """Nothing of the life before it counts for its progress, and it has time until it must show some."""
        member.progress = Progress()
        member.progress_changed_at = self._now + max(0.0, FIRST_PROGRESS_S - self.cluster.settings.stuck_s)

    def _prepare_next_incarnation(self, member: Member) -> None:
        """A child's place, ready for the next process. The old one is ended by its agent, and need not learn it from us."""
        self._by_connection.pop(member.connection, None)
        member.incarnation += 1
        member.restarts += 1
        member.lives += 1
        member.life, member.connection, member.pid, member.leave_reason, member.process = "", 0, 0, "", ""
        self._reset_progress(member)
        here = self.cluster.agents[member.agent].connection
        member.state = NodeState.ALIVE if here else NodeState.SUSPECT  # until its agent is back

    def _bind_connection(self, link: int, speaker: Member | AgentInfo) -> None:
        speaker.connection = link
        speaker.last_heartbeat_at = self._now
        self._by_connection[link] = speaker

    def _drop_connection(self, link: int) -> None:
        """What this link says no longer counts, and it is closed."""
        if link:
            self._by_connection.pop(link, None)
            self._effects.append(Close(link))

    def _disconnect_agent(self, agent: AgentInfo) -> None:
        self._drop_connection(agent.connection)
        agent.connection = 0

    def _start_generation(self, reason: str, *changed: Member) -> None:
        """A new generation: durable first, then whoever changed, then told to the members that were there before."""
        self._advance_generation(*changed)
        news = NewGeneration(self.cluster.generation, reason)
        for member in self.cluster.members.values():
            if member.connection and member.is_present:
                self._send(member.connection, news)

    def _advance_generation(self, *changed: Member) -> None:
        self.cluster.generation += 1
        self._rendezvous = RendezvousStore()
        self._heal_barrier = HealBarrier(self.cluster.generation)
        self._persist(self.cluster.record())
        for member in changed:
            self._persist(MemberRecord.from_member(member))

    def _begin_healing(self, reason: str) -> None:
        """Places are empty, or ranks have yet to agree: that may take so long, from now."""
        self._renew_heal_deadline()
        if self.cluster.phase is not Phase.HEALING:
            self._set_phase(Phase.HEALING, reason)

    def _renew_heal_deadline(self) -> None:
        limit = self.cluster.settings.topo_timeout_s
        self._deadlines.heal = self._now + limit if limit >= 0 else NEVER

    def _all_resumed(self) -> bool:
        return len(self._heal_barrier.resumed) == self.cluster.size(Role.WORKER)

    # -- incidents and the end ---------------------------------------------------------------------------------------

    def _open_incident(
        self,
        strategy: str,
        reason: str,
        cause: str,
        *,
        since: float,
        known: float,
        member: Member | None = None,
        node: str = "cluster",
    ) -> None:
        node, rank = (member.name, member.rank) if member is not None else (node, -1)
        incident = self.incidents.open(
            self._now, since=since, known=known, node=node, rank=rank, cause=cause, strategy=strategy, reason=reason
        )
        self._persist(incident)

    def _close_incidents(self, outcome: Outcome, node: str = "", reason: str = "") -> None:
        unfinished = "scale-in" if self.cluster.going and outcome in (Outcome.RESUMED, Outcome.RESTARTED) else ""
        for incident in self.incidents.close(outcome, self._now, node, but=unfinished, reason=reason):
            self._persist(incident)
            self._publish("cluster", "recovery", str(incident), outcome=incident.outcome)

    def _close_incidents_if_resumed(self) -> None:
        """Close the incidents as resumed, unless a rank that an exception ended has not made progress since: its script may
        raise it again."""
        if all(member.error is None for member in self.cluster.members_in_role(Role.WORKER)):
            self._close_incidents(Outcome.RESUMED)

    def _note_full_restart(self, cause: str) -> None:
        """Count a start of all ranks from a checkpoint or from step 0. The caller persists the cluster."""
        before = self.cluster.full_restart
        self.cluster.full_restart = FullRestart(before.count + 1 if before else 1, cause[:CAUSE_MAX])

    @property
    def _is_restarting(self) -> bool:
        """Whether not all ranks have resumed since the newest full restart."""
        return self.cluster.full_restart is not None and not self.cluster.full_restart.resumed

    def _end_cluster(self, code: int, reason: str, failure: Failure | None = None) -> None:
        if self.cluster.full_restart is not None:
            reason = f"{reason}; {self.cluster.full_restart}"
        self._close_incidents(Outcome.ENDED if code else Outcome.FINISHED)
        self._end_message = ClusterEnded(reason, code, failure)
        self.cluster.arriving = ()
        self._set_phase(Phase.ENDED, reason)
        self.cluster.ended = Ended(code, reason, failure)
        self._persist(self.cluster.record())
        self._publish("cluster", "ended", reason, Level.from_exit_code(code))
        children_first = sorted(self._by_connection, key=lambda link: isinstance(self._by_connection[link], AgentInfo))
        for link in children_first:  # so that they hear why before their agent ends them
            self._send(link, self._end_message)
        self._await_end_delivery({life for life, at_work in self._list_unreachable() if at_work})

    @property
    def _end_delivery_s(self) -> float:
        limit = self.cluster.settings.node_timeout_s
        return limit if limit >= 0 else END_DELIVERY_S

    def _list_unreachable(self) -> Iterator[tuple[str, bool]]:
        """The lives of those who were lost a short while ago, each with whether it is at work."""
        since = self._now - self._end_delivery_s
        for member in self.cluster.members.values():
            if member.is_present and not member.agent and not member.connection and member.last_heartbeat_at > since:
                yield member.life, True
        for agent in self.cluster.agents.values():
            children = self.cluster.children(agent.id)
            known = any(child.state is not NodeState.DEAD for child in children)
            if known and not agent.connection and agent.last_heartbeat_at > since:
                yield agent.life, any(child.is_present for child in children)

    def _await_end_delivery(self, untold: set[str]) -> None:
        """Members out of reach call again soon: they hear it then, and until then there is somebody to call."""
        self._end_undelivered, self._end_delivery_deadline = untold, self._now + self._end_delivery_s
        self._mark_end_delivered("")

    def _mark_end_delivered(self, life: str) -> None:
        """Somebody has heard of the end; nobody is left: that is all."""
        if self._end_undelivered is not None:
            self._end_undelivered.discard(life)
            if not self._end_undelivered:
                self._finish_end_delivery()

    def _finish_end_delivery(self) -> None:
        ended = self.cluster.ended
        if self._end_undelivered is not None and ended is not None:
            self._end_undelivered = None
            self._effects.append(EndCluster(ended.code, ended.reason, ended.failure))

    def _set_phase(self, phase: Phase, reason: str) -> None:
        assert phase in PHASE_TRANSITIONS[self.cluster.phase], f"no move from {self.cluster.phase} to {phase}"
        self.cluster.phase, self.cluster.reason = phase, reason

    # -- wishes ------------------------------------------------------------------------------------------------------

    def _send(self, link: int, message: Any) -> None:
        self._effects.append(Send(message, link))

    def _persist(self, record: Record) -> None:
        self._effects.append(Persist(record))

    def _publish(self, node: str, what: str, reason: str, level: Level = Level.NOTE, outcome: Outcome | None = None) -> None:
        self._effects.append(PublishEvent(node, what, reason, level, outcome))

    def _increment_counter(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
