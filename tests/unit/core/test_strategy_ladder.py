"""The ladder of recovery strategies: its order and its names."""

from __future__ import annotations

import pytest

from covey.core.strategy_ladder import RecoveryStrategy, parse_strategies
from covey.errors import UsageError


def test_parse_strategies_sorts_by_ladder_appends_exit_and_rejects_unknown_names() -> None:
    assert parse_strategies([" dump", "retry", ""]) == (
        RecoveryStrategy.RETRY,
        RecoveryStrategy.DUMP,
        RecoveryStrategy.EXIT,
    )
    with pytest.raises(UsageError) as refused:
        parse_strategies(["hope"])
    assert str(refused.value) == f"the strategy hope is unknown: expected {', '.join(RecoveryStrategy)}"
