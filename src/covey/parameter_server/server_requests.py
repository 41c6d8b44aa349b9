"""A worker's connection to one server, and batches of requests to several servers.

After a broken connection a channel looks up the server, which may have restarted, and resends the request. Arrays are sent from
the caller's memory, so the caller must not change them before the batch is finished.

A blocking batch with little data is sent from the caller's thread if the connections are free. Otherwise one thread per server
sends; these threads transfer in parallel, but waking them takes time.
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

INLINE_BYTES_MAX: Final = 4 << 20  # arrays of a batch, both ways; if they are larger, parallel threads are faster
Arrays = Sequence[Any]

log = logging.getLogger("covey")


class ServerDirectory(Protocol):
    """Access to the newest sharding and to a channel for each server, for `RequestBatch`."""

    def newest_sharding(self) -> Sharding: ...
    def update_sharding(self, sharding: Sharding | None) -> None: ...
    def channel(self, server: int) -> Channel: ...
    def check_size(self, request: PendingRequest) -> None: ...


class PendingRequest(msgspec.Struct, frozen=True):
    """A message for one server, its arrays, and the destination of the reply."""

    server: int
    message: ParameterRequest
    arrays: Arrays = ()
    reply_arrays: Arrays = ()  # memory for the values of `RowValues`
    reply_callback: Callable[[ServerReply, Array], None] | None = None  # called with the reply and its bytes, on any thread


BuildRequests = Callable[[Sharding], list[PendingRequest]]


class RequestBatch:
    """Requests to any number of servers, finished when all have replied.

    If no request has failed but a server replies that the sharding is outdated, all requests are built and sent again.
    `on_finished` is called on an arbitrary thread. With `blocking`, the constructor waits until the batch is finished and
    raises its error. The constructor raises `UsageError` if the arrays of a request are too large.
    """

    def __init__(
        self,
        servers: ServerDirectory,
        build_requests: BuildRequests,
        on_finished: Callable[[RequestBatch], None] | None = None,
        *,
        blocking: bool = False,
    ) -> None:
        self.error: CoveyError | None = None  # the first error of a server
        self.reply_numbers: list[int] = []  # of the `Done` replies, in the order of arrival; 0 for other replies
        self.finished = threading.Event()
        self._servers, self._build_requests, self._on_finished = servers, build_requests, on_finished
        self._lock = threading.Lock()
        self._pending_count = 0
        self._newer_sharding: Sharding | None = None
        self._start_requests(blocking=blocking)
        if blocking:
            self.wait()

    def _start_requests(self, *, blocking: bool = False) -> None:
        requests = self._build_requests(self._servers.newest_sharding())
        for request in requests:
            self._servers.check_size(request)
        self._pending_count, self.reply_numbers, self._newer_sharding = len(requests), [], None
        channels = [self._servers.channel(request.server) for request in requests]
        if not requests:
            self._finish()
        elif not blocking or not self._run_inline(channels, requests):
            for channel, request in zip(channels, requests, strict=True):
                channel.enqueue(request, self)

    def _run_inline(self, channels: list[Channel], requests: list[PendingRequest]) -> bool:
        """Send all requests from this thread, receive the replies, and return True. Return False, and send nothing, if there is
        too much to transfer or a channel is busy."""
        if sum(count_bytes(request.arrays) + count_bytes(request.reply_arrays) for request in requests) > INLINE_BYTES_MAX:
            return False
        with contextlib.ExitStack() as acquired:
            for channel in channels:
                if not channel.acquire():
                    return False
                acquired.callback(channel.release)
            try:
                sent = [channel.try_send(request) for channel, request in zip(channels, requests, strict=True)]
                replies = [
                    c.wait_for_reply(request, sent=was_sent)
                    for c, request, was_sent in zip(channels, requests, sent, strict=True)
                ]
            except BaseException:  # such as an interrupt: a partial reply may be left in any channel
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
    """The connection to one server, and a thread for queued requests. `get_sharding` returns the newest sharding."""

    def __init__(self, server: int, find_server: FindServer, get_sharding: Callable[[], Sharding]) -> None:
        self._server, self._find_server, self._get_sharding = server, find_server, get_sharding
        self._connection: socket.socket | None = None
        self._connection_lock = threading.Lock()  # held for the duration of a request
        # the first one stays until its reply has arrived
        self._requests: collections.deque[tuple[PendingRequest, RequestBatch]] = collections.deque()
        self._queued_requests = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def enqueue(self, request: PendingRequest, batch: RequestBatch) -> None:
        """Queue a request for this channel's thread (FIFO), which passes the reply to the batch."""
        self._requests.append((request, batch))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"covey to server {self._server}", daemon=True)
            self._thread.start()
        self._queued_requests.release()

    def acquire(self) -> bool:
        """Reserve the connection for the caller's thread; return False if it is in use or requests are queued."""
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
                os.close(self._connection.fileno())  # the parent's connection stays open

    def _run(self) -> None:
        while True:
            self._queued_requests.acquire()
            request, batch = self._requests[0]
            with self._connection_lock:
                try:
                    reply = self.wait_for_reply(request, sent=False)
                except Exception as error:  # keep the thread alive and fail the waiting request
                    log.exception("request to server %d failed", self._server)
                    self.close()
                    reply = RequestFailed(f"the request to server {self._server} failed: {error}")
                self._requests.popleft()
            batch.on_reply(reply)

    def try_send(self, request: PendingRequest) -> bool:
        """Send a request if there is a connection; return False if there is none or it is broken. Raise `MessageTooLarge` as
        `send_message`."""
        if self._connection is None:
            return False
        try:
            send_message(self._connection, request.message, request.arrays)
        except OSError:
            self.close()
            return False
        return True

    def wait_for_reply(self, request: PendingRequest, *, sent: bool) -> ServerReply:
        """Send the request unless it was `sent`, pass the reply to the request's callback, and return the reply. Reconnect and
        resend until the server replies. If the server has left the sharding, return `ShardingChanged` without a callback. Raise
        `MessageTooLarge` as `send_message`."""
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
