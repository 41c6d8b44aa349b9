"""The wall clock, as people know it: for what is shown and told, never for what is decided.

Decisions take times from clocks that cannot jump. That a wrong wall clock changes nothing is tried with COVEY_FAULT_CLOCK: it
names a file with the seconds by which this clock is to be wrong, and `covey chaos --faults clock` writes it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FAULT_CLOCK_VARIABLE = "COVEY_FAULT_CLOCK"


def wall_time() -> float:
    """Seconds since 1970."""
    named = os.environ.get(FAULT_CLOCK_VARIABLE)
    return time.time() + (_read_clock_offset(Path(named)) if named else 0.0)


def _read_clock_offset(file: Path) -> float:
    try:
        return float(file.read_text() or 0)
    except (OSError, ValueError):  # not there yet, or being written
        return 0.0
