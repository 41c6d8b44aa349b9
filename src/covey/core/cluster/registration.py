"""Who comes, and as whom: new, again in the life that is known, or in the next one of a place.

What to answer is decided in `membership`; here it is carried out. A refusal is the one answer after which the link is closed.
"""

from __future__ import annotations

import msgspec

from covey.core.cluster import formation, ranks, resize_plan
from covey.core.cluster.admission import HOLD_OFF_S, Answer, Verdict, answer_agent, answer_node, node_id
from covey.core.cluster.failure_detector import Watch
from covey.core.effects import Close, Level
from covey.core.messages import Refused, Register, RegisterAgent, Welcome
from covey.core.types import Agent, AgentRecord, Member, MemberRecord, NodeState, Phase, Role

HELD_MAX = 1000  # lives of which it is said that they are held off


class Joinable(Watch):
    """A cluster that nodes and agents can join."""

    def _register(self, link: int, wish: Register) -> None:
        answer = answer_node(self.cluster, wish)
        who = f"{wish.role}:{wish.node_id or wish.life}"
        if self._turned_away(link, wish, who, answer):
            return None
        self._held.discard(wish.life)
        if answer.verdict is Verdict.ADMIT:
            return self._admit(link, wish, answer.reason)
        assert answer.place is not None
        member = self.cluster.members[answer.place]
        if answer.verdict is Verdict.REATTACH:
            return self._reattach(link, member, wish)
        return self._return(link, member, wish, answer.reason)

    def _hold_off(self, link: int, life: str, who: str, reason: str) -> None:
        if life not in self._held and len(self._held) < HELD_MAX:
            self._held.add(life)
            self._publish(who, "held off", reason, Level.WARNING)
        self._send(link, Refused(reason, retry_after_s=HOLD_OFF_S))

    def _admit(self, link: int, wish: Register, reason: str) -> None:
        member = Member(wish.role, node_id(wish), wish.life, wish.host, joined_at=self._now, pid=wish.pid)
        forming = self.cluster.phase is Phase.FORMING
        if forming:
            claim = ranks.claim(wish.node_id)
            member.rank = claim if claim is not None else -1
            self._begin_life(member)
            self.cluster.add(member)
        else:
            resize_plan.admit(self.cluster, member)
        self._speak(link, member)
        self._publish(member.name, "joined", reason, Level.DETAIL)
        self._send(link, Welcome(self.cluster.cluster_id, member.node_id, member.incarnation))
        self._deadlines.form = self._now + self.cluster.settings.last_call_s
        if forming:
            self._form()
        else:
            world = self.cluster.size(Role.WORKER)
            self._grow([member], f"the world grows from {world - 1} to {world} workers, as {member.name} came", "a worker came")

    def _reattach(self, link: int, member: Member, wish: Register) -> None:
        """The life we know, over a new connection: it keeps its rank, and is told again what it may have missed."""
        if member.link and member.link != link:
            self._silence(member.link)
        again = member.life != ""
        member.life, member.pid = wish.life, wish.pid
        member.host = msgspec.structs.replace(member.host, address=wish.host.address)  # a life is on one host
        self._speak(link, member)
        if not again:
            self._begin_life(member)
        if member.agent and not self.cluster.heals:
            self.cluster.heals = True
            self._persist(self.cluster.record())  # a scheduler that comes back may hear of a death before it hears of a worker
        self._send(link, Welcome(self.cluster.cluster_id, member.node_id, member.incarnation))
        if member.state in (NodeState.WAITING, NodeState.LEFT):
            return
        was, member.state = member.state, NodeState.ALIVE
        if was is NodeState.DEAD:
            self._persist(MemberRecord.of(member))
        if again:
            self._publish(
                member.name, "re-attached", f"{'spare' if member.role is Role.SPARE else 'rank'} {member.rank} goes on"
            )
        self._send(link, self._places().formed(member))
        self._ask_again(member)
        self._settle("every member is here again")

    def _return(self, link: int, member: Member, wish: Register, reason: str) -> None:
        """The next incarnation of a place whose last life is over."""
        self.cluster.remove(member)
        if wish.host.id != member.host.id:
            member.local_rank = ranks.free_local(self.cluster.of(member.role), wish.host)
        member.role, member.node_id = wish.role, node_id(wish)
        member.life, member.host, member.pid = wish.life, wish.host, wish.pid
        member.incarnation += 1
        member.restarts += 1
        member.lives += 1
        member.state = NodeState.ALIVE
        self.cluster.add(member)
        self._layout = None
        self._count("returns")
        self._begin_life(member)
        self._regroup(f"{member.name} is back", member)
        self._speak(link, member)
        self._publish(member.name, "returned", reason)
        self._send(link, Welcome(self.cluster.cluster_id, member.node_id, member.incarnation))
        self._send(link, self._places().formed(member))
        self._settle("every place is filled again")

    def _register_agent(self, link: int, wish: RegisterAgent) -> None:
        answer = answer_agent(self.cluster, wish)
        who = f"agent:{wish.agent}"
        if self._turned_away(link, wish, who, answer):
            return None
        if answer.verdict is Verdict.REATTACH:
            agent = self.cluster.agents[wish.agent]
            if agent.link and agent.link != link:
                self._silence(agent.link)
            self._heard_of_children(agent)
        else:
            held = (wish.slots, wish.first_rank, wish.meet_port, wish.logs, wish.servers, wish.max_restarts, wish.spares)
            agent = Agent(wish.agent, wish.life, wish.host, *held, cold=wish.cold)
            self.cluster.agents[agent.id] = agent
            if self.cluster.phase is Phase.FORMING:
                for place in range(agent.slots):
                    self._add_child(agent, Role.WORKER, place)
                for place in range(agent.servers):
                    self._add_child(agent, Role.PSERVER, place)
            else:
                self._persist(AgentRecord.of(agent))
            self._deadlines.form = self._now + self.cluster.settings.last_call_s
            self._publish(who, "joined", answer.reason)
        self._speak(link, agent)
        self._send(link, Welcome(self.cluster.cluster_id))
        if self.cluster.phase is Phase.FORMING:
            return self._form()
        self._send(link, self._places().start(agent))
        self._welcome_hosts()
        return self._settle("every member is here again")

    def _add_child(self, agent: Agent, role: Role, place: int) -> None:
        child = f"{agent.id}/{place}"  # until formation gives it its rank
        member = Member(role, child, "", agent.host, agent=agent.id, joined_at=self._now)
        if role is Role.WORKER:
            member.rank = agent.first_rank + place if agent.first_rank >= 0 else -1
        self.cluster.add(member)

    def _heard_of_children(self, agent: Agent) -> None:
        """An agent that is back speaks for its children again; it will say which of them ended meanwhile."""
        for member in self.cluster.children(agent.id):
            if member.state is NodeState.SUSPECT and not member.link:
                member.state, member.beat_at = NodeState.ALIVE, self._now

    def _turned_away(self, link: int, wish: Register | RegisterAgent, who: str, answer: Answer) -> bool:
        """Refuse or hold off, where that is the answer. A member of this cluster that missed its end is told that instead."""
        speaker = self._speakers.get(link)
        reason = answer.reason
        if speaker is not None and speaker.life != wish.life:
            reason = "its connection speaks for another node already"
        elif answer.verdict is Verdict.HOLD:
            self._hold_off(link, wish.life, who, reason)
            return True
        elif answer.verdict is not Verdict.REFUSE:
            return False
        if self._stop is not None and (wish.cluster_id == self.cluster.cluster_id or (self._untold and not wish.cluster_id)):
            self._send(link, self._stop)
            self._told(wish.life)
        else:
            self._count("refused")
            if self.cluster.phase is Phase.FORMING:
                self.cluster.refused = f"{wish.host.name} ({wish.host.address}) was refused: {reason}"
                self.cluster.reason = formation.decide(self.cluster)[1]
            self._publish(who, "refused", f"{reason} (it came from {wish.host.address})", Level.WARNING)
            self._send(link, Refused(reason))
        self._out.append(Close(link))
        self._link_lost(link, "refused")
        return True
