"""The scheduler's machine: the only place where a cluster changes.

Theory of operation. `step(event, now)` takes a fact and returns wishes, in an order that is a contract: what must be durable
comes before what may be sent, and a scheduler that dies between any two wishes leaves a journal from which the next one goes
on. Nothing is journalled per join or per beat; formation, deaths, returns and the end are.

A cluster lives through phases: FORMING until every role has its number, then READY; a death moves it to HEALING (when the
place may be filled again), to a new generation of everyone (torchrun's restarts) or to ENDED. A restarted scheduler is
RETURNING until its members have re-attached or are overdue. The table `PHASES` lists the moves that exist; any other is a bug.

Every member is spoken for by a link. A raw node speaks for itself, and the loss of its link is its death. A child of an agent
is spoken for by the agent, who sees the exit itself: there the agent's word decides, and a lost link alone does not. The loss
of the agent's own link is the death of its children, unless recovery is on: then it has the node timeout to come back.

Two rules keep a crash harmless. A new generation is durable before the incarnations that live in it. A death that starts
everyone anew is not written down before the new start is: a scheduler that forgot it is told again by the agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.core import formation, ranks, recovery
from covey.core.board import Board
from covey.core.cluster import Cluster
from covey.core.effects import Close, End, Level, Persist, Publish, SchedulerEffect, Send
from covey.core.events import Heard, LinkLost, Restored, SchedulerEvent, Ticked
from covey.core.membership import HOLD_OFF_S, Answer, Verdict, answer_agent, answer_node, names, node_id
from covey.core.messages import (
    Ask,
    Beat,
    Exited,
    Get,
    Goodbye,
    Leave,
    Put,
    Refused,
    Register,
    RegisterAgent,
    Regrouped,
    Started,
    Stop,
    StopAsked,
    Value,
    Welcome,
)
from covey.core.model import (
    Agent,
    AgentRecord,
    ClusterRecord,
    ClusterSettings,
    Failure,
    Member,
    MemberRecord,
    NodeState,
    Phase,
    Record,
    Role,
)
from covey.errors import ExitCode

PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.READY, Phase.ENDED, Phase.RETURNING}),
    Phase.READY: frozenset({Phase.HEALING, Phase.ENDED}),
    Phase.HEALING: frozenset({Phase.READY, Phase.ENDED}),
    Phase.RETURNING: frozenset({Phase.READY, Phase.HEALING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
SLEPT_S = 1.0  # ticks come several times a second: a longer gap is this process's own sleep, and nobody else's silence
AFTER_THE_END = (Register, RegisterAgent, Leave, StopAsked)  # what is still answered then

Effects = list[SchedulerEffect]


class Machine:
    """One cluster's decisions. The shell calls `step`; everybody else only looks."""

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float) -> None:
        self.cluster = Cluster(cluster_id=cluster_id, settings=settings, job=job)
        self.counters: dict[str, float] = {}
        self.first_failure: Failure | None = None
        self._started = self._ticked = self._now = now
        self._heal_by = float("inf")
        self._speakers: dict[int, Member | Agent] = {}
        self._held: set[str] = set()
        self._board = Board()
        self._layout: formation.Layout | None = None
        self._stop: Stop | None = None
        self._out: Effects = []
        self._hear: dict[type, Callable[[int, Any], None]] = {
            Register: self._register,
            RegisterAgent: self._register_agent,
            Beat: self._beat,
            Leave: self._leave,
            Started: self._child_started,
            Exited: self._child_exited,
            Put: self._put,
            Get: self._get,
            StopAsked: self._stop_asked,
        }

    def step(self, event: SchedulerEvent, now: float) -> Effects:
        """Take one fact; return what is to be done about it, in order."""
        self._now = now
        if self.cluster.phase is Phase.ENDED and not (isinstance(event, Heard) and isinstance(event.message, AFTER_THE_END)):
            return []
        if isinstance(event, Heard):
            if not isinstance(event.message, Ask):  # showing the cluster is the shell's affair
                self._hear[type(event.message)](event.link, event.message)
        elif isinstance(event, LinkLost):
            self._link_lost(event.link, event.reason)
        elif isinstance(event, Ticked):
            self._tick()
        elif isinstance(event, Restored):
            self._restore(event.records)
        out, self._out = self._out, []
        return out

    # -- joining -----------------------------------------------------------------------------------------------------

    def _register(self, link: int, wish: Register) -> None:
        answer = answer_node(self.cluster, wish)
        who = f"{wish.role}:{wish.node_id or wish.life}"
        if self._turned_away(link, wish, who, answer):
            return None
        if answer.verdict is Verdict.HOLD:
            if wish.life not in self._held:
                self._held.add(wish.life)
                self._publish(who, "held off", answer.reason, Level.WARNING)
            return self._send(link, Refused(answer.reason, retry_after_s=HOLD_OFF_S))
        self._held.discard(wish.life)
        if answer.verdict is Verdict.ADMIT:
            return self._admit(link, wish, answer.reason)
        assert answer.place is not None
        member = self.cluster.members[answer.place]
        if answer.verdict is Verdict.REATTACH:
            return self._reattach(link, member, wish)
        return self._return(link, member, wish, answer.reason)

    def _admit(self, link: int, wish: Register, reason: str) -> None:
        member = Member(wish.role, node_id(wish), wish.life, wish.host, joined_at=self._now, pid=wish.pid)
        claim = ranks.claim(wish.node_id)
        member.rank = claim if claim is not None else -1
        self.cluster.add(member)
        self._speak(link, member)
        self._publish(member.name, "joined", reason, Level.DETAIL)
        self._send(link, Welcome(self.cluster.cluster_id, member.node_id, member.incarnation))
        self._form()

    def _reattach(self, link: int, member: Member, wish: Register) -> None:
        """The life we know, over a new connection: it keeps its rank, and is told again what it may have missed."""
        if member.link and member.link != link:
            self._silence(member.link)
        again = member.life != ""
        member.life, member.host, member.pid = wish.life, wish.host, wish.pid
        self._speak(link, member)
        self._send(link, Welcome(self.cluster.cluster_id, member.node_id, member.incarnation))
        if member.state in (NodeState.WAITING, NodeState.LEFT):
            return
        was, member.state = member.state, NodeState.ALIVE
        if was is NodeState.DEAD:
            self._persist(MemberRecord.of(member))
        if again:
            self._publish(member.name, "re-attached", f"rank {member.rank} goes on")
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
        member.state = NodeState.ALIVE
        self.cluster.add(member)
        self._layout = None
        self._count("returns")
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
            agent = Agent(wish.agent, wish.life, wish.host, wish.slots, wish.first_rank, wish.meet_port, wish.log_dir)
            self.cluster.agents[agent.id] = agent
            for place in range(agent.slots):
                self._add_child(agent, place)
            self._publish(who, "joined", answer.reason)
        self._speak(link, agent)
        self._send(link, Welcome(self.cluster.cluster_id))
        if self.cluster.phase is Phase.FORMING:
            return self._form()
        self._send(link, self._places().start(agent))
        return self._settle("every member is here again")

    def _add_child(self, agent: Agent, place: int) -> None:
        child = f"{agent.id}/{place}"  # until formation gives it its rank
        member = Member(Role.WORKER, child, "", agent.host, agent=agent.id, joined_at=self._now)
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
        if self._stop is not None and wish.cluster_id == self.cluster.cluster_id:
            self._send(link, self._stop)
        else:
            self._count("refused")
            self._publish(who, "refused", f"{reason} (it came from {wish.host.address})", Level.WARNING)
            self._send(link, Refused(reason))
        self._out.append(Close(link))
        self._link_lost(link, "refused")
        return True

    # -- forming -----------------------------------------------------------------------------------------------------

    def _form(self) -> None:
        plan, self.cluster.reason = formation.decide(self.cluster)
        if plan is None:
            return
        everyone = list(self.cluster.members.values())
        for member in everyone:
            self.cluster.remove(member)
            member.rank = plan.ranks[member.name]
            member.state = NodeState.ALIVE
            if member.agent:
                member.node_id = str(member.rank)
        for member in everyone:
            self.cluster.add(member)
        for role in formation.COUNTED:
            local = ranks.local(self.cluster.of(role))
            for member in self.cluster.of(role):
                member.local_rank = local[member.name]
        self.cluster.generation = 1
        self._move(Phase.READY, self.cluster.reason)
        for agent in self.cluster.agents.values():
            self._persist(AgentRecord.of(agent))
        for member in everyone:
            self._persist(MemberRecord.of(member))
        self._persist(self.cluster.record())  # last: members of a cluster that is FORMING in the journal do not count
        self._publish("cluster", "formed", f"{self.cluster.reason}, generation 1")
        self._tell_places()

    def _tell_places(self) -> None:
        places = self._places()
        for member in self.cluster.members.values():
            if member.link:
                self._send(member.link, places.formed(member))
        for agent in self.cluster.agents.values():
            if agent.link:
                self._send(agent.link, places.start(agent))

    def _places(self) -> formation.Layout:
        if self._layout is None:
            self._layout = formation.Layout(self.cluster)
        return self._layout

    # -- living ------------------------------------------------------------------------------------------------------

    def _beat(self, link: int, beat: Beat) -> None:
        speaker = self._speakers.get(link)
        if speaker is None:
            return
        speaker.beat_at = self._now
        if isinstance(speaker, Member):
            speaker.progress = beat.progress
            if speaker.state is NodeState.SUSPECT:
                speaker.state = NodeState.ALIVE
                self._publish(speaker.name, "heard again", "its beat came late")
                self._settle("every member is heard again")

    def _put(self, link: int, pin: Put) -> None:
        if link not in self._speakers or pin.generation != self.cluster.generation:
            return
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

    def _child_started(self, link: int, said: Started) -> None:
        member = self._child(link, said.node_id, said.incarnation)
        if member is not None:
            member.pid = said.pid

    # -- leaving and dying -------------------------------------------------------------------------------------------

    def _leave(self, link: int, leave: Leave) -> None:
        """It goes, and its link no longer speaks. A child's end is its agent's to tell, with the exit code."""
        speaker = self._speakers.pop(link, None)
        if speaker is not None:
            speaker.link = 0
        if isinstance(speaker, Agent):
            self._agent_gone(speaker, leave.code, leave.reason)
        elif speaker is not None and speaker.agent:
            speaker.life = ""
        elif speaker is not None:
            self._over(speaker, leave.code, leave.reason)
        self._send(link, Goodbye())

    def _child_exited(self, link: int, said: Exited) -> None:
        member = self._child(link, said.node_id, said.incarnation)
        if member is not None:
            self._over(member, said.code, said.reason, said.tail, said.log)

    def _child(self, link: int, child: str, incarnation: int) -> Member | None:
        """The child an agent speaks of, if it is its own and in that incarnation."""
        agent = self._speakers.get(link)
        member = self.cluster.members.get((Role.WORKER, child))
        mine = isinstance(agent, Agent) and member is not None and member.agent == agent.id
        return member if mine and member is not None and member.incarnation == incarnation else None

    def _link_lost(self, link: int, reason: str) -> None:
        speaker = self._speakers.pop(link, None)
        if speaker is None:
            return
        speaker.link = 0
        settings = self.cluster.settings
        if isinstance(speaker, Member):
            if not speaker.agent:
                self._over(speaker, ExitCode.PEER_FAILED, f"its connection closed ({reason})")
        elif settings.recovery and settings.judges_silence and self.cluster.phase is not Phase.FORMING:
            speaker.beat_at = self._now
            self._publish(f"agent:{speaker.id}", "out of reach", reason, Level.WARNING)
        else:
            self._agent_gone(speaker, ExitCode.PEER_FAILED, reason)

    def _agent_gone(self, agent: Agent, code: int, reason: str) -> None:
        """With its agent a child's life is over, and nobody is left to start the next."""
        children = [m for m in self.cluster.children(agent.id) if m.present]
        if self.cluster.phase is Phase.ENDED or (not children and self.cluster.phase is not Phase.FORMING):
            return
        del self.cluster.agents[agent.id]
        self._publish(f"agent:{agent.id}", "gone", reason, _level(code))
        for member in children:
            self._over(member, code, f"the agent on {agent.host.name} is gone ({reason})")

    def _over(self, member: Member, code: int, reason: str, tail: list[str] | None = None, log: str = "") -> None:
        """One life is over: it left (code 0) or died."""
        if not member.present or self.cluster.phase is Phase.ENDED:
            return None
        member.state = NodeState.LEFT if code == 0 else NodeState.DEAD
        if self.cluster.phase is Phase.FORMING:
            self.cluster.remove(member)
            self.cluster.reason = formation.decide(self.cluster)[1]
            return self._publish(member.name, "gone before the cluster formed", reason or f"code {code}")
        self._count("left" if code == 0 else "deaths")
        self._publish(member.name, "left" if code == 0 else "died", reason or f"code {code}", _level(code))
        if code == 0:
            self._persist(MemberRecord.of(member))
            return self._finished()
        failure = Failure(
            role=member.role,
            node_id=member.node_id,
            rank=member.rank,
            host=member.host.name,
            code=code,
            reason=reason or f"exit code {code}",
            tail=tail or [],
            others=self._doing(member),
            log=log,
        )
        return self._after_death(member, failure)

    def _after_death(self, member: Member, failure: Failure) -> None:
        after, reason = recovery.decide(self.cluster, member)
        self._publish("cluster", str(after), reason, Level.WARNING)
        if after is recovery.After.WAIT:
            self.first_failure = self.first_failure or failure
            self._await_healing()
            if self.cluster.phase is not Phase.HEALING:
                self._move(Phase.HEALING, reason)
            self._regroup(f"{member.name} died: {failure.reason}", member)
        elif after is recovery.After.RESTART_ALL:
            self._restart_all(failure)
        else:
            self.first_failure = failure
            self._end(failure.code, f"{member.name} on {failure.host}: {failure.reason}", failure)

    def _restart_all(self, failure: Failure) -> None:
        self.cluster.restarts += 1
        self._count("restarts")
        workers = self.cluster.of(Role.WORKER)
        for member in workers:
            self._silence(member.link)
            member.incarnation += 1
            member.restarts += 1
            member.life, member.link, member.pid = "", 0, 0
            here = self.cluster.agents[member.agent].link
            member.state = NodeState.ALIVE if here else NodeState.SUSPECT  # until its agent is back
        self._regroup(f"{failure.role}:{failure.node_id} died: {failure.reason}", *workers)
        self._tell_places()

    def _finished(self) -> None:
        workers = self.cluster.of(Role.WORKER)
        if all(member.state is NodeState.LEFT for member in workers):
            self._end(0, f"all {len(workers)} workers finished")
        else:
            self._settle("every member is heard again")

    def _stop_asked(self, link: int, asked: StopAsked) -> None:
        self._send(link, Goodbye())
        if self.cluster.phase is not Phase.ENDED:
            self._end(ExitCode.STOPPED, asked.reason)

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._forgive_sleep()
        phase, settings = self.cluster.phase, self.cluster.settings
        limit = settings.topo_timeout_s
        if phase is Phase.FORMING and 0 <= limit < self._now - self._started:
            reason = f"not complete within {limit:g} s: {formation.missing(self.cluster)}"
            self._end(ExitCode.NOT_FORMED, reason)
        elif phase in (Phase.HEALING, Phase.RETURNING) and self._now > self._heal_by:
            away = [m for m in self.cluster.members.values() if m.state in (NodeState.DEAD, NodeState.SUSPECT)]
            failure = self.first_failure
            reason = f"{names(away)} did not come back within {limit:g} s"
            self._end(failure.code if failure else ExitCode.PEER_FAILED, reason, failure)
        elif settings.judges_silence:
            self._judge_silence(settings.node_timeout_s)

    def _forgive_sleep(self) -> None:
        """While this process was stopped it heard nobody: that time counts for nothing."""
        slept, self._ticked = self._now - self._ticked, self._now
        if slept > SLEPT_S:
            self._started += slept
            self._heal_by += slept
            speakers: list[Member | Agent] = [*self.cluster.members.values(), *self.cluster.agents.values()]
            for speaker in speakers:
                speaker.beat_at = min(speaker.beat_at + slept, self._now)

    def _judge_silence(self, limit: float) -> None:
        """silent → suspect after half the limit → dead after all of it; an agent takes its children along."""
        for agent in list(self.cluster.agents.values()):
            silent = self._now - agent.beat_at
            if silent > limit:
                self._silence(agent.link)
                agent.link = 0
                self._agent_gone(agent, ExitCode.PEER_FAILED, _silent(silent, limit))
        for member in list(self.cluster.members.values()):
            silent = self._now - member.beat_at
            if silent <= limit / 2 or not member.present or (member.agent and not member.life):
                continue  # a child that never attached has no beats: its agent's speak for it
            if silent > limit:
                self._count("silent_deaths")
                self._silence(member.link)
                member.link = 0
                self._over(member, ExitCode.PEER_FAILED, _silent(silent, limit))
            elif member.state is NodeState.ALIVE:
                member.state = NodeState.SUSPECT
                self._publish(member.name, "suspect", f"no beat for {silent:.1f} s", Level.WARNING)
            if self.cluster.phase is Phase.ENDED:
                return

    # -- returning after the scheduler's own death -------------------------------------------------------------------

    def _restore(self, records: tuple[Record, ...]) -> None:
        """Take over from the journal. Members have one node timeout to re-attach before anyone is judged."""
        kept = next((r for r in records if isinstance(r, ClusterRecord)), None)
        assert kept is None or kept.phase is not Phase.ENDED, "the journal of a cluster that ended is not taken over"
        if kept is None:
            return self._persist(self.cluster.record())
        self.cluster.cluster_id = kept.cluster_id
        self.cluster.generation, self.cluster.restarts = kept.generation, kept.restarts
        if kept.phase is Phase.FORMING:
            return None
        for record in records:
            if isinstance(record, AgentRecord):
                agent = record.agent()
                agent.beat_at = self._now
                self.cluster.agents[agent.id] = agent
            elif isinstance(record, MemberRecord):
                member = record.member()
                member.beat_at = self._now
                if member.present:
                    member.state = NodeState.SUSPECT
                self.cluster.add(member)
        self._await_healing()
        count = len(self.cluster.members)
        self._move(Phase.RETURNING, f"the scheduler is back and waits for its {count} members to re-attach")
        return self._publish("cluster", "restored", f"generation {self.cluster.generation}, {count} members")

    def _await_healing(self) -> None:
        limit = self.cluster.settings.topo_timeout_s
        self._heal_by = self._now + limit if limit >= 0 else float("inf")

    def _settle(self, reason: str) -> None:
        """READY again once every place is filled and every member heard; HEALING once only the dead are missing."""
        phase, members = self.cluster.phase, self.cluster.members.values()
        if phase not in (Phase.HEALING, Phase.RETURNING) or any(m.state is NodeState.SUSPECT for m in members):
            return
        dead = [m for m in members if m.state is NodeState.DEAD]
        if not dead:
            self.first_failure = None
            self._move(Phase.READY, reason)
        elif phase is Phase.RETURNING:
            self._move(Phase.HEALING, f"waiting for {names(dead)} to be started again, with the same variables")
        else:
            return
        self._persist(self.cluster.record())
        self._publish("cluster", str(self.cluster.phase), self.cluster.reason)

    # -- small moves -------------------------------------------------------------------------------------------------

    def _speak(self, link: int, speaker: Member | Agent) -> None:
        speaker.link = link
        speaker.beat_at = self._now
        self._speakers[link] = speaker

    def _silence(self, link: int) -> None:
        """What this link says no longer counts, and it is closed."""
        if link:
            self._speakers.pop(link, None)
            self._out.append(Close(link))

    def _regroup(self, reason: str, *changed: Member) -> None:
        """A new generation: durable first, then whoever changed, then told to the members that were there before."""
        self.cluster.generation += 1
        self._board = Board()
        self._persist(self.cluster.record())
        for member in changed:
            self._persist(MemberRecord.of(member))
        for member in self.cluster.members.values():
            if member.link and member.present:
                self._send(member.link, Regrouped(self.cluster.generation, reason))

    def _end(self, code: int, reason: str, failure: Failure | None = None) -> None:
        self._stop = Stop(reason, code, failure)
        self._move(Phase.ENDED, reason)
        self._persist(self.cluster.record())
        self._publish("cluster", "ended", reason, _level(code))
        for link in self._speakers:
            self._send(link, self._stop)
        self._out.append(End(code, reason, failure))

    def _move(self, phase: Phase, reason: str) -> None:
        assert phase in PHASES[self.cluster.phase], f"no move from {self.cluster.phase} to {phase}"
        self.cluster.phase, self.cluster.reason = phase, reason

    def _doing(self, but: Member) -> list[str]:
        workers = sorted((m for m in self.cluster.of(but.role) if m is not but), key=lambda m: m.rank)
        return [
            f"rank {m.rank} on {m.host.name}: {m.state}"
            + (f", step {m.progress.step}" if m.progress.step >= 0 else "")
            + (f", {m.progress.phase}" if m.progress.phase else "")
            for m in workers[:64]
        ]

    def _send(self, link: int, message: Any) -> None:
        self._out.append(Send(message, link))

    def _persist(self, record: Record) -> None:
        self._out.append(Persist(record))

    def _publish(self, node: str, what: str, reason: str, level: Level = Level.NOTE) -> None:
        self._out.append(Publish(node, what, reason, level))

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1


def _silent(silent_s: float, limit_s: float) -> str:
    return f"no beat for {silent_s:.1f} s (MS_NODE_TIMEOUT is {limit_s:g} s)"


def _level(code: int) -> Level:
    return Level.WARNING if code else Level.NOTE
