"""The rebalancer alone: the test plays the other server, and no rows are replicated."""

from __future__ import annotations

import queue

from tests.parameter_server_workload import WAIT_S
from tests.unit.parameter_server.server_parts import DECLARE, EMPTY, UPPER, Call, Peer, all_slots, halves, hand_over

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import Sharding
from covey.parameter_server.messages import Done, HandOverSlots
from covey.parameter_server.optimizers import Array
from covey.parameter_server.rebalancer import Rebalancer
from covey.parameter_server.replication import Replication
from covey.parameter_server.rows import Rows, RowsState, VersionedRows
from covey.parameter_server.shard_set import ShardSet

SERVING = ServingSettings(servers=2, workers=1, copies=0)


class Rebalanced:
    """Rows of server 0, which has declared a parameter."""

    def __init__(self, sharding: Sharding) -> None:
        self.peer, self.rows = Peer(), Rows(SERVING, 0, sharding)
        self.replication = Replication(self.rows, self.peer.find)
        self.in_sync: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.rebalancer = Rebalancer(self.rows, self.replication, self.peer.find, self.in_sync.put)
        with self.rows.condition:
            self.replication.apply(DECLARE, EMPTY)

    def start(self) -> None:
        self.rebalancer.start()
        assert self.in_sync.get(timeout=WAIT_S) == self.rows.sharding.version

    def take_slots(self, request: HandOverSlots, body: Array) -> object:
        with self.rows.condition:
            return self.rebalancer.take_slots(request, body)


def test_sharding_that_is_set_again_is_reported_again() -> None:
    made = Rebalanced(all_slots())
    made.start()
    made.rebalancer.set_sharding(all_slots())
    assert made.in_sync.get(timeout=WAIT_S) == 0


def test_older_sharding_is_ignored() -> None:
    made = Rebalanced(all_slots(version=3))
    made.start()
    made.rebalancer.set_sharding(halves(version=2))
    made.rebalancer.set_sharding(all_slots(version=4))
    assert made.in_sync.get(timeout=WAIT_S) == 4 and made.in_sync.empty()


def test_slots_of_another_server_are_handed_over_and_released() -> None:
    made = Rebalanced(all_slots())
    made.start()
    made.rebalancer.set_sharding(halves(version=1))
    made.peer.accept()
    request, body = made.peer.receive()
    assert isinstance(request, HandOverSlots) and (request.sharding_version, request.state[0]) == (1, UPPER)
    assert made.rows.state is RowsState.SERVING and made.in_sync.empty()
    made.peer.reply(Done())
    assert made.in_sync.get(timeout=WAIT_S) == 1
    assert not made.rows.own.shard_set.detached and made.rows.own.change_count == 3
    receiver = VersionedRows(ShardSet(SERVING, 1))
    receiver.apply(request, body, owned=True)
    assert receiver.shard_set.slots == set(UPPER) and receiver.shard_set.parameter_names == ["t"]


def test_hand_over_is_repeated_after_the_connection_broke() -> None:
    made = Rebalanced(all_slots())
    made.start()
    made.rebalancer.set_sharding(halves(version=1))
    requests = []
    for attempt in range(2):
        made.peer.accept()
        requests.append(made.peer.receive()[0])
        assert made.peer.connection is not None
        if attempt:
            made.peer.reply(Done())
        made.peer.connection.close()
    assert requests[0] == requests[1] and made.in_sync.get(timeout=WAIT_S) == 1


def test_server_is_in_sync_when_it_has_received_all_its_slots() -> None:
    made = Rebalanced(halves())
    made.start()
    made.rebalancer.set_sharding(all_slots(version=1))
    request, body = hand_over(UPPER, version=1)
    assert made.take_slots(request, body) == Done() == made.take_slots(request, body), "the second time, nothing changes"
    assert made.in_sync.get(timeout=WAIT_S) == 1 and made.rows.own.change_count == 2


def test_slots_are_not_taken_before_their_sharding_is_adopted() -> None:
    made = Rebalanced(halves())
    made.start()
    request, body = hand_over(UPPER, version=1)
    call = Call(lambda: made.take_slots(request, body))
    assert call.is_waiting() and made.rows.own.change_count == 1
    made.rebalancer.set_sharding(all_slots(version=1))
    assert call.wait() == Done()


def test_newer_sharding_ends_the_wait_for_slots() -> None:
    made = Rebalanced(halves())
    made.start()
    made.rebalancer.set_sharding(all_slots(version=1))
    made.rebalancer.set_sharding(halves(version=2))
    assert made.in_sync.get(timeout=WAIT_S) == 2, "the slots that version 1 assigned are not waited for"
