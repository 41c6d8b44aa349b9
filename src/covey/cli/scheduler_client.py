"""Talk to a scheduler from a command: look at the cluster, follow it, stop it, or find out why it does not answer."""

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
RETRY_INTERVAL_S: Final = 0.2  # between two tries to find a scheduler again
SCHEDULER_RETURN_TIMEOUT_S: Final = 10.0


class SchedulerSession:
    """One connection, as an async context manager."""

    def __init__(self, door: SchedulerAddress) -> None:
        self._scheduler_address = door
        self._received: asyncio.Queue[Any] = asyncio.Queue(maxsize=1000)
        self._connection: Connection | None = None

    async def __aenter__(self) -> SchedulerSession:
        """Where there are several addresses, the one that answers is the leader's: the others listen when they lead."""
        door, failures = self._scheduler_address, []
        refused: SecretNotRequired | None = None
        for host, port in door.addresses:
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
            raise PeerError(f"{door.name} cannot be asked: {failures[0]}", ExitCode.UNREACHABLE)
        said = "; ".join(dict.fromkeys(failures))
        raise PeerError(f"nobody leads at {door.name} now ({said}): ask again in a moment", ExitCode.UNREACHABLE)

    async def _connect(self, host: str, port: int) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        opened.add_done_callback(lambda done: done.cancelled() or done.exception())  # who asked may be gone by then

        def open_(link: Connection) -> None:
            if not opened.done():
                opened.set_result(None)

        def closed(link: Connection, reason: str) -> None:
            error = SecretNotRequired(reason) if link.peer_requires_no_secret else PeerError(reason, ExitCode.UNREACHABLE)
            if not opened.done():
                opened.set_exception(error)
            elif link is self._connection:
                self._enqueue(error)

        calls = {"on_open": open_, "on_message": lambda _, message: self._enqueue(message), "on_close": closed}
        door = self._scheduler_address
        self._connection = await connect(host, port, door.secret, door.ssl_context, insist=door.secret_required, **calls)
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await opened
        except TimeoutError:
            self._connection.abort("too late")
            raise PeerError(f"no greeting within {REPLY_TIMEOUT_S:g} s: it is stopped, or nobody leads there now") from None

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    @property
    def scheduler_clock(self) -> float:
        """The scheduler's wall clock as it greeted."""
        assert self._connection is not None
        return self._connection.scheduler_clock

    async def request(self, message: Message) -> Any:
        """Say something and wait for the answer."""
        self._send(message)
        return await self._next_reply(REPLY_TIMEOUT_S)

    async def follow_views(self) -> AsyncIterator[ClusterView]:
        """The cluster now, and again as it changes, until it ends."""
        self._send(ViewRequest(follow=True))
        while True:
            try:
                told = await self._next_reply(None)
            except PeerError:
                return
            if isinstance(told, Refused):
                raise UsageError(told.reason, ExitCode.REFUSED)
            if isinstance(told, ViewReply):
                yield msgspec.json.decode(told.view, type=ClusterView)

    async def read_events(self, asked: EventsRequest) -> AsyncIterator[list[Event]]:
        """The story so far, then what is added to it; it ends with the connection, or at once if nothing is followed."""
        self._send(asked)
        while True:
            try:
                told = await self._next_reply(None if asked.follow else REPLY_TIMEOUT_S)
            except PeerError:
                return
            if isinstance(told, Refused):
                raise UsageError(told.reason, ExitCode.REFUSED)
            if isinstance(told, EventsReply):
                yield msgspec.json.decode(told.events, type=list[Event])
            if not asked.follow:
                return

    def _send(self, message: Message) -> None:
        """What a person typed may be longer than a message, or no text: else the scheduler would hang up on us."""
        assert self._connection is not None
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
        except (ValueError, OverflowError, msgspec.ValidationError) as error:
            raise UsageError(f"{self._scheduler_address.name} cannot be asked that: {error}") from None
        self._connection.send(message)

    async def _next_reply(self, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._received.get()
        except TimeoutError:
            raise PeerError(
                f"{self._scheduler_address.name} did not answer within {timeout_s:g} s", ExitCode.UNREACHABLE
            ) from None
        if isinstance(message, PeerError):
            raise message
        return message

    def _enqueue(self, message: Any) -> None:
        if self._received.full():
            self._received.get_nowait()  # a view that nobody looked at in time
        self._received.put_nowait(message)


async def fetch_view(door: SchedulerAddress) -> ClusterView:
    """The cluster as it is now."""
    async with SchedulerSession(door) as visit:
        told = await visit.request(ViewRequest())
        if not isinstance(told, ViewReply):
            raise PeerError(f"{door.name} gave an answer that makes no sense")
        return msgspec.json.decode(told.view, type=ClusterView)


async def follow_events(
    door: SchedulerAddress, node: str = "", patience_s: float = SCHEDULER_RETURN_TIMEOUT_S
) -> AsyncIterator[Event]:
    """The story as it grows, until the cluster has ended. A scheduler that is away is looked for again, for `patience_s`."""
    after, tried_until = 0.0, math.inf if patience_s == math.inf else 0.0
    clock = asyncio.get_running_loop().time
    while True:
        try:
            async with SchedulerSession(door) as visit:
                async for events in visit.read_events(EventsRequest(node, after, follow=True)):
                    for event in events:
                        after = event.at
                        yield event
                        if (event.node, event.what) == ("cluster", "ended"):
                            return
                tried_until = clock() + patience_s
        except PeerError:
            if clock() > tried_until:
                raise
        await asyncio.sleep(RETRY_INTERVAL_S)


async def fetch_events(door: SchedulerAddress, node: str = "") -> list[Event]:
    """The newest of the story."""
    async with SchedulerSession(door) as visit:
        async for events in visit.read_events(EventsRequest(node)):
            return events
    raise PeerError(f"{door.name} did not tell its story", ExitCode.UNREACHABLE)


async def request_stop(door: SchedulerAddress, reason: str) -> None:
    """Ask the cluster to end, and hear that it was understood."""
    async with SchedulerSession(door) as visit:
        answer = await visit.request(StopRequest(reason))
        if not isinstance(answer, LeaveAcknowledged):
            raise PeerError(f"{door.name} gave an answer that makes no sense")


async def request_kill(door: SchedulerAddress, node: str) -> str:
    """Ask for a node's process to be killed; return what was decided."""
    async with SchedulerSession(door) as visit:
        answer = await visit.request(KillRequest(node, "asked by covey kill"))
        if isinstance(answer, Refused):
            raise PeerError(f"the cluster at {door.name} kills nothing: {answer.reason}", ExitCode.REFUSED)
        if not isinstance(answer, RequestAccepted):
            raise PeerError(f"{door.name} gave an answer that makes no sense")
        return answer.reason


async def request_scale(door: SchedulerAddress, workers: int, servers: int = -1) -> ScaleAccepted:
    """Ask for another number of workers or parameter servers (-1: of the other), and hear what was decided."""
    async with SchedulerSession(door) as visit:
        answer = await visit.request(ScaleRequest(workers, servers=servers))
        if isinstance(answer, Refused):
            raise PeerError(f"the cluster at {door.name} stays as it is: {answer.reason}", ExitCode.REFUSED)
        if not isinstance(answer, ScaleAccepted):
            raise PeerError(f"{door.name} gave an answer that makes no sense")
        return answer
