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

from covey.parameter_server.discovery import RETRY_DELAY_S, FindServer
from covey.parameter_server.messages import (
    Done,
    DropReplica,
    FullReplica,
    OpenReplication,
    ParameterMessage,
    RestoreRows,
    ServerReply,
    receive_reply,
    send_message,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.shard_set import ShardSet

log = logging.getLogger("covey")


class VersionedRows:
    """A server's rows and how far they are: two with the same origin and count are equal."""

    def __init__(self, shelf: ShardSet, origin: str = "", count: int = 0) -> None:
        self.shard_set = shelf
        self.replication_id = origin or secrets.token_hex(8)
        self.change_count = count  # changes so far

    def reset_replication_id(self) -> None:
        """What is here now did not come from changes."""
        self.replication_id = secrets.token_hex(8)


class ReplicationThread:
    """The thread that keeps the copy of a server's own rows up to date. `turn` is the lock around them."""

    def __init__(
        self,
        own: VersionedRows,
        turn: threading.Condition,
        rank: int,
        find: FindServer,
        holder: int,
        before: int | None = None,
    ) -> None:
        self.replicated_count = -1  # changes that the copy has; none yet
        self.holder = holder
        self._own_rows, self._condition, self._rank, self._find_server = own, turn, rank, find
        self.previous_holder = before  # who held the copy so far, and must forget it before this one counts
        self._stopped = False
        self._pending: collections.deque[tuple[ParameterMessage, Array]] = collections.deque()
        self._restart_requested = False
        self._thread = threading.Thread(target=self._run, name="covey copy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def append(self, message: ParameterMessage, body: Array) -> None:
        """A change that was made here; under the lock. At most one for each connection is waiting: its worker waits too."""
        self._pending.append((message, body))
        self._condition.notify_all()

    def restart_sync(self) -> None:
        """The rows are others now: the copy needs all of them. Under the lock."""
        self.replicated_count = -1
        self._restart_requested = True
        self._condition.notify_all()

    def stop(self) -> None:
        """Another holder takes over. Under the lock."""
        self._stopped = self._restart_requested = True
        self._condition.notify_all()

    def _run(self) -> None:
        while not self._stopped:
            try:
                peer = self._find_server(self.holder)
                if peer is not None:
                    with peer.connect() as connection:
                        self._replicate(connection)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                log.info("the copy on server %d is out of reach (%s): everyone waits for it", self.holder, error)
                time.sleep(RETRY_DELAY_S)

    def _replicate(self, connection: socket.socket) -> None:
        with self._condition:  # nobody changes anything meanwhile
            if self._stopped:
                return
            self._restart_requested = False
            send_message(connection, OpenReplication(self._rank, self._own_rows.replication_id, self._own_rows.change_count))
            there = _receive_number(connection)
            missing = self._own_rows.change_count - there
            if there >= 0 and 0 <= missing <= len(self._pending):
                while len(self._pending) > missing:
                    self._pending.popleft()
            else:
                state, arrays = self._own_rows.shard_set.pack()
                send_message(connection, FullReplica(self._own_rows.replication_id, self._own_rows.change_count, state), arrays)
                _receive_number(connection)
                self._pending.clear()
            if self.previous_holder is not None:
                request_from_server(self._find_server, self.previous_holder, DropReplica(self._rank))
                self.previous_holder = None
            self.replicated_count = self._own_rows.change_count - len(self._pending)
            self._condition.notify_all()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._pending or self._restart_requested)
                if self._restart_requested:
                    return
                message, body = self._pending[0]
            send_message(connection, message, [body])
            _receive_number(connection)
            with self._condition:
                if self._restart_requested:
                    return
                self._pending.popleft()
                self.replicated_count += 1
                self._condition.notify_all()


def _receive_number(connection: socket.socket) -> int:
    answer, _ = receive_reply(connection)
    if not isinstance(answer, Done):
        raise EOFError(f"the holder of the copy answered {answer}")
    return answer.number


def request_from_server(
    find: FindServer, server: int, message: ParameterMessage, arrays: Sequence[Array] = ()
) -> tuple[ServerReply, Array] | None:
    """Ask another server, in whichever life it answers; None if it has left."""
    while (peer := find(server)) is not None:
        with contextlib.suppress(OSError, EOFError), peer.connect() as connection:
            send_message(connection, message, arrays)
            return receive_reply(connection)
        time.sleep(RETRY_DELAY_S)
    return None


def fetch_replica(find: FindServer, holders: list[int], server: int) -> tuple[FullReplica, Array, int] | None:
    """A server's rows from their copy, and who held it; None if nobody did. Waits for whoever is away."""
    for holder in holders:
        found = request_from_server(find, holder, RestoreRows(server))
        if found is not None and isinstance(found[0], FullReplica):
            return found[0], found[1], holder
    return None
