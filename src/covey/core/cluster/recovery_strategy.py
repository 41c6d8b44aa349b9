"""The recovery strategies, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from covey.errors import UsageError

DEATHS_WITHOUT_PROGRESS_MAX = 3  # deaths of one rank without a step committed in between


class RecoveryStrategy(StrEnum):
    """The rungs, in the ladder's order."""

    RETRY = "retry"
    IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    ELASTIC = "elastic-training"
    DUMP = "dump"
    EXIT = "exit"


def parse_strategies(names: Iterable[str]) -> tuple[RecoveryStrategy, ...]:
    """Strategies in the ladder's order, whatever order they were named in; `exit` is always the last."""
    known = {str(strategy): strategy for strategy in RecoveryStrategy}
    wanted = [name.strip() for name in names if name.strip()]
    for name in wanted:
        if name not in known:
            raise UsageError(f"the strategy {name} is not known: {', '.join(known)} are")
    return tuple(s for s in RecoveryStrategy if s in wanted or s is RecoveryStrategy.EXIT)
