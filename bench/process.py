"""What the kernel says of another process: its CPU time, its memory."""

from __future__ import annotations

import os
from pathlib import Path

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
