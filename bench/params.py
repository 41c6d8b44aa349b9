"""Parameter servers: rate of push and pull for complete parameters and for rows, and memory, each with a peer in the same run.

    python -m bench.params [--quick] [--rounds 10] [--table 10000000]

Complete parameters: push and pull through two servers; the peer is two processes that receive and send back the same bytes.
Rows: the unique rows of a batch, of 64 floats, are pulled and pushed; the peer is torch.distributed.rpc. Memory: that of a
server, divided by that of its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from bench.process import take_along
from bench.report import Aim, Spread, aims_table, machine, publish, spread, table
from covey.core.parameter_server.settings import ServingSettings
from covey.parameter_server.client import GradientToPush, ParameterClient
from covey.parameter_server.discovery import ServerEndpoint
from covey.parameter_server.messages import InitialValues, ParameterSpec
from covey.parameter_server.optimizers import SGD

SCRIPTS = Path(__file__).parent / "scripts"
SERVERS = 2
MEGABYTES = (1, 25, 100)
ROWS, WIDTH, BATCH = 1_000_000, 64, 4096
LIMIT_S = 300.0


@contextlib.contextmanager
def server_processes(copies: int, servers: int = SERVERS) -> Iterator[tuple[ParameterClient, list[psutil.Process]]]:
    """Start servers as processes; yield a client in this process, and the processes."""
    words = [[sys.executable, str(SCRIPTS / "rows.py"), "server", str(n), str(servers), str(copies)] for n in range(servers)]
    started = [subprocess.Popen(word, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for word in words]
    try:
        peers = [msgspec.json.decode(p.stdout.readline(), type=ServerEndpoint) for p in started if p.stdout is not None]
        for process in started:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(peers).decode() + "\n")
            process.stdin.flush()
        serving = ServingSettings(servers=servers, workers=1, copies=copies)
        yield ParameterClient(serving, 0, lambda: 1, lambda n: peers[n]), [psutil.Process(p.pid) for p in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def whole(copies: int, megabytes: int, rounds: int) -> list[float]:
    """Return the seconds of each push and pull of a complete parameter."""
    count = megabytes * 250_000
    with server_processes(copies) as (client, _):
        values = np.zeros(count, np.float32)
        client.declare(ParameterSpec("w", count, 1, "float32", False, SGD(0.1), InitialValues("given")), values, first=True)
        found = []
        for step in range(rounds + 2):
            began = time.monotonic()
            client.push(step, [GradientToPush("w", values, 0.1)], blocking=True)
            client.pull_parameters(step + 1, [("w", values)])
            found.append(time.monotonic() - began)
    return found[2:]


def plain(megabytes: int, rounds: int) -> list[float]:
    """Return the seconds for the same bytes over plain sockets, with the same number of processes."""
    words = [sys.executable, str(SCRIPTS / "rows.py"), "echo"]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(SERVERS)]
    size = megabytes * 1_000_000 // SERVERS
    found = []
    try:
        ports = [int(p.stdout.readline()) for p in started if p.stdout is not None]
        connections = [socket.create_connection(("127.0.0.1", port), LIMIT_S) for port in ports]
        memory = [memoryview(bytearray(size)) for _ in connections]

        def exchange(connection: socket.socket, view: memoryview) -> None:
            connection.sendall(size.to_bytes(8, "big"))
            connection.sendall(view)
            filled = 0
            while filled < size:
                filled += connection.recv_into(view[filled:])

        for _ in range(rounds + 2):
            began = time.monotonic()
            threads = [threading.Thread(target=exchange, args=pair) for pair in zip(connections, memory, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found.append(time.monotonic() - began)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return found[2:]


def rows(copies: int, rounds: int) -> float:
    """Return the rows of 64 floats per second that are pulled and pushed."""
    with server_processes(copies) as (client, _):
        client.declare(ParameterSpec("t", ROWS, WIDTH, "float32", True, SGD(0.1), InitialValues("zeros")), None, first=True)

        def step(number: int) -> int:
            wanted = np.unique(np.random.default_rng(number).zipf(1.2, BATCH) % ROWS)
            values = client.pull_rows(number, "t", wanted)
            client.push(number, [GradientToPush("t", values * np.float32(0.1), 0.1, wanted)], blocking=True)
            return len(wanted)

        step(0)
        began = time.monotonic()
        return sum(step(number) for number in range(1, rounds + 1)) / (time.monotonic() - began)


def rpc_rows(rounds: int) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [[sys.executable, str(SCRIPTS / "rpc_rows.py"), *map(str, (n, port, ROWS, WIDTH, BATCH, rounds))] for n in range(3)]
    started = [subprocess.Popen(word, stdout=subprocess.PIPE, text=True) for word in words]
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    return float(outputs[0].split()[-1])


def weight(count: int) -> tuple[float, float]:
    """Return the memory of a server with a table of `count` rows of 16 and momentum: divided by that of the data, and in GB."""
    from covey.parameter_server.optimizers import Momentum

    with server_processes(0, servers=1) as (client, [server]):
        client.declare(ParameterSpec("t", count, 16, "float32", True, Momentum(0.1), InitialValues("normal")), None, first=True)
        client.pull_rows(0, "t", np.arange(4096))
        size = server.memory_info().rss
    return size / (count * 16 * 4 * 2), size / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few rounds, small parameters and a small table")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each measurement (10; 3 with --quick)")
    parser.add_argument(
        "--table", type=int, default=0, help="rows of the table for the memory (10,000,000; 1,000,000 with --quick)"
    )
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 10)
    size = options.table or (1_000_000 if options.quick else 10_000_000)
    lines: list[list[str]] = []
    aims: list[Aim] = []
    data: dict[str, Any] = {"machine": machine(), "quick": options.quick, "whole": []}
    for megabytes in MEGABYTES[:2] if options.quick else MEGABYTES:
        raw = spread(plain(megabytes, rounds))
        for copies, limit in ((0, 0.6), (1, 0.3)):
            mine = spread(whole(copies, megabytes, rounds))
            ratio = raw.median / mine.median
            lines.append([str(megabytes), str(copies), _rate(megabytes, mine), _rate(megabytes, raw), f"{ratio:.2f}"])
            what = f"{megabytes} MB, copies {copies}, of a raw socket"
            aims.append(Aim(what, f"≥ {limit}", f"{ratio:.2f}", ratio >= limit))
            data["whole"].append({"what": what, "covey": mine._asdict(), "raw": raw._asdict()})
    many = 10 * rounds
    data["rows"] = {"copies 0": rows(0, many), "copies 1": rows(1, many), "torch.distributed.rpc": rpc_rows(many)}
    times, gigabytes = weight(size)
    data["memory"] = {"rows": size, "over rows and state": times, "GB": gigabytes}
    aims.append(Aim(f"memory of {size} x 16 and momentum", "≤ 1.3", f"{times:.2f} ({gigabytes:.2f} GB)", times <= 1.3))
    by_row = [[system, f"{rate:,.0f}"] for system, rate in data["rows"].items()]
    sections = [
        "## A complete parameter, pushed and pulled through two servers",
        table(["MB", "copies", "covey, GB/s", "raw sockets, GB/s", "ratio"], lines),
        "## Rows of 64 floats, pulled and pushed, Zipf, batch 4096",
        table(["system", "rows/s"], by_row),
        aims_table(aims),
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar([f"{line[0]} MB, copies {line[1]}" for line in lines], [float(line[4]) for line in lines])
        axes.set_ylabel("of a raw socket's speed")

    publish("params", data, sections, draw)


def _rate(megabytes: int, taken: Spread) -> str:
    return f"{2 * megabytes / 1000 / taken.median:.2f}"


if __name__ == "__main__":
    take_along()
    main()
