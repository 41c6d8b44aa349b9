"""Fixtures: the API server of the test run, and a namespace of it per test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubernetes import server as servers
from tests.kubernetes.cluster import Kubernetes, running
from tests.kubernetes.server import Server
from tests.requirements import API_SERVER, require


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    require(API_SERVER)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    base = tmp_path_factory.getbasetemp()
    return servers.shared(base.parent if worker else base, os.getppid() if worker else os.getpid())


@pytest.fixture
def kubernetes(server: Server, tmp_path: Path) -> Iterator[Kubernetes]:
    yield from running(server, f"t-{secrets.token_hex(4)}", tmp_path)
