"""A recovery: what happens after a process died, until all ranks have resumed.

The ladder of strategies is ordered: retry, recover-in-place, recover, elastic-training, dump, exit. `choose_action` takes the
first that is configured, that is possible with what is left of the cluster, and whose budget is not used up. Scripts that never
call `covey.init()` cannot be healed: for them all workers are restarted, as often as --max-restarts says, as torchrun does.

`Recovery` carries the action out. Its sections follow one recovery in order: (1) a process ended, (2) what follows from a
death, (3) hosts come, or do not, (4) the ranks agree and resume.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from covey.core.cluster.formation import decide_formation
from covey.core.cluster.heal_barrier import COLLECTIVE_RETRIES_MAX, HealBarrier
from covey.core.cluster.incident_log import IncidentLog
from covey.core.cluster.members import Heartbeats, Members, describe_members, parse_rank_claim
from covey.core.cluster.resharding import Resharding
from covey.core.cluster.resize import Resize, has_left_worker, make_member_indexes, plan_shrink
from covey.core.cluster.shutdown import Shutdown, ShutdownState
from covey.core.cluster.state import NEVER, ClusterState, Lifecycle, Step
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

UNRECOVERABLE_CODES = frozenset({ExitCode.BAD_SETTING, ExitCode.BAD_SCRIPT})  # errors of the program: a restart repeats them
REPORTED_OTHERS_MAX = 64  # other members that a failure report describes
ROWS_LOST_RESTARTS_MAX = 3  # restarts of all because the rows of a server were lost


# -- decisions -----------------------------------------------------------------------------------------------------------


class RecoveryAction(StrEnum):
    WAIT = "wait"
    REPLACE = "recover-in-place"
    MOVE = "recover"
    PROMOTE = "promote"  # in the recover rung: a spare takes the place
    SHRINK = "elastic-training"
    RESTART_ALL = "restart all"
    END = "end"


def choose_action(
    cluster: ClusterState, dead: Member, code: int = 0, error: ScriptError | None = None
) -> tuple[RecoveryAction, str]:
    """Decide what follows the death of one member, which ended with this code, and by this exception if there was one."""
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
    """Return why an exception is an error of the script, which no replacement repairs; "" if it may be a passing one.

    Without covey.init() no rank is replaced, and --max-restarts alone says how often all are restarted. A process that a
    person starts again (no agent) may have been repaired meanwhile.
    """
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
    """The rungs after which the world is what it was."""
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
    """Whether a lost worker of an agent can be replaced alone, or done without: the script and the settings allow it."""
    return cluster.heals and bool(
        {RecoveryStrategy.IN_PLACE, RecoveryStrategy.RECOVER, RecoveryStrategy.ELASTIC} & set(cluster.settings.strategies)
    )


def can_restart_all(cluster: ClusterState) -> bool:
    """Whether somebody is there to start every worker anew, and every server that an agent had started."""
    agents = [cluster.agents.get(m.agent) for m in cluster.members_without_spares() if m.agent or m.role is Role.WORKER]
    return all(agent is not None and not agent.is_leaving for agent in agents)


def restart_limit(agent: AgentInfo | None, limit: int) -> int:
    """How many restarts there may be, where a host may have said less."""
    return min(limit, agent.max_restarts) if agent is not None and agent.max_restarts >= 0 else limit


def _choose_after_rows_lost(cluster: ClusterState, dead: Member, lost: str) -> tuple[RecoveryAction, str]:
    """With the server its rows are gone, and what the workers did since the last checkpoint with them."""
    settings = cluster.settings
    if not cluster.heals or dead.agent not in cluster.agents or not can_restart_all(cluster):
        return RecoveryAction.END, f"{lost}: start the cluster again, it resumes from its last checkpoint"
    if RecoveryStrategy.IN_PLACE not in settings.strategies:
        return RecoveryAction.END, f"{lost}, and recover-in-place is not enabled (COVEY_STRATEGY)"
    if cluster.restarts >= max(settings.max_restarts, ROWS_LOST_RESTARTS_MAX):
        return RecoveryAction.END, f"{lost}, and all workers were restarted {count_noun(cluster.restarts, 'time')} already"
    return RecoveryAction.RESTART_ALL, f"{lost}: all workers restart from the last checkpoint"


def _choose_replacement(cluster: ClusterState, dead: Member) -> tuple[RecoveryAction, str]:
    """The rungs that keep the others in their step."""
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
    nobody = f"no other host can run {dead.name} (COVEY_EXTRA_RANKS is {settings.extra_ranks})"
    if agent is None and (_waits_for_return(cluster, dead) or waits_before_shrink(settings)) and not has_left_worker(cluster):
        until = f"; the world shrinks after {settings.shrink_after_s:g} s" if waits_before_shrink(settings) else ""
        return RecoveryAction.WAIT, f"{nobody}: waiting for a host to join{until}"
    return RecoveryAction.END, nobody


def _waits_for_return(cluster: ClusterState, dead: Member) -> bool:
    """Whether recovery waits for who may come: not where the world is to shrink at once, and can."""
    at_once = RecoveryStrategy.ELASTIC in cluster.settings.strategies and not waits_before_shrink(cluster.settings)
    return cluster.settings.recovery and not (at_once and plan_shrink(cluster, dead)[0] is not None)


def waits_before_shrink(settings: ClusterSettings) -> bool:
    """Whether a host that comes in time spares the others the smaller world."""
    return RecoveryStrategy.ELASTIC in settings.strategies and settings.shrink_after_s > 0


def replacement_hosts(cluster: ClusterState) -> list[tuple[Member, AgentInfo]]:
    """Who could start the children of lost hosts: hosts that have come for them, the very one first that had them."""
    lost = sorted((m for m in cluster.members.values() if m.agent and m.state is NodeState.DEAD), key=lambda m: m.rank)
    found = []
    for role in (Role.WORKER, Role.PSERVER):
        free = cluster.free_slots_by_agent(role) if lost else {}
        waiting = [m for m in lost if m.role.group is role]
        for fits in (_is_successor_agent, lambda *_: True):
            for member in list(waiting):
                taker = next((name for name, count in free.items() if count and fits(cluster.agents[name], member)), None)
                if taker is not None:
                    free[taker] -= 1
                    waiting.remove(member)
                    found.append((member, cluster.agents[taker]))
    return found


def _is_successor_agent(agent: AgentInfo, lost: Member) -> bool:
    """Whether an agent is, by its --node-rank or its host, the next life of the one that had this member."""
    number = parse_rank_claim(lost.node_id)
    claimed = range(agent.first_rank, agent.first_rank + agent.slots) if agent.first_rank >= 0 else range(0)
    return number in claimed if claimed else agent.host.id == lost.host.id


def host_with_capacity(cluster: ClusterState, dead: Member) -> AgentInfo | None:
    """The host that carries the fewest extra ranks, if it may carry one more."""
    others = (
        agent for agent in cluster.agents.values() if agent.id != dead.agent and agent.connection and not agent.is_leaving
    )
    extra = {agent.id: _count_extra_members(cluster, agent) for agent in others}
    if not extra:
        return None
    best = min(extra, key=lambda agent: (extra[agent], agent))
    return cluster.agents[best] if extra[best] < cluster.settings.extra_ranks else None


def choose_spare(cluster: ClusterState, dead: Member) -> Member | None:
    """A spare that can take a worker's place: on its host if there is one there, else where the fewest extra ranks are."""
    found: list[tuple[bool, int, int, Member]] = []
    for spare in cluster.members_in_role(Role.SPARE):
        agent = cluster.agents.get(spare.agent)
        ready = spare.state is NodeState.ALIVE and spare.connection and cluster.progress(spare).is_spare_ready
        if dead.role is Role.WORKER and ready and agent is not None and agent.connection and not agent.is_leaving:
            away, extra = agent.id != dead.agent, _count_extra_members(cluster, agent)
            if not away or extra < cluster.settings.extra_ranks:
                found.append((away, extra, spare.rank, spare))
    return min(found)[-1] if found else None  # ranks differ, so members are never compared


