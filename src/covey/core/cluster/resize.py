"""Resizing of the world (all workers): on request, when a worker or a host joins, or when a dead worker is not replaced.

A *member index* is constant until all workers restart: replacements keep it, and no other member gets it. The *rank* is the
position in the world of the current generation. Ranks are contiguous: when a rank leaves, the member with the highest rank
takes it over, and all others keep theirs.

Every change of the world size starts a generation, in which each reachable member receives its rank. With a sharded optimizer,
the workers of a scale-in may leave in batches, one generation each. A scale-out completes or is rolled back as a whole; if it
can no longer be rolled back (`can_roll_back`), its workers are treated as all others.
"""

from __future__ import annotations

import msgspec

from covey.core.cluster.heal_barrier import HealBarrier
from covey.core.cluster.members import describe_members, natural_sort_key
from covey.core.cluster.state import NEVER, BaseParts, ClusterState, Step
from covey.core.effects import Level
from covey.core.incidents import Outcome
from covey.core.messages import ClusterEnded, MemberIndexes, Refused, ScaleAccepted, ScaleRequest
from covey.core.plurals import count_noun, is_or_are
from covey.core.types import AgentRecord, ClusterRecord, Member, NodeState, Phase, Role

WORLD_MAX = 4096  # largest world size if `worker_max` is not set
JOIN_TIMEOUT_S = 300.0  # seconds for the new workers or servers of a scale-out to join, before it is rolled back


# -- decisions ----------------------------------------------------------------------------------------------------------


class ShrinkPlan(msgspec.Struct, frozen=True):
    """Removal of one member. `filler` takes over its rank; None: `departing` has the highest rank, so no rank changes."""

    departing: Member
    filler: Member | None


def plan_shrink(cluster: ClusterState, gone: Member) -> tuple[ShrinkPlan | None, str]:
    """Return the plan to continue without this member, or None if the world cannot shrink; and the reason."""
    workers = cluster.members_in_role(Role.WORKER)
    others = [m for m in workers if m.uid != gone.uid]
    if gone.role is not Role.WORKER:
        return None, f"{gone.name} is not a worker"
    if not others:
        return None, f"{gone.name} is the only worker"
    if cluster.size(Role.PSERVER):
        return None, f"the number of workers ({len(workers)}) is fixed with parameter servers"
    if has_left_worker(cluster):
        return None, "some workers have finished and left already"
    if not cluster.trains:
        return None, f"no covey.Loop completed a step before {gone.name} died, so the world cannot shrink"
    highest = max(workers, key=lambda m: m.rank)
    return ShrinkPlan(
        gone, highest if highest.uid != gone.uid else None
    ), f"the other ranks continue in a world of {len(others)}"


def remaining_departing(cluster: ClusterState) -> list[Member]:
    """Return the workers that are still to leave on request, by rank; if these are all workers, without the lowest rank."""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    departing = [m for m in workers if m.node_id in cluster.departing_ids]
    return departing if len(departing) < len(workers) else departing[1:]


def has_left_worker(cluster: ClusterState) -> bool:
    """Return whether a worker has left, usually because its script finished. The world size cannot change then."""
    return any(m.state is NodeState.LEFT for m in cluster.members_in_role(Role.WORKER))


def can_roll_back(cluster: ClusterState) -> bool:
    """Return whether a scale-out is in progress and can be rolled back: `trains` is set, a worker from before the scale-out is
    present, and no worker has left."""
    before = [m for m in cluster.members_in_role(Role.WORKER) if m.node_id not in cluster.joining_ids]
    return bool(cluster.joining_ids) and cluster.trains and any(m.is_present for m in before) and not has_left_worker(cluster)


class ResizePlan(msgspec.Struct, frozen=True):
    """Plan of a resize: the ids of the agents that start the new members, one entry per member, or the members that leave."""

    agents: list[str]
    departing: list[Member]


