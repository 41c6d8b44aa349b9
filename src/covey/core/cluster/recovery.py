"""Recovery: from the exit of a process until all ranks have resumed.

The strategies form a ladder: retry, recover-in-place, recover, elastic-training, dump, exit. `retry` follows a collective that
failed without a death. After a death, `choose_action` usually takes the first of the others that is enabled and possible; a
ready spare (`recover`) precedes `recover-in-place`. Until a child of an agent has called `covey.init()`, agents do not replace
a single worker: all workers restart, up to --max-restarts times, as with torchrun.

`Recovery` carries the action out. Its sections follow one recovery in order: (1) a process ended, (2) the action after a death,
(3) hosts that join or do not join in time, (4) the ranks report and resume.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from covey.core.cluster.formation import decide_formation
from covey.core.cluster.heal_barrier import COLLECTIVE_RETRIES_MAX, HealBarrier
from covey.core.cluster.members import Heartbeats, Members, describe_members, parse_rank_claim
from covey.core.cluster.resize import Resize, has_left_worker, make_member_indexes, plan_shrink
from covey.core.cluster.server_resize import ServerResize
from covey.core.cluster.shutdown import Shutdown, ShutdownState
from covey.core.cluster.state import NEVER, BaseParts, ClusterState, Step
from covey.core.effects import Level
from covey.core.incidents import Outcome, Stage
from covey.core.messages import (
    ChildExited,
    ChildStarted,
    Draining,
    Leave,
    LeaveAcknowledged,
    RankResumed,
    Refused,
    SafePointReport,
    StateFetched,
)
from covey.core.plurals import count_noun, describe_all
from covey.core.strategy_ladder import DEATHS_WITHOUT_PROGRESS_MAX, RecoveryStrategy
from covey.core.types import AgentInfo, ClusterSettings, Failure, Member, MemberRecord, NodeState, Phase, Role, ScriptError
from covey.errors import ExitCode

UNRECOVERABLE_CODES = frozenset(
    {ExitCode.BAD_SETTING, ExitCode.BAD_SCRIPT}
)  # errors of the script or settings: a restart repeats them
REPORTED_OTHERS_MAX = 64  # other members that a failure report describes
ROWS_LOST_RESTARTS_MAX = 3  # full restarts of any cause after which lost rows end the run, unless --max-restarts is higher


# -- decisions -----------------------------------------------------------------------------------------------------------


class RecoveryAction(StrEnum):
    WAIT = "wait"  # for the member to be restarted by hand, or for a host to join
    REPLACE = "recover-in-place"
    MOVE = "recover"
    PROMOTE = "promote"  # strategy `recover`, with a spare
    SHRINK = "elastic-training"
    RESTART_ALL = "restart all"
    END = "end"  # after a dump, if that is enabled and possible


def choose_action(
    cluster: ClusterState, dead: Member, code: int = 0, error: ScriptError | None = None
) -> tuple[RecoveryAction, str]:
    """Return the action after the death of a member, and the reason.

    `code` and `error` are the exit code and the uncaught exception of the process that died; `dead.error` is the exception of
    the process before it.
    """
    if code in UNRECOVERABLE_CODES:
        return RecoveryAction.END, f"{dead.name} exited with code {code}: a restart does not fix that"
    if reason := _script_error_blocker(cluster, dead, error):
        return RecoveryAction.END, reason
    if dead.role is Role.PSERVER and code == ExitCode.ROWS_LOST:
        return _choose_after_rows_lost(
            cluster, dead, f"the rows of {dead.name} were lost because the holder of their replica died as well"
        )
    after, reason = _choose_without_shrink(cluster, dead)
    if after is not RecoveryAction.END or RecoveryStrategy.ELASTIC not in cluster.settings.strategies:
        return after, reason
    plan, why = plan_shrink(cluster, dead)
    return (RecoveryAction.SHRINK if plan is not None else RecoveryAction.END), f"{reason}: {why}"


def _script_error_blocker(cluster: ClusterState, dead: Member, error: ScriptError | None) -> str:
    """Return the reason to assume that a replacement would raise the exception again; "" if there is none."""
    # a process without an agent is restarted by a user, who may have corrected the script
    if error is None or not cluster.heals or not dead.agent or dead.role is not Role.WORKER:
        return ""
    if dead.error is not None and dead.error.cause == error.cause and (not error.completed or error.step <= dead.error.step):
        return f"{dead.name} raised {error.kind} at the same place again without completing a step: correct the script"
    workers = cluster.members_in_role(Role.WORKER)
    errors = [error if member.uid == dead.uid else member.error for member in workers]
    if len(workers) > 1 and all(e is not None and (e.cause, e.step) == (error.cause, error.step) for e in errors):
        return f"all {len(workers)} ranks raised {error.kind} at the same place: correct the script"
    return ""


def _choose_without_shrink(cluster: ClusterState, dead: Member) -> tuple[RecoveryAction, str]:
    """Return the action if SHRINK is not considered (END if no other is possible), and the reason."""
    settings = cluster.settings
    if dead.role is Role.PSERVER and not cluster.rows_survive_death and (dead.agent or settings.copies == 0):
        return _choose_after_rows_lost(cluster, dead, f"the rows of {dead.name} were lost with it because they had no replica")
    if not dead.agent:
        if _waits_for_return(cluster, dead):
            return RecoveryAction.WAIT, f"waiting for {dead.name} to be restarted with the same variables"
        return RecoveryAction.END, "no replacement is awaited (COVEY_SHRINK_AFTER)" if settings.recovery else "recovery is off"
    if can_replace(cluster):
        return _choose_replacement(cluster, dead)
    if dead.agent not in cluster.agents:
        return RecoveryAction.END, f"cannot restart {dead.name}: no agent is left on {dead.host.name}"
    limit = min(restart_limit(agent, settings.max_restarts) for agent in cluster.agents.values())
    if limit > cluster.restarts and not can_restart_all(cluster):
        return RecoveryAction.END, "not all workers can restart, because the host of some is gone or leaving"
    if limit > cluster.restarts:
        return RecoveryAction.RESTART_ALL, f"restart {cluster.restarts + 1} of {limit}: all workers restart"
    if limit:
        return RecoveryAction.END, "all restarts are used up (--max-restarts)"
    why = "" if cluster.heals else ", and no worker can be replaced alone, because none has called covey.init()"
    return RecoveryAction.END, f"no restart is allowed (--max-restarts is 0){why}"


def can_replace(cluster: ClusterState) -> bool:
    """Return whether a dead child of an agent may be replaced or left out, instead of a restart of all workers.

    That is so if a child has called covey.init(), and recover-in-place, recover or elastic-training is enabled.
    """
    return cluster.heals and bool(
        {RecoveryStrategy.IN_PLACE, RecoveryStrategy.RECOVER, RecoveryStrategy.ELASTIC} & set(cluster.settings.strategies)
    )


def can_restart_all(cluster: ClusterState) -> bool:
    """Return whether agents run all workers, and each agent of a worker or server is registered and not leaving."""
    agents = [cluster.agents.get(m.agent) for m in cluster.members_without_spares() if m.agent or m.role is Role.WORKER]
    return all(agent is not None and not agent.is_leaving for agent in agents)


def restart_limit(agent: AgentInfo | None, limit: int) -> int:
    """Return `limit`, or the agent's own limit if it has a lower one."""
    return min(limit, agent.max_restarts) if agent is not None and agent.max_restarts >= 0 else limit


