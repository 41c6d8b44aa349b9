"""ServerResize during training: every row is on one server, and results are bitwise equal to those without it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parameter_server_workload import FLAT, TABLE, WAIT_S, WORKERS, RankThreads, Training, Values, declare, equal

from covey.core.parameter_server.settings import ConsistencyMode, ServingSettings
from covey.core.parameter_server.sharding import SLOTS, Sharding, initial_sharding, rebalance_slots
from covey.parameter_server.client import GradientToPush, ParameterClient
from covey.parameter_server.discovery import ServerEndpoint
from covey.parameter_server.messages import ALL, ParameterSpec, PushGradients, RowSelection
from covey.parameter_server.optimizers import Array
from covey.parameter_server.server import ParameterServer
from covey.parameter_server.shard_set import ShardSet

SCALINGS = st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=6)


# -- shard sets alone ------------------------------------------------------------------------------------------------


class ShardSets:
    """Servers without sockets, and pushes that are delivered one by one."""

    def __init__(self, servers: Iterable[int], mode: ConsistencyMode) -> None:
        self.serving = ServingSettings(servers=1, workers=WORKERS, mode=mode)
        self.sharding = Sharding(0, rebalance_slots((-1,) * SLOTS, sorted(servers))[0], ())
        self.shard_sets = {server: ShardSet(self.serving, server, self._slots(server)) for server in self.sharding.servers}
        for server, shard_set in self.shard_sets.items():
            for spec in (FLAT, TABLE):
                self.declare(server, shard_set, spec)

    def _slots(self, server: int) -> list[int]:
        return [slot for slot in range(SLOTS) if self.sharding.owners[slot] == server]

    def declare(self, server: int, shard_set: ShardSet, spec: ParameterSpec) -> None:
        ranges = (
            [slot * spec.rows // SLOTS for slot in self._slots(server)],
            [(s + 1) * spec.rows // SLOTS for s in self._slots(server)],
        )
        rows = np.concatenate([np.arange(a, b) for a, b in zip(*ranges, strict=True)])
        shard_set.declare(spec, rows.astype(np.float32).view(np.uint8) if spec is FLAT else np.empty(0, np.uint8))

    def scale(self, servers: Iterable[int]) -> None:
        owners, moves = rebalance_slots(self.sharding.owners, sorted(servers))
        self.sharding = Sharding(self.sharding.version + 1, owners, ())
        for server in servers:
            self.shard_sets.setdefault(server, ShardSet(self.serving, server))
        for sender, receiver in sorted({(move.old_owner, move.new_owner) for move in moves}):
            self.shard_sets[sender].detach_slots(
                [move.slot for move in moves if (move.old_owner, move.new_owner) == (sender, receiver)]
            )
            for shard in list(self.shard_sets[sender].detached):
                state, arrays = shard.pack()
                body = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays])
                self.shard_sets[receiver].add_slots([sorted(shard.slots), state], body)
                self.shard_sets[sender].release_slots(shard.slots)
        self.check_owners()

    def check_owners(self) -> None:
        held = sorted((slot, server) for server, shard_set in self.shard_sets.items() for slot in shard_set.slots)
        assert held == list(enumerate(self.sharding.owners)), "each slot is on its owner only"

    def push(self, server: int, step: int, rank: int) -> None:
        """Push to a server under the current sharding; a repetition is ignored there."""
        slots = self._slots(server)
        flat, rows, gradient = gradients_of(step, rank)
        is_owned = np.isin(rows % SLOTS, slots)
        spans = [flat[s * 1000 // SLOTS : (s + 1) * 1000 // SLOTS] for s in slots]
        body = np.concatenate(
            [a.reshape(-1).view(np.uint8) for a in (rows[is_owned], np.concatenate(spans), gradient[is_owned])]
        )
        parts = [RowSelection("w", ALL, 1, "float32", 0.1), RowSelection("t", int(is_owned.sum()), 4, "float32", 0.1)]
        self.shard_sets[server].push(PushGradients(step, rank, 1, parts), body, owned=False)

    def values(self, step: int) -> tuple[Array, Array]:
        w, t = np.empty((1000, 1), np.float32), np.empty((3000, 4), np.float32)
        for server in set(self.sharding.owners):
            shard_set = self.shard_sets[server]
            assert shard_set.is_step_readable(step)
            shard_set.apply_until(step)
            shard = shard_set.as_single_shard()
            for name, found in (("w", w), ("t", t)):
                table = shard.tables[name]
                found[table.placement.row_numbers(server, 0, len(table.weights))] = table.weights
        return w, t


def gradients_of(step: int, rank: int) -> tuple[Array, Array, Array]:
    """Return a rank's gradients of a step: of the flat parameter, row numbers, and of these rows of the table."""
    rng = np.random.default_rng((step, rank))
    rows = np.unique(rng.integers(0, 3000, 200))
    return rng.standard_normal(1000).astype(np.float32), rows, rng.standard_normal((len(rows), 4)).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(SCALINGS, st.sampled_from([ConsistencyMode.SYNC, ConsistencyMode.ASYNC]), st.integers(0, 1 << 30))
