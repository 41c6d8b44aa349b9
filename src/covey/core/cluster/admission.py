"""Who may be a member: the answer to a registration, as a pure decision with its reason.

Identity is fenced. A node id names a place; a *life* names the process in it; the *incarnation* counts lives. A registration
is admitted when its place is free, re-attached when it is the very life the scheduler knows, and returned (the next
incarnation of a place) when the life before it is known to be over. When that is not known, the newcomer is held off until
it is: two processes never hold one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from covey.core.cluster import ranks, resize_plan
from covey.core.cluster.state import ClusterState, MemberKey
from covey.core.messages import NAMES_MAX, Register, RegisterAgent
from covey.core.plurals import count_noun
from covey.core.types import Member, NodeState, Phase, Role

DEFER_S = 0.5  # how soon a node that is held off asks again


class Admission(StrEnum):
    ADMIT = "admit"
    REATTACH = "re-attach"
    NEXT_INCARNATION = "return"
    DEFER = "hold off"
    REFUSE = "refuse"


class AdmissionDecision(msgspec.Struct, frozen=True):
    """The decision, its reason, and the place it concerns where there is one already."""

    admission: Admission
    reason: str
    member_key: MemberKey | None = None


def decide_node_admission(cluster: ClusterState, wish: Register) -> AdmissionDecision:
    """May this node join, and as what?"""
    if reason := _registration_blocker(cluster, wish) or _claim_blocker(cluster, wish):
        return AdmissionDecision(Admission.REFUSE, reason)
    if promoted := _decide_promoted_spare(cluster, wish):
        return promoted
    member = _find_holder(cluster, wish)
    if member is None:
        return _decide_new_node(cluster, wish)
    place = (member.role, member.node_id)
    if member.agent:
        return _decide_child(member, wish, place)
    if member.life == wish.instance_id:
        return AdmissionDecision(Admission.REATTACH, "the same life again", place)
    return _decide_other_instance(cluster, member, wish, place)


def choose_node_id(wish: Register) -> str:
    """The id a node asks for, or one made of its life, which must not look like a claim to a rank."""
    return wish.node_id or (wish.instance_id if ranks.parse_rank_claim(wish.instance_id) is None else f"n{wish.instance_id}")


def decide_agent_admission(cluster: ClusterState, wish: RegisterAgent) -> AdmissionDecision:
    """May this agent bring its workers?"""
    if reason := _registration_blocker(cluster, wish):
        return AdmissionDecision(Admission.REFUSE, reason)
    known = cluster.agents.get(wish.agent)
    if known is not None and known.life == wish.instance_id:
        return AdmissionDecision(Admission.REATTACH, "the same agent again")
    if known is not None and known.connection:
        return AdmissionDecision(Admission.REFUSE, f"an agent named {wish.agent} is here already, on {known.host.name}")
    if known is not None and any(m.is_present for m in cluster.children(known.id)):
        return AdmissionDecision(Admission.DEFER, f"the life before of the agent {wish.agent} is not known to be over yet")
    if wish.spares and not wish.slots and not wish.servers:
        return AdmissionDecision(Admission.ADMIT, f"{wish.host.name} brings {count_noun(wish.spares, 'spare')}")
    if cluster.phase is not Phase.FORMING:
        return _decide_late_agent(cluster, wish)
    here, world = cluster.size(Role.WORKER), cluster.target_workers
    if here + wish.slots > world:
        reason = (
            f"this host brings {count_noun(wish.slots, 'worker')}, but {here} of {world} are here already:"
            " start fewer, or raise the number of workers on every host"
        )
        return AdmissionDecision(Admission.REFUSE, reason)
    servers, places = cluster.size(Role.PSERVER), cluster.settings.server_num
    if servers + wish.servers > places:
        return AdmissionDecision(
            Admission.REFUSE,
            f"this host brings {count_noun(wish.servers, 'server')}, but {servers} of {places} are here already",
        )
    wanted = range(wish.first_rank, wish.first_rank + wish.slots) if wish.first_rank >= 0 else range(0)
    if wanted.stop > world:
        return AdmissionDecision(Admission.REFUSE, f"ranks {wanted.start} to {wanted.stop - 1} do not exist: there are {world}")
    for rank in wanted:
        if (member := cluster.member_at_rank(Role.WORKER, rank)) is not None:
            who = f"{member.name} on {member.host.name}"
            return AdmissionDecision(
                Admission.REFUSE, f"rank {rank} is taken by {who}: was the same --node-rank given to two hosts?"
            )
    brings = count_noun(wish.slots, "worker") + (f" and {count_noun(wish.servers, 'server')}" if wish.servers else "")
    return AdmissionDecision(Admission.ADMIT, f"{wish.host.name} brings {brings}")


def _decide_late_agent(cluster: ClusterState, wish: RegisterAgent) -> AdmissionDecision:
    """A host that comes after the formation may take over what a lost one had, or make the world larger."""
    brings, world = f"{wish.host.name} brings {count_noun(wish.slots, 'worker')}", cluster.size(Role.WORKER)
    if lost := [m for m in cluster.members.values() if m.agent and m.state is NodeState.DEAD]:
        return AdmissionDecision(Admission.ADMIT, f"{brings}, and {describe_members(lost)} can be started again")
    world += sum(cluster.free_slots_by_agent(Role.WORKER).values())  # of hosts that are here already, and whose turn is next
    if world < cluster.target_workers and not cluster.size(Role.PSERVER):
        return AdmissionDecision(Admission.ADMIT, f"{brings}, and the world may grow from {world} to {cluster.target_workers}")
    if away := [agent for agent in cluster.agents.values() if not agent.connection and cluster.children(agent.id)]:
        return AdmissionDecision(
            Admission.DEFER, f"the agent on {away[0].host.name} is out of reach: its places may become free"
        )
    return AdmissionDecision(
        Admission.REFUSE, f"the cluster has formed with its {count_noun(world, 'worker')}: this host came too late"
    )


def describe_members(members: Iterable[Member]) -> str:
    """Members in a sentence, in a human order, at most `NAMES_MAX` of them."""
    sorted_names = sorted((member.name for member in members), key=ranks.natural_sort_key)
    shown = ", ".join(sorted_names[:NAMES_MAX])
    more = len(sorted_names) - NAMES_MAX
    return f"{shown} and {more} more" if more > 0 else shown or "nobody"


def _registration_blocker(cluster: ClusterState, wish: Register | RegisterAgent) -> str:
    """Why a registration belongs to another cluster, to a host that is over, or to this cluster started with other settings; ""
    when it does not."""
    if cluster.has_ended:
        return f"the cluster has ended: {cluster.reason}"
    if wish.cluster_id and wish.cluster_id != cluster.cluster_id:
        return f"it belongs to cluster {wish.cluster_id}, and this is the scheduler of cluster {cluster.cluster_id}"
    if wish.host.life in cluster.gone:
        return f"this life of the host {wish.host.id} is over ({wish.host.life})"
    ours = cluster.settings.fingerprint()
    differences = [
        f"{name} is {theirs} there and {ours[name]} here"
        for name, theirs in sorted(wish.fingerprint.items())
        if name in ours and ours[name] != theirs
    ]
    return f"its settings differ from the scheduler's: {'; '.join(differences)}" if differences else ""


def _claim_blocker(cluster: ClusterState, wish: Register) -> str:
    """Why no place can exist for this registration; "" when one can."""
    world = cluster.target_workers if wish.role is Role.WORKER else cluster.settings.required_count(wish.role)
    if world == 0 and wish.role is not Role.SPARE:
        count = "MS_WORKER_NUM" if wish.role is Role.WORKER else "MS_SERVER_NUM"
        return f"this cluster has no place for the role {wish.role} ({count} is {world})"
    rank = ranks.parse_rank_claim(wish.node_id)
    if rank is not None and rank >= world and wish.role is not Role.SPARE and (wish.role, wish.node_id) not in cluster.members:
        return f"MS_NODE_ID={wish.node_id} claims rank {rank}, but the {world} {wish.role} ranks end at {world - 1}"
    if wish.generation > cluster.generation:
        return f"it has seen generation {wish.generation}, but the scheduler's journal ends at {cluster.generation}"
    return ""


def _decide_promoted_spare(cluster: ClusterState, wish: Register) -> AdmissionDecision | None:
    """A spare that was given a worker's place, and has not heard of it."""
    if wish.role is not Role.SPARE:
        return None
    process = f"{wish.role}:{wish.node_id}.{wish.incarnation}"
    member = next((m for m in cluster.members.values() if m.process == process and m.life == wish.instance_id), None)
    return AdmissionDecision(Admission.REATTACH, f"it is {member.name} now", (member.role, member.node_id)) if member else None


