"""Servers and workers over real sockets, in one process: modes, bad input, copies, files."""

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
from tests.parameter_server_workload import WAIT_S, RankThreads, Seen, Training, declare, equal, values

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

WHOLE = ParameterSpec("w", 1000, 1, "float32", False, SGD(0.1), InitialValues("given"))


class ServerGroup:
    """Servers, and workers that ask them."""

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
        return declare(self.client(rank), WHOLE)

    def run_ranks(self, work: Callable[[int], object]) -> None:
        """Each rank in a thread of its own, to its end."""
        RankThreads(work, self.serving.workers).join()

    def train(self, steps: int, first: int = 0) -> Seen:
        """What all ranks see at the end, which must be the same."""
        return Training(self.declared_client, steps, first=first, workers=self.serving.workers).result()


def test_sync_gives_the_same_bits_for_any_number_of_servers_with_copies_or_without() -> None:
    found = [
        ServerGroup(ServingSettings(servers=servers, workers=3, copies=copies)).train(6)
        for servers, copies in ((1, 0), (2, 0), (2, 1), (5, 1))
    ]
    assert all(equal(found[0], other) for other in found[1:])


def test_sync_sums_in_order_of_rank() -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=3, copies=0))
    clients: dict[int, ParameterClient] = {}
    group.run_ranks(lambda rank: clients.__setitem__(rank, group.declared_client(rank)))
    given = [np.full(1000, value, np.float32) for value in (1e8, -1e8, 1.0)]  # (1e8 - 1e8) + 1 is 1; in other orders 0
    works = [clients[rank].push(0, [GradientToPush("w", given[rank], 3.0)]) for rank in (2, 1, 0)]
    for work in works:
        work.wait()
    w, _ = values(clients[0], 1)
    np.testing.assert_allclose(w, np.arange(1000) - 1.0, rtol=1e-6)


def test_a_push_is_taken_once_and_its_step_completes_once() -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=2, copies=1))
    clients: dict[int, ParameterClient] = {}
    group.run_ranks(lambda rank: clients.__setitem__(rank, group.declared_client(rank)))
    again = group.client(1)  # the next life of rank 1, which repeats the step
    again.declare(WHOLE, None, first=False)
    first = clients[1].push(0, [GradientToPush("w", np.ones(1000, np.float32), 1.0)])
    assert not first.finished.wait(0.05), "rank 0 is missing"
    repeated = again.push(0, [GradientToPush("w", np.full(1000, 7, np.float32), 1.0)])
    clients[0].push(0, [GradientToPush("w", np.ones(1000, np.float32), 1.0)]).wait()
    first.wait(), repeated.wait()
    assert np.array_equal(values(clients[0], 1)[0], np.arange(1000, dtype=np.float32) - 1)
    again.push(0, []).wait()  # long over: still answered


def test_async_applies_at_once_and_bounded_waits_for_the_slowest() -> None:
    loose = ServerGroup(ServingSettings(servers=2, workers=2, mode=ConsistencyMode.ASYNC))
    client = loose.declared_client(0)
    for step in range(3):
        client.push(step, [GradientToPush("w", np.ones(1000, np.float32), 1.0)]).wait()
        client.push(step, [GradientToPush("w", np.ones(1000, np.float32), 1.0)]).wait()  # known by (step, rank)
    assert np.array_equal(values(client, 99)[0], np.arange(1000, dtype=np.float32) - 3)
    assert client.query_next_step() == 3

    bounded = ServerGroup(ServingSettings(servers=2, workers=2, mode=ConsistencyMode.BOUNDED, staleness=2))
    clients: dict[int, ParameterClient] = {}
    bounded.run_ranks(lambda rank: clients.__setitem__(rank, bounded.declared_client(rank)))
    for step in range(3):
        values(clients[0], step)
        clients[0].push(step, []).wait()
    pulled = threading.Event()

    def look() -> None:
        values(clients[0], 3)
        pulled.set()

    threading.Thread(target=look, daemon=True).start()
    assert not pulled.wait(0.1), "rank 1 has not taken a step, and 2 is the most that rank 0 may be ahead"
    clients[1].push(0, []).wait()
    assert pulled.wait(WAIT_S)


