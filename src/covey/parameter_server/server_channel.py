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
from covey.parameter_server.discovery import AGAIN_S, Find
from covey.parameter_server.messages import Answered, Moved, No, Request, Yes, receive_answer, send
from covey.parameter_server.optimizers import Array

HERE_MAX: Final = 4 << 20  # bytes that the caller's own thread moves: beyond, several threads move them faster
Arrays = Sequence[Any]

log = logging.getLogger("covey")


class Servers(Protocol):
    """All of them, as seen from a worker."""

    def sharing(self) -> Sharding: ...
    def learn(self, sharing: Sharding | None) -> None: ...
    def channel(self, server: int) -> Channel: ...
    def check_size(self, asked: Asking) -> None: ...


class Asking(msgspec.Struct, frozen=True):
    """A message for one server, what goes with it, and where the answer goes."""

    server: int
    message: Request
    arrays: Arrays = ()
    into: Arrays = ()
    heard: Callable[[Answered, Array], None] | None = None  # for an answer whose arrays have no place yet


Make = Callable[[Sharding], list[Asking]]


class Work:
    """Requests under way, to one server or more. It is over when all have answered by the same sharing; if rows moved
    meanwhile, all are asked again, which does no harm. `done` is called once, in some thread. With `here` the
    constructor waits for the end, and asks in the caller's own thread if there is little to move."""

    def __init__(self, servers: Servers, make: Make, done: Callable[[Work], None] | None = None, *, here: bool = False) -> None:
        self.error: CoveyError | None = None
        self.numbers: list[int] = []
        self.over = threading.Event()
        self._servers, self._make, self._done = servers, make, done
        self._lock = threading.Lock()
        self._left = 0
        self._moved: Sharding | None = None
        self._begin(here=here)
        if here:
            self.wait()

    def _begin(self, *, here: bool = False) -> None:
        asked = self._make(self._servers.sharing())
        for one in asked:
            self._servers.check_size(one)
        self._left, self.numbers, self._moved = len(asked), [], None
        channels = [self._servers.channel(one.server) for one in asked]
        if not asked:
            self._finish()
        elif not here or not self._ask_here(channels, asked):
            for channel, one in zip(channels, asked, strict=True):
                channel.ask(one, self)

    def _ask_here(self, channels: list[Channel], asked: list[Asking]) -> bool:
        """Ask in this thread: all are sent before the first answer is waited for. False if there is much to move, or others
        are to be asked first."""
        if sum(size_of(one.arrays) + size_of(one.into) for one in asked) > HERE_MAX:
            return False
        with contextlib.ExitStack() as taken:
            for channel in channels:
                if not channel.take():
                    return False
                taken.callback(channel.leave)
            try:
                sent = [channel.send(one) for channel, one in zip(channels, asked, strict=True)]
                answers = [c.answer(one, sent=went) for c, one, went in zip(channels, asked, sent, strict=True)]
            except BaseException:  # an interrupt: half an answer may be left in any of them
                for channel in channels:
                    channel.close()
                raise
        for answer in answers:
            self.answered(answer)
        return True

    def answered(self, answer: Answered) -> None:
        with self._lock:
            if isinstance(answer, Moved):
                self._moved = answer.sharing
            elif isinstance(answer, No):
                self.error = self.error or answer.error()
            else:
                self.numbers.append(answer.number if isinstance(answer, Yes) else 0)
            self._left -= 1
            if self._left:
                return
        if self._moved is None or self.error is not None:
            self._finish()
            return
        self._servers.learn(self._moved)
        try:
            self._begin()
        except CoveyError as error:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self.over.set()
        if self._done is not None:
            self._done(self)

    def wait(self) -> Work:
        self.over.wait()
        if self.error is not None:
            raise self.error
        return self


class Channel:
    """One server, as seen from here. `gone` says how rows are shared without it."""

    def __init__(self, server: int, find: Find, gone: Callable[[], Sharding]) -> None:
        self._server, self._find, self._gone = server, find, gone
        self._connection: socket.socket | None = None
        self._turn = threading.Lock()  # around the connection: one request after the other
        self._requests: collections.deque[tuple[Asking, Work]] = collections.deque()  # the first is under way
        self._news = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def ask(self, asked: Asking, work: Work) -> None:
        """In its turn, by this channel's thread; the work hears the answer."""
        self._requests.append((asked, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"covey to server {self._server}", daemon=True)
            self._thread.start()
        self._news.release()

    def take(self) -> bool:
        """Have the connection for the caller's own thread, unless others are to be asked first."""
        if not self._turn.acquire(blocking=False):
            return False
        if self._requests:
            self._turn.release()
            return False
        return True

    def leave(self) -> None:
        self._turn.release()

    def close_in_child(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                os.close(self._connection.fileno())

    def _run(self) -> None:
        while True:
            self._news.acquire()
            asked, work = self._requests[0]
            with self._turn:
                try:
                    answer = self.answer(asked, sent=False)
                except Exception as error:  # the thread must live, and whoever waits must hear
                    log.exception("server %d cannot be asked", self._server)
                    self.close()
                    answer = No(f"server {self._server} cannot be asked: {error}")
                self._requests.popleft()
            work.answered(answer)

    def send(self, asked: Asking) -> bool:
        """Send a request over the connection there is; whether that seems to have worked."""
        if self._connection is None:
            return False
        try:
            send(self._connection, asked.message, asked.arrays)
        except OSError:
            self.close()
            return False
        return True

    def answer(self, asked: Asking, *, sent: bool) -> Answered:
        """The answer, from whichever life of the server gives one."""
        while True:
            try:
                if self._connection is None:
                    peer = self._find(self._server)
                    if peer is None:
                        return Moved(self._gone())
                    self._connection = peer.connect()
                if not sent:
                    send(self._connection, asked.message, asked.arrays)
                answer, body = receive_answer(self._connection, asked.into)
                if asked.heard is not None:
                    asked.heard(answer, body)
                return answer
            except (OSError, EOFError, msgspec.MsgspecError):
                sent = False
                self.close()
                time.sleep(AGAIN_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def size_of(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays)
