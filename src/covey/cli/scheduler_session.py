"""Client with which commands send requests to a scheduler and follow its views and events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.event_log import Event
from covey.core.messages import (
    EventsReply,
    EventsRequest,
    KillRequest,
    LeaveAcknowledged,
    Message,
    Refused,
    RequestAccepted,
    ScaleAccepted,
    ScaleRequest,
    StopRequest,
    ViewReply,
    ViewRequest,
)
from covey.errors import ExitCode, PeerError, UsageError
from covey.runtime.node_runtime import SchedulerAddress
from covey.transport.connection import Connection, connect
from covey.transport.handshake import SecretNotRequired

REPLY_TIMEOUT_S: Final = 10.0
RETRY_INTERVAL_S: Final = 0.2  # between two connection attempts
SCHEDULER_RETURN_TIMEOUT_S: Final = 10.0  # for a lost scheduler to return


class SchedulerSession:
    """One connection to a scheduler, as an async context manager. Of the unread messages, the newest 1,000 are kept."""

    def __init__(self, scheduler: SchedulerAddress) -> None:
        self._scheduler_address = scheduler
        self._received: asyncio.Queue[Any] = asyncio.Queue(maxsize=1000)
        self._connection: Connection | None = None

    async def __aenter__(self) -> SchedulerSession:
        """Connect to the first address at which the handshake succeeds.

        Raise PeerError if there is none; the error is `SecretNotRequired` if a scheduler does not require this side's secret.
        """
        scheduler, failures = self._scheduler_address, []
        refused: SecretNotRequired | None = None
        for host, port in scheduler.addresses:
            try:
                await self._connect(host, port)
            except PeerError as error:
                failures.append(str(error))
                refused = error if isinstance(error, SecretNotRequired) else refused
            else:
                return self
        if refused is not None:
            raise refused
        if len(failures) == 1:
            raise PeerError(f"cannot connect to the scheduler at {scheduler.name}: {failures[0]}", ExitCode.UNREACHABLE)
        reasons = "; ".join(dict.fromkeys(failures))
        raise PeerError(f"no scheduler leads at {scheduler.name} ({reasons}): retry in a few seconds", ExitCode.UNREACHABLE)

    async def _connect(self, host: str, port: int) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        opened.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the exception as retrieved

        def open_(connection: Connection) -> None:
            if not opened.done():
                opened.set_result(None)

        def closed(connection: Connection, reason: str) -> None:
            error = SecretNotRequired(reason) if connection.peer_requires_no_secret else PeerError(reason, ExitCode.UNREACHABLE)
            if not opened.done():
                opened.set_exception(error)
            elif connection is self._connection:
                self._enqueue(error)

        callbacks = {"on_open": open_, "on_message": lambda _, message: self._enqueue(message), "on_close": closed}
        scheduler = self._scheduler_address
        self._connection = await connect(
            host, port, scheduler.secret, scheduler.ssl_context, insist=scheduler.secret_required, **callbacks
        )
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await opened
        except TimeoutError:
            self._connection.abort("handshake timed out")
            raise PeerError(
                f"no handshake within {REPLY_TIMEOUT_S:g} s: the scheduler is suspended, or none leads there"
            ) from None

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    @property
    def scheduler_clock(self) -> float:
        """Wall clock of the scheduler at the handshake, in seconds since 1970."""
        assert self._connection is not None
        return self._connection.scheduler_clock

    async def request(self, message: Message) -> Any:
        """Send a message and return the next message received.

        Raise PeerError if the connection closes or no message arrives within `REPLY_TIMEOUT_S`, and UsageError if the message
        cannot be encoded.
        """
        self._send(message)
        return await self._next_reply(REPLY_TIMEOUT_S)

    async def follow_views(self) -> AsyncIterator[ClusterView]:
        """Yield the cluster's view, now and after changes, until the connection closes. Raise UsageError if the scheduler
        refuses."""
        self._send(ViewRequest(follow=True))
        while True:
            try:
                reply = await self._next_reply(None)
            except PeerError:
                return
            if isinstance(reply, Refused):
                raise UsageError(reply.reason, ExitCode.REFUSED)
            if isinstance(reply, ViewReply):
                yield msgspec.json.decode(reply.view, type=ClusterView)

    async def read_events(self, request: EventsRequest) -> AsyncIterator[list[Event]]:
        """Yield a list of the newest events. With `request.follow`, then yield lists of new events until the connection closes.

        Yield nothing if no reply arrives. Raise UsageError if the scheduler refuses, or if the request cannot be encoded.
        """
        self._send(request)
        while True:
            try:
                reply = await self._next_reply(None if request.follow else REPLY_TIMEOUT_S)
            except PeerError:
                return
            if isinstance(reply, Refused):
                raise UsageError(reply.reason, ExitCode.REFUSED)
            if isinstance(reply, EventsReply):
                yield msgspec.json.decode(reply.events, type=list[Event])
            if not request.follow:
                return

    def _send(self, message: Message) -> None:
        """Send a message. Raise UsageError if it cannot be encoded or decoded, as when a value is too long or not UTF-8."""
        assert self._connection is not None
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
        except (ValueError, OverflowError, msgspec.ValidationError) as error:
            raise UsageError(f"cannot send this request to {self._scheduler_address.name}: {error}") from None
        self._connection.send(message)

    async def _next_reply(self, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._received.get()
        except TimeoutError:
            raise PeerError(
                f"no reply from {self._scheduler_address.name} within {timeout_s:g} s", ExitCode.UNREACHABLE
            ) from None
        if isinstance(message, PeerError):
            raise message
        return message

    def _enqueue(self, message: Any) -> None:
        if self._received.full():
            self._received.get_nowait()  # drop the oldest message, in most cases a view
        self._received.put_nowait(message)


async def fetch_view(scheduler: SchedulerAddress) -> ClusterView:
    """Return the current view of the cluster. Raise PeerError if the scheduler is unreachable or does not reply."""
    async with SchedulerSession(scheduler) as session:
        reply = await session.request(ViewRequest())
        if not isinstance(reply, ViewReply):
            raise _unexpected_reply(scheduler)
        return msgspec.json.decode(reply.view, type=ClusterView)


def _unexpected_reply(scheduler: SchedulerAddress) -> PeerError:
    return PeerError(f"unexpected reply from {scheduler.name}: use the same version of covey on all hosts")


async def follow_events(
    scheduler: SchedulerAddress, node: str = "", reconnect_timeout_s: float = SCHEDULER_RETURN_TIMEOUT_S
) -> AsyncIterator[Event]:
    """Yield the newest events and then new ones; with `node`, only events that mention that node.

    Return after the cluster's event "ended", which is received only if `node` is "" or the event mentions that node. Retry a
    lost connection for `reconnect_timeout_s`, then raise PeerError. If the first connection fails, raise PeerError at once, or
    retry if `reconnect_timeout_s` is infinite. Raise UsageError if the scheduler refuses.
    """
    after, tried_until = 0.0, math.inf if reconnect_timeout_s == math.inf else 0.0
    clock = asyncio.get_running_loop().time
    while True:
        try:
            async with SchedulerSession(scheduler) as session:
                async for events in session.read_events(EventsRequest(node, after, follow=True)):
                    for event in events:
                        after = event.at
                        yield event
                        if (event.node, event.what) == ("cluster", "ended"):
                            return
                tried_until = clock() + reconnect_timeout_s
        except PeerError:
            if clock() > tried_until:
                raise
        await asyncio.sleep(RETRY_INTERVAL_S)


async def fetch_events(scheduler: SchedulerAddress, node: str = "") -> list[Event]:
    """Return the newest events (at most `REPLY_EVENTS_MAX`), oldest first; with `node`, only those that mention that node.

    Raise PeerError if the scheduler is unreachable or does not reply, and UsageError if `node` cannot be sent.
    """
    async with SchedulerSession(scheduler) as session:
        async for events in session.read_events(EventsRequest(node)):
            return events
    raise PeerError(f"no reply from {scheduler.name} within {REPLY_TIMEOUT_S:g} s", ExitCode.UNREACHABLE)


async def request_stop(scheduler: SchedulerAddress, reason: str) -> None:
    """Request the end of the cluster and wait for the acknowledgement, not for the end.

    Raise PeerError if the scheduler is unreachable or does not acknowledge, and UsageError if `reason` cannot be sent.
    """
    async with SchedulerSession(scheduler) as session:
        reply = await session.request(StopRequest(reason))
        if not isinstance(reply, LeaveAcknowledged):
            raise _unexpected_reply(scheduler)


async def request_kill(scheduler: SchedulerAddress, node: str) -> str:
    """Request that a node's agent kills the node's process; return the scheduler's message when it has accepted.

    Raise PeerError if the scheduler refuses, is unreachable or does not reply.
    """
    async with SchedulerSession(scheduler) as session:
        reply = await session.request(KillRequest(node, "requested by covey kill"))
        if isinstance(reply, Refused):
            raise PeerError(f"kill refused by the cluster at {scheduler.name}: {reply.reason}", ExitCode.REFUSED)
        if not isinstance(reply, RequestAccepted):
            raise _unexpected_reply(scheduler)
        return reply.reason


async def request_scale(scheduler: SchedulerAddress, workers: int, servers: int = -1) -> ScaleAccepted:
    """Request a number of workers or of parameter servers (-1: unchanged); return the acceptance, before the change is made.

    Raise PeerError if the scheduler refuses, is unreachable or does not reply.
    """
    async with SchedulerSession(scheduler) as session:
        reply = await session.request(ScaleRequest(workers, servers=servers))
        if isinstance(reply, Refused):
            raise PeerError(f"scale refused by the cluster at {scheduler.name}: {reply.reason}", ExitCode.REFUSED)
        if not isinstance(reply, ScaleAccepted):
            raise _unexpected_reply(scheduler)
        return reply
