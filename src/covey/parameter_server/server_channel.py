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
    def update_sharding(self, sharing: Sharding | None) -> None: ...
    def channel(self, server: int) -> Channel: ...
    def check_size(self, asked: PendingRequest) -> None: ...


class PendingRequest(msgspec.Struct, frozen=True):
    """A message for one server, what goes with it, and where the answer goes."""

    server: int
    message: ParameterRequest
    arrays: Arrays = ()
    reply_arrays: Arrays = ()
    reply_callback: Callable[[ServerReply, Array], None] | None = None  # for an answer whose arrays have no place yet


BuildRequests = Callable[[Sharding], list[PendingRequest]]


class RequestBatch:
    """Requests under way, to one server or more. It is over when all have answered by the same sharing; if rows moved
    meanwhile, all are asked again, which does no harm. `done` is called once, in some thread. With `here` the
    constructor waits for the end, and asks in the caller's own thread if there is little to move."""

    def __init__(
        self,
        servers: ServerDirectory,
        make: BuildRequests,
        done: Callable[[RequestBatch], None] | None = None,
        *,
        here: bool = False,
    ) -> None:
        self.error: CoveyError | None = None
        self.reply_numbers: list[int] = []
        self.finished = threading.Event()
        self._servers, self._build_requests, self._on_finished = servers, make, done
        self._lock = threading.Lock()
        self._pending_count = 0
        self._newer_sharding: Sharding | None = None
        self._start_requests(here=here)
        if here:
            self.wait()

    def _start_requests(self, *, here: bool = False) -> None:
        asked = self._build_requests(self._servers.newest_sharding())
        for one in asked:
            self._servers.check_size(one)
        self._pending_count, self.reply_numbers, self._newer_sharding = len(asked), [], None
        channels = [self._servers.channel(one.server) for one in asked]
        if not asked:
            self._finish()
        elif not here or not self._run_inline(channels, asked):
            for channel, one in zip(channels, asked, strict=True):
                channel.enqueue(one, self)

    def _run_inline(self, channels: list[Channel], asked: list[PendingRequest]) -> bool:
        """Ask in this thread: all are sent before the first answer is waited for. False if there is much to move, or others
        are to be asked first."""
        if sum(count_bytes(one.arrays) + count_bytes(one.reply_arrays) for one in asked) > INLINE_BYTES_MAX:
            return False
        with contextlib.ExitStack() as taken:
            for channel in channels:
                if not channel.acquire():
                    return False
                taken.callback(channel.release)
            try:
                sent = [channel.try_send(one) for channel, one in zip(channels, asked, strict=True)]
                answers = [c.wait_for_answer(one, sent=went) for c, one, went in zip(channels, asked, sent, strict=True)]
            except BaseException:  # an interrupt: half an answer may be left in any of them
                for channel in channels:
                    channel.close()
                raise
        for answer in answers:
            self.on_reply(answer)
        return True

    def on_reply(self, answer: ServerReply) -> None:
        with self._lock:
            if isinstance(answer, ShardingChanged):
                self._newer_sharding = answer.sharding
            elif isinstance(answer, RequestFailed):
                self.error = self.error or answer.to_exception()
            else:
                self.reply_numbers.append(answer.number if isinstance(answer, Done) else 0)
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
    """One server, as seen from here. `gone` says how rows are shared without it."""

    def __init__(self, server: int, find: FindServer, gone: Callable[[], Sharding]) -> None:
        self._server, self._find_server, self._get_sharding = server, find, gone
        self._connection: socket.socket | None = None
        self._connection_lock = threading.Lock()  # around the connection: one request after the other
        self._requests: collections.deque[tuple[PendingRequest, RequestBatch]] = collections.deque()  # the first is under way
        self._queued_requests = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def enqueue(self, asked: PendingRequest, work: RequestBatch) -> None:
        """In its turn, by this channel's thread; the work hears the answer."""
        self._requests.append((asked, work))
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
            asked, work = self._requests[0]
            with self._connection_lock:
                try:
                    answer = self.wait_for_answer(asked, sent=False)
                except Exception as error:  # the thread must live, and whoever waits must hear
                    log.exception("server %d cannot be asked", self._server)
                    self.close()
                    answer = RequestFailed(f"server {self._server} cannot be asked: {error}")
                self._requests.popleft()
            work.on_reply(answer)

    def try_send(self, asked: PendingRequest) -> bool:
        """Send a request over the connection there is; whether that seems to have worked."""
        if self._connection is None:
            return False
        try:
            send_message(self._connection, asked.message, asked.arrays)
        except OSError:
            self.close()
            return False
        return True

    def wait_for_answer(self, asked: PendingRequest, *, sent: bool) -> ServerReply:
        """The answer, from whichever life of the server gives one."""
        while True:
            try:
                if self._connection is None:
                    peer = self._find_server(self._server)
                    if peer is None:
                        return ShardingChanged(self._get_sharding())
                    self._connection = peer.connect()
                if not sent:
                    send_message(self._connection, asked.message, asked.arrays)
                answer, body = receive_reply(self._connection, asked.reply_arrays)
                if asked.reply_callback is not None:
                    asked.reply_callback(answer, body)
                return answer
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
