"""The scheduler's story as others hear it: kept, answered from, and told on to those who follow it."""

from __future__ import annotations

import msgspec

from covey.core.effects import PublishEvent
from covey.core.event_log import Event, EventLog
from covey.core.messages import EventsReply, EventsRequest, Refused
from covey.log import tell
from covey.transport.connection import Link
from covey.wall_clock import wall

LISTENERS_MAX = 64


class Storyteller:
    """One per scheduler."""

    def __init__(self) -> None:
        self.story = EventLog()
        self._listeners: dict[Link, EventsRequest] = {}  # who follows, and what they have not heard yet

    @property
    def listeners(self) -> list[Link]:
        return list(self._listeners)

    def note(self, news: PublishEvent) -> Event:
        """Log it and keep it."""
        tell(news)
        return self.story.add(news, wall())

    def answer(self, link: Link, asked: EventsRequest) -> None:
        """Tell what is known; and from now on the rest."""
        if asked.follow and len(self._listeners) >= LISTENERS_MAX:
            link.send(Refused(f"{LISTENERS_MAX} others follow this story already: end one of them, or ask without following"))
            return
        self._tell(link, asked, even_nothing=True)
        if asked.follow:
            self._heard(link, asked)

    def tell_on(self) -> None:
        """Those who follow hear what is new."""
        for link, asked in list(self._listeners.items()):
            self._tell(link, asked, even_nothing=False)
            self._heard(link, asked)

    def gone(self, link: Link) -> None:
        self._listeners.pop(link, None)

    def _tell(self, link: Link, asked: EventsRequest, *, even_nothing: bool) -> None:
        events = self.story.events_after(asked.after, asked.node)
        if events or even_nothing:
            link.send(EventsReply(msgspec.json.encode(events)))

    def _heard(self, link: Link, asked: EventsRequest) -> None:
        newest = self.story.events_after(limit=1)
        self._listeners[link] = msgspec.structs.replace(asked, after=newest[-1].at if newest else asked.after)
