"""The replicas of a server alone: the test simulates the servers that send their changes."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from tests.parameter_server_workload import WAIT_S
from tests.unit.parameter_server.server_parts import DECLARE, EMPTY, LOWER, PAIR, Call, pack_body, push

from covey.parameter_server import replica_store as replicas_module
from covey.parameter_server.messages import Done, OpenReplication, ParameterMessage, receive_reply, send_message
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replica_store import Replicas
from covey.parameter_server.rows import VersionedRows
from covey.parameter_server.shard_set import ShardSet


class Sender:
    """Server 0, which replicates its rows."""

    def __init__(self, replicas: Replicas, own: VersionedRows) -> None:
        self.own = own
        self.connection, remote = socket.socketpair()
        self.connection.settimeout(WAIT_S)
        request = OpenReplication(0, own.replication_id, own.change_count)
        self.following = Call(lambda: replicas.follow_server(remote, request))
        self.replica_count = self._receive()

    def _receive(self) -> int:
        reply, _ = receive_reply(self.connection)
        assert isinstance(reply, Done)
        return reply.number

    def send(self, message: ParameterMessage, body: Array = EMPTY) -> int:
        send_message(self.connection, message, [body])
        return self._receive()

    def send_all_rows(self) -> int:
        message, arrays = self.own.pack()
        return self.send(message, pack_body(arrays))

    def close(self) -> None:
        self.connection.close()
        with pytest.raises(EOFError):
            self.following.wait()


def own_rows() -> VersionedRows:
    own = VersionedRows(ShardSet(PAIR, 0, LOWER))
    own.apply(DECLARE, EMPTY, owned=True)
    return own


def test_replica_applies_the_changes_of_its_server() -> None:
    replicas, own = Replicas(PAIR), own_rows()
    sender = Sender(replicas, own)
    assert sender.replica_count == -1 and sender.send_all_rows() == 1
    change, body = push(0, 5)
    own.apply(change, body, owned=False)
    assert sender.send(change, body) == 2
    found = replicas.pack_for_restore(0, None)
    expected, arrays = own.pack()
    assert found is not None and found[0].change_count == 2 and found[0].state == expected.state
    assert np.array_equal(pack_body(found[1]), pack_body(arrays))


def test_reconnecting_server_receives_the_change_count_of_its_replica() -> None:
    replicas, own = Replicas(PAIR), own_rows()
    first = Sender(replicas, own)
    first.send_all_rows()
    first.send(*push(0, 5))
    first.close()
    assert Sender(replicas, own).replica_count == 2
    own.reset_replication_id()
    assert Sender(replicas, own).replica_count == -1, "the replica has another replication id"


def test_change_that_cannot_be_acknowledged_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, own = Replicas(PAIR), own_rows()
    sender = Sender(replicas, own)
    sender.send_all_rows()

    def fail(connection: socket.socket, message: ParameterMessage) -> None:
        raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(replicas_module, "send_message", fail)
        change, body = push(0, 5)
        send_message(sender.connection, change, [body])
        with pytest.raises(BrokenPipeError):
            sender.following.wait()
    assert Sender(replicas, own).replica_count == 1


def test_changes_from_before_a_restart_are_refused() -> None:
    replicas = Replicas(PAIR)
    sender = Sender(replicas, own_rows())
    sender.send_all_rows()
    assert replicas.pack_for_restore(0, None) is not None
    send_message(sender.connection, DECLARE)
    with pytest.raises(EOFError, match="has restored its rows"):
        sender.following.wait()


def test_replica_that_cannot_apply_a_change_is_dropped() -> None:
    replicas = Replicas(PAIR)
    sender = Sender(replicas, own_rows())
    sender.send_all_rows()
    sender.send(*push(7, 5))
    with pytest.raises(Exception, match="step 7 cannot be pushed"):
        sender.following.wait()
    assert replicas.pack_for_restore(0, None) is None


def test_replica_is_dropped_on_request() -> None:
    replicas = Replicas(PAIR)
    Sender(replicas, own_rows()).send_all_rows()
    replicas.drop_replica(0)
    replicas.drop_replica(1)
    assert replicas.pack_for_restore(0, None) is None


def test_initial_rows_are_returned_only_if_there_is_no_replica() -> None:
    replicas = Replicas(PAIR)
    initial = replicas.pack_for_restore(0, ShardSet(PAIR, 0, LOWER))
    assert initial is not None and initial[0].change_count == 0
    Sender(replicas, own_rows()).send_all_rows()
    found = replicas.pack_for_restore(0, ShardSet(PAIR, 0, LOWER))
    assert found is not None and found[0].change_count == 1


def test_wait_for_replicas_ends_when_all_exist() -> None:
    replicas = Replicas(PAIR)
    call = Call(lambda: replicas.wait_for_replicas({0}))
    assert call.is_waiting()
    Sender(replicas, own_rows()).send_all_rows()
    call.wait()
    replicas.wait_for_replicas(())
