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


class Total(msgspec.Struct, frozen=True):
    """All incidents that one strategy has answered so far, with one outcome."""

    strategy: str
    outcome: Outcome
    count: int = 0
    seconds: dict[Stage, float] = {}

    def plus(self, incident: Incident) -> Total:
        seconds = dict(self.seconds)
        for stage, ms in incident.ms.items():
            seconds[stage] = seconds.get(stage, 0.0) + ms / 1000
        return Total(self.strategy, self.outcome, self.count + 1, seconds)
