"""What follows from time alone: who is silent, who is stuck, what is overdue, and that our own sleep counts for nothing."""

from __future__ import annotations

import msgspec

from covey.core.cluster import formation, heal_plan, recovery_strategy, resize_plan
from covey.core.cluster.admission import describe_members
from covey.core.cluster.lifecycle import Lifecycle
from covey.core.cluster.transitions import NEVER
from covey.core.effects import Level
from covey.core.messages import CollectiveNumber, HealPlan
from covey.core.types import AgentInfo, Member, NodeState, Phase, Role
from covey.errors import ExitCode

COLLECTIVE_RETRIES_MAX = 5  # of a collective that breaks again and again
DEATH_REPORT_S = 0.2  # how long a death may take to explain a broken collective
SUSPENSION_S = 1.0  # ticks come several times a second: a longer gap is this process's own sleep, and nobody else's silence


class Watch(Lifecycle):
    """A cluster over which somebody keeps watch, several times a second."""

    def _on_tick(self) -> None:
        self._discount_suspension()
        if self.cluster.phase is Phase.FORMING:
            self._form_if_complete()
        else:
            self._use_new_hosts()
        phase, settings = self.cluster.phase, self.cluster.settings
        limit = settings.topo_timeout_s
        if phase is Phase.FORMING and 0 <= limit < self._now - self._forming_since:
            reason = f"not complete within {limit:g} s: {formation.describe_missing(self.cluster)}"
            self._end_cluster(ExitCode.NOT_FORMED, reason)
        elif self._dump is not None:
            self._end_if_dumped()
        elif (
            phase in (Phase.HEALING, Phase.RETURNING) and self._now > self._deadlines.heal and (away := self._absent_members())
        ):
            failure = self.first_failure
            reason = f"{describe_members(away)} did not come back within {limit:g} s"
            self._dump_or_end(failure.code if failure else ExitCode.PEER_FAILED, reason, failure)
        elif self._now > self._deadlines.shrink:
            self._shrink_to_survivors()
        elif self._now > self._deadlines.joining_workers and resize_plan.can_roll_back(self.cluster):
            self._rollback_growth(f"not all came within {resize_plan.JOIN_TIMEOUT_S:g} s")
        elif self.cluster.coming and self._now > self._deadlines.joining_servers:
            self._rollback_server_growth(f"not all came within {resize_plan.JOIN_TIMEOUT_S:g} s")
        elif self._now - self._heal_barrier.failed_at > DEATH_REPORT_S:
            self._retry_collective()
        elif settings.checks_heartbeats:
            self._check_heartbeats(settings.node_timeout_s)
        if self._dump is None and not self.cluster.has_ended:
            self._check_blocked_collectives(settings.stuck_s)
        if self.cluster.phase is Phase.READY and self.cluster.trains and not self._release_next_leavers():
            self._fill_spares()

    def _absent_members(self) -> list[Member]:
        """Who is not here; a replacement is when it has called."""
        away, members = (NodeState.DEAD, NodeState.SUSPECT), self.cluster.members_without_spares()
        return [m for m in members if m.state in away or (self._replacement_running and m.is_present and not m.connection)]

    def _check_blocked_collectives(self, limit: float) -> None:
        """Whoever waits for one that will never come waits for ever. One that may come, and for which all others have waited
        in one collective for too long, is stuck, though it beats."""
        self._count_left_ranks()
        workers, since = self.cluster.members_in_role(Role.WORKER), self._now - limit if limit >= 0 else -NEVER
        waiting = [m for m in workers if m.progress.waiting_in and m.progress_changed_at < since and m.is_present]
        where = f"in collective {waiting[0].progress.waiting_in} for over {limit:g} s" if waiting else ""
        waits = self._find_wait_on_finished_rank() or self._find_wait_on_left_rank(len(waiting), where)
        if reason := waits or self._find_wait_to_resume(limit):
            return self._dump_or_end(ExitCode.PEER_FAILED, reason)
        late = [m for m in workers if not m.progress.waiting_in and m.is_present and m.connection] if waiting else []
        if len(waiting) + len(late) == sum(m.is_present for m in workers):
            for member in late:
                if member.progress_changed_at < since:  # asked one by one: after one's loss another may have begun anew
                    self._increment_counter("stuck")
                    self._declare_dead(member, f"stuck: all others wait for it {where}", since=member.progress_changed_at)
        return None

    def _find_wait_on_finished_rank(self) -> str:
        """A rank at the end of its program has said what it took part in last, so this needs no time to be seen."""
        reports = self._heal_barrier.reports
        if self.cluster.phase is not Phase.READY or not any(report.finished for report in reports.values()):
            return ""
        said = {
            m.rank: CollectiveNumber.parse(m.progress.waiting_in)
            for m in self.cluster.members_in_role(Role.WORKER)
            if m.is_present and m.connection
        }
        return heal_plan.find_endless_wait(reports, {rank: number for rank, number in said.items() if number is not None})

    def _find_wait_on_left_rank(self, waiting: int, where: str) -> str:
        """A rank that has left reports nothing more: all others have reported, or wait in a collective, in vain."""
        workers, gathering = self.cluster.members_in_role(Role.WORKER), self._heal_barrier
        left = [m for m in workers if m.state is NodeState.LEFT]
        unheard = [m for m in left if m.rank not in gathering.reports]
        if gathering.reports and unheard and len(gathering.reports) + len(unheard) == len(workers) and not gathering.done:
            return f"{describe_members(unheard)} left before the work was done: all others wait to go on"
        if left and waiting and len(left) + waiting == len(workers):
            return f"{describe_members(left)} left before the work was done: all others wait {where}"
        return ""

    def _find_wait_to_resume(self, limit: float) -> str:
        """Nor does it say that it goes on. All others have so long to go on by themselves, and so to show that it did."""
        workers, gathering = self.cluster.members_in_role(Role.WORKER), self._heal_barrier
        left = [m for m in workers if m.state is NodeState.LEFT and m.rank not in gathering.resumed]
        if not left or not self._replacement_running or gathering.done or len(gathering.reports) < len(workers):
            self._deadlines.resume = NEVER
        elif limit >= 0:
            self._deadlines.resume = min(self._deadlines.resume, self._now + limit)
            if self._now > self._deadlines.resume:
                return f"{describe_members(left)} left before the work was done: all others wait to go on for over {limit:g} s"
        return ""

    def _count_left_ranks(self) -> None:
        """Where all others are at their end, or go on, who has left was or did so too: nobody waits for it."""
        workers, gathering = self.cluster.members_in_role(Role.WORKER), self._heal_barrier
        left = {m.rank for m in workers if m.state is NodeState.LEFT}
        if not left or not gathering.reports or gathering.done:
            return
        others = {m.rank for m in workers} - left
        if not left <= gathering.reports.keys():
            if others <= gathering.reports.keys() and all(report.finished for report in gathering.reports.values()):
                gathering.done = True
                for member in [m for m in workers if m.rank in gathering.reports]:
                    self._send(member.connection, HealPlan(gathering.generation, done=True))
        elif self._replacement_running and others <= gathering.resumed and not left <= gathering.resumed:
            gathering.resumed |= left
            self._on_rank_resumed()

    def _on_rank_resumed(self) -> None:
        """A rank goes on after a change; if it was the last one, the change is over."""
        if self._all_resumed():
            self._collective_retries = 0
            if (restart := self.cluster.full_restart) is not None and not restart.resumed:
                self.cluster.full_restart = msgspec.structs.replace(restart, resumed=True)
                self._persist(self.cluster.record())
            for member in self.cluster.members_in_role(Role.WORKER):
                if member.error is not None and member.error.step < 0:  # a script without steps shows progress by collectives
                    member.error = None
            self.cluster.arriving = ()
            if not self._release_next_leavers():
                self._close_incidents_if_resumed()
        self._update_readiness("every rank goes on")

    def _retry_collective(self) -> None:
        """A collective broke, and no death explains it: everyone lives, so the step is tried again in a new generation."""
        reason = f"a collective broke ({self._heal_barrier.failure_reason}) and every process lives"
        if recovery_strategy.RecoveryStrategy.RETRY not in self.cluster.settings.strategies:
            return self._dump_or_end(ExitCode.PEER_FAILED, f"{reason}, but retry is not among the strategies")
        self._collective_retries += 1
        if self._collective_retries > COLLECTIVE_RETRIES_MAX:
            return self._dump_or_end(
                ExitCode.PEER_FAILED, f"{reason}, {COLLECTIVE_RETRIES_MAX} times in a row without a step in between"
            )
        self._increment_counter("retries")
        self._publish("cluster", "retry", f"{reason}: the step is tried again", Level.WARNING)
        broke_at = self._heal_barrier.failed_at
        self._open_incident("retry", "every process lives", self._heal_barrier.failure_reason, since=broke_at, known=broke_at)
        return self._start_generation(reason)

    def _discount_suspension(self) -> None:
        """While this process was stopped it heard nobody: that time counts for nothing."""
        slept, self._last_tick_at = self._now - self._last_tick_at, self._now
        if slept > SUSPENSION_S:
            self._publish("scheduler", "slept", f"no tick for {slept:.1f} s: nobody's silence in that time counts")
            self._forming_since += slept
            self._deadlines.postpone(slept)
            if self._heal_barrier.failed_at < NEVER:
                self._heal_barrier.failed_at = min(self._heal_barrier.failed_at + slept, self._now)
            if self._dump is not None:
                self._dump.deadline = min(self._dump.deadline + slept, self._now + self.cluster.settings.dump_s)
            speakers: list[Member | AgentInfo] = [*self.cluster.members.values(), *self.cluster.agents.values()]
            for speaker in speakers:
                speaker.last_heartbeat_at = min(speaker.last_heartbeat_at + slept, self._now)
            for member in self.cluster.members.values():
                member.progress_changed_at = min(member.progress_changed_at + slept, max(member.progress_changed_at, self._now))

    def _check_heartbeats(self, limit: float) -> None:
        """silent → suspect after half the limit → dead after all of it; an agent takes its children along."""
        for agent in list(self.cluster.agents.values()):
            silent = self._now - agent.last_heartbeat_at
            if silent > limit:
                self._disconnect_agent(agent)
                self._on_agent_lost(
                    agent, ExitCode.PEER_FAILED, _describe_silence(silent, limit), since=agent.last_heartbeat_at
                )
        since = self._now - limit / 2
        for member in [member for member in self.cluster.members.values() if member.last_heartbeat_at < since]:
            if self.cluster.has_ended:
                return
            silent = self._now - member.last_heartbeat_at
            if not member.is_present or self._is_judged_with_agent(member):
                continue
            if silent > limit:
                self._increment_counter("silent_deaths")
                self._declare_dead(member, _describe_silence(silent, limit), since=member.last_heartbeat_at)
            elif member.state is NodeState.ALIVE:
                member.state = NodeState.SUSPECT
                self._publish(member.name, "suspect", f"no beat for {silent:.1f} s", Level.WARNING)

    def _is_judged_with_agent(self, member: Member) -> bool:
        """A child that never attached has no beats of its own, and one whose agent is out of reach is judged with it."""
        return bool(member.agent) and (not member.life or not self.cluster.agents[member.agent].connection)


def _describe_silence(silent_s: float, limit_s: float) -> str:
    return f"no beat for {silent_s:.1f} s (MS_NODE_TIMEOUT is {limit_s:g} s)"
