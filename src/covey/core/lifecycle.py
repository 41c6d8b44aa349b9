"""What becomes of a cluster: it forms, loses members, heals, starts anew, comes back after its scheduler's death, and ends.

This half of the scheduler's machine knows nothing of who says what over which wire: `machine.Machine`, the other half, hears
the messages and calls here when a life begins to count or is over.

A cluster lives through phases: FORMING until every role has its number, then READY; a death moves it to HEALING (when the
place may be filled again), to a new generation of everyone (torchrun's restarts) or to ENDED. A restarted scheduler is
RETURNING until its members have re-attached or are overdue. The table `PHASES` lists the moves that exist; any other is a bug.

Two rules keep a crash of the scheduler harmless, wherever it happens. A new generation is durable before the incarnations that
live in it. A death that starts everyone anew is not written down before the new start is: the agent will say it again.
"""

from __future__ import annotations

from typing import Any

from covey.core import formation, ranks, recovery, scaling
from covey.core.board import Board
from covey.core.cluster import Cluster
from covey.core.effects import Close, End, Level, Persist, Publish, SchedulerEffect, Send
from covey.core.healing import Dump, Gathering
from covey.core.incidents import Incident, Incidents, Outcome, Stage
from covey.core.membership import names
from covey.core.messages import DumpAsked, Refused, Regrouped, Stop
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
    Progress,
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
RETRIES_MAX = 5  # of a collective that breaks again and again
EXPLAIN_S = 0.2  # how long a death may take to explain a broken collective
FIRST_S = 30.0  # until its first sign of progress a life imports, builds and restores: it is not called stuck before this
SLEPT_S = 1.0  # ticks come several times a second: a longer gap is this process's own sleep, and nobody else's silence


