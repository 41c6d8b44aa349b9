"""Fifty kills and resizes in a row: every sample of every epoch is counted exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import chaos
from tests.processes.command import shells


@pytest.mark.timeout(300)
@pytest.mark.long
def test_every_sample_counts_once_with_fifty_kills_and_resizes(tmp_path: Path) -> None:
    for shell in shells(tmp_path):
        counts = chaos.run(shell, events=50, seed=1)
        assert counts["killed"] > 10 and counts["scaled"] > 5, counts
