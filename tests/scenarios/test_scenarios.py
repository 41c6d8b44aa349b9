"""Comparison of every scenario with its recorded trace; `--record` rewrites the traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scenarios.scenario_player import play

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    recorded = path.read_text()
    played = play(recorded)
    if request.config.getoption("--record", default=False):
        path.write_text(played)
        return
    assert played == recorded, f"the trace of {path.name} changed: review the difference, then record it with --record"


def test_scenario_scripts_are_found() -> None:
    assert len(SCRIPTS) >= 8
