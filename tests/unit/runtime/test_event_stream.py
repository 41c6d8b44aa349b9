"""Who hears the story of a scheduler."""

from __future__ import annotations

from typing import Any, cast

from covey.core.effects import PublishEvent
from covey.core.messages import EventsReply, EventsRequest, Refused
from covey.runtime.event_stream import SUBSCRIBERS_MAX, EventStream


class Ear:
    """A link that keeps what it is sent."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)


def test_one_follower_too_many_is_told_so() -> None:
    teller = EventStream()
    ears = [Ear() for _ in range(SUBSCRIBERS_MAX + 1)]
    for ear in ears:
        teller.handle_events_request(cast(Any, ear), EventsRequest(follow=True))
    assert [type(ear.heard[-1]) for ear in ears] == [EventsReply] * SUBSCRIBERS_MAX + [Refused]
    teller.remove_subscriber(cast(Any, ears[0]))
    teller.handle_events_request(cast(Any, ears[-1]), EventsRequest(follow=True))
    teller.append_event(PublishEvent("worker:1", "died", "killed"))
    teller.notify_subscribers()
    teller.notify_subscribers()
    assert len(ears[0].heard) == 1 and [type(m) for m in ears[-1].heard] == [Refused, EventsReply, EventsReply]
    assert b"killed" in ears[-1].heard[-1].events
