"""Wall clock, which tests can shift.

COVEY_FAULT_CLOCK names a file with the number of seconds by which this clock is ahead (negative: behind). `covey chaos --faults
clock` writes that file.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FAULT_CLOCK_VARIABLE = "COVEY_FAULT_CLOCK"


def wall_time() -> float:
    """Return the seconds since 1970, plus the offset in the file of COVEY_FAULT_CLOCK, if it can be read."""
    path = os.environ.get(FAULT_CLOCK_VARIABLE)
    return time.time() + (_read_clock_offset(Path(path)) if path else 0.0)


def _read_clock_offset(file: Path) -> float:
    try:
        return float(file.read_text() or 0)
    except (OSError, ValueError):  # missing, or partly written
        return 0.0
