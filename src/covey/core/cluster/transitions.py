"""What the scheduler's machine remembers of its cluster, and the small moves by which that changes.

A cluster lives through phases: FORMING until every role has its number, then READY; a death moves it to HEALING (when the
place may be filled again), to a new generation of everyone (torchrun's restarts) or to ENDED. A restarted scheduler is
RETURNING until its members have re-attached or are overdue. The table `PHASES` lists the moves that exist; any other is a bug.

The machine is one object, cut into rooms that each know only those before them: the `Ledger` here, `resizing` (the world
changes its size), `sharing` (parameter servers come and go), `spares` (who waits to stand in), `lifecycle` (forming, dying,
healing, coming back, ending), `watch` (what follows from time alone), `joining` (who comes, and as whom), `asking` (what
visitors want) and `machine` (what members say, and the door to it all).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from covey.core.cluster import formation
from covey.core.cluster.heal_plan import Dump, Gathering
from covey.core.cluster.rendezvous import Board
from covey.core.cluster.state import Cluster
from covey.core.effects import Close, End, Level, Persist, Publish, SchedulerEffect, Send
from covey.core.incidents import Incidents, Outcome
from covey.core.messages import Agreed, Refused, Regrouped, Scaling, Stop
from covey.core.types import (
    Agent,
    ClusterSettings,
    Ended,
    Failure,
    FullRestart,
    Member,
    MemberRecord,
    NodeState,
    Phase,
    Progress,
    Record,
    Role,
)

CAUSE_MAX = 1000  # characters of a full restart's reason
PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.READY, Phase.ENDED, Phase.RETURNING}),
    Phase.READY: frozenset({Phase.HEALING, Phase.ENDED}),
    Phase.HEALING: frozenset({Phase.READY, Phase.ENDED}),
    Phase.RETURNING: frozenset({Phase.READY, Phase.HEALING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
NEVER = float("inf")
TELL_S = 30.0  # how long members out of reach may take to come and hear of the end, where their silence has no limit
FIRST_S = 30.0  # until its first sign of progress a life imports, builds and restores: it is not called stuck before this


class Deadlines(msgspec.Struct):
    """By when something is to have happened; what nobody waits for has none."""

    form: float = NEVER  # a last call for more workers than are needed
    heal: float = NEVER  # every place is filled, and heard
    shrink: float = NEVER  # a host came for who is lost
    workers: float = NEVER  # those of a growth have come
    servers: float = NEVER  # those of a growth have come
    resume: float = NEVER  # all others go on, though somebody left before it said so

    def postpone(self, by_s: float) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + by_s)


class Ledger:
    """The cluster, the links that speak for its members, and what is wished for in this step."""

    def __init__(self, settings: ClusterSettings, *, cluster_id: str, job: str, now: float, wall: float) -> None:
        self.cluster = Cluster(cluster_id=cluster_id, settings=settings, job=job)
        self.counters: dict[str, float] = {}
        self.incidents = Incidents(wall - now)
        self.answered: Scaling | Agreed | Refused = Refused("nothing was asked for")  # to a visitor's last wish
        self.first_failure: Failure | None = None
        self._started = self._ticked = self._now = now
        self._deadlines = Deadlines()
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
        self._settled: set[int] = set()  # parameter servers where all is in its place, by the sharing of now
        self._layout: formation.Layout | None = None
        self._awaited: Member | None = None  # a worker that has not left
        self._suspect: Member | None = None  # a place that was not heard when it was last asked
        self._stop: Stop | None = None
        self._untold: set[str] | None = None  # lives that have not heard of the end, for as long as they are waited for
        self._tell_by = NEVER
        self._out: list[SchedulerEffect] = []

    # -- places ------------------------------------------------------------------------------------------------------

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

    def _tell_agents(self, agents: set[str]) -> None:
        for name in sorted(agents & self.cluster.agents.keys()):
            agent = self.cluster.agents[name]
            if agent.link:
                self._send(agent.link, self._places().start(agent))

    # -- lives and generations ---------------------------------------------------------------------------------------

    def _begin_life(self, member: Member) -> None:
        """Nothing of the life before it counts for its progress, and it has time until it must show some."""
        member.progress = Progress()
        member.changed_at = self._now + max(0.0, FIRST_S - self.cluster.settings.stuck_s)

    def _next_life(self, member: Member) -> None:
        """A child's place, ready for the next process. The old one is ended by its agent, and need not learn it from us."""
        self._speakers.pop(member.link, None)
        member.incarnation += 1
        member.restarts += 1
        member.lives += 1
        member.life, member.link, member.pid, member.leaving, member.process = "", 0, 0, "", ""
        self._begin_life(member)
        here = self.cluster.agents[member.agent].link
        member.state = NodeState.ALIVE if here else NodeState.SUSPECT  # until its agent is back

    def _speak(self, link: int, speaker: Member | Agent) -> None:
        speaker.link = link
        speaker.beat_at = self._now
        self._speakers[link] = speaker

    def _silence(self, link: int) -> None:
        """What this link says no longer counts, and it is closed."""
        if link:
            self._speakers.pop(link, None)
            self._out.append(Close(link))

    def _hang_up(self, agent: Agent) -> None:
        self._silence(agent.link)
        agent.link = 0

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

    def _heal(self, reason: str) -> None:
        """Places are empty, or ranks have yet to agree: that may take so long, from now."""
        self._await_healing()
        if self.cluster.phase is not Phase.HEALING:
            self._move(Phase.HEALING, reason)

    def _await_healing(self) -> None:
        limit = self.cluster.settings.topo_timeout_s
        self._deadlines.heal = self._now + limit if limit >= 0 else NEVER

    def _all_resumed(self) -> bool:
        return len(self._gathering.resumed) == self.cluster.size(Role.WORKER)

    # -- incidents and the end ---------------------------------------------------------------------------------------

    def _open_incident(
        self,
        strategy: str,
        reason: str,
        cause: str,
        *,
        since: float,
        known: float,
        member: Member | None = None,
        node: str = "cluster",
    ) -> None:
        node, rank = (member.name, member.rank) if member is not None else (node, -1)
        incident = self.incidents.open(
            self._now, since=since, known=known, node=node, rank=rank, cause=cause, strategy=strategy, reason=reason
        )
        self._persist(incident)

    def _close_incidents(self, outcome: Outcome, node: str = "", reason: str = "") -> None:
        unfinished = "scale-in" if self.cluster.going and outcome in (Outcome.RESUMED, Outcome.RESTARTED) else ""
        for incident in self.incidents.close(outcome, self._now, node, but=unfinished, reason=reason):
            self._persist(incident)
            self._publish("cluster", "recovery", str(incident))

    def _close_if_resumed(self) -> None:
        """Close the incidents as resumed, unless a rank that an exception ended has not made progress since: its script may
        raise it again."""
        if all(member.error is None for member in self.cluster.of(Role.WORKER)):
            self._close_incidents(Outcome.RESUMED)

    def _note_full_restart(self, cause: str) -> None:
        """Count a start of all ranks from a checkpoint or from step 0. The caller persists the cluster."""
        before = self.cluster.full_restart
        self.cluster.full_restart = FullRestart(before.count + 1 if before else 1, cause[:CAUSE_MAX])

    @property
    def _restarting(self) -> bool:
        """Whether not all ranks have resumed since the newest full restart."""
        return self.cluster.full_restart is not None and not self.cluster.full_restart.resumed

    def _end(self, code: int, reason: str, failure: Failure | None = None) -> None:
        if self.cluster.full_restart is not None:
            reason = f"{reason}; {self.cluster.full_restart}"
        self._close_incidents(Outcome.ENDED if code else Outcome.FINISHED)
        self._stop = Stop(reason, code, failure)
        self.cluster.arriving = ()
        self._move(Phase.ENDED, reason)
        self.cluster.ended = Ended(code, reason, failure)
        self._persist(self.cluster.record())
        self._publish("cluster", "ended", reason, Level.of(code))
        children_first = sorted(self._speakers, key=lambda link: isinstance(self._speakers[link], Agent))
        for link in children_first:  # so that they hear why before their agent ends them
            self._send(link, self._stop)
        self._await_the_untold({life for life, at_work in self._out_of_reach() if at_work})

    @property
    def _tell_s(self) -> float:
        limit = self.cluster.settings.node_timeout_s
        return limit if limit >= 0 else TELL_S

    def _out_of_reach(self) -> Iterator[tuple[str, bool]]:
        """The lives of those who were lost a short while ago, each with whether it is at work."""
        since = self._now - self._tell_s
        for member in self.cluster.members.values():
            if member.present and not member.agent and not member.link and member.beat_at > since:
                yield member.life, True
        for agent in self.cluster.agents.values():
            children = self.cluster.children(agent.id)
            known = any(child.state is not NodeState.DEAD for child in children)
            if known and not agent.link and agent.beat_at > since:
                yield agent.life, any(child.present for child in children)

    def _await_the_untold(self, untold: set[str]) -> None:
        """Members out of reach call again soon: they hear it then, and until then there is somebody to call."""
        self._untold, self._tell_by = untold, self._now + self._tell_s
        self._told("")

    def _told(self, life: str) -> None:
        """Somebody has heard of the end; nobody is left: that is all."""
        if self._untold is not None:
            self._untold.discard(life)
            if not self._untold:
                self._tell_no_more()

    def _tell_no_more(self) -> None:
        ended = self.cluster.ended
        if self._untold is not None and ended is not None:
            self._untold = None
            self._out.append(End(ended.code, ended.reason, ended.failure))

    def _move(self, phase: Phase, reason: str) -> None:
        assert phase in PHASES[self.cluster.phase], f"no move from {self.cluster.phase} to {phase}"
        self.cluster.phase, self.cluster.reason = phase, reason

    # -- wishes ------------------------------------------------------------------------------------------------------

    def _send(self, link: int, message: Any) -> None:
        self._out.append(Send(message, link))

    def _persist(self, record: Record) -> None:
        self._out.append(Persist(record))

    def _publish(self, node: str, what: str, reason: str, level: Level = Level.NOTE) -> None:
        self._out.append(Publish(node, what, reason, level))

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1
