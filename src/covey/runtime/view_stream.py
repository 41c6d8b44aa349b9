"""Who looks at a cluster: shown it once or, where they follow, whenever it has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.messages import Refused, ViewReply, ViewRequest
from covey.transport.connection import Link

FOLLOWERS_MAX: Final = 64
SHARE: Final = 0.05  # of the scheduler's time, for those who follow the view of a large cluster


class Followers:
    """One per scheduler, which lends its `view`."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self.links: dict[int, Link] = {}  # of those who follow
        self._view = view
        self._again_at = 0.0  # not before this are they told again, unless there is news

    def answer(self, link: Link, ask: ViewRequest) -> None:
        """Show the cluster; and from now on again."""
        if ask.follow and len(self.links) >= FOLLOWERS_MAX:
            link.send(Refused(f"{FOLLOWERS_MAX} others follow this cluster already: end one of them, or ask without following"))
            return
        link.send(self._told())
        if ask.follow:
            self.links[link.id] = link

    def tell(self) -> None:
        """There is news: those who follow see it now."""
        if self.links:
            began = time.monotonic()
            told = self._told()
            for link in list(self.links.values()):
                link.send(told)
            self._again_at = time.monotonic() + (time.monotonic() - began) / SHARE

    def tell_again(self) -> None:
        """Without news: as often as the time allows that may be spent on it."""
        if time.monotonic() >= self._again_at:
            self.tell()

    def gone(self, link: Link) -> None:
        self.links.pop(link.id, None)

    def _told(self) -> ViewReply:
        return ViewReply(msgspec.json.encode(self._view()))
