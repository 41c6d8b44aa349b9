"""What the kernel says of another process: its CPU time, its memory. And the end of a benchmark that is asked to go."""

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
    """User and system time of all its threads, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_kb(pid: int) -> int:
    """Resident set size in KB."""
    return _kb(Path(f"/proc/{pid}/status"), "VmRSS:")


def proportional_mb(pid: int) -> float:
    """Proportional set size in MB: pages shared with others count by their share."""
    return _kb(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") / _MEGABYTE_KB


def _kb(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise KeyError(key)


def take_along() -> None:
    """Asked to go (SIGTERM), this process ends all that it started first: nothing would end it otherwise."""

    def end(number: int, _: Any) -> None:
        family = psutil.Process().children(recursive=True)  # all of them, before the first death makes orphans of some
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
