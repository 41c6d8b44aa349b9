"""The waterfall of each recovery: what happened, which rung was taken and why, and how long each stage took.

An incident is open from the moment a fault is known until every rank has gone on, or the run has ended. A fault during a
recovery opens a further one; all that are open pass the later stages together, because the ranks go on together.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

SERVERS_NODE = "servers"  # the node of an incident that is about all parameter servers, and goes its own way
INCIDENTS_MAX = 1000  # incidents; the journal keeps as many


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


class IncidentTimes(msgspec.Struct):
    """An open incident's times, on the machine's clock."""

    began_at: float  # when the fault began to show
    stage_times: dict[Stage, float]

    def stage_durations_ms(self) -> dict[Stage, float]:
        """How long each stage that was passed took."""
        times, reached = {}, self.began_at
        for stage in Stage:
            if stage in self.stage_times:
                times[stage] = round(max(0.0, self.stage_times[stage] - reached) * 1000, 3)
                reached = max(reached, self.stage_times[stage])
        return times


class Incidents:
    """All incidents of a cluster. `wall_zero` is the wall clock when the machine's clock showed 0."""

    def __init__(self, wall_zero: float) -> None:
        self.records: list[Incident] = []
        self.totals: dict[tuple[str, Outcome], Total] = {}
        self._wall_zero = wall_zero
        self._open_times: dict[int, IncidentTimes] = {}  # of the open ones, by number

    def restore(self, kept: list[Incident]) -> None:
        """What an earlier scheduler knew. A recovery that was under way goes on."""
        self.records = sorted(kept, key=lambda incident: incident.number)
        for incident in self.records:
            if incident.outcome is Outcome.OPEN:
                known = incident.at - self._wall_zero
                since = known - incident.ms.get(Stage.DETECTED, 0.0) / 1000
                self._open_times[incident.number] = IncidentTimes(since, {Stage.DETECTED: known, Stage.DECIDED: known})
            else:
                self._add_to_totals(incident)

    def open(
        self, now: float, *, since: float, known: float, node: str, rank: int, cause: str, strategy: str, reason: str
    ) -> Incident:
        """A fault that began to show at `since`, was known at `known`, and the answer to it, decided now."""
        number = self.records[-1].number + 1 if self.records else 1
        clock = self._open_times[number] = IncidentTimes(since, {Stage.DETECTED: known, Stage.DECIDED: now})
        incident = Incident(number, self._wall_zero + known, node, rank, cause, strategy, reason, ms=clock.stage_durations_ms())
        self.records = [*self.records, incident][-INCIDENTS_MAX:]
        return incident

    def mark_stage(self, stage: Stage, now: float) -> None:
        """The open ones have come this far. A stage that is passed again, after a further fault, counts from then."""
        for clock in self._open_times.values():
            clock.stage_times[stage] = now

    @property
    def is_resizing(self) -> bool:
        """Whether the number of workers is being changed on request, or because one came."""
        changes = ("scale-out", "scale-in")
        return any(i.outcome is Outcome.OPEN and i.strategy in changes and i.node != SERVERS_NODE for i in self.records)

    def close(self, outcome: Outcome, now: float, node: str = "", but: str = "", reason: str = "") -> list[Incident]:
        """The open ones `but` for one strategy's are over; returns them. Until the run ends, servers' moves are apart. Only a
        growth is rolled back, for this `reason`, and deaths meanwhile are still healed."""
        over = [incident for incident in self.records if incident.number in self._open_times]
        if outcome not in (Outcome.ENDED, Outcome.FINISHED):
            over = [i for i in over if (i.node == SERVERS_NODE) == (node == SERVERS_NODE) and i.strategy != but]
        if outcome is Outcome.ROLLED_BACK:
            over = [msgspec.structs.replace(i, reason=f"{i.reason}; {reason}") for i in over if i.strategy == "scale-out"]
        if outcome is Outcome.RESUMED:
            for incident in over:
                self._open_times[incident.number].stage_times[Stage.RESUMED] = now
        closed = {incident.number: self._close_one(incident, outcome, now) for incident in over}
        self.records = [closed.get(incident.number, incident) for incident in self.records]
        for number in closed:
            del self._open_times[number]
        return list(closed.values())

    def _close_one(self, incident: Incident, outcome: Outcome, now: float) -> Incident:
        clock = self._open_times[incident.number]
        ms = clock.stage_durations_ms()
        total_ms = round((now - clock.began_at) * 1000, 3) if outcome is Outcome.ROLLED_BACK else sum(ms.values())
        closed = msgspec.structs.replace(incident, outcome=outcome, ms=ms, total_ms=total_ms)
        self._add_to_totals(closed)
        return closed

    def _add_to_totals(self, incident: Incident) -> None:
        key = (incident.strategy, incident.outcome)
        total = self.totals.setdefault(key, Total(*key))
        total.count += 1
        for stage, ms in incident.ms.items():
            total.seconds[stage] = total.seconds.get(stage, 0.0) + ms / 1000
