# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN201, ANN202
"""Peer of `bench.federated`: Flower's deployment path (SuperLink, SuperNodes, `flwr run`), `SIZE CLIENTS ROUNDS`.

Clients add a constant. Prints one line of JSON: milliseconds per round, measured at the ServerApp. All processes use loopback;
Flower's telemetry is disabled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

APP = """
import os, time
import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

class Adds(NumPyClient):
    def fit(self, parameters, config):
        return [parameters[0] + np.float32(0.01)], 10, {}

class Timed(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        made = super().aggregate_fit(server_round, results, failures)
        with open("@STAMPS@", "a") as file:
            file.write(f"{time.time()} {len(results)}\\n")
        return made

def parts(context):
    strategy = Timed(
        fraction_evaluate=0.0, min_fit_clients=@CLIENTS@, min_available_clients=@CLIENTS@,
        initial_parameters=ndarrays_to_parameters([np.zeros(@SIZE@, np.float32)]),
    )
    return ServerAppComponents(config=ServerConfig(num_rounds=@ROUNDS@), strategy=strategy)

server = ServerApp(server_fn=parts)
client = ClientApp(client_fn=lambda context: Adds().to_client())
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "adds"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "adds.app:server"
clientapp = "adds.app:client"
[tool.flwr.app.config]
"""
START_S, RUN_S = 60.0, 300.0


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def until(happened, limit_s, what):
    limit = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > limit:
            raise SystemExit(f"waited {limit_s:g} s for {what}")
        time.sleep(0.05)


def listens(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def ours(home):
    """Yield the pids of all processes with this FLWR_HOME."""
    mark = f"FLWR_HOME={home}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                yield int(entry.parent.name)


def main():
    size, clients, rounds = map(int, sys.argv[1:4])
    programs = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stamps = folder / "stamps"
        (folder / "app" / "adds").mkdir(parents=True)
        (folder / "app" / "adds" / "__init__.py").touch()
        app = APP.replace("@STAMPS@", str(stamps)).replace("@CLIENTS@", str(clients))
        (folder / "app" / "adds" / "app.py").write_text(app.replace("@SIZE@", str(size)).replace("@ROUNDS@", str(rounds)))
        (folder / "app" / "pyproject.toml").write_text(PROJECT)
        port = free_port()
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        environ = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        environ["PATH"] = f"{programs}:{environ['PATH']}"
        started = []

        def start(program, *words):
            log = (folder / f"{program}-{len(started)}.log").open("w")
            command = [str(programs / program), *map(str, words)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=folder, start_new_session=True))
            return started[-1]

        try:
            start("flower-superlink", "--insecure", "--port", port, "--disable-runtime-dependency-installation")
            until(lambda: listens(port), START_S, "the SuperLink")
            for _ in range(clients):
                start("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", free_port())
            run = start("flwr", "run", folder / "app", "here")
            done = lambda: stamps.exists() and len(stamps.read_text().splitlines()) >= rounds  # noqa: E731
            until(lambda: done() or run.poll(), RUN_S, "the rounds")
            if not done():
                raise SystemExit((folder / f"flwr-{len(started) - 1}.log").read_text())
            lines = [line.split() for line in stamps.read_text().splitlines()]
        except SystemExit:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
            raise
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            for pid in ours(home):  # some programs start others in new sessions
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
    if any(int(count) != clients for _, count in lines):
        raise SystemExit("a round did not include all clients")
    steps = sorted(1000 * (float(b[0]) - float(a[0])) for a, b in pairwise(lines))
    print(json.dumps({"median": statistics.median(steps), "p95": steps[int(0.95 * len(steps))]}))


main()
