"""Event stream of a scheduler: replies and subscriptions."""

from __future__ import annotations

from typing import Any, cast

from covey.core.effects import PublishEvent
from covey.core.messages import EventsReply, EventsRequest, Refused
from covey.runtime.event_stream import SUBSCRIBERS_MAX, EventStream


class FakeConnection:
    """A connection that records the sent messages."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def send(self, message: Any) -> None:
        self.received.append(message)


def test_subscriber_above_limit_is_refused_until_one_leaves() -> None:
    stream = EventStream()
    connections = [FakeConnection() for _ in range(SUBSCRIBERS_MAX + 1)]
    for connection in connections:
        stream.handle_events_request(cast(Any, connection), EventsRequest(follow=True))
    assert [type(connection.received[-1]) for connection in connections] == [EventsReply] * SUBSCRIBERS_MAX + [Refused]
    stream.remove_subscriber(cast(Any, connections[0]))
    stream.handle_events_request(cast(Any, connections[-1]), EventsRequest(follow=True))
    stream.append_event(PublishEvent("worker:1", "died", "killed"))
    stream.notify_subscribers()
    stream.notify_subscribers()
    assert len(connections[0].received) == 1 and [type(m) for m in connections[-1].received] == [
        Refused,
        EventsReply,
        EventsReply,
    ]
    assert b"killed" in connections[-1].received[-1].events
