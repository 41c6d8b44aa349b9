"""The copies of other servers' rows that a server holds: it repeats what they do, and gives them back to their next life."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection

from covey.core.parameter_server.settings import ServingSettings
from covey.parameter_server.messages import (
    DeclareParameter,
    DetachSlots,
    Done,
    FullReplica,
    HandOverSlots,
    OpenReplication,
    PushGradients,
    ReplicatedChange,
    receive_request,
    send_message,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replication import VersionedRows
from covey.parameter_server.shard_set import ShardSet


class Replicas:
    """Copies by server, around which is a lock of their own: two servers may send each other all of their rows at once."""

    def __init__(self, serving: ServingSettings) -> None:
        self._serving = serving
        self._replicas: dict[int, VersionedRows] = {}
        self._condition = threading.Condition()

    def drop_replica(self, server: int) -> None:
        with self._condition:
            self._replicas.pop(server, None)

    def wait_for_replicas(self, servers: Collection[int]) -> None:
        """Until the rows of all of these are here."""
        with self._condition:
            self._condition.wait_for(lambda: set(servers) <= self._replicas.keys())

    def pack_for_restore(self, server: int, otherwise: ShardSet | None) -> tuple[FullReplica, list[Array]] | None:
        """A server's rows, for its next life; `otherwise` is what it began with, if it died before it had a copy."""
        with self._condition:
            kept = self._replicas.get(server)
            if kept is None and otherwise is not None:
                kept = VersionedRows(otherwise)
            if kept is None:
                return None
            kept.reset_replication_id()  # what is still on its way from the life before does not count
            state, arrays = kept.shard_set.pack()
            return FullReplica(kept.replication_id, kept.change_count, state), arrays

    def follow_server(self, connection: socket.socket, asked: OpenReplication) -> None:
        """Do what another server did, in its order, until it goes away."""
        kept = self._replicas.get(asked.server)
        origin = asked.replication_id
        same = kept is not None and kept.replication_id == origin
        send_message(connection, Done(kept.change_count if same and kept is not None else -1))
        while True:
            message, body = receive_request(connection, 1 << 62)
            with self._condition:
                if not isinstance(message, FullReplica) and (kept is None or kept.replication_id != origin):
                    raise EOFError("the next life of that server has taken its rows back")
                if isinstance(message, FullReplica):
                    kept = VersionedRows(ShardSet(self._serving, asked.server), message.replication_id, message.change_count)
                    kept.shard_set.unpack(message.state, body)
                    self._replicas[asked.server] = kept
                    self._condition.notify_all()
                    send_message(connection, Done(kept.change_count))
                else:
                    assert kept is not None and isinstance(message, ReplicatedChange)
                    kept.change_count += 1
                    send_message(
                        connection, Done(kept.change_count)
                    )  # it is here: who asks for these rows waits until it is done, too
                    try:
                        _apply_change(kept.shard_set, message, body)
                    except BaseException:  # a copy that cannot follow is none: all rows are sent again
                        self._replicas.pop(asked.server, None)
                        raise


def _apply_change(shelf: ShardSet, message: ReplicatedChange, body: Array) -> None:
    """What another server did with its rows, done with their copy."""
    if isinstance(message, DeclareParameter):
        shelf.declare(message.spec, body)
    elif isinstance(message, PushGradients):
        shelf.push(message, body, owned=True)
    elif isinstance(message, HandOverSlots):
        shelf.add_slots(message.state, body)
    elif isinstance(message, DetachSlots):
        shelf.detach_slots(message.slots)
    else:
        shelf.release_slots(message.slots)