def resize_blocker(cluster: ClusterState) -> str:
    """Return why the world size cannot change now; "" if it can."""
    if cluster.phase is not Phase.READY:
        return f"The cluster is not ready. It is {cluster.phase}: {cluster.reason}"
    if cluster.size(Role.PSERVER):
        world = cluster.size(Role.WORKER)
        return f"the number of workers ({world}) is fixed with parameter servers: only the number of servers can change"
    if cluster.settings.default_target_workers == 1 or not cluster.trains:
        return "only a world of two or more workers whose covey.Loop has completed a step can change its size"
    if has_left_worker(cluster):
        return "some workers have finished and left already"
    return ""


def plan_resize(cluster: ClusterState, request: ScaleRequest) -> tuple[ResizePlan | None, str]:
    """Return the plan for a request about workers, or None if it is not possible now; and the reason."""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    world = len(workers)
    if reason := resize_blocker(cluster):
        return None, reason
    wanted = request.workers if request.workers >= 0 else world + request.more_workers
    departing = workers[wanted:]
    if request.node_ids:
        known = {m.node_id: m for m in workers}
        departing, reason = select_departing(
            request.node_ids, Role.WORKER, known, "workers", ", ".join(sorted(known, key=natural_sort_key))
        )
        if not departing:
            return None, reason
        wanted = world - len(departing)
    if wanted == world:
        return None, f"there {is_or_are(world)} {count_noun(world, 'worker')} already"
    if reason := _world_size_blocker(cluster, wanted):
        return None, reason
    if wanted < world:
        return ResizePlan([], departing), f"the world shrinks from {world} to {count_noun(wanted, 'worker')}, as requested"
    agents = least_loaded_agents(cluster, wanted - world)
    if not agents:
        return None, "no agent can start a worker: only covey run can add workers"
    return ResizePlan(agents, []), f"the world grows from {world} to {wanted} workers, as requested"


def least_loaded_agents(cluster: ClusterState, count: int) -> list[str]:
    """Return the agent ids for `count` new members: for each, the agent with the fewest children, whatever its slots.

    Agents that are disconnected or leaving are not used. Return [] if there are no others.
    """
    load = {
        agent.id: len(cluster.children(agent.id))
        for agent in cluster.agents.values()
        if agent.connection and not agent.is_leaving
    }
    agents: list[str] = []
    for _ in range(count if load else 0):
        agents.append(min(load, key=lambda agent: (load[agent], agent)))
        load[agents[-1]] += 1
    return agents


def target_with_extra(cluster: ClusterState, more: int) -> tuple[int | None, str]:
    """Return the world size plus `more`, or None if that cannot be the new target now; and the reason."""
    if reason := resize_blocker(cluster):
        return None, reason
    wanted = cluster.size(Role.WORKER) + more
    if reason := _world_size_blocker(cluster, wanted):
        return None, reason
    return wanted, f"up to {wanted} workers are allowed, as requested"


def _world_size_blocker(cluster: ClusterState, wanted: int) -> str:
    most = cluster.settings.worker_max or WORLD_MAX
    return "" if 1 <= wanted <= most else f"a world of {wanted} workers is not possible: expected 1 to {most}"


def select_departing(
    node_ids: list[str], role: Role, known: dict[str, Member], what: str, listed: str
) -> tuple[list[Member], str]:
    """Return the members with these ids ("2" or "worker:2") and ""; [] and the reason if an id is unknown or no member would
    remain. `known` has all members by id; `what` and `listed` are parts of the reason."""
    ids = {node_id.removeprefix(f"{role}:") for node_id in node_ids}
    if unknown := sorted(ids - known.keys()):
        return [], f"The node id:{unknown[0]} is illegal. The {what} are {listed}"
    if ids == known.keys():
        return [], f"not all {what} can be removed: use covey stop to end the cluster"
    return [member for node_id, member in known.items() if node_id in ids], ""


