"""The scheduler's story as others hear it: kept, answered from, and told on to those who follow it."""

from __future__ import annotations

import msgspec

from covey.core.effects import PublishEvent
from covey.core.event_log import Event, EventLog
from covey.core.messages import EventsReply, EventsRequest, Refused
from covey.log import log_event
from covey.transport.connection import Connection
from covey.wall_clock import wall_time

SUBSCRIBERS_MAX = 64


class EventStream:
    """One per scheduler."""

    def __init__(self) -> None:
        self.event_log = EventLog()
        self._subscriptions: dict[Connection, EventsRequest] = {}  # who follows, and what they have not heard yet

    @property
    def subscribers(self) -> list[Connection]:
        return list(self._subscriptions)

    def append_event(self, news: PublishEvent) -> Event:
        """Log it and keep it."""
        log_event(news)
        return self.event_log.add(news, wall_time())

    def handle_events_request(self, link: Connection, asked: EventsRequest) -> None:
        """Tell what is known; and from now on the rest."""
        if asked.follow and len(self._subscriptions) >= SUBSCRIBERS_MAX:
            link.send(Refused(f"{SUBSCRIBERS_MAX} others follow this story already: end one of them, or ask without following"))
            return
        self._send_events(link, asked, even_nothing=True)
        if asked.follow:
            self._update_subscription(link, asked)

    def notify_subscribers(self) -> None:
        """Those who follow hear what is new."""
        for link, asked in list(self._subscriptions.items()):
            self._send_events(link, asked, even_nothing=False)
            self._update_subscription(link, asked)

    def remove_subscriber(self, link: Connection) -> None:
        self._subscriptions.pop(link, None)

    def _send_events(self, link: Connection, asked: EventsRequest, *, even_nothing: bool) -> None:
        events = self.event_log.events_after(asked.after, asked.node)
        if events or even_nothing:
            link.send(EventsReply(msgspec.json.encode(events)))

    def _update_subscription(self, link: Connection, asked: EventsRequest) -> None:
        newest = self.event_log.events_after(limit=1)
        self._subscriptions[link] = msgspec.structs.replace(asked, after=newest[-1].at if newest else asked.after)