def _choose_after_rows_lost(cluster: ClusterState, dead: Member, lost: str) -> tuple[RecoveryAction, str]:
    """Return RESTART_ALL if all workers can and may restart from the last checkpoint, else END; and the reason, which begins
    with `lost`."""
    settings = cluster.settings
    if not cluster.heals or dead.agent not in cluster.agents or not can_restart_all(cluster):
        return RecoveryAction.END, f"{lost}: start the cluster again, it resumes from its last checkpoint"
    if RecoveryStrategy.IN_PLACE not in settings.strategies:
        return RecoveryAction.END, f"{lost}, and recover-in-place is not enabled (COVEY_STRATEGY)"
    if cluster.restarts >= max(settings.max_restarts, ROWS_LOST_RESTARTS_MAX):
        return RecoveryAction.END, f"{lost}, and all workers were restarted {count_noun(cluster.restarts, 'time')} already"
    return RecoveryAction.RESTART_ALL, f"{lost}: all workers restart from the last checkpoint"


def _choose_replacement(cluster: ClusterState, dead: Member) -> tuple[RecoveryAction, str]:
    """Return PROMOTE, REPLACE, MOVE, WAIT (for a host) or END for a dead child of an agent, and the reason."""
    settings = cluster.settings
    if not {RecoveryStrategy.IN_PLACE, RecoveryStrategy.RECOVER} & set(settings.strategies):
        return RecoveryAction.END, "neither recover-in-place nor recover is enabled (COVEY_STRATEGY)"
    if dead.deaths_without_progress >= DEATHS_WITHOUT_PROGRESS_MAX:
        return RecoveryAction.END, f"{dead.name} died {dead.deaths_without_progress} times without a step in between"
    if RecoveryStrategy.RECOVER in settings.strategies and (spare := choose_spare(cluster, dead)) is not None:
        return (
            RecoveryAction.PROMOTE,
            f"{spare.name} on {spare.host.name} replaces {dead.name}; the other ranks wait in their step",
        )
    agent = cluster.agents.get(dead.agent)
    here = agent is not None and not agent.is_leaving
    spent, limit = _count_replacements(cluster, dead), restart_limit(agent, settings.replacements_max)
    if RecoveryStrategy.IN_PLACE in settings.strategies and here and spent < limit:
        return RecoveryAction.REPLACE, f"{dead.name} is restarted on {dead.host.name}; the other ranks wait in their step"
    other = host_with_capacity(cluster, dead)
    if RecoveryStrategy.RECOVER in settings.strategies and other is not None:
        return RecoveryAction.MOVE, f"{dead.name} is restarted on {other.host.name}; the other ranks wait in their step"
    if here and spent >= limit:
        return RecoveryAction.END, f"{limit} replacements on {dead.host.name} are used up (--max-restarts)"
    no_host = f"no other host can run {dead.name} (COVEY_EXTRA_RANKS is {settings.extra_ranks})"
    if agent is None and (_waits_for_return(cluster, dead) or waits_before_shrink(settings)) and not has_left_worker(cluster):
        until = f"; the world shrinks after {settings.shrink_after_s:g} s" if waits_before_shrink(settings) else ""
        return RecoveryAction.WAIT, f"{no_host}: waiting for a host to join{until}"
    return RecoveryAction.END, no_host


def _waits_for_return(cluster: ClusterState, dead: Member) -> bool:
    at_once = RecoveryStrategy.ELASTIC in cluster.settings.strategies and not waits_before_shrink(cluster.settings)
    return cluster.settings.recovery and not (at_once and plan_shrink(cluster, dead)[0] is not None)


def waits_before_shrink(settings: ClusterSettings) -> bool:
    """Return whether elastic-training is enabled and first waits `shrink_after_s` for a host."""
    return RecoveryStrategy.ELASTIC in settings.strategies and settings.shrink_after_s > 0


