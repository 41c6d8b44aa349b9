"""Worlds that change: every sample of an epoch counts once, and for as much as any other of its step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Shell, shells
from tests.processes.elastic import check, train


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


@pytest.mark.timeout(300)
def test_a_training_resumes_in_other_worlds(shell: Shell) -> None:
    """12 samples a step: 4 each of three ranks, 6 each of two, 2 or 3 each of five; never more than 2 at once."""
    train(shell, EVERY="5", STEPS="5")
    train(shell, "-n", "2", EVERY="10", STEPS="10")
    train(shell, "-n", "5", LOADERS="1")
    assert [(end["world"], end["steps"]) for end in check(shell)] == [(3, 5)] * 3 + [(2, 10)] * 2 + [(5, 15)] * 5
    assert "BEGINS at 10" in shell.log(4)
