"""Replication alone: the test plays the replica holder."""

from __future__ import annotations

import pytest
from tests.unit.parameter_server.server_parts import DECLARE, EMPTY, PAIR, Call, Peer, all_slots, halves, push

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import Sharding
from covey.errors import UsageError
from covey.parameter_server.messages import Done, DropReplica, FullReplica, OpenReplication, ReplicatedChange, RestoreRows
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replication import Replication, desired_holder, fetch_replica
from covey.parameter_server.rows import Rows


class Replicated:
    """Rows of server 0, whose replica is on another server."""

    def __init__(self, sharding: Sharding | None = None) -> None:
        self.peer = Peer()
        self.rows = Rows(PAIR, 0, sharding or halves())
        self.replication = Replication(self.rows, self.peer.find)

    def apply(self, change: ReplicatedChange, body: Array = EMPTY) -> None:
        with self.rows.condition:
            assert self.replication.apply(change, body)

    def full_sync(self, replica_count: int = -1) -> FullReplica:
        """Accept a connection, and let the holder receive all rows."""
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


def test_without_a_holder_every_change_counts_as_replicated() -> None:
    rows = Rows(PAIR, 0, all_slots())
    replication = Replication(rows, Peer().find)
    replication.start()
    with rows.condition:
        assert replication.holder is None and replication.apply(DECLARE, EMPTY) and replication.is_replicated(99)


def test_changes_are_sent_in_order_after_all_rows() -> None:
    made = Replicated()
    made.apply(DECLARE)
    made.replication.start()
    first = made.wait_replicated(1)
    assert made.full_sync().change_count == 1
    first.wait()
    for step in range(2):
        made.apply(*push(step, 5))
    both = made.wait_replicated(3)
    for step in range(2):
        assert both.is_waiting()
        message, body = made.peer.receive()
        assert message == push(step, 5)[0] and body.nbytes == 12
        made.peer.reply(Done(2 + step))
    both.wait()


def test_change_that_was_applied_before_or_refused_is_not_sent() -> None:
    made = Replicated()
    made.apply(DECLARE)
    made.replication.start()
    made.full_sync()
    with made.rows.condition:
        assert not made.replication.apply(DECLARE, EMPTY)
        with pytest.raises(UsageError):
            made.replication.apply(*push(7, 5))
    made.apply(*push(0, 5))
    assert made.peer.receive()[0] == push(0, 5)[0]


def test_missed_changes_are_sent_again_after_the_connection_broke() -> None:
    made = Replicated()
    made.replication.start()
    made.full_sync()
    made.apply(DECLARE)
    assert made.peer.receive()[0] == DECLARE
    assert made.peer.connection is not None
    made.peer.connection.close()  # without a reply
    made.peer.accept()
    made.peer.receive()
    made.peer.reply(Done(0))
    assert made.peer.receive()[0] == DECLARE
    made.peer.reply(Done(1))
    made.wait_replicated(1).wait()


def test_change_that_the_replica_has_is_not_sent_again() -> None:
    made = Replicated()
    made.replication.start()
    made.full_sync()
    made.apply(DECLARE)
    made.peer.receive()
    assert made.peer.connection is not None
    made.peer.connection.close()
    made.peer.accept()
    made.peer.receive()
    made.peer.reply(Done(1))
    made.wait_replicated(1).wait()


def test_restart_of_the_sync_sends_all_rows_again() -> None:
    made = Replicated()
    made.replication.start()
    made.full_sync()
    made.wait_replicated(0).wait()
    with made.rows.condition:
        made.replication.restart_sync()
        assert not made.replication.is_replicated(0)
    made.full_sync()
    made.wait_replicated(0).wait()


def test_holder_that_the_rows_were_restored_from_drops_them_once_another_has_a_replica() -> None:
    made = Replicated()
    made.replication.start(restored_from=2)
    made.full_sync()
    replicated = made.wait_replicated(0)
    made.peer.accept()
    assert made.peer.receive()[0] == DropReplica(0) and replicated.is_waiting()
    made.peer.reply(Done())
    replicated.wait()


def test_holder_that_the_rows_were_restored_from_keeps_them_if_it_is_still_the_holder() -> None:
    made = Replicated()
    made.replication.start(restored_from=1)
    made.full_sync()
    made.wait_replicated(0).wait()


def test_another_holder_of_the_ring_receives_all_rows() -> None:
    made = Replicated()
    made.replication.start()
    made.full_sync()
    made.wait_replicated(0).wait()
    made.replication.follow_ring()  # the same one
    assert made.replication.holder == 1
    with made.rows.condition:
        made.rows.adopt(Sharding(1, made.rows.sharding.owners, (0, 2), (1,)))
    made.replication.follow_ring()
    assert made.replication.holder == 2 and not made.replication.is_replicated(0)
    made.full_sync()
    made.peer.accept()
    assert made.peer.receive()[0] == DropReplica(0), "sent to the previous holder"
    made.peer.reply(Done())
    made.wait_replicated(0).wait()


def test_server_that_leaves_the_ring_keeps_its_holder() -> None:
    made = Replicated()
    with made.rows.condition:
        made.rows.adopt(Sharding(1, (2,) * 256, (2, 3), (0,)))
    made.replication.follow_ring()
    assert made.replication.holder == 1


def test_rows_are_fetched_from_the_first_server_that_has_a_replica() -> None:
    peer = Peer()
    call = Call(lambda: fetch_replica(peer.find, [1, 2], 0))
    for reply in (Done(), FullReplica("id", 4, [])):
        peer.accept()
        assert peer.receive()[0] == RestoreRows(0)
        peer.reply(reply)
    found = call.wait()
    assert isinstance(found, tuple) and (found[0], found[2]) == (FullReplica("id", 4, []), 2)


def test_servers_that_have_left_are_not_asked_for_a_replica() -> None:
    assert fetch_replica(lambda server: None, [1, 2], 0) is None
