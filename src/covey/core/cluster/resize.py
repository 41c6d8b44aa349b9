"""The world changes its size: on request, or because a member died whom nobody can replace.

Who may go, who comes and who fills which hole is decided in `scaling`; here it is carried out. Every change is one new
generation in which everyone is told its place, and a growth that does not come about is taken back as a whole.
"""

from __future__ import annotations

from covey.core.cluster import resize_plan
from covey.core.cluster.admission import names
from covey.core.cluster.transitions import Ledger
from covey.core.effects import Level
from covey.core.incidents import Outcome
from covey.core.messages import Stop
from covey.core.types import AgentRecord, Member, Role


class Resizable(Ledger):
    """A cluster whose world can grow and shrink."""

    def _shrink(self, member: Member, what: str, reason: str) -> None:
        """The others go on without one, in the step they are in."""
        self._count("shrinks")
        self._resize(reason, what, self._without([member]))
        self._withdraw([member])
        self._tell_agents({member.agent})  # to end what may be left of it

    def _withdraw(self, gone: list[Member]) -> None:
        """Who was given up is not to come again by itself: its host offers no more than it has left."""
        for name in {m.agent for m in gone} & self.cluster.agents.keys():
            agent = self.cluster.agents[name]
            agent.slots = min(agent.slots, sum(m.role is Role.WORKER for m in self.cluster.children(name)))
            self._persist(AgentRecord.of(agent))

    def _without(self, leavers: list[Member]) -> list[Member]:
        """Take members out of the cluster; returns whose rank changed."""
        changed: dict[str, Member] = {}
        for member in leavers:
            plan, reason = resize_plan.shrink(self.cluster, member)
            assert plan is not None, reason
            self._speakers.pop(member.link, None)
            changed |= {m.name: m for m in resize_plan.carry_out(self.cluster, plan)}
        return [m for m in changed.values() if m not in leavers]

    def _scale(self, plan: resize_plan.Resizing, reason: str) -> int:
        """The world changes as asked, in the step it is in; returns the operation's number."""
        self.cluster.asked = self.cluster.size(Role.WORKER) + len(plan.agents) - len(plan.leavers)
        if plan.agents:
            self._grow_on(plan.agents, reason, "asked for")
        else:
            self._let_go(plan.leavers, reason)
        return self.incidents.kept[-1].number

    def _grow_on(self, agents: list[str], reason: str, cause: str) -> None:
        """The world grows by workers that these agents are to start."""
        newcomers = []
        for agent in agents:
            newcomers.append(resize_plan.child(self.cluster, agent, self._now))
            resize_plan.admit(self.cluster, newcomers[-1])
        self._grow(newcomers, reason, cause)
        self._tell_agents(set(agents))

    def _grow(self, newcomers: list[Member], reason: str, cause: str) -> None:
        """The world is larger by these, who have their places already. The others wait for them in their step."""
        self._count("scale_out")
        self._open_incident("scale-out", reason, cause, since=self._now, known=self._now)
        self.cluster.arriving = tuple(m.node_id for m in newcomers)
        self._deadlines.workers = self._now + resize_plan.ARRIVE_S
        for member in newcomers:
            self._begin_life(member)
        self._resize(reason, reason, newcomers)

    def _let_go(self, leavers: list[Member], reason: str) -> None:
        self._count("scale_in")
        self._open_incident("scale-in", reason, "asked for", since=self._now, known=self._now)
        self._go(leavers, reason)

    def _go(self, leavers: list[Member], reason: str) -> None:
        """Let as many leave as can at once, the highest first; the rest follows when the others have what these had."""
        together = [m.progress.together for m in self.cluster.of(Role.WORKER) if m.progress.together]
        leavers = sorted(leavers, key=lambda m: -m.rank)
        first, later = (leavers[: min(together)], leavers[min(together) :]) if together else (leavers, [])
        self.cluster.going = tuple(m.node_id for m in later)
        self._resize(reason, reason, self._without(first))
        for member in first:
            if member.link:
                self._send(member.link, Stop(f"{member.name} leaves: {reason}"))

    def _let_next_go(self) -> bool:
        """Let the next of those go who are to leave in turn; False if there is none, or the world may not change now. Then the
        operation waits too: after a return to the checkpoint for the first step, near the end for the end of the run."""
        leavers = resize_plan.remaining(self.cluster)
        if not leavers:
            self.cluster.going = ()
            return False
        if resize_plan.shrink(self.cluster, leavers[0])[0] is None:
            return False
        if self._all_resumed():
            self._go(leavers, f"{names(leavers)} leave too, as asked")
        else:
            self._ask_all(f"{names(leavers)} are to leave too, once all others are known to have what was theirs")
        return True

    def _ask_all(self, reason: str) -> None:
        """The scheduler was away, and has not heard who went on: in a new generation everyone says so again."""
        self._replacing = self._grouped = True
        self._heal(reason)
        self._regroup(reason)

    def _turn_back(self, reason: str) -> None:
        """A growth is taken back, all of it."""
        leavers = [m for m in self.cluster.of(Role.WORKER) if m.node_id in self.cluster.arriving]
        self.cluster.arriving = ()
        reason = f"{reason}; the growth is taken back"
        self._close_incidents(Outcome.ROLLED_BACK, reason=reason)
        self._open_incident("scale-in", reason, reason, since=self._now, known=self._now)
        self.cluster.asked = min(
            self.cluster.asked, max(self.cluster.settings.most, self.cluster.size(Role.WORKER) - len(leavers))
        )
        self._resize(reason, reason, self._without(leavers))
        self._withdraw(leavers)
        for member in leavers:
            self._silence(member.link)
        self._tell_agents({m.agent for m in leavers})

    def _resize(self, reason: str, what: str, changed: list[Member]) -> None:
        """A new generation in a world of another size: everyone is told its place in it."""
        self._replacing = True
        self._heal(reason)
        self.cluster.reason = reason  # also where another change was under way
        self._layout = None
        self.cluster.resized = self.cluster.generation + 1
        self._awaited = None
        self._next_generation(*changed)
        self._publish("cluster", "resized", f"{what}; the world is now {self.cluster.size(Role.WORKER)}", Level.WARNING)
        places = self._places()
        for member in self.cluster.members.values():
            if member.link and member.present:
                self._send(member.link, places.formed(member))
