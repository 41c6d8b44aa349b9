"""Replication alone: the test simulates the replica holder."""

from __future__ import annotations

import pytest
from tests.unit.parameter_server.server_parts import DECLARE, EMPTY, PAIR, Call, Peer, all_slots, halves, push

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import Sharding
from covey.errors import UsageError
from covey.parameter_server.messages import Done, DropReplica, FullReplica, OpenReplication, ReplicatedChange, RestoreRows
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replica_sender import Replication, desired_holder, fetch_replica
from covey.parameter_server.rows import Rows


class ReplicatedServer:
    """Server 0, whose replica is on another server."""

    def __init__(self, sharding: Sharding | None = None) -> None:
        self.peer = Peer()
        self.rows = Rows(PAIR, 0, sharding or halves())
        self.replication = Replication(self.rows, self.peer.find)

    def apply(self, change: ReplicatedChange, body: Array = EMPTY) -> None:
        with self.rows.condition:
            assert self.replication.apply(change, body)

    def full_sync(self, replica_count: int = -1) -> FullReplica:
        """Accept a connection and receive all rows."""
        self.peer.accept()
        request, _ = self.peer.receive()
        assert request == OpenReplication(0, self.rows.own.replication_id, self.rows.own.change_count)
        self.peer.reply(Done(replica_count))
        replica, _ = self.peer.receive()
        assert isinstance(replica, FullReplica)
        self.peer.reply(Done(replica.change_count))
        return replica

    def wait_replicated(self, change_count: int) -> Call:
        def wait() -> None:
            with self.rows.condition:
                self.rows.condition.wait_for(lambda: self.replication.is_replicated(change_count))

        return Call(wait)


@pytest.mark.parametrize(
    ("ring", "copies", "holder"), [((0, 1, 2), 1, 2), ((0, 1, 2), 0, None), ((0, 2), 1, 2), ((1,), 1, None), ((0, 1), 1, 0)]
)
def test_replica_holder_is_the_next_server_of_the_ring(ring: tuple[int, ...], copies: int, holder: int | None) -> None:
    serving = ServingSettings(servers=3, workers=1, copies=copies)
    assert desired_holder(serving, 1, Sharding(0, (1,) * 256, ring)) == holder


def test_without_a_holder_every_change_is_replicated() -> None:
    rows = Rows(PAIR, 0, all_slots())
    replication = Replication(rows, Peer().find)
    replication.start()
    with rows.condition:
        assert replication.holder is None and replication.apply(DECLARE, EMPTY) and replication.is_replicated(99)


def test_changes_are_sent_in_order_after_all_rows() -> None:
    server = ReplicatedServer()
    server.apply(DECLARE)
    server.replication.start()
    first = server.wait_replicated(1)
    assert server.full_sync().change_count == 1
    first.wait()
    for step in range(2):
        server.apply(*push(step, 5))
    both = server.wait_replicated(3)
    for step in range(2):
        assert both.is_waiting()
        message, body = server.peer.receive()
        assert message == push(step, 5)[0] and body.nbytes == 12
        server.peer.reply(Done(2 + step))
    both.wait()


def test_repeated_or_refused_change_is_not_sent() -> None:
    server = ReplicatedServer()
    server.apply(DECLARE)
    server.replication.start()
    server.full_sync()
    with server.rows.condition:
        assert not server.replication.apply(DECLARE, EMPTY)
        with pytest.raises(UsageError):
            server.replication.apply(*push(7, 5))
    server.apply(*push(0, 5))
    assert server.peer.receive()[0] == push(0, 5)[0]


def test_missed_changes_are_sent_again_after_a_broken_connection() -> None:
    server = ReplicatedServer()
    server.replication.start()
    server.full_sync()
    server.apply(DECLARE)
    assert server.peer.receive()[0] == DECLARE
    assert server.peer.connection is not None
    server.peer.connection.close()  # without a reply
    server.peer.accept()
    server.peer.receive()
    server.peer.reply(Done(0))
    assert server.peer.receive()[0] == DECLARE
    server.peer.reply(Done(1))
    server.wait_replicated(1).wait()


def test_change_that_the_replica_has_is_not_sent_again() -> None:
    server = ReplicatedServer()
    server.replication.start()
    server.full_sync()
    server.apply(DECLARE)
    server.peer.receive()
    assert server.peer.connection is not None
    server.peer.connection.close()
    server.peer.accept()
    server.peer.receive()
    server.peer.reply(Done(1))
    server.wait_replicated(1).wait()


def test_restart_sync_sends_all_rows_again() -> None:
    server = ReplicatedServer()
    server.replication.start()
    server.full_sync()
    server.wait_replicated(0).wait()
    with server.rows.condition:
        server.replication.restart_sync()
        assert not server.replication.is_replicated(0)
    server.full_sync()
    server.wait_replicated(0).wait()


def test_previous_holder_drops_its_replica_once_the_new_holder_has_one() -> None:
    server = ReplicatedServer()
    server.replication.start(restored_from=2)
    server.full_sync()
    replicated = server.wait_replicated(0)
    server.peer.accept()
    assert server.peer.receive()[0] == DropReplica(0) and replicated.is_waiting()
    server.peer.reply(Done())
    replicated.wait()


def test_holder_that_restored_the_rows_keeps_its_replica() -> None:
    server = ReplicatedServer()
    server.replication.start(restored_from=1)
    server.full_sync()
    server.wait_replicated(0).wait()


def test_new_holder_of_the_ring_receives_all_rows() -> None:
    server = ReplicatedServer()
    server.replication.start()
    server.full_sync()
    server.wait_replicated(0).wait()
    server.replication.follow_ring()  # unchanged
    assert server.replication.holder == 1
    with server.rows.condition:
        server.rows.adopt(Sharding(1, server.rows.sharding.owners, (0, 2), (1,)))
    server.replication.follow_ring()
    assert server.replication.holder == 2 and not server.replication.is_replicated(0)
    server.full_sync()
    server.peer.accept()
    assert server.peer.receive()[0] == DropReplica(0), "sent to the previous holder"
    server.peer.reply(Done())
    server.wait_replicated(0).wait()


def test_server_that_leaves_the_ring_keeps_its_holder() -> None:
    server = ReplicatedServer()
    with server.rows.condition:
        server.rows.adopt(Sharding(1, (2,) * 256, (2, 3), (0,)))
    server.replication.follow_ring()
    assert server.replication.holder == 1


def test_rows_are_fetched_from_the_first_server_that_has_a_replica() -> None:
    peer = Peer()
    call = Call(lambda: fetch_replica(peer.find, [1, 2], 0))
    for reply in (Done(), FullReplica("id", 4, [])):
        peer.accept()
        assert peer.receive()[0] == RestoreRows(0)
        peer.reply(reply)
    found = call.wait()
    assert isinstance(found, tuple) and (found[0], found[2]) == (FullReplica("id", 4, []), 2)


def test_no_replica_is_requested_from_servers_that_have_left() -> None:
    assert fetch_replica(lambda server: None, [1, 2], 0) is None
