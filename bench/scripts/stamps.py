"""Stamps of what a rank does, on the clock all processes of a host share; one line each, written at once: a kill loses none."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Stamps:
    """`RANK.stamps` in a folder. `started` is when this script began, before it knew its rank."""

    def __init__(self, folder: str, rank: int, started: float) -> None:
        self._file = os.open(Path(folder) / f"{rank}.stamps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.add("started", at=started)

    def add(self, kind: str, step: int = -1, at: float | None = None) -> None:
        os.write(self._file, f"{kind} {step} {time.monotonic() if at is None else at} {os.getpid()}\n".encode())
