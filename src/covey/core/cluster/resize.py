"""The number of workers changes: on request, because a worker or a host came, or because a lost rank is not replaced.

A *member index* is a member's number for the whole run: its replacements keep it and no other member ever gets it. Its *rank*
is its position in the world of the present generation. Ranks have no holes: when one leaves, the highest rank fills its place
and all others keep theirs. Ranks in the middle of a step compute from the indexes which ranks left and which samples were not
used.

Every change is one new generation in which every member is told its rank. A growth succeeds or is rolled back as a whole.
"""

from __future__ import annotations

import msgspec

from covey.core.cluster.heal_barrier import HealBarrier
from covey.core.cluster.incident_log import IncidentLog
from covey.core.cluster.members import Heartbeats, Members, describe_members, natural_sort_key
from covey.core.cluster.state import NEVER, ClusterState, Lifecycle, Step
from covey.core.effects import Level
from covey.core.incidents import Outcome
from covey.core.messages import ClusterEnded, MemberIndexes, Refused, ScaleAccepted, ScaleRequest
from covey.core.plurals import count_noun, is_or_are
from covey.core.types import AgentRecord, ClusterRecord, ClusterSettings, Member, NodeState, Phase, Role

WORLD_MAX = 4096  # workers
JOIN_TIMEOUT_S = 300.0  # how long the workers or servers of a growth may take to come, before it is rolled back


# -- decisions ----------------------------------------------------------------------------------------------------------


class ShrinkPlan(msgspec.Struct, frozen=True):
    """One member goes; `filler`, where there is one, takes its rank."""

    departing: Member
    filler: Member | None


def plan_shrink(cluster: ClusterState, gone: Member) -> tuple[ShrinkPlan | None, str]:
    """May the others go on in a world that is smaller by this member?"""
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
    """Who is still to leave on request. Where deaths have left nobody else, the lowest of them stays."""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    leavers = [m for m in workers if m.node_id in cluster.departing_ids]
    return leavers if len(leavers) < len(workers) else leavers[1:]


def has_left_worker(cluster: ClusterState) -> bool:
    """Whether a worker has ended well before the others: then nobody can be in step with all of them any more."""
    return any(m.state is NodeState.LEFT for m in cluster.members_in_role(Role.WORKER))


def can_roll_back(cluster: ClusterState) -> bool:
    """Whether a growth can be taken back: some must still be there from before, and have the state."""
    before = [m for m in cluster.members_in_role(Role.WORKER) if m.node_id not in cluster.joining_ids]
    return bool(cluster.joining_ids) and cluster.trains and any(m.is_present for m in before) and not has_left_worker(cluster)


class ResizePlan(msgspec.Struct, frozen=True):
    """More or fewer workers or servers, as it can be done: the agents of those who come, or who goes."""

    agents: list[str]
    departing: list[Member]


def resize_blocker(cluster: ClusterState) -> str:
    """Why the world cannot change its size now; "" where it can."""
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
    """May the world change as asked, and how?"""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    world = len(workers)
    if reason := resize_blocker(cluster):
        return None, reason
    wanted = request.workers if request.workers >= 0 else world + request.more_workers
    leavers = workers[wanted:]
    if request.node_ids:
        known = {m.node_id: m for m in workers}
        leavers, reason = select_departing(
            request.node_ids, Role.WORKER, known, "workers", ", ".join(sorted(known, key=natural_sort_key))
        )
        if not leavers:
            return None, reason
        wanted = world - len(leavers)
    if wanted == world:
        return None, f"there {is_or_are(world)} {count_noun(world, 'worker')} already"
    if reason := _world_size_blocker(cluster, wanted):
        return None, reason
    if wanted < world:
        return ResizePlan([], leavers), f"the world shrinks from {world} to {count_noun(wanted, 'worker')}, as requested"
    agents = least_loaded_agents(cluster, wanted - world)
    if not agents:
        return None, "no agent can start a worker: only covey run can add workers"
    return ResizePlan(agents, []), f"the world grows from {world} to {wanted} workers, as requested"


def least_loaded_agents(cluster: ClusterState, count: int) -> list[str]:
    """The agents of so many who come: each on the host that has the fewest then. Empty where there is no agent."""
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
    """How many workers there should be, if so many more may come by themselves."""
    if reason := resize_blocker(cluster):
        return None, reason
    wanted = cluster.size(Role.WORKER) + more
    if reason := _world_size_blocker(cluster, wanted):
        return None, reason
    return wanted, f"up to {wanted} workers are allowed, as requested"


