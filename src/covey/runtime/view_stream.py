"""Who looks at a cluster: shown it once or, where they follow, whenever it has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.messages import Refused, ViewReply, ViewRequest
from covey.transport.connection import Connection

SUBSCRIBERS_MAX: Final = 64
VIEW_TIME_SHARE: Final = 0.05  # of the scheduler's time, for those who follow the view of a large cluster


class ViewStream:
    """One per scheduler, which lends its `view`."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self.subscribers: dict[int, Connection] = {}  # of those who follow
        self._view = view
        self._next_update_at = 0.0  # not before this are they told again, unless there is news

    def handle_view_request(self, link: Connection, ask: ViewRequest) -> None:
        """Show the cluster; and from now on again."""
        if ask.follow and len(self.subscribers) >= SUBSCRIBERS_MAX:
            link.send(
                Refused(f"{SUBSCRIBERS_MAX} others follow this cluster already: end one of them, or ask without following")
            )
            return
        link.send(self._make_view_reply())
        if ask.follow:
            self.subscribers[link.id] = link

    def notify_subscribers(self) -> None:
        """There is news: those who follow see it now."""
        if self.subscribers:
            began = time.monotonic()
            told = self._make_view_reply()
            for link in list(self.subscribers.values()):
                link.send(told)
            self._next_update_at = time.monotonic() + (time.monotonic() - began) / VIEW_TIME_SHARE

    def notify_if_due(self) -> None:
        """Without news: as often as the time allows that may be spent on it."""
        if time.monotonic() >= self._next_update_at:
            self.notify_subscribers()

    def remove_subscriber(self, link: Connection) -> None:
        self.subscribers.pop(link.id, None)

    def _make_view_reply(self) -> ViewReply:
        return ViewReply(msgspec.json.encode(self._view()))
