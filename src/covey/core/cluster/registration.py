"""Who comes, and as whom: new, again in the life that is known, or in the next one of a place.

What to answer is decided in `membership`; here it is carried out. A refusal is the one answer after which the link is closed.
"""

from __future__ import annotations

import msgspec

from covey.core.cluster import formation, ranks, resize_plan
from covey.core.cluster.admission import (
    DEFER_S,
    Admission,
    AdmissionDecision,
    choose_node_id,
    decide_agent_admission,
    decide_node_admission,
)
from covey.core.cluster.failure_detector import Watch
from covey.core.effects import Close, Level
from covey.core.messages import Refused, Register, RegisterAgent, Registered
from covey.core.types import AgentInfo, AgentRecord, Member, MemberRecord, NodeState, Phase, Role

DEFERRED_INSTANCES_MAX = 1000  # lives of which it is said that they are held off


class Joinable(Watch):
    """A cluster that nodes and agents can join."""

    def _on_register(self, link: int, wish: Register) -> None:
        answer = decide_node_admission(self.cluster, wish)
        who = f"{wish.role}:{wish.node_id or wish.instance_id}"
        if self._refuse_or_defer(link, wish, who, answer):
            return None
        self._deferred_instances.discard(wish.instance_id)
        if answer.admission is Admission.ADMIT:
            return self._admit_node(link, wish, answer.reason)
        assert answer.member_key is not None
        member = self.cluster.members[answer.member_key]
        if answer.admission is Admission.REATTACH:
            return self._reattach_member(link, member, wish)
        return self._admit_next_incarnation(link, member, wish, answer.reason)

    def _defer_registration(self, link: int, life: str, who: str, reason: str) -> None:
        if life not in self._deferred_instances and len(self._deferred_instances) < DEFERRED_INSTANCES_MAX:
            self._deferred_instances.add(life)
            self._publish(who, "held off", reason, Level.WARNING)
        self._send(link, Refused(reason, retry_after_s=DEFER_S))

    def _admit_node(self, link: int, wish: Register, reason: str) -> None:
        member = Member(wish.role, choose_node_id(wish), wish.instance_id, wish.host, joined_at=self._now, pid=wish.pid)
        forming = self.cluster.phase is Phase.FORMING
        if forming:
            claim = ranks.parse_rank_claim(wish.node_id)
            member.rank = claim if claim is not None else -1
            self._reset_progress(member)
            self.cluster.add(member)
        else:
            resize_plan.add_joining_worker(self.cluster, member)
        self._bind_connection(link, member)
        self._publish(member.name, "joined", reason, Level.DETAIL)
        self._send(link, Registered(self.cluster.cluster_id, member.node_id, member.incarnation))
        self._deadlines.last_call = self._now + self.cluster.settings.last_call_s
        if forming:
            self._form_if_complete()
        else:
            world = self.cluster.size(Role.WORKER)
            self._grow_by(
                [member], f"the world grows from {world - 1} to {world} workers, as {member.name} came", "a worker came"
            )

    def _reattach_member(self, link: int, member: Member, wish: Register) -> None:
        """The life we know, over a new connection: it keeps its rank, and is told again what it may have missed."""
        if member.connection and member.connection != link:
            self._drop_connection(member.connection)
        again = member.life != ""
        member.life, member.pid = wish.instance_id, wish.pid
        member.host = msgspec.structs.replace(member.host, address=wish.host.address)  # a life is on one host
        self._bind_connection(link, member)
        if not again:
            self._reset_progress(member)
        if member.agent and not self.cluster.heals:
            self.cluster.heals = True
            self._persist(self.cluster.record())  # a scheduler that comes back may hear of a death before it hears of a worker
        self._send(link, Registered(self.cluster.cluster_id, member.node_id, member.incarnation))
        if member.state in (NodeState.WAITING, NodeState.LEFT):
            return
        was, member.state = member.state, NodeState.ALIVE
        if was is NodeState.DEAD:
            self._persist(MemberRecord.from_member(member))
        if again:
            self._publish(
                member.name, "re-attached", f"{'spare' if member.role is Role.SPARE else 'rank'} {member.rank} goes on"
            )
        self._send(link, self._current_layout().make_rank_assigned(member))
        self._repeat_dump_request(member)
        self._update_readiness("every member is here again")

    def _admit_next_incarnation(self, link: int, member: Member, wish: Register, reason: str) -> None:
        """The next incarnation of a place whose last life is over."""
        self.cluster.remove(member)
        if wish.host.id != member.host.id:
            member.local_rank = ranks.find_free_local_rank(self.cluster.members_in_role(member.role), wish.host)
        member.role, member.node_id = wish.role, choose_node_id(wish)
        member.life, member.host, member.pid = wish.instance_id, wish.host, wish.pid
        member.incarnation += 1
        member.restarts += 1
        member.lives += 1
        member.state = NodeState.ALIVE
        self.cluster.add(member)
        self._layout = None
        self._increment_counter("returns")
        self._reset_progress(member)
        self._start_generation(f"{member.name} is back", member)
        self._bind_connection(link, member)
        self._publish(member.name, "returned", reason)
        self._send(link, Registered(self.cluster.cluster_id, member.node_id, member.incarnation))
        self._send(link, self._current_layout().make_rank_assigned(member))
        self._update_readiness("every place is filled again")

    def _on_register_agent(self, link: int, wish: RegisterAgent) -> None:
        answer = decide_agent_admission(self.cluster, wish)
        who = f"agent:{wish.agent}"
        if self._refuse_or_defer(link, wish, who, answer):
            return None
        if answer.admission is Admission.REATTACH:
            agent = self.cluster.agents[wish.agent]
            if agent.connection and agent.connection != link:
                self._drop_connection(agent.connection)
            self._mark_children_alive(agent)
        else:
            held = (wish.slots, wish.first_rank, wish.meet_port, wish.logs, wish.servers, wish.max_restarts, wish.spares)
            agent = AgentInfo(wish.agent, wish.instance_id, wish.host, *held, template_importing=wish.template_importing)
            self.cluster.agents[agent.id] = agent
            if self.cluster.phase is Phase.FORMING:
                for place in range(agent.slots):
                    self._add_child(agent, Role.WORKER, place)
                for place in range(agent.servers):
                    self._add_child(agent, Role.PSERVER, place)
            else:
                self._persist(AgentRecord.from_agent(agent))
            self._deadlines.last_call = self._now + self.cluster.settings.last_call_s
            self._publish(who, "joined", answer.reason)
        self._bind_connection(link, agent)
        self._send(link, Registered(self.cluster.cluster_id))
        if self.cluster.phase is Phase.FORMING:
            return self._form_if_complete()
        self._send(link, self._current_layout().make_desired_children(agent))
        self._use_new_hosts()
        return self._update_readiness("every member is here again")

    def _add_child(self, agent: AgentInfo, role: Role, place: int) -> None:
        child = f"{agent.id}/{place}"  # until formation gives it its rank
        member = Member(role, child, "", agent.host, agent=agent.id, joined_at=self._now)
        if role is Role.WORKER:
            member.rank = agent.first_rank + place if agent.first_rank >= 0 else -1
        self.cluster.add(member)

    def _mark_children_alive(self, agent: AgentInfo) -> None:
        """An agent that is back speaks for its children again; it will say which of them ended meanwhile."""
        for member in self.cluster.children(agent.id):
            if member.state is NodeState.SUSPECT and not member.connection:
                member.state, member.last_heartbeat_at = NodeState.ALIVE, self._now

    def _refuse_or_defer(self, link: int, wish: Register | RegisterAgent, who: str, answer: AdmissionDecision) -> bool:
        """Refuse or hold off, where that is the answer. A member of this cluster that missed its end is told that instead."""
        speaker = self._by_connection.get(link)
        reason = answer.reason
        if speaker is not None and speaker.life != wish.instance_id:
            reason = "its connection speaks for another node already"
        elif answer.admission is Admission.DEFER:
            self._defer_registration(link, wish.instance_id, who, reason)
            return True
        elif answer.admission is not Admission.REFUSE:
            return False
        if self._end_message is not None and (
            wish.cluster_id == self.cluster.cluster_id or (self._end_undelivered and not wish.cluster_id)
        ):
            self._send(link, self._end_message)
            self._mark_end_delivered(wish.instance_id)
        else:
            self._increment_counter("refused")
            if self.cluster.phase is Phase.FORMING:
                self.cluster.last_refusal = f"{wish.host.name} ({wish.host.address}) was refused: {reason}"
                self.cluster.reason = formation.decide_formation(self.cluster)[1]
            self._publish(who, "refused", f"{reason} (it came from {wish.host.address})", Level.WARNING)
            self._send(link, Refused(reason))
        self._effects.append(Close(link))
        self._on_connection_lost(link, "refused")
        return True
