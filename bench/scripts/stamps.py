"""Times of a rank's stages and steps, on the monotonic clock that all processes of a host share; written without a buffer."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Stamps:
    """The file `RANK.stamps` in a directory. `started` is the time at which the script began, before it had a rank."""

    def __init__(self, folder: str, rank: int, started: float) -> None:
        self._file = os.open(Path(folder) / f"{rank}.stamps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.add("started", at=started)

    def add(self, kind: str, step: int = -1, at: float | None = None) -> None:
        os.write(self._file, f"{kind} {step} {time.monotonic() if at is None else at} {os.getpid()}\n".encode())
