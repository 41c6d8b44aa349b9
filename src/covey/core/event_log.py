"""The story of a cluster: what was worth telling, in order, the newest of it kept for whoever asks later."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from covey.core.effects import Level, Publish

KEPT_MAX: Final = 10_000  # events in memory; the journal keeps more
TOLD_MAX: Final = 1000  # events of one answer
NAMES: Final = re.compile(r"[\w:.-]*\w")
STEP_S: Final = 1e-6  # between two events of the same moment, so that a time names one event


class Event(msgspec.Struct, frozen=True):
    """Something that happened. `at` is the wall clock, and grows from each event to the next."""

    at: float
    node: str
    what: str
    reason: str
    level: Level = Level.NOTE


class Story:
    """The newest events of a cluster."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT_MAX)

    def take_over(self, rows: Iterable[tuple[float, str, str, str, str]]) -> None:
        """What an earlier scheduler told."""
        for at, node, what, reason, level in rows:
            self._events.append(Event(at, node, what, reason, Level(level)))

    def add(self, news: Publish, wall: float) -> Event:
        """Take in what happened at `wall`."""
        at = max(wall, self._events[-1].at + STEP_S) if self._events else wall
        event = Event(at, news.node, news.what, news.reason, news.level)
        self._events.append(event)
        return event

    def after(self, at: float = 0.0, node: str = "", limit: int = TOLD_MAX) -> list[Event]:
        """The newest after a moment, oldest first; of one node where it is named."""
        found: list[Event] = []
        for event in reversed(self._events):
            if event.at <= at or len(found) == limit:
                break
            if not node or about(event, node):
                found.append(event)
        return found[::-1]


def about(event: Event, node: str) -> bool:
    """Whether a node's story has this event: it happened to the node, or its reason names it."""
    return event.node == node or node in NAMES.findall(event.reason)