def plan_growth(cluster: ClusterState) -> tuple[ResizePlan | None, str]:
    """Return the plan to grow up to the target on free slots of hosts whose templates are not importing; and the reason.

    The plan is None if the target is reached, the world size cannot change now, or no slot is free. In the last case, ignore
    the reason.
    """
    world = cluster.size(Role.WORKER)
    if world >= cluster.target_workers:
        return None, f"all {world} requested workers are present"
    if reason := resize_blocker(cluster):
        return None, reason
    offers = {
        agent: free
        for agent, free in cluster.free_slots_by_agent(Role.WORKER).items()
        if not cluster.agents[agent].template_importing
    }
    offered = [agent for agent, free in offers.items() for _ in range(free)][: cluster.target_workers - world]
    hosts = ", ".join(dict.fromkeys(cluster.agents[agent].host.name for agent in offered))
    return (ResizePlan(offered, []) if offered else None), (
        f"the world grows from {world} to {world + len(offered)} workers because {hosts} joined"
    )


def make_member_indexes(cluster: ClusterState) -> MemberIndexes:
    """Return the member index of every worker, in order of rank."""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    return MemberIndexes(cluster.resized_generation, [m.member_index for m in workers])


# -- the part -----------------------------------------------------------------------------------------------------------


class Resize:
    """Target size of the world, and the resizes in progress.

    A scale-out is in progress while `joining_ids` is not empty. A scale-in has further workers to release while `departing_ids`
    is not empty.
    """

    def __init__(self, base: BaseParts, barrier: HealBarrier) -> None:
        self._settings, self._lifecycle, self._heartbeats = base.settings, base.lifecycle, base.heartbeats
        self._members, self._incidents = base.members, base.incidents
        self._barrier = barrier
        self.requested_workers = 0  # the last requested world size, lowered by a rollback; 0: none was requested
        self.joining_ids: tuple[str, ...] = ()  # node ids of the new workers of a scale-out
        self.departing_ids: tuple[str, ...] = ()  # node ids that leave in later batches, once all ranks have resumed
        self._join_deadline = NEVER

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, step: Step, request: ScaleRequest) -> ScaleAccepted | Refused:
        """Start a scale-out or scale-in of the workers, roll a scale-out back, or set the target (`start_processes` is false).
        Return the reply, `Refused` if that is not possible now."""
        if request.roll_back:
            if not can_roll_back(step.cluster):
                return Refused("no scale-out is in progress that could be rolled back")
            number = self.roll_back(step, "requested")
            return ScaleAccepted(number, self._lifecycle.reason)
        if not request.start_processes:
            return self._raise_target(step, request.more_workers)
        plan, reason = plan_resize(step.cluster, request)
        if plan is None:
            return Refused(reason)
        self.requested_workers = self._members.size(Role.WORKER) + len(plan.agents) - len(plan.departing)
        if plan.agents:
            number = self._grow_on_agents(step, plan.agents, reason, "requested")
        else:
            step.out.count("scale_in")
            number = self._incidents.open(step, "scale-in", reason, "requested")
            self._release(step, plan.departing, reason)
        return ScaleAccepted(number, reason)

    def _raise_target(self, step: Step, more: int) -> ScaleAccepted | Refused:
        wanted, reason = target_with_extra(step.cluster, more)
        if wanted is None:
            return Refused(reason)
        self.requested_workers = wanted
        step.out.persist_cluster()
        step.out.publish("cluster", "room", reason)
        self.grow_on_free_slots(step)
        return ScaleAccepted(0, reason)

    # -- growing -----------------------------------------------------------------------------------------------------

    def grow_on_free_slots(self, step: Step) -> None:
        """Start the scale-out that `plan_growth` returns, if any."""
        plan, reason = plan_growth(step.cluster)
        if plan is not None:
            self._grow_on_agents(step, plan.agents, reason, "a host joined")

    def _grow_on_agents(self, step: Step, agents: list[str], reason: str, cause: str) -> int:
        generation = self._lifecycle.generation + 1
        joining = [self._members.admit_joining_child(agent, generation, step.now) for agent in agents]
        number = self.grow_by(step, joining, reason, cause)
        self._members.send_desired_children(step, set(agents))
        return number

    def grow_by(self, step: Step, joining: list[Member], reason: str, cause: str) -> int:
        """Start a scale-out: a generation with these members, which are admitted already. Return the number of its incident."""
        step.out.count("scale_out")
        number = self._incidents.open(step, "scale-out", reason, cause)
        self.joining_ids = tuple(m.node_id for m in joining)
        self._join_deadline = step.now + JOIN_TIMEOUT_S
        for member in joining:
            self._heartbeats.begin_life(member, step.now)
        self._start_generation(step, reason, reason, joining)
        return number

    def finish_growth(self) -> None:
        """Record that no scale-out is in progress any more."""
        self.joining_ids = ()

    def roll_back_if_joining(self, step: Step, member: Member, reason: str) -> bool:
        """Roll the scale-out back if the dead member was part of it; return whether that happened.

        If the scale-out can no longer be rolled back (`can_roll_back`), its members are treated as all others from now on.
        """
        if not can_roll_back(step.cluster):
            self.joining_ids = ()
        if member.role is not Role.WORKER or member.node_id not in self.joining_ids:
            return False
        self.roll_back(step, f"{member.name} did not join: {reason}")
        return True

    def roll_back_if_overdue(self, step: Step) -> bool:
        """Roll the scale-out back if the ranks have not resumed within `JOIN_TIMEOUT_S` and `can_roll_back` allows it; return
        whether that happened."""
        if step.now <= self._join_deadline or not can_roll_back(step.cluster):
            return False
        if not self._barrier.has_group_met and all(m.is_present and m.connection for m in self._joining_members()):
            self.finish_growth()  # without a group no rank sends RankResumed
            return False
        self.roll_back(step, f"not all joined within {JOIN_TIMEOUT_S:g} s")
        return True

    def _joining_members(self) -> list[Member]:
        return [m for m in self._members.members_in_role(Role.WORKER) if m.node_id in self.joining_ids]

    def roll_back(self, step: Step, reason: str) -> int:
        """Remove all new members of the scale-out in a new generation; return the number of the incident opened for that.

        The agents' slots are limited to their remaining workers, so that the removed ones are not started again.
        """
        joining = self._joining_members()
        self.joining_ids = ()
        reason = f"{reason}; the scale-out is rolled back"
        self._incidents.close(step, Outcome.ROLLED_BACK, reason=reason)
        number = self._incidents.open(step, "scale-in", reason, reason)
        remaining = self._members.size(Role.WORKER) - len(joining)
        self.requested_workers = min(self.requested_workers, max(self._settings.default_target_workers, remaining))
        self._start_generation(step, reason, reason, self._remove(step, joining))
        self._limit_slots(step, joining)
        for member in joining:
            self._members.close_connection(member.connection, step.out)
        self._members.send_desired_children(step, {m.agent for m in joining})
        return number

    # -- shrinking ---------------------------------------------------------------------------------------------------

    def give_up_member(self, step: Step, member: Member, what: str, reason: str) -> None:
        """Continue without a dead member: start a generation in which the remaining ranks resume their current step."""
        step.out.count("shrinks")
        self._start_generation(step, reason, what, self._remove(step, [member]))
        self._limit_slots(step, [member])
        self._members.send_desired_children(step, {member.agent})  # to end what may be left of its process

    def shrink_to_survivors(self, step: Step, lost: list[Member], cause: str) -> None:
        """Continue without the lost members, for which no host joined: open an incident and start a generation."""
        reason = f"{cause}: the other ranks continue in a world of {self._members.size(Role.WORKER) - len(lost)}"
        step.out.count("shrinks")
        self._incidents.open(step, "elastic-training", reason, cause)
        self._start_generation(step, reason, cause, self._remove(step, lost))

    def _release(self, step: Step, departing: list[Member], reason: str) -> None:
        """Remove departing members, highest ranks first, in a new generation, and send the connected ones `ClusterEnded`.

        With a sharded optimizer, at most as many leave as its replicas allow (the lowest `departing_max`). The rest leave after
        all remaining ranks have resumed.
        """
        at_once = [n for m in self._members.members_in_role(Role.WORKER) if (n := self._heartbeats.progress(m).departing_max)]
        departing = sorted(departing, key=lambda m: -m.rank)
        now, later = (departing[: min(at_once)], departing[min(at_once) :]) if at_once else (departing, [])
        self.departing_ids = tuple(m.node_id for m in later)
        self._start_generation(step, reason, reason, self._remove(step, now))
        for member in now:
            if member.connection:
                step.out.send(member.connection, ClusterEnded(f"{member.name} leaves: {reason}"))

    def release_next_leavers(self, step: Step) -> bool:
        """Release the next batch of departing members, or make all ranks resume first; return whether a generation was started.

        Return False if no member is to leave, or if the world size cannot change now.
        """
        departing = remaining_departing(step.cluster)
        if not departing:
            self.departing_ids = ()
            return False
        if plan_shrink(step.cluster, departing[0])[0] is None:
            return False
        if self._barrier.all_resumed:
            self._release(step, departing, f"next to leave, as requested: {describe_members(departing)}")
        else:  # the scheduler was restarted: it is unknown which ranks have resumed
            reason = f"waiting for all ranks to resume before {describe_members(departing)} leave"
            self._barrier.require_all_to_resume()
            self._lifecycle.begin_healing(reason, step.now)
            self._barrier.regroup(step, reason)
        return True

    def _remove(self, step: Step, departing: list[Member]) -> list[Member]:
        """Remove members; return the remaining members whose rank changed."""
        changed: dict[int, Member] = {}
        for leaving in departing:
            member = self._members.current(leaving)
            plan, reason = plan_shrink(step.cluster, member)
            assert plan is not None, reason
            self._members.ignore_connection(member)
            self._members.remove(member)
            if plan.filler is not None:
                changed[plan.filler.uid] = self._members.change_rank(plan.filler, member.rank)
        left = {member.uid for member in departing}
        return [member for uid, member in changed.items() if uid not in left]

    def _limit_slots(self, step: Step, gone: list[Member]) -> None:
        for name in sorted({m.agent for m in gone} & self._members.agents.keys()):
            agent = self._members.limit_slots(self._members.agents[name])
            step.out.persist(AgentRecord.from_agent(agent))

    # -- generations and the journal ---------------------------------------------------------------------------------

    def _start_generation(self, step: Step, reason: str, what: str, changed: list[Member]) -> None:
        """Enter HEALING, start a generation with another world size, and send every reachable member its rank.

        `changed` are the members to persist, and `what` is published.
        """
        self._barrier.require_agreement()
        self._lifecycle.begin_healing(reason, step.now)
        self._lifecycle.set_reason(reason)  # also if the cluster was already HEALING
        self._lifecycle.note_resize()
        self._barrier.start_generation(step, *changed)
        step.out.publish(
            "cluster", "resized", f"{what}; the world size is now {self._members.size(Role.WORKER)}", Level.WARNING
        )
        for member in self._members.reachable():
            self._members.send_rank(step, member)

    def postpone(self, by_s: float) -> None:
        self._join_deadline += by_s

    def restore(self, record: ClusterRecord) -> None:
        self.requested_workers, self.departing_ids, self.joining_ids = (
            record.requested_workers,
            record.departing_ids,
            record.joining_ids,
        )

    def resume(self, step: Step) -> None:
        """After a restart of the scheduler, continue a resize that was in progress; new members have `JOIN_TIMEOUT_S` to
        join."""
        is_pending = self._lifecycle.trains and self._incidents.is_resizing
        self._barrier.resume(is_pending)
        if not is_pending:
            self.joining_ids = ()
        self._join_deadline = step.now + JOIN_TIMEOUT_S
