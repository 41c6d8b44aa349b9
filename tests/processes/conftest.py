"""Fixtures of the tests with real processes; what they give is in `harness`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.harness import Cluster, running


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of two workers, not started yet. Its `start` and `run` take any command."""
    yield from running(tmp_path)
