"""What happens after a death: the rung of the ladder that is taken, and why.

The ladder is ordered: retry, recover-in-place, recover, elastic-training, dump, exit. A rung is taken only if it is configured,
and supported by what is left of the cluster, and its budget is not used up. Scripts that never call `covey.init()` cannot be
healed: for them there is torchrun's answer, to start everyone anew as often as --max-restarts says.
"""

from __future__ import annotations

from enum import StrEnum

from covey.core.cluster import ranks, resize_plan
from covey.core.cluster.state import ClusterState
from covey.core.plurals import count_noun
from covey.core.strategy_ladder import DEATHS_WITHOUT_PROGRESS_MAX as DEATHS_WITHOUT_PROGRESS_MAX  # for the modules beside
from covey.core.strategy_ladder import RecoveryStrategy as RecoveryStrategy
from covey.core.types import AgentInfo, ClusterSettings, Failure, Member, NodeState, Role, ScriptError
from covey.errors import ExitCode

UNRECOVERABLE_CODES = frozenset({ExitCode.BAD_SETTING, ExitCode.BAD_SCRIPT})  # of a program's author, not of fate
REPORTED_OTHERS_MAX = 64  # named in a report
ROWS_LOST_RESTARTS_MAX = 3  # of all, because a server's rows were lost


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
        return RecoveryAction.END, f"{dead.name} ended with code {code}: another start does not mend that"
    if reason := _script_error_blocker(cluster, dead, error):
        return RecoveryAction.END, reason
    if dead.role is Role.PSERVER and code == ExitCode.ROWS_LOST:
        return _choose_after_rows_lost(
            cluster, dead, f"the rows of {dead.name} were lost, for the holder of their copy died as well"
        )
    after, reason = _choose_without_shrink(cluster, dead)
    if after is not RecoveryAction.END or RecoveryStrategy.ELASTIC not in cluster.settings.strategies:
        return after, reason
    plan, why = resize_plan.plan_shrink(cluster, dead)
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
    errors = [error if member is dead else member.error for member in workers]
    if len(workers) > 1 and all(e is not None and (e.cause, e.step) == (error.cause, error.step) for e in errors):
        return f"all {len(workers)} ranks raised {error.kind} at the same place: correct the script"
    return ""


def _choose_without_shrink(cluster: ClusterState, dead: Member) -> tuple[RecoveryAction, str]:
    """The rungs after which the world is what it was."""
    settings = cluster.settings
    if dead.role is Role.PSERVER and not cluster.rows_survive_death and (dead.agent or settings.copies == 0):
        return _choose_after_rows_lost(cluster, dead, f"the rows of {dead.name} were lost with it, for they had no copy")
    if not dead.agent:
        if _waits_for_return(cluster, dead):
            return RecoveryAction.WAIT, f"waiting for {dead.name} to be started again, with the same variables"
        return RecoveryAction.END, "nobody is waited for (COVEY_SHRINK_AFTER)" if settings.recovery else "recovery is off"
    if can_replace(cluster):
        return _choose_replacement(cluster, dead)
    if dead.agent not in cluster.agents:
        return RecoveryAction.END, f"nobody is left on {dead.host.name} to start {dead.name} again"
    limit = min(restart_limit(agent, settings.max_restarts) for agent in cluster.agents.values())
    if limit > cluster.restarts and not can_restart_all(cluster):
        return RecoveryAction.END, "not all workers can start anew, for the host of some is away or leaves"
    if limit > cluster.restarts:
        return RecoveryAction.RESTART_ALL, f"restart {cluster.restarts + 1} of {limit}: all workers start anew"
    if limit:
        return RecoveryAction.END, "no restart is left"
    why = "" if cluster.heals else ", and none can be replaced alone, for no worker has called covey.init()"
    return RecoveryAction.END, f"no restarts were asked for (--max-restarts){why}"


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
        return RecoveryAction.END, f"{lost}: start the cluster again, it goes on from its last checkpoint"
    if RecoveryStrategy.IN_PLACE not in settings.strategies:
        return RecoveryAction.END, f"{lost}, and recover-in-place is not among the strategies"
    if cluster.restarts >= max(settings.max_restarts, ROWS_LOST_RESTARTS_MAX):
        return RecoveryAction.END, f"{lost}, and all were started anew {count_noun(cluster.restarts, 'time')} already"
    return RecoveryAction.RESTART_ALL, f"{lost}: all start anew, from the last checkpoint"


