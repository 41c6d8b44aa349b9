"""Fifty kills and resizes in a row: every sample of every epoch is counted exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import chaos
from tests.processes.command import Shell


@pytest.mark.timeout(300)
@pytest.mark.long
def test_every_sample_counts_once_with_fifty_kills_and_resizes(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        counts = chaos.run(shell, events=50, seed=1)
        assert counts["killed"] > 10 and counts["scaled"] > 5, counts
