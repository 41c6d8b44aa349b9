"""Settings of parameter serving, which must be equal on workers and servers."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

MESSAGE_MAX: Final = 4 << 30  # bytes of one message; default


class ConsistencyMode(StrEnum):
    """Which workers' gradients a value includes."""

    SYNC = "sync"  # those of all workers, step by step
    ASYNC = "async"  # those that have arrived
    BOUNDED = "bounded"  # as async, but no worker is more than `staleness` steps ahead of another


class ServingSettings(msgspec.Struct, frozen=True):
    """Settings of parameter serving."""

    servers: int
    workers: int
    mode: ConsistencyMode = ConsistencyMode.SYNC
    staleness: int = 0  # steps, for BOUNDED
    copies: int = 1
    refuse_nan: bool = True
    message_max: int = MESSAGE_MAX


def parse_mode(text: str) -> tuple[ConsistencyMode, int]:
    """Return mode and staleness of "sync", "async" or "bounded:3". Raise `ValueError` for anything else."""
    word, _, steps = text.strip().partition(":")
    mode = ConsistencyMode(word)
    if (mode is ConsistencyMode.BOUNDED) != bool(steps) or (steps and not steps.isdecimal()):
        raise ValueError(text)
    return mode, int(steps or 0)
