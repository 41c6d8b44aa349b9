"""A running training on a real API server changes its size, and says how far it is."""

from __future__ import annotations

import re
from functools import partial

import pytest
from tests.operator.cluster import Kubernetes, job, replica
from tests.operator.trainings import LONG
from tests.processes.harness import free_port

from covey.operator.api import MSJOB, Thing

SLOW_S = 150.0


def elastic(kubernetes: Kubernetes, name: str, workers: int, command: list[str] | None = None) -> Thing:
    script = kubernetes.folder / "long.py"
    script.write_text(LONG)
    kubernetes.kubelet.environment = {"GO": str(kubernetes.folder / "go")}
    rest = [{"name": "MS_SCHED_MANAGE_PORT", "value": str(free_port())}]
    worker = replica(workers, command or ["python", str(script)])
    roles = {"Scheduler": replica(1, ["python", "-c", "import covey; covey.init()"], env=rest), "Worker": worker}
    return job(name, roles=roles, successPolicy="AllWorkers", runPolicy={"cleanPodPolicy": "None"})


def pids(kubernetes: Kubernetes, name: str) -> list[str]:
    return re.findall(r"began pid=(\d+)", kubernetes.kubelet.log(name))


@pytest.mark.timeout(300)
def test_a_running_world_shrinks_and_progress_is_shown(kubernetes: Kubernetes) -> None:
    kubernetes.operator()
    kubernetes.apply(elastic(kubernetes, "less", 3))
    for index in range(3):
        kubernetes.heard(f"less-worker-{index}", "step 4 world 3", SLOW_S)
    before = kubernetes.pods("less")
    kubernetes.wait(lambda: kubernetes.status("less").get("progress", {}).get("step", -1) > 3, "progress in status")
    shown = kubernetes.status("less")["progress"]
    assert (shown["world"], shown["generation"], shown["restarts"]) == (3, 1, 0)
    kubernetes.patch("less", {"spec": {"replicas": 2}}, sub="scale")
    kubernetes.heard("less-worker-0", "world 2", SLOW_S)
    kubernetes.wait(lambda: "less-worker-2" not in kubernetes.pods(), "the pod that left to be gone")
    assert "nobody was restarted" in kubernetes.told("less", "MSJobScaled")
    after = kubernetes.pods("less")
    for name in ("less-scheduler-0", "less-worker-0", "less-worker-1"):
        assert after[name]["metadata"]["uid"] == before[name]["metadata"]["uid"]
    assert all(len(pids(kubernetes, f"less-worker-{index}")) == 1 for index in range(3)), "survivors are in their processes"
    kubernetes.wait(lambda: kubernetes.status("less")["progress"]["world"] == 2, "the smaller world in status")
    assert "scale-in" in kubernetes.status("less")["progress"]["recovery"]
    scale = kubernetes.do(kubernetes.api.get(MSJOB, kubernetes.namespace, "less", "scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 2
    (kubernetes.folder / "go").touch()
    status = kubernetes.until("less", "Succeeded", deadline_s=SLOW_S)
    assert status["restartsTotal"] == 0 and "scaling" not in status


def has_changed(kubernetes: Kubernetes, number: int, seen: int) -> bool:
    """The others train in a world of that size, there are as many pods, and nothing is under way."""
    trains = f"world {number}" in kubernetes.kubelet.log("more-worker-0")[seen:]
    return trains and len(kubernetes.pods("more")) == number + 1 and "scaling" not in kubernetes.status("more")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [["python"], ["covey", "run", "--no-live", "--tail_worker_log", "-1"]], ids=["init", "run"])
def test_a_running_world_grows_shrinks_and_grows_again(kubernetes: Kubernetes, command: list[str]) -> None:
    kubernetes.operator()
    kubernetes.apply(elastic(kubernetes, "more", 2, [*command, str(kubernetes.folder / "long.py")]))
    for index in range(2):
        kubernetes.heard(f"more-worker-{index}", "step 4 world 2", SLOW_S)
    before = kubernetes.pods("more")
    for number in (3, 2, 3):
        kubernetes.patch("more", {"spec": {"replicas": number}}, sub="scale")
        seen = len(kubernetes.kubelet.log("more-worker-0"))
        kubernetes.wait(partial(has_changed, kubernetes, number, seen), f"a world of {number}", SLOW_S)
    after = kubernetes.pods("more")
    assert all(after[name]["metadata"]["uid"] == before[name]["metadata"]["uid"] for name in before), "nobody was restarted"
    assert all(len(pids(kubernetes, f"more-worker-{index}")) == 1 for index in range(2))
    (kubernetes.folder / "go").touch()
    status = kubernetes.until("more", "Succeeded", deadline_s=SLOW_S)
    assert status["restartsTotal"] == 0 and status["workers"].endswith("/3")
