"""Fixtures of the tests with real processes (`harness`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Shell
from tests.processes.harness import Cluster
from tests.processes.healing import train_and_hash


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of two workers, not started yet; `start` and `run` accept any command."""
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell for `covey` commands in an empty directory."""
    with Shell(tmp_path) as shell:
        yield shell


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The hash of a training (`healing.SCRIPT`) without faults."""
    with Shell(tmp_path_factory.mktemp("undisturbed")) as shell:
        yield train_and_hash(shell)