@pytest.mark.parametrize("mode", list(ConsistencyMode))
def test_one_row_and_one_number_among_five_servers(mode: ConsistencyMode) -> None:
    """All servers but one have nothing of them."""
    group = ServerGroup(ServingSettings(servers=5, workers=1, mode=mode, copies=1))
    client = group.client()
    client.declare(ParameterSpec("row", 1, 3, "float64", True, SGD(1.0), InitialValues("zeros")), None, first=True)
    client.declare(
        ParameterSpec("number", 1, 1, "float32", False, SGD(1.0), InitialValues("given")), np.ones(1, np.float32), first=True
    )
    rows = np.zeros(1, np.int64)
    for step in range(3):
        given = [GradientToPush("row", np.ones((1, 3)), 1.0, rows), GradientToPush("number", np.ones(1, np.float32), 1.0)]
        client.push(step, given, here=True)
    found = np.empty(1, np.float32)
    client.pull_parameters(3, [("number", found)])
    assert found == [-2.0] and client.pull_rows(3, "row", rows).tolist() == [[-3.0] * 3]
    assert client.pull_rows(3, "row", np.empty(0, np.int64)).shape == (0, 3)


def test_a_cache_changes_nothing_but_what_travels() -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=2))
    clients: dict[int, ParameterClient] = {}
    group.run_ranks(lambda rank: clients.__setitem__(rank, group.declared_client(rank)))
    cache = RowCache(4, 300)
    rng = np.random.default_rng(1)
    for step in range(20):
        rows = np.unique(rng.zipf(1.3, 200) % 3000)
        fetched = clients[0].pull_rows_cached(step, "t", rows, cache)
        assert np.array_equal(fetched(), clients[0].pull_rows(step, "t", rows))
        given = np.unique(rng.zipf(1.3, 20) % 3000)
        works = [
            client.push(step, [GradientToPush("t", np.full((len(given), 4), 0.1, np.float32), 0.1, given)] if rank else [])
            for rank, client in clients.items()
        ]
        for work in works:
            work.wait()
        if step == 10:  # its numbers are of another life
            group.servers[1] = ParameterServer("127.0.0.1", group.serving, 1, 1, group.find)
            group.servers[1].recover()
            group.run_ranks(lambda rank: clients.__setitem__(rank, group.declared_client(rank)))
    rows = np.arange(200, 400)
    clients[0].pull_rows_cached(20, "t", rows, cache)()
    known = cache.cached_versions(rows, 0)
    assert (known >= 0).all(), "all are remembered"
    for server in group.servers.values():
        mine = rows[server._rows.own.shard_set.shards[0].tables["t"].placement.owners_of_rows(rows) == server.rank]
        assert not server._rows.own.shard_set.shards[0].tables["t"].changed_since(mine, cache.cached_versions(mine, 0)).any(), (
            "nothing need travel"
        )


# -- bad input -------------------------------------------------------------------------------------------------------

PAIR = np.array([1, 2], np.int64)
BAD: dict[str, tuple[Callable[[ParameterClient], object], str]] = {
    "shape": (lambda c: c.push(0, [GradientToPush("w", np.ones(999, np.float32), 0.1)]), "w has 1000 rows of 1"),
    "rows": (lambda c: c.push(0, [GradientToPush("t", np.ones((2, 3), np.float32), 0.1, PAIR)]), "must have rows of 4"),
    "dtype": (lambda c: c.push(0, [GradientToPush("w", np.ones(1000), 0.1)]), "w is float32, and a gradient of float64"),
    "unknown": (lambda c: c.push(0, [GradientToPush("x", np.ones(1), 0.1)]), "there is no parameter x"),
    "row out of range": (lambda c: c.pull_rows(0, "t", np.array([3000])), "row 3000 of t does not exist"),
    "row below 0": (lambda c: c.pull_rows(0, "t", np.array([-1])), "row -1 of t does not exist"),
    "nan": (lambda c: c.push(0, [GradientToPush("w", np.full(1000, np.nan, np.float32), 0.1)]).wait(), "no finite numbers"),
    "future": (lambda c: c.push(7, []).wait(), "step 7 cannot be pushed"),
    "too large": (lambda c: c.pull_rows(0, "t", np.zeros(9000, np.int64)), "larger than the limit"),
    "no checkpoint": (lambda c: c.load(3, "/nowhere"), "is not whole"),
    "other declaration": (
        lambda c: c.declare(
            ParameterSpec("w", 7, 1, "float32", False, SGD(0.1), InitialValues("given")), np.ones(7, np.float32), first=True
        ),
        "has rows 1000 already",
    ),
    "other optimizer": (
        lambda c: c.declare(msgspec.structs.replace(WHOLE, rule=Momentum(0.1)), np.zeros(1000, np.float32), first=True),
        "w is declared with the optimizer's kind momentum, but it has sgd already",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_at_the_caller_and_the_server_lives(name: str) -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=1, message_max=65536))
    client = group.declared_client()
    call, sentence = BAD[name]
    before, _ = values(client, 0)
    with pytest.raises(CoveyError, match=sentence):
        call(client)
    client.push(0, [GradientToPush("w", np.zeros(1000, np.float32), 0.1)]).wait()
    w = np.empty(1000, np.float32)
    client.pull_parameters(1, [("w", w)])
    assert np.array_equal(w, before), "what was refused changed nothing"


