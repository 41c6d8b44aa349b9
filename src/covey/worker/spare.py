"""A spare's process: the line at which it waits for a rank, and its variables and log after a promotion to a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

from covey.core.messages import RankAssigned
from covey.runtime.child_environment import INCARNATION_VARIABLE, SPARE_STDERR_VARIABLE, SPARE_VARIABLE


def is_spare() -> bool:
    """Return whether this process was started as a spare; True also after its promotion."""
    return SPARE_VARIABLE in os.environ


def calling_script_line() -> str:
    """Return "file:line" of the innermost frame outside covey, with the file's name only; "an unknown line" if there is
    none."""
    package_path, frame = str(Path(__file__).parents[1]), _calling_frame()
    while frame is not None and frame.f_code.co_filename.startswith(package_path):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "an unknown line"


def _calling_frame() -> FrameType | None:
    return sys._getframe(1)


def assume_worker_identity(assignment: RankAssigned) -> None:
    """Set the rank and world variables of the assigned worker, and redirect stdout and stderr to its log. Raises `OSError` if
    the log cannot be opened."""
    rank, local = str(assignment.rank), str(assignment.local_rank)
    os.environ.update(dict.fromkeys(("RANK", "ROLE_RANK", "RANK_ID"), rank) | dict.fromkeys(("LOCAL_RANK", "DEVICE_ID"), local))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE", "RANK_SIZE"), str(assignment.world)))
    os.environ.update({"MS_NODE_ID": assignment.node_id, INCARNATION_VARIABLE: str(assignment.incarnation)})
    sys.stdout.flush()
    sys.stderr.flush()
    path = os.environ[SPARE_VARIABLE]
    for stream, pattern in ((1, path), (2, os.environ.get(SPARE_STDERR_VARIABLE, path))):
        descriptor = os.open(pattern.replace("{}", assignment.node_id), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, stream)
        os.close(descriptor)
