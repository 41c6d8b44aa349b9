"""Fixtures of the tests with real processes; what they give is in `harness`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import shells
from tests.processes.harness import Cluster, running
from tests.processes.healing import final


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of two workers, not started yet. Its `start` and `run` take any command."""
    yield from running(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The hash of a training (`healing.SCRIPT`) in which nothing happens."""
    for shell in shells(tmp_path_factory.mktemp("undisturbed")):
        yield final(shell)
