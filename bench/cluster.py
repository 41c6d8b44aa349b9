"""One real scheduler process with many simulated nodes, and three scenarios, each measured stage by stage.

The scheduler is started by the MS_* variables, with its journal if recovery is enabled. Each figure is recorded as soon as it
is known, so that a stage that times out (`Late`) does not discard those before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.flock import ADDRESS, Late, NodePool
from bench.process import cpu_seconds, resident_kb
from covey.errors import ExitCode

FORM_LIMIT_S = 120.0
STAGE_LIMIT_S = 60.0
DEATHS = 5

Figures = dict[str, Any]


async def form_and_leave(size: int, found: Figures, beat_s: float = 0.0, kind: type[NodePool] = NodePool) -> None:
    """Form the cluster; then all nodes leave."""
    with scheduler(size) as process:
        pool = await _form(process, size, found, kind)
        await _leave(process, pool, found)


async def whole_life(size: int, found: Figures, beat_s: float, kind: type[NodePool] = NodePool) -> None:
    """Form the cluster, send heartbeats, lose and restore some nodes, leave."""
    with scheduler(size) as process:
        memory = resident_kb(process.pid)
        pool = await _form(process, size, found, kind)
        await _watch_beats(process, pool, found, beat_s)
        found["kb_per_node"] = (resident_kb(process.pid) - memory) / size
        await _lose_some(process, pool, found)
        await _leave(process, pool, found)


async def end_by_death(size: int, found: Figures, beat_s: float = 0.0, kind: type[NodePool] = NodePool) -> None:
    """Kill one node without recovery, which ends the cluster; measure the time until the last node received the end."""
    with scheduler(size, recovery=False) as process:
        pool = await _form(process, size, found, kind)
        cpu = cpu_seconds(process.pid)
        _, found["stop_s"] = await pool.lose(size // 2, STAGE_LIMIT_S)
        found["stop_cpu_s"] = cpu_seconds(process.pid) - cpu
        await _await_end(process, ExitCode.PEER_FAILED)


# -- stages ----------------------------------------------------------------------------------------------------------


async def _form(process: Scheduler, size: int, found: Figures, kind: type[NodePool]) -> NodePool:
    pool = kind(process.port, size)
    cpu, own = cpu_seconds(process.pid), time.process_time()
    found["form_s"] = await pool.form(FORM_LIMIT_S)
    found["form_cpu_s"], found["nodes_cpu_s"] = cpu_seconds(process.pid) - cpu, time.process_time() - own
    found["retries"] = pool.retries
    return pool


async def _watch_beats(process: Scheduler, pool: NodePool, found: Figures, seconds: float) -> None:
    await pool.all_beating()
    cpu, beats, began = cpu_seconds(process.pid), pool.beats, time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - began
    found["beats_per_s"] = (pool.beats - beats) / elapsed
    found["beat_share"] = (cpu_seconds(process.pid) - cpu) / elapsed


async def _lose_some(process: Scheduler, pool: NodePool, found: Figures) -> None:
    """Kill nodes one after the other; each returns before the next one is killed."""
    half: list[float] = []
    every: list[float] = []
    returned: list[float] = []
    cpu = cpu_seconds(process.pid)
    for number in range(0, pool.size, pool.size // DEATHS)[:DEATHS]:
        first, last = await pool.lose(number, STAGE_LIMIT_S)
        half.append(first)
        every.append(last)
        returned.append(await pool.bring_back(number, STAGE_LIMIT_S))
    found |= {"news_half_s": half, "news_all_s": every, "back_s": returned}
    found["death_cpu_s"] = (cpu_seconds(process.pid) - cpu) / DEATHS


async def _leave(process: Scheduler, pool: NodePool, found: Figures) -> None:
    cpu = cpu_seconds(process.pid)
    found["leave_s"] = await pool.leave(STAGE_LIMIT_S)
    found["leave_cpu_s"] = cpu_seconds(process.pid) - cpu
    await _await_end(process, ExitCode.OK)


async def _await_end(process: Scheduler, expected: ExitCode) -> None:
    try:
        code = await asyncio.to_thread(process.wait, STAGE_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Late(f"the scheduler did not exit within {STAGE_LIMIT_S:g} s after its last node") from None
    if code != expected:
        raise SystemExit(f"the scheduler exited with code {code}, expected {expected}")


# -- the scheduler ---------------------------------------------------------------------------------------------------


class Scheduler(subprocess.Popen[bytes]):
    """A scheduler process and its port."""

    port: int


@contextlib.contextmanager
def scheduler(size: int, *, recovery: bool = True) -> Iterator[Scheduler]:
    """Run a scheduler of a cluster of `size` workers."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        port = _free_port()
        variables = {
            "MS_ROLE": "MS_SCHED",
            "MS_SCHED_HOST": ADDRESS,
            "MS_SCHED_PORT": str(port),
            "MS_WORKER_NUM": str(size),
            "MS_SCHED_MANAGE_PORT": "0",
            "MS_ENABLE_RECOVERY": str(int(recovery)),
            "MS_RECOVERY_PATH": folder,
            "XDG_RUNTIME_DIR": folder,
            "XDG_CONFIG_HOME": folder,
        }
        command = [sys.executable, "-c", "import covey; covey.init()"]
        with (Path(folder) / "output").open("wb") as output:
            process = Scheduler(command, env=os.environ | variables, stdout=output, stderr=output)
        process.port = port
        try:
            _wait_until_listening(process)
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def _wait_until_listening(process: Scheduler) -> None:
    deadline = time.monotonic() + STAGE_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((ADDRESS, process.port), timeout=1):
            return
        time.sleep(0.02)
    raise SystemExit(f"the scheduler does not listen at {ADDRESS}:{process.port} (exit code: {process.poll()})")