def test_every_row_has_one_owner_and_its_value_after_any_scalings(
    scalings: list[set[int]], mode: ConsistencyMode, seed: int
) -> None:
    rng = random.Random(seed)
    unchanged, resharded = ShardSets({0, 1}, mode), ShardSets({0, 1}, mode)
    plans = list(scalings)
    for step in range(4):
        order = list(range(WORKERS))
        if mode is ConsistencyMode.SYNC:  # in async mode the result depends on the order
            rng.shuffle(order)
        for rank in order if mode is ConsistencyMode.SYNC else range(WORKERS):
            for server in set(unchanged.sharding.owners):
                unchanged.push(server, step, rank)
            served: set[int] = set()
            while served != set(resharded.sharding.owners):
                if plans and rng.random() < 0.3:  # some servers have this push already: it is sent to all again
                    resharded.scale(plans.pop())
                    served = set()
                served.add(rng.choice(sorted(set(resharded.sharding.owners) - served)))
                for server in served:
                    resharded.push(server, step, rank)
        if rng.random() < 0.7:  # else a complete step is not applied before slots move again
            assert all(
                np.array_equal(a, b) for a, b in zip(unchanged.values(step + 1), resharded.values(step + 1), strict=True)
            )
    assert all(np.array_equal(a, b) for a, b in zip(unchanged.values(4), resharded.values(4), strict=True))


def test_packed_state_does_not_change_with_the_rows() -> None:
    shard_sets = ShardSets({0}, ConsistencyMode.SYNC)
    shard_sets.push(0, 0, 1)
    shard_sets.shard_sets[0].detach_slots([3, 4])
    state, arrays = shard_sets.shard_sets[0].detached[0].pack()
    before = msgspec.msgpack.encode(state)
    receiver = ShardSet(shard_sets.serving, 1)
    receiver.add_slots([[3, 4], state], np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]))
    receiver.push(PushGradients(0, 0, 1, []), np.empty(0, np.uint8), owned=False)
    assert msgspec.msgpack.encode(state) == before


# -- over sockets ----------------------------------------------------------------------------------------------------


