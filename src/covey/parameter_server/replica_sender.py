"""Replication of a server's rows to another server, which applies the same changes in the same order.

A server acknowledges a push when the replica holder has it, so pushes wait while the holder is unreachable. A restarted holder
receives all rows. After a broken connection the holder receives the changes that it missed if they are still queued, else all
rows.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import Sharding, replica_holder
from covey.parameter_server.discovery import RETRY_DELAY_S, FindServer
from covey.parameter_server.messages import (
    Done,
    DropReplica,
    FullReplica,
    OpenReplication,
    ParameterMessage,
    ReplicatedChange,
    RestoreRows,
    ServerReply,
    receive_reply,
    send_message,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.rows import Rows

log = logging.getLogger("covey")


class Replication:
    """Applies changes to a server's rows and sends them to the replica holder.

    If replicas are disabled or there is no other server, there is no holder, and changes are only applied here.
    """

    def __init__(self, rows: Rows, find_server: FindServer) -> None:
        self._rows, self._find_server = rows, find_server
        holder = desired_holder(rows.serving, rows.rank, rows.sharding)
        self._thread = ReplicationThread(rows, find_server, holder) if holder is not None else None

    @property
    def holder(self) -> int | None:
        """The server that holds the replica or will receive it; None without replication. The caller holds the lock."""
        return self._thread.holder if self._thread is not None else None

    def start(self, restored_from: int | None = None) -> None:
        """Start to send changes to the replica holder, if there is one. `restored_from` is the server from which the rows were
        restored; if it is not the holder, it gets `DropReplica` once the holder has the rows."""
        if self._thread is not None:
            self._thread.start(restored_from if restored_from != self._thread.holder else None)

    def apply(self, change: ReplicatedChange, body: Array) -> bool:
        """Apply a change and queue it for the replica holder. Return False, and queue nothing, if the rows have the change
        already. Raise `UsageError` or `ValueError` if the change is invalid. The caller holds the lock."""
        if not self._rows.apply(change, body, owned=self._thread is None):
            return False
        if self._thread is not None:
            self._thread.append(change, body)
        return True

    def is_replicated(self, change_count: int) -> bool:
        """Return whether the replica holder has the first `change_count` changes; True if there is no holder. The caller holds
        the lock."""
        return self._thread is None or self._thread.replicated_count >= change_count

    def restart_sync(self) -> None:
        """Let the thread reconnect to the replica holder, if there is one, and send all rows or the changes that the replica
        lacks. The caller holds the lock."""
        if self._thread is not None:
            self._thread.restart_sync()

    def follow_ring(self) -> None:
        """Replace the replica holder if the sharding requires another one, or none. A server that is not in the sharding's ring
        keeps its holder. The caller does not hold the lock."""
        with self._rows.condition:
            sharding, previous = self._rows.sharding, self.holder
            holder = desired_holder(self._rows.serving, self._rows.rank, sharding)
            if holder == previous or self._rows.rank not in sharding.ring:
                return
            if self._thread is not None:
                self._thread.stop()
            self._thread = ReplicationThread(self._rows, self._find_server, holder) if holder is not None else None
            if self._thread is not None:
                self._thread.start(previous)


class ReplicationThread:
    """The thread that keeps the replica on one holder up to date."""

    def __init__(self, rows: Rows, find_server: FindServer, holder: int) -> None:
        self.replicated_count = -1  # changes that the holder has; -1: not known yet
        self.holder = holder
        self._rows, self._find_server = rows, find_server
        self._previous_holder: int | None = None  # its replica is dropped once this holder has one
        self._stopped = False
        self._pending: collections.deque[tuple[ParameterMessage, Array]] = collections.deque()  # not acknowledged yet
        self._restart_requested = False
        self._thread = threading.Thread(target=self._run, name="covey copy", daemon=True)

    def start(self, previous_holder: int | None) -> None:
        """Start the thread. `previous_holder`, unless None, gets `DropReplica` once this holder has the rows."""
        self._previous_holder = previous_holder
        self._thread.start()

    def append(self, message: ParameterMessage, body: Array) -> None:
        """Queue a change for the holder. The caller holds the lock and has notified its condition."""
        self._pending.append((message, body))

    def restart_sync(self) -> None:
        """Let the thread reconnect and send what the replica lacks. The caller holds the lock."""
        self.replicated_count = -1
        self._restart_requested = True
        self._rows.condition.notify_all()

    def stop(self) -> None:
        """Let the thread end; do not wait for it. The caller holds the lock."""
        self._stopped = self._restart_requested = True
        self._rows.condition.notify_all()

    def _run(self) -> None:
        while not self._stopped:
            try:
                endpoint = self._find_server(self.holder)
                if endpoint is not None:
                    with endpoint.connect() as connection:
                        self._replicate(connection)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                log.info("replica on server %d is unreachable: %s; pushes wait for it", self.holder, error)
                time.sleep(RETRY_DELAY_S)

    def _replicate(self, connection: socket.socket) -> None:
        """Bring the replica up to date, then send each change, until a restart or stop is requested. The caller does not hold
        the lock."""
        condition, own = self._rows.condition, self._rows.own
        with condition:  # held during a full sync, so that no rows change
            if self._stopped:
                return
            self._restart_requested = False
            send_message(connection, OpenReplication(self._rows.rank, own.replication_id, own.change_count))
            holder_count = _receive_number(connection)
            missing = own.change_count - holder_count
            if holder_count >= 0 and 0 <= missing <= len(self._pending):
                while len(self._pending) > missing:
                    self._pending.popleft()
            else:
                send_message(connection, *own.pack())
                _receive_number(connection)
                self._pending.clear()
            if self._previous_holder is not None:
                request_from_server(self._find_server, self._previous_holder, DropReplica(self._rows.rank))
                self._previous_holder = None
            self.replicated_count = own.change_count - len(self._pending)
            condition.notify_all()
        while True:
            with condition:
                condition.wait_for(lambda: self._pending or self._restart_requested)
                if self._restart_requested:
                    return
                message, body = self._pending[0]
            send_message(connection, message, [body])
            _receive_number(connection)
            with condition:
                if self._restart_requested:
                    return
                self._pending.popleft()
                self.replicated_count += 1
                condition.notify_all()


def desired_holder(serving: ServingSettings, rank: int, sharding: Sharding) -> int | None:
    """Return the server that should hold the replica of a server's rows; None if replicas are disabled or the ring has no other
    server. The server `rank` may be outside the ring."""
    return replica_holder(rank, {*sharding.ring, rank}) if serving.copies else None


def _receive_number(connection: socket.socket) -> int:
    reply, _ = receive_reply(connection)
    if not isinstance(reply, Done):
        raise EOFError(f"the replica holder replied {reply}")
    return reply.number


def request_from_server(
    find_server: FindServer, server: int, message: ParameterMessage, arrays: Sequence[Array] = ()
) -> tuple[ServerReply, Array] | None:
    """Send a request to another server and return the reply and its arrays; None if that server has left the sharding.
    Reconnect and resend, without a timeout, until the server replies."""
    while (endpoint := find_server(server)) is not None:
        with contextlib.suppress(OSError, EOFError), endpoint.connect() as connection:
            send_message(connection, message, arrays)
            return receive_reply(connection)
        time.sleep(RETRY_DELAY_S)
    return None


def fetch_replica(find_server: FindServer, holders: list[int], server: int) -> tuple[FullReplica, Array, int] | None:
    """Ask `holders` in order for the replica of a server's rows. Return the first replica found, its arrays and its holder;
    None if no holder has one. Wait while a holder is unreachable."""
    for holder in holders:
        found = request_from_server(find_server, holder, RestoreRows(server))
        if found is not None and isinstance(found[0], FullReplica):
            return found[0], found[1], holder
    return None
