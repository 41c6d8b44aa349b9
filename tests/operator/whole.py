"""Samples on a whole Kubernetes: real scheduler, controllers, kubelet, containerd and runc. `make test-kubelet` runs it.

Not collected by a plain pytest: it needs root, and namespaces of its own (`whole.sh`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.cluster import Kubernetes
from tests.operator.node import Node
from tests.operator.server import Server
from tests.operator.test_samples import SAMPLES
from tests.operator.trainings import JOIN


class Whole(Kubernetes):
    """A namespace of a Kubernetes with a real node."""

    async def _kubelet(self) -> Any:
        return Node(self.server, self.api, self.namespace, self.folder)

    def story(self) -> str:
        node: Any = self.kubelet
        return f"{super().story()}\n{node.tails()}"


@pytest.fixture
def whole(server: Server, tmp_path: Path) -> Iterator[Whole]:
    kubernetes = Whole(server, f"t-{secrets.token_hex(4)}", tmp_path)
    try:
        yield kubernetes
    finally:
        kubernetes.end()


def sample(whole: Whole, name: str, script: str) -> dict[str, Any]:
    """A sample, with the folder it mounts where the test has one."""
    folder = whole.folder / "host"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    text = (SAMPLES / f"{name}.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(re.sub(r"(?m)^( +path: )/absolute_path$", rf"\g<1>{folder}", text))
    return found


def test_samples_run_to_their_end(whole: Whole) -> None:
    whole.operator()
    whole.apply(sample(whole, "ms_data_parallel", JOIN))
    whole.until("ms-data-parallel", "Succeeded", deadline_s=180)
    whole.heard("ms-data-parallel-worker-0", "world=4")
