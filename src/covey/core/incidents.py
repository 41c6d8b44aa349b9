"""Incidents: records of recoveries and resizes with cause, strategy, reason, stages, durations and outcome.

An incident is open from the moment the scheduler learns of the fault until all ranks have resumed or the run has ended. A fault
during a recovery opens a further incident. All open incidents reach the later stages together, because the ranks resume
together.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

SERVERS_NODE = "servers"  # node of an incident about all parameter servers; it is closed apart from the others
INCIDENTS_MAX = 1000  # incidents kept in memory, and in the journal


class Stage(StrEnum):
    """The stages in order. The duration of a stage is the time since the stage before it."""

    DETECTED = "detected"  # the scheduler learned of the fault; counted from the last heartbeat if that is how
    DECIDED = "decided"
    REFORMED = "re-formed"  # every rank, replacements included, is at a safe point and was sent its heal plan
    RESTORED = "restored"  # every rank that lacked state has received it
    RESUMED = "resumed"  # every rank has completed a collective of the new generation


class Outcome(StrEnum):
    OPEN = "open"
    RESUMED = "resumed"
    RESTARTED = "restarted"  # all workers restarted
    FINISHED = "finished"  # the run finished with code 0; a script without collectives never reports that it resumed
    ROLLED_BACK = "rolled back"  # a scale-out that did not complete
    ENDED = "ended"  # the run ended with another code


class Incident(msgspec.Struct, frozen=True, tag="incident"):
    """One recovery or resize, as the journal stores it."""

    number: int  # from 1
    at: float  # wall-clock seconds when the scheduler learned of it
    node: str
    rank: int
    cause: str
    strategy: str
    reason: str
    outcome: Outcome = Outcome.OPEN
    ms: dict[Stage, float] = {}  # duration of each stage reached, in milliseconds
    total_ms: float = 0.0

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {self.ms[stage]:.0f} ms" for stage in Stage if stage in self.ms)
        return f"{self.strategy} of {self.node} ({self.cause}): {stages}; {self.total_ms:.0f} ms in all, {self.outcome}"


class Total(msgspec.Struct, frozen=True):
    """Number of closed incidents of one strategy with one outcome, and the seconds they spent in each stage."""

    strategy: str
    outcome: Outcome
    count: int = 0
    seconds: dict[Stage, float] = {}

    def plus(self, incident: Incident) -> Total:
        seconds = dict(self.seconds)
        for stage, ms in incident.ms.items():
            seconds[stage] = seconds.get(stage, 0.0) + ms / 1000
        return Total(self.strategy, self.outcome, self.count + 1, seconds)