class ServerGroup:
    """Servers that are started and removed, as by the scheduler."""

    def __init__(self, servers: int, copies: int = 1, mode: ConsistencyMode = ConsistencyMode.SYNC) -> None:
        self.serving = ServingSettings(servers=servers, workers=WORKERS, mode=mode, copies=copies)
        self.sharding = initial_sharding(servers)
        self.servers: dict[int, ParameterServer] = {}
        self.in_sync: dict[int, int] = {}
        self.changed = threading.Condition()
        for rank in range(servers):
            self.start(rank, 0, self.sharding)
        for server in self.servers.values():
            server.recover()

    def start(self, rank: int, restarts: int, sharding: Sharding) -> ParameterServer:
        self.in_sync.pop(rank, None)
        server = ParameterServer(
            "127.0.0.1",
            self.serving,
            rank,
            restarts,
            self.find,
            sharding,
            lambda version: self.on_in_sync(rank, server, version),
        )
        self.servers[rank] = server
        return server

    def on_in_sync(self, rank: int, server: ParameterServer, version: int) -> None:
        with self.changed:
            if self.servers.get(rank) is server:
                self.in_sync[rank] = version
            self.changed.notify_all()

    def wait_in_sync(self, servers: Iterable[int]) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: all(self.in_sync.get(server) == self.sharding.version for server in servers), WAIT_S
            ), self.in_sync

    def find(self, rank: int) -> ServerEndpoint | None:
        return self.servers[rank].endpoint if rank in self.servers else None

    def scale(self, wanted: set[int]) -> None:
        new = sorted(wanted - self.servers.keys())
        ring = tuple(sorted({*self.sharding.ring, *wanted}))
        for rank in new:
            self.start(rank, 0, msgspec.structs.replace(self.sharding, ring=ring))
        for rank in new:
            self.servers[rank].recover()
        self.wait_in_sync(new)
        departing = tuple(sorted(self.servers.keys() - wanted))
        self.sharding = Sharding(
            self.sharding.version + 1,
            rebalance_slots(self.sharding.owners, sorted(wanted))[0],
            tuple(sorted(wanted)),
            departing,
        )
        for server in self.servers.values():
            server.set_sharding(self.sharding)
        self.wait_in_sync(list(self.servers))
        for rank in departing:
            del self.servers[rank]
        self.sharding = msgspec.structs.replace(self.sharding, leaving=())

    def client(self, rank: int) -> ParameterClient:
        return declare(ParameterClient(self.serving, rank, lambda: 1, self.find, lambda: self.sharding))


STEPS = 30
PLAN: list[set[int]] = [{0, 1, 2}, {1, 2}, {1, 2, 3, 4}, {4}, {4, 5}]


def undisturbed() -> Values:
    return Training(ServerGroup(2).client, STEPS).result()


@pytest.mark.parametrize("copies", [0, 1])
def test_training_is_bitwise_equal_while_servers_are_added_and_removed(copies: int) -> None:
    group = ServerGroup(2, copies)
    gate = threading.Semaphore(3)
    training = Training(group.client, STEPS, gate)
    for wanted in PLAN:
        for _ in range(5):
            gate.release()
        group.scale(wanted)
    for _ in range(STEPS):
        gate.release()
    assert equal(training.result(), undisturbed())


def test_async_mode_loses_and_repeats_no_push_during_resharding() -> None:
    group = ServerGroup(2, mode=ConsistencyMode.ASYNC)
    clients = [group.client(0), *[None] * (WORKERS - 1)]
    for rank in range(1, WORKERS):
        clients[rank] = group.client(rank)
    stop = threading.Event()
    counts = [0] * WORKERS

    def work(rank: int) -> None:
        client = clients[rank]
        assert client is not None
        rows = np.arange(rank, 3000, 7)
        while not stop.is_set():
            client.push(counts[rank], [GradientToPush("t", np.ones((len(rows), 4), np.float32), 1.0, rows)]).wait()
            counts[rank] += 1

    ranks = RankThreads(work)
    for wanted in PLAN:
        group.scale(wanted)
    stop.set()
    ranks.join()
    for server in group.servers.values():
        assert [shard.last_pushed_steps for shard in server._rows.own.shard_set.shards] == [[n - 1 for n in counts]] * len(
            server._rows.own.shard_set.shards
        )
        assert {shard.tables["t"].update_count for shard in server._rows.own.shard_set.shards} == {sum(counts)}
