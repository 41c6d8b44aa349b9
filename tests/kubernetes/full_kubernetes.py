"""Samples on a whole Kubernetes: real scheduler, controllers, kubelet, containerd and runc. `make test-kubelet` runs it.

Not collected by a plain pytest: it needs root, and namespaces of its own (`full_kubernetes.sh`).
"""

from __future__ import annotations

import re
import secrets
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import yaml
from tests.kubernetes.cluster import Kubernetes, job, replica
from tests.kubernetes.node import Node
from tests.kubernetes.server import Server
from tests.kubernetes.test_samples import SAMPLES
from tests.kubernetes.trainings import JOIN

# Its first life waits to be killed, its second is done: the volume outlives the container, not the pod.
TWICE = "[ -e /keep/was ] && echo again && exit; touch /keep/was; echo first; exec sleep 98765"


class Whole(Kubernetes):
    """A namespace of a Kubernetes with a real node."""

    async def _kubelet(self) -> Any:
        return Node(self.server, self.api, self.namespace, self.folder)

    def story(self) -> str:
        node: Any = self.kubelet
        return f"{super().story()}\n{node.tails()}"


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    kubernetes = Whole(server, f"t-{secrets.token_hex(4)}", tmp_path_factory.mktemp("whole"))
    kubernetes.operator()
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


def test_a_sample_runs_to_its_end(whole: Whole) -> None:
    whole.apply(sample(whole, "ms_data_parallel", JOIN))
    whole.until("ms-data-parallel", "Succeeded", deadline_s=180)
    whole.heard("ms-data-parallel-worker-0", "world=4")


def test_a_killed_container_is_started_again_by_the_kubelet_and_counted(whole: Whole) -> None:
    mount = {"name": "keep", "mountPath": "/keep"}
    worker = replica(1, TWICE, "OnFailure", image="covey:latest", imagePullPolicy="IfNotPresent", volumeMounts=[mount])
    worker["template"]["spec"]["volumes"] = [{"name": "keep", "emptyDir": {}}]
    whole.apply(job("twice", roles={"Worker": worker}))
    whole.heard("twice-worker-0", "first")
    victim = whole.wait(lambda: [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98765"]], "it")
    victim[0].send_signal(signal.SIGKILL)
    status = whole.until("twice", "Succeeded")
    assert status["restartsTotal"] == 1

    async def said() -> list[str]:
        return [line async for line in whole.api.stream_log(whole.namespace, "twice-worker-0", "mindspore", follow=False)]

    assert "again" in "".join(whole.do(said()))
