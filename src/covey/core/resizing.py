"""The world changes its size: on request, or because a member died whom nobody can replace.

Who may go, who comes and who fills which hole is decided in `scaling`; here it is carried out. Every change is one new
generation in which everyone is told its place, and a growth that does not come about is taken back as a whole.
"""

from __future__ import annotations

from covey.core import scaling
from covey.core.effects import Level
from covey.core.incidents import Outcome
from covey.core.ledger import Ledger
from covey.core.messages import Stop
from covey.core.model import Member, Phase, Role


class Resizable(Ledger):
    """A cluster whose world can grow and shrink."""

    def _shrink(self, member: Member, what: str, reason: str) -> None:
        """The others go on without one, in the step they are in."""
        self._count("shrinks")
        self._resize(reason, what, self._without([member]))
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