def replacement_hosts(cluster: ClusterState) -> list[tuple[Member, AgentInfo]]:
    """Return pairs of a dead child and an agent with a free slot for it, for as many dead children as possible.

    An agent that replaces the child's former agent has priority.
    """
    lost = sorted((m for m in cluster.members.values() if m.agent and m.state is NodeState.DEAD), key=lambda m: m.rank)
    found = []
    for role in (Role.WORKER, Role.PSERVER):
        free = cluster.free_slots_by_agent(role) if lost else {}
        waiting = [m for m in lost if m.role.group is role]
        for fits in (_is_successor_agent, lambda *_: True):
            for member in list(waiting):
                agent = next((name for name, count in free.items() if count and fits(cluster.agents[name], member)), None)
                if agent is not None:
                    free[agent] -= 1
                    waiting.remove(member)
                    found.append((member, cluster.agents[agent]))
    return found


def _is_successor_agent(agent: AgentInfo, lost: Member) -> bool:
    """Return whether the agent claims the lost member's node id (--node-rank) or, without claims, has its host id."""
    number = parse_rank_claim(lost.node_id)
    claimed = range(agent.first_rank, agent.first_rank + agent.slots) if agent.first_rank >= 0 else range(0)
    return number in claimed if claimed else agent.host.id == lost.host.id


def host_with_capacity(cluster: ClusterState, dead: Member) -> AgentInfo | None:
    """Return the connected agent with the fewest members beyond its slots; None if none has fewer than `extra_ranks`.

    The agent of the dead member and leaving agents are not considered.
    """
    others = (
        agent for agent in cluster.agents.values() if agent.id != dead.agent and agent.connection and not agent.is_leaving
    )
    extra = {agent.id: _count_extra_members(cluster, agent) for agent in others}
    if not extra:
        return None
    best = min(extra, key=lambda agent: (extra[agent], agent))
    return cluster.agents[best] if extra[best] < cluster.settings.extra_ranks else None


def choose_spare(cluster: ClusterState, dead: Member) -> Member | None:
    """Return a ready spare for a dead worker, of the same agent if possible; None if there is none.

    Another agent must have fewer than `extra_ranks` members beyond its slots.
    """
    found: list[tuple[bool, int, int, Member]] = []
    for spare in cluster.members_in_role(Role.SPARE):
        agent = cluster.agents.get(spare.agent)
        ready = spare.state is NodeState.ALIVE and spare.connection and cluster.progress(spare).is_spare_ready
        if dead.role is Role.WORKER and ready and agent is not None and agent.connection and not agent.is_leaving:
            is_other_host, extra = agent.id != dead.agent, _count_extra_members(cluster, agent)
            if not is_other_host or extra < cluster.settings.extra_ranks:
                found.append((is_other_host, extra, spare.rank, spare))
    return min(found)[-1] if found else None  # ranks differ, so members are never compared


def can_refill_spare(cluster: ClusterState, spare: Member) -> bool:
    """Return whether a spare may be started again: its deaths and its agent's replacements are below the limits."""
    limit = restart_limit(cluster.agents.get(spare.agent), cluster.settings.replacements_max)
    return spare.deaths_without_progress < DEATHS_WITHOUT_PROGRESS_MAX and _count_replacements(cluster, spare) < limit


def _count_replacements(cluster: ClusterState, member: Member) -> int:
    """Return how many processes of the current children of the member's agent were replaced, without handovers."""
    return sum(m.restarts - m.handovers for m in cluster.children(member.agent))


def _count_extra_members(cluster: ClusterState, agent: AgentInfo) -> int:
    """Return how many workers and servers an agent has beyond its slots for them; negative if it has fewer."""
    return sum(m.role is not Role.SPARE for m in cluster.children(agent.id)) - agent.slots - agent.servers


def build_failure(
    cluster: ClusterState, dead: Member, code: int, reason: str, tail: list[str], log: str, error: ScriptError | None = None
) -> Failure:
    """Return the failure report of a member, with the state of the first `REPORTED_OTHERS_MAX` other members of its role."""
    cause = reason or f"exit code {code}"
    others = sorted((m for m in cluster.members_in_role(dead.role) if m.uid != dead.uid), key=lambda m: m.rank)
    return Failure(
        role=dead.role,
        node_id=dead.node_id,
        rank=dead.rank,
        host=dead.host.name,
        code=code,
        reason=f"{cause}, {error}" if error is not None else cause,
        tail=tail,
        others=[_describe_activity(cluster, member) for member in others[:REPORTED_OTHERS_MAX]],
        log=log,
        error=error,
    )


def _describe_activity(cluster: ClusterState, member: Member) -> str:
    progress = cluster.progress(member)
    parts = [f"rank {member.rank} on {member.host.name}: {member.state}"]
    if progress.step >= 0:
        parts.append(f"step {progress.step}")
    if progress.phase:
        parts.append(progress.phase)
    return ", ".join(parts)


# -- spares --------------------------------------------------------------------------------------------------------------


