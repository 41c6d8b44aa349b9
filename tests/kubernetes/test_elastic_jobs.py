"""A running training on a real API server changes its size, and says how far it is."""

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
    """The others train in a world of that size, there are as many pods, and nothing is under way."""
    trains = f"world {number}" in kubernetes.kubelet.log("more-worker-0")[seen:]
    return trains and len(kubernetes.pods("more")) == number + 1 and "scaling" not in kubernetes.status("more")


COVEY_RUN = ["covey", "run", "--no-live", "--tail_worker_log", "-1"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "numbers"), [(["python"], (3, 2)), (COVEY_RUN, (3, 2, 3))], ids=["init", "run"])
@pytest.mark.long
def test_a_running_world_grows_and_shrinks_and_says_how_far_it_is(
    kubernetes: Kubernetes, command: list[str], numbers: tuple[int, ...]
) -> None:
    kubernetes.operator()
    kubernetes.apply(elastic(kubernetes, "more", 2, [*command, str(kubernetes.folder / "long.py")]))
    for index in range(2):
        kubernetes.heard(f"more-worker-{index}", "step 4 world 2", SLOW_S)
    before = kubernetes.pods("more")
    kubernetes.wait(lambda: kubernetes.status("more").get("progress", {}).get("step", -1) > 3, "progress in status")
    shown = kubernetes.status("more")["progress"]
    assert (shown["world"], shown["generation"], shown["restarts"]) == (2, 1, 0)
    for number in numbers:
        kubernetes.patch("more", {"spec": {"replicas": number}}, sub="scale")
        seen = len(kubernetes.kubelet.log("more-worker-0"))
        kubernetes.wait(partial(has_changed, kubernetes, number, seen), f"a world of {number}", SLOW_S)
    assert "nobody was restarted" in kubernetes.told("more", "MSJobScaled")
    after, last = kubernetes.pods("more"), numbers[-1]
    assert all(after[name]["metadata"]["uid"] == before[name]["metadata"]["uid"] for name in before), "nobody was restarted"
    assert all(len(pids(kubernetes, f"more-worker-{index}")) == 1 for index in range(2)), "they are in their processes"
    kubernetes.wait(lambda: kubernetes.status("more")["progress"]["world"] == last, "the world in status")
    assert "scale-" in kubernetes.status("more")["progress"]["recovery"]
    scale = kubernetes.do(kubernetes.api.get(MSJOB, kubernetes.namespace, "more", "scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == last
    (kubernetes.folder / "go").touch()
    status = kubernetes.until("more", "Succeeded", deadline_s=SLOW_S)
    assert status["restartsTotal"] == 0 and status["workers"].endswith(f"/{last}")


@pytest.mark.timeout(300)
def test_elastic_training_goes_on_without_a_pod_that_has_no_place_and_grows_back(kubernetes: Kubernetes) -> None:
    kubernetes.operator()
    notes = {"recover-strategy": "elastic-training"}
    asked = elastic(kubernetes, "small", 2, labels={"fault-scheduling": "grace"}, annotations=notes)
    kubernetes.apply(asked)
    for index in range(2):
        kubernetes.heard(f"small-worker-{index}", "step 4 world 2", SLOW_S)
    kubernetes.wait(lambda: kubernetes.status("small").get("progress", {}).get("step", -1) > 3, "the operator to look inside")
    kubernetes.kubelet.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    kubernetes.kubelet.kill("small-worker-1")
    kubernetes.heard("small-worker-0", "world 1", SLOW_S)
    assert "small-worker-1" in kubernetes.told("small", "MSJobShrunk")
    kubernetes.wait(lambda: "Running" in conditions(kubernetes.status("small")), "the job to be Running")
    assert "Insufficient" in kubernetes.told("small", "Pending")
    seen = len(kubernetes.kubelet.log("small-worker-0"))
    kubernetes.do(kubernetes.kubelet.make_room())
    kubernetes.wait(lambda: "world 2" in kubernetes.kubelet.log("small-worker-0")[seen:], "the world to grow back", SLOW_S)
    assert "small-worker-1" in kubernetes.told("small", "MSJobGrows") and len(pids(kubernetes, "small-worker-0")) == 1
    (kubernetes.folder / "go").touch()
    assert kubernetes.until("small", "Succeeded", deadline_s=SLOW_S)["restartsTotal"] == 1