def can_refill_spare(cluster: ClusterState, spare: Member) -> bool:
    """Whether a spare's place is filled again."""
    limit = restart_limit(cluster.agents.get(spare.agent), cluster.settings.replacements_max)
    return spare.deaths_without_progress < DEATHS_WITHOUT_PROGRESS_MAX and _count_replacements(cluster, spare) < limit


def _count_replacements(cluster: ClusterState, member: Member) -> int:
    """How many lives on its host came after one that failed."""
    return sum(m.restarts - m.handovers for m in cluster.children(member.agent))


def _count_extra_members(cluster: ClusterState, agent: AgentInfo) -> int:
    """How many nodes an agent runs that it did not bring."""
    return sum(m.role is not Role.SPARE for m in cluster.children(agent.id)) - agent.slots - agent.servers


def build_failure(
    cluster: ClusterState, dead: Member, code: int, reason: str, tail: list[str], log: str, error: ScriptError | None = None
) -> Failure:
    """How one member ended, and what the others of its role were doing."""
    said = reason or f"exit code {code}"
    others = sorted((m for m in cluster.members_in_role(dead.role) if m.uid != dead.uid), key=lambda m: m.rank)
    return Failure(
        role=dead.role,
        node_id=dead.node_id,
        rank=dead.rank,
        host=dead.host.name,
        code=code,
        reason=f"{said}, {error}" if error is not None else said,
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
    """Fills the places of spares, promotes one, and handles its end. It has no state of its own.

    A spare has run the program up to where it needs a rank. It is a member of its own role, outside the world; its rank only
    numbers it among the spares. Spares are started once a loop has finished a step: only then is it known that the program
    can be healed, and the first start is not slowed down. Free places are filled while the cluster is READY. The death of a
    spare is no failure of the run: it is started again as often as a worker would be, unless it keeps dying before it is ready.
    """

    def __init__(self, heartbeats: Heartbeats, members: Members) -> None:
        self._heartbeats, self._members = heartbeats, members

    def fill(self, step: Step) -> None:
        """Start the missing spares of every agent that is connected."""
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
        """Give the process of a spare to a worker's place; returns its connection, which the caller attaches once the change
        is durable. The agent starts no other process, because the record names this one."""
        step.out.publish(spare.name, "promoted", f"its process is {member.name} now")
        step.out.count("promotions")
        return self._members.promote_spare(spare, member)

    def on_exit(self, step: Step, spare: Member, code: int, reason: str) -> None:
        """A spare left or died: its place is free."""
        is_ready = self._heartbeats.progress(spare).is_spare_ready
        deaths = 0 if is_ready else spare.deaths_without_progress + 1
        if code == 0:  # it would end again
            deaths = DEATHS_WITHOUT_PROGRESS_MAX
        spare = self._members.set_deaths_without_progress(spare, deaths)
        step.out.publish(spare.name, "died" if code else "left", reason or f"code {code}", Level.from_exit_code(code))
        if deaths >= DEATHS_WITHOUT_PROGRESS_MAX:
            why = "its script exited before it needed a rank" if code == 0 else f"it died {deaths} times before it was ready"
            step.out.publish(spare.name, "given up", f"{why}, see its log", Level.WARNING)
        step.out.persist(MemberRecord.from_member(self._members.vacate_spare(spare)))


# -- the part ------------------------------------------------------------------------------------------------------------


class Recovery:
    """A recovery, from "a process died" to "all ranks have resumed".

    READY means that no member is dead, suspect or still agreeing with the others. Each death has one action with one reason.
    Two rules make a crash of the scheduler harmless at any moment: a new generation is durable before the incarnations that
    belong to it, and a death that restarts all workers is not durable before the restart is: the agent reports it again.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        lifecycle: Lifecycle,
        heartbeats: Heartbeats,
        members: Members,
        incidents: IncidentLog,
        barrier: HealBarrier,
        resize: Resize,
        resharding: Resharding,
        shutdown: Shutdown,
    ) -> None:
        self._settings, self._lifecycle, self._heartbeats, self._members = settings, lifecycle, heartbeats, members
        self._incidents, self._barrier, self._resize, self._resharding = incidents, barrier, resize, resharding
        self._shutdown, self._spares = shutdown, Spares(heartbeats, members)
        self.first_failure: Failure | None = None  # since the cluster was last READY
        self._last_rollback_step = -2  # the highest step at the last return to a checkpoint
        self._shrink_deadline = NEVER  # a host must come for the lost ranks by then
        self._unfinished_worker: Member | None = None  # a worker that had not left: asking all at each leave costs O(N²)
        self._suspect_member: Member | None = None  # a member that was suspect: likewise

    # -- 1. a process ended ------------------------------------------------------------------------------------------

    def on_child_exited(self, step: Step, connection: int, report: ChildExited) -> None:
        """An agent saw one of its children exit."""
        member = self.find_child(connection, report)
        if member is not None:
            self._on_exit(step, member, report.code, report.reason, report.tail, report.log, error=report.error)

    def find_child(self, connection: int, report: ChildStarted | ChildExited) -> Member | None:
        """The child that an agent reports about, if it is its own and this incarnation."""
        agent = self._members.agent_at(connection)
        member = self._members.members.get((report.role, report.node_id))
        if agent is None or member is None or member.agent != agent.id or member.incarnation != report.incarnation:
            return None
        return member

    def on_connection_lost(self, step: Step, connection: int, reason: str) -> None:
        """A node without an agent dies with its connection. A child does not: its agent reports the exit. An agent may come
        back, if the settings say so; otherwise its children die with it."""
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
        """A node or an agent leaves. Of a child the agent reports the exit, with its code."""
        left = self._members.detach(connection)
        if isinstance(left, AgentInfo):
            for child in self._members.children(left.id):  # the agent ends them, with the grace they need
                self._members.detach_member(child)
            self._on_agent_lost(step, left, leave.code, leave.reason)
        elif left is not None and left.agent:
            self._members.forget_instance(left)
        elif left is not None:
            self._on_exit(step, left, leave.code, leave.reason, error=leave.error)
        step.out.send(connection, LeaveAcknowledged())

    def on_host_gone(self, step: Step, host_life: str, reason: str) -> None:
        """A host is gone for good: its nodes are dead, and none that may still run there is admitted again."""
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
        """Treat a member as dead. Its process may still receive: it is told why before its connection is closed."""
        connection = self._members.current(member).connection
        self._on_exit(step, member, ExitCode.PEER_FAILED, reason, since=since)
        self._members.close_member(member, connection, step.out)

    def _on_agent_lost(self, step: Step, agent: AgentInfo, code: int, reason: str, since: float | None = None) -> None:
        """The children of a lost agent are dead, and no process can be started on its host."""
        children = self._members.children(agent.id)
        placed = [m for m in children if m.role is not Role.SPARE]
        is_dumping = self._shutdown.state is ShutdownState.DUMPING
        # while their host was leaving, no other could take them over: that is decided now
        undecided = [m for m in placed if m.state is NodeState.DEAD] if agent.is_leaving and not is_dumping else []
        is_forming = self._lifecycle.phase is Phase.FORMING
        is_done = placed and not undecided and not any(m.is_present for m in placed) and not is_forming
        if self._lifecycle.has_ended or is_done:
            return
        self._members.remove_agent(agent)
        step.out.publish(f"agent:{agent.id}", "gone", reason, Level.from_exit_code(code))
        cause = f"the agent on {agent.host.name} is gone ({reason})"
        for member in undecided:
            if not self._lifecycle.has_ended:
                self._on_death(step, member, build_failure(step.cluster, member, code, cause, [], ""), step.now)
        for member in [m for m in children if m.is_present]:
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
        """A process ended: it left (code 0) or died. `since`: when that began to show, if before now."""
        member = self._members.current(member)
        # a member of a growth that was rolled back is no member any more
        if not self._members.contains(member) or not member.is_present or self._lifecycle.has_ended:
            return None
        if member.role is Role.SPARE:
            return self._spares.on_exit(step, member, code, reason)
        if code and self._barrier.safe_point.done:  # every rank was at its end: nothing is left to repeat
            code, reason = 0, f"{reason or f'code {code}'}, after all ranks had finished"
        member = self._members.set_state(member, NodeState.LEFT if code == 0 else NodeState.DEAD)
        if self._lifecycle.phase is Phase.FORMING:
            self._members.remove(member)
            self._lifecycle.set_reason(decide_formation(step.cluster)[1])
            return step.out.publish(member.name, "gone before the cluster formed", reason or f"code {code}")
        if code and member.leave_reason:
            reason = member.leave_reason
        word, counter = ("handed over", "handovers") if member.leave_reason else ("died", "deaths")
        step.out.count("left" if code == 0 else counter)
        step.out.publish(member.name, "left" if code == 0 else word, reason or f"code {code}", Level.from_exit_code(code))
        if code == 0:
            step.out.persist(MemberRecord.from_member(member))
            return self.end_if_all_left(step)
        failure = build_failure(step.cluster, member, code, reason, tail or [], log, error)
        return self._on_death(step, member, failure, step.now if since is None else since)

    # -- 2. what follows from a death --------------------------------------------------------------------------------

    def _on_death(self, step: Step, member: Member, failure: Failure, since: float) -> None:
        """Choose an action, open an incident, and carry the action out."""
        member = self._members.current(member)
        if self._shutdown.state is ShutdownState.DUMPING:
            return self._shutdown.note_death(step, member)
        if member.role is Role.PSERVER and self._resharding.roll_back_if_joining(step, member, failure.reason):
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
        """Start one rank again, on its host or another, or in a spare; the others wait for it inside their step."""
        if not member.leave_reason:
            self.first_failure = self.first_failure or failure
        step.out.count("replacements")
        if member.role is Role.WORKER:  # the return of a server needs no agreement of the workers
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
        self._heartbeats.begin_life(member, step.now)
        self._members.attach_member(connection, member, step.now)
        self._members.send_rank(step, member)
        self._members.send_desired_children(step, {before, member.agent})  # the old process may still have to be ended

    def _move(self, step: Step, member: Member, agent: AgentInfo, reason: str) -> Member:
        """Give a member to another agent. Perhaps nobody is left on its host to end the old process: it is refused."""
        if member.connection:
            step.out.send(member.connection, Refused(f"this process was superseded: {reason}"))
            step.out.close(member.connection)
        return self._members.move_to_agent(member, agent)

    def _wait_for_host(self, step: Step, member: Member, failure: Failure, reason: str) -> None:
        """Wait until the member is started again by somebody else, or on a host that comes."""
        self.first_failure = self.first_failure or failure
        self._lifecycle.begin_healing(reason, step.now)
        self._set_shrink_deadline(step)
        self._barrier.regroup(step, _describe_death(member, failure), member)

    def _restart_all(self, step: Step, reason: str, cause: str = "") -> None:
        """Start all workers again, and the servers that agents run."""
        self._lifecycle.reset_for_restart(cause or reason)
        step.out.count("restarts")
        self._incidents.close(step, Outcome.RESTARTED)
        self._resize.finish_growth()  # joining members start with all others: nobody waits for them alone
        self._resharding.reset_for_restart()
        self._lifecycle.renew_heal_deadline(step.now)
        children = [member for member in self._members.members_without_spares() if member.agent]
        for member in children:
            self._members.reset_for_restart(member, step.now)
        self._barrier.regroup(step, reason, *children)
        self._members.send_assignments(step)

    def _roll_back_to_checkpoint(self, step: Step, reason: str) -> None:
        """The ranks cannot continue from where they are: restart all from their newest checkpoint, if agents can start them,
        and not twice for the same step."""
        highest_step = self._lifecycle.highest_step
        if not can_restart_all(step.cluster) or highest_step <= self._last_rollback_step:
            return self._shutdown.dump_or_end(step, ExitCode.PEER_FAILED, reason, self.first_failure)
        self._last_rollback_step = highest_step
        cause, reason = reason, f"{reason}: all workers restart from the newest checkpoint"
        step.out.publish("cluster", "roll back", reason, Level.WARNING)
        self._lifecycle.set_reason(reason)
        return self._restart_all(step, reason, cause)

    def _end(self, step: Step, member: Member, failure: Failure, reason: str) -> None:
        """No strategy is left: save the state, if configured, and end."""
        agent = self._members.agents.get(member.agent)
        if agent is None or not agent.is_leaving:
            self.first_failure = failure
            why = f"; not recovered: {reason}" if can_replace(step.cluster) else ""
            text = f"{member.name} on {failure.host}: {failure.reason}{why}"
            self._shutdown.dump_or_end(step, failure.code, text, failure)
        elif self._shutdown.dumpable_ranks(step):  # else its agent leaves when all of its workers have ended
            self._shutdown.dump_or_end(step, failure.code, f"{failure.host} was asked to leave, and {reason}")

    # -- 3. hosts come, or do not ------------------------------------------------------------------------------------

    def _set_shrink_deadline(self, step: Step) -> None:
        """A host that comes may start the lost members again. Where the world may shrink instead, it has a limited time."""
        if waits_before_shrink(self._settings):
            self._shrink_deadline = min(self._shrink_deadline, step.now + self._settings.shrink_after_s)

    def use_new_hosts(self, step: Step) -> None:
        """Start lost members again on hosts that came since; where nothing is lost, grow on them."""
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
        """Act on the first deadline that has passed; returns whether one had."""
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
        elif self._resize.roll_back_if_overdue(step) or self._resharding.roll_back_if_overdue(step):
            pass
        elif self._barrier.has_unexplained_failure(step.now):
            self._retry_collective(step)
        else:
            return False
        return True

    def _absent_members(self) -> list[Member]:
        """The members that are not here; a replacement is here once it has registered."""
        absent, is_pending = (NodeState.DEAD, NodeState.SUSPECT), self._barrier.is_pending
        members = self._members.members_without_spares()
        return [m for m in members if m.state in absent or (is_pending and m.is_present and not m.connection)]

    def _shrink_to_survivors(self, step: Step) -> None:
        """No host came in time for the lost members: continue without them, if possible."""
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
        """A collective failed and no death explains it: every process lives, so the step is repeated in a new generation."""
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

    # -- 4. the ranks agree and resume -------------------------------------------------------------------------------

    def on_report(self, step: Step, connection: int, report: SafePointReport) -> None:
        """A rank is at a safe point; when all are, each is told how to continue."""
        member = self._members.member_at(connection)
        if member is None or member.role is not Role.WORKER or report.generation != self._lifecycle.generation:
            return None
        plans = self._barrier.add_report(member, report)
        if not plans:
            return None
        if failure := next((plan.failure for plan in plans.values() if plan.failure), ""):
            return self._roll_back_to_checkpoint(step, failure)
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
        return None

    def on_state_fetched(self, step: Step, connection: int, report: StateFetched) -> None:
        if self._members.is_connected(connection) and report.generation == self._lifecycle.generation:
            self._incidents.mark_stage(Stage.RESTORED, step.now)

    def on_resumed(self, step: Step, connection: int, report: RankResumed) -> None:
        """A rank resumed, or a parameter server has its rows back."""
        member = self._members.member_at(connection)
        if member is None or report.generation != self._lifecycle.generation:
            return
        if member.role.group is not Role.PSERVER:
            self._barrier.add_resumed(member.rank)
            self._heartbeats.note_step(member, report.step)
            self._lifecycle.note_step(report.step)
            self.on_rank_resumed(step)
        elif not self._barrier.is_pending:  # no worker is being replaced as well
            self._incidents.mark_stage(Stage.RESTORED, step.now)
            self._incidents.close_if_resumed(step)

    def on_rank_resumed(self, step: Step) -> None:
        """When the last rank has resumed, the recovery or resize is over."""
        if self._barrier.all_resumed:
            self._barrier.reset_retries()
            if self._lifecycle.note_restart_resumed():
                step.out.persist_cluster()
            for member in self._members.members_in_role(Role.WORKER):
                if member.error is not None and member.error.step < 0:  # a script without steps makes progress by collectives
                    self._members.set_error(member, None)
            if step.cluster.joining_ids:
                self._resize.finish_growth()
            if not (step.cluster.departing_ids and self._resize.release_next_leavers(step)):
                self._incidents.close_if_resumed(step)
        self.update_readiness(step, "all ranks resumed")

    def update_readiness(self, step: Step, reason: str) -> None:
        """Become READY if no member is dead, suspect or still agreeing; leave RETURNING for HEALING if only the dead are
        missing."""
        phase, is_agreeing = self._lifecycle.phase, self._barrier.is_agreeing
        if self._shutdown.state is not ShutdownState.RUNNING or phase not in (Phase.HEALING, Phase.RETURNING):
            return
        if (is_agreeing and phase is not Phase.RETURNING) or self._has_suspect_member():  # the first is O(1) and asked N times
            return
        dead = [m for m in self._members.members_without_spares() if m.state is NodeState.DEAD]
        if not dead and not is_agreeing:
            self._barrier.finish_agreement()
            self.first_failure = None
            self._shrink_deadline = NEVER
            self._incidents.mark_stage(Stage.REFORMED, step.now)
            self._lifecycle.set_phase(Phase.READY, reason)
            if not self._barrier.has_group_met:
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

    # -- around it ---------------------------------------------------------------------------------------------------

    def end_if_all_left(self, step: Step) -> None:
        """End the cluster once every worker has left."""
        last = self._unfinished_worker
        if last is None or not self._members.contains(last) or self._members.current(last).state is NodeState.LEFT:
            workers = reversed(self._members.members_in_role(Role.WORKER))
            self._unfinished_worker = next((m for m in workers if m.state is not NodeState.LEFT), None)
        if self._unfinished_worker is None:
            self._shutdown.end(step, 0, f"{describe_all(self._members.size(Role.WORKER), 'worker')} finished")
        else:
            self.update_readiness(step, "all members are reachable again")

    def on_draining(self, step: Step, connection: int, drain: Draining) -> None:
        """A member, or a host with all its members, is asked to leave."""
        member, agent = self._members.member_at(connection), self._members.agent_at(connection)
        if member is not None:
            self._members.set_leave_reason(member, drain.reason)
        elif agent is not None and not agent.is_leaving:  # it repeats the message whenever it reconnects
            self._members.mark_agent_leaving(agent)
            step.out.publish(f"agent:{agent.id}", "leaving", drain.reason, Level.WARNING)
            if drain.scheduler_leaves and self._shutdown.dumpable_ranks(step):
                self._shutdown.dump_or_end(step, ExitCode.STOPPED, drain.reason)

    def run_idle_work(self, step: Step) -> None:
        """While the cluster is READY: release the next members of a scale-in, or fill the places of spares."""
        if self._lifecycle.phase is Phase.READY and self._lifecycle.trains and not self._resize.release_next_leavers(step):
            self._spares.fill(step)

    def postpone(self, by_s: float) -> None:
        self._shrink_deadline += by_s


def _describe_death(member: Member, failure: Failure) -> str:
    return f"{member.name} {'handed over' if member.leave_reason else 'died'}: {failure.reason}"
