"""The world changes its size: on request, or because a member died whom nobody can replace.

Who may go, who comes and who fills which hole is decided in `scaling`; here it is carried out. Every change is one new
generation in which everyone is told its place, and a growth that does not come about is taken back as a whole.
"""

from __future__ import annotations

from covey.core.cluster import resize_plan
from covey.core.cluster.admission import describe_members
from covey.core.cluster.transitions import Ledger
from covey.core.effects import Level
from covey.core.incidents import Outcome
from covey.core.messages import ClusterEnded
from covey.core.types import AgentRecord, Member, Role


class Resizable(Ledger):
    """A cluster whose world can grow and shrink."""

    def _give_up_member(self, member: Member, what: str, reason: str) -> None:
        """The others go on without one, in the step they are in."""
        self._increment_counter("shrinks")
        self._start_resized_generation(reason, what, self._remove_and_fill_ranks([member]))
        self._limit_slots([member])
        self._send_desired_children({member.agent})  # to end what may be left of it

    def _limit_slots(self, gone: list[Member]) -> None:
        """Who was given up is not to come again by itself: its host offers no more than it has left."""
        for name in {m.agent for m in gone} & self.cluster.agents.keys():
            agent = self.cluster.agents[name]
            agent.slots = min(agent.slots, sum(m.role is Role.WORKER for m in self.cluster.children(name)))
            self._persist(AgentRecord.from_agent(agent))

    def _remove_and_fill_ranks(self, leavers: list[Member]) -> list[Member]:
        """Take members out of the cluster; returns whose rank changed."""
        changed: dict[str, Member] = {}
        for member in leavers:
            plan, reason = resize_plan.plan_shrink(self.cluster, member)
            assert plan is not None, reason
            self._by_connection.pop(member.connection, None)
            changed |= {m.name: m for m in resize_plan.apply_shrink(self.cluster, plan)}
        return [m for m in changed.values() if m not in leavers]

    def _apply_resize(self, plan: resize_plan.ResizePlan, reason: str) -> int:
        """The world changes as asked, in the step it is in; returns the operation's number."""
        self.cluster.asked = self.cluster.size(Role.WORKER) + len(plan.agents) - len(plan.departing)
        if plan.agents:
            self._grow_on_agents(plan.agents, reason, "asked for")
        else:
            self._scale_in(plan.departing, reason)
        return self.incidents.records[-1].number

    def _grow_on_agents(self, agents: list[str], reason: str, cause: str) -> None:
        """The world grows by workers that these agents are to start."""
        newcomers = []
        for agent in agents:
            newcomers.append(resize_plan.new_agent_worker(self.cluster, agent, self._now))
            resize_plan.add_joining_worker(self.cluster, newcomers[-1])
        self._grow_by(newcomers, reason, cause)
        self._send_desired_children(set(agents))

    def _grow_by(self, newcomers: list[Member], reason: str, cause: str) -> None:
        """The world is larger by these, who have their places already. The others wait for them in their step."""
        self._increment_counter("scale_out")
        self._open_incident("scale-out", reason, cause, since=self._now, known=self._now)
        self.cluster.arriving = tuple(m.node_id for m in newcomers)
        self._deadlines.joining_workers = self._now + resize_plan.JOIN_TIMEOUT_S
        for member in newcomers:
            self._reset_progress(member)
        self._start_resized_generation(reason, reason, newcomers)

    def _scale_in(self, leavers: list[Member], reason: str) -> None:
        self._increment_counter("scale_in")
        self._open_incident("scale-in", reason, "asked for", since=self._now, known=self._now)
        self._remove_workers(leavers, reason)

    def _remove_workers(self, leavers: list[Member], reason: str) -> None:
        """Let as many leave as can at once, the highest first; the rest follows when the others have what these had."""
        together = [m.progress.departing_max for m in self.cluster.members_in_role(Role.WORKER) if m.progress.departing_max]
        leavers = sorted(leavers, key=lambda m: -m.rank)
        first, later = (leavers[: min(together)], leavers[min(together) :]) if together else (leavers, [])
        self.cluster.going = tuple(m.node_id for m in later)
        self._start_resized_generation(reason, reason, self._remove_and_fill_ranks(first))
        for member in first:
            if member.connection:
                self._send(member.connection, ClusterEnded(f"{member.name} leaves: {reason}"))

    def _release_next_leavers(self) -> bool:
        """Let the next of those go who are to leave in turn; False if there is none, or the world may not change now. Then the
        operation waits too: after a return to the checkpoint for the first step, near the end for the end of the run."""
        leavers = resize_plan.remaining_departing(self.cluster)
        if not leavers:
            self.cluster.going = ()
            return False
        if resize_plan.plan_shrink(self.cluster, leavers[0])[0] is None:
            return False
        if self._all_resumed():
            self._remove_workers(leavers, f"{describe_members(leavers)} leave too, as asked")
        else:
            self._request_reports(
                f"{describe_members(leavers)} are to leave too, once all others are known to have what was theirs"
            )
        return True

    def _request_reports(self, reason: str) -> None:
        """The scheduler was away, and has not heard who went on: in a new generation everyone says so again."""
        self._replacement_running = self._group_formed = True
        self._begin_healing(reason)
        self._start_generation(reason)

    def _rollback_growth(self, reason: str) -> None:
        """A growth is taken back, all of it."""
        leavers = [m for m in self.cluster.members_in_role(Role.WORKER) if m.node_id in self.cluster.arriving]
        self.cluster.arriving = ()
        reason = f"{reason}; the growth is taken back"
        self._close_incidents(Outcome.ROLLED_BACK, reason=reason)
        self._open_incident("scale-in", reason, reason, since=self._now, known=self._now)
        self.cluster.asked = min(
            self.cluster.asked, max(self.cluster.settings.default_target_workers, self.cluster.size(Role.WORKER) - len(leavers))
        )
        self._start_resized_generation(reason, reason, self._remove_and_fill_ranks(leavers))
        self._limit_slots(leavers)
        for member in leavers:
            self._drop_connection(member.connection)
        self._send_desired_children({m.agent for m in leavers})

    def _start_resized_generation(self, reason: str, what: str, changed: list[Member]) -> None:
        """A new generation in a world of another size: everyone is told its place in it."""
        self._replacement_running = True
        self._begin_healing(reason)
        self.cluster.reason = reason  # also where another change was under way
        self._layout = None
        self.cluster.resized = self.cluster.generation + 1
        self._unfinished_worker = None
        self._advance_generation(*changed)
        self._publish("cluster", "resized", f"{what}; the world is now {self.cluster.size(Role.WORKER)}", Level.WARNING)
        places = self._current_layout()
        for member in self.cluster.members.values():
            if member.connection and member.is_present:
                self._send(member.connection, places.make_rank_assigned(member))