def _find_holder(cluster: ClusterState, wish: Register) -> Member | None:
    """The member in the place this registration asks for: by id, or by the rank that id claims."""
    if (member := cluster.members.get((wish.role, choose_node_id(wish)))) is not None:
        return member
    rank = ranks.parse_rank_claim(wish.node_id)
    if cluster.phase is not Phase.FORMING and (wish.incarnation or cluster.resized or cluster.settings.worker_max):
        return None  # its place is gone, or it is new in a world that changes: that rank is another's
    return cluster.member_at_rank(wish.role, rank) if rank is not None else None


def _decide_new_node(cluster: ClusterState, wish: Register) -> AdmissionDecision:
    world = cluster.target_workers if wish.role is Role.WORKER else cluster.settings.required_count(wish.role)
    if cluster.phase is Phase.FORMING and cluster.size(wish.role) < world:
        return AdmissionDecision(Admission.ADMIT, f"{cluster.size(wish.role) + 1} of {world} {wish.role}s are here")
    if wish.incarnation:
        return AdmissionDecision(Admission.REFUSE, f"this life is over: another node took its rank {wish.rank}")
    here = cluster.members_in_role(wish.role)
    if cluster.phase is not Phase.FORMING and cluster.settings.recovery:
        raw = sorted((m for m in here if not m.agent), key=lambda m: m.rank)
        for vacant in (m for m in raw if m.state is NodeState.DEAD):
            return AdmissionDecision(
                Admission.NEXT_INCARNATION, f"takes rank {vacant.rank} after {vacant.name}", (vacant.role, vacant.node_id)
            )
        for silent in (m for m in raw if m.state is NodeState.SUSPECT):
            return AdmissionDecision(
                Admission.DEFER, f"every place is taken, but {silent.name} is silent: its place may become free"
            )
    if wish.role is Role.WORKER and cluster.size(Role.WORKER) < world and not cluster.size(Role.PSERVER):
        if later := resize_plan.resize_blocker(cluster):
            return AdmissionDecision(Admission.DEFER, f"there is place for {world} workers, but not yet: {later}")
        return AdmissionDecision(Admission.ADMIT, f"there is place for {world} workers")
    reason = (
        f"one {wish.role} too many: the cluster has its {world}"
        f" ({describe_members(here)}). Stop this one, or start the cluster with a larger number"
    )
    return AdmissionDecision(Admission.REFUSE, reason)


