"""Resizing and elastic training of running jobs on a real API server."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from tests.kubernetes.cluster import Kubernetes, conditions, job, replica
from tests.kubernetes.trainings import LONG
from tests.processes.harness import free_port

from covey.kubernetes.api_client import MSJOB, KubeObject

SLOW_S = 150.0


def elastic(kubernetes: Kubernetes, name: str, workers: int, command: list[str] | None = None, **more: Any) -> KubeObject:
    script = kubernetes.folder / "long.py"
    script.write_text(LONG)
    kubernetes.kubelet.environment = {"GO": str(kubernetes.folder / "go")}
    rest = [{"name": "MS_SCHED_MANAGE_PORT", "value": str(free_port())}]
    worker = replica(workers, command or ["python", str(script)])
    roles = {"Scheduler": replica(1, ["python", "-c", "import covey; covey.init()"], env=rest), "Worker": worker}
    return job(name, roles=roles, successPolicy="AllWorkers", runPolicy={"cleanPodPolicy": "None"}, **more)


def pids(kubernetes: Kubernetes, name: str) -> list[str]:
    return re.findall(r"began pid=(\d+)", kubernetes.kubelet.log(name))


def has_changed(kubernetes: Kubernetes, number: int, seen: int) -> bool:
    """Return whether worker 0 trains in a world of this size, the job has as many pods, and no resize is in progress."""
    has_resized = f"world {number}" in kubernetes.kubelet.log("more-worker-0")[seen:]
    return has_resized and len(kubernetes.pods("more")) == number + 1 and "scaling" not in kubernetes.status("more")


COVEY_RUN = ["covey", "run", "--no-live", "--tail_worker_log", "-1"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "numbers"), [(["python"], (3, 2)), (COVEY_RUN, (3, 2, 3))], ids=["init", "run"])
@pytest.mark.long
def test_running_job_is_resized_without_restart_and_reports_progress(
    kubernetes: Kubernetes, command: list[str], numbers: tuple[int, ...]
) -> None:
    kubernetes.operator()
    kubernetes.apply(elastic(kubernetes, "more", 2, [*command, str(kubernetes.folder / "long.py")]))
    for index in range(2):
        kubernetes.wait_for_log(f"more-worker-{index}", "step 4 world 2", SLOW_S)
    before = kubernetes.pods("more")
    kubernetes.wait(lambda: kubernetes.status("more").get("progress", {}).get("step", -1) > 3, "progress in status")
    progress = kubernetes.status("more")["progress"]
    assert (progress["world"], progress["generation"], progress["restarts"]) == (2, 1, 0)
    for number in numbers:
        kubernetes.patch("more", {"spec": {"replicas": number}}, sub="scale")
        seen = len(kubernetes.kubelet.log("more-worker-0"))
        kubernetes.wait(partial(has_changed, kubernetes, number, seen), f"a world of {number}", SLOW_S)
    assert "without a restart" in kubernetes.wait_for_event("more", "MSJobScaled")
    after, last = kubernetes.pods("more"), numbers[-1]
    assert all(after[name]["metadata"]["uid"] == before[name]["metadata"]["uid"] for name in before), "no pod was replaced"
    assert all(len(pids(kubernetes, f"more-worker-{index}")) == 1 for index in range(2)), "no process was restarted"
    kubernetes.wait(lambda: kubernetes.status("more")["progress"]["world"] == last, "the world in status")
    assert "scale-" in kubernetes.status("more")["progress"]["recovery"]
    scale = kubernetes.do(kubernetes.api.get(MSJOB, kubernetes.namespace, "more", "scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == last
    (kubernetes.folder / "go").touch()
    status = kubernetes.wait_for_condition("more", "Succeeded", deadline_s=SLOW_S)
    assert status["restartsTotal"] == 0 and status["workers"].endswith(f"/{last}")


@pytest.mark.timeout(300)
def test_elastic_training_continues_without_a_pending_replacement(kubernetes: Kubernetes) -> None:
    kubernetes.operator()
    annotations = {"recover-strategy": "elastic-training"}
    source = elastic(kubernetes, "small", 2, labels={"fault-scheduling": "grace"}, annotations=annotations)
    kubernetes.apply(source)
    for index in range(2):
        kubernetes.wait_for_log(f"small-worker-{index}", "step 4 world 2", SLOW_S)
    kubernetes.wait(lambda: kubernetes.status("small").get("progress", {}).get("step", -1) > 3, "progress in status")
    kubernetes.kubelet.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    kubernetes.kubelet.kill("small-worker-1")
    kubernetes.wait_for_log("small-worker-0", "world 1", SLOW_S)
    assert "small-worker-1" in kubernetes.wait_for_event("small", "MSJobShrunk")
    kubernetes.wait(lambda: "Running" in conditions(kubernetes.status("small")), "the job to be Running")
    assert "Insufficient" in kubernetes.wait_for_event("small", "Pending")
    seen = len(kubernetes.kubelet.log("small-worker-0"))
    kubernetes.do(kubernetes.kubelet.allow_scheduling())
    kubernetes.wait(lambda: "world 2" in kubernetes.kubelet.log("small-worker-0")[seen:], "the world to grow back", SLOW_S)
    assert "small-worker-1" in kubernetes.wait_for_event("small", "MSJobGrows") and len(pids(kubernetes, "small-worker-0")) == 1
    (kubernetes.folder / "go").touch()
    assert kubernetes.wait_for_condition("small", "Succeeded", deadline_s=SLOW_S)["restartsTotal"] == 1
