"""The rebalancer alone: the test simulates the other server, and no rows are replicated."""

from __future__ import annotations

import queue

from tests.parameter_server_workload import WAIT_S
from tests.unit.parameter_server.server_parts import DECLARE, EMPTY, UPPER, Call, Peer, all_slots, halves, hand_over

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import Sharding
from covey.parameter_server.messages import Done, HandOverSlots
from covey.parameter_server.optimizers import Array
from covey.parameter_server.rebalancer import Rebalancer
from covey.parameter_server.replica_sender import Replication
from covey.parameter_server.rows import Rows, RowsState, VersionedRows
from covey.parameter_server.shard_set import ShardSet

SERVING = ServingSettings(servers=2, workers=1, copies=0)


class RebalancedServer:
    """Server 0 with one declared parameter."""

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


def test_sharding_set_again_is_reported_again() -> None:
    server = RebalancedServer(all_slots())
    server.start()
    server.rebalancer.set_sharding(all_slots())
    assert server.in_sync.get(timeout=WAIT_S) == 0


def test_older_sharding_is_ignored() -> None:
    server = RebalancedServer(all_slots(version=3))
    server.start()
    server.rebalancer.set_sharding(halves(version=2))
    server.rebalancer.set_sharding(all_slots(version=4))
    assert server.in_sync.get(timeout=WAIT_S) == 4 and server.in_sync.empty()


def test_slots_of_another_server_are_handed_over_and_released() -> None:
    server = RebalancedServer(all_slots())
    server.start()
    server.rebalancer.set_sharding(halves(version=1))
    server.peer.accept()
    request, body = server.peer.receive()
    assert isinstance(request, HandOverSlots) and (request.sharding_version, request.state[0]) == (1, UPPER)
    assert server.rows.state is RowsState.SERVING and server.in_sync.empty()
    server.peer.reply(Done())
    assert server.in_sync.get(timeout=WAIT_S) == 1
    assert not server.rows.own.shard_set.detached and server.rows.own.change_count == 3
    receiver = VersionedRows(ShardSet(SERVING, 1))
    receiver.apply(request, body, owned=True)
    assert receiver.shard_set.slots == set(UPPER) and receiver.shard_set.parameter_names == ["t"]


def test_hand_over_is_repeated_after_a_broken_connection() -> None:
    server = RebalancedServer(all_slots())
    server.start()
    server.rebalancer.set_sharding(halves(version=1))
    requests = []
    for attempt in range(2):
        server.peer.accept()
        requests.append(server.peer.receive()[0])
        assert server.peer.connection is not None
        if attempt:
            server.peer.reply(Done())
        server.peer.connection.close()
    assert requests[0] == requests[1] and server.in_sync.get(timeout=WAIT_S) == 1


def test_server_is_in_sync_when_it_has_received_all_its_slots() -> None:
    server = RebalancedServer(halves())
    server.start()
    server.rebalancer.set_sharding(all_slots(version=1))
    request, body = hand_over(UPPER, version=1)
    assert server.take_slots(request, body) == Done() == server.take_slots(request, body), "the repetition changes nothing"
    assert server.in_sync.get(timeout=WAIT_S) == 1 and server.rows.own.change_count == 2


def test_slots_are_not_taken_before_their_sharding_is_adopted() -> None:
    server = RebalancedServer(halves())
    server.start()
    request, body = hand_over(UPPER, version=1)
    call = Call(lambda: server.take_slots(request, body))
    assert call.is_waiting() and server.rows.own.change_count == 1
    server.rebalancer.set_sharding(all_slots(version=1))
    assert call.wait() == Done()


def test_newer_sharding_ends_the_wait_for_slots() -> None:
    server = RebalancedServer(halves())
    server.start()
    server.rebalancer.set_sharding(all_slots(version=1))
    server.rebalancer.set_sharding(halves(version=2))
    assert server.in_sync.get(timeout=WAIT_S) == 2, "it does not wait for the slots that version 1 assigned"
