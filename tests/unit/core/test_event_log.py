"""The story of a cluster, as it is kept."""

from __future__ import annotations

from covey.core.effects import Level, PublishEvent
from covey.core.event_log import EVENTS_MAX, Event, EventLog
from covey.core.incidents import Outcome


def event_log_of(*published: tuple[str, str]) -> EventLog:
    made = EventLog()
    for second, (node, reason) in enumerate(published, start=1):
        made.add(PublishEvent(node, "said", reason), float(second))
    return made


def test_event_times_are_unique() -> None:
    made = EventLog()
    times = [made.add(PublishEvent("a", "b", "c"), 7.0).at for _ in range(3)]
    assert times == sorted(set(times)), "a client that asks for the events after one gets the next"
    assert [event.at for event in made.events_after(times[0])] == times[1:]


def test_node_filter_returns_events_that_name_the_node() -> None:
    made = event_log_of(("worker:1", "died"), ("cluster", "recover of worker:1 (SIGKILL)"), ("cluster", "worker:11 is here"))
    assert [event.reason for event in made.events_after(node="worker:1")] == ["died", "recover of worker:1 (SIGKILL)"]


def test_newest_events_are_returned_in_order() -> None:
    made = event_log_of(*((str(number), "") for number in range(EVENTS_MAX + 5)))
    assert [event.node for event in made.events_after(limit=2)] == [str(EVENTS_MAX + 3), str(EVENTS_MAX + 4)]
    assert len(made.events_after(limit=EVENTS_MAX + 5)) == EVENTS_MAX


def test_restored_events_precede_new_ones() -> None:
    made = EventLog()
    made.restore([(100.0, "cluster", "formed", "all are here", "warning", "")])
    event = made.add(PublishEvent("cluster", "restored", ""), 99.0)  # a clock that was set back
    assert event.at > 100.0 and made.events_after(100.0) == [event]
    assert made.events_after()[0].level is Level.WARNING


def test_event_keeps_all_fields() -> None:
    made = EventLog()
    made.restore([(1.0, "cluster", "recovery", "recover of worker:1", "note", "resumed")])
    made.add(PublishEvent("worker:1", "died", "killed", Level.WARNING), 2.0)
    made.add(PublishEvent("cluster", "recovery", "scale-out of cluster", outcome=Outcome.ROLLED_BACK), 3.0)
    assert made.events_after() == [
        Event(1.0, "cluster", "recovery", "recover of worker:1", Level.NOTE, Outcome.RESUMED),
        Event(2.0, "worker:1", "died", "killed", Level.WARNING),
        Event(3.0, "cluster", "recovery", "scale-out of cluster", Level.NOTE, Outcome.ROLLED_BACK),
    ]
