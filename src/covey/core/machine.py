"""The scheduler's machine: the only place where a cluster changes.

Theory of operation. `step(event, now)` takes a fact and returns wishes, in an order that is a contract: what must be durable
comes before what may be sent, and a scheduler that dies between any two wishes leaves a journal from which the next one goes
on. Nothing is journalled per join or per beat; formation, deaths, returns and the end are. Here is what it hears, from whom;
what follows from that for the cluster as a whole is in `lifecycle`, and `ledger` lists the rooms.

Every member is spoken for by a link. A raw node speaks for itself, and the loss of its link is its death. A child of an agent
is spoken for by the agent, who sees the exit itself: there the agent's word decides, and a lost link alone does not. The loss
of the agent's own link is the death of its children, unless recovery is on: then it has the node timeout to come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from covey.core import ranks, recovery, scaling, sharing
from covey.core.effects import Close, Level, SchedulerEffect
from covey.core.events import Heard, HostGone, LinkLost, Restored, SchedulerEvent, Ticked
from covey.core.incidents import Outcome, Stage
from covey.core.membership import HOLD_OFF_S, Answer, Verdict, answer_agent, answer_node, node_id
from covey.core.messages import (
    Agreed,
    Ask,
    Beat,
    Broke,
    Drain,
    Dumped,
    Exited,
    Fetched,
    Get,
    Goodbye,
    Kill,
    KillAsked,
    Leave,
    Put,
    Refused,
    Register,
    RegisterAgent,
    Report,
    Resumed,
    ScaleAsked,
    Scaling,
    Settled,
    Started,
    StopAsked,
    Unsaved,
    Value,
    Welcome,
)
from covey.core.model import Agent, AgentRecord, ClusterSettings, Member, MemberRecord, NodeState, Phase, Role
from covey.core.watch import Watch
from covey.errors import ExitCode

GONE_MAX = 4096  # lives of hosts that are remembered to be over
AFTER_THE_END = (Register, RegisterAgent, Leave, StopAsked, ScaleAsked, KillAsked)  # what is still answered then


class Machine(Watch):
    """One cluster's decisions. The shell calls `step`; everybody else only looks."""

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float, wall: float = 0.0) -> None:
        super().__init__(settings, cluster_id=cluster_id, job=job, now=now, wall=wall)
        self.answered: Scaling | Agreed | Refused = Refused("nothing was asked for")  # to a visitor's last wish
        self._hear: dict[type, Callable[[int, Any], None]] = {
            Register: self._register,
            RegisterAgent: self._register_agent,
            Beat: self._beat,
            Leave: self._leave,
            Started: self._child_started,
            Exited: self._child_exited,
            Put: self._put,
            Get: self._get,
            Report: self._report,
            Broke: self._broke,
            Fetched: self._fetched,
            Resumed: self._resumed,
            Drain: self._drain,
            Dumped: self._dumped,
            Unsaved: self._unsaved,
            StopAsked: self._stop_asked,
            ScaleAsked: self._scale_asked,
            KillAsked: self._kill_asked,
            Settled: self._settled_said,
        }

    def step(self, event: SchedulerEvent, now: float) -> list[SchedulerEffect]:
        """Take one fact; return what is to be done about it, in order."""
        self._now = now
        if self.cluster.phase is Phase.ENDED and not (isinstance(event, Heard) and isinstance(event.message, AFTER_THE_END)):
            if now >= self._tell_by:
                self._tell_no_more()
        elif isinstance(event, Heard):
            if not isinstance(event.message, Ask):  # showing the cluster is the shell's affair
                self._hear[type(event.message)](event.link, event.message)
        elif isinstance(event, LinkLost):
            self._link_lost(event.link, event.reason)
        elif isinstance(event, Ticked):
            self._tick()
        elif isinstance(event, HostGone):
            self._host_gone(event)
        elif isinstance(event, Restored):
            self._restore(event.records)
        out, self._out = self._out, []
        return out

    # -- joining -----------------------------------------------------------------------------------------------------

    def heard_by(self) -> list[int]:
        """The links of all who are told what becomes of the cluster."""
        return list(self._speakers)

    def _register(self, link: int, wish: Register) -> None:
        answer = answer_node(self.cluster, wish)
        who = f"{wish.role}:{wish.node_id or wish.life}"
        if self._turned_away(link, wish, who, answer):
            return None
        if answer.verdict is Verdict.HOLD:
            return self._hold_off(link, wish.life, who, answer.reason)
        self._held.discard(wish.life)
        if answer.verdict is Verdict.ADMIT:
            return self._admit(link, wish, answer.reason)
        assert answer.place is not None
        member = self.cluster.members[answer.place]
        if answer.verdict is Verdict.REATTACH:
            return self._reattach(link, member, wish)
        return self._return(link, member, wish, answer.reason)

    def _hold_off(self, link: int, life: str, who: str, reason: str) -> None:
        if life not in self._held:
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
            scaling.admit(self.cluster, member)
        self._speak(link, member)
        self._publish(member.name, "joined", reason, Level.DETAIL)
        self._send(link, Welcome(self.cluster.cluster_id, member.node_id, member.incarnation))
        self._form_at = self._now + self.cluster.settings.last_call_s
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
        member.life, member.host, member.pid = wish.life, wish.host, wish.pid
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
        if answer.verdict is Verdict.HOLD:
            return self._hold_off(link, wish.life, who, answer.reason)
        if answer.verdict is Verdict.REATTACH:
            agent = self.cluster.agents[wish.agent]
            if agent.link and agent.link != link:
                self._silence(agent.link)
            self._heard_of_children(agent)
        else:
            held = (wish.slots, wish.first_rank, wish.meet_port, wish.logs, wish.servers, wish.max_restarts, wish.spares)
            agent = Agent(wish.agent, wish.life, wish.host, *held)
            self.cluster.agents[agent.id] = agent
            if self.cluster.phase is Phase.FORMING:
                for place in range(agent.slots):
                    self._add_child(agent, Role.WORKER, place)
                for place in range(agent.servers):
                    self._add_child(agent, Role.PSERVER, place)
            else:
                self._persist(AgentRecord.of(agent))
            self._form_at = self._now + self.cluster.settings.last_call_s
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
        """Refuse, where that is the answer. A member of this cluster that missed its end is told that instead."""
        speaker = self._speakers.get(link)
        reason = answer.reason
        if speaker is not None and speaker.life != wish.life:
            reason = "its connection speaks for another node already"
        elif answer.verdict is not Verdict.REFUSE:
            return False
        if self._stop is not None and (wish.cluster_id == self.cluster.cluster_id or (self._untold and not wish.cluster_id)):
            self._send(link, self._stop)
            self._told(wish.life)
        else:
            self._count("refused")
            self._publish(who, "refused", f"{reason} (it came from {wish.host.address})", Level.WARNING)
            self._send(link, Refused(reason))
        self._out.append(Close(link))
        self._link_lost(link, "refused")
        return True

    # -- living ------------------------------------------------------------------------------------------------------

    def _beat(self, link: int, beat: Beat) -> None:
        speaker = self._speakers.get(link)
        if speaker is None:
            return
        speaker.beat_at = self._now
        if isinstance(speaker, Member):
            self._reached = max(self._reached, beat.progress.step)
            if beat.progress.stands_by and not speaker.progress.stands_by:
                self._publish(speaker.name, "stands by", beat.progress.phase)
            if speaker.progress != beat.progress:
                speaker.progress, speaker.changed_at = beat.progress, self._now
            if beat.progress.loop and not self.cluster.trains and self.cluster.phase is not Phase.FORMING:
                self.cluster.trains = True
                self._persist(self.cluster.record())  # a scheduler that comes back may hear of a death first
            if speaker.state is NodeState.SUSPECT:
                speaker.state = NodeState.ALIVE
                self._publish(speaker.name, "heard again", "its beat came late")
                self._settle("every member is heard again")

    def _put(self, link: int, pin: Put) -> None:
        if link not in self._speakers or pin.generation != self.cluster.generation:
            return
        self._grouped = True
        waiting = self._board.put(pin.key, pin.value)
        if waiting is None:
            self._send(link, Refused(f"the board is full: {pin.key} cannot be pinned"))
        for waiter in waiting or ():
            self._send(waiter, Value(pin.key, pin.value, pin.generation))

    def _get(self, link: int, wish: Get) -> None:
        if link not in self._speakers or wish.generation != self.cluster.generation:
            return
        value = self._board.values.get(wish.key)
        if value is not None:
            self._send(link, Value(wish.key, value, wish.generation))
        elif not self._board.wait(wish.key, link):
            self._send(link, Refused(f"the board is full: too many wait for values, {wish.key} is one too many"))

    def _report(self, link: int, report: Report) -> None:
        """A rank is at a safe point; when all are, each is told how to go on."""
        member = self._speakers.get(link)
        if not isinstance(member, Member) or report.generation != self.cluster.generation:
            return None
        workers = {m.rank: m for m in self.cluster.of(Role.WORKER)}
        addresses = {rank: m.host.address for rank, m in workers.items()}
        plans = self._gathering.add(member.rank, report, addresses)
        if failure := next((plan.failure for plan in plans.values() if plan.failure), ""):
            return self._roll_back(failure)
        if plans:
            self.incidents.mark(Stage.REFORMED, self._now)
        unknown = any(said.seated < self.cluster.resized for said in self._gathering.reports.values())
        seating = scaling.seating(self.cluster) if unknown else None
        for rank, plan in plans.items():
            self._send(workers[rank].link, msgspec.structs.replace(plan, seating=seating) if seating else plan)
        return None

    def _broke(self, link: int, broke: Broke) -> None:
        if link in self._speakers and broke.generation == self.cluster.generation:
            self._gathering.broke_at = min(self._gathering.broke_at, self._now)
            self._gathering.broke_reason = broke.reason

    def _fetched(self, link: int, said: Fetched) -> None:
        if link in self._speakers and said.generation == self.cluster.generation:
            self.incidents.mark(Stage.RESTORED, self._now)

    def _resumed(self, link: int, said: Resumed) -> None:
        member = self._speakers.get(link)
        if not isinstance(member, Member) or said.generation != self.cluster.generation:
            return
        if member.role.group is Role.PSERVER:
            self._server_resumed()
        else:
            self._gathering.resumed.add(member.rank)
            member.progress = msgspec.structs.replace(member.progress, step=said.step)
            self._reached = max(self._reached, said.step)
            if self._all_resumed():
                self._retries = 0
                self._arriving = set()
                if not self._let_next_go():
                    self._close_incidents(Outcome.RESUMED)
            self._settle("every rank goes on")

    def _settled_said(self, link: int, said: Settled) -> None:
        member = self._speakers.get(link)
        if isinstance(member, Member) and member.role is Role.PSERVER:
            self._server_settled(member, said)

    def _drain(self, link: int, drain: Drain) -> None:
        speaker = self._speakers.get(link)
        if isinstance(speaker, Member):
            speaker.leaving = drain.reason
        elif speaker is not None:
            speaker.leaving = True
            self._publish(f"agent:{speaker.id}", "leaving", drain.reason, Level.WARNING)
            if drain.last and self._can_dump():
                self._give_up(ExitCode.STOPPED, drain.reason)

    def _dumped(self, link: int, said: Dumped) -> None:
        member = self._speakers.get(link)
        if not isinstance(member, Member):
            return
        if said.path:
            self._publish(member.name, "dumped", f"step {said.step} is in {said.path}")
            self._dumped_last = max(self._dumped_last, (said.step, said.path))
        if self._dump is not None:
            self._dump.waiting.discard(member.rank)
            self._end_dump()

    def _unsaved(self, link: int, said: Unsaved) -> None:
        member = self._speakers.get(link)
        if isinstance(member, Member):
            self._count("unsaved")
            self._publish(member.name, "unsaved", said.reason, Level.WARNING)

    def _child_started(self, link: int, said: Started) -> None:
        member = self._child(link, said)
        if member is not None:
            member.pid = said.pid

    # -- leaving and dying -------------------------------------------------------------------------------------------

    def _leave(self, link: int, leave: Leave) -> None:
        """It goes, and its link no longer speaks. A child's end is its agent's to tell, with the exit code."""
        speaker = self._speakers.pop(link, None)
        if speaker is not None:
            speaker.link = 0
        if isinstance(speaker, Agent):
            for child in self.cluster.children(speaker.id):  # it ends them itself, with the grace they need
                self._speakers.pop(child.link, None)
                child.link = 0
            self._agent_gone(speaker, leave.code, leave.reason)
        elif speaker is not None and speaker.agent:
            speaker.life = ""
        elif speaker is not None:
            self._over(speaker, leave.code, leave.reason)
        self._send(link, Goodbye())

    def _child_exited(self, link: int, said: Exited) -> None:
        member = self._child(link, said)
        if member is not None:
            self._over(member, said.code, said.reason, said.tail, said.log)

    def _child(self, link: int, said: Started | Exited) -> Member | None:
        """The child an agent speaks of, if it is its own and in that incarnation."""
        agent = self._speakers.get(link)
        member = self.cluster.members.get((said.role, said.node_id))
        mine = isinstance(agent, Agent) and member is not None and member.agent == agent.id
        return member if mine and member is not None and member.incarnation == said.incarnation else None

    def _link_lost(self, link: int, reason: str) -> None:
        speaker = self._speakers.pop(link, None)
        if speaker is None:
            return
        speaker.link = 0
        settings = self.cluster.settings
        if isinstance(speaker, Member):
            if not speaker.agent:
                self._over(speaker, ExitCode.PEER_FAILED, f"its connection closed ({reason})")
        elif settings.waits_for_agents and self.cluster.phase is not Phase.FORMING:
            speaker.beat_at = self._now
            self._publish(f"agent:{speaker.id}", "out of reach", reason, Level.WARNING)
        else:
            self._agent_gone(speaker, ExitCode.PEER_FAILED, reason)

    def _host_gone(self, said: HostGone) -> None:
        """Nobody of that host is waited for any longer, and whoever may still run there is not let in again."""
        if said.life in self.cluster.gone:
            return
        self.cluster.gone = (*self.cluster.gone, said.life)[-GONE_MAX:]
        self._persist(self.cluster.record())
        for agent in [agent for agent in self.cluster.agents.values() if agent.host.life == said.life]:
            self._hang_up(agent)
            self._agent_gone(agent, ExitCode.PEER_FAILED, said.reason)
        for member in [m for m in self.cluster.members.values() if m.host.life == said.life and not m.agent]:
            self._lose(member, said.reason)

    def _scale_asked(self, link: int, asked: ScaleAsked) -> None:
        self._answer(link, self._answer_scale(asked))

    def _answer(self, link: int, answer: Scaling | Agreed | Refused) -> None:
        self.answered = answer
        self._send(link, answer)

    def _answer_scale(self, asked: ScaleAsked) -> Scaling | Refused:
        if asked.roll_back and self.cluster.coming:
            number = self.incidents.kept[-1].number
            self._turn_servers_back("asked to")
            return Scaling(number, "the servers that were to come do not")
        if asked.roll_back:
            if not scaling.can_turn_back(self.cluster, self._arriving):
                return Refused("no growth is under way that could be taken back")
            self._turn_back("asked to")
            return Scaling(self.incidents.kept[-1].number, self.cluster.reason)
        if not asked.start:
            return self._make_room(asked.more)
        if sharing.meant(self.cluster, asked):
            change, reason = sharing.decide(self.cluster, self._settled, asked)
            return Scaling(self._scale_servers(change, reason), reason) if change is not None else Refused(reason)
        plan, reason = scaling.decide(self.cluster, asked)
        return Scaling(self._scale(plan, reason), reason) if plan is not None else Refused(reason)

    def _make_room(self, more: int) -> Scaling | Refused:
        """So many more may come, and join by themselves."""
        wanted, reason = scaling.room(self.cluster, more)
        if wanted is None:
            return Refused(reason)
        self.cluster.asked = wanted
        self._persist(self.cluster.record())
        self._publish("cluster", "room", reason)
        self._welcome_hosts()
        return Scaling(0, reason)

    def _stop_asked(self, link: int, asked: StopAsked) -> None:
        if asked.dump:
            return self._dump_asked(link, asked.reason)
        if self.cluster.phase is not Phase.ENDED:
            self._end(ExitCode.STOPPED, asked.reason)
        else:
            self._tell_no_more()
        return self._send(link, Goodbye())

    def _dump_asked(self, link: int, reason: str) -> None:
        """The last rung, without a fault."""
        ranks_able, why_not = recovery.can_dump(self.cluster)
        if self._dump is not None:
            why_not = "the ranks write down what they hold already"
        if why_not:
            return self._answer(link, Refused(why_not))
        self._write_down(ExitCode.STOPPED, reason, None, ranks_able)
        return self._answer(link, Agreed(f"{len(ranks_able)} ranks write down what they hold, and the run ends"))

    def _kill_asked(self, link: int, asked: KillAsked) -> None:
        """Chaos: the process is killed, and nothing is decided before its agent tells of the death."""
        member, why = recovery.victim(self.cluster, asked.node)
        if member is None:
            return self._answer(link, Refused(why))
        self._count("kills")
        self._publish(member.name, "to be killed", f"{asked.reason}: {why}", Level.WARNING)
        self._send(self.cluster.agents[member.agent].link, Kill(member.node_id, member.incarnation, member.role))
        return self._answer(link, Agreed(why))