class Lifecycle:
    """The cluster, the links that speak for its members, and what is wished for in this step."""

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float, wall: float) -> None:
        self.cluster = Cluster(cluster_id=cluster_id, settings=settings, job=job)
        self.counters: dict[str, float] = {}
        self.incidents = Incidents(wall - now)
        self.first_failure: Failure | None = None
        self._started = self._ticked = self._now = now
        self._heal_by = float("inf")
        self._speakers: dict[int, Member | Agent] = {}
        self._held: set[str] = set()  # lives that are held off, to say so once
        self._board = Board()
        self._gathering = Gathering(0)
        self._dump: Dump | None = None
        self._dumped_last = (-1, "")  # the newest step that somebody has written down on its way out, and where
        self._reached = -1  # the highest step that any rank has shown
        self._rolled_back_at = -2  # what had been reached at the last return to a checkpoint
        self._retries = 0  # since all ranks last went on
        self._replacing = False  # a rank was started again, and not all ranks have gone on since
        self._grouped = False  # a group has met: only then will ranks say that they have gone on
        self._arriving: set[str] = set()  # node ids of those whom a growth waits for
        self._arrive_by = float("inf")
        self._layout: formation.Layout | None = None
        self._awaited: Member | None = None  # a worker that has not left
        self._stop: Stop | None = None
        self._out: list[SchedulerEffect] = []

    # -- forming -----------------------------------------------------------------------------------------------------

    def _form(self) -> None:
        plan, self.cluster.reason = formation.decide(self.cluster)
        if plan is None:
            return
        self.cluster.seat(plan.ranks)
        self.cluster.generation = 1
        self._gathering = Gathering(1)
        self._move(Phase.READY, self.cluster.reason)
        for agent in self.cluster.agents.values():
            self._persist(AgentRecord.of(agent))
        for member in self.cluster.members.values():
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

    # -- dying -------------------------------------------------------------------------------------------------------

    def _agent_gone(self, agent: Agent, code: int, reason: str, since: float | None = None) -> None:
        """With its agent a child's life is over, and nobody is left to start the next."""
        children = [m for m in self.cluster.children(agent.id) if m.present]
        if self.cluster.phase is Phase.ENDED or (not children and self.cluster.phase is not Phase.FORMING):
            return
        del self.cluster.agents[agent.id]
        self._publish(f"agent:{agent.id}", "gone", reason, _level(code))
        for member in children:
            self._over(member, code, f"the agent on {agent.host.name} is gone ({reason})", since=since)

    def _over(
        self, member: Member, code: int, reason: str, tail: list[str] | None = None, log: str = "", since: float | None = None
    ) -> None:
        """One life is over: it left (code 0) or died. `since`: when it began to show, if that was before now."""
        if not member.present or self.cluster.phase is Phase.ENDED:
            return None
        if code and self._gathering.done:  # every rank had come to its end: nothing is left to repeat
            code, reason = 0, f"{reason or f'code {code}'}, after its work was done"
        member.state = NodeState.LEFT if code == 0 else NodeState.DEAD
        if self.cluster.phase is Phase.FORMING:
            self.cluster.remove(member)
            self.cluster.reason = formation.decide(self.cluster)[1]
            return self._publish(member.name, "gone before the cluster formed", reason or f"code {code}")
        if code and member.leaving:
            reason = member.leaving
        word, counter = ("handed over", "handovers") if member.leaving else ("died", "deaths")
        self._count("left" if code == 0 else counter)
        self._publish(member.name, "left" if code == 0 else word, reason or f"code {code}", _level(code))
        if code == 0:
            self._persist(MemberRecord.of(member))
            return self._finished()
        failure = recovery.report(self.cluster, member, code, reason, tail or [], log)
        return self._after_death(member, failure, self._now if since is None else since)

    def _after_death(self, member: Member, failure: Failure, since: float) -> None:
        if self._dump is not None:  # the end is decided: one less to wait for
            if member.role is Role.WORKER:
                self._dump.waiting.discard(member.rank)
            return self._end_dump()
        if member.node_id in self._arriving:
            return self._turn_back(f"{member.name} did not come: {failure.reason}")
        after, reason = recovery.decide(self.cluster, member, failure.code)
        self._publish("cluster", str(after), reason, Level.WARNING)
        strategy = str(after) if after is not recovery.After.END else "dump" if self._can_dump() else "exit"
        self._open_incident(strategy, reason, failure.reason, since=since, known=self._now, member=member)
        if after is recovery.After.WAIT:
            self.first_failure = self.first_failure or failure
            self._await_healing()
            if self.cluster.phase is not Phase.HEALING:
                self._move(Phase.HEALING, reason)
            self._regroup(_gone(member, failure), member)
        elif after in (recovery.After.REPLACE, recovery.After.MOVE):
            self._replace(member, failure, reason, moves=after is recovery.After.MOVE)
        elif after is recovery.After.SHRINK:
            self._shrink(member, failure, reason)
        elif after is recovery.After.RESTART_ALL:
            self.cluster.reason = f"{member.name} died ({failure.reason}), {reason}"
            self._restart_all(_gone(member, failure))
        elif not self._host_leaves(member):
            self.first_failure = failure
            self._give_up(failure.code, f"{member.name} on {failure.host}: {failure.reason}", failure)
        elif self._can_dump():  # else its agent will say goodbye when all of its workers have ended
            self._give_up(failure.code, f"{failure.host} was asked to leave, and {reason}")
        return None

    def _host_leaves(self, member: Member) -> bool:
        agent = self.cluster.agents.get(member.agent)
        return agent is not None and agent.leaving

    def _can_dump(self) -> set[int]:
        """The ranks that could write down what they hold, where that is wanted."""
        wanted = recovery.Strategy.DUMP in self.cluster.settings.strategies
        return {m.rank for m in self.cluster.of(Role.WORKER) if wanted and m.link and m.present and m.progress.loop}

    def _give_up(self, code: int, reason: str, failure: Failure | None = None) -> None:
        """The last rungs: have the survivors write down what they hold, where that is wanted, and end."""
        survivors = self._can_dump()
        if not survivors:
            return self._end(code, reason, failure)
        self._dump = Dump(code, reason, failure, survivors, self._now + self.cluster.settings.dump_s)
        if self.cluster.phase is not Phase.HEALING:
            self._move(Phase.HEALING, reason)
        self._publish("cluster", "dump", f"{reason}; the others write down what they hold", Level.WARNING)
        for member in self.cluster.of(Role.WORKER):
            if member.rank in survivors:
                self._send(member.link, DumpAsked(reason))
        return None

    def _end_dump(self) -> None:
        dump = self._dump
        if dump is not None and (not dump.waiting or self._now > dump.by):
            step, path = self._dumped_last
            said = f"; step {step} is in {path}" if path else "; nobody could write down the state"
            self._end(dump.code, dump.reason + said, dump.failure)

    def _replace(self, member: Member, failure: Failure, reason: str, moves: bool) -> None:
        """One rank starts anew, on its host or on another; the others wait for it inside their step."""
        if not member.leaving:
            self.first_failure = self.first_failure or failure
        self._count("replacements")
        self._replacing = self._replacing or member.role is Role.WORKER  # a server's return needs no agreement of the workers
        self._await_healing()
        if self.cluster.phase is not Phase.HEALING:
            self._move(Phase.HEALING, reason)
        if member.leaving:
            member.handovers += 1
        else:
            member.fruitless = member.fruitless + 1 if self._reached <= member.died_at_step else 1
            member.died_at_step = self._reached
        if moves:
            agent = recovery.refuge(self.cluster, member)
            assert agent is not None
            if member.link:  # nobody else may be there to end the old life
                self._send(member.link, Refused(f"this life is over: {reason}"))
                self._out.append(Close(member.link))
            member.local_rank = ranks.free_local(self.cluster.of(member.role), agent.host)
            member.agent, member.host = agent.id, agent.host
            self._layout = None
        sentence = _gone(member, failure)
        self._next_life(member)
        self._regroup(sentence, member)
        agent = self.cluster.agents[member.agent]
        if agent.link:
            self._send(agent.link, self._places().start(agent))

    def _shrink(self, member: Member, failure: Failure, reason: str) -> None:
        """The others go on without one, in the step they are in."""
        self._count("shrinks")
        self._resize(reason, _gone(member, failure), self._without([member]))
        self._tell_agents({member.agent})  # to end what may be left of it

    def _without(self, leavers: list[Member]) -> list[Member]:
        """Take members out of the cluster; returns whose rank changed."""
        changed: dict[str, Member] = {}
        for member in leavers:
            plan, reason = scaling.shrink(self.cluster, member)
            assert plan is not None, reason
            self._speakers.pop(member.link, None)
            changed |= {m.name: m for m in scaling.carry_out(self.cluster, plan)}
        return [m for m in changed.values() if m not in leavers]

    def _tell_agents(self, agents: set[str]) -> None:
        for name in sorted(agents & self.cluster.agents.keys()):
            agent = self.cluster.agents[name]
            if agent.link:
                self._send(agent.link, self._places().start(agent))

    def _scale(self, plan: scaling.Resizing, reason: str) -> int:
        """The world changes as asked, in the step it is in; returns the operation's number."""
        kind = "scale-out" if plan.agents else "scale-in"
        self._count(kind.replace("-", "_"))
        self._open_incident(kind, reason, "asked for", since=self._now, known=self._now)
        changed = scaling.admit(self.cluster, plan.agents, self._now) if plan.agents else self._without(plan.leavers)
        self._arriving = {m.node_id for m in changed} if plan.agents else set()
        self._arrive_by = self._now + scaling.ARRIVE_S
        for member in changed if plan.agents else []:
            self._begin_life(member)
        self._resize(reason, reason, changed)
        for member in plan.leavers:
            if member.link:
                self._send(member.link, Stop(f"{member.name} leaves: {reason}"))
        self._tell_agents(set(plan.agents))
        return self.incidents.kept[-1].number

    def _turn_back(self, reason: str) -> None:
        """A growth is taken back, all of it."""
        leavers = [m for m in self.cluster.of(Role.WORKER) if m.node_id in self._arriving]
        self._arriving = set()
        reason = f"{reason}; the growth is taken back"
        self._close_incidents(Outcome.ROLLED_BACK)
        self._open_incident("scale-in", reason, reason, since=self._now, known=self._now)
        self._resize(reason, reason, self._without(leavers))
        for member in leavers:
            self._silence(member.link)
        self._tell_agents({m.agent for m in leavers})

    def _resize(self, reason: str, what: str, changed: list[Member]) -> None:
        """A new generation in a world of another size: everyone is told its place in it."""
        self._replacing = True
        self._await_healing()
        if self.cluster.phase is not Phase.HEALING:
            self._move(Phase.HEALING, reason)
        self._layout = None
        self.cluster.resized = self.cluster.generation + 1
        self._awaited = None
        self._next_generation(*changed)
        self._publish("cluster", "resized", f"{what}; the world is now {self.cluster.size(Role.WORKER)}", Level.WARNING)
        places = self._places()
        for member in self.cluster.members.values():
            if member.link and member.present:
                self._send(member.link, places.formed(member))

    def _next_life(self, member: Member) -> None:
        """A child's place, ready for the next process. The old one is ended by its agent, and need not learn it from us."""
        self._speakers.pop(member.link, None)
        member.incarnation += 1
        member.restarts += 1
        member.life, member.link, member.pid, member.leaving, member.progress = "", 0, 0, "", Progress()
        here = self.cluster.agents[member.agent].link
        member.state = NodeState.ALIVE if here else NodeState.SUSPECT  # until its agent is back

    def _restart_all(self, reason: str) -> None:
        self.cluster.restarts += 1
        self._count("restarts")
        self._close_incidents(Outcome.RESTARTED)
        self.cluster.trains = False
        children = [member for member in self.cluster.members.values() if member.agent]
        for member in children:
            self._next_life(member)
            member.seat = member.rank  # nobody is left who knows it by another
        self._regroup(reason, *children)
        self._tell_places()

    def _roll_back(self, reason: str) -> None:
        """The ranks cannot go on from where they are: all start anew, from their newest checkpoint, where somebody can start
        them; not twice for the same step."""
        agents = self.cluster.agents
        here = all(m.agent in agents and not agents[m.agent].leaving for m in self.cluster.of(Role.WORKER))
        if not here or self._reached <= self._rolled_back_at:
            return self._give_up(ExitCode.PEER_FAILED, reason, self.first_failure)
        self._rolled_back_at = self._reached
        reason = f"{reason}: all workers start anew, from their newest checkpoint"
        self._publish("cluster", "roll back", reason, Level.WARNING)
        return self._restart_all(reason)

    def _finished(self) -> None:
        """The end, once every worker has left. One that has not is remembered: looking at all at each leave costs N²."""
        if self._awaited is None or self._awaited.state is NodeState.LEFT:
            workers = reversed(self.cluster.of(Role.WORKER))
            self._awaited = next((m for m in workers if m.state is not NodeState.LEFT), None)
        if self._awaited is None:
            self._end(0, f"all {self.cluster.size(Role.WORKER)} workers finished")
        else:
            self._settle("every member is heard again")

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._forgive_sleep()
        phase, settings = self.cluster.phase, self.cluster.settings
        limit = settings.topo_timeout_s
        if phase is Phase.FORMING and 0 <= limit < self._now - self._started:
            reason = f"not complete within {limit:g} s: {formation.missing(self.cluster)}"
            self._end(ExitCode.NOT_FORMED, reason)
        elif self._dump is not None:
            self._end_dump()
        elif phase in (Phase.HEALING, Phase.RETURNING) and self._now > self._heal_by and (away := self._away()):
            failure = self.first_failure
            reason = f"{names(away)} did not come back within {limit:g} s"
            self._end(failure.code if failure else ExitCode.PEER_FAILED, reason, failure)
        elif self._arriving and self._now > self._arrive_by:
            self._turn_back(f"not all came within {scaling.ARRIVE_S:g} s")
        elif self._now - self._gathering.broke_at > EXPLAIN_S:
            self._retry()
        elif settings.judges_silence:
            self._judge_silence(settings.node_timeout_s)
        if settings.stuck_s >= 0 and self._dump is None and self.cluster.phase is not Phase.ENDED:
            self._judge_progress(settings.stuck_s)

    def _away(self) -> list[Member]:
        """Who is not here; a replacement is when it has called."""
        away, members = (NodeState.DEAD, NodeState.SUSPECT), self.cluster.members.values()
        return [m for m in members if m.state in away or (self._replacing and m.present and not m.link)]

    def _judge_progress(self, limit: float) -> None:
        """A rank for which all others have waited in one collective for too long is stuck, though it beats; or it has left."""
        everyone = self.cluster.of(Role.WORKER)
        workers, left = [m for m in everyone if m.present], [m for m in everyone if m.state is NodeState.LEFT]
        waiting = [m for m in workers if m.progress.waits and self._now - m.changed_at > limit]
        late = [m for m in workers if not m.progress.waits and m.link]
        if not waiting or len(waiting) + len(late) < len(workers):
            return
        where = f"in collective {waiting[0].progress.waits} for over {limit:g} s"
        if left and len(waiting) + len(left) == len(everyone):
            reason = f"{names(left)} left before the work was done: all others wait {where}"
            self._give_up(ExitCode.PEER_FAILED, reason)
        for member in late:
            if self._now - member.changed_at > limit:
                self._count("stuck")
                reason = f"stuck: all others wait for it {where}"
                link = member.link
                self._over(member, ExitCode.PEER_FAILED, reason, since=member.changed_at)
                self._silence(link)
                member.link = 0

    def _retry(self) -> None:
        """A collective broke, and no death explains it: everyone lives, so the step is tried again in a new generation."""
        reason = f"a collective broke ({self._gathering.broke_reason}) and every process lives"
        if recovery.Strategy.RETRY not in self.cluster.settings.strategies:
            return self._end(ExitCode.PEER_FAILED, f"{reason}, but retry is not among the strategies")
        self._retries += 1
        if self._retries > RETRIES_MAX:
            return self._end(ExitCode.PEER_FAILED, f"{reason}, {RETRIES_MAX} times in a row without a step in between")
        self._count("retries")
        self._publish("cluster", "retry", f"{reason}: the step is tried again", Level.WARNING)
        broke_at = self._gathering.broke_at
        self._open_incident("retry", "every process lives", self._gathering.broke_reason, since=broke_at, known=broke_at)
        return self._regroup(reason)

    def _forgive_sleep(self) -> None:
        """While this process was stopped it heard nobody: that time counts for nothing."""
        slept, self._ticked = self._now - self._ticked, self._now
        if slept > SLEPT_S:
            self._publish("scheduler", "slept", f"no tick for {slept:.1f} s: nobody's silence in that time counts")
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
                self._agent_gone(agent, ExitCode.PEER_FAILED, _silent(silent, limit), since=agent.beat_at)
        for member in list(self.cluster.members.values()):
            if self.cluster.phase is Phase.ENDED:
                return
            silent = self._now - member.beat_at
            if silent <= limit / 2 or not member.present or self._agent_answers(member):
                continue
            if silent > limit:
                self._count("silent_deaths")
                link = member.link
                self._over(member, ExitCode.PEER_FAILED, _silent(silent, limit), since=member.beat_at)
                self._silence(link)  # after the end was told: if it can still hear, it should hear why
                member.link = 0
            elif member.state is NodeState.ALIVE:
                member.state = NodeState.SUSPECT
                self._publish(member.name, "suspect", f"no beat for {silent:.1f} s", Level.WARNING)

    def _agent_answers(self, member: Member) -> bool:
        """A child that never attached has no beats of its own, and one whose agent is out of reach is judged with it."""
        return bool(member.agent) and (not member.life or not self.cluster.agents[member.agent].link)

    # -- returning after the scheduler's own death -------------------------------------------------------------------

    def _restore(self, records: tuple[Record, ...]) -> None:
        """Take over from the journal. Members have one node timeout to re-attach before anyone is judged."""
        kept = next((r for r in records if isinstance(r, ClusterRecord)), None)
        assert kept is None or kept.phase is not Phase.ENDED, "the journal of a cluster that ended is not taken over"
        if kept is None:
            return self._persist(self.cluster.record())
        self.cluster.cluster_id = kept.cluster_id
        self.cluster.generation, self.cluster.restarts, self.cluster.heals = kept.generation, kept.restarts, kept.heals
        self.cluster.resized, self.cluster.next_seat, self.cluster.trains = kept.resized, kept.next_seat, kept.trains
        self.incidents.take_over([record for record in records if isinstance(record, Incident)])
        if kept.phase is Phase.FORMING:
            return None
        self.cluster.take_over(records, self._now)
        self._gathering = Gathering(self.cluster.generation)
        self._await_healing()
        count = len(self.cluster.members)
        self._move(Phase.RETURNING, f"the scheduler is back and waits for its {count} members to re-attach")
        self._publish("cluster", "restored", f"generation {self.cluster.generation}, {count} members")
        return self._finished()

    def _await_healing(self) -> None:
        limit = self.cluster.settings.topo_timeout_s
        self._heal_by = self._now + limit if limit >= 0 else float("inf")

    def _settle(self, reason: str) -> None:
        """READY again once every place is filled and every member heard; HEALING once only the dead are missing."""
        phase, members = self.cluster.phase, self.cluster.members.values()
        if (
            self._dump is not None
            or phase not in (Phase.HEALING, Phase.RETURNING)
            or any(m.state is NodeState.SUSPECT for m in members)
        ):
            return
        dead = [m for m in members if m.state is NodeState.DEAD]
        if self._replacing and self._grouped and not self._all_resumed():
            return
        if not dead:
            self._replacing = False
            self.first_failure = None
            self._held.clear()
            self.incidents.mark(Stage.REFORMED, self._now)
            self._move(Phase.READY, reason)
            if not self._grouped:
                self._close_incidents(Outcome.RESUMED)
        elif phase is Phase.RETURNING:
            self._move(Phase.HEALING, f"waiting for {names(dead)} to be started again, with the same variables")
        else:
            return
        self._persist(self.cluster.record())
        self._publish("cluster", str(self.cluster.phase), self.cluster.reason)

    def _server_resumed(self) -> None:
        """A parameter server has its rows back: if no worker is being replaced too, that was all."""
        if not self._replacing:
            self.incidents.mark(Stage.RESTORED, self._now)
            self._close_incidents(Outcome.RESUMED)

    def _all_resumed(self) -> bool:
        return len(self._gathering.resumed) == self.cluster.size(Role.WORKER)

    # -- small moves -------------------------------------------------------------------------------------------------

    def _begin_life(self, member: Member) -> None:
        """Nothing of the life before it counts for its progress, and it has time until it must show some."""
        member.progress = Progress()
        member.changed_at = self._now + max(0.0, FIRST_S - self.cluster.settings.stuck_s)

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
        self._next_generation(*changed)
        news = Regrouped(self.cluster.generation, reason)
        for member in self.cluster.members.values():
            if member.link and member.present:
                self._send(member.link, news)

    def _next_generation(self, *changed: Member) -> None:
        self.cluster.generation += 1
        self._board = Board()
        self._gathering = Gathering(self.cluster.generation)
        self._persist(self.cluster.record())
        for member in changed:
            self._persist(MemberRecord.of(member))

    def _open_incident(
        self, strategy: str, reason: str, cause: str, *, since: float, known: float, member: Member | None = None
    ) -> None:
        node, rank = (member.name, member.rank) if member is not None else ("cluster", -1)
        incident = self.incidents.open(
            self._now, since=since, known=known, node=node, rank=rank, cause=cause, strategy=strategy, reason=reason
        )
        self._persist(incident)

    def _close_incidents(self, outcome: Outcome) -> None:
        for incident in self.incidents.close(outcome, self._now):
            self._persist(incident)
            self._publish("cluster", "recovery", str(incident))

    def _end(self, code: int, reason: str, failure: Failure | None = None) -> None:
        self._close_incidents(Outcome.ENDED if code else Outcome.FINISHED)
        self._stop = Stop(reason, code, failure)
        self._arriving = set()
        self._move(Phase.ENDED, reason)
        self._persist(self.cluster.record())
        self._publish("cluster", "ended", reason, _level(code))
        children_first = sorted(self._speakers, key=lambda link: isinstance(self._speakers[link], Agent))
        for link in children_first:  # so that they hear why before their agent ends them
            self._send(link, self._stop)
        self._out.append(End(code, reason, failure))

    def _move(self, phase: Phase, reason: str) -> None:
        assert phase in PHASES[self.cluster.phase], f"no move from {self.cluster.phase} to {phase}"
        self.cluster.phase, self.cluster.reason = phase, reason

    def _send(self, link: int, message: Any) -> None:
        self._out.append(Send(message, link))

    def _persist(self, record: Record) -> None:
        self._out.append(Persist(record))

    def _publish(self, node: str, what: str, reason: str, level: Level = Level.NOTE) -> None:
        self._out.append(Publish(node, what, reason, level))

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1


def _gone(member: Member, failure: Failure) -> str:
    return f"{member.name} {'handed over' if member.leaving else 'died'}: {failure.reason}"


def _silent(silent_s: float, limit_s: float) -> str:
    return f"no beat for {silent_s:.1f} s (MS_NODE_TIMEOUT is {limit_s:g} s)"


def _level(code: int) -> Level:
    return Level.WARNING if code else Level.NOTE