def test_an_interrupted_request_leaves_no_half_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=1))
    client = group.declared_client()
    before = values(client, 0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("covey.parameter_server.server_channel.receive_reply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.pull_rows(0, "t", np.arange(50))
    assert equal(values(client, 0), before)


def test_what_a_server_cannot_do_is_said_and_not_asked_for_ever() -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=1))
    client = group.declared_client()
    with pytest.raises(UsageError, match="has not enough memory"):
        client.declare(ParameterSpec("huge", 1 << 40, 1 << 20, "float32", True, SGD(0.1)), None, first=True)
    with pytest.raises(StoreError, match=r"cannot write step 0 to /dev/null/servers/\d \(Not a directory\)"):
        client.save(0, "/dev/null", 1)
    group.servers[1]._rows.own.shard_set.shards[0].last_pushed_steps = []  # a defect
    with pytest.raises(UsageError, match=r"server 1 failed .*: its log says where"):
        client.query_next_step()


def test_what_a_thread_cannot_send_is_heard_by_whoever_waits() -> None:
    client = ServerGroup(ServingSettings(servers=2, workers=1)).declared_client()
    before = values(client, 0)
    with pytest.raises(UsageError, match=r"server \d cannot be asked"):
        client.push(1 << 70, []).wait()
    assert equal(values(client, 0), before)


RAW: dict[str, tuple[PullValues | PushGradients, list[Array], str]] = {
    "dtype": (
        PushGradients(0, 0, 1, [RowSelection("w", ALL, 1, "float64")]),
        [np.ones(1000)],
        "w is float32, and float64 came",
    ),
    "size": (PushGradients(0, 0, 1, [RowSelection("w", ALL)]), [np.ones(3, np.float32)], "12 bytes came for w"),
    "unknown": (PullValues(0, [RowSelection("x", ALL)]), [], "there is no parameter x"),
    "row": (PullValues(0, [RowSelection("t", 1, 4)]), [np.array([3000])], "row 3000 of t does not exist"),
    "rank": (PushGradients(0, 9, 1, []), [], "rank 9 pushed"),
    "too large": (PushGradients(0, 0, 1, []), [np.zeros(100_000, np.uint8)], "larger than the limit of 65536"),
}


@pytest.mark.parametrize("name", RAW)
def test_a_server_checks_for_itself(name: str) -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=1, message_max=65536))
    group.declared_client()
    message, arrays, sentence = RAW[name]
    with group.find(0).connect() as connection:
        send_message(connection, message, arrays)
        answer, _ = receive_reply(connection)
        assert isinstance(answer, RequestFailed) and sentence in answer.reason
        send_message(connection, PushGradients(0, 0, 1, []))
        assert not isinstance(receive_reply(connection)[0], RequestFailed), "the same connection goes on"


def test_nan_may_pass() -> None:
    client = ServerGroup(ServingSettings(servers=1, workers=1, refuse_nan=False)).declared_client()
    client.push(0, [GradientToPush("w", np.full(1000, np.nan, np.float32), 0.1)]).wait()
    assert np.isnan(values(client, 1)[0]).all()


def test_a_push_of_a_past_generation_is_refused() -> None:
    group = ServerGroup(ServingSettings(servers=1, workers=1))
    client = group.declared_client()
    group.generation = 5
    client.push(0, []).wait()
    group.generation = 4
    with pytest.raises(PeerError, match="from generation 4 is refused: another life of that rank is at generation 5"):
        client.push(1, []).wait()


