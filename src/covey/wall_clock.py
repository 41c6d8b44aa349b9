"""The wall clock, used for output and records only; decisions use monotonic clocks.

COVEY_FAULT_CLOCK tests that a wrong wall clock changes no decision. It names a file with the number of seconds that this clock
is wrong, which `covey chaos --faults clock` writes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FAULT_CLOCK_VARIABLE = "COVEY_FAULT_CLOCK"


def wall_time() -> float:
    """Return the seconds since 1970."""
    path = os.environ.get(FAULT_CLOCK_VARIABLE)
    return time.time() + (_read_clock_offset(Path(path)) if path else 0.0)


def _read_clock_offset(file: Path) -> float:
    try:
        return float(file.read_text() or 0)
    except (OSError, ValueError):  # missing, or incomplete while it is written
        return 0.0