class Spares:
    """Starts spares, promotes one, and handles their exits.

    A spare runs the script up to the line that needs a rank, and is ready when it waits there.
    """

    def __init__(self, heartbeats: Heartbeats, members: Members) -> None:
        self._heartbeats, self._members = heartbeats, members

    def fill(self, step: Step) -> None:
        """Start the missing spares of connected agents that are not leaving, except spares that `can_refill_spare` rejects."""
        for agent in list(self._members.agents.values()):
            if agent.spares and agent.connection and not agent.is_leaving:
                self._fill_agent(step, agent)

    def _fill_agent(self, step: Step, agent: AgentInfo) -> None:
        spares = [m for m in self._members.children(agent.id) if m.role is Role.SPARE]
        free = [m for m in spares if not m.is_present and can_refill_spare(step.cluster, m)]
        started = [self._members.prepare_next_incarnation(spare, step.now) for spare in free]
        started += [self._members.admit_spare(agent, step.now) for _ in range(agent.spares - len(spares))]
        for spare in started:
            step.out.persist(MemberRecord.from_member(spare))
        if started:
            self._members.send_desired_children(step, {agent.id})

    def promote(self, step: Step, spare: Member, member: Member) -> int:
        """Make the process of a spare the process of a worker; return its connection, which the caller attaches to the
        worker."""
        step.out.publish(spare.name, "promoted", f"its process is {member.name} now")
        step.out.count("promotions")
        return self._members.promote_spare(spare, member)

    def on_exit(self, step: Step, spare: Member, code: int, reason: str) -> None:
        """Mark a spare whose process exited as left, and persist it. It is not started again if the code is 0, or after
        `DEATHS_WITHOUT_PROGRESS_MAX` deaths before it was ready."""
        is_ready = self._heartbeats.progress(spare).is_spare_ready
        deaths = 0 if is_ready else spare.deaths_without_progress + 1
        if code == 0:  # another process would exit in the same way
            deaths = DEATHS_WITHOUT_PROGRESS_MAX
        spare = self._members.set_deaths_without_progress(spare, deaths)
        step.out.publish(spare.name, "died" if code else "left", reason or f"code {code}", Level.from_exit_code(code))
        if deaths >= DEATHS_WITHOUT_PROGRESS_MAX:
            why = "its script exited before it needed a rank" if code == 0 else f"it died {deaths} times before it was ready"
            step.out.publish(spare.name, "given up", f"{why}, see its log", Level.WARNING)
        step.out.persist(MemberRecord.from_member(self._members.vacate_spare(spare)))


# -- the part ------------------------------------------------------------------------------------------------------------