def _choose_replacement(cluster: ClusterState, dead: Member) -> tuple[RecoveryAction, str]:
    """The rungs that keep the others in their step."""
    settings = cluster.settings
    if not {RecoveryStrategy.IN_PLACE, RecoveryStrategy.RECOVER} & set(settings.strategies):
        return RecoveryAction.END, "nothing is to be started again (COVEY_STRATEGY)"
    if dead.deaths_without_progress >= DEATHS_WITHOUT_PROGRESS_MAX:
        return RecoveryAction.END, f"{dead.name} died {dead.deaths_without_progress} times without a step in between"
    if RecoveryStrategy.RECOVER in settings.strategies and (spare := choose_spare(cluster, dead)) is not None:
        return (
            RecoveryAction.PROMOTE,
            f"{spare.name} on {spare.host.name} takes the place of {dead.name}; the others stay in their step",
        )
    agent = cluster.agents.get(dead.agent)
    here = agent is not None and not agent.is_leaving
    spent, limit = _count_replacements(cluster, dead), restart_limit(agent, settings.replacements_max)
    if RecoveryStrategy.IN_PLACE in settings.strategies and here and spent < limit:
        return RecoveryAction.REPLACE, f"{dead.name} is started again on {dead.host.name}; the others stay in their step"
    other = host_with_capacity(cluster, dead)
    if RecoveryStrategy.RECOVER in settings.strategies and other is not None:
        return RecoveryAction.MOVE, f"{dead.name} is started again on {other.host.name}; the others stay in their step"
    if here and spent >= limit:
        return RecoveryAction.END, f"{limit} replacements on {dead.host.name} are used up (--max-restarts)"
    nobody = f"no host is left that could take {dead.name} over (COVEY_EXTRA_RANKS is {settings.extra_ranks})"
    if (
        agent is None
        and (_waits_for_return(cluster, dead) or waits_before_shrink(settings))
        and not resize_plan.has_left_worker(cluster)
    ):
        until = f"; the world shrinks after {settings.shrink_after_s:g} s" if waits_before_shrink(settings) else ""
        return RecoveryAction.WAIT, f"{nobody}: waiting for one to come{until}"
    return RecoveryAction.END, nobody


def _waits_for_return(cluster: ClusterState, dead: Member) -> bool:
    """Whether recovery waits for who may come: not where the world is to shrink at once, and can."""
    at_once = RecoveryStrategy.ELASTIC in cluster.settings.strategies and not waits_before_shrink(cluster.settings)
    return cluster.settings.recovery and not (at_once and resize_plan.plan_shrink(cluster, dead)[0] is not None)


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
    number = ranks.parse_rank_claim(lost.node_id)
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
        ready = spare.state is NodeState.ALIVE and spare.connection and spare.progress.is_spare_ready
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


def dumpable_ranks(cluster: ClusterState) -> tuple[set[int], str]:
    """The ranks that could write down what they hold, or why none can."""
    if cluster.has_ended:
        return set(), f"the cluster has ended: {cluster.reason}"
    able = {m.rank for m in cluster.members_in_role(Role.WORKER) if m.connection and m.is_present and m.progress.in_loop}
    return able, "" if able else "no rank is in a covey.Loop, which alone can write down what it holds"


def find_kill_target(cluster: ClusterState, name: str) -> tuple[Member | None, str]:
    """The node that is to be killed to see what follows; None, and why, where that cannot be done from here."""
    member = next((m for m in cluster.members.values() if m.name == name), None)
    if cluster.has_ended:
        return None, f"the cluster has ended: {cluster.reason}"
    if member is None:
        return None, f"there is no node {name[:100]!r}: GET /nodes lists them"
    agent = cluster.agents.get(member.agent)
    if not member.is_present:
        return None, f"{name} does not run: it is {member.state}"
    if not member.pid:
        return None, f"{name} does not run yet: its process is being started"
    if agent is None or not agent.connection:
        where = f"process {member.pid} on {member.host.name}"
        return None, f"no agent keeps {name}, so nobody can kill it from here: it is {where}"
    return member, f"process {member.pid} of {name} on {member.host.name} is killed"


def build_failure(
    cluster: ClusterState, dead: Member, code: int, reason: str, tail: list[str], log: str, error: ScriptError | None = None
) -> Failure:
    """How one member ended, and what the others of its role were doing."""
    said = reason or f"exit code {code}"
    others = sorted((m for m in cluster.members_in_role(dead.role) if m is not dead), key=lambda m: m.rank)
    return Failure(
        role=dead.role,
        node_id=dead.node_id,
        rank=dead.rank,
        host=dead.host.name,
        code=code,
        reason=f"{said}, {error}" if error is not None else said,
        tail=tail,
        others=[_describe_activity(member) for member in others[:REPORTED_OTHERS_MAX]],
        log=log,
        error=error,
    )


def _describe_activity(member: Member) -> str:
    said = [f"rank {member.rank} on {member.host.name}: {member.state}"]
    if member.progress.step >= 0:
        said.append(f"step {member.progress.step}")
    if member.progress.phase:
        said.append(member.progress.phase)
    return ", ".join(said)