def _world_size_blocker(cluster: ClusterState, wanted: int) -> str:
    """Why there cannot be so many workers; "" where there can."""
    most = cluster.settings.worker_max or WORLD_MAX
    return "" if 1 <= wanted <= most else f"a world of {wanted} workers is not possible: expected 1 to {most}"


def select_departing(
    node_ids: list[str], role: Role, known: dict[str, Member], what: str, listed: str
) -> tuple[list[Member], str]:
    """The members with these ids ("2" or "worker:2"), who are to go; none, and why, if one is unknown or all would go."""
    ids = {node_id.removeprefix(f"{role}:") for node_id in node_ids}
    if unknown := sorted(ids - known.keys()):
        return [], f"The node id:{unknown[0]} is illegal. The {what} are {listed}"
    if ids == known.keys():
        return [], f"not all {what} can be removed: use covey stop to end the cluster"
    return [member for node_id, member in known.items() if node_id in ids], ""


def plan_growth(cluster: ClusterState) -> tuple[ResizePlan | None, str]:
    """May the world grow by itself, because hosts have come that offer more workers than it has, and can start them
    at once?"""
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
    """The member index of every worker, in order of rank."""
    workers = sorted(cluster.members_in_role(Role.WORKER), key=lambda m: m.rank)
    return MemberIndexes(cluster.resized_generation, [m.member_index for m in workers])


# -- the part -----------------------------------------------------------------------------------------------------------


