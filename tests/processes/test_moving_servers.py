"""Parameter server processes that are killed at any moment while slots move and workers push."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.parameter_server_workload import WAIT_S, WORKERS, Training, declare, equal

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import Sharding, initial_sharding, rebalance_slots
from covey.parameter_server.client import ParameterClient
from covey.parameter_server.discovery import RETRY_DELAY_S, ServerEndpoint

STEPS = 60

# A server. It finds the others by files, reads shardings from its input and prints those that it has applied.
SERVER = """
import pathlib, sys, time
import msgspec
from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import Sharding
from covey.parameter_server.discovery import ServerEndpoint
from covey.parameter_server.server import ParameterServer

folder, rank, restarts, serving, sharding = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:]

def find(server):
    while True:
        try:
            return msgspec.json.decode((folder / str(server)).read_bytes(), type=ServerEndpoint)
        except (OSError, msgspec.DecodeError):
            if (folder / f"{server}.left").exists():
                return None
            time.sleep(0.01)

serving = msgspec.json.decode(serving, type=ServingSettings)
sharding = msgspec.json.decode(sharding, type=Sharding)
server = ParameterServer("127.0.0.1", serving, rank, restarts, find, sharding, lambda version: print(version, flush=True))
aside = folder / f".{rank}"
aside.write_bytes(msgspec.json.encode(server.endpoint))
aside.rename(folder / str(rank))
server.recover()
for line in sys.stdin:
    server.set_sharding(msgspec.json.decode(line, type=Sharding))
"""


class ServerGroup:
    """Manages real server processes like the scheduler."""

    def __init__(self, folder: Path, servers: int, copies: int = 1) -> None:
        self.folder = folder
        self.serving = ServingSettings(servers=servers, workers=WORKERS, copies=copies)
        self.sharding = initial_sharding(servers)
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.in_sync: dict[int, int] = {}
        self.restarts: dict[int, int] = {}
        self.changed = threading.Condition()
        for rank in range(servers):
            self.start(rank, self.sharding)

    def start(self, rank: int, sharding: Sharding) -> None:
        arguments = [SERVER, str(self.folder), str(rank), str(self.restarts.setdefault(rank, 0))]
        arguments += [msgspec.json.encode(given).decode() for given in (self.serving, sharding)]
        started = subprocess.Popen(
            [sys.executable, "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        with self.changed:
            self.processes[rank] = started
            self.in_sync.pop(rank, None)
        threading.Thread(target=self.read_in_sync, args=(rank, started), daemon=True).start()

    def read_in_sync(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.changed:
                if self.processes.get(rank) is process:
                    self.in_sync[rank] = int(line)
                self.changed.notify_all()

    def kill(self, rank: int) -> None:
        process = self.processes[rank]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(FileNotFoundError):
            (self.folder / str(rank)).unlink()
        self.restarts[rank] += 1
        self.start(rank, self.sharding)

    def wait_in_sync(self, servers: list[int]) -> None:
        with self.changed:
            there = self.changed.wait_for(
                lambda: all(self.in_sync.get(rank) == self.sharding.version for rank in servers), WAIT_S
            )
            assert there, f"{self.in_sync} of {servers}, by {self.sharding.version}"

    def start_servers(self, wanted: set[int]) -> None:
        new = sorted(wanted - self.processes.keys())
        ring = tuple(sorted({*self.sharding.ring, *wanted}))
        for rank in new:
            self.start(rank, msgspec.structs.replace(self.sharding, ring=ring))
        self.wait_in_sync(list(self.processes))

    def reshard(self, wanted: set[int]) -> None:
        owners, _ = rebalance_slots(self.sharding.owners, sorted(wanted))
        going = tuple(sorted(self.processes.keys() - wanted))
        self.sharding = Sharding(self.sharding.version + 1, owners, tuple(sorted(wanted)), going)
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(self.sharding).decode() + "\n")

    def stop_leaving_servers(self) -> None:
        self.wait_in_sync(list(self.processes))
        for rank in self.sharding.leaving:
            (self.folder / f"{rank}.left").touch()
            (self.folder / str(rank)).unlink()
            process = self.processes.pop(rank)
            process.kill()
            process.wait()
        self.sharding = msgspec.structs.replace(self.sharding, leaving=())

    def find(self, rank: int) -> ServerEndpoint | None:
        while True:
            try:
                return msgspec.json.decode((self.folder / str(rank)).read_bytes(), type=ServerEndpoint)
            except (OSError, msgspec.DecodeError):
                if (self.folder / f"{rank}.left").exists():
                    return None
                threading.Event().wait(RETRY_DELAY_S)

    def client(self, rank: int) -> ParameterClient:
        return declare(ParameterClient(self.serving, rank, lambda: 1, self.find, lambda: self.sharding))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def group(folder: Path, servers: int) -> Iterator[ServerGroup]:
    folder.mkdir()
    made = ServerGroup(folder, servers)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("COVEY_SEEDS", "1").split(",")])
def test_rows_are_bitwise_equal_if_servers_die_while_slots_move(tmp_path: Path, seed: int) -> None:
    with group(tmp_path / "still", 2) as still:
        expected = Training(still.client, STEPS).result()
    rng = random.Random(seed)
    with group(tmp_path / "moving", 2) as moving:
        pace = threading.Semaphore(1)
        training = Training(moving.client, STEPS, pace)
        count = 2
        for _ in range(4):
            here = sorted(moving.processes)
            if len(here) < 4 and (len(here) < 3 or rng.random() < 0.5):
                wanted = {*here, count}
                count += 1
            else:
                wanted = set(here) - {rng.choice(here)}
            for _ in range(rng.randint(1, 8)):
                pace.release()
            moving.start_servers(wanted)
            moving.reshard(wanted)
            for _ in range(rng.randint(0, 2)):  # one at a time: two servers with each other's replica would lose both
                threading.Event().wait(rng.choice([0.0, 0.005, 0.02, 0.1]))
                moving.kill(rng.choice(sorted(moving.processes)))
                if rng.random() < 0.5:
                    pace.release()
                moving.wait_in_sync(list(moving.processes))
            moving.stop_leaving_servers()
        for _ in range(STEPS):
            pace.release()
        found = training.result()
    assert equal(found, expected)
