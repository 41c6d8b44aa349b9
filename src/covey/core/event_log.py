"""The story of a cluster: what was worth telling, in order, the newest of it kept for whoever asks later."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from covey.core.effects import Level, PublishEvent
from covey.core.incidents import Outcome

EVENTS_MAX: Final = 10_000  # events in memory; the journal keeps more
REPLY_EVENTS_MAX: Final = 1000  # events of one answer
NODE_NAME: Final = re.compile(r"[\w:.-]*\w")
EVENT_SPACING_S: Final = 1e-6  # between two events of the same moment, so that a time names one event


class Event(msgspec.Struct, frozen=True):
    """Something that happened. `at` is the wall clock, and grows from each event to the next."""

    at: float
    node: str
    what: str
    reason: str
    level: Level = Level.NOTE
    outcome: Outcome | None = None  # of the incident that a "recovery" event closes; None for other events


EventRow = tuple[float, str, str, str, str, str]  # the fields of an `Event` as journals store them; "" for no outcome


def event_row(event: Event) -> EventRow:
    """Return the event as a row of a journal."""
    return event.at, event.node, event.what, event.reason, str(event.level), str(event.outcome or "")


class EventLog:
    """The newest events of a cluster."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)

    def restore(self, rows: Iterable[EventRow]) -> None:
        """What an earlier scheduler told."""
        for at, node, what, reason, level, outcome in rows:
            self._events.append(Event(at, node, what, reason, Level(level), Outcome(outcome) if outcome else None))

    def add(self, news: PublishEvent, wall: float) -> Event:
        """Take in what happened at `wall`."""
        at = max(wall, self._events[-1].at + EVENT_SPACING_S) if self._events else wall
        event = Event(at, news.node, news.what, news.reason, news.level, news.outcome)
        self._events.append(event)
        return event

    def events_after(self, at: float = 0.0, node: str = "", limit: int = REPLY_EVENTS_MAX) -> list[Event]:
        """The newest after a moment, oldest first; of one node where it is named."""
        found: list[Event] = []
        for event in reversed(self._events):
            if event.at <= at or len(found) == limit:
                break
            if not node or mentions_node(event, node):
                found.append(event)
        return found[::-1]


def mentions_node(event: Event, node: str) -> bool:
    """Whether a node's story has this event: it happened to the node, or its reason names it."""
    return event.node == node or node in NODE_NAME.findall(event.reason)
