"""Detection of silent agents, silent members and stuck ranks.

A member is suspect after half the node timeout without a heartbeat, and dead after the full node timeout. An agent that is
silent for the full node timeout is lost with its children. A rank that makes no progress for `stuck_s`, while the others wait
in a collective, is stuck and declared dead. Time in which the scheduler was suspended is not counted.
"""

from __future__ import annotations

from covey.core.cluster.heal_barrier import HealBarrier
from covey.core.cluster.recovery import Recovery
from covey.core.cluster.shutdown import Shutdown
from covey.core.cluster.state import NEVER, BaseParts, Step
from covey.core.effects import Level
from covey.core.types import Member, NodeState, Role
from covey.errors import ExitCode

SUSPENSION_S = 1.0  # ticks come several times a second; a longer gap between two means that this process was suspended


class FailureDetector:
    """Checks of heartbeats and progress, made on ticks."""

    def __init__(self, base: BaseParts, barrier: HealBarrier, shutdown: Shutdown, recovery: Recovery, now: float) -> None:
        self._settings, self._lifecycle = base.settings, base.lifecycle
        self._heartbeats, self._members = base.heartbeats, base.members
        self._barrier, self._shutdown, self._recovery = barrier, shutdown, recovery
        self._last_tick_at = now

    def take_suspension_s(self, step: Step) -> float:
        """If the last tick was over `SUSPENSION_S` ago, publish a suspension and return the seconds since; else return 0."""
        gap, self._last_tick_at = step.now - self._last_tick_at, step.now
        if gap <= SUSPENSION_S:
            return 0.0
        step.out.publish("scheduler", "slept", f"suspended for {gap:.1f} s: all timeouts are extended by that time")
        return gap

    def check_heartbeats(self, step: Step) -> None:
        """If heartbeats are checked, declare silent agents dead with their children, and silent members suspect, then dead."""
        if not self._settings.checks_heartbeats:
            return
        limit = self._settings.node_timeout_s
        for agent in list(self._members.agents.values()):
            heard_at = self._heartbeats.last_heartbeat_at(agent)
            if step.now - heard_at > limit:
                self._recovery.declare_agent_dead(step, agent, _describe_silence(step.now - heard_at, limit), heard_at)
        suspect_since = step.now - limit / 2
        members = self._members.members.values()
        for known in [m for m in members if self._heartbeats.last_heartbeat_at(m) < suspect_since]:
            if self._lifecycle.has_ended:
                return
            if not self._members.contains(known):  # removed, because the death of another member rolled a scale-out back
                continue
            member, heard_at = self._members.current(known), self._heartbeats.last_heartbeat_at(known)
            if not member.is_present or self._is_judged_with_agent(member):
                continue
            if step.now - heard_at > limit:
                step.out.count("silent_deaths")
                self._recovery.declare_dead(step, member, _describe_silence(step.now - heard_at, limit), heard_at)
            elif member.state is NodeState.ALIVE:
                self._members.set_state(member, NodeState.SUSPECT)
                step.out.publish(member.name, "suspect", f"no heartbeat for {step.now - heard_at:.1f} s", Level.WARNING)

    def _is_judged_with_agent(self, member: Member) -> bool:
        """Return whether no heartbeats of a child are expected: it has not registered, or its agent is disconnected."""
        return bool(member.agent) and (not member.instance_id or not self._members.agents[member.agent].connection)

    def check_blocked_collectives(self, step: Step) -> None:
        """Dump or end the run if ranks wait for a rank that has finished or left; otherwise declare stuck ranks dead."""
        if self._barrier.count_left_ranks(step):
            self._recovery.on_rank_resumed(step)
        limit, workers = self._settings.stuck_s, self._members.members_in_role(Role.WORKER)
        since = step.now - limit if limit >= 0 else -NEVER
        progress, changed_at = self._heartbeats.progress, self._heartbeats.progress_changed_at
        waiting = [m for m in workers if progress(m).waiting_in and changed_at(m) < since and m.is_present]
        where = f"in collective {progress(waiting[0]).waiting_in} for over {limit:g} s" if waiting else ""
        if reason := self._barrier.find_endless_wait(step, len(waiting), where, limit):
            return self._shutdown.dump_or_end(step, ExitCode.PEER_FAILED, reason)
        late = [m for m in workers if not progress(m).waiting_in and m.is_present and m.connection] if waiting else []
        # ranks are stuck only if each present rank has waited in a collective for over the limit, or computes and is connected
        if len(waiting) + len(late) == sum(m.is_present for m in workers):
            for member in late:
                stuck_since = changed_at(member)  # not read earlier: the death of one may restart or remove another
                if self._members.contains(member) and stuck_since < since:
                    step.out.count("stuck")
                    self._recovery.declare_dead(step, member, f"stuck: all other ranks wait for it {where}", since=stuck_since)
        return None


def _describe_silence(silent_s: float, limit_s: float) -> str:
    return f"no heartbeat for {silent_s:.1f} s (MS_NODE_TIMEOUT is {limit_s:g} s)"
