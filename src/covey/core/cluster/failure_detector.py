"""What follows from time alone: who is silent, who is stuck, what is overdue, and that our own sleep counts for nothing."""

from __future__ import annotations

import msgspec

from covey.core.cluster import formation, heal_plan, recovery_strategy, resize_plan
from covey.core.cluster.admission import names
from covey.core.cluster.lifecycle import Lifecycle
from covey.core.cluster.transitions import NEVER
from covey.core.effects import Level
from covey.core.messages import HealPlan, Number
from covey.core.types import Agent, Member, NodeState, Phase, Role
from covey.errors import ExitCode

RETRIES_MAX = 5  # of a collective that breaks again and again
EXPLAIN_S = 0.2  # how long a death may take to explain a broken collective
SLEPT_S = 1.0  # ticks come several times a second: a longer gap is this process's own sleep, and nobody else's silence


class Watch(Lifecycle):
    """A cluster over which somebody keeps watch, several times a second."""

    def _tick(self) -> None:
        self._forgive_sleep()
        if self.cluster.phase is Phase.FORMING:
            self._form()
        else:
            self._welcome_hosts()
        phase, settings = self.cluster.phase, self.cluster.settings
        limit = settings.topo_timeout_s
        if phase is Phase.FORMING and 0 <= limit < self._now - self._started:
            reason = f"not complete within {limit:g} s: {formation.missing(self.cluster)}"
            self._end(ExitCode.NOT_FORMED, reason)
        elif self._dump is not None:
            self._end_dump()
        elif phase in (Phase.HEALING, Phase.RETURNING) and self._now > self._deadlines.heal and (away := self._away()):
            failure = self.first_failure
            reason = f"{names(away)} did not come back within {limit:g} s"
            self._give_up(failure.code if failure else ExitCode.PEER_FAILED, reason, failure)
        elif self._now > self._deadlines.shrink:
            self._go_on_without_the_lost()
        elif self._now > self._deadlines.workers and resize_plan.can_turn_back(self.cluster):
            self._turn_back(f"not all came within {resize_plan.ARRIVE_S:g} s")
        elif self.cluster.coming and self._now > self._deadlines.servers:
            self._turn_servers_back(f"not all came within {resize_plan.ARRIVE_S:g} s")
        elif self._now - self._gathering.broke_at > EXPLAIN_S:
            self._retry()
        elif settings.judges_silence:
            self._judge_silence(settings.node_timeout_s)
        if self._dump is None and not self.cluster.over:
            self._judge_waits(settings.stuck_s)
        if self.cluster.phase is Phase.READY and self.cluster.trains and not self._let_next_go():
            self._fill_spares()

    def _away(self) -> list[Member]:
        """Who is not here; a replacement is when it has called."""
        away, members = (NodeState.DEAD, NodeState.SUSPECT), self.cluster.placed()
        return [m for m in members if m.state in away or (self._replacing and m.present and not m.link)]

    def _judge_waits(self, limit: float) -> None:
        """Whoever waits for one that will never come waits for ever. One that may come, and for which all others have waited
        in one collective for too long, is stuck, though it beats."""
        self._go_on_as_the_left_did()
        workers, since = self.cluster.of(Role.WORKER), self._now - limit if limit >= 0 else -NEVER
        waiting = [m for m in workers if m.progress.waits and m.changed_at < since and m.present]
        where = f"in collective {waiting[0].progress.waits} for over {limit:g} s" if waiting else ""
        waits = self._waits_for_the_ended() or self._waits_for_the_left(len(waiting), where)
        if reason := waits or self._waits_to_go_on(limit):
            return self._give_up(ExitCode.PEER_FAILED, reason)
        late = [m for m in workers if not m.progress.waits and m.present and m.link] if waiting else []
        if len(waiting) + len(late) == sum(m.present for m in workers):
            for member in late:
                if member.changed_at < since:  # asked one by one: after one's loss another may have begun anew
                    self._count("stuck")
                    self._lose(member, f"stuck: all others wait for it {where}", since=member.changed_at)
        return None

    def _waits_for_the_ended(self) -> str:
        """A rank at the end of its program has said what it took part in last, so this needs no time to be seen."""
        reports = self._gathering.reports
        if self.cluster.phase is not Phase.READY or not any(report.finished for report in reports.values()):
            return ""
        said = {m.rank: Number.read(m.progress.waits) for m in self.cluster.of(Role.WORKER) if m.present and m.link}
        return heal_plan.left_alone(reports, {rank: number for rank, number in said.items() if number is not None})

    def _waits_for_the_left(self, waiting: int, where: str) -> str:
        """A rank that has left reports nothing more: all others have reported, or wait in a collective, in vain."""
        workers, gathering = self.cluster.of(Role.WORKER), self._gathering
        left = [m for m in workers if m.state is NodeState.LEFT]
        unheard = [m for m in left if m.rank not in gathering.reports]
        if gathering.reports and unheard and len(gathering.reports) + len(unheard) == len(workers) and not gathering.done:
            return f"{names(unheard)} left before the work was done: all others wait to go on"
        if left and waiting and len(left) + waiting == len(workers):
            return f"{names(left)} left before the work was done: all others wait {where}"
        return ""

    def _waits_to_go_on(self, limit: float) -> str:
        """Nor does it say that it goes on. All others have so long to go on by themselves, and so to show that it did."""
        workers, gathering = self.cluster.of(Role.WORKER), self._gathering
        left = [m for m in workers if m.state is NodeState.LEFT and m.rank not in gathering.resumed]
        if not left or not self._replacing or gathering.done or len(gathering.reports) < len(workers):
            self._deadlines.resume = NEVER
        elif limit >= 0:
            self._deadlines.resume = min(self._deadlines.resume, self._now + limit)
            if self._now > self._deadlines.resume:
                return f"{names(left)} left before the work was done: all others wait to go on for over {limit:g} s"
        return ""

    def _go_on_as_the_left_did(self) -> None:
        """Where all others are at their end, or go on, who has left was or did so too: nobody waits for it."""
        workers, gathering = self.cluster.of(Role.WORKER), self._gathering
        left = {m.rank for m in workers if m.state is NodeState.LEFT}
        if not left or not gathering.reports or gathering.done:
            return
        others = {m.rank for m in workers} - left
        if not left <= gathering.reports.keys():
            if others <= gathering.reports.keys() and all(report.finished for report in gathering.reports.values()):
                gathering.done = True
                for member in [m for m in workers if m.rank in gathering.reports]:
                    self._send(member.link, HealPlan(gathering.generation, done=True))
        elif self._replacing and others <= gathering.resumed and not left <= gathering.resumed:
            gathering.resumed |= left
            self._went_on()

    def _went_on(self) -> None:
        """A rank goes on after a change; if it was the last one, the change is over."""
        if self._all_resumed():
            self._retries = 0
            if (restart := self.cluster.full_restart) is not None and not restart.resumed:
                self.cluster.full_restart = msgspec.structs.replace(restart, resumed=True)
                self._persist(self.cluster.record())
            for member in self.cluster.of(Role.WORKER):
                if member.error is not None and member.error.step < 0:  # a script without steps shows progress by collectives
                    member.error = None
            self.cluster.arriving = ()
            if not self._let_next_go():
                self._close_if_resumed()
        self._settle("every rank goes on")

    def _retry(self) -> None:
        """A collective broke, and no death explains it: everyone lives, so the step is tried again in a new generation."""
        reason = f"a collective broke ({self._gathering.broke_reason}) and every process lives"
        if recovery_strategy.Strategy.RETRY not in self.cluster.settings.strategies:
            return self._give_up(ExitCode.PEER_FAILED, f"{reason}, but retry is not among the strategies")
        self._retries += 1
        if self._retries > RETRIES_MAX:
            return self._give_up(ExitCode.PEER_FAILED, f"{reason}, {RETRIES_MAX} times in a row without a step in between")
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
            self._deadlines.postpone(slept)
            if self._gathering.broke_at < NEVER:
                self._gathering.broke_at = min(self._gathering.broke_at + slept, self._now)
            if self._dump is not None:
                self._dump.by = min(self._dump.by + slept, self._now + self.cluster.settings.dump_s)
            speakers: list[Member | Agent] = [*self.cluster.members.values(), *self.cluster.agents.values()]
            for speaker in speakers:
                speaker.beat_at = min(speaker.beat_at + slept, self._now)
            for member in self.cluster.members.values():
                member.changed_at = min(member.changed_at + slept, max(member.changed_at, self._now))

    def _judge_silence(self, limit: float) -> None:
        """silent → suspect after half the limit → dead after all of it; an agent takes its children along."""
        for agent in list(self.cluster.agents.values()):
            silent = self._now - agent.beat_at
            if silent > limit:
                self._hang_up(agent)
                self._agent_gone(agent, ExitCode.PEER_FAILED, _silent(silent, limit), since=agent.beat_at)
        since = self._now - limit / 2
        for member in [member for member in self.cluster.members.values() if member.beat_at < since]:
            if self.cluster.over:
                return
            silent = self._now - member.beat_at
            if not member.present or self._agent_answers(member):
                continue
            if silent > limit:
                self._count("silent_deaths")
                self._lose(member, _silent(silent, limit), since=member.beat_at)
            elif member.state is NodeState.ALIVE:
                member.state = NodeState.SUSPECT
                self._publish(member.name, "suspect", f"no beat for {silent:.1f} s", Level.WARNING)

    def _agent_answers(self, member: Member) -> bool:
        """A child that never attached has no beats of its own, and one whose agent is out of reach is judged with it."""
        return bool(member.agent) and (not member.life or not self.cluster.agents[member.agent].link)


def _silent(silent_s: float, limit_s: float) -> str:
    return f"no beat for {silent_s:.1f} s (MS_NODE_TIMEOUT is {limit_s:g} s)"
