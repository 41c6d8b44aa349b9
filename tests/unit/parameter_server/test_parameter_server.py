"""Servers and clients over real sockets, in one process: modes, wrong input, replicas, checkpoint files."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.parameter_server_workload import WAIT_S, RankThreads, Training, Values, declare, equal, values

from covey.core.parameter_server.settings import ConsistencyMode, ServingSettings
from covey.errors import CoveyError, PeerError, StoreError, UsageError
from covey.parameter_server import checkpoint_files
from covey.parameter_server.client import GradientToPush, ParameterClient
from covey.parameter_server.discovery import ServerEndpoint
from covey.parameter_server.messages import (
    ALL,
    Done,
    DropReplica,
    InitialValues,
    ParameterSpec,
    PullValues,
    PushGradients,
    QueryRankStep,
    RequestFailed,
    RequestReplica,
    RestoreRows,
    RowSelection,
    receive_reply,
    send_message,
)
from covey.parameter_server.optimizers import SGD, Array, Momentum
from covey.parameter_server.row_cache import RowCache
from covey.parameter_server.server import ParameterServer

FLAT = ParameterSpec("w", 1000, 1, "float32", False, SGD(0.1), InitialValues("given"))


class ServerGroup:
    """Servers, and clients of them."""

    def __init__(self, serving: ServingSettings) -> None:
        self.serving = serving
        self.servers: dict[int, ParameterServer] = {}
        self.generation = 1
        for rank in range(serving.servers):
            self.servers[rank] = ParameterServer("127.0.0.1", serving, rank, 0, self.find)
        for server in self.servers.values():
            server.recover()

    def find(self, rank: int) -> ServerEndpoint:
        return self.servers[rank].endpoint

    def client(self, rank: int = 0) -> ParameterClient:
        return ParameterClient(self.serving, rank, lambda: self.generation, self.find)

    def declared_client(self, rank: int = 0) -> ParameterClient:
        return declare(self.client(rank), FLAT)

    def run_ranks(self, work: Callable[[int], object]) -> None:
        """Run `work` for each rank on its own thread, and wait for all."""
        RankThreads(work, self.serving.workers).join()

    def train(self, steps: int, first: int = 0) -> Values:
        """Train on all ranks and return the final values, which must be equal on all."""
        return Training(self.declared_client, steps, first=first, workers=self.serving.workers).result()


def test_sync_mode_is_bitwise_equal_for_any_number_of_servers_and_replicas() -> None:
    found = [
        ServerGroup(ServingSettings(servers=servers, workers=3, copies=copies)).train(6)
        for servers, copies in ((1, 0), (2, 0), (2, 1), (5, 1))
    ]
    assert all(equal(found[0], other) for other in found[1:])


def test_sync_mode_sums_gradients_in_rank_order() -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=3, copies=0))
    clients: dict[int, ParameterClient] = {}
    group.run_ranks(lambda rank: clients.__setitem__(rank, group.declared_client(rank)))
    gradients = [np.full(1000, value, np.float32) for value in (1e8, -1e8, 1.0)]  # (1e8 - 1e8) + 1 is 1; in other orders 0
    works = [clients[rank].push(0, [GradientToPush("w", gradients[rank], 3.0)]) for rank in (2, 1, 0)]
    for work in works:
        work.wait()
    w, _ = values(clients[0], 1)
    np.testing.assert_allclose(w, np.arange(1000) - 1.0, rtol=1e-6)


def test_push_of_a_step_and_rank_is_applied_once() -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=2, copies=1))
    clients: dict[int, ParameterClient] = {}
    group.run_ranks(lambda rank: clients.__setitem__(rank, group.declared_client(rank)))
    again = group.client(1)  # of a replacement of rank 1, which repeats the step
    again.declare(FLAT, None, first=False)
    first = clients[1].push(0, [GradientToPush("w", np.ones(1000, np.float32), 1.0)])
    assert not first.finished.wait(0.05), "rank 0 is missing"
    repeated = again.push(0, [GradientToPush("w", np.full(1000, 7, np.float32), 1.0)])
    clients[0].push(0, [GradientToPush("w", np.ones(1000, np.float32), 1.0)]).wait()
    first.wait(), repeated.wait()
    assert np.array_equal(values(clients[0], 1)[0], np.arange(1000, dtype=np.float32) - 1)
    again.push(0, []).wait()  # a push of an applied step is still acknowledged


def test_async_mode_applies_immediately_and_bounded_mode_waits_for_the_slowest_rank() -> None:
    loose = ServerGroup(ServingSettings(servers=2, workers=2, mode=ConsistencyMode.ASYNC))
    client = loose.declared_client(0)
    for step in range(3):
        client.push(step, [GradientToPush("w", np.ones(1000, np.float32), 1.0)]).wait()
        client.push(step, [GradientToPush("w", np.ones(1000, np.float32), 1.0)]).wait()  # a repetition, which is ignored
    assert np.array_equal(values(client, 99)[0], np.arange(1000, dtype=np.float32) - 3)
    assert client.query_next_step() == 3

    bounded = ServerGroup(ServingSettings(servers=2, workers=2, mode=ConsistencyMode.BOUNDED, staleness=2))
    clients: dict[int, ParameterClient] = {}
    bounded.run_ranks(lambda rank: clients.__setitem__(rank, bounded.declared_client(rank)))
    for step in range(3):
        values(clients[0], step)
        clients[0].push(step, []).wait()
    pulled = threading.Event()

    def pull() -> None:
        values(clients[0], 3)
        pulled.set()

    threading.Thread(target=pull, daemon=True).start()
    assert not pulled.wait(0.1), "rank 1 has not pushed, and rank 0 may be at most 2 steps ahead"
    clients[1].push(0, []).wait()
    assert pulled.wait(WAIT_S)


@pytest.mark.parametrize("mode", list(ConsistencyMode))
def test_parameters_of_one_row_work_with_five_servers(mode: ConsistencyMode) -> None:
    """All servers but one have no row of them."""
    group = ServerGroup(ServingSettings(servers=5, workers=1, mode=mode, copies=1))
    client = group.client()
    client.declare(ParameterSpec("row", 1, 3, "float64", True, SGD(1.0), InitialValues("zeros")), None, first=True)
    client.declare(
        ParameterSpec("number", 1, 1, "float32", False, SGD(1.0), InitialValues("given")), np.ones(1, np.float32), first=True
    )
    rows = np.zeros(1, np.int64)
    for step in range(3):
        gradients = [
            GradientToPush("row", np.ones((1, 3)), 1.0, rows),
            GradientToPush("number", np.ones(1, np.float32), 1.0),
        ]
        client.push(step, gradients, blocking=True)
    found = np.empty(1, np.float32)
    client.pull_parameters(3, [("number", found)])
    assert found == [-2.0] and client.pull_rows(3, "row", rows).tolist() == [[-3.0] * 3]
    assert client.pull_rows(3, "row", np.empty(0, np.int64)).shape == (0, 3)


def test_pulls_with_a_cache_return_the_same_values() -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=2))
    clients: dict[int, ParameterClient] = {}
    group.run_ranks(lambda rank: clients.__setitem__(rank, group.declared_client(rank)))
    cache = RowCache(4, 300)
    rng = np.random.default_rng(1)
    for step in range(20):
        rows = np.unique(rng.zipf(1.3, 200) % 3000)
        fetched = clients[0].pull_rows_cached(step, "t", rows, cache)
        assert np.array_equal(fetched(), clients[0].pull_rows(step, "t", rows))
        pushed = np.unique(rng.zipf(1.3, 20) % 3000)
        works = [
            client.push(step, [GradientToPush("t", np.full((len(pushed), 4), 0.1, np.float32), 0.1, pushed)] if rank else [])
            for rank, client in clients.items()
        ]
        for work in works:
            work.wait()
        if step == 10:  # a restarted server invalidates its cached versions
            group.servers[1] = ParameterServer("127.0.0.1", group.serving, 1, 1, group.find)
            group.servers[1].recover()
            group.run_ranks(lambda rank: clients.__setitem__(rank, group.declared_client(rank)))
    rows = np.arange(200, 400)
    clients[0].pull_rows_cached(20, "t", rows, cache)()
    known = cache.cached_versions(rows, 0)
    assert (known >= 0).all(), "all rows are cached"
    for server in group.servers.values():
        table = server._rows.own.shard_set.shards[0].tables["t"]
        own_rows = rows[table.placement.owners_of_rows(rows) == server.rank]
        assert not table.changed_since(own_rows, cache.cached_versions(own_rows, 0)).any(), "no row would be sent again"


# -- wrong input -----------------------------------------------------------------------------------------------------

PAIR = np.array([1, 2], np.int64)
WRONG_CALLS: dict[str, tuple[Callable[[ParameterClient], object], str]] = {
    "size": (lambda c: c.push(0, [GradientToPush("w", np.ones(999, np.float32), 0.1)]), "expected 1000 rows of 1"),
    "row width": (lambda c: c.push(0, [GradientToPush("t", np.ones((2, 3), np.float32), 0.1, PAIR)]), "expected 2 rows of 4"),
    "dtype": (lambda c: c.push(0, [GradientToPush("w", np.ones(1000), 0.1)]), "w is float64, expected float32"),
    "unknown parameter": (lambda c: c.push(0, [GradientToPush("x", np.ones(1), 0.1)]), "parameter x does not exist"),
    "row out of range": (lambda c: c.pull_rows(0, "t", np.array([3000])), "row 3000 of t does not exist"),
    "row below 0": (lambda c: c.pull_rows(0, "t", np.array([-1])), "row -1 of t does not exist"),
    "nan": (lambda c: c.push(0, [GradientToPush("w", np.full(1000, np.nan, np.float32), 0.1)]).wait(), "has NaN or infinite"),
    "future step": (lambda c: c.push(7, []).wait(), "step 7 cannot be pushed"),
    "too large": (lambda c: c.pull_rows(0, "t", np.zeros(9000, np.int64)), "exceeds the limit"),
    "no checkpoint": (lambda c: c.load(3, "/nowhere"), "is incomplete"),
    "other declaration": (
        lambda c: c.declare(
            ParameterSpec("w", 7, 1, "float32", False, SGD(0.1), InitialValues("given")), np.ones(7, np.float32), first=True
        ),
        "already has rows 1000",
    ),
    "other optimizer": (
        lambda c: c.declare(msgspec.structs.replace(FLAT, rule=Momentum(0.1)), np.zeros(1000, np.float32), first=True),
        "w is declared with the optimizer's kind momentum, but already has sgd",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_call_raises_and_changes_nothing_on_the_server(name: str) -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=1, message_max=65536))
    client = group.declared_client()
    call, message = WRONG_CALLS[name]
    before, _ = values(client, 0)
    with pytest.raises(CoveyError, match=message):
        call(client)
    client.push(0, [GradientToPush("w", np.zeros(1000, np.float32), 0.1)]).wait()
    w = np.empty(1000, np.float32)
    client.pull_parameters(1, [("w", w)])
    assert np.array_equal(w, before)


def test_interrupted_request_leaves_no_partial_reply_in_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=1))
    client = group.declared_client()
    before = values(client, 0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("covey.parameter_server.server_requests.receive_reply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.pull_rows(0, "t", np.arange(50))
    assert equal(values(client, 0), before)


def test_failure_of_a_server_is_raised_and_the_request_not_repeated() -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=1))
    client = group.declared_client()
    with pytest.raises(UsageError, match="is out of memory"):
        client.declare(ParameterSpec("huge", 1 << 40, 1 << 20, "float32", True, SGD(0.1)), None, first=True)
    with pytest.raises(StoreError, match=r"cannot write step 0 to /dev/null/servers/\d \(Not a directory\)"):
        client.save(0, "/dev/null", 1)
    group.servers[1]._rows.own.shard_set.shards[0].last_pushed_steps = []  # a defect
    with pytest.raises(UsageError, match=r"server 1 failed .*: see its log"):
        client.query_next_step()


def test_request_that_cannot_be_sent_raises_in_the_waiting_thread() -> None:
    client = ServerGroup(ServingSettings(servers=2, workers=1)).declared_client()
    before = values(client, 0)
    with pytest.raises(UsageError, match=r"the request to server \d failed"):
        client.push(1 << 70, []).wait()
    assert equal(values(client, 0), before)


WRONG_MESSAGES: dict[str, tuple[PullValues | PushGradients, list[Array], str]] = {
    "dtype": (
        PushGradients(0, 0, 1, [RowSelection("w", ALL, 1, "float64")]),
        [np.ones(1000)],
        "received float64 values for w, expected float32",
    ),
    "size": (PushGradients(0, 0, 1, [RowSelection("w", ALL)]), [np.ones(3, np.float32)], "received 12 bytes for w"),
    "unknown parameter": (PullValues(0, [RowSelection("x", ALL)]), [], "parameter x does not exist"),
    "row": (PullValues(0, [RowSelection("t", 1, 4)]), [np.array([3000])], "row 3000 of t does not exist"),
    "rank": (PushGradients(0, 9, 1, []), [], "received a push of rank 9"),
    "too large": (PushGradients(0, 0, 1, []), [np.zeros(100_000, np.uint8)], "exceeds the limit of 65536"),
}


@pytest.mark.parametrize("name", WRONG_MESSAGES)
def test_server_refuses_a_wrong_message_and_keeps_the_connection(name: str) -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=1, message_max=65536))
    group.declared_client()
    message, arrays, reason = WRONG_MESSAGES[name]
    with group.find(0).connect() as connection:
        send_message(connection, message, arrays)
        reply, _ = receive_reply(connection)
        assert isinstance(reply, RequestFailed) and reason in reply.reason
        send_message(connection, PushGradients(0, 0, 1, []))
        assert not isinstance(receive_reply(connection)[0], RequestFailed), "the same connection is still usable"


def test_nan_is_accepted_without_refuse_nan() -> None:
    client = ServerGroup(ServingSettings(servers=1, workers=1, refuse_nan=False)).declared_client()
    client.push(0, [GradientToPush("w", np.full(1000, np.nan, np.float32), 0.1)]).wait()
    assert np.isnan(values(client, 1)[0]).all()


def test_push_of_an_older_generation_is_refused() -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=1))
    client = group.declared_client()
    group.generation = 5
    client.push(0, []).wait()
    group.generation = 4
    with pytest.raises(PeerError, match="from generation 4 is refused: a newer process of that rank is at generation 5"):
        client.push(1, []).wait()


def test_connection_without_the_token_is_closed() -> None:
    peer = ServerGroup(ServingSettings(servers=1, workers=1)).find(0)
    with socket.create_connection((peer.address, peer.port)) as connection:
        connection.sendall(b"x" * 32)
        assert connection.recv(1) == b""


# -- replicas --------------------------------------------------------------------------------------------------------


def test_restarted_server_restores_its_rows_from_their_replica() -> None:
    group = ServerGroup(ServingSettings(servers=3, workers=2, copies=1))
    expected = group.train(3)
    group.servers[1] = ParameterServer("127.0.0.1", group.serving, 1, 1, group.find)  # clients no longer find the old one
    group.servers[1].recover()
    pulled: dict[int, Values] = {}
    group.run_ranks(lambda rank: pulled.__setitem__(rank, values(group.declared_client(rank), 3)))
    assert equal(pulled[0], expected)
    group.servers[2] = ParameterServer("127.0.0.1", group.serving, 2, 1, group.find)  # without a push in between
    group.servers[2].recover()
    undisturbed = ServerGroup(ServingSettings(servers=3, workers=2, copies=1)).train(6)
    assert equal(group.train(3, first=3), undisturbed), "the optimizer's state is restored too"


def test_restarted_server_replies_to_other_servers_before_it_has_its_rows() -> None:
    serving = ServingSettings(servers=2, workers=1, copies=1)
    server = ParameterServer("127.0.0.1", serving, 0, 1, lambda rank: None)  # not recovered
    with server.endpoint.connect() as connection:
        for request, reply in (
            (RequestReplica(1), Done(1)),
            (RequestReplica(0), Done(0)),
            (RestoreRows(1), RequestFailed("server 0 has no replica of the rows of server 1")),
            (DropReplica(1), Done()),
        ):
            send_message(connection, request)
            assert receive_reply(connection)[0] == reply
        send_message(connection, QueryRankStep(0))
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            receive_reply(connection)


class WatchedCondition(threading.Condition):
    """Records each time a thread takes one of these while it holds another one."""

    nested: ClassVar[list[str]] = []
    held: ClassVar[threading.local] = threading.local()

    def __enter__(self) -> bool:
        taken = self.held.__dict__.setdefault("taken", [])
        if any(other is not self for other in taken):
            self.nested.append(threading.current_thread().name)
        taken.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.held.taken.pop()
        super().__exit__(*error)


def test_no_thread_holds_the_locks_of_rows_and_replicas_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = SimpleNamespace(Condition=WatchedCondition)
    monkeypatch.setattr("covey.parameter_server.rows.threading", threads)
    monkeypatch.setattr("covey.parameter_server.replica_store.threading", threads)
    group = ServerGroup(ServingSettings(servers=2, workers=2, copies=1))
    group.train(2)
    group.servers[1] = ParameterServer("127.0.0.1", group.serving, 1, 1, group.find)
    group.servers[1].recover()
    group.train(2, first=2)
    assert WatchedCondition.nested == []


def test_recover_raises_if_the_replica_is_lost_too() -> None:
    group = ServerGroup(ServingSettings(servers=3, workers=1, copies=1))
    for rank in range(2):  # the third, not restarted, holds the replica of another server
        group.servers[rank] = ParameterServer("127.0.0.1", group.serving, rank, 1, group.find)
    with pytest.raises(PeerError, match="the rows of server 0 are lost: server 1, which held their replica, died too"):
        group.servers[0].recover()


# -- checkpoint files ------------------------------------------------------------------------------------------------


def test_export_to_a_missing_directory_is_a_store_error(tmp_path: Path) -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=2))
    group.train(1)
    group.declared_client().save(1, str(tmp_path), keep=2)
    with pytest.raises(StoreError, match=r"missing/out\.safetensors cannot be written"):
        checkpoint_files.export(tmp_path, tmp_path / "missing" / "out.safetensors")


def test_checkpoint_is_loaded_by_any_number_of_servers_and_exported(tmp_path: Path) -> None:
    group = ServerGroup(ServingSettings(servers=3, workers=2))
    saved = group.train(3)
    group.declared_client().save(3, str(tmp_path), keep=2)
    undisturbed = group.train(3, first=3)
    for servers in (1, 2, 5):
        other = ServerGroup(ServingSettings(servers=servers, workers=2))
        other.declared_client().load(3, str(tmp_path))
        pulled: dict[int, Values] = {}

        def pull(rank: int, group: ServerGroup = other, pulled: dict[int, Values] = pulled) -> None:
            pulled[rank] = values(group.declared_client(rank), 3)

        other.run_ranks(pull)
        assert equal(pulled[0], saved)
        assert equal(other.train(3, first=3), undisturbed)
    assert checkpoint_files.export(tmp_path, tmp_path / "all.safetensors") == 3
    exported = load_file(tmp_path / "all.safetensors")
    assert equal((exported["w"], exported["t"]), saved)


def test_damaged_or_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=1))
    client = group.declared_client()
    for step in (0, 1, 2):
        client.save(step, str(tmp_path), keep=2)
        client.push(step, []).wait()
    assert checkpoint_files.complete_steps(tmp_path) == [1, 2], "keep=2"
    path = tmp_path / "servers" / "1" / "rows-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(StoreError, match="is damaged"):
        client.load(2, str(tmp_path))
    (tmp_path / "servers" / "1" / "rows-1.json").unlink()
    assert checkpoint_files.complete_steps(tmp_path) == [2]
    with pytest.raises(StoreError, match="is incomplete"):
        checkpoint_files.read_manifests(str(tmp_path), 1)


def test_server_does_not_import_torch() -> None:
    code = "import sys, covey, covey.worker.parameter_server_role; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SAVE_ON_FULL_DISK = """
import resource, sys
import numpy as np
from covey.core.parameter_server.settings import ServingSettings
from covey.errors import StoreError
from covey.parameter_server import checkpoint_files as files
from covey.parameter_server.messages import InitialValues, ParameterSpec
from covey.parameter_server.optimizers import SGD
from covey.parameter_server.shard import Shard

shard = Shard(ServingSettings(servers=1, workers=1), 0, range(256))
shard.declare(ParameterSpec("t", 10_000, 4, "float32", True, SGD(0.1), InitialValues("normal")), np.empty(0, np.uint8))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    files.save_shard(sys.argv[1], 3, shard, (0,) * 256, keep=1)
except StoreError as error:
    print(error)
"""


def test_save_on_a_full_disk_raises_store_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVE_ON_FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("server 0 cannot write step 3 to") and "free the disk" in done.stdout, done
    assert checkpoint_files.complete_steps(tmp_path) == []
