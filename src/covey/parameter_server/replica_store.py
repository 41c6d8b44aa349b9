"""Replicas that a server holds of other servers' rows. It applies the changes that these servers send, and returns the rows to
a restarted server."""

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
    """Replicas by server. They have a separate lock, because two servers may send each other all their rows at the same time,
    each while it holds the lock of its own `Rows`. Callers do not hold that lock."""

    def __init__(self, serving: ServingSettings) -> None:
        self._serving = serving
        self._replicas: dict[int, VersionedRows] = {}
        self._condition = threading.Condition()

    def drop_replica(self, server: int) -> None:
        with self._condition:
            self._replicas.pop(server, None)

    def wait_for_replicas(self, servers: Collection[int]) -> None:
        """Wait, without a timeout, until the replicas of all these servers are here."""
        with self._condition:
            self._condition.wait_for(lambda: set(servers) <= self._replicas.keys())

    def pack_for_restore(self, server: int, initial: ShardSet | None) -> tuple[FullReplica, list[Array]] | None:
        """Return the replica of a restarted server's rows; if there is none, `initial`, which may be None. The replica gets a
        new replication id."""
        with self._condition:
            replica = self._replicas.get(server)
            if replica is None and initial is not None:
                replica = VersionedRows(initial)
            if replica is None:
                return None
            replica.reset_replication_id()  # rejects changes of the server's former process
            return replica.pack()

    def follow_server(self, connection: socket.socket, request: OpenReplication) -> None:
        """Apply the changes of another server in order until the connection ends; then raise `EOFError` or `OSError`. Raise
        `EOFError` too if a newer process of that server has restored its rows. If a change cannot be applied, drop the replica
        and raise the error."""
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
