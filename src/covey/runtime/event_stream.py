"""The scheduler's event log and its subscribers: stores events, answers requests, sends new events to clients that follow
them."""

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
    """Event log of one scheduler with at most `SUBSCRIBERS_MAX` subscribers."""

    def __init__(self) -> None:
        self.event_log = EventLog()
        self._subscriptions: dict[Connection, EventsRequest] = {}  # `after`: time of the newest event when it was last notified

    @property
    def subscribers(self) -> list[Connection]:
        return list(self._subscriptions)

    def append_event(self, effect: PublishEvent) -> Event:
        """Write an event to covey's log, add it to the event log and return it. `notify_subscribers` sends it."""
        log_event(effect)
        return self.event_log.add(effect, wall_time())

    def handle_events_request(self, connection: Connection, request: EventsRequest) -> None:
        """Send the requested events and, if `follow` is set, subscribe the connection. Send `Refused` instead if it asks to
        follow and there are `SUBSCRIBERS_MAX` subscribers."""
        if request.follow and len(self._subscriptions) >= SUBSCRIBERS_MAX:
            connection.send(
                Refused(
                    f"{SUBSCRIBERS_MAX} clients follow the event log already: end one of them, or request it without following"
                )
            )
            return
        self._send_events(connection, request, even_empty=True)
        if request.follow:
            self._update_subscription(connection, request)

    def notify_subscribers(self) -> None:
        """Send each subscriber the new events that match its request, if there are any, at most the newest
        `REPLY_EVENTS_MAX`."""
        for connection, request in list(self._subscriptions.items()):
            self._send_events(connection, request, even_empty=False)
            self._update_subscription(connection, request)

    def remove_subscriber(self, connection: Connection) -> None:
        self._subscriptions.pop(connection, None)

    def _send_events(self, connection: Connection, request: EventsRequest, *, even_empty: bool) -> None:
        events = self.event_log.events_after(request.after, request.node)
        if events or even_empty:
            connection.send(EventsReply(msgspec.json.encode(events)))

    def _update_subscription(self, connection: Connection, request: EventsRequest) -> None:
        newest = self.event_log.events_after(limit=1)
        self._subscriptions[connection] = msgspec.structs.replace(request, after=newest[-1].at if newest else request.after)
