"""What becomes of a cluster: it forms, loses members, heals, starts anew, comes back after its scheduler's death, and ends.

Nothing here knows who says what over which wire: `machine.Machine` hears the messages and calls here when a life begins to
count or is over.

Two rules keep a crash of the scheduler harmless, wherever it happens. A new generation is durable before the incarnations that
live in it. A death that starts everyone anew is not written down before the new start is: the agent will say it again.
"""

from __future__ import annotations

from covey.core.cluster import formation, ranks, recovery_strategy, resize_plan
from covey.core.cluster.admission import names
from covey.core.cluster.heal_plan import Dump, Gathering
from covey.core.cluster.spares import Spared
from covey.core.cluster.transitions import NEVER
from covey.core.effects import Close, Level
from covey.core.incidents import Incident, Outcome, Stage
from covey.core.messages import DumpAsked, Refused, Stop
from covey.core.plurals import every, many
from covey.core.types import (
    Agent,
    AgentRecord,
    ClusterRecord,
    Ended,
    Failure,
    Member,
    MemberRecord,
    NodeState,
    Phase,
    Record,
    Role,
    ScriptError,
)
from covey.errors import ExitCode


class Lifecycle(Spared):
    """From the first formation to the end."""

    # -- forming -----------------------------------------------------------------------------------------------------

    def _form(self) -> None:
        plan, self.cluster.reason = formation.decide(self.cluster)
        if plan is None:
            return
        if self.cluster.size(Role.WORKER) < self.cluster.goal and self._now < self._deadlines.form:
            self.cluster.reason = (
                f"{self.cluster.reason}, at most {many(self.cluster.goal, 'worker')} may come: a last call for more"
            )
            return
        self.cluster.seat(plan.ranks)
        self.cluster.generation = 1
        self.cluster.next_seat = self.cluster.size(Role.WORKER)
        self._gathering = Gathering(1)
        self._move(Phase.READY, self.cluster.reason)
        for agent in self.cluster.agents.values():
            self._persist(AgentRecord.of(agent))
        for member in self.cluster.members.values():
            self._persist(MemberRecord.of(member))
        self._persist(self.cluster.record())  # last: members of a cluster that is FORMING in the journal do not count
        self._publish("cluster", "formed", f"{self.cluster.reason}, generation 1")
        self._tell_places()

    # -- dying -------------------------------------------------------------------------------------------------------

    def _link_lost(self, link: int, reason: str) -> None:
        speaker = self._speakers.pop(link, None)
        if speaker is None:
            return
        speaker.link = 0
        if isinstance(speaker, Member):
            if not speaker.agent:
                self._over(speaker, ExitCode.PEER_FAILED, f"its connection closed ({reason})")
        elif self.cluster.settings.waits_for_agents and self.cluster.phase is not Phase.FORMING:
            speaker.beat_at = self._now
            self._publish(f"agent:{speaker.id}", "out of reach", reason, Level.WARNING)
        else:
            self._agent_gone(speaker, ExitCode.PEER_FAILED, reason)

    def _agent_gone(self, agent: Agent, code: int, reason: str, since: float | None = None) -> None:
        """With its agent a child's life is over, and nobody is left to start the next."""
        children = self.cluster.children(agent.id)
        placed = [m for m in children if m.role is not Role.SPARE]
        undecided = [m for m in placed if m.state is NodeState.DEAD] if agent.leaving and self._dump is None else []
        done = placed and not undecided and not any(m.present for m in placed) and self.cluster.phase is not Phase.FORMING
        if self.cluster.over or done:
            return
        del self.cluster.agents[agent.id]
        self._publish(f"agent:{agent.id}", "gone", reason, Level.of(code))
        gone = f"the agent on {agent.host.name} is gone ({reason})"
        for member in undecided:  # nobody could take over while their host was leaving: that is decided now
            if not self.cluster.over:
                self._after_death(member, recovery_strategy.report(self.cluster, member, code, gone, [], ""), self._now)
        for member in [m for m in children if m.present]:
            self._over(member, code, gone, since=since)

    def _lose(self, member: Member, reason: str, since: float | None = None) -> None:
        """A life is over, but its process may still hear: it is told why, as the others are, before its link is closed."""
        link = member.link
        self._over(member, ExitCode.PEER_FAILED, reason, since=since)
        self._silence(link)
        if member.link == link:  # else the place is another's already, a spare's
            member.link = 0

    def _over(
        self,
        member: Member,
        code: int,
        reason: str,
        tail: list[str] | None = None,
        log: str = "",
        since: float | None = None,
        error: ScriptError | None = None,
    ) -> None:
        """One life is over: it left (code 0) or died. `since`: when it began to show, if that was before now."""
        known = self.cluster.members.get((member.role, member.node_id)) is member  # else a growth with it was taken back
        if not known or not member.present or self.cluster.over:
            return None
        if member.role is Role.SPARE:
            return self._spare_over(member, code, reason)
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
        self._publish(member.name, "left" if code == 0 else word, reason or f"code {code}", Level.of(code))
        if code == 0:
            self._persist(MemberRecord.of(member))
            return self._finished()
        failure = recovery_strategy.report(self.cluster, member, code, reason, tail or [], log, error)
        return self._after_death(member, failure, self._now if since is None else since)

    def _after_death(self, member: Member, failure: Failure, since: float) -> None:
        if self._dump is not None:  # the end is decided: one less to wait for
            if member.role is Role.WORKER:
                self._dump.waiting.discard(member.rank)
            self._persist(MemberRecord.of(member))  # its agent may end it now, and the next scheduler must not count on it
            return self._end_dump()
        self._settled -= {member.rank} if member.role is Role.PSERVER else set()
        if member.role is Role.PSERVER and member.rank in self.cluster.coming:
            return self._turn_servers_back(f"{member.name} did not come: {failure.reason}")
        if not resize_plan.can_turn_back(self.cluster):
            self.cluster.arriving = ()
        if member.role is Role.WORKER and member.node_id in self.cluster.arriving:
            return self._turn_back(f"{member.name} did not come: {failure.reason}")
        after, reason = recovery_strategy.decide(self.cluster, member, failure.code, failure.error)
        member.error = failure.error
        self._publish("cluster", str(after), reason, Level.WARNING)
        strategy = "recover" if after is recovery_strategy.After.PROMOTE else str(after)
        if after is recovery_strategy.After.END:
            strategy = "dump" if self._can_dump() else "exit"
            if strategy == "dump":
                self._persist(MemberRecord.of(member))  # as above: until the dump is done there may be another scheduler
        self._open_incident(strategy, reason, failure.reason, since=since, known=self._now, member=member)
        if after is recovery_strategy.After.WAIT:
            self.first_failure = self.first_failure or failure
            self._heal(reason)
            self._await_host()
            self._regroup(_gone(member, failure), member)
        elif after in (recovery_strategy.After.REPLACE, recovery_strategy.After.MOVE, recovery_strategy.After.PROMOTE):
            self._replace(member, failure, reason, after)
        elif after is recovery_strategy.After.SHRINK:
            self._shrink(member, _gone(member, failure), reason)
        elif after is recovery_strategy.After.RESTART_ALL:
            self.cluster.reason = f"{member.name} died ({failure.reason}), {reason}"
            self._restart_all(_gone(member, failure))
        elif not self._host_leaves(member):
            self.first_failure = failure
            why = f"; not recovered: {reason}" if recovery_strategy.replaces(self.cluster) else ""
            self._give_up(failure.code, f"{member.name} on {failure.host}: {failure.reason}{why}", failure)
        elif self._can_dump():  # else its agent will say goodbye when all of its workers have ended
            self._give_up(failure.code, f"{failure.host} was asked to leave, and {reason}")
        return None

    def _host_leaves(self, member: Member) -> bool:
        agent = self.cluster.agents.get(member.agent)
        return agent is not None and agent.leaving

    def _can_dump(self) -> set[int]:
        """The ranks that could write down what they hold, where that is wanted."""
        return (
            recovery_strategy.can_dump(self.cluster)[0]
            if recovery_strategy.Strategy.DUMP in self.cluster.settings.strategies
            else set()
        )

    def _give_up(self, code: int, reason: str, failure: Failure | None = None) -> None:
        """The last rungs: have the survivors write down what they hold, where that is wanted, and end."""
        survivors = self._can_dump()
        return self._write_down(code, reason, failure, survivors) if survivors else self._end(code, reason, failure)

    def _write_down(self, code: int, reason: str, failure: Failure | None, survivors: set[int]) -> None:
        self.cluster.dumping = then = Ended(code, reason, failure)
        self._dump = Dump(then, survivors, self._now + self.cluster.settings.dump_s)
        self._heal(reason)
        self._persist(self.cluster.record())  # a scheduler that is lost meanwhile asks again
        self._publish("cluster", "dump", f"{reason}; the others write down what they hold", Level.WARNING)
        for member in self.cluster.of(Role.WORKER):
            if member.rank in survivors:
                self._send(member.link, DumpAsked(reason))

    def _ask_again(self, member: Member) -> None:
        """It is back, and may not have heard that it is to write down what it holds, or its word was lost."""
        if self._dump is not None and member.role is Role.WORKER and member.rank in self._dump.waiting:
            self._send(member.link, DumpAsked(self._dump.then.reason))

    def _end_dump(self) -> None:
        dump = self._dump
        if dump is not None and (not dump.waiting or self._now > dump.by):
            step, path = self._dumped_last
            said = f"; step {step} is in {path}" if path else "; nobody could write down the state"
            self._end(dump.then.code, dump.then.reason + said, dump.then.failure)

    def _replace(self, member: Member, failure: Failure, reason: str, after: recovery_strategy.After) -> None:
        """One rank starts anew, on its host or on another, or in a spare; the others wait for it inside their step."""
        if not member.leaving:
            self.first_failure = self.first_failure or failure
        self._count("replacements")
        self._replacing = self._replacing or member.role is Role.WORKER  # a server's return needs no agreement of the workers
        self._heal(reason)
        if member.leaving:
            member.handovers += 1
        else:
            member.fruitless = member.fruitless + 1 if self._reached <= member.died_at_step else 1
            member.died_at_step = self._reached
        spare = recovery_strategy.stand_in(self.cluster, member) if after is recovery_strategy.After.PROMOTE else None
        before = member.agent
        if after is not recovery_strategy.After.REPLACE:
            agent = self.cluster.agents[spare.agent] if spare else recovery_strategy.refuge(self.cluster, member)
            assert agent is not None
            if agent.id != before:
                self._dismiss(member, reason)
                self._house(member, agent)
        sentence = _gone(member, failure)
        if member.role is Role.WORKER and self.cluster.size(Role.WORKER) == 1:  # no other rank has the state
            self._note_full_restart(sentence)
            self._publish("cluster", "state lost", str(self.cluster.full_restart), Level.WARNING)
            self._close_incidents(Outcome.RESTARTED)
        self._next_life(member)
        if spare is None:
            self._regroup(sentence, member)
        else:
            link = self._promote(spare, member)
            self._regroup(sentence, member, spare)
            self._begin_life(member)
            self._speak(link, member)
            self._send(link, self._places().formed(member))
        self._tell_agents({before, member.agent} if spare else {member.agent})  # the old life may still have to be ended

    def _dismiss(self, member: Member, reason: str) -> None:
        """Nobody else may be there to end the old life."""
        if member.link:
            self._send(member.link, Refused(f"this life is over: {reason}"))
            self._out.append(Close(member.link))

    def _house(self, member: Member, agent: Agent) -> None:
        """From now on this is the agent that starts it."""
        member.local_rank = ranks.free_local((m for m in self.cluster.of(member.role) if m is not member), agent.host)
        self.cluster.house(member, agent)
        self._layout = None

    def _await_host(self) -> None:
        """A host that comes may start the lost ones again. If the world may shrink instead, it is waited for only so long."""
        if recovery_strategy.waits_to_shrink(self.cluster.settings):
            self._deadlines.shrink = min(self._deadlines.shrink, self._now + self.cluster.settings.shrink_after_s)

    def _welcome_hosts(self) -> None:
        """What hosts that have come since the formation are good for: first to start again what lost ones had, then to grow."""
        if self.cluster.phase is Phase.HEALING and self._dump is None and (pairs := recovery_strategy.takers(self.cluster)):
            for member, agent in pairs:
                self._house(member, agent)
                self._next_life(member)
                self._count("returns")
            self._replacing = True
            self._await_healing()
            hosts = ", ".join(dict.fromkeys(agent.host.name for _, agent in pairs))
            lost = [member for member, _ in pairs]
            self._regroup(f"{names(lost)} started again on {hosts}", *lost)
            self._publish("cluster", "takes a host", f"{names(lost)} started again on {hosts}")
            self._tell_agents({agent.id for _, agent in pairs})
        elif (plan := resize_plan.growth(self.cluster))[0] is not None:
            self._grow_on(plan[0].agents, plan[1], "a host came")

    def _go_on_without_the_lost(self) -> None:
        """No host came in time for who is lost: the world shrinks, where it can."""
        self._deadlines.shrink = NEVER
        workers = self.cluster.of(Role.WORKER)
        lost = [m for m in workers if m.state is NodeState.DEAD]
        if not lost:
            return
        limit = f"no host came for {names(lost)} within {self.cluster.settings.shrink_after_s:g} s"
        plan, reason = resize_plan.shrink(self.cluster, lost[0])
        if plan is not None and any(m.present for m in workers):
            reason = f"{limit}: the others go on in a world of {len(workers) - len(lost)}"
            self._count("shrinks")
            self._open_incident("elastic-training", reason, limit, since=self._now, known=self._now)
            self._resize(reason, limit, self._without(lost))
        elif not self.cluster.settings.recovery:
            failure = self.first_failure
            self._give_up(failure.code if failure else ExitCode.PEER_FAILED, f"{limit}, and {reason}", failure)

    def _restart_all(self, reason: str, cause: str = "") -> None:
        self._note_full_restart(cause or reason)
        self.cluster.restarts += 1
        self._count("restarts")
        self._close_incidents(Outcome.RESTARTED)
        self.cluster.trains = False
        self.cluster.arriving = ()  # they begin with everyone else: nobody waits for them alone any more
        self._settled = set()
        self._reached = -1
        self._await_healing()
        children = [member for member in self.cluster.placed() if member.agent]
        for member in children:
            member.handovers += member.state is not NodeState.DEAD  # it had not failed
            self._next_life(member)
            member.fruitless, member.died_at_step, member.error = 0, -2, None
            member.lives = 0  # a server begins from nothing, as the workers do
            member.seat = member.rank  # nobody is left who knows it by another
        self._regroup(reason, *children)
        self._tell_places()

    def _roll_back(self, reason: str) -> None:
        """The ranks cannot go on from where they are: all start anew, from their newest checkpoint, where somebody can start
        them; not twice for the same step."""
        if not recovery_strategy.can_restart(self.cluster) or self._reached <= self._rolled_back_at:
            return self._give_up(ExitCode.PEER_FAILED, reason, self.first_failure)
        self._rolled_back_at = self._reached
        why, reason = reason, f"{reason}: all workers start anew, from their newest checkpoint"
        self._publish("cluster", "roll back", reason, Level.WARNING)
        self.cluster.reason = reason  # the console says it, too
        return self._restart_all(reason, why)

    def _finished(self) -> None:
        """The end, once every worker has left. One that has not is remembered: looking at all at each leave costs N²."""
        if self._awaited is None or self._awaited.state is NodeState.LEFT:
            workers = reversed(self.cluster.of(Role.WORKER))
            self._awaited = next((m for m in workers if m.state is not NodeState.LEFT), None)
        if self._awaited is None:
            self._end(0, f"{every(self.cluster.size(Role.WORKER), 'worker')} finished")
        else:
            self._settle("every member is heard again")

    # -- returning after the scheduler's own death -------------------------------------------------------------------

    def _restore(self, records: tuple[Record, ...]) -> None:
        """Take over from the journal. Members have one node timeout to re-attach before anyone is judged."""
        kept = next((r for r in records if isinstance(r, ClusterRecord)), None)
        if kept is None:
            return self._persist(self.cluster.record())
        self.cluster.recall(kept)
        self._deadlines.servers = self._now + resize_plan.ARRIVE_S
        self.incidents.take_over([record for record in records if isinstance(record, Incident)])
        if kept.phase is Phase.FORMING:
            return None
        self.cluster.take_over(records, self._now)
        if kept.ended is not None:
            return self._tell_the_end(kept.ended)
        self._gathering = Gathering(self.cluster.generation)
        self._take_up_a_change()
        self._await_healing()
        if kept.dumping is not None:
            ranks_there = {member.rank for member in self.cluster.of(Role.WORKER) if member.present}
            self._dump = Dump(kept.dumping, ranks_there, self._now + self.cluster.settings.dump_s)
        members = many(len(self.cluster.members), "member")
        self._move(Phase.RETURNING, f"the scheduler is back and waits for its {members} to re-attach")
        self._publish("cluster", "restored", f"generation {self.cluster.generation}, {members}")
        return self._finished()

    def _take_up_a_change(self) -> None:
        """A world that was changing its size has done so when all say again that they go on; who was to come may take as long
        from now."""
        self._replacing = self._grouped = self.cluster.trains and self.incidents.resizing
        if not self._replacing:
            self.cluster.arriving = ()
        self._deadlines.workers = self._now + resize_plan.ARRIVE_S

    def _tell_the_end(self, ended: Ended) -> None:
        """The scheduler was lost while it told its members the end: whoever calls is told now. Who waited for a formation that
        failed is in no journal."""
        self.cluster.ended, self._stop = ended, Stop(ended.reason, ended.code, ended.failure)
        self._move(Phase.ENDED, ended.reason)
        untold = {life for life, _ in self._out_of_reach()} if self.cluster.generation else {"whoever waited"}
        self._publish("cluster", "ended", f"{ended.reason}; {len(untold)} may not have heard it", Level.of(ended.code))
        self._await_the_untold(set() if ended.told else untold)

    def _settle(self, reason: str) -> None:
        """READY again once every place is filled and every member heard; HEALING once only the dead are missing."""
        phase, agreeing = self.cluster.phase, self._replacing and self._grouped and not self._all_resumed()
        if self._dump is not None or phase not in (Phase.HEALING, Phase.RETURNING):
            return
        if (agreeing and phase is not Phase.RETURNING) or self._some_suspect():  # the first costs nothing, and is asked N times
            return
        dead = [m for m in self.cluster.placed() if m.state is NodeState.DEAD]
        if not dead and not agreeing:
            self._replacing = False
            self.first_failure = None
            self._deadlines.shrink = NEVER
            self._held.clear()
            self.incidents.mark(Stage.REFORMED, self._now)
            self._move(Phase.READY, reason)
            if not self._grouped:
                self._close_if_resumed()
        elif phase is Phase.RETURNING:
            self._await_host()
            again = f"waiting for {names(dead)} to be started again, with the same variables"
            self._move(Phase.HEALING, again if dead else f"{reason}, and the world goes on changing its size")
        else:
            return
        self._persist(self.cluster.record())
        self._publish("cluster", str(self.cluster.phase), self.cluster.reason)

    def _some_suspect(self) -> bool:
        """Whether any place is not heard. One that is not is remembered: looking at all at each return costs N²."""
        last = self._suspect
        if last is None or last.state is not NodeState.SUSPECT or self.cluster.at(last.role, last.rank) is not last:
            self._suspect = next((m for m in reversed(self.cluster.placed()) if m.state is NodeState.SUSPECT), None)
        return self._suspect is not None

    def _server_resumed(self) -> None:
        """A parameter server has its rows back: if no worker is being replaced too, that was all."""
        if not self._replacing:
            self.incidents.mark(Stage.RESTORED, self._now)
            self._close_if_resumed()


def _gone(member: Member, failure: Failure) -> str:
    return f"{member.name} {'handed over' if member.leaving else 'died'}: {failure.reason}"
