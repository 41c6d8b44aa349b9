"""Benchmark of federated learning: updates per CPU-second, duration of a round, simulation of 1,000 devices.

Updates: devices join first; then their updates are sent over a few keep-alive connections, and the servers' CPU time is read
before and after. Rounds: devices are processes that add a constant, so the framework takes all the time. The peer is Flower's
persistent gRPC path (`start_server`, `start_client`) with the same clients, in its own environment, and with 4 clients and 3
rounds its deployment path (SuperLink, SuperNodes, `flwr run`). Simulation: the rounds of `covey federated simulate`. Privacy is
measured by `bench.private` (only that with `--private`), memory by `bench.memory` (only that with `--memory`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from safetensors.numpy import save_file

from bench import memory, peers, private
from bench.process import take_along
from bench.report import Aim, Spread, aims_table, machine, publish, spread, table
from covey.federated import FedAvg
from covey.federated.context import CONTEXT_VARIABLE
from covey.federated.device.client import Device
from covey.federated.model_codec import view_bytes
from covey.federated.simulation.simulator import simulate
from covey.transport.address import find_free_port

SCRIPTS = Path(__file__).parent / "scripts"
SIZES = {"62 k": 62_006, "1 M": 1_000_000}
CONNECTIONS = 4
ROLES = ("MS_SERVER", "MS_SCHED")


class Running(msgspec.Struct):
    """A running cluster: server URLs, and the server and scheduler processes."""

    urls: list[str]
    servers: list[Any]
    schedulers: list[Any]


@contextmanager
def cluster(size: int, servers: int, threshold: int, durability: str, **settings: Any) -> Iterator[Running]:
    """Run `covey federated up` with a model of `size` values."""
    with tempfile.TemporaryDirectory() as folder:
        save_file({"w": np.zeros(size, np.float32)}, f"{folder}/model.safetensors")
        first = _ports(servers)
        words = ["--servers", servers, "--threshold", threshold, "--iterations", 1_000_000, "--durability", durability]
        words += ["--port", first, "--scheduler-port", find_free_port("127.0.0.1"), "--manage-port", 0, "--dir", folder]
        windows = ["start_fl_job_time_window", "update_model_time_window"]
        settings |= dict.fromkeys(windows, 3_600_000)
        words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "covey.cli.main", "federated", "up", *map(str, words), f"{folder}/model.safetensors"]
        up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            assert up.stdout is not None and "started" in up.stdout.readline(), "the cluster did not start"
            children = psutil.Process(up.pid).children()
            chosen, scheduler = (
                [p for p in children if f'"{role}"' in p.environ().get(CONTEXT_VARIABLE, "")] for role in ROLES
            )
            yield Running([f"http://127.0.0.1:{first + n}" for n in range(servers)], chosen, scheduler)
        finally:
            up.terminate()
            up.wait()


def _ports(count: int) -> int:
    while True:
        first = find_free_port("127.0.0.1")
        try:
            for number in range(1, count):
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", first + number))
            return first
        except OSError:
            continue


def measure_updates(size: int, servers: int, durability: str, count: int) -> dict[str, Any]:
    """Return updates per second of the servers' CPU time and of wall time, and CPU microseconds per update."""
    with cluster(size, servers, count + 1, durability) as running:
        sent = [_prepare(running.urls[n % servers], n) for n in range(count)]
        before = [_cpu(process) for process in running.servers]
        started = time.perf_counter()
        threads = [
            threading.Thread(target=_send, args=(running.urls[n % servers], sent[n :: CONNECTIONS * servers]))
            for n in range(CONNECTIONS * servers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - started
        cpu = sum(_cpu(process) - was for process, was in zip(running.servers, before, strict=True))
    return {"per_cpu_second": count / cpu, "per_second": count / wall, "us": 1e6 * cpu / count}


def _prepare(url: str, number: int) -> bytes:
    """Join a round, and return the HTTP head and safetensors header of the update."""
    with Device(url, f"device-{number}", data_size=10) as device:
        task = device.join()
        assert task is not None
        fields = {"fl_id": device.fl_id, "iteration": str(task.iteration), "ticket": task.ticket, "data_size": "10"}
        head = task._layout.encode_header({**fields, "timestamp": str(int(1000 * time.time()))})
        length = len(head) + view_bytes(task.flat).nbytes
        _prepare.data = view_bytes(task.flat)  # type: ignore[attr-defined]
        return b"POST /updateModel HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length + head


def _send(url: str, heads: list[bytes]) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    data = _prepare.data  # type: ignore[attr-defined]
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for head in heads:
            sock.sendmsg([head])
            sock.sendall(data)
            answer = sock.recv(4096)
            assert b'"retcode":200' in answer, answer


def _cpu(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure_rounds(size: int, clients: int, rounds: int) -> dict[str, float]:
    """Return milliseconds per round, measured by the first client."""
    with cluster(size, 1, clients, "process") as running:
        words = [sys.executable, str(SCRIPTS / "federated_device.py"), ",".join(running.urls)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*words, f"d{n}", str(rounds)], stdout=subprocess.PIPE, text=True, env=environ)
            for n in range(clients)
        ]
        out = [process.communicate()[0] for process in started]
    stamps = [float(line.split()[1]) for line in out[0].splitlines()]
    steps = sorted(1000 * (b - a) for a, b in pairwise(stamps[2:]))
    return {"median": statistics.median(steps), "p95": steps[int(0.95 * len(steps))]}


def measure_flower(
    size: int, clients: int, rounds: int, python: str, script: str = "federated_flower.py"
) -> dict[str, float] | None:
    """Return the same for Flower, with its persistent path or the path of another script; None if that fails."""
    done = subprocess.run([python, str(SCRIPTS / script), str(size), str(clients), str(rounds)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, float] | None = json.loads(lines[-1]) if lines else None
    return found


class Found(msgspec.Struct):
    """Measurements, by (model, servers, durability) or by (model, clients)."""

    updates: dict[tuple[str, int, str], dict[str, Any]]
    rounds: dict[tuple[str, int], dict[str, float]]
    flower: dict[tuple[str, int], dict[str, float] | None]
    deployed: dict[str, float] | None  # Flower's deployment path
    simulated: Spread
    resident: list[dict[str, float]]
    secure: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, the small model, and only Flower's persistent path")
    parser.add_argument("--private", action="store_true", help="measure only the cost of privacy")
    parser.add_argument("--memory", action="store_true", help="measure only the memory used per device")
    options = parser.parse_args()
    about = {"machine": machine(), "quick": options.quick}
    resident = memory.measure(cluster, few=options.quick) if not options.private else []
    if options.memory:
        return _publish_memory(about, resident)
    secure = private.measure(cluster, SIZES["62 k"], few=options.quick)
    if options.private:
        return _publish_private(about, secure)
    python = str(peers.python_of("flower", install=not options.quick) or "")
    found = _measure(options.quick, python, resident, secure)
    return _publish(about, found, "" if python else "Flower is not installed here, so its column is empty.")


def _measure(few: bool, python: str, resident: list[dict[str, float]], secure: dict[str, Any]) -> Found:
    updates = {
        (label, servers, durability): measure_updates(
            size, servers, durability, (300 if few else 2000) if size < 10**6 else 100
        )
        for label, size in SIZES.items()
        for servers, durability in ((1, "none"), (1, "process"), (1, "disk"), (2, "process"), (2, "host"))
        if not (few and (label == "1 M" or durability in ("disk", "host")))
    }
    cases = [
        (label, size, clients)
        for label, size in SIZES.items()
        for clients in (4, 10)
        if not (few and (size >= 10**6 or clients > 4))
    ]
    rounds = {(label, clients): measure_rounds(size, clients, 20 if few else 100) for label, size, clients in cases}
    flower = {
        (label, clients): measure_flower(size, clients, 20 if few else 50, python) if python else None
        for label, size, clients in cases
    }
    deployed = measure_flower(SIZES["62 k"], 4, 3, python, "federated_flower_deployed.py") if python and not few else None
    simulated = spread([one.framework_s for one in simulate(1000, 3 if few else 10, FedAvg())])
    return Found(updates, rounds, flower, deployed, simulated, resident, secure)


def _aims(found: Found) -> list[Aim]:
    one, none = found.updates[("62 k", 1, "process")], found.updates[("62 k", 1, "none")]
    two, simulated = found.updates[("62 k", 2, "process")], found.simulated
    aims = [
        _aim("updates of 250 KB per CPU-second, durability process", 1500, one["per_cpu_second"]),
        _aim("the same with durability none", 2500, none["per_cpu_second"]),
        Aim("1,000 simulated devices, framework per round", "at most 1 s", simulated.show(" s", 3), simulated.median <= 1),
        Aim(
            "two servers against one, updates per second",
            "at least 1.6 x where two cores are free (the clients need one of this machine's)",
            f"{two['per_second'] / one['per_second']:.2f} x",
            two["per_second"] >= 1.6 * one["per_second"],
        ),
        *memory.aims(found.resident),
        *private.aims(found.secure),
    ]
    for (label, clients), flower in found.flower.items():
        if flower is not None:
            ours, theirs = found.rounds[(label, clients)]["median"], flower["median"]
            what = f"a round of {clients} clients, {label}, against Flower's persistent path"
            aims.append(Aim(what, f"at most {theirs:.1f} ms", f"{ours:.1f} ms", ours <= theirs))
    if found.deployed is not None:
        ours, theirs = found.rounds[("62 k", 4)]["median"], found.deployed["median"]
        what = "a round of 4 clients, 62 k, against Flower's deployment path"
        aims.append(Aim(what, f"at most a tenth of {theirs:.0f} ms", f"{ours:.1f} ms", ours <= theirs / 10))
    return aims


def _publish(about: dict[str, Any], found: Found, remark: str) -> None:
    aims = _aims(found)
    update_rows = [
        [label, str(servers), durability, f"{row['per_cpu_second']:.0f}", f"{row['us']:.0f}", f"{row['per_second']:.0f}"]
        for (label, servers, durability), row in found.updates.items()
    ]
    round_rows = [
        [key[0], str(key[1]), f"{row['median']:.1f}", f"{row['p95']:.1f}", _shown(found.flower[key])]
        for key, row in found.rounds.items()
    ]
    sections = [
        aims_table(aims),
        table(["model", "servers", "durability", "updates per CPU-second", "CPU us each", "per second"], update_rows),
        table(["model", "clients", "covey, ms per round", "p95", "Flower start_server, ms per round"], round_rows),
        table(["model", "clients", "Flower SuperLink and SuperNodes, ms per round"], [["62 k", "4", _shown(found.deployed)]]),
        memory.section(found.resident),
        *private.sections(found.secure),
        remark,
    ]
    data = {
        **about,
        "updates": [{"model": k[0], "servers": k[1], "durability": k[2], **v} for k, v in found.updates.items()],
        "rounds": [{"model": k[0], "clients": k[1], **v, "flower": found.flower[k]} for k, v in found.rounds.items()],
        "flower_deployed": found.deployed,
        "memory": found.resident,
        "private": found.secure,
        "simulated_s": found.simulated._asdict(),
        "aims": [aim._asdict() for aim in aims],
    }

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names = [f"{label}, {servers} x {durability}" for label, servers, durability in found.updates]
        axes.barh(names, [row["per_cpu_second"] for row in found.updates.values()])
        axes.set_xlabel("updates per second of the servers' CPU")
        axes.invert_yaxis()

    publish("federated", data, sections, draw)


def _publish_private(about: dict[str, Any], found: dict[str, Any]) -> None:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names = [f"{one['kind']} {one['rate']:g}" for one in found["small"]]
        axes.barh(names, [one["bytes"] for one in found["small"]])
        axes.set_xlabel("bytes of values per upload, embedded digits")
        axes.invert_yaxis()

    aims = private.aims(found)
    data = {**about, "private": found, "aims": [aim._asdict() for aim in aims]}
    publish("federated-private", data, [aims_table(aims), *private.sections(found)], draw)


def _publish_memory(about: dict[str, Any], rows: list[dict[str, float]]) -> None:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name in ("server_mb", "scheduler_mb"):
            axes.plot([row["devices"] for row in rows], [row[name] for row in rows], marker="o", label=name.removesuffix("_mb"))
        axes.set_xlabel("distinct devices so far")
        axes.set_ylabel("resident MB")
        axes.set_ylim(bottom=0)
        axes.legend()

    aims = memory.aims(rows)
    data = {**about, "memory": rows, "aims": [aim._asdict() for aim in aims]}
    publish("federated-memory", data, [aims_table(aims), memory.section(rows)], draw)


def _aim(what: str, least: float, found: float) -> Aim:
    return Aim(what, f"at least {least:g}", f"{found:.0f}", found >= least)


def _shown(row: dict[str, float] | None) -> str:
    return f"{row['median']:.1f} (p95 {row['p95']:.1f})" if row is not None else ""


if __name__ == "__main__":
    take_along()
    main()
