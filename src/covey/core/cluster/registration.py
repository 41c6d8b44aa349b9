"""Registration of nodes and agents, and the formation of the cluster.

A node id names a member, an *instance id* its process, and the *incarnation* counts the processes of the member. A node is
admitted as a new member while there is room. It is re-attached to an existing member if it is the known process, or the one
that the member's agent started. A new process is admitted as the next incarnation if the known one is dead, the member has no
agent and recovery is enabled. A registration is deferred (the node repeats it) if there may be room later, or if it is
uncertain whether the known process is alive. Otherwise it is refused, and its connection is closed.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from covey.core.cluster.formation import decide_formation, describe_missing
from covey.core.cluster.heal_barrier import HealBarrier
from covey.core.cluster.members import MemberKey, describe_members, parse_rank_claim
from covey.core.cluster.recovery import Recovery
from covey.core.cluster.resize import Resize, resize_blocker
from covey.core.cluster.shutdown import Shutdown, ShutdownState
from covey.core.cluster.state import NEVER, BaseParts, ClusterState, Step
from covey.core.effects import Level
from covey.core.messages import Refused, Register, RegisterAgent, Registered
from covey.core.plurals import count_noun
from covey.core.types import AgentRecord, Member, MemberRecord, NodeState, Phase, Role
from covey.errors import ExitCode

DEFER_S = 0.5  # time after which a deferred node or agent registers again, at the latest
DEFERRED_INSTANCES_MAX = 1000  # remembered deferred instances, each published once; further ones are not published


# -- decisions -----------------------------------------------------------------------------------------------------------


class Admission(StrEnum):
    ADMIT = "admit"
    REATTACH = "re-attach"
    NEXT_INCARNATION = "return"
    DEFER = "hold off"
    REFUSE = "refuse"


class AdmissionDecision(msgspec.Struct, frozen=True):
    """Decision about a registration and its reason. `member_key` is the member to re-attach or replace; None: there is none."""

    admission: Admission
    reason: str
    member_key: MemberKey | None = None


def decide_node_admission(cluster: ClusterState, request: Register) -> AdmissionDecision:
    """Return the decision about the registration of a worker, server or spare."""
    if reason := _registration_blocker(cluster, request) or _claim_blocker(cluster, request):
        return AdmissionDecision(Admission.REFUSE, reason)
    if promoted := _decide_promoted_spare(cluster, request):
        return promoted
    member = _find_holder(cluster, request)
    if member is None:
        return _decide_new_node(cluster, request)
    key = (member.role, member.node_id)
    if member.agent:
        return _decide_child(member, request, key)
    if member.instance_id == request.instance_id:
        return AdmissionDecision(Admission.REATTACH, "the same process again", key)
    return _decide_other_instance(cluster, member, request, key)


def choose_node_id(request: Register) -> str:
    """Return the id that a node requests; if it requests none, one made of its instance id that does not claim a rank."""
    return request.node_id or (
        request.instance_id if parse_rank_claim(request.instance_id) is None else f"n{request.instance_id}"
    )


def decide_agent_admission(cluster: ClusterState, request: RegisterAgent) -> AdmissionDecision:
    """Return the decision about the registration of an agent with its workers, servers and spares."""
    if reason := _registration_blocker(cluster, request):
        return AdmissionDecision(Admission.REFUSE, reason)
    known = cluster.agents.get(request.agent)
    if known is not None and known.instance_id == request.instance_id:
        return AdmissionDecision(Admission.REATTACH, "the same agent again")
    if known is not None and known.connection:
        return AdmissionDecision(Admission.REFUSE, f"an agent named {request.agent} is already connected, on {known.host.name}")
    if known is not None and any(m.is_present for m in cluster.children(known.id)):
        return AdmissionDecision(Admission.DEFER, f"the previous process of agent {request.agent} is not known to be dead yet")
    if request.spares and not request.slots and not request.servers:
        return AdmissionDecision(Admission.ADMIT, f"{request.host.name} brings {count_noun(request.spares, 'spare')}")
    if cluster.phase is not Phase.FORMING:
        return _decide_late_agent(cluster, request)
    here, world = cluster.size(Role.WORKER), cluster.target_workers
    if here + request.slots > world:
        reason = (
            f"this host brings {count_noun(request.slots, 'worker')}, but {here} of {world} are registered already:"
            " start fewer, or raise the number of workers on every host"
        )
        return AdmissionDecision(Admission.REFUSE, reason)
    servers, required = cluster.size(Role.PSERVER), cluster.settings.server_num
    if servers + request.servers > required:
        return AdmissionDecision(
            Admission.REFUSE,
            f"this host brings {count_noun(request.servers, 'server')}, but {servers} of {required} are registered already",
        )
    wanted = range(request.first_rank, request.first_rank + request.slots) if request.first_rank >= 0 else range(0)
    if wanted.stop > world:
        return AdmissionDecision(
            Admission.REFUSE, f"ranks {wanted.start} to {wanted.stop - 1} do not exist: the world size is {world}"
        )
    for rank in wanted:
        if (member := cluster.member_at_rank(Role.WORKER, rank)) is not None:
            name = f"{member.name} on {member.host.name}"
            return AdmissionDecision(Admission.REFUSE, f"rank {rank} is taken by {name}: give each host its own --node-rank")
    brings = count_noun(request.slots, "worker") + (f" and {count_noun(request.servers, 'server')}" if request.servers else "")
    return AdmissionDecision(Admission.ADMIT, f"{request.host.name} brings {brings}")


def _decide_late_agent(cluster: ClusterState, request: RegisterAgent) -> AdmissionDecision:
    brings, world = f"{request.host.name} brings {count_noun(request.slots, 'worker')}", cluster.size(Role.WORKER)
    if lost := [m for m in cluster.members.values() if m.agent and m.state is NodeState.DEAD]:
        return AdmissionDecision(Admission.ADMIT, f"{brings}, and {describe_members(lost)} can be restarted")
    world += sum(cluster.free_slots_by_agent(Role.WORKER).values())  # slots of earlier hosts, which are used first
    if world < cluster.target_workers and not cluster.size(Role.PSERVER):
        return AdmissionDecision(Admission.ADMIT, f"{brings}, and the world may grow from {world} to {cluster.target_workers}")
    if disconnected := [agent for agent in cluster.agents.values() if not agent.connection and cluster.children(agent.id)]:
        return AdmissionDecision(
            Admission.DEFER, f"the agent on {disconnected[0].host.name} is unreachable: its ranks may become free"
        )
    return AdmissionDecision(
        Admission.REFUSE, f"the cluster has formed with its {count_noun(world, 'worker')}: this host registered too late"
    )


def _registration_blocker(cluster: ClusterState, request: Register | RegisterAgent) -> str:
    """Return a reason for refusal that does not depend on the requested member; "" if there is none."""
    if cluster.has_ended:
        return f"the cluster has ended: {cluster.reason}"
    if request.cluster_id and request.cluster_id != cluster.cluster_id:
        return f"it belongs to cluster {request.cluster_id}, and this is the scheduler of cluster {cluster.cluster_id}"
    if request.host.life in cluster.gone_hosts:
        return f"instance {request.host.life} of host {request.host.id} was reported gone"
    ours = cluster.settings.fingerprint()
    differences = [
        f"{name} is {theirs} on the node and {ours[name]} on the scheduler"
        for name, theirs in sorted(request.fingerprint.items())
        if name in ours and ours[name] != theirs
    ]
    return f"its settings differ from the scheduler's: {'; '.join(differences)}" if differences else ""


def _claim_blocker(cluster: ClusterState, request: Register) -> str:
    """Return why no member with this role, claimed rank or generation can exist; "" if one can."""
    world = cluster.target_workers if request.role is Role.WORKER else cluster.settings.required_count(request.role)
    if world == 0 and request.role is not Role.SPARE:
        count = "MS_WORKER_NUM" if request.role is Role.WORKER else "MS_SERVER_NUM"
        return f"this cluster has no members of role {request.role} ({count} is {world})"
    rank = parse_rank_claim(request.node_id)
    if (
        rank is not None
        and rank >= world
        and request.role is not Role.SPARE
        and (request.role, request.node_id) not in cluster.members
    ):
        return f"MS_NODE_ID={request.node_id} claims rank {rank}, but the {world} {request.role} ranks end at {world - 1}"
    if request.generation > cluster.generation:
        return f"its generation is {request.generation}, but the scheduler's journal ends at {cluster.generation}"
    return ""


def _decide_promoted_spare(cluster: ClusterState, request: Register) -> AdmissionDecision | None:
    """Return the decision to re-attach a promoted spare that has not received its promotion; None for any other node."""
    if request.role is not Role.SPARE:
        return None
    process = f"{request.role}:{request.node_id}.{request.incarnation}"
    member = next(
        (m for m in cluster.members.values() if m.promoted_from == process and m.instance_id == request.instance_id), None
    )
    return (
        AdmissionDecision(Admission.REATTACH, f"its process is {member.name} now", (member.role, member.node_id))
        if member
        else None
    )


def _find_holder(cluster: ClusterState, request: Register) -> Member | None:
    """Return the member that this registration requests, by id or by the rank that the id claims; None if there is none."""
    if (member := cluster.members.get((request.role, choose_node_id(request)))) is not None:
        return member
    rank = parse_rank_claim(request.node_id)
    if cluster.phase is not Phase.FORMING and (
        request.incarnation or cluster.resized_generation or cluster.settings.worker_max
    ):
        return None  # it was removed, or it is new in a world that may be resized, where ranks do not follow from ids
    return cluster.member_at_rank(request.role, rank) if rank is not None else None


def _decide_new_node(cluster: ClusterState, request: Register) -> AdmissionDecision:
    world = cluster.target_workers if request.role is Role.WORKER else cluster.settings.required_count(request.role)
    if cluster.phase is Phase.FORMING and cluster.size(request.role) < world:
        return AdmissionDecision(Admission.ADMIT, f"{cluster.size(request.role) + 1} of {world} {request.role}s are here")
    if request.incarnation:
        return AdmissionDecision(Admission.REFUSE, f"rank {request.rank} was reassigned to another process: this one must exit")
    here = cluster.members_in_role(request.role)
    if cluster.phase is not Phase.FORMING and cluster.settings.recovery:
        raw = sorted((m for m in here if not m.agent), key=lambda m: m.rank)
        for vacant in (m for m in raw if m.state is NodeState.DEAD):
            return AdmissionDecision(
                Admission.NEXT_INCARNATION, f"replaces {vacant.name} at rank {vacant.rank}", (vacant.role, vacant.node_id)
            )
        for silent in (m for m in raw if m.state is NodeState.SUSPECT):
            return AdmissionDecision(
                Admission.DEFER, f"all ranks are taken, but {silent.name} sends no heartbeats: its rank may become free"
            )
    if request.role is Role.WORKER and cluster.size(Role.WORKER) < world and not cluster.size(Role.PSERVER):
        if later := resize_blocker(cluster):
            return AdmissionDecision(Admission.DEFER, f"up to {world} workers are allowed, but not yet: {later}")
        return AdmissionDecision(Admission.ADMIT, f"up to {world} workers are allowed")
    reason = (
        f"one {request.role} too many: the cluster already has {world}"
        f" ({describe_members(here)}). Stop this one, or start the cluster with a larger number"
    )
    return AdmissionDecision(Admission.REFUSE, reason)


def _decide_child(member: Member, request: Register, key: MemberKey) -> AdmissionDecision:
    if request.incarnation == 0:
        rank = parse_rank_claim(request.node_id)
        return AdmissionDecision(
            Admission.REFUSE, f"rank {rank} is taken by {member.name}, which the agent on {member.host.name} runs"
        )
    if request.incarnation != member.incarnation or not member.is_present:
        now = f"incarnation {member.incarnation} is {member.state}"
        return AdmissionDecision(Admission.REFUSE, f"incarnation {request.incarnation} of {member.name} has ended: {now}")
    if member.instance_id in ("", request.instance_id):
        return AdmissionDecision(Admission.REATTACH, "the process its agent started", key)
    return AdmissionDecision(
        Admission.REFUSE, f"{member.name} is already registered, as process {member.pid} on {member.host.name}"
    )


def _decide_other_instance(cluster: ClusterState, member: Member, request: Register, key: MemberKey) -> AdmissionDecision:
    process = f" (process {member.pid})" if member.pid else ""  # not in the journal
    where = f"{member.name} on {member.host.name}{process}"
    if request.incarnation:
        return AdmissionDecision(Admission.REFUSE, f"rank {member.rank} was reassigned to {where}: this process must exit")
    if member.state is NodeState.LEFT:
        return AdmissionDecision(Admission.REFUSE, f"{member.name} has finished and left: no other process is needed")
    if member.state is NodeState.DEAD:
        if cluster.settings.recovery:
            return AdmissionDecision(Admission.NEXT_INCARNATION, f"incarnation {member.incarnation + 1} of {member.name}", key)
        return AdmissionDecision(Admission.REFUSE, f"{member.name} is dead and recovery is off: set MS_ENABLE_RECOVERY=1")
    if member.connection and member.state is not NodeState.SUSPECT:
        if member.node_id == request.node_id:
            return AdmissionDecision(Admission.REFUSE, f"{where} is alive: a second node with its id is not allowed")
        return AdmissionDecision(Admission.REFUSE, f"rank {parse_rank_claim(request.node_id)} is taken by {where}")
    return AdmissionDecision(Admission.DEFER, f"the previous process, {where}, is not known to be dead yet")


# -- the part ------------------------------------------------------------------------------------------------------------


class Registration:
    """Admission of nodes and agents, and the formation."""

    def __init__(
        self, base: BaseParts, barrier: HealBarrier, resize: Resize, shutdown: Shutdown, recovery: Recovery, now: float
    ) -> None:
        self._settings, self._lifecycle = base.settings, base.lifecycle
        self._heartbeats, self._members = base.heartbeats, base.members
        self._barrier, self._resize, self._shutdown, self._recovery = barrier, resize, shutdown, recovery
        self.last_refusal = ""  # the last one while FORMING, "": none; shown because the cluster may be waiting for that node
        self._deferred: set[str] = set()  # instance ids
        self._forming_since = now
        self._last_call_deadline = NEVER  # until then the formation waits for more workers than required

    def forget_deferred(self) -> None:
        """Forget the deferred instances, so that an instance that is deferred again is published again."""
        self._deferred.clear()

    def postpone(self, by_s: float) -> None:
        self._forming_since += by_s
        self._last_call_deadline += by_s

    # -- formation ---------------------------------------------------------------------------------------------------

    def form_or_give_up(self, step: Step) -> bool:
        """Form the cluster if it is complete and no more workers are awaited.

        If it has not formed within `topo_timeout_s` (negative: no limit), end it and return True; else return False.
        """
        self._form_if_complete(step)
        if self._lifecycle.phase is not Phase.FORMING or step.now <= self._forming_deadline:
            return False
        reason = f"not complete within {self._settings.topo_timeout_s:g} s: {describe_missing(step.cluster)}"
        self._shutdown.end(step, ExitCode.NOT_FORMED, reason)
        return True

    @property
    def _forming_deadline(self) -> float:
        limit_s = self._settings.topo_timeout_s
        return self._forming_since + limit_s if limit_s >= 0 else NEVER

    def _form_if_complete(self, step: Step) -> None:
        ranks, reason = decide_formation(step.cluster)
        target, wait_until = step.cluster.target_workers, min(self._last_call_deadline, self._forming_deadline)
        if ranks is not None and self._members.size(Role.WORKER) < target and step.now < wait_until:
            ranks, reason = None, f"{reason}, waiting a moment for more: at most {count_noun(target, 'worker')} may join"
        self._lifecycle.set_reason(reason)
        if ranks is None:
            return
        self._members.set_ranks(ranks)
        self._barrier.open_generation(self._lifecycle.advance_generation())
        self._lifecycle.set_phase(Phase.READY, reason)
        for agent in self._members.agents.values():
            step.out.persist(AgentRecord.from_agent(agent))
        for member in self._members.members.values():
            step.out.persist(MemberRecord.from_member(member))
        step.out.persist_cluster()  # last: after a crash before this write the journal says FORMING and its members are ignored
        step.out.publish("cluster", "formed", f"{reason}, generation 1")
        self._members.send_assignments(step)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def on_register(self, step: Step, connection: int, request: Register) -> None:
        """Admit, re-attach, defer or refuse a node."""
        decision = decide_node_admission(step.cluster, request)
        name = f"{request.role}:{request.node_id or request.instance_id}"
        if self._refuse_or_defer(step, connection, request, name, decision):
            return
        self._deferred.discard(request.instance_id)
        if decision.member_key is None:
            self._admit_node(step, connection, request, decision.reason)
        elif decision.admission is Admission.REATTACH:
            self._reattach(step, connection, self._members.members[decision.member_key], request)
        else:
            member = self._members.members[decision.member_key]
            self._admit_next_incarnation(step, connection, member, request, decision.reason)

    def _admit_node(self, step: Step, connection: int, request: Register, reason: str) -> None:
        node_id, is_forming = choose_node_id(request), self._lifecycle.phase is Phase.FORMING
        if is_forming:
            member = self._members.admit_node(request, node_id, step.now)
        else:
            member = self._members.admit_joining_node(request, node_id, self._lifecycle.generation + 1)
        member = self._members.attach_member(connection, member, step.now)
        step.out.publish(member.name, "joined", reason, Level.DETAIL)
        self._send_registered(step, connection, member)
        self._last_call_deadline = step.now + self._settings.last_call_s
        if is_forming:
            self._form_if_complete(step)
        else:
            world = self._members.size(Role.WORKER)
            growth = f"the world grows from {world - 1} to {world} workers because {member.name} joined"
            self._resize.grow_by(step, [member], growth, "a worker joined")

    def _send_registered(self, step: Step, connection: int, member: Member) -> None:
        step.out.send(connection, Registered(self._lifecycle.cluster_id, member.node_id, member.incarnation))

    def _reattach(self, step: Step, connection: int, member: Member, request: Register) -> None:
        """Attach a member to this connection. Unless the member is WAITING or LEFT, mark it as alive and send its rank."""
        if member.connection != connection:
            self._members.close_connection(member.connection, step.out)
        is_known = member.instance_id != ""
        self._members.identify(member, request)
        member = self._members.attach_member(connection, member, step.now)
        if not is_known:
            self._heartbeats.begin_life(member, step.now)
        if member.agent and self._lifecycle.note_init():
            step.out.persist_cluster()  # a restarted scheduler may receive the report of a death before any registration
        self._send_registered(step, connection, member)
        if member.state in (NodeState.WAITING, NodeState.LEFT):
            return
        was_dead = member.state is NodeState.DEAD
        member = self._members.set_state(member, NodeState.ALIVE)
        if was_dead:
            step.out.persist(MemberRecord.from_member(member))
        if is_known:
            kind = "spare" if member.role is Role.SPARE else "rank"
            step.out.publish(member.name, "re-attached", f"{kind} {member.rank} continues")
        self._members.send_rank(step, member)
        if self._shutdown.state is ShutdownState.DUMPING:
            self._shutdown.repeat_dump_request(step, member)
        self._recovery.update_readiness(step, "all members re-attached")

    def _admit_next_incarnation(self, step: Step, connection: int, dead: Member, request: Register, reason: str) -> None:
        member = self._members.admit_next_incarnation(dead, request, choose_node_id(request), step.now)
        step.out.count("returns")
        self._barrier.regroup(step, f"{member.name} returned", member)
        self._members.attach_member(connection, member, step.now)
        step.out.publish(member.name, "returned", reason)
        self._send_registered(step, connection, member)
        self._members.send_rank(step, member)
        self._recovery.update_readiness(step, "all ranks are filled again")

    # -- agents ------------------------------------------------------------------------------------------------------

    def on_register_agent(self, step: Step, connection: int, request: RegisterAgent) -> None:
        """Admit, re-attach, defer or refuse an agent."""
        decision = decide_agent_admission(step.cluster, request)
        name = f"agent:{request.agent}"
        if self._refuse_or_defer(step, connection, request, name, decision):
            return
        is_forming = self._lifecycle.phase is Phase.FORMING
        if decision.admission is Admission.REATTACH:
            agent = self._members.agents[request.agent]
            if agent.connection != connection:
                self._members.close_connection(agent.connection, step.out)
            self._members.mark_children_alive(agent, step.now)
        else:
            agent = self._members.add_agent(request)
            if is_forming:
                self._members.admit_children(agent)
            else:
                step.out.persist(AgentRecord.from_agent(agent))
            self._last_call_deadline = step.now + self._settings.last_call_s
            step.out.publish(name, "joined", decision.reason)
        agent = self._members.attach_agent(connection, agent, step.now)
        step.out.send(connection, Registered(self._lifecycle.cluster_id))
        if is_forming:
            self._form_if_complete(step)
        else:
            self._members.send_desired_children(step, {agent.id})
            self._recovery.use_new_hosts(step)
            self._recovery.update_readiness(step, "all members re-attached")

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _refuse_or_defer(
        self, step: Step, connection: int, request: Register | RegisterAgent, name: str, decision: AdmissionDecision
    ) -> bool:
        """Refuse or defer the request if that is the decision; return whether it was refused or deferred.

        It is also refused if its connection belongs to another process. A refusal closes the connection.
        """
        known = self._members.member_at(connection) or self._members.agent_at(connection)
        reason = decision.reason
        if known is not None and known.instance_id != request.instance_id:
            reason = "its connection already belongs to another node"
        elif decision.admission is Admission.DEFER:
            self._defer(step, connection, request.instance_id, name, reason)
            return True
        elif decision.admission is not Admission.REFUSE:
            return False
        has_missed_end = self._shutdown.tell_if_missed(step, connection, request.instance_id, request.cluster_id)
        if not has_missed_end:
            step.out.count("refused")
            address = request.host.address
            if self._lifecycle.phase is Phase.FORMING:
                self.last_refusal = f"{request.host.name} ({address}) was refused: {reason}"
                self._lifecycle.set_reason(decide_formation(step.cluster)[1])
            step.out.publish(name, "refused", f"{reason} (from {address})", Level.WARNING)
            step.out.send(connection, Refused(reason))
        step.out.close(connection)
        self._recovery.on_connection_lost(step, connection, "refused")
        return True

    def _defer(self, step: Step, connection: int, instance_id: str, name: str, reason: str) -> None:
        if instance_id not in self._deferred and len(self._deferred) < DEFERRED_INSTANCES_MAX:
            self._deferred.add(instance_id)
            step.out.publish(name, "held off", reason, Level.WARNING)
        step.out.send(connection, Refused(reason, retry_after_s=DEFER_S))
