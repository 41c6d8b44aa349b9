"""How parameters are served in this cluster: what workers and servers must agree on."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

MESSAGE_MAX: Final = 4 << 30  # bytes of one message, unless the setting says otherwise


class ConsistencyMode(StrEnum):
    """Whose gradients a value has seen."""

    SYNC = "sync"  # of all workers, step by step
    ASYNC = "async"  # of whoever was faster
    BOUNDED = "bounded"  # likewise, but no worker is more than so many steps ahead of another


class ServingSettings(msgspec.Struct, frozen=True):
    """The settings of parameter serving."""

    servers: int
    workers: int
    mode: ConsistencyMode = ConsistencyMode.SYNC
    staleness: int = 0  # of BOUNDED
    copies: int = 1
    refuse_nan: bool = True
    message_max: int = MESSAGE_MAX


def parse_mode(text: str) -> tuple[ConsistencyMode, int]:
    """ "sync", "async" or "bounded:3"; raises ValueError."""
    word, _, steps = text.strip().partition(":")
    mode = ConsistencyMode(word)
    if (mode is ConsistencyMode.BOUNDED) != bool(steps) or (steps and not steps.isdecimal()):
        raise ValueError(text)
    return mode, int(steps or 0)
