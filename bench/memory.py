"""Resident memory of a federated server and its scheduler as the number of distinct devices grows.

Every device joins, sends one small update and does not return; a round has a thousand of them. State per device must be cleared
with the round, so the memory after all devices should equal that after the first thousand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.report import Aim, table
from covey.federated.device.client import Device

VALUES = 1000
THREADS = 4
MOST = 1.15  # times the memory after the first rounds


def measure(cluster: Callable[..., Any], *, few: bool) -> list[dict[str, float]]:
    """Return the memory in MB after increasing numbers of devices."""
    per_round, marks = (100, (200, 1000, 2000)) if few else (1000, (1000, 10_000, 50_000))
    rows, came = [], 0
    with cluster(VALUES, 1, per_round, "process", device_rate=100_000.0) as running:
        for mark in marks:
            numbers = range(came, mark)
            threads = [threading.Thread(target=_live, args=(running.urls, numbers[n::THREADS])) for n in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            came = mark
            server, scheduler = (_megabytes(processes[0]) for processes in (running.servers, running.schedulers))
            rows.append({"devices": mark, "rounds": mark // per_round, "server_mb": server, "scheduler_mb": scheduler})
    return rows


def _live(urls: list[str], numbers: range) -> None:
    values = np.ones(VALUES, np.float32)
    with Device(urls, data_size=1) as device:  # one connection, many devices
        for number in numbers:
            device.fl_id = f"device-{number}"
            device.mark_counted(0)
            task = device.join()
            while task is not None and not task.send(values):
                task = device.join()


def _megabytes(process: Any) -> float:
    return float(process.memory_info().rss / 2**20)


def aims(rows: list[dict[str, float]]) -> list[Aim]:
    first, last = rows[0], rows[-1]
    return [
        Aim(
            f"memory of a {name} after {last['devices']:,} devices against after {first['devices']:,}",
            f"at most {MOST:g} x",
            f"{last[f'{name}_mb'] / first[f'{name}_mb']:.2f} x ({first[f'{name}_mb']:.0f} to {last[f'{name}_mb']:.0f} MB)",
            last[f"{name}_mb"] <= MOST * first[f"{name}_mb"],
        )
        for name in ("server", "scheduler")
    ]


def section(rows: list[dict[str, float]]) -> str:
    columns = ("devices", "rounds", "server_mb", "scheduler_mb")
    shown = [[f"{row[name]:,.1f}".removesuffix(".0") for name in columns] for row in rows]
    return table(["distinct devices so far", "rounds", "server, MB", "scheduler, MB"], shown)
