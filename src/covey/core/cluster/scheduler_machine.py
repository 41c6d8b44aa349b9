"""The scheduler's state machine: every change of a cluster's state is made by its `step`.

`step(event, now)` takes an event and returns effects. Their order is a contract: records that must be durable come before the
messages that depend on them, and a scheduler that dies between any two effects leaves a journal from which the next one can
continue. The formation, later changes of membership and ranks, and the end are journalled; heartbeats, and registrations before
the formation, are not.

The machine is composed of parts. Each part owns its fields and alone writes them. A part calls only parts that `__init__`
constructs before it. Handlers get a `Step`: the time, the readable state and the outbox for effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.core.cluster.failure_detector import FailureDetector
from covey.core.cluster.heal_barrier import HealBarrier
from covey.core.cluster.incident_log import IncidentLog
from covey.core.cluster.members import Heartbeats, Members
from covey.core.cluster.recovery import Recovery
from covey.core.cluster.registration import Registration
from covey.core.cluster.resize import Resize
from covey.core.cluster.server_resize import ServerResize, is_server_request
from covey.core.cluster.shutdown import Shutdown, ShutdownState
from covey.core.cluster.state import BaseParts, ClusterState, Lifecycle, Outbox, Step
from covey.core.effects import Level, SchedulerEffect
from covey.core.events import ConnectionLost, HostGone, JournalRead, MessageReceived, MindSporeDetected, SchedulerEvent, Tick
from covey.core.incidents import Incident
from covey.core.messages import (
    CheckpointFailed,
    ChildExited,
    ChildStarted,
    CollectiveFailed,
    Draining,
    DumpWritten,
    Heartbeat,
    KillChild,
    KillRequest,
    Leave,
    LeaveAcknowledged,
    RankResumed,
    Refused,
    Register,
    RegisterAgent,
    RendezvousGet,
    RendezvousPut,
    RequestAccepted,
    SafePointReport,
    ScaleAccepted,
    ScaleRequest,
    ServerInSync,
    StateFetched,
    StopRequest,
    TemplateReady,
    ViewRequest,
)
from covey.core.plurals import count_noun
from covey.core.types import ClusterRecord, ClusterSettings, Member, NodeState, Phase, Record, Role
from covey.errors import ExitCode

# messages that are still answered after the cluster has ended; all others are ignored
HANDLED_AFTER_END = (Register, RegisterAgent, Leave, StopRequest, ScaleRequest, KillRequest)
IGNORED_WHILE_FORMING = (SafePointReport, CollectiveFailed, StateFetched, RankResumed)  # about a generation: there is none yet
Handler = Callable[[Step, int, Any], None]


def find_kill_target(cluster: ClusterState, name: str) -> tuple[Member | None, str]:
    """Return the member with this name and what will be done, or None and the reason why its process cannot be killed."""
    member = next((m for m in cluster.members.values() if m.name == name), None)
    if cluster.has_ended:
        return None, f"the cluster has ended: {cluster.reason}"
    if member is None:
        return None, f"there is no node {name[:100]!r}: GET /nodes lists them"
    agent = cluster.agents.get(member.agent)
    if not member.is_present:
        return None, f"{name} is not running: it is {member.state}"
    if not member.pid:
        return None, f"{name} is not running yet: its process is being started"
    if agent is None or not agent.connection:
        where = f"process {member.pid} on {member.host.name}"
        return None, f"cannot kill {name}: no agent is connected for it; kill {where} yourself"
    return member, f"process {member.pid} of {name} on {member.host.name} is killed"


class SchedulerMachine:
    """State machine of one training cluster. The runtime passes each event to `step`; other code only reads.

    `now` is the time on the machine's clock, `wall` the wall-clock time at that moment, both in seconds.
    """

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float, wall: float = 0.0) -> None:
        self._lifecycle = lifecycle = Lifecycle(cluster_id, settings)
        self._heartbeats = beats = Heartbeats(settings)
        self._members = members = Members(settings, beats)
        self.incidents = incidents = IncidentLog(wall - now)
        base = BaseParts(settings, lifecycle, beats, members, incidents)
        self._barrier = barrier = HealBarrier(base)
        self._resize = resize = Resize(base, barrier)
        self._server_resize = server_resize = ServerResize(base)
        self._shutdown = shutdown = Shutdown(base, resize)
        self._recovery = recovery = Recovery(base, barrier, resize, server_resize, shutdown)
        self._detector = FailureDetector(base, barrier, shutdown, recovery, now)
        self._registration = registration = Registration(base, barrier, resize, shutdown, recovery, now)
        self.cluster = ClusterState(base, job, resize, server_resize, shutdown, registration)
        self._out = Outbox(self.cluster.record)
        self._handlers: dict[type, Handler] = {
            Register: registration.on_register,
            RegisterAgent: registration.on_register_agent,
            Heartbeat: self._on_heartbeat,
            Leave: recovery.on_leave,
            TemplateReady: self._on_template_ready,
            ChildStarted: self._on_child_started,
            ChildExited: recovery.on_child_exited,
            RendezvousPut: barrier.on_rendezvous_put,
            RendezvousGet: barrier.on_rendezvous_get,
            SafePointReport: recovery.on_report,
            CollectiveFailed: barrier.on_collective_failed,
            StateFetched: recovery.on_state_fetched,
            RankResumed: recovery.on_resumed,
            Draining: recovery.on_draining,
            DumpWritten: self._on_dump_written,
            CheckpointFailed: self._on_checkpoint_failed,
            StopRequest: self._on_stop_request,
            ScaleRequest: self._on_scale_request,
            KillRequest: self._on_kill_request,
            ServerInSync: self._on_server_in_sync,
        }

    @property
    def handled_messages(self) -> frozenset[type]:
        return frozenset(self._handlers)

    @property
    def counters(self) -> dict[str, float]:
        return self._out.counters

    @property
    def is_dumping(self) -> bool:
        return self._shutdown.state is ShutdownState.DUMPING

    def list_connections(self) -> list[int]:
        """Return the ids of the connections of all members and agents, members first."""
        return self._members.connections()

    def step(self, event: SchedulerEvent, now: float) -> list[SchedulerEffect]:
        """Handle one event; return the effects to carry out, in order.

        After the end of the cluster, only messages of `HANDLED_AFTER_END` are handled; any other event only checks whether the
        time for the delivery of the end has passed.
        """
        step, phase = Step(now, self.cluster, self._out), self._lifecycle.phase
        if phase is Phase.ENDED and not (isinstance(event, MessageReceived) and isinstance(event.message, HANDLED_AFTER_END)):
            self._shutdown.tick_after_end(step)
        elif isinstance(event, MessageReceived):
            is_early = phase is Phase.FORMING and isinstance(event.message, IGNORED_WHILE_FORMING)
            if not is_early and not isinstance(event.message, ViewRequest):  # the scheduler process answers the latter
                self._handlers[type(event.message)](step, event.connection, event.message)
        elif isinstance(event, ConnectionLost):
            self._recovery.on_connection_lost(step, event.connection, event.reason)
        elif isinstance(event, Tick):
            self._on_tick(step)
        elif isinstance(event, HostGone):
            self._recovery.on_host_gone(step, event.host_life, event.reason)
        elif isinstance(event, MindSporeDetected):
            self._on_mindspore_detected(step, event.worker)
        elif isinstance(event, JournalRead):
            self._restore(step, event.records)
        if self._lifecycle.phase is Phase.READY and phase in (Phase.HEALING, Phase.RETURNING):
            self._registration.forget_deferred()
        return self._out.take_effects()

    # -- time --------------------------------------------------------------------------------------------------------

    def _on_tick(self, step: Step) -> None:
        if suspended_s := self._detector.take_suspension_s(step):
            self._discount_suspension(step, suspended_s)
        has_timed_out = False
        if self._lifecycle.phase is Phase.FORMING:
            has_timed_out = self._registration.form_or_give_up(step)
        else:
            self._recovery.use_new_hosts(step)
        if not has_timed_out and not self._recovery.act_on_deadlines(step):
            self._detector.check_heartbeats(step)
        if self._shutdown.state is ShutdownState.RUNNING:
            self._detector.check_blocked_collectives(step)
        self._recovery.run_idle_work(step)

    def _discount_suspension(self, step: Step, suspended_s: float) -> None:
        for part in (self._registration, self._lifecycle, self._resize, self._server_resize, self._recovery):
            part.postpone(suspended_s)
        for timed in (self._barrier, self._shutdown, self._heartbeats):
            timed.discount_suspension(suspended_s, step.now)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _on_heartbeat(self, step: Step, connection: int, heartbeat: Heartbeat) -> None:
        member, progress = self._members.member_at(connection), heartbeat.progress
        if member is None:
            if (agent := self._members.agent_at(connection)) is not None:
                self._heartbeats.note_heartbeat(agent, step.now)
            return
        self._heartbeats.note_heartbeat(member, step.now)
        self._lifecycle.note_step(progress.step)
        if progress.is_spare_ready and not self._heartbeats.progress(member).is_spare_ready:
            step.out.publish(member.name, "stands by", progress.phase)
        self._heartbeats.note_progress(member, progress, step.now)
        if progress.in_loop and self._lifecycle.phase is not Phase.FORMING and self._lifecycle.note_loop():
            step.out.persist_cluster()  # a restarted scheduler may receive the report of a death first
        if self._lifecycle.note_restart_step(progress.first_step):
            step.out.persist_cluster()
            step.out.publish("cluster", "restarted", str(self._lifecycle.full_restart), Level.WARNING)
        if member.error is not None and progress.steps_completed > 0 and progress.step > member.error.step:
            self._members.set_error(member, None)
            if self._lifecycle.phase is Phase.READY:
                self.incidents.close_if_resumed(step)
        if member.state is NodeState.SUSPECT:
            self._members.set_state(member, NodeState.ALIVE)
            step.out.publish(member.name, "heard again", "its heartbeat arrived late")
            self._recovery.update_readiness(step, "all members are reachable again")

    def _on_template_ready(self, step: Step, connection: int, report: TemplateReady) -> None:
        if (agent := self._members.agent_at(connection)) is not None:
            self._members.mark_template_ready(agent)

    def _on_child_started(self, step: Step, connection: int, report: ChildStarted) -> None:
        if (member := self._recovery.find_child(connection, report)) is not None:
            self._members.set_pid(member, report.pid)

    def _on_dump_written(self, step: Step, connection: int, dump: DumpWritten) -> None:
        if (member := self._members.member_at(connection)) is not None:
            self._shutdown.note_dump_written(step, member, dump)

    def _on_checkpoint_failed(self, step: Step, connection: int, report: CheckpointFailed) -> None:
        if (member := self._members.member_at(connection)) is not None:
            step.out.count("unsaved")
            step.out.publish(member.name, "unsaved", report.reason, Level.WARNING)

    def _on_server_in_sync(self, step: Step, connection: int, report: ServerInSync) -> None:
        member = self._members.member_at(connection)
        if member is not None and member.role is Role.PSERVER:
            self._server_resize.note_in_sync(step, member, report)

    def _on_mindspore_detected(self, step: Step, worker: str) -> None:
        """End the cluster, unless `heals` is set: the script would wait for a scheduler of MindSpore, which does not exist."""
        if not self._lifecycle.heals:
            reason = f"{worker} runs a MindSpore script, which needs MindSpore's own scheduler: add --framework mindspore"
            self._shutdown.end(step, ExitCode.BAD_SETTING, reason)

    # -- requests of clients: each is answered on its connection ---------------------------------------------------------

    def _on_scale_request(self, step: Step, connection: int, request: ScaleRequest) -> None:
        reply: ScaleAccepted | Refused
        if request.roll_back and self._server_resize.joining_servers and not self._lifecycle.has_ended:
            reply = self._server_resize.request_roll_back(step)
        elif not request.roll_back and request.start_processes and is_server_request(self.cluster, request):
            reply = self._server_resize.request(step, request)
        else:
            reply = self._resize.request(step, request)
        step.out.send(connection, reply)

    def _on_stop_request(self, step: Step, connection: int, request: StopRequest) -> None:
        if request.dump:
            return step.out.send(connection, self._shutdown.request_dump(step, request.reason))
        if not self._lifecycle.has_ended:
            self._shutdown.end(step, ExitCode.STOPPED, request.reason)
        else:
            self._shutdown.stop_telling(step)
        return step.out.send(connection, LeaveAcknowledged())

    def _on_kill_request(self, step: Step, connection: int, request: KillRequest) -> None:
        member, reason = find_kill_target(self.cluster, request.node)
        if member is None:
            return step.out.send(connection, Refused(reason))
        step.out.count("kills")
        step.out.publish(member.name, "to be killed", f"{request.reason}: {reason}", Level.WARNING)
        agent = self._members.agents[member.agent]
        step.out.send(agent.connection, KillChild(member.node_id, member.incarnation, member.role))
        return step.out.send(connection, RequestAccepted(reason))

    # -- the journal -------------------------------------------------------------------------------------------------

    def _restore(self, step: Step, records: tuple[Record, ...]) -> None:
        """Continue from the journal; without a record of the cluster, persist the first one."""
        record = next((r for r in records if isinstance(r, ClusterRecord)), None)
        if record is None:
            return step.out.persist_cluster()
        self._lifecycle.restore(record)
        self._members.restore(record)
        self._resize.restore(record)
        self._server_resize.restore(record, step.now)
        self._shutdown.restore(record)
        self.incidents.restore([r for r in records if isinstance(r, Incident)])
        if record.phase is Phase.FORMING:
            return None
        self._members.restore_members(records, record, self._server_resize.server_ranks(), step.now)
        if record.ended is not None:
            return self._shutdown.resume_end(step, record.ended)
        self._barrier.open_generation(self._lifecycle.generation)
        self._resize.resume(step)
        self._lifecycle.renew_heal_deadline(step.now)
        self._shutdown.resume_dump(step)
        members = count_noun(len(self._members.members), "member")
        self._lifecycle.set_phase(Phase.RETURNING, f"the scheduler was restarted and waits for {members} to re-attach")
        step.out.publish("cluster", "restored", f"generation {self._lifecycle.generation}, {members}")
        return self._recovery.end_if_all_left(step)
