"""Replies to requests for the cluster view (the state of the cluster for display), and updates for clients that follow it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.messages import Refused, ViewReply, ViewRequest
from covey.transport.connection import Connection

SUBSCRIBERS_MAX: Final = 64
VIEW_TIME_SHARE: Final = 0.05  # largest share of the scheduler's time for updates by `notify_if_due`


class ViewStream:
    """Subscribers to one scheduler's view, at most `SUBSCRIBERS_MAX`."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self.subscribers: dict[int, Connection] = {}  # by connection id
        self._view = view
        self._next_update_at = 0.0  # time.monotonic() from which `notify_if_due` sends

    def handle_view_request(self, connection: Connection, request: ViewRequest) -> None:
        """Send the view and, if `follow` is set, subscribe the connection. Send `Refused` instead if it asks to follow and
        there are `SUBSCRIBERS_MAX` subscribers."""
        if request.follow and len(self.subscribers) >= SUBSCRIBERS_MAX:
            connection.send(
                Refused(f"{SUBSCRIBERS_MAX} clients follow the view already: end one of them, or request it without following")
            )
            return
        connection.send(self._make_view_reply())
        if request.follow:
            self.subscribers[connection.id] = connection

    def notify_subscribers(self) -> None:
        """Send the view to all subscribers now."""
        if self.subscribers:
            started_at = time.monotonic()
            reply = self._make_view_reply()
            for connection in list(self.subscribers.values()):
                connection.send(reply)
            self._next_update_at = time.monotonic() + (time.monotonic() - started_at) / VIEW_TIME_SHARE

    def notify_if_due(self) -> None:
        """Send the view to all subscribers, unless updates would then take more than `VIEW_TIME_SHARE` of the time."""
        if time.monotonic() >= self._next_update_at:
            self.notify_subscribers()

    def remove_subscriber(self, connection: Connection) -> None:
        self.subscribers.pop(connection.id, None)

    def _make_view_reply(self) -> ViewReply:
        return ViewReply(msgspec.json.encode(self._view()))
