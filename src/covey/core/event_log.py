"""Event log: the newest `EVENTS_MAX` published events of a cluster or of the operator, oldest first."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from covey.core.effects import Level, PublishEvent
from covey.core.incidents import Outcome

EVENTS_MAX: Final = 10_000  # events in memory; the journal keeps more
REPLY_EVENTS_MAX: Final = 1000  # events in one reply
NODE_NAME: Final = re.compile(r"[\w:.-]*\w")
EVENT_SPACING_S: Final = 1e-6  # least difference of two times, so that a time identifies one event


class Event(msgspec.Struct, frozen=True):
    """One event. `at` is the time in seconds since 1970 and strictly increases from event to event."""

    at: float
    node: str
    what: str
    reason: str
    level: Level = Level.NOTE
    outcome: Outcome | None = None  # of the incident that a "recovery" event closes; None for other events


EventRow = tuple[float, str, str, str, str, str]  # the fields of an `Event` as journals store them; "" for no outcome


def event_row(event: Event) -> EventRow:
    """Return the fields of the event in the form that journals store; "" for no outcome."""
    return event.at, event.node, event.what, event.reason, str(event.level), str(event.outcome or "")


class EventLog:
    """The newest `EVENTS_MAX` events, oldest first; adding an event to a full log drops the oldest."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)

    def restore(self, rows: Iterable[EventRow]) -> None:
        """Add stored events, oldest first. Raise `ValueError` if a level or an outcome is unknown."""
        for at, node, what, reason, level, outcome in rows:
            self._events.append(Event(at, node, what, reason, Level(level), Outcome(outcome) if outcome else None))

    def add(self, published: PublishEvent, wall: float) -> Event:
        """Add an event at time `wall` (seconds since 1970), or just after the newest event if that is later; return it."""
        at = max(wall, self._events[-1].at + EVENT_SPACING_S) if self._events else wall
        event = Event(at, published.node, published.what, published.reason, published.level, published.outcome)
        self._events.append(event)
        return event

    def events_after(self, at: float = 0.0, node: str = "", limit: int = REPLY_EVENTS_MAX) -> list[Event]:
        """Return the newest `limit` events after the time `at`, oldest first; with `node`, only those that mention it."""
        found: list[Event] = []
        for event in reversed(self._events):
            if event.at <= at or len(found) == limit:
                break
            if not node or mentions_node(event, node):
                found.append(event)
        return found[::-1]


def mentions_node(event: Event, node: str) -> bool:
    """Return whether the event is about the node, or its reason contains the node's name (worker:1 is not in worker:10)."""
    return event.node == node or node in NODE_NAME.findall(event.reason)
