"""The copy of a server's rows on another server: everything that changes them is done there too, in the same order.

A worker hears that its gradients are safe when the copy has them. While the holder of the copy is away, everyone waits for
it; when it is back it receives all rows once, or, if it was only the connection that broke, what it missed.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from covey.params.messages import (
    Follow,
    Message,
    Renew,
    Restore,
    Whole,
    Yes,
    receive_answer,
    send,
)
from covey.params.optimizers import Array
from covey.params.peers import AGAIN_S, Peer
from covey.params.shard import Shard

log = logging.getLogger("covey")


class Kept:
    """A shard and how far it is: two with the same origin and count are equal."""

    def __init__(self, shard: Shard, origin: str = "", count: int = 0) -> None:
        self.shard = shard
        self.origin = origin or secrets.token_hex(8)
        self.count = count  # changes so far

    def anew(self) -> None:
        """What is in the shard now did not come from changes."""
        self.origin = secrets.token_hex(8)


class Chain:
    """The thread that keeps the copy of a server's own rows up to date. `turn` is the lock around them."""

    def __init__(
        self,
        own: Kept,
        turn: threading.Condition,
        rank: int,
        find: Callable[[int], Peer],
        holder: int,
    ) -> None:
        self.copied = 0  # changes that the copy has
        self._own, self._turn, self._rank = own, turn, rank
        self._find, self._holder = find, holder
        self._pending: collections.deque[tuple[Message, Array]] = collections.deque()
        self._again = False
        self._thread = threading.Thread(target=self._run, name="covey copy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def append(self, message: Message, body: Array) -> None:
        """A change that was made here; under the lock. At most one for each connection is waiting: its worker waits too."""
        self._pending.append((message, body))
        self._turn.notify_all()

    def begin_again(self) -> None:
        """The rows are others now: the copy needs all of them. Under the lock."""
        self.copied = -1
        self._again = True
        self._turn.notify_all()

    def _run(self) -> None:
        while True:
            try:
                with self._find(self._holder).connect() as connection:
                    self._follow(connection)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                log.info("the copy on server %d is out of reach (%s): everyone waits for it", self._holder, error)
                time.sleep(AGAIN_S)

    def _follow(self, connection: socket.socket) -> None:
        with self._turn:  # nobody changes anything meanwhile
            self._again = False
            send(connection, Follow(self._rank, self._own.origin, self._own.count))
            there = _number(connection)
            missing = self._own.count - there
            if there >= 0 and 0 <= missing <= len(self._pending):
                while len(self._pending) > missing:
                    self._pending.popleft()
            else:
                state, arrays = self._own.shard.pack()
                send(connection, Whole(self._own.origin, self._own.count, state), arrays)
                _number(connection)
                self._pending.clear()
            self.copied = self._own.count - len(self._pending)
            self._turn.notify_all()
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._pending or self._again)
                if self._again:
                    return
                message, body = self._pending[0]
            send(connection, message, [body])
            _number(connection)
            with self._turn:
                if self._again:
                    return
                self._pending.popleft()
                self.copied += 1
                self._turn.notify_all()


def _number(connection: socket.socket) -> int:
    answer, _ = receive_answer(connection)
    if not isinstance(answer, Yes):
        raise EOFError(f"the holder of the copy answered {answer}")
    return answer.number


def renew(find: Callable[[int], Peer], server: int) -> None:
    """Have a server send its rows to the holder of their copy, who is new. Waits for a server that is away."""
    while True:
        with contextlib.suppress(OSError, EOFError), find(server).connect() as connection:
            send(connection, Renew())
            receive_answer(connection)
            return
        time.sleep(AGAIN_S)


def restore(find: Callable[[int], Peer], holder: int, server: int) -> tuple[Whole, Array] | None:
    """A server's rows from their copy; None if the holder has none. Waits for a holder that is away."""
    while True:
        with contextlib.suppress(OSError, EOFError), find(holder).connect() as connection:
            send(connection, Restore(server))
            answer, body = receive_answer(connection)
            return (answer, body) if isinstance(answer, Whole) else None
        time.sleep(AGAIN_S)