def _decide_child(member: Member, wish: Register, place: MemberKey) -> AdmissionDecision:
    """A worker whose process an agent started: the agent's word says which incarnation may speak."""
    if wish.incarnation == 0:
        rank = ranks.parse_rank_claim(wish.node_id)
        return AdmissionDecision(
            Admission.REFUSE, f"rank {rank} is taken by {member.name}, which the agent on {member.host.name} runs"
        )
    if wish.incarnation != member.incarnation or not member.is_present:
        now = f"incarnation {member.incarnation} is {member.state}"
        return AdmissionDecision(Admission.REFUSE, f"incarnation {wish.incarnation} of {member.name} is over: {now}")
    if member.life in ("", wish.instance_id):
        return AdmissionDecision(Admission.REATTACH, "the process its agent started", place)
    return AdmissionDecision(Admission.REFUSE, f"{member.name} is already here, as process {member.pid} on {member.host.name}")


def _decide_other_instance(cluster: ClusterState, member: Member, wish: Register, place: MemberKey) -> AdmissionDecision:
    process = f" (process {member.pid})" if member.pid else ""  # the journal does not know it
    where = f"{member.name} on {member.host.name}{process}"
    if wish.incarnation:
        return AdmissionDecision(Admission.REFUSE, f"this life is over: {where} took its rank {member.rank}")
    if member.state is NodeState.LEFT:
        return AdmissionDecision(Admission.REFUSE, f"{member.name} has finished and left: its work is done")
    if member.state is NodeState.DEAD:
        if cluster.settings.recovery:
            return AdmissionDecision(
                Admission.NEXT_INCARNATION, f"incarnation {member.incarnation + 1} of {member.name}", place
            )
        return AdmissionDecision(Admission.REFUSE, f"{member.name} is dead and recovery is off: set MS_ENABLE_RECOVERY=1")
    if member.connection and member.state is not NodeState.SUSPECT:
        if member.node_id == wish.node_id:
            return AdmissionDecision(Admission.REFUSE, f"{where} is alive: a second node with its id is not allowed")
        return AdmissionDecision(Admission.REFUSE, f"rank {ranks.parse_rank_claim(wish.node_id)} is taken by {where}")
    return AdmissionDecision(Admission.DEFER, f"the life before, {where}, is not known to be over yet")
