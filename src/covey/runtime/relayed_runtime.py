"""Runs the machine of a process that has an agent: its words go through the agent's link, and so does the news of that link."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from covey.core.events import Connected, ConnectionLost, MessageReceived
from covey.core.messages import LastHeardReply, LastHeardRequest, Message, SchedulerReachable, SchedulerUnreachable
from covey.errors import PeerError
from covey.runtime.node_runtime import NodeRuntime
from covey.transport.connection import Link, connect_to_agent

ANSWER_S: Final = 1.0  # for the agent's answer to one question


class ChildRuntime(NodeRuntime):
    """The connection to the agent lasts; over it the agent says when the scheduler is reached, and when it is not."""

    _reached = False
    _asked_at: float | None = None  # of the oldest question that is open
    _answered: asyncio.Event | None = None

    @property
    def linked(self) -> bool:
        return self._link is not None and self._reached

    def say(self, message: Message) -> bool:
        return self._reached and super().say(message)

    async def ask_unheard_s(self) -> float:
        """Only the agent knows what the scheduler's host acknowledged. While it is silent, nothing is sure."""
        if self._link is not None:
            if self._asked_at is None:
                self._asked_at, self._answered = self._loop.time(), asyncio.Event()
                self._link.send(LastHeardRequest())
            assert self._answered is not None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), ANSWER_S)
        return self._loop.time() - self._answered_at

    async def _connect(self) -> None:
        if self._link is not None:
            return  # the agent calls for all of its children
        calls = {"on_open": self._opened, "on_message": self._heard, "on_close": self._closed}
        try:
            await connect_to_agent(self._door.relay, **calls)
        except PeerError as error:
            self._do(ConnectionLost(str(error)))

    def _hang_up(self) -> None:
        self._reached, self._asked_at = False, None
        super()._hang_up()

    def _opened(self, link: Link) -> None:
        self._link = link

    def _heard(self, link: Link, message: Any) -> None:
        if link is not self._link:
            return
        if isinstance(message, SchedulerReachable):
            self._reached = True
            if not self._fixed_address:
                self.address = message.address
            self._do(Connected(message.silence_s))
        elif isinstance(message, SchedulerUnreachable):
            self._reached = False
            self._do(ConnectionLost(message.reason))
        elif isinstance(message, LastHeardReply):
            self._confirmed(message)
        else:
            self._do(MessageReceived(message))

    def _confirmed(self, answer: LastHeardReply) -> None:
        if self._asked_at is not None and self._answered is not None:
            self._answered_at = max(self._answered_at, self._asked_at - answer.age_s)
            self._asked_at = None
            self._answered.set()

    def _closed(self, link: Link, reason: str) -> None:
        if link is self._link:
            self._reached, self._asked_at = False, None
        super()._closed(link, reason)
