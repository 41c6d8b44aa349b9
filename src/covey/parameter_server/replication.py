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
from collections.abc import Sequence

import msgspec

from covey.parameter_server.discovery import AGAIN_S, Find
from covey.parameter_server.messages import Answered, Follow, Forget, Message, Restore, Whole, Yes, receive_answer, send
from covey.parameter_server.optimizers import Array
from covey.parameter_server.shard_set import Shelf

log = logging.getLogger("covey")


class Kept:
    """A server's rows and how far they are: two with the same origin and count are equal."""

    def __init__(self, shelf: Shelf, origin: str = "", count: int = 0) -> None:
        self.shelf = shelf
        self.origin = origin or secrets.token_hex(8)
        self.count = count  # changes so far

    def anew(self) -> None:
        """What is here now did not come from changes."""
        self.origin = secrets.token_hex(8)


class Chain:
    """The thread that keeps the copy of a server's own rows up to date. `turn` is the lock around them."""

    def __init__(
        self,
        own: Kept,
        turn: threading.Condition,
        rank: int,
        find: Find,
        holder: int,
        before: int | None = None,
    ) -> None:
        self.copied = -1  # changes that the copy has; none yet
        self.holder = holder
        self._own, self._turn, self._rank, self._find = own, turn, rank, find
        self.before = before  # who held the copy so far, and must forget it before this one counts
        self._over = False
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

    def stop(self) -> None:
        """Another holder takes over. Under the lock."""
        self._over = self._again = True
        self._turn.notify_all()

    def _run(self) -> None:
        while not self._over:
            try:
                peer = self._find(self.holder)
                if peer is not None:
                    with peer.connect() as connection:
                        self._follow(connection)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                log.info("the copy on server %d is out of reach (%s): everyone waits for it", self.holder, error)
                time.sleep(AGAIN_S)

    def _follow(self, connection: socket.socket) -> None:
        with self._turn:  # nobody changes anything meanwhile
            if self._over:
                return
            self._again = False
            send(connection, Follow(self._rank, self._own.origin, self._own.count))
            there = _number(connection)
            missing = self._own.count - there
            if there >= 0 and 0 <= missing <= len(self._pending):
                while len(self._pending) > missing:
                    self._pending.popleft()
            else:
                state, arrays = self._own.shelf.pack()
                send(connection, Whole(self._own.origin, self._own.count, state), arrays)
                _number(connection)
                self._pending.clear()
            if self.before is not None:
                ask(self._find, self.before, Forget(self._rank))
                self.before = None
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


def ask(find: Find, server: int, message: Message, arrays: Sequence[Array] = ()) -> tuple[Answered, Array] | None:
    """Ask another server, in whichever life it answers; None if it has left."""
    while (peer := find(server)) is not None:
        with contextlib.suppress(OSError, EOFError), peer.connect() as connection:
            send(connection, message, arrays)
            return receive_answer(connection)
        time.sleep(AGAIN_S)
    return None


def restore(find: Find, holders: list[int], server: int) -> tuple[Whole, Array, int] | None:
    """A server's rows from their copy, and who held it; None if nobody did. Waits for whoever is away."""
    for holder in holders:
        found = ask(find, holder, Restore(server))
        if found is not None and isinstance(found[0], Whole):
            return found[0], found[1], holder
    return None
