"""Settings of parameter serving."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

MESSAGE_MAX: Final = 4 << 30  # bytes of one message; default


class ConsistencyMode(StrEnum):
    """Which gradients are included in the value that a worker pulls for a step."""

    SYNC = "sync"  # those of all workers for the steps before it
    ASYNC = "async"  # those that have arrived
    BOUNDED = "bounded"  # as async, but a pull waits while the worker is more than `staleness` steps ahead of another


class ServingSettings(msgspec.Struct, frozen=True):
    """Settings of parameter serving, as workers and servers use them."""

    servers: int  # at formation
    workers: int
    mode: ConsistencyMode = ConsistencyMode.SYNC
    staleness: int = 0  # steps, for BOUNDED
    copies: int = 1  # replicas of each server's rows; 0: none
    refuse_nan: bool = True  # refuse gradients with NaN or infinite values
    message_max: int = MESSAGE_MAX  # bytes


def parse_mode(text: str) -> tuple[ConsistencyMode, int]:
    """Return mode and staleness of "sync", "async" (staleness 0) or "bounded:N". Raise `ValueError` if `text` is invalid."""
    word, _, steps = text.strip().partition(":")
    mode = ConsistencyMode(word)
    if (mode is ConsistencyMode.BOUNDED) != bool(steps) or (steps and not steps.isdecimal()):
        raise ValueError(text)
    return mode, int(steps or 0)
