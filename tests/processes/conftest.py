"""Fixtures of the tests with real processes (`harness`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import shells
from tests.processes.harness import Cluster, running
from tests.processes.healing import train_and_hash


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of two workers, not started yet; `start` and `run` accept any command."""
    yield from running(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The hash of a training (`healing.SCRIPT`) without faults."""
    for shell in shells(tmp_path_factory.mktemp("undisturbed")):
        yield train_and_hash(shell)
