"""Names of the recovery strategies in the order of the ladder, and the limit of deaths without progress.

The module `cluster.recovery` chooses a strategy.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from covey.errors import UsageError

DEATHS_WITHOUT_PROGRESS_MAX: Final = 3  # deaths of one rank without a step committed in between


class RecoveryStrategy(StrEnum):
    """The recovery strategies, in the order of the ladder. `exit` is always enabled."""

    RETRY = "retry"
    IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    ELASTIC = "elastic-training"
    DUMP = "dump"
    EXIT = "exit"


def parse_strategies(names: Iterable[str]) -> tuple[RecoveryStrategy, ...]:
    """Return the named strategies in the order of the ladder, and `exit` in any case. Empty names are ignored.

    Raise `UsageError` for an unknown name.
    """
    known = {str(strategy): strategy for strategy in RecoveryStrategy}
    wanted = [name.strip() for name in names if name.strip()]
    for name in wanted:
        if name not in known:
            raise UsageError(f"the strategy {name} is unknown: expected {', '.join(known)}")
    return tuple(s for s in RecoveryStrategy if s in wanted or s is RecoveryStrategy.EXIT)
