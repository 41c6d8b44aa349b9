"""Jobs on a complete Kubernetes node: real scheduler, controllers, kubelet, containerd and runc (`make test-kubelet`).

Not collected by a plain pytest, because it needs root and Linux namespaces that `full_kubernetes.sh` creates.
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

# The first container sleeps until it is killed, the second exits: the volume outlives the container, not the pod.
TWICE = "[ -e /keep/was ] && echo again && exit; touch /keep/was; echo first; exec sleep 98765"


class FullKubernetes(Kubernetes):
    """A namespace of a Kubernetes cluster with a real node."""

    async def _kubelet(self) -> Any:
        return Node(self.server, self.api, self.namespace, self.folder)

    def diagnostics(self) -> str:
        node: Any = self.kubelet
        return f"{super().diagnostics()}\n{node.tails()}"


@pytest.fixture(scope="module")
def full(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FullKubernetes]:
    kubernetes = FullKubernetes(server, f"t-{secrets.token_hex(4)}", tmp_path_factory.mktemp("full"))
    kubernetes.operator()
    try:
        yield kubernetes
    finally:
        kubernetes.end()


def sample(full: FullKubernetes, name: str, script: str) -> dict[str, Any]:
    """Return a sample that mounts a directory of the test, with `script` as its train.py."""
    directory = full.folder / "host"
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(script)
    text = (SAMPLES / f"{name}.yaml").read_text()
    parsed: dict[str, Any] = yaml.safe_load(re.sub(r"(?m)^( +path: )/absolute_path$", rf"\g<1>{directory}", text))
    return parsed


def test_sample_succeeds(full: FullKubernetes) -> None:
    full.apply(sample(full, "ms_data_parallel", JOIN))
    full.wait_for_condition("ms-data-parallel", "Succeeded", deadline_s=180)
    full.wait_for_log("ms-data-parallel-worker-0", "world=4")


def test_kubelet_restart_of_a_killed_container_is_counted(full: FullKubernetes) -> None:
    mount = {"name": "keep", "mountPath": "/keep"}
    worker = replica(1, TWICE, "OnFailure", image="covey:latest", imagePullPolicy="IfNotPresent", volumeMounts=[mount])
    worker["template"]["spec"]["volumes"] = [{"name": "keep", "emptyDir": {}}]
    full.apply(job("twice", roles={"Worker": worker}))
    full.wait_for_log("twice-worker-0", "first")
    victim = full.wait(
        lambda: [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98765"]], "sleep"
    )
    victim[0].send_signal(signal.SIGKILL)
    status = full.wait_for_condition("twice", "Succeeded")
    assert status["restartsTotal"] == 1

    async def read_log() -> list[str]:
        return [line async for line in full.api.stream_log(full.namespace, "twice-worker-0", "mindspore", follow=False)]

    assert "again" in "".join(full.do(read_log()))