def test_without_the_token_nothing_is_said() -> None:
    peer = ServerGroup(ServingSettings(servers=1, workers=1)).find(0)
    with socket.create_connection((peer.address, peer.port)) as connection:
        connection.sendall(b"x" * 32)
        assert connection.recv(1) == b""


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_server_in_its_next_life_takes_its_rows_from_its_copy() -> None:
    group = ServerGroup(ServingSettings(servers=3, workers=2, copies=1))
    expected = group.train(3)
    group.servers[1] = ParameterServer("127.0.0.1", group.serving, 1, 1, group.find)  # the old one is not asked any more
    group.servers[1].recover()
    seen: dict[int, Seen] = {}
    group.run_ranks(lambda rank: seen.__setitem__(rank, values(group.declared_client(rank), 3)))
    assert equal(seen[0], expected)
    group.servers[2] = ParameterServer("127.0.0.1", group.serving, 2, 1, group.find)  # at once, without a push in between
    group.servers[2].recover()
    undisturbed = ServerGroup(ServingSettings(servers=3, workers=2, copies=1)).train(6)
    assert equal(group.train(3, first=3), undisturbed), "optimizer state too"


def test_restarted_server_answers_other_servers_before_it_has_its_rows() -> None:
    serving = ServingSettings(servers=2, workers=1, copies=1)
    server = ParameterServer("127.0.0.1", serving, 0, 1, lambda rank: None)  # not recovered
    with server.endpoint.connect() as connection:
        for request, reply in (
            (RequestReplica(1), Done(1)),
            (RequestReplica(0), Done(0)),
            (RestoreRows(1), RequestFailed("server 0 has no copy of the rows of server 1")),
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


def test_no_thread_takes_the_lock_of_the_replicas_while_it_holds_that_of_the_rows_or_the_reverse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = SimpleNamespace(Condition=WatchedCondition)
    monkeypatch.setattr("covey.parameter_server.rows.threading", threads)
    monkeypatch.setattr("covey.parameter_server.replicas.threading", threads)
    group = ServerGroup(ServingSettings(servers=2, workers=2, copies=1))
    group.train(2)
    group.servers[1] = ParameterServer("127.0.0.1", group.serving, 1, 1, group.find)
    group.servers[1].recover()
    group.train(2, first=2)
    assert WatchedCondition.nested == []


def test_rows_are_lost_when_their_copy_is_lost_too() -> None:
    group = ServerGroup(ServingSettings(servers=3, workers=1, copies=1))
    for rank in range(2):  # the third, in its first life, holds another's copy
        group.servers[rank] = ParameterServer("127.0.0.1", group.serving, rank, 1, group.find)
    with pytest.raises(PeerError, match="the rows of server 0 are lost: server 1, which held their copy, died as well"):
        group.servers[0].recover()


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_can_be_loaded_by_another_number_of_servers_and_exported(tmp_path: Path) -> None:
    group = ServerGroup(ServingSettings(servers=3, workers=2))
    saved = group.train(3)
    group.declared_client().save(3, str(tmp_path), keep=2)
    undisturbed = group.train(3, first=3)
    for servers in (1, 2, 5):
        other = ServerGroup(ServingSettings(servers=servers, workers=2))
        other.declared_client().load(3, str(tmp_path))
        seen: dict[int, Seen] = {}
        other.run_ranks(lambda rank, other=other, seen=seen: seen.__setitem__(rank, values(other.declared_client(rank), 3)))  # type: ignore[misc]
        assert equal(seen[0], saved)
        assert equal(other.train(3, first=3), undisturbed)
    assert checkpoint_files.export(tmp_path, tmp_path / "all.safetensors") == 3
    exported = load_file(tmp_path / "all.safetensors")
    assert equal((exported["w"], exported["t"]), saved)


def test_a_damaged_or_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    group = ServerGroup(ServingSettings(servers=2, workers=1))
    client = group.declared_client()
    for step in (0, 1, 2):
        client.save(step, str(tmp_path), keep=2)
        client.push(step, []).wait()
    assert checkpoint_files.complete_steps(tmp_path) == [1, 2], "two are kept"
    path = tmp_path / "servers" / "1" / "rows-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(StoreError, match="is damaged"):
        client.load(2, str(tmp_path))
    (tmp_path / "servers" / "1" / "rows-1.json").unlink()
    assert checkpoint_files.complete_steps(tmp_path) == [2]
    with pytest.raises(StoreError, match="is not whole"):
        checkpoint_files.read_manifests(str(tmp_path), 1)


def test_a_server_needs_no_torch() -> None:
    code = "import sys, covey, covey.worker.parameter_server_role; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FULL = """
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


def test_a_disk_that_takes_no_more_is_one_sentence(tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert said.stdout.startswith("server 0 cannot write step 3 to") and "free the disk" in said.stdout, said
    assert checkpoint_files.complete_steps(tmp_path) == []
