"""Replicas of other servers' rows, which those servers update by sending their changes, and from which a restarted server
restores its rows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection

from covey.core.parameter_server.settings import ServingSettings
from covey.parameter_server.messages import (
    Done,
    FullReplica,
    OpenReplication,
    ReplicatedChange,
    receive_request,
    send_message,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.rows import VersionedRows
from covey.parameter_server.shard_set import ShardSet


class Replicas:
    """The replicas that a server holds, by owner. They have a separate lock, because two servers may send each other all their
    rows at the same time, each while it holds the lock of its own `Rows`. Callers must not hold the lock of `Rows`."""

    def __init__(self, serving: ServingSettings) -> None:
        self._serving = serving
        self._replicas: dict[int, VersionedRows] = {}
        self._condition = threading.Condition()

    def drop_replica(self, server: int) -> None:
        with self._condition:
            self._replicas.pop(server, None)

    def wait_for_replicas(self, servers: Collection[int]) -> None:
        """Wait, without a timeout, until this server has the replicas of all `servers`."""
        with self._condition:
            self._condition.wait_for(lambda: set(servers) <= self._replicas.keys())

    def pack_for_restore(self, server: int, initial: ShardSet | None) -> tuple[FullReplica, list[Array]] | None:
        """Return the replica of a server's rows as message and arrays, with a new replication id. If there is no replica,
        return `initial` in the same form, or None if `initial` is None."""
        with self._condition:
            replica = self._replicas.get(server)
            if replica is None and initial is not None:
                replica = VersionedRows(initial)
            if replica is None:
                return None
            replica.reset_replication_id()  # rejects changes of the server's former process
            return replica.pack()

    def follow_server(self, connection: socket.socket, request: OpenReplication) -> None:
        """Apply the changes that another server sends, until the connection ends; then raise `EOFError` or `OSError`. Raise
        `EOFError` too if a newer process of that server has restored its rows from the replica. If a change cannot be applied,
        drop the replica and raise the error."""
        replica = self._replicas.get(request.server)
        is_same = replica is not None and replica.replication_id == request.replication_id
        send_message(connection, Done(replica.change_count if is_same and replica is not None else -1))
        while True:
            message, body = receive_request(connection, 1 << 62)
            with self._condition:
                if isinstance(message, FullReplica):
                    replica = VersionedRows(ShardSet(self._serving, request.server))
                    replica.restore(message, body)
                    self._replicas[request.server] = replica
                    self._condition.notify_all()
                    send_message(connection, Done(replica.change_count))
                    continue
                if replica is None or replica.replication_id != request.replication_id:
                    raise EOFError("a newer process of that server has restored its rows")
                assert isinstance(message, ReplicatedChange)
                # Acknowledged before it is applied: the lock delays requests for these rows until it is.
                send_message(connection, Done(replica.change_count + 1))
                try:
                    replica.apply(message, body, owned=True)
                except BaseException:  # the replica is now inconsistent: the server must send all rows again
                    self._replicas.pop(request.server, None)
                    raise
