"""Runtime of a node that is a child of an agent: its messages pass through the agent's connection to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from covey.core.events import Connected, ConnectionLost, MessageReceived
from covey.core.messages import LastHeardReply, LastHeardRequest, Message, SchedulerReachable, SchedulerUnreachable
from covey.errors import PeerError
from covey.runtime.node_runtime import NodeRuntime
from covey.transport.connection import Connection, connect_to_agent

AGENT_REPLY_TIMEOUT_S: Final = 1.0  # for the reply to a `LastHeardRequest`


class RelayedRuntime(NodeRuntime):
    """A runtime that is connected to its agent, which reports when it connects to the scheduler and when it disconnects."""

    _scheduler_reachable = False
    _last_heard_requested_at: float | None = None  # loop time of the pending request; None: none is pending
    _last_heard_replied: asyncio.Event | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._scheduler_reachable

    def try_send(self, message: Message) -> bool:
        return self._scheduler_reachable and super().try_send(message)

    async def query_since_last_heard_s(self) -> float:
        """Return the seconds since the scheduler's host last acknowledged this process, which the agent knows. Without a reply
        of the agent, count from the last known acknowledgement, or from the creation of this object."""
        if self._connection is not None:
            if self._last_heard_requested_at is None:
                self._last_heard_requested_at, self._last_heard_replied = self._loop.time(), asyncio.Event()
                self._connection.send(LastHeardRequest())
            assert self._last_heard_replied is not None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._last_heard_replied.wait(), AGENT_REPLY_TIMEOUT_S)
        return self._loop.time() - self._last_contact_at

    async def _connect(self) -> None:
        if self._connection is not None:
            return  # the agent reconnects to the scheduler for all its children
        calls = {"on_open": self._on_connected, "on_message": self._on_message, "on_close": self._on_connection_closed}
        try:
            await connect_to_agent(self._scheduler_address.relay_path, **calls)
        except PeerError as error:
            self._step_machine(ConnectionLost(str(error)))

    def _disconnect(self) -> None:
        self._scheduler_reachable, self._last_heard_requested_at = False, None
        super()._disconnect()

    def _on_connected(self, connection: Connection) -> None:
        self._connection = connection

    def _on_message(self, connection: Connection, message: Any) -> None:
        if connection is not self._connection:
            return
        if isinstance(message, SchedulerReachable):
            self._scheduler_reachable = True
            if not self._has_fixed_address:
                self.address = message.address
            self._step_machine(Connected(message.silence_s))
        elif isinstance(message, SchedulerUnreachable):
            self._scheduler_reachable = False
            self._step_machine(ConnectionLost(message.reason))
        elif isinstance(message, LastHeardReply):
            self._on_last_heard_reply(message)
        else:
            self._step_machine(MessageReceived(message))

    def _on_last_heard_reply(self, reply: LastHeardReply) -> None:
        if self._last_heard_requested_at is not None and self._last_heard_replied is not None:
            self._last_contact_at = max(self._last_contact_at, self._last_heard_requested_at - reply.age_s)
            self._last_heard_requested_at = None
            self._last_heard_replied.set()

    def _on_connection_closed(self, connection: Connection, reason: str) -> None:
        if connection is self._connection:
            self._scheduler_reachable, self._last_heard_requested_at = False, None
        super()._on_connection_closed(connection, reason)