class Resize:
    """Owns the running change of the number of workers.

    A growth is under way while `joining_ids` is not empty: it ends when all ranks have resumed, or is rolled back. A scale-in
    is under way while `departing_ids` is not empty: its members leave in turns. Both can be under way at once.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        lifecycle: Lifecycle,
        heartbeats: Heartbeats,
        members: Members,
        barrier: HealBarrier,
        incidents: IncidentLog,
    ) -> None:
        self._settings, self._lifecycle, self._heartbeats, self._members = settings, lifecycle, heartbeats, members
        self._barrier, self._incidents = barrier, incidents
        self.requested_workers = 0  # the number of workers that was requested last; 0: none was
        self.joining_ids: tuple[str, ...] = ()  # node ids of the workers that a growth waits for
        self.departing_ids: tuple[str, ...] = ()  # node ids of the workers that leave once all others have resumed
        self._join_deadline = NEVER

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, step: Step, request: ScaleRequest) -> ScaleAccepted | Refused:
        """Change the number of workers as requested, if that is possible now."""
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
        """Admit this many more workers; they come by themselves."""
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
        """Grow on hosts that came and have free slots, up to the target."""
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
        """Begin a generation with these members, which are admitted already; the others wait for them inside their step.
        Returns the number of the incident."""
        step.out.count("scale_out")
        number = self._incidents.open(step, "scale-out", reason, cause)
        self.joining_ids = tuple(m.node_id for m in joining)
        self._join_deadline = step.now + JOIN_TIMEOUT_S
        for member in joining:
            self._heartbeats.begin_life(member, step.now)
        self._start_generation(step, reason, reason, joining)
        return number

    def finish_growth(self) -> None:
        """All ranks have resumed, or a growth has lost its meaning: nobody is waited for."""
        self.joining_ids = ()

    def roll_back_if_joining(self, step: Step, member: Member, reason: str) -> bool:
        """After a death: roll the growth back if this member was part of it; returns whether it did.

        A growth cannot be rolled back any more when no earlier member holds the state: then the joining members are ordinary.
        """
        if not can_roll_back(step.cluster):
            self.joining_ids = ()
        if member.role is not Role.WORKER or member.node_id not in self.joining_ids:
            return False
        self.roll_back(step, f"{member.name} did not join: {reason}")
        return True

    def roll_back_if_overdue(self, step: Step) -> bool:
        """Roll the growth back if not all came in time; returns whether it did."""
        if step.now <= self._join_deadline or not can_roll_back(step.cluster):
            return False
        self.roll_back(step, f"not all joined within {JOIN_TIMEOUT_S:g} s")
        return True

    def roll_back(self, step: Step, reason: str) -> int:
        """Remove all members of the growth; returns the number of the incident."""
        joining = [m for m in self._members.members_in_role(Role.WORKER) if m.node_id in self.joining_ids]
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
        """Continue without a lost member, in the step the others are in."""
        step.out.count("shrinks")
        self._start_generation(step, reason, what, self._remove(step, [member]))
        self._limit_slots(step, [member])
        self._members.send_desired_children(step, {member.agent})  # to end what may be left of it

    def shrink_to_survivors(self, step: Step, lost: list[Member], cause: str) -> None:
        """Continue without the lost members, for whom no host came."""
        reason = f"{cause}: the other ranks continue in a world of {self._members.size(Role.WORKER) - len(lost)}"
        step.out.count("shrinks")
        self._incidents.open(step, "elastic-training", reason, cause)
        self._start_generation(step, reason, cause, self._remove(step, lost))

    def _release(self, step: Step, leavers: list[Member], reason: str) -> None:
        """Release as many members as may leave at once, the highest ranks first; the rest leaves when all others resumed."""
        at_once = [n for m in self._members.members_in_role(Role.WORKER) if (n := self._heartbeats.progress(m).departing_max)]
        leavers = sorted(leavers, key=lambda m: -m.rank)
        now, later = (leavers[: min(at_once)], leavers[min(at_once) :]) if at_once else (leavers, [])
        self.departing_ids = tuple(m.node_id for m in later)
        self._start_generation(step, reason, reason, self._remove(step, now))
        for member in now:
            if member.connection:
                step.out.send(member.connection, ClusterEnded(f"{member.name} leaves: {reason}"))

    def release_next_leavers(self, step: Step) -> bool:
        """Release the next members that are to leave; returns whether it did.

        It does not if there is none, or if the number of workers may not change now. Then the operation waits: after a rollback
        for the first step, near the end for the end of the run.
        """
        leavers = remaining_departing(step.cluster)
        if not leavers:
            self.departing_ids = ()
            return False
        if plan_shrink(step.cluster, leavers[0])[0] is None:
            return False
        if self._barrier.all_resumed:
            self._release(step, leavers, f"next to leave, as requested: {describe_members(leavers)}")
        else:  # the scheduler was restarted and does not know which ranks resumed
            reason = f"waiting for all ranks to resume before {describe_members(leavers)} leave"
            self._barrier.require_all_to_resume()
            self._lifecycle.begin_healing(reason, step.now)
            self._barrier.regroup(step, reason)
        return True

    def _remove(self, step: Step, leavers: list[Member]) -> list[Member]:
        """Remove members; returns the members whose rank changed."""
        changed: dict[int, Member] = {}
        for leaver in leavers:
            member = self._members.current(leaver)
            plan, reason = plan_shrink(step.cluster, member)
            assert plan is not None, reason
            self._members.ignore_connection(member)
            self._members.remove(member)
            if plan.filler is not None:
                changed[plan.filler.uid] = self._members.change_rank(plan.filler, member.rank)
        left = {member.uid for member in leavers}
        return [member for uid, member in changed.items() if uid not in left]

    def _limit_slots(self, step: Step, gone: list[Member]) -> None:
        for name in sorted({m.agent for m in gone} & self._members.agents.keys()):
            agent = self._members.limit_slots(self._members.agents[name])
            step.out.persist(AgentRecord.from_agent(agent))

    # -- both --------------------------------------------------------------------------------------------------------

    def _start_generation(self, step: Step, reason: str, what: str, changed: list[Member]) -> None:
        """Begin a generation with another number of workers and tell every member its rank."""
        self._barrier.require_agreement()
        self._lifecycle.begin_healing(reason, step.now)
        self._lifecycle.set_reason(reason)  # also where another change was under way
        self._lifecycle.note_resize()
        self._barrier.start_generation(step, *changed)
        step.out.publish(
            "cluster", "resized", f"{what}; the world size is now {self._members.size(Role.WORKER)}", Level.WARNING
        )
        for member in self._members.reachable():
            self._members.send_rank(step, member)

    def postpone(self, by_s: float) -> None:
        self._join_deadline += by_s

    def restore_fields(self, record: ClusterRecord) -> None:
        self.requested_workers, self.departing_ids, self.joining_ids = (
            record.requested_workers,
            record.departing_ids,
            record.joining_ids,
        )

    def resume(self, step: Step) -> None:
        """After a restart of the scheduler: a change that was under way ends when all ranks say again that they resumed;
        the members of a growth have the full time to come, from now."""
        is_pending = self._lifecycle.trains and self._incidents.is_resizing
        self._barrier.restore(is_pending)
        if not is_pending:
            self.joining_ids = ()
        self._join_deadline = step.now + JOIN_TIMEOUT_S