class Recovery:
    """Recovery of a cluster, from the exit of a process until all ranks have resumed.

    Two rules let a restarted scheduler continue a recovery. A new generation is persisted before the incarnations that start
    in it. A death after which all workers restart is not persisted before that restart, so that the agent reports it again to
    a scheduler that was restarted in between.
    """

    def __init__(
        self, base: BaseParts, barrier: HealBarrier, resize: Resize, server_resize: ServerResize, shutdown: Shutdown
    ) -> None:
        self._settings, self._lifecycle, self._heartbeats = base.settings, base.lifecycle, base.heartbeats
        self._members, self._incidents = base.members, base.incidents
        self._barrier, self._resize, self._server_resize = barrier, resize, server_resize
        self._shutdown, self._spares = shutdown, Spares(base.heartbeats, base.members)
        self.first_failure: Failure | None = None  # since the cluster was last READY, or the one that ends the run; None: none
        self._last_rollback_step = -2  # highest step at the last rollback to a checkpoint; -2: there was none
        self._shrink_deadline = NEVER  # time by which a host must join for the lost ranks, before the world shrinks
        self._unfinished_worker: Member | None = None  # a worker that had not left, kept so that N leaves do not cost O(N²)
        self._suspect_member: Member | None = None  # a member that was suspect, kept for the same reason

    # -- 1. a process ended ------------------------------------------------------------------------------------------

    def on_child_exited(self, step: Step, connection: int, report: ChildExited) -> None:
        """Handle the exit of a child that its agent reports; ignore it if the member has another incarnation by now."""
        member = self.find_child(connection, report)
        if member is not None:
            self._on_exit(step, member, report.code, report.reason, report.tail, report.log, error=report.error)

    def find_child(self, connection: int, report: ChildStarted | ChildExited) -> Member | None:
        """Return the child that an agent reports about; None if the agent has no such child, or it has another incarnation."""
        agent = self._members.agent_at(connection)
        member = self._members.members.get((report.role, report.node_id))
        if agent is None or member is None or member.agent != agent.id or member.incarnation != report.incarnation:
            return None
        return member

    def on_connection_lost(self, step: Step, connection: int, reason: str) -> None:
        """Handle a lost connection.

        For a node without an agent this counts as its exit. The exit of a child is reported by its agent. An agent has the node
        timeout to reconnect if `waits_for_agents` is set and the cluster has formed; otherwise it is lost.
        """
        lost = self._members.detach(connection)
        if isinstance(lost, Member):
            if not lost.agent:
                self._on_exit(step, lost, ExitCode.PEER_FAILED, f"its connection closed ({reason})")
        elif lost is not None and self._settings.waits_for_agents and self._lifecycle.phase is not Phase.FORMING:
            self._heartbeats.note_heartbeat(lost, step.now)
            step.out.publish(f"agent:{lost.id}", "out of reach", reason, Level.WARNING)
        elif lost is not None:
            self._on_agent_lost(step, lost, ExitCode.PEER_FAILED, reason)

    def on_leave(self, step: Step, connection: int, leave: Leave) -> None:
        """Handle the leave of a node or an agent, and acknowledge it.

        The leave of a node without an agent counts as its exit, that of an agent as the exit of its children. If a child
        leaves, its agent still reports the exit.
        """
        left = self._members.detach(connection)
        if isinstance(left, AgentInfo):
            for child in self._members.children(left.id):  # the agent ends them, with a grace period
                self._members.detach_member(child)
            self._on_agent_lost(step, left, leave.code, leave.reason)
        elif left is not None and left.agent:
            self._members.forget_instance(left)
        elif left is not None:
            self._on_exit(step, left, leave.code, leave.reason, error=leave.error)
        step.out.send(connection, LeaveAcknowledged())

    def on_host_gone(self, step: Step, host_life: str, reason: str) -> None:
        """Declare the nodes of a host instance dead, and refuse its further registrations. Ignore a repeated call for it."""
        if host_life in self._members.gone_hosts:
            return
        self._members.mark_host_gone(host_life)
        step.out.persist_cluster()
        for agent in [agent for agent in self._members.agents.values() if agent.host.life == host_life]:
            self.declare_agent_dead(step, agent, reason)
        for member in [m for m in self._members.members.values() if m.host.life == host_life and not m.agent]:
            self.declare_dead(step, member, reason)

    def declare_agent_dead(self, step: Step, agent: AgentInfo, reason: str, since: float | None = None) -> None:
        self._members.close_agent(agent, step.out)
        self._on_agent_lost(step, agent, ExitCode.PEER_FAILED, reason, since)

    def declare_dead(self, step: Step, member: Member, reason: str, since: float | None = None) -> None:
        """Declare a member dead; close its connection last, so that its process can still receive messages such as
        `ClusterEnded`."""
        connection = self._members.current(member).connection
        self._on_exit(step, member, ExitCode.PEER_FAILED, reason, since=since)
        self._members.close_member(member, connection, step.out)

    def _on_agent_lost(self, step: Step, agent: AgentInfo, code: int, reason: str, since: float | None = None) -> None:
        children = self._members.children(agent.id)
        placed = [m for m in children if m.role is not Role.SPARE]
        is_dumping = self._shutdown.state is ShutdownState.DUMPING
        # dead members of a leaving host that no other host could take over: decide again without the agent
        undecided = [m for m in placed if m.state is NodeState.DEAD] if agent.is_leaving and not is_dumping else []
        is_forming = self._lifecycle.phase is Phase.FORMING
        is_done = placed and not undecided and not any(m.is_present for m in placed) and not is_forming
        if self._lifecycle.has_ended or is_done:
            return
        self._members.remove_agent(agent)
        step.out.publish(f"agent:{agent.id}", "gone", reason, Level.from_exit_code(code))
        cause = f"the agent on {agent.host.name} is gone ({reason})"
        present = [m for m in children if m.is_present]  # before a decision below moves a member
        for member in (self._members.current(m) for m in undecided):
            if not self._lifecycle.has_ended and self._members.contains(member):
                self._on_death(step, member, build_failure(step.cluster, member, code, cause, [], ""), step.now)
        for member in present:
            self._on_exit(step, member, code, cause, since=since)

    def _on_exit(
        self,
        step: Step,
        member: Member,
        code: int,
        reason: str,
        tail: list[str] | None = None,
        log: str = "",
        since: float | None = None,
        error: ScriptError | None = None,
    ) -> None:
        """Handle the exit of a process: it left (code 0) or died. `since` is the time of the first sign of it; None: now."""
        member = self._members.current(member)
        # the member may have been removed by the rollback of a scale-out
        if not self._members.contains(member) or not member.is_present or self._lifecycle.has_ended:
            return None
        if member.role is Role.SPARE:
            return self._spares.on_exit(step, member, code, reason)
        if code and self._barrier.safe_point.done:  # all ranks have finished: nothing to repeat
            code, reason = 0, f"{reason or f'code {code}'}, after all ranks had finished"
        member = self._members.set_state(member, NodeState.LEFT if code == 0 else NodeState.DEAD)
        if self._lifecycle.phase is Phase.FORMING:
            self._members.remove(member)
            self._lifecycle.set_reason(decide_formation(step.cluster)[1])
            return step.out.publish(member.name, "gone before the cluster formed", reason or f"code {code}")
        if code and member.leave_reason:
            reason = member.leave_reason
        kind, counter = ("handed over", "handovers") if member.leave_reason else ("died", "deaths")
        step.out.count("left" if code == 0 else counter)
        step.out.publish(member.name, "left" if code == 0 else kind, reason or f"code {code}", Level.from_exit_code(code))
        if code == 0:
            step.out.persist(MemberRecord.from_member(member))
            return self.end_if_all_left(step)
        failure = build_failure(step.cluster, member, code, reason, tail or [], log, error)
        return self._on_death(step, member, failure, step.now if since is None else since)

    # -- 2. the action after a death ---------------------------------------------------------------------------------

    def _on_death(self, step: Step, member: Member, failure: Failure, since: float) -> None:
        """Choose and carry out the action after a death, unless a dump is in progress or the death rolls a scale-out back."""
        member = self._members.current(member)
        if self._shutdown.state is ShutdownState.DUMPING:
            return self._shutdown.note_death(step, member)
        if member.role is Role.PSERVER and self._server_resize.roll_back_if_joining(step, member, failure.reason):
            return None
        if step.cluster.joining_ids and self._resize.roll_back_if_joining(step, member, failure.reason):
            return None
        action, reason = choose_action(step.cluster, member, failure.code, failure.error)
        member = self._members.set_error(member, failure.error)
        step.out.publish("cluster", str(action), reason, Level.WARNING)
        strategy = "recover" if action is RecoveryAction.PROMOTE else str(action)
        if action is RecoveryAction.END:
            strategy = "dump" if self._shutdown.dumpable_ranks(step) else "exit"
            if strategy == "dump":  # a scheduler that is restarted during the dump must not wait for this member
                step.out.persist(MemberRecord.from_member(member))
        self._incidents.open(step, strategy, reason, failure.reason, since=since, member=member)
        match action:
            case RecoveryAction.REPLACE | RecoveryAction.MOVE | RecoveryAction.PROMOTE:
                self._replace(step, member, failure, reason, action)
            case RecoveryAction.WAIT:
                self._wait_for_host(step, member, failure, reason)
            case RecoveryAction.SHRINK:
                self._resize.give_up_member(step, member, _describe_death(member, failure), reason)
            case RecoveryAction.RESTART_ALL:
                self._lifecycle.set_reason(f"{member.name} died ({failure.reason}), {reason}")
                self._restart_all(step, _describe_death(member, failure))
            case RecoveryAction.END:
                self._end(step, member, failure, reason)
        return None

    def _replace(self, step: Step, member: Member, failure: Failure, reason: str, action: RecoveryAction) -> None:
        if not member.leave_reason:
            self.first_failure = self.first_failure or failure
        step.out.count("replacements")
        if member.role is Role.WORKER:  # after the replacement of a server, workers need not resume together
            self._barrier.require_agreement()
        self._lifecycle.begin_healing(reason, step.now)
        if member.leave_reason:
            member = self._members.count_handover(member)
        else:
            member = self._members.count_failure(member, self._lifecycle.highest_step)
        spare = choose_spare(step.cluster, member) if action is RecoveryAction.PROMOTE else None
        before = member.agent
        if action is not RecoveryAction.REPLACE:
            agent = self._members.agents[spare.agent] if spare else host_with_capacity(step.cluster, member)
            assert agent is not None
            if agent.id != before:
                member = self._move(step, member, agent, reason)
        cause = _describe_death(member, failure)
        if member.role is Role.WORKER and self._members.size(Role.WORKER) == 1:  # no other rank has the state
            self._lifecycle.note_full_restart(cause)
            step.out.publish("cluster", "state lost", str(self._lifecycle.full_restart), Level.WARNING)
            self._incidents.close(step, Outcome.RESTARTED)
        self._members.prepare_next_incarnation(member, step.now)
        if spare is None:
            self._barrier.regroup(step, cause, member)
            self._members.send_desired_children(step, {member.agent})
            return
        connection = self._spares.promote(step, spare, member)
        self._barrier.regroup(step, cause, member, spare)
        self._members.attach_member(connection, member, step.now)
        self._members.send_rank(step, member)
        self._members.send_desired_children(step, {before, member.agent})  # the former agent may have to end the old process

    def _move(self, step: Step, member: Member, agent: AgentInfo, reason: str) -> Member:
        if member.connection:  # its agent may be gone, so that only this message ends the old process
            step.out.send(member.connection, Refused(f"this process was superseded: {reason}"))
            step.out.close(member.connection)
        return self._members.move_to_agent(member, agent)

    def _wait_for_host(self, step: Step, member: Member, failure: Failure, reason: str) -> None:
        self.first_failure = self.first_failure or failure
        self._lifecycle.begin_healing(reason, step.now)
        self._set_shrink_deadline(step)
        self._barrier.regroup(step, _describe_death(member, failure), member)

    def _restart_all(self, step: Step, reason: str, cause: str = "") -> None:
        """Restart all workers and servers that agents run, in a new generation.

        `reason` is sent to the members; `cause` is recorded as the cause of the full restart ("": `reason`).
        """
        self._lifecycle.reset_for_restart(cause or reason)
        step.out.count("restarts")
        self._incidents.close(step, Outcome.RESTARTED)
        self._resize.finish_growth()  # joining members restart with all others
        self._server_resize.reset_for_restart()
        self._lifecycle.renew_heal_deadline(step.now)
        children = [member for member in self._members.members_without_spares() if member.agent]
        for member in children:
            self._members.reset_for_restart(member, step.now)
        self._barrier.regroup(step, reason, *children)
        self._members.send_assignments(step)

    def _roll_back_to_checkpoint(self, step: Step, reason: str) -> None:
        """Restart all workers from the newest checkpoint, because the ranks cannot resume from their present state.

        Dump or end instead if not all workers can restart, or if no rank has reached a higher step than before the last such
        restart.
        """
        highest_step = self._lifecycle.highest_step
        if not can_restart_all(step.cluster) or highest_step <= self._last_rollback_step:
            return self._shutdown.dump_or_end(step, ExitCode.PEER_FAILED, reason, self.first_failure)
        self._last_rollback_step = highest_step
        cause, reason = reason, f"{reason}: all workers restart from the newest checkpoint"
        step.out.publish("cluster", "roll back", reason, Level.WARNING)
        self._lifecycle.set_reason(reason)
        return self._restart_all(step, reason, cause)

    def _end(self, step: Step, member: Member, failure: Failure, reason: str) -> None:
        """End the cluster, after a dump if that is enabled and possible.

        If the member's host is leaving and a dump is not possible, do nothing: the action is chosen again when the agent has
        left.
        """
        agent = self._members.agents.get(member.agent)
        if agent is None or not agent.is_leaving:
            self.first_failure = failure
            why = f"; not recovered: {reason}" if can_replace(step.cluster) else ""
            text = f"{member.name} on {failure.host}: {failure.reason}{why}"
            self._shutdown.dump_or_end(step, failure.code, text, failure)
        elif self._shutdown.dumpable_ranks(step):  # else wait: the agent leaves after its workers have exited
            self._shutdown.dump_or_end(step, failure.code, f"{failure.host} was asked to leave, and {reason}")

    # -- 3. hosts that join, or do not join in time ------------------------------------------------------------------

    def _set_shrink_deadline(self, step: Step) -> None:
        if waits_before_shrink(self._settings):
            self._shrink_deadline = min(self._shrink_deadline, step.now + self._settings.shrink_after_s)

    def use_new_hosts(self, step: Step) -> None:
        """While HEALING, unless a dump is in progress, restart lost members on hosts with free slots. While READY, let the
        world grow on free slots, up to the target."""
        if self._lifecycle.phase is Phase.HEALING and self._shutdown.state is ShutdownState.RUNNING:
            pairs = replacement_hosts(step.cluster)
            if pairs:
                return self._restart_on_hosts(step, pairs)
        return self._resize.grow_on_free_slots(step)

    def _restart_on_hosts(self, step: Step, pairs: list[tuple[Member, AgentInfo]]) -> None:
        for member, agent in pairs:
            self._members.prepare_next_incarnation(self._members.move_to_agent(member, agent), step.now)
            step.out.count("returns")
        self._barrier.require_agreement()
        self._lifecycle.renew_heal_deadline(step.now)
        hosts = ", ".join(dict.fromkeys(agent.host.name for _, agent in pairs))
        lost = [member for member, _ in pairs]
        reason = f"{describe_members(lost)} restarted on {hosts}"
        self._barrier.regroup(step, reason, *lost)
        step.out.publish("cluster", "takes a host", reason)
        self._members.send_desired_children(step, {agent.id for _, agent in pairs})

    def act_on_deadlines(self, step: Step) -> bool:
        """Act on the first deadline that has passed; return whether one had.

        During a dump, only check whether it is complete or overdue, and return True.
        """
        phase = self._lifecycle.phase
        if self._shutdown.state is ShutdownState.DUMPING:
            self._shutdown.end_if_dumped(step)
        elif (
            phase in (Phase.HEALING, Phase.RETURNING)
            and step.now > self._lifecycle.heal_deadline
            and (absent := self._absent_members())
        ):
            failure = self.first_failure
            reason = f"{describe_members(absent)} did not come back within {self._settings.topo_timeout_s:g} s"
            self._shutdown.dump_or_end(step, failure.code if failure else ExitCode.PEER_FAILED, reason, failure)
        elif step.now > self._shrink_deadline:
            self._shrink_to_survivors(step)
        elif self._resize.roll_back_if_overdue(step) or self._server_resize.roll_back_if_overdue(step):
            pass
        elif self._barrier.has_unexplained_failure(step.now):
            self._retry_collective(step)
        else:
            return False
        return True

    def _absent_members(self) -> list[Member]:
        """Return the dead and suspect members and, while the barrier `is_pending`, the present members without a connection.

        Spares are not considered.
        """
        absent, is_pending = (NodeState.DEAD, NodeState.SUSPECT), self._barrier.is_pending
        members = self._members.members_without_spares()
        return [m for m in members if m.state in absent or (is_pending and m.is_present and not m.connection)]

    def _shrink_to_survivors(self, step: Step) -> None:
        """Continue without the dead workers, for which no host joined in time.

        If that is not possible: with MS_ENABLE_RECOVERY, keep waiting; without it, dump or end.
        """
        self._shrink_deadline = NEVER
        workers = self._members.members_in_role(Role.WORKER)
        lost = [m for m in workers if m.state is NodeState.DEAD]
        if not lost:
            return
        cause = f"no host joined for {describe_members(lost)} within {self._settings.shrink_after_s:g} s"
        plan, reason = plan_shrink(step.cluster, lost[0])
        if plan is not None and any(m.is_present for m in workers):
            self._resize.shrink_to_survivors(step, lost, cause)
        elif not self._settings.recovery:
            failure = self.first_failure
            code = failure.code if failure else ExitCode.PEER_FAILED
            self._shutdown.dump_or_end(step, code, f"{cause}, and {reason}", failure)

    def _retry_collective(self, step: Step) -> None:
        failed_at, cause = self._barrier.safe_point.failed_at, self._barrier.safe_point.failure_reason
        reason = f"a collective failed ({cause}) and all processes are alive"
        if RecoveryStrategy.RETRY not in self._settings.strategies:
            reason = f"{reason}, but retry is not enabled (COVEY_STRATEGY)"
            return self._shutdown.dump_or_end(step, ExitCode.PEER_FAILED, reason)
        if not self._barrier.count_retry():
            reason = f"{reason}, {COLLECTIVE_RETRIES_MAX} times in a row without a step in between"
            return self._shutdown.dump_or_end(step, ExitCode.PEER_FAILED, reason)
        step.out.count("retries")
        step.out.publish("cluster", "retry", f"{reason}: the step is retried", Level.WARNING)
        self._incidents.open(step, "retry", "all processes are alive", cause, since=failed_at, known=failed_at)
        return self._barrier.regroup(step, reason)

    # -- 4. the ranks report and resume ------------------------------------------------------------------------------

    def on_report(self, step: Step, connection: int, report: SafePointReport) -> None:
        """Handle the report of a rank at a safe point; ignore it if it is not of the current generation.

        When all ranks have reported, send each its heal plan. If the ranks cannot resume and no dump is in progress, roll back
        to the newest checkpoint, dump or end.
        """
        member = self._members.member_at(connection)
        if member is None or member.role is not Role.WORKER or report.generation != self._lifecycle.generation:
            return
        plans = self._barrier.add_report(member, report)
        if not plans:
            return
        if failure := next((plan.failure for plan in plans.values() if plan.failure), ""):
            if self._shutdown.state is ShutdownState.RUNNING:  # during a dump the ranks dump where they are
                self._roll_back_to_checkpoint(step, failure)
            return
        self._incidents.mark_stage(Stage.REFORMED, step.now)
        if self._barrier.is_state_lost() and not self._lifecycle.is_restarting:
            self._lifecycle.note_state_lost("no rank holds the training state any more")
            step.out.publish("cluster", "state lost", str(self._lifecycle.full_restart), Level.WARNING)
            step.out.persist_cluster()
            self._incidents.close(step, Outcome.RESTARTED)
        reports = self._barrier.safe_point.reports.values()
        is_indexes_unknown = any(r.indexes_version < self._lifecycle.resized_generation for r in reports)
        indexes = make_member_indexes(step.cluster) if is_indexes_unknown else None
        workers = {m.rank: m for m in self._members.members_in_role(Role.WORKER)}
        for rank, plan in plans.items():
            message = msgspec.structs.replace(plan, member_indexes=indexes) if indexes else plan
            step.out.send(workers[rank].connection, message)

    def on_state_fetched(self, step: Step, connection: int, report: StateFetched) -> None:
        if self._members.is_connected(connection) and report.generation == self._lifecycle.generation:
            self._incidents.mark_stage(Stage.RESTORED, step.now)

    def on_resumed(self, step: Step, connection: int, report: RankResumed) -> None:
        """Handle `RankResumed` of a rank or of a restarted parameter server; ignore it if it is not of the current
        generation."""
        member = self._members.member_at(connection)
        if member is None or report.generation != self._lifecycle.generation:
            return
        if member.role.group is not Role.PSERVER:
            self._barrier.add_resumed(member.rank)
            self._heartbeats.note_resumed(member, report.step, step.now)
            self._lifecycle.note_step(report.step)
            self.on_rank_resumed(step)
        elif not self._barrier.is_pending:  # no worker is being replaced as well
            self._incidents.mark_stage(Stage.RESTORED, step.now)
            self._incidents.close_if_resumed(step)

    def on_rank_resumed(self, step: Step) -> None:
        """If all ranks have resumed, complete the recovery or resize, or release the next members of a scale-in. Then update
        the phase."""
        if self._barrier.all_resumed:
            self._barrier.reset_retries()
            if self._lifecycle.note_restart_resumed():
                step.out.persist_cluster()
            for member in self._members.members_in_role(Role.WORKER):
                if member.error is not None and member.error.step < 0:  # a script without steps makes progress by collectives
                    self._members.set_error(member, None)
            if step.cluster.joining_ids:
                self._resize.finish_growth()
            may_release = step.cluster.departing_ids and self._shutdown.state is ShutdownState.RUNNING
            if not (may_release and self._resize.release_next_leavers(step)):
                self._incidents.close_if_resumed(step)
        self.update_readiness(step, "all ranks resumed")

    def update_readiness(self, step: Step, reason: str) -> None:
        """Enter READY from HEALING or RETURNING if no member is dead or suspect, and READY need not wait for ranks to resume.

        Go from RETURNING to HEALING if no member is suspect, but members are dead or ranks have yet to resume. Do nothing
        during a dump. Spares are not considered.
        """
        phase, is_agreeing = self._lifecycle.phase, self._barrier.is_agreeing
        if self._shutdown.state is not ShutdownState.RUNNING or phase not in (Phase.HEALING, Phase.RETURNING):
            return
        if (
            is_agreeing and phase is not Phase.RETURNING
        ) or self._has_suspect_member():  # the first check is O(1); there are N calls
            return
        dead = [m for m in self._members.members_without_spares() if m.state is NodeState.DEAD]
        if not dead and not is_agreeing:
            self._barrier.finish_agreement()
            self.first_failure = None
            self._shrink_deadline = NEVER
            self._incidents.mark_stage(Stage.REFORMED, step.now)
            self._lifecycle.set_phase(Phase.READY, reason)
            if not self._barrier.has_group_met:  # no rank will send RankResumed
                self._incidents.close_if_resumed(step)
        elif phase is Phase.RETURNING:
            self._set_shrink_deadline(step)
            waiting = f"waiting for {describe_members(dead)} to be restarted with the same variables"
            resizing = f"{reason}, and the resize continues"
            self._lifecycle.set_phase(Phase.HEALING, waiting if dead else resizing)
        else:
            return
        step.out.persist_cluster()
        step.out.publish("cluster", str(self._lifecycle.phase), self._lifecycle.reason)

    def _has_suspect_member(self) -> bool:
        last = self._suspect_member
        if last is None or not self._members.contains(last) or self._members.current(last).state is not NodeState.SUSPECT:
            members = reversed(self._members.members_without_spares())
            self._suspect_member = next((m for m in members if m.state is NodeState.SUSPECT), None)
        return self._suspect_member is not None

    # -- end, drain and idle work ------------------------------------------------------------------------------------

    def end_if_all_left(self, step: Step) -> None:
        """End the cluster with code 0 if every worker has left; else update the phase."""
        last = self._unfinished_worker
        if last is None or not self._members.contains(last) or self._members.current(last).state is NodeState.LEFT:
            workers = reversed(self._members.members_in_role(Role.WORKER))
            self._unfinished_worker = next((m for m in workers if m.state is not NodeState.LEFT), None)
        if self._unfinished_worker is None:
            self._shutdown.end(step, 0, f"{describe_all(self._members.size(Role.WORKER), 'worker')} finished")
        else:
            self.update_readiness(step, "all members are reachable again")

    def on_draining(self, step: Step, connection: int, drain: Draining) -> None:
        """Handle the drain of a member, whose exit is then not a failure, or of a host, which then gets no further processes.

        If the scheduler leaves with the host and a dump is possible, dump and end the cluster.
        """
        member, agent = self._members.member_at(connection), self._members.agent_at(connection)
        if member is not None:
            self._members.set_leave_reason(member, drain.reason)
        elif agent is not None and not agent.is_leaving:  # an agent repeats the message when it reconnects
            self._members.mark_agent_leaving(agent)
            step.out.publish(f"agent:{agent.id}", "leaving", drain.reason, Level.WARNING)
            if drain.scheduler_leaves and self._shutdown.dumpable_ranks(step):
                self._shutdown.dump_or_end(step, ExitCode.STOPPED, drain.reason)

    def run_idle_work(self, step: Step) -> None:
        """Release the next members of a scale-in, or start missing spares, if the cluster is READY and `trains` is set."""
        if self._lifecycle.phase is Phase.READY and self._lifecycle.trains and not self._resize.release_next_leavers(step):
            self._spares.fill(step)

    def postpone(self, by_s: float) -> None:
        self._shrink_deadline += by_s


def _describe_death(member: Member, failure: Failure) -> str:
    return f"{member.name} {'handed over' if member.leave_reason else 'died'}: {failure.reason}"
