"""Incidents: records of recoveries and resizes with cause, strategy, reason, stages, durations and outcome.

An incident is open from the decision about a fault or request until its outcome is known. Several can be open at the same time.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

SERVERS_NODE = "servers"  # node of an incident that adds or removes parameter servers
INCIDENTS_MAX = 1000  # incidents kept in memory, and in the journal


class Stage(StrEnum):
    """Stages of an incident, in order; not every incident reaches all of them.

    The duration of a stage is the time since the stage reached before it; of DETECTED, since the first sign of the fault.
    """

    DETECTED = "detected"  # the scheduler learned of the fault; after missed heartbeats the first sign is the last heartbeat
    DECIDED = "decided"  # a strategy was chosen
    REFORMED = "re-formed"  # every rank was sent its heal plan; without a heal barrier: no member is dead or suspect
    RESTORED = "restored"  # every rank that lacked state has received it
    RESUMED = "resumed"  # every rank has completed a collective of the new generation; servers: all are in sync


class Outcome(StrEnum):
    OPEN = "open"
    RESUMED = "resumed"
    RESTARTED = "restarted"  # all workers restarted
    FINISHED = "finished"  # the run finished with code 0; a script without collectives never reports that it resumed
    ROLLED_BACK = "rolled back"  # a scale-out that did not complete
    ENDED = "ended"  # the run ended with another code


class Incident(msgspec.Struct, frozen=True, tag="incident"):
    """One recovery or resize, as the journal stores it and REST returns it."""

    number: int  # from 1
    at: float  # wall-clock seconds when the scheduler learned of it
    node: str  # name of the failed member, "cluster", or `SERVERS_NODE`
    rank: int  # of that member; -1: not about one member
    cause: str
    strategy: str  # a strategy, "restart all", "wait", "scale-out" or "scale-in"
    reason: str
    outcome: Outcome = Outcome.OPEN
    ms: dict[Stage, float] = {}  # duration of each stage reached, in milliseconds
    total_ms: float = 0.0  # sum of the stages, or the time until the rollback; 0 while open

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
