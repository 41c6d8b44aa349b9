"""Warm spares: processes that have run the program up to where it needs a rank, and take the place of a worker that died.

A spare is a member of a role of its own, outside the world: its rank only numbers it among the spares. Places for spares are
made once a loop has finished a step, for only then is it known that the program can be healed, and the first start is not
slowed. `recovery.stand_in` chooses who is promoted: the process keeps its link and its life, the worker's place gets its next
incarnation and remembers which process that is, so that the agent will not start another. The spare's own place is free then.

Free places are filled in quiet times only. A spare's own death is no fault of the run: it is started again, as often as a
worker would be, unless its lives end before they stand by.
"""

from __future__ import annotations

from covey.core.cluster import recovery_strategy
from covey.core.cluster.resharding import Sharable
from covey.core.effects import Level
from covey.core.types import AgentInfo, Member, MemberRecord, NodeState, Progress, Role


class Spared(Sharable):
    """A cluster that may have spares."""

    def _fill_spares(self) -> None:
        """Every agent that is here has as many spares as it brought."""
        for agent in self.cluster.agents.values():
            if agent.spares and agent.connection and not agent.is_leaving:
                self._fill_agent_spares(agent)

    def _fill_agent_spares(self, agent: AgentInfo) -> None:
        spares = [m for m in self.cluster.children(agent.id) if m.role is Role.SPARE]
        free = [m for m in spares if not m.is_present and recovery_strategy.can_refill_spare(self.cluster, m)]
        for spare in free:
            self._prepare_next_incarnation(spare)
        for _ in range(agent.spares - len(spares)):
            number = self.cluster.size(Role.SPARE)
            spare = Member(Role.SPARE, str(number), "", agent.host, agent=agent.id, rank=number, seat=number)
            spare.joined_at = spare.last_heartbeat_at = self._now
            spare.state = NodeState.ALIVE
            self.cluster.add(spare)
            free.append(spare)
        if free:
            self._layout = None
            for spare in free:
                self._persist(MemberRecord.from_member(spare))
            self._send_desired_children({agent.id})

    def _promote_spare(self, spare: Member, member: Member) -> int:
        """A spare's process becomes this life of a worker's place. Returns the link, which speaks for the place once the
        change is durable."""
        self._publish(spare.name, "promoted", f"it is {member.name} now")
        self._increment_counter("promotions")
        member.process = f"{spare.name}.{spare.incarnation}"
        member.life, member.pid, link = spare.life, spare.pid, spare.connection
        spare.handovers += 1  # what follows it is no replacement of somebody that failed
        self._vacate_spare(spare)
        return link

    def _on_spare_exit(self, spare: Member, code: int, reason: str) -> None:
        """A spare left or died: nothing follows but that its place is free."""
        spare.deaths_without_progress = 0 if spare.progress.is_spare_ready else spare.deaths_without_progress + 1
        if code == 0:  # it would again
            spare.deaths_without_progress = recovery_strategy.DEATHS_WITHOUT_PROGRESS_MAX
        self._publish(spare.name, "died" if code else "left", reason or f"code {code}", Level.from_exit_code(code))
        if spare.deaths_without_progress >= recovery_strategy.DEATHS_WITHOUT_PROGRESS_MAX:
            why = (
                "its program ended before it needed a rank"
                if code == 0
                else f"it died {spare.deaths_without_progress} times on its way"
            )
            self._publish(spare.name, "given up", f"{why}, see its log", Level.WARNING)
        self._vacate_spare(spare)
        self._persist(MemberRecord.from_member(spare))

    def _vacate_spare(self, spare: Member) -> None:
        self._by_connection.pop(spare.connection, None)
        spare.life, spare.connection, spare.pid, spare.progress = "", 0, 0, Progress()
        spare.state = NodeState.LEFT
        self._layout = None
