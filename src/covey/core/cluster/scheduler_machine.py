"""The scheduler's machine: the only place where a cluster changes.

Theory of operation. `step(event, now)` takes a fact and returns wishes, in an order that is a contract: what must be durable
comes before what may be sent, and a scheduler that dies between any two wishes leaves a journal from which the next one goes
on. Nothing is journalled per join or per beat; formation, deaths, returns and the end are. Here is what its
members say; what follows from that for the cluster as a whole is in `lifecycle`, and `ledger` lists the rooms.

Every member is spoken for by a link. A raw node speaks for itself, and the loss of its link is its death. A child of an agent
is spoken for by the agent, who sees the exit itself: there the agent's word decides, and a lost link alone does not. The loss
of the agent's own link is the death of its children, unless recovery is on: then it has the node timeout to come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from covey.core.cluster import resize_plan
from covey.core.cluster.admin_requests import Askable
from covey.core.effects import Level, SchedulerEffect
from covey.core.events import ConnectionLost, HostGone, JournalRead, MessageReceived, MindSporeDetected, SchedulerEvent, Tick
from covey.core.incidents import Outcome, Stage
from covey.core.messages import (
    CheckpointFailed,
    ChildExited,
    ChildStarted,
    CollectiveFailed,
    Draining,
    DumpWritten,
    Heartbeat,
    KillRequest,
    Leave,
    LeaveAcknowledged,
    RankResumed,
    Refused,
    Register,
    RegisterAgent,
    RendezvousGet,
    RendezvousPut,
    RendezvousValue,
    SafePointReport,
    ScaleRequest,
    ServerInSync,
    StateFetched,
    StopRequest,
    TemplateReady,
    ViewRequest,
)
from covey.core.types import AgentInfo, ClusterSettings, Member, NodeState, Phase, Role
from covey.errors import ExitCode

GONE_HOSTS_MAX = 4096  # lives of hosts that are remembered to be over
HANDLED_AFTER_END = (Register, RegisterAgent, Leave, StopRequest, ScaleRequest, KillRequest)  # what is still answered then


class SchedulerMachine(Askable):
    """One cluster's decisions. The shell calls `step`; everybody else only looks."""

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float, wall: float = 0.0) -> None:
        super().__init__(settings, cluster_id=cluster_id, job=job, now=now, wall=wall)
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            Register: self._on_register,
            RegisterAgent: self._on_register_agent,
            Heartbeat: self._on_heartbeat,
            Leave: self._on_leave,
            TemplateReady: self._on_template_ready,
            ChildStarted: self._on_child_started,
            ChildExited: self._on_child_exited,
            RendezvousPut: self._on_rendezvous_put,
            RendezvousGet: self._on_rendezvous_get,
            SafePointReport: self._on_report,
            CollectiveFailed: self._on_collective_failed,
            StateFetched: self._on_state_fetched,
            RankResumed: self._on_resumed,
            Draining: self._on_draining,
            DumpWritten: self._on_dump_written,
            CheckpointFailed: self._on_checkpoint_failed,
            StopRequest: self._on_stop_request,
            ScaleRequest: self._on_scale_request,
            KillRequest: self._on_kill_request,
            ServerInSync: self._on_server_in_sync,
        }

    def step(self, event: SchedulerEvent, now: float) -> list[SchedulerEffect]:
        """Take one fact; return what is to be done about it, in order."""
        self._now = now
        if self.cluster.has_ended and not (isinstance(event, MessageReceived) and isinstance(event.message, HANDLED_AFTER_END)):
            if now >= self._end_delivery_deadline:
                self._finish_end_delivery()
        elif isinstance(event, MessageReceived):
            if not isinstance(event.message, ViewRequest):  # showing the cluster is the shell's affair
                self._handlers[type(event.message)](event.connection, event.message)
        elif isinstance(event, ConnectionLost):
            self._on_connection_lost(event.connection, event.reason)
        elif isinstance(event, Tick):
            self._on_tick()
        elif isinstance(event, HostGone):
            self._on_host_gone(event)
        elif isinstance(event, MindSporeDetected):
            self._on_mindspore_detected(event.worker)
        elif isinstance(event, JournalRead):
            self._restore_from_journal(event.records)
        out, self._effects = self._effects, []
        return out

    def list_connections(self) -> list[int]:
        """The links of all who are told what becomes of the cluster."""
        return list(self._by_connection)

    def _on_mindspore_detected(self, worker: str) -> None:
        """End the run of a MindSpore script, because its workers would wait for a MindSpore scheduler that does not exist.

        Do nothing if a worker has called covey.init(), because that script trains with covey's scheduler.
        """
        if not self.cluster.heals:
            reason = f"{worker} runs a MindSpore script, which needs MindSpore's own scheduler: add --framework mindspore"
            self._end_cluster(ExitCode.BAD_SETTING, reason)

    # -- living ------------------------------------------------------------------------------------------------------

    def _on_heartbeat(self, link: int, beat: Heartbeat) -> None:
        speaker = self._by_connection.get(link)
        if speaker is None:
            return
        speaker.last_heartbeat_at = self._now
        if isinstance(speaker, Member):
            self._highest_step = max(self._highest_step, beat.progress.step)
            if beat.progress.is_spare_ready and not speaker.progress.is_spare_ready:
                self._publish(speaker.name, "stands by", beat.progress.phase)
            if speaker.progress != beat.progress:
                speaker.progress, speaker.progress_changed_at = beat.progress, self._now
            if beat.progress.in_loop and not self.cluster.trains and self.cluster.phase is not Phase.FORMING:
                self.cluster.trains = True
                self._persist(self.cluster.record())  # a scheduler that comes back may hear of a death first
            self._note_restart_step(beat.progress.first_step)
            if speaker.error is not None and beat.progress.steps_completed > 0 and beat.progress.step > speaker.error.step:
                speaker.error = None
                if self.cluster.phase is Phase.READY:
                    self._close_incidents_if_resumed()
            if speaker.state is NodeState.SUSPECT:
                speaker.state = NodeState.ALIVE
                self._publish(speaker.name, "heard again", "its beat came late")
                self._update_readiness("every member is heard again")

    def _note_restart_step(self, step: int) -> None:
        """Report the step at which the loops started after a full restart."""
        restart = self.cluster.full_restart
        if restart is not None and restart.step < 0 <= step:
            self.cluster.full_restart = msgspec.structs.replace(restart, step=step)
            self._persist(self.cluster.record())
            self._publish("cluster", "restarted", str(self.cluster.full_restart), Level.WARNING)

    def _on_rendezvous_put(self, link: int, pin: RendezvousPut) -> None:
        if link not in self._by_connection or pin.generation != self.cluster.generation:
            return
        self._group_formed = True
        waiting = self._rendezvous.put(pin.key, pin.value)
        if waiting is None:
            self._send(link, Refused(f"the board is full: {pin.key} cannot be pinned"))
        for waiter in waiting or ():
            self._send(waiter, RendezvousValue(pin.key, pin.value, pin.generation))

    def _on_rendezvous_get(self, link: int, wish: RendezvousGet) -> None:
        if link not in self._by_connection or wish.generation != self.cluster.generation:
            return
        value = self._rendezvous.values.get(wish.key)
        if value is not None:
            self._send(link, RendezvousValue(wish.key, value, wish.generation))
        elif not self._rendezvous.add_waiter(wish.key, link):
            self._send(link, Refused(f"the board is full: too many wait for values, {wish.key} is one too many"))

    def _on_report(self, link: int, report: SafePointReport) -> None:
        """A rank is at a safe point; when all are, each is told how to go on."""
        member = self._by_connection.get(link)
        if not isinstance(member, Member) or member.role is not Role.WORKER or report.generation != self.cluster.generation:
            return None
        plans = self._heal_barrier.add_report(member.rank, report, self.cluster.size(Role.WORKER), self._addresses_by_rank)
        if not plans:
            return None
        if failure := next((plan.failure for plan in plans.values() if plan.failure), ""):
            return self._roll_back_to_checkpoint(failure)
        self.incidents.mark_stage(Stage.REFORMED, self._now)
        self._check_state_lost()
        unknown = any(said.indexes_version < self.cluster.resized for said in self._heal_barrier.reports.values())
        seating = resize_plan.make_member_indexes(self.cluster) if unknown else None
        workers = {m.rank: m for m in self.cluster.members_in_role(Role.WORKER)}
        for rank, plan in plans.items():
            self._send(workers[rank].connection, msgspec.structs.replace(plan, member_indexes=seating) if seating else plan)
        return None

    def _addresses_by_rank(self) -> dict[int, str]:
        return {m.rank: m.host.address for m in self.cluster.members_in_role(Role.WORKER)}

    def _check_state_lost(self) -> None:
        """Note a full restart if all ranks that had the training state are dead. The world keeps its size until a loop has
        finished a step again."""
        gathering = self._heal_barrier
        begun = gathering.resumed or gathering.done or self._is_restarting
        if not begun and all(r.needs_state for r in gathering.reports.values()):
            self.cluster.trains = False
            self._note_full_restart("no rank holds the training state any more")
            self._publish("cluster", "state lost", str(self.cluster.full_restart), Level.WARNING)
            self._persist(self.cluster.record())
            self._close_incidents(Outcome.RESTARTED)

    def _on_collective_failed(self, link: int, broke: CollectiveFailed) -> None:
        if link in self._by_connection and broke.generation == self.cluster.generation:
            self._heal_barrier.failed_at = min(self._heal_barrier.failed_at, self._now)
            self._heal_barrier.failure_reason = broke.reason

    def _on_state_fetched(self, link: int, said: StateFetched) -> None:
        if link in self._by_connection and said.generation == self.cluster.generation:
            self.incidents.mark_stage(Stage.RESTORED, self._now)

    def _on_resumed(self, link: int, said: RankResumed) -> None:
        member = self._by_connection.get(link)
        if not isinstance(member, Member) or said.generation != self.cluster.generation:
            return
        if member.role.group is Role.PSERVER:
            self._on_server_resumed()
        else:
            self._heal_barrier.resumed.add(member.rank)
            member.progress = msgspec.structs.replace(member.progress, step=said.step)
            self._highest_step = max(self._highest_step, said.step)
            self._on_rank_resumed()

    def _on_server_in_sync(self, link: int, said: ServerInSync) -> None:
        member = self._by_connection.get(link)
        if isinstance(member, Member) and member.role is Role.PSERVER:
            self._note_server_in_sync(member, said)

    def _on_draining(self, link: int, drain: Draining) -> None:
        speaker = self._by_connection.get(link)
        if isinstance(speaker, Member):
            speaker.leave_reason = drain.reason
        elif speaker is not None and not speaker.is_leaving:  # it says so again whenever it is back
            speaker.is_leaving = True
            self._publish(f"agent:{speaker.id}", "leaving", drain.reason, Level.WARNING)
            if drain.scheduler_leaves and self._dumpable_ranks():
                self._dump_or_end(ExitCode.STOPPED, drain.reason)

    def _on_dump_written(self, link: int, said: DumpWritten) -> None:
        member = self._by_connection.get(link)
        if not isinstance(member, Member):
            return
        if said.path:
            self._publish(member.name, "dumped", f"step {said.step} is in {said.path}")
            self._newest_dump = max(self._newest_dump, (said.step, said.path))
        if self._dump is not None:
            self._dump.waiting_ranks.discard(member.rank)
            self._end_if_dumped()

    def _on_checkpoint_failed(self, link: int, said: CheckpointFailed) -> None:
        member = self._by_connection.get(link)
        if isinstance(member, Member):
            self._increment_counter("unsaved")
            self._publish(member.name, "unsaved", said.reason, Level.WARNING)

    def _on_template_ready(self, link: int, said: TemplateReady) -> None:
        agent = self._by_connection.get(link)
        if isinstance(agent, AgentInfo):
            agent.template_importing = False

    def _on_child_started(self, link: int, said: ChildStarted) -> None:
        member = self._find_child(link, said)
        if member is not None:
            member.pid = said.pid

    # -- leaving and dying -------------------------------------------------------------------------------------------

    def _on_leave(self, link: int, leave: Leave) -> None:
        """It goes, and its link no longer speaks. A child's end is its agent's to tell, with the exit code."""
        speaker = self._by_connection.pop(link, None)
        if speaker is not None:
            speaker.connection = 0
        if isinstance(speaker, AgentInfo):
            for child in self.cluster.children(speaker.id):  # it ends them itself, with the grace they need
                self._by_connection.pop(child.connection, None)
                child.connection = 0
            self._on_agent_lost(speaker, leave.code, leave.reason)
        elif speaker is not None and speaker.agent:
            speaker.life = ""
        elif speaker is not None:
            self._on_process_exit(speaker, leave.code, leave.reason, error=leave.error)
        self._send(link, LeaveAcknowledged())

    def _on_child_exited(self, link: int, said: ChildExited) -> None:
        member = self._find_child(link, said)
        if member is not None:
            self._on_process_exit(member, said.code, said.reason, said.tail, said.log, error=said.error)

    def _find_child(self, link: int, said: ChildStarted | ChildExited) -> Member | None:
        """The child an agent speaks of, if it is its own and in that incarnation."""
        agent = self._by_connection.get(link)
        member = self.cluster.members.get((said.role, said.node_id))
        mine = isinstance(agent, AgentInfo) and member is not None and member.agent == agent.id
        return member if mine and member is not None and member.incarnation == said.incarnation else None

    def _on_host_gone(self, said: HostGone) -> None:
        """Nobody of that host is waited for any longer, and whoever may still run there is not let in again."""
        if said.host_life in self.cluster.gone:
            return
        self.cluster.gone = (*self.cluster.gone, said.host_life)[-GONE_HOSTS_MAX:]
        self._persist(self.cluster.record())
        for agent in [agent for agent in self.cluster.agents.values() if agent.host.life == said.host_life]:
            self._disconnect_agent(agent)
            self._on_agent_lost(agent, ExitCode.PEER_FAILED, said.reason)
        for member in [m for m in self.cluster.members.values() if m.host.life == said.host_life and not m.agent]:
            self._declare_dead(member, said.reason)
