"""One real scheduler process with a flock of thin nodes, and three stories of it, each watched stage by stage.

The scheduler is started by the MS_* variables, with its journal on where recovery is. Figures are put down as they are known,
so that a stage that takes too long (`Late`) does not hide those before it.
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

from bench.flock import ADDRESS, Flock, Late
from bench.process import cpu_seconds, resident_kb
from covey.errors import ExitCode

FORM_LIMIT_S = 120.0
STAGE_LIMIT_S = 60.0
DEATHS = 5

Figures = dict[str, Any]


async def form_and_leave(size: int, found: Figures, beat_s: float = 0.0, kind: type[Flock] = Flock) -> None:
    """Everyone comes, everyone goes."""
    with scheduler(size) as process:
        flock = await _form(process, size, found, kind)
        await _leave(process, flock, found)


async def whole_life(size: int, found: Figures, beat_s: float, kind: type[Flock] = Flock) -> None:
    """Form, beat, lose some nodes that come back, leave."""
    with scheduler(size) as process:
        memory = resident_kb(process.pid)
        flock = await _form(process, size, found, kind)
        await _watch_beats(process, flock, found, beat_s)
        found["kb_per_node"] = (resident_kb(process.pid) - memory) / size
        await _lose_some(process, flock, found)
        await _leave(process, flock, found)


async def end_by_death(size: int, found: Figures, beat_s: float = 0.0, kind: type[Flock] = Flock) -> None:
    """Without recovery the death of one ends all: how long until the last one is told to stop?"""
    with scheduler(size, recovery=False) as process:
        flock = await _form(process, size, found, kind)
        cpu = cpu_seconds(process.pid)
        _, found["stop_s"] = await flock.lose(size // 2, STAGE_LIMIT_S)
        found["stop_cpu_s"] = cpu_seconds(process.pid) - cpu
        await _await_end(process, ExitCode.PEER_FAILED)


# -- stages ----------------------------------------------------------------------------------------------------------


async def _form(process: Scheduler, size: int, found: Figures, kind: type[Flock]) -> Flock:
    flock = kind(process.port, size)
    cpu, own = cpu_seconds(process.pid), time.process_time()
    found["form_s"] = await flock.form(FORM_LIMIT_S)
    found["form_cpu_s"], found["nodes_cpu_s"] = cpu_seconds(process.pid) - cpu, time.process_time() - own
    found["retries"] = flock.retries
    return flock


async def _watch_beats(process: Scheduler, flock: Flock, found: Figures, seconds: float) -> None:
    await flock.all_beating()
    cpu, beats, began = cpu_seconds(process.pid), flock.beats, time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - began
    found["beats_per_s"] = (flock.beats - beats) / elapsed
    found["beat_share"] = (cpu_seconds(process.pid) - cpu) / elapsed


async def _lose_some(process: Scheduler, flock: Flock, found: Figures) -> None:
    """Kill nodes one after the other, each coming back before the next one goes."""
    half: list[float] = []
    every: list[float] = []
    back: list[float] = []
    cpu = cpu_seconds(process.pid)
    for number in range(0, flock.size, flock.size // DEATHS)[:DEATHS]:
        first, last = await flock.lose(number, STAGE_LIMIT_S)
        half.append(first)
        every.append(last)
        back.append(await flock.bring_back(number, STAGE_LIMIT_S))
    found |= {"news_half_s": half, "news_all_s": every, "back_s": back}
    found["death_cpu_s"] = (cpu_seconds(process.pid) - cpu) / DEATHS


async def _leave(process: Scheduler, flock: Flock, found: Figures) -> None:
    cpu = cpu_seconds(process.pid)
    found["leave_s"] = await flock.leave(STAGE_LIMIT_S)
    found["leave_cpu_s"] = cpu_seconds(process.pid) - cpu
    await _await_end(process, ExitCode.OK)


async def _await_end(process: Scheduler, expected: ExitCode) -> None:
    try:
        code = await asyncio.to_thread(process.wait, STAGE_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Late(f"the scheduler had not ended {STAGE_LIMIT_S:g} s after its last node") from None
    if code != expected:
        raise SystemExit(f"the scheduler ended with code {code}, {expected} was expected")


# -- the scheduler ---------------------------------------------------------------------------------------------------


class Scheduler(subprocess.Popen[bytes]):
    """The process, and where it listens."""

    port: int


@contextlib.contextmanager
def scheduler(size: int, *, recovery: bool = True) -> Iterator[Scheduler]:
    """A scheduler that waits for `size` workers."""
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
            _await_door(process)
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def _await_door(process: Scheduler) -> None:
    deadline = time.monotonic() + STAGE_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((ADDRESS, process.port), timeout=1):
            return
        time.sleep(0.02)
    raise SystemExit(f"the scheduler did not listen at {ADDRESS}:{process.port} (its exit code: {process.poll()})")
