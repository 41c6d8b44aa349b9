"""Every scenario plays as it was recorded; `--record` records it anew."""

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
    assert played == recorded, f"the trace of {path.name} changed: read the difference; --record keeps it"


def test_there_are_scenarios() -> None:
    assert len(SCRIPTS) >= 8
