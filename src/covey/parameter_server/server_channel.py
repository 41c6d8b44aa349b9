"""One server as seen from a worker, and requests under way to several.

Every request can be repeated without harm, so whoever finds a connection broken looks for the server again, in its next life
perhaps, and asks again; the program only waits. Arrays are sent from the caller's memory and received into it.

A caller that has nothing else to do asks all servers in its own thread. What goes on beside the caller's work, and what is
large, is asked by a thread for each server: they move it side by side, but waking them takes its time.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from covey.core.parameter_server.sharding import Sharding
from covey.errors import CoveyError
from covey.parameter_server.discovery import RETRY_DELAY_S, FindServer
from covey.parameter_server.messages import (
    Done,
    ParameterRequest,
    RequestFailed,
    ServerReply,
    ShardingChanged,
    receive_reply,
    send_message,
)
from covey.parameter_server.optimizers import Array

INLINE_BYTES_MAX: Final = 4 << 20  # bytes that the caller's own thread moves: beyond, several threads move them faster
Arrays = Sequence[Any]

log = logging.getLogger("covey")


class ServerDirectory(Protocol):
    """All of them, as seen from a worker."""

    def newest_sharding(self) -> Sharding: ...
    def update_sharding(self, sharding: Sharding | None) -> None: ...
    def channel(self, server: int) -> Channel: ...
    def check_size(self, request: PendingRequest) -> None: ...


class PendingRequest(msgspec.Struct, frozen=True):
    """A message for one server, what goes with it, and where the answer goes."""

    server: int
    message: ParameterRequest
    arrays: Arrays = ()
    reply_arrays: Arrays = ()
    reply_callback: Callable[[ServerReply, Array], None] | None = None  # for an answer whose arrays have no place yet


BuildRequests = Callable[[Sharding], list[PendingRequest]]


class RequestBatch:
    """Requests to one server or more. It is finished when all servers have replied by the same sharding. If slots move before
    that, all requests are sent again, which does no harm. `on_finished` is called once, in some thread. With `here` the
    constructor waits for the end, and sends from the caller's own thread if there are few bytes."""

    def __init__(
        self,
        servers: ServerDirectory,
        build_requests: BuildRequests,
        on_finished: Callable[[RequestBatch], None] | None = None,
        *,
        here: bool = False,
    ) -> None:
        self.error: CoveyError | None = None
        self.reply_numbers: list[int] = []
        self.finished = threading.Event()
        self._servers, self._build_requests, self._on_finished = servers, build_requests, on_finished
        self._lock = threading.Lock()
        self._pending_count = 0
        self._newer_sharding: Sharding | None = None
        self._start_requests(here=here)
        if here:
            self.wait()

    def _start_requests(self, *, here: bool = False) -> None:
        requests = self._build_requests(self._servers.newest_sharding())
        for request in requests:
            self._servers.check_size(request)
        self._pending_count, self.reply_numbers, self._newer_sharding = len(requests), [], None
        channels = [self._servers.channel(request.server) for request in requests]
        if not requests:
            self._finish()
        elif not here or not self._run_inline(channels, requests):
            for channel, request in zip(channels, requests, strict=True):
                channel.enqueue(request, self)

    def _run_inline(self, channels: list[Channel], requests: list[PendingRequest]) -> bool:
        """Ask in this thread: all are sent before the first answer is waited for. False if there is much to move, or others
        are to be asked first."""
        if sum(count_bytes(request.arrays) + count_bytes(request.reply_arrays) for request in requests) > INLINE_BYTES_MAX:
            return False
        with contextlib.ExitStack() as taken:
            for channel in channels:
                if not channel.acquire():
                    return False
                taken.callback(channel.release)
            try:
                sent = [channel.try_send(request) for channel, request in zip(channels, requests, strict=True)]
                replies = [
                    c.wait_for_reply(request, sent=went) for c, request, went in zip(channels, requests, sent, strict=True)
                ]
            except BaseException:  # an interrupt: half an answer may be left in any of them
                for channel in channels:
                    channel.close()
                raise
        for reply in replies:
            self.on_reply(reply)
        return True

    def on_reply(self, reply: ServerReply) -> None:
        with self._lock:
            if isinstance(reply, ShardingChanged):
                self._newer_sharding = reply.sharding
            elif isinstance(reply, RequestFailed):
                self.error = self.error or reply.to_exception()
            else:
                self.reply_numbers.append(reply.number if isinstance(reply, Done) else 0)
            self._pending_count -= 1
            if self._pending_count:
                return
        if self._newer_sharding is None or self.error is not None:
            self._finish()
            return
        self._servers.update_sharding(self._newer_sharding)
        try:
            self._start_requests()
        except CoveyError as error:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self.finished.set()
        if self._on_finished is not None:
            self._on_finished(self)

    def wait(self) -> RequestBatch:
        self.finished.wait()
        if self.error is not None:
            raise self.error
        return self


class Channel:
    """The connection to one server. `get_sharding` returns the newest sharding, in case the server has left."""

    def __init__(self, server: int, find_server: FindServer, get_sharding: Callable[[], Sharding]) -> None:
        self._server, self._find_server, self._get_sharding = server, find_server, get_sharding
        self._connection: socket.socket | None = None
        self._connection_lock = threading.Lock()  # around the connection: one request after the other
        self._requests: collections.deque[tuple[PendingRequest, RequestBatch]] = collections.deque()  # the first is under way
        self._queued_requests = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def enqueue(self, request: PendingRequest, batch: RequestBatch) -> None:
        """Send a request from this channel's thread, after those before it; the batch receives the reply."""
        self._requests.append((request, batch))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"covey to server {self._server}", daemon=True)
            self._thread.start()
        self._queued_requests.release()

    def acquire(self) -> bool:
        """Have the connection for the caller's own thread, unless others are to be asked first."""
        if not self._connection_lock.acquire(blocking=False):
            return False
        if self._requests:
            self._connection_lock.release()
            return False
        return True

    def release(self) -> None:
        self._connection_lock.release()

    def close_in_child(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                os.close(self._connection.fileno())

    def _run(self) -> None:
        while True:
            self._queued_requests.acquire()
            request, batch = self._requests[0]
            with self._connection_lock:
                try:
                    reply = self.wait_for_reply(request, sent=False)
                except Exception as error:  # the thread must live, and whoever waits must hear
                    log.exception("server %d cannot be asked", self._server)
                    self.close()
                    reply = RequestFailed(f"server {self._server} cannot be asked: {error}")
                self._requests.popleft()
            batch.on_reply(reply)

    def try_send(self, request: PendingRequest) -> bool:
        """Send a request over the connection there is; whether that seems to have worked."""
        if self._connection is None:
            return False
        try:
            send_message(self._connection, request.message, request.arrays)
        except OSError:
            self.close()
            return False
        return True

    def wait_for_reply(self, request: PendingRequest, *, sent: bool) -> ServerReply:
        """Return the reply. The request is sent again, if needed to a restarted process of the server."""
        while True:
            try:
                if self._connection is None:
                    endpoint = self._find_server(self._server)
                    if endpoint is None:
                        return ShardingChanged(self._get_sharding())
                    self._connection = endpoint.connect()
                if not sent:
                    send_message(self._connection, request.message, request.arrays)
                reply, body = receive_reply(self._connection, request.reply_arrays)
                if request.reply_callback is not None:
                    request.reply_callback(reply, body)
                return reply
            except (OSError, EOFError, msgspec.MsgspecError):
                sent = False
                self.close()
                time.sleep(RETRY_DELAY_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def count_bytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays)
