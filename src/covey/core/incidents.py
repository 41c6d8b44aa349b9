"""The waterfall of each recovery: what happened, which rung was taken and why, and how long each stage took.

An incident is open from the moment a fault is known until every rank has gone on, or the run has ended. A fault during a
recovery opens a further one; all that are open pass the later stages together, because the ranks go on together.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

SERVERS = "servers"  # the node of an incident that is about all parameter servers, and goes its own way
KEPT_MAX = 1000  # incidents; the journal keeps as many


class Stage(StrEnum):
    """The stages, in their order. Each lasts from the one before it."""

    DETECTED = "detected"  # from the last sign of life, where the fault was a silence
    DECIDED = "decided"
    REFORMED = "re-formed"  # every rank, the new one included, is at a safe point and has been told how to go on
    RESTORED = "restored"  # whoever lacked state has it
    RESUMED = "resumed"  # every rank has completed a collective together with the others


class Outcome(StrEnum):
    OPEN = "open"
    RESUMED = "resumed"
    RESTARTED = "restarted"  # everyone from the beginning
    FINISHED = "finished"  # with the run, which finished well: a program without collectives says nothing in between
    ROLLED_BACK = "rolled back"  # a growth, when not everyone came
    ENDED = "ended"  # with the run


class Incident(msgspec.Struct, frozen=True, tag="incident"):
    """One fault and what became of it, as the journal keeps it."""

    number: int  # from 1
    at: float  # wall clock, when it was known
    node: str
    rank: int
    cause: str
    strategy: str
    reason: str
    outcome: Outcome = Outcome.OPEN
    ms: dict[Stage, float] = {}  # how long each stage took
    total_ms: float = 0.0

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {self.ms[stage]:.0f} ms" for stage in Stage if stage in self.ms)
        return f"{self.strategy} of {self.node} ({self.cause}): {stages}; {self.total_ms:.0f} ms in all, {self.outcome}"


class Total(msgspec.Struct):
    """All incidents that one strategy has answered so far."""

    strategy: str
    outcome: Outcome
    count: int = 0
    seconds: dict[Stage, float] = {}


class Clock(msgspec.Struct):
    """An open incident's times, on the machine's clock."""

    since: float  # when the fault began to show
    marks: dict[Stage, float]

    def ms(self) -> dict[Stage, float]:
        """How long each stage that was passed took."""
        times, reached = {}, self.since
        for stage in Stage:
            if stage in self.marks:
                times[stage] = round(max(0.0, self.marks[stage] - reached) * 1000, 3)
                reached = max(reached, self.marks[stage])
        return times


class Incidents:
    """All incidents of a cluster. `wall_zero` is the wall clock when the machine's clock showed 0."""

    def __init__(self, wall_zero: float) -> None:
        self.kept: list[Incident] = []
        self.totals: dict[tuple[str, Outcome], Total] = {}
        self._wall_zero = wall_zero
        self._clocks: dict[int, Clock] = {}  # of the open ones, by number

    def take_over(self, kept: list[Incident]) -> None:
        """What an earlier scheduler knew. A recovery that was under way goes on."""
        self.kept = sorted(kept, key=lambda incident: incident.number)
        for incident in self.kept:
            if incident.outcome is Outcome.OPEN:
                known = incident.at - self._wall_zero
                since = known - incident.ms.get(Stage.DETECTED, 0.0) / 1000
                self._clocks[incident.number] = Clock(since, {Stage.DETECTED: known, Stage.DECIDED: known})
            else:
                self._add_up(incident)

    def open(
        self, now: float, *, since: float, known: float, node: str, rank: int, cause: str, strategy: str, reason: str
    ) -> Incident:
        """A fault that began to show at `since`, was known at `known`, and the answer to it, decided now."""
        number = self.kept[-1].number + 1 if self.kept else 1
        clock = self._clocks[number] = Clock(since, {Stage.DETECTED: known, Stage.DECIDED: now})
        incident = Incident(number, self._wall_zero + known, node, rank, cause, strategy, reason, ms=clock.ms())
        self.kept = [*self.kept, incident][-KEPT_MAX:]
        return incident

    def mark(self, stage: Stage, now: float) -> None:
        """The open ones have come this far. A stage that is passed again, after a further fault, counts from then."""
        for clock in self._clocks.values():
            clock.marks[stage] = now

    @property
    def resizing(self) -> bool:
        """Whether the number of workers is being changed on request, or because one came."""
        changes = ("scale-out", "scale-in")
        return any(i.outcome is Outcome.OPEN and i.strategy in changes and i.node != SERVERS for i in self.kept)

    def close(self, outcome: Outcome, now: float, node: str = "", but: str = "", reason: str = "") -> list[Incident]:
        """The open ones `but` for one strategy's are over; returns them. Until the run ends, servers' moves are apart. Only a
        growth is rolled back, for this `reason`, and deaths meanwhile are still healed."""
        over = [incident for incident in self.kept if incident.number in self._clocks]
        if outcome not in (Outcome.ENDED, Outcome.FINISHED):
            over = [i for i in over if (i.node == SERVERS) == (node == SERVERS) and i.strategy != but]
        if outcome is Outcome.ROLLED_BACK:
            over = [msgspec.structs.replace(i, reason=f"{i.reason}; {reason}") for i in over if i.strategy == "scale-out"]
        if outcome is Outcome.RESUMED:
            for incident in over:
                self._clocks[incident.number].marks[Stage.RESUMED] = now
        closed = {incident.number: self._closed(incident, outcome, now) for incident in over}
        self.kept = [closed.get(incident.number, incident) for incident in self.kept]
        for number in closed:
            del self._clocks[number]
        return list(closed.values())

    def _closed(self, incident: Incident, outcome: Outcome, now: float) -> Incident:
        clock = self._clocks[incident.number]
        ms = clock.ms()
        total_ms = round((now - clock.since) * 1000, 3) if outcome is Outcome.ROLLED_BACK else sum(ms.values())
        closed = msgspec.structs.replace(incident, outcome=outcome, ms=ms, total_ms=total_ms)
        self._add_up(closed)
        return closed

    def _add_up(self, incident: Incident) -> None:
        key = (incident.strategy, incident.outcome)
        total = self.totals.setdefault(key, Total(*key))
        total.count += 1
        for stage, ms in incident.ms.items():
            total.seconds[stage] = total.seconds.get(stage, 0.0) + ms / 1000
