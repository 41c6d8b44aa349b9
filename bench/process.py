"""CPU time and memory of other processes, from /proc, and the handling of SIGTERM in a benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil

_TICKS = os.sysconf("SC_CLK_TCK")
_MEGABYTE_KB = 1024


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process; resolution 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_kb(pid: int) -> int:
    """Return the resident set size in KB."""
    return _kb(Path(f"/proc/{pid}/status"), "VmRSS:")


def proportional_mb(pid: int) -> float:
    """Return the proportional set size in MB: shared pages are divided by the number of processes that share them."""
    return _kb(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") / _MEGABYTE_KB


def _kb(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise KeyError(key)


def take_along() -> None:
    """Install a SIGTERM handler that kills all descendants before this process exits, because they would keep running."""

    def end(number: int, _: Any) -> None:
        family = psutil.Process().children(recursive=True)  # listed before the first kill, which orphans its children
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
