"""The scheduler's machine: the only place where a cluster changes.

Theory of operation. `step(event, now)` takes a fact and returns wishes, in an order that is a contract: what must be durable
comes before what may be sent. Nothing is journalled per join or per beat; formation, deaths, returns and the end are.

A cluster lives through phases: FORMING until every role has its number, then READY; a death moves it to HEALING (when the
place may be filled again), to a new generation of everyone (torchrun's restarts) or to ENDED. A restarted scheduler is
RETURNING until its members have re-attached or are overdue. The table `PHASES` lists the moves that exist; any other is a bug.

Every member is spoken for by a link. A raw node speaks for itself, and the loss of its link is its death. A child of an agent
is spoken for by the agent too, who sees the exit itself: there the agent's word decides, and a lost link alone does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from covey.core import formation, ranks, recovery
from covey.core.board import Board
from covey.core.effects import Close, End, Level, Persist, Publish, SchedulerEffect, Send
from covey.core.events import Heard, LinkLost, Restored, SchedulerEvent, Ticked
from covey.core.membership import HOLD_OFF_S, Cluster, Key, Verdict, answer_agent, answer_node, names
from covey.core.messages import (
    Ask,
    Assignment,
    Beat,
    Exited,
    Formed,
    Get,
    Goodbye,
    Leave,
    Put,
    Refused,
    Register,
    RegisterAgent,
    Regrouped,
    Start,
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

Effects = list[SchedulerEffect]


class Machine:
    """One cluster's decisions. The shell calls `step`; everybody else only looks."""

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float) -> None:
        self.cluster = Cluster(cluster_id=cluster_id, settings=settings, job=job)
        self.counters: dict[str, float] = {}
        self.first_failure: Failure | None = None
        self._started = now
        self._heal_by = float("inf")
        self._speakers: dict[int, Member | Agent] = {}
        self._held: set[str] = set()
        self._board = Board()
        self._out: Effects = []
        self._now = now
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
        if answer.verdict is Verdict.REFUSE:
            return self._refuse(link, who, wish.host.address, answer.reason)
        if answer.verdict is Verdict.HOLD:
            if wish.life not in self._held:
                self._held.add(wish.life)
                self._publish(who, "held off", answer.reason, Level.WARNING)
            return self._send(link, Refused(answer.reason, retry_after_s=HOLD_OFF_S))
        if answer.verdict is Verdict.ADMIT:
            return self._admit(link, wish, answer.reason)
        assert answer.place is not None
        member = self.cluster.members[answer.place]
        if answer.verdict is Verdict.REATTACH:
            return self._reattach(link, member, wish)
        return self._return(link, member, wish, answer.reason)

    def _admit(self, link: int, wish: Register, reason: str) -> None:
        node_id = wish.node_id or wish.life
        member = Member(wish.role, node_id, wish.life, wish.host, joined_at=self._now, pid=wish.pid)
        self.cluster.members[(member.role, node_id)] = member
        self._speak(link, member)
        self.cluster.reason = reason
        self._publish(member.name, "joined", reason, Level.DETAIL)
        self._send(link, Welcome(self.cluster.cluster_id, node_id, member.incarnation))
        self._form()

    def _reattach(self, link: int, member: Member, wish: Register) -> None:
        """The life we know, over a new connection: it keeps its rank, and is told again what it may have missed."""
        if member.link and member.link != link:
            self._silence(member.link)
        again = member.life != ""
        member.life, member.host, member.pid = wish.life, wish.host, wish.pid
        self._speak(link, member)
        self._send(link, Welcome(self.cluster.cluster_id, member.node_id, member.incarnation))
        if member.state is NodeState.WAITING:
            return
        if member.state in (NodeState.SUSPECT, NodeState.DEAD):
            member.state = NodeState.ALIVE
            self._persist(_member_record(member))
        if again:
            self._publish(member.name, "re-attached", f"rank {member.rank} goes on", Level.NOTE)
        self._send(link, self._formed(member))
        self._settle("every member is here again")

    def _return(self, link: int, member: Member, wish: Register, reason: str) -> None:
        """The next incarnation of a place whose last life is over."""
        del self.cluster.members[(member.role, member.node_id)]
        node_id = wish.node_id or wish.life
        member.node_id, member.role, member.life, member.host, member.pid = (
            node_id,
            wish.role,
            wish.life,
            wish.host,
            wish.pid,
        )
        member.incarnation += 1
        member.restarts += 1
        member.state = NodeState.ALIVE
        self.cluster.members[(member.role, node_id)] = member
        self._speak(link, member)
        self._count("returns")
        self._regroup(f"{member.name} is back", tell=link)
        self._persist(_member_record(member))
        self._publish(member.name, "returned", reason)
        self._send(link, Welcome(self.cluster.cluster_id, node_id, member.incarnation))
        self._send(link, self._formed(member))
        self._settle("every place is filled again")

    def _register_agent(self, link: int, wish: RegisterAgent) -> None:
        answer = answer_agent(self.cluster, wish)
        who = f"agent:{wish.agent}"
        if answer.verdict is Verdict.REFUSE:
            return self._refuse(link, who, wish.host.address, answer.reason)
        if answer.verdict is Verdict.REATTACH:
            agent = self.cluster.agents[wish.agent]
            if agent.link and agent.link != link:
                self._silence(agent.link)
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
        self._send(link, self._start(agent))
        return self._settle("every member is here again")

    def _add_child(self, agent: Agent, place: int) -> None:
        node_id = f"{agent.id}/{place}"  # until formation gives it its rank
        member = Member(Role.WORKER, node_id, "", agent.host, agent=agent.id, joined_at=self._now)
        self.cluster.members[(Role.WORKER, node_id)] = member

    def _refuse(self, link: int, who: str, address: str, reason: str) -> None:
        self._count("refused")
        self._publish(who, "refused", f"{reason} (it came from {address})", Level.WARNING)
        self._send(link, Refused(reason))
        self._out.append(Close(link))

    # -- forming -----------------------------------------------------------------------------------------------------

    def _form(self) -> None:
        plan, reason = formation.decide(self.cluster)
        self.cluster.reason = reason
        if plan is None:
            return
        members: dict[Key, Member] = {}
        for key, member in self.cluster.members.items():
            member.rank = plan.ranks[key]
            member.state = NodeState.ALIVE
            if member.agent:
                member.node_id = str(member.rank)
            members[(member.role, member.node_id)] = member
        self.cluster.members = members
        self.cluster.generation = 1
        self._move(Phase.READY, reason)
        self._persist(self._cluster_record())
        for agent in self.cluster.agents.values():
            self._persist(_agent_record(agent))
        for member in members.values():
            self._persist(_member_record(member))
        self._publish("cluster", "formed", f"{reason}, generation 1")
        self._tell_places()

    def _tell_places(self) -> None:
        places = ranks.local(self.cluster.of(Role.WORKER)) | ranks.local(self.cluster.of(Role.PSERVER))
        for member in self.cluster.members.values():
            if member.link:
                self._send(member.link, self._formed(member, places[member.name]))
        for agent in self.cluster.agents.values():
            if agent.link:
                self._send(agent.link, self._start(agent))

    def _formed(self, member: Member, place: tuple[int, int] | None = None) -> Formed:
        group = self.cluster.of(member.role)
        local_rank, local_world = place or ranks.local(group)[member.name]
        world = self.cluster.settings.wanted(member.role)
        return Formed(self.cluster.generation, member.rank, world, local_rank, local_world, member.restarts)

    def _start(self, agent: Agent) -> Start:
        workers = self.cluster.of(Role.WORKER)
        places = ranks.local(workers)
        mine = sorted((m for m in workers if m.agent == agent.id and m.present), key=lambda m: m.rank)
        first = min(workers, key=lambda m: m.rank)
        meet = self.cluster.agents[first.agent] if first.agent else agent
        hosts = list(dict.fromkeys(m.agent or m.host.id for m in sorted(workers, key=lambda m: m.rank)))
        return Start(
            generation=self.cluster.generation,
            world=len(workers),
            assignments=[Assignment(m.node_id, m.rank, m.incarnation, places[m.name][0]) for m in mine],
            master_address=first.host.address,
            master_port=meet.meet_port,
            host_index=hosts.index(agent.id) if agent.id in hosts else 0,
            host_count=len(hosts),
            local_world=places[mine[0].name][1] if mine else 0,
            restarts=self.cluster.restarts,
            max_restarts=self.cluster.settings.max_restarts,
        )

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

    def _put(self, link: int, pin: Put) -> None:
        if pin.generation != self.cluster.generation:
            return
        waiting = self._board.put(pin.key, pin.value)
        if waiting is None:
            self._publish("cluster", "refused a value", f"the board is full, {pin.key} was not pinned", Level.WARNING)
            return
        for waiter in waiting:
            self._send(waiter, Value(pin.key, pin.value, pin.generation))

    def _get(self, link: int, wish: Get) -> None:
        if wish.generation != self.cluster.generation:
            return
        value = self._board.get(wish.key, link)
        if value is not None:
            self._send(link, Value(wish.key, value, wish.generation))

    def _child_started(self, link: int, said: Started) -> None:
        member = self._child(link, said.node_id, said.incarnation)
        if member is not None:
            member.pid = said.pid

    # -- leaving and dying -------------------------------------------------------------------------------------------

    def _leave(self, link: int, leave: Leave) -> None:
        speaker = self._speakers.get(link)
        self._send(link, Goodbye())
        if isinstance(speaker, Agent):
            for member in self.cluster.children(speaker.id):
                self._over(member, leave.code, leave.reason)
        elif speaker is not None and not speaker.agent:  # a child's end is its agent's to tell, with the exit code
            self._over(speaker, leave.code, leave.reason)

    def _child_exited(self, link: int, said: Exited) -> None:
        member = self._child(link, said.node_id, said.incarnation)
        if member is not None:
            self._over(member, said.code, said.reason, said.tail, said.log)

    def _child(self, link: int, node_id: str, incarnation: int) -> Member | None:
        """The child an agent speaks of, if it is its own and in that incarnation."""
        agent = self._speakers.get(link)
        member = self.cluster.members.get((Role.WORKER, node_id))
        mine = isinstance(agent, Agent) and member is not None and member.agent == agent.id
        return member if mine and member is not None and member.incarnation == incarnation else None

    def _link_lost(self, link: int, reason: str) -> None:
        speaker = self._speakers.pop(link, None)
        if speaker is None or speaker.link != link:
            return
        speaker.link = 0
        if isinstance(speaker, Agent):
            self._agent_gone(speaker, reason)
        elif not speaker.agent:
            self._over(speaker, ExitCode.PEER_FAILED, f"its connection closed ({reason})")

    def _agent_gone(self, agent: Agent, reason: str) -> None:
        self._publish(f"agent:{agent.id}", "gone", reason, Level.WARNING)
        children = self.cluster.children(agent.id)
        if self.cluster.phase is Phase.FORMING:
            del self.cluster.agents[agent.id]
        for member in children:
            self._over(member, ExitCode.PEER_FAILED, f"the agent on {agent.host.name} is gone ({reason})")

    def _over(self, member: Member, code: int, reason: str, tail: list[str] | None = None, log: str = "") -> None:
        """One life is over: it left (code 0) or died."""
        if not member.present:
            return None
        if self.cluster.phase is Phase.FORMING:
            del self.cluster.members[(member.role, member.node_id)]
            self.cluster.reason = formation.decide(self.cluster)[1]
            return self._publish(member.name, "gone before the cluster formed", reason or f"code {code}")
        member.state = NodeState.LEFT if code == 0 else NodeState.DEAD
        self._count("left" if code == 0 else "deaths")
        self._persist(_member_record(member))
        self._publish(member.name, "left" if code == 0 else "died", reason or f"code {code}", _level(code))
        if self.cluster.phase is Phase.ENDED:
            return None
        if code == 0:
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
            limit = self.cluster.settings.topo_timeout_s
            self._heal_by = self._now + limit if limit >= 0 else float("inf")
            if self.cluster.phase is not Phase.HEALING:
                self._move(Phase.HEALING, reason)
            self._regroup(f"{member.name} died: {failure.reason}")
            self.first_failure = failure
        elif after is recovery.After.RESTART_ALL:
            self._restart_all(failure)
        else:
            self.first_failure = failure
            self._end(failure.code, f"{member.name} on {failure.host}: {failure.reason}", failure)

    def _restart_all(self, failure: Failure) -> None:
        self.cluster.restarts += 1
        self._count("restarts")
        for member in self.cluster.of(Role.WORKER):
            if member.link:
                self._silence(member.link)
            member.incarnation += 1
            member.restarts += 1
            member.life, member.link, member.state, member.pid = "", 0, NodeState.ALIVE, 0
        self._regroup(f"{failure.role}:{failure.node_id} died: {failure.reason}")
        for member in self.cluster.of(Role.WORKER):
            self._persist(_member_record(member))
        self._tell_places()

    def _finished(self) -> None:
        workers = self.cluster.of(Role.WORKER)
        if all(member.state is NodeState.LEFT for member in workers):
            self._end(0, f"all {len(workers)} workers finished")

    def _stop_asked(self, link: int, asked: StopAsked) -> None:
        self._send(link, Goodbye())
        if self.cluster.phase is not Phase.ENDED:
            self._end(ExitCode.STOPPED, asked.reason)

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        phase, settings = self.cluster.phase, self.cluster.settings
        if phase is Phase.FORMING and 0 <= settings.topo_timeout_s < self._now - self._started:
            _, missing = formation.decide(self.cluster)
            self._end(ExitCode.NOT_FORMED, f"not complete within {settings.topo_timeout_s:g} s: {missing}")
        elif phase is Phase.HEALING and self._now > self._heal_by:
            dead = [m for m in self.cluster.members.values() if m.state is NodeState.DEAD]
            limit = settings.topo_timeout_s
            reason = f"{names(dead)} did not come back within {limit:g} s"
            self._end(self.first_failure.code if self.first_failure else ExitCode.PEER_FAILED, reason)
        elif phase is not Phase.ENDED and settings.beats and settings.node_timeout_s >= 0:
            self._judge_silence(settings.node_timeout_s)

    def _judge_silence(self, limit: float) -> None:
        """silent → suspect after half the limit → dead after all of it."""
        for member in list(self.cluster.members.values()):
            silent = self._now - member.beat_at
            if not member.present or silent <= limit / 2 or (member.agent and not member.life):
                continue  # a child that never attached is spoken for by its agent's beats
            if silent > limit:
                self._count("silent_deaths")
                self._silence(member.link)
                member.link = 0
                self._over(member, ExitCode.PEER_FAILED, f"no beat for {silent:.1f} s (MS_NODE_TIMEOUT is {limit:g} s)")
            elif member.state is NodeState.ALIVE:
                member.state = NodeState.SUSPECT
                self._publish(member.name, "suspect", f"no beat for {silent:.1f} s", Level.WARNING)
            if self.cluster.phase is Phase.ENDED:
                return
        for agent in list(self.cluster.agents.values()):
            if self._now - agent.beat_at > limit and any(m.present for m in self.cluster.children(agent.id)):
                self._silence(agent.link)
                agent.link = 0
                self._agent_gone(agent, f"no beat for {self._now - agent.beat_at:.1f} s")

    # -- returning after the scheduler's own death -------------------------------------------------------------------

    def _restore(self, records: tuple[Record, ...]) -> None:
        """Take over from the journal. Members have one node timeout to re-attach before anyone is judged."""
        kept = next((r for r in records if isinstance(r, ClusterRecord)), None)
        assert kept is None or kept.phase is not Phase.ENDED, "the journal of a cluster that ended is not taken over"
        if kept is None:
            return self._persist(self._cluster_record())
        self.cluster.cluster_id = kept.cluster_id
        self.cluster.generation, self.cluster.restarts = kept.generation, kept.restarts
        if kept.phase is Phase.FORMING:
            return None
        for record in records:
            if isinstance(record, AgentRecord):
                agent = Agent(**msgspec.structs.asdict(record))
                agent.beat_at = self._now
                self.cluster.agents[agent.id] = agent
            elif isinstance(record, MemberRecord):
                member = Member(**msgspec.structs.asdict(record))
                member.beat_at = self._now
                if member.present:
                    member.state = NodeState.SUSPECT
                self.cluster.members[(member.role, member.node_id)] = member
        limit = self.cluster.settings.topo_timeout_s
        self._heal_by = self._now + limit if limit >= 0 else float("inf")
        count = len(self.cluster.members)
        self._move(Phase.RETURNING, f"the scheduler is back and waits for its {count} members to re-attach")
        return self._publish("cluster", "restored", f"generation {self.cluster.generation}, {count} members")

    def _settle(self, reason: str) -> None:
        """READY again once every place is filled and every member heard."""
        if self.cluster.phase not in (Phase.HEALING, Phase.RETURNING):
            return
        unheard = (NodeState.SUSPECT, NodeState.DEAD)
        if all(self._heard_of(m) or m.state not in unheard for m in self.cluster.members.values()):
            self._move(Phase.READY, reason)
            self._persist(self._cluster_record())
            self._publish("cluster", "ready", reason)

    def _heard_of(self, member: Member) -> bool:
        """A child whose agent is here is heard of, though it has not spoken itself."""
        agent = self.cluster.agents.get(member.agent)
        return agent is not None and bool(agent.link) and member.state is NodeState.SUSPECT and not member.life

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

    def _regroup(self, reason: str, tell: int = 0) -> None:
        """A new generation: durable first, then told to every member that is heard, except the one told otherwise."""
        self.cluster.generation += 1
        self._board = Board()
        self._persist(self._cluster_record())
        for member in self.cluster.members.values():
            if member.link and member.link != tell and member.present:
                self._send(member.link, Regrouped(self.cluster.generation, reason))

    def _end(self, code: int, reason: str, failure: Failure | None = None) -> None:
        self._move(Phase.ENDED, reason)
        self._persist(self._cluster_record())
        self._publish("cluster", "ended", reason, _level(code))
        for speaker in self._speakers.values():
            self._send(speaker.link, Stop(reason, code, failure))
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

    def _cluster_record(self) -> ClusterRecord:
        c = self.cluster
        s = c.settings
        return ClusterRecord(c.cluster_id, c.job, s.worker_num, s.server_num, c.phase, c.generation, c.restarts)


def _member_record(m: Member) -> MemberRecord:
    return MemberRecord(m.role, m.node_id, m.life, m.host, m.incarnation, m.rank, m.state, m.agent, m.restarts)


def _agent_record(a: Agent) -> AgentRecord:
    return AgentRecord(a.id, a.life, a.host, a.slots, a.first_rank, a.meet_port, a.log_dir)


def _level(code: int) -> Level:
    return Level.WARNING if code else Level.NOTE
