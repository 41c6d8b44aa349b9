"""Log of incidents: the open and closed recoveries and resizes of a cluster (see `covey.core.incidents`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from covey.core.incidents import INCIDENTS_MAX, SERVERS_NODE, Incident, Outcome, Stage, Total
from covey.core.types import Member, Role

if TYPE_CHECKING:
    from covey.core.cluster.state import Step


class IncidentTimes:
    """Times at which an open incident reached its stages, in seconds on the machine's clock."""

    def __init__(self, began_at: float, stage_times: dict[Stage, float]) -> None:
        self.began_at = began_at  # first sign of the fault
        self._stage_times = stage_times

    def mark(self, stage: Stage, now: float) -> None:
        self._stage_times[stage] = now

    def stage_durations_ms(self) -> dict[Stage, float]:
        """Return the duration of each stage reached, in milliseconds: the time since the stage before it, or `began_at`."""
        times, reached = {}, self.began_at
        for stage in Stage:
            if stage in self._stage_times:
                times[stage] = round(max(0.0, self._stage_times[stage] - reached) * 1000, 3)
                reached = max(reached, self._stage_times[stage])
        return times


class IncidentLog:
    """Owns the incidents of a cluster, open and closed. Each is persisted when it is opened and when it is closed.

    `wall_zero` is the wall-clock time at which the machine's clock was 0.
    """

    def __init__(self, wall_zero: float) -> None:
        self.records: list[Incident] = []  # the newest `INCIDENTS_MAX`, by number
        self.totals: dict[tuple[str, Outcome], Total] = {}  # of closed incidents, by strategy and outcome
        self._wall_zero = wall_zero
        self._open_times: dict[int, IncidentTimes] = {}  # by number

    def restore(self, records: list[Incident]) -> None:
        """Restore the incidents of the journal. Open ones stay open, with the stages DETECTED and DECIDED."""
        self.records = sorted(records, key=lambda incident: incident.number)
        for incident in self.records:
            if incident.outcome is Outcome.OPEN:
                known = incident.at - self._wall_zero
                since = known - incident.ms.get(Stage.DETECTED, 0.0) / 1000
                self._open_times[incident.number] = IncidentTimes(since, {Stage.DETECTED: known, Stage.DECIDED: known})
            else:
                self._add_to_totals(incident)

    def open(
        self,
        step: Step,
        strategy: str,
        reason: str,
        cause: str,
        *,
        since: float | None = None,
        known: float | None = None,
        member: Member | None = None,
        node: str = "cluster",
    ) -> int:
        """Open and persist an incident that is decided now; return its number.

        `since` is the time of the first sign of the fault, `known` the time when the scheduler learned of it; both default to
        now. `member` is the failed member; without one, `node` says what the incident is about.
        """
        since, known = step.now if since is None else since, step.now if known is None else known
        node, rank = (member.name, member.rank) if member is not None else (node, -1)
        number = self.records[-1].number + 1 if self.records else 1
        times = self._open_times[number] = IncidentTimes(since, {Stage.DETECTED: known, Stage.DECIDED: step.now})
        at = self._wall_zero + known
        incident = Incident(number, at, node, rank, cause, strategy, reason, ms=times.stage_durations_ms())
        self.records = [*self.records, incident][-INCIDENTS_MAX:]
        step.out.persist(incident)
        return number

    def mark_stage(self, stage: Stage, now: float) -> None:
        """Record that all open incidents reach this stage now. A later call for the same stage replaces the time."""
        for times in self._open_times.values():
            times.mark(stage, now)

    @property
    def is_resizing(self) -> bool:
        """Whether the incident of a scale-out or scale-in of the workers is open."""
        changes = ("scale-out", "scale-in")
        return any(i.outcome is Outcome.OPEN and i.strategy in changes and i.node != SERVERS_NODE for i in self.records)

    def close(self, step: Step, outcome: Outcome, node: str = "", reason: str = "") -> None:
        """Close open incidents, set their outcome, persist and publish them.

        ENDED and FINISHED close all. Another outcome closes only incidents of the parameter servers if `node` is SERVERS_NODE,
        else only the others. RESUMED and RESTARTED do not close a scale-in while members have yet to leave. ROLLED_BACK closes
        only scale-outs, and appends `reason` to their reason.
        """
        closing = [incident for incident in self.records if incident.number in self._open_times]
        if outcome not in (Outcome.ENDED, Outcome.FINISHED):
            # a scale-in stays open while members have yet to leave
            kept_open = "scale-in" if step.cluster.departing_ids and outcome in (Outcome.RESUMED, Outcome.RESTARTED) else ""
            closing = [i for i in closing if (i.node == SERVERS_NODE) == (node == SERVERS_NODE) and i.strategy != kept_open]
        if outcome is Outcome.ROLLED_BACK:
            closing = [msgspec.structs.replace(i, reason=f"{i.reason}; {reason}") for i in closing if i.strategy == "scale-out"]
        if outcome is Outcome.RESUMED:
            for incident in closing:
                self._open_times[incident.number].mark(Stage.RESUMED, step.now)
        closed = {incident.number: self._close_one(incident, outcome, step.now) for incident in closing}
        self.records = [closed.get(incident.number, incident) for incident in self.records]
        for number, incident in closed.items():
            del self._open_times[number]
            step.out.persist(incident)
            step.out.publish("cluster", "recovery", str(incident), outcome=incident.outcome)

    def close_if_resumed(self, step: Step) -> None:
        """Call `close` with RESUMED, unless an exception ended a worker's last process and it has made no progress since."""
        if all(member.error is None for member in step.cluster.members_in_role(Role.WORKER)):
            self.close(step, Outcome.RESUMED)

    def _close_one(self, incident: Incident, outcome: Outcome, now: float) -> Incident:
        times = self._open_times[incident.number]
        ms = times.stage_durations_ms()
        total_ms = round((now - times.began_at) * 1000, 3) if outcome is Outcome.ROLLED_BACK else sum(ms.values())
        closed = msgspec.structs.replace(incident, outcome=outcome, ms=ms, total_ms=total_ms)
        self._add_to_totals(closed)
        return closed

    def _add_to_totals(self, incident: Incident) -> None:
        key = (incident.strategy, incident.outcome)
        self.totals[key] = self.totals.get(key, Total(*key)).plus(incident)
