"""Jobs whose pods run covey: recovery after the failure of a pod or of a process."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from typing import Any

import psutil
import pytest
from tests.kubernetes.cluster import Kubernetes, job, replica
from tests.kubernetes.trainings import COUNT, LOOP, STAYS
from tests.processes.harness import free_port

from covey.kubernetes.api_client import KubeObject

GRACE = {"fault-scheduling": "grace"}
WORKERS = 2
SLOW_S = 150.0  # every process imports torch, on few processors


def scripts(kubernetes: Kubernetes) -> dict[str, str]:
    """Write the scripts, set the environment of the pods, and return the paths by name."""
    for name, text in (("count.py", COUNT), ("loop.py", LOOP), ("stays.py", STAYS)):
        (kubernetes.folder / name).write_text(text)
    kubernetes.kubelet.environment = {"GO": str(kubernetes.folder / "go"), "MS_SCHED_MANAGE_PORT": "0"}
    return {name: str(kubernetes.folder / f"{name}.py") for name in ("count", "loop", "stays")}


def training(
    name: str, scheduler: list[str], worker: list[str], strategy: str = "", workers: int = WORKERS, **more: Any
) -> KubeObject:
    return job(
        name,
        roles={"Scheduler": replica(1, scheduler), "Worker": replica(workers, worker)},
        labels=GRACE if strategy else {},
        annotations={"recover-strategy": strategy} if strategy else {},
        successPolicy="AllWorkers",
        **more,
    )


def hashes(kubernetes: Kubernetes, name: str) -> list[str]:
    logs = [kubernetes.kubelet.log(pod) for pod in kubernetes.pods(name) if "worker" in pod]
    return [match for log in logs for match in re.findall(r"HASH (\w+)", log)]


def test_same_script_runs_in_every_role(kubernetes: Kubernetes) -> None:
    script = scripts(kubernetes)["count"]
    kubernetes.operator()
    kubernetes.apply(training("count", ["python", script], ["python", script]))
    kubernetes.wait_for_condition("count", "Succeeded")
    logs = [kubernetes.kubelet.log(f"count-worker-{index}") for index in range(WORKERS)]
    assert sorted(re.findall(r"rank=(\d)", "".join(logs))) == ["0", "1"] and all("total 30.0" in log for log in logs)


@pytest.mark.timeout(300)
def test_recover_replaces_the_pod_of_rank_0_within_the_step(kubernetes: Kubernetes) -> None:
    script = scripts(kubernetes)["loop"]
    kubernetes.operator()
    kubernetes.apply(training("loop", ["python", script], ["python", script], "recover", workers=3))
    for index in range(3):
        kubernetes.wait_for_log(f"loop-worker-{index}", "step 4", SLOW_S)
    before = kubernetes.pods("loop")
    first = next(name for name in before if "rank=0" in kubernetes.kubelet.log(name))  # rank 0 is not special
    kubernetes.kubelet.kill(first)
    kubernetes.wait(lambda: _uid(kubernetes, first) not in ("", before[first]["metadata"]["uid"]), "a replacement")
    (kubernetes.folder / "go").touch()
    status = kubernetes.wait_for_condition("loop", "Succeeded", deadline_s=SLOW_S)
    after = kubernetes.pods("loop")
    assert after[first]["spec"]["nodeName"] != before[first]["spec"]["nodeName"]
    others = [name for name in before if name != first and "worker" in name]
    assert all(after[name]["metadata"]["uid"] == before[name]["metadata"]["uid"] for name in others)
    assert all(re.findall(r"step (\d+)", kubernetes.kubelet.log(name)) == [str(n) for n in range(12)] for name in others)
    assert len(set(hashes(kubernetes, "loop"))) == 1 and len(hashes(kubernetes, "loop")) == 3
    assert status["restartsTotal"] == 1


def test_restarted_scheduler_container_keeps_all_workers(kubernetes: Kubernetes) -> None:
    command = ["python", scripts(kubernetes)["stays"]]
    kubernetes.operator()
    roles = {"Scheduler": replica(1, command, "OnFailure"), "Worker": replica(2, command)}
    annotations = {"recover-strategy": "recover"}
    kubernetes.apply(job("stays", roles=roles, labels=GRACE, annotations=annotations, successPolicy="AllWorkers"))
    for index in range(2):
        kubernetes.wait_for_log(f"stays-worker-{index}", "rank=", SLOW_S)
    before = kubernetes.pods("stays")
    kubernetes.kubelet.kill("stays-scheduler-0")
    kubernetes.wait(
        lambda: kubernetes.kubelet.log("stays-scheduler-0").count(" re-attached: ") == 2, "both workers to reconnect", SLOW_S
    )
    (kubernetes.folder / "go").touch()
    status = kubernetes.wait_for_condition("stays", "Succeeded", deadline_s=SLOW_S)
    after = kubernetes.pods("stays")
    assert all(after[name]["metadata"]["uid"] == before[name]["metadata"]["uid"] for name in after)
    assert all(kubernetes.kubelet.log(f"stays-worker-{index}").count("rank=") == 1 for index in range(2))
    assert status["restartsTotal"] == 1


def _uid(kubernetes: Kubernetes, name: str) -> str:
    pod = kubernetes.pods().get(name)
    return str(pod["metadata"]["uid"]) if pod is not None and pod["status"].get("phase") == "Running" else ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [["covey", "run", "--no-live", "--tail_worker_log", "-1"], ["python"]], ids=["run", "init"])
@pytest.mark.long
def test_recover_in_place_restarts_the_process_in_its_pod(kubernetes: Kubernetes, command: list[str]) -> None:
    """The supervisor in the container is `covey run`, or the script's covey.init()."""
    script = scripts(kubernetes)["loop"]
    kubernetes.operator()
    worker = [*command, script]
    kubernetes.apply(training("place", ["python", "-c", "import covey; covey.init()"], worker, "recover-in-place"))
    for index in range(WORKERS):
        kubernetes.wait_for_log(f"place-worker-{index}", "step 4", SLOW_S)
    before = kubernetes.pods("place")
    [victim] = re.findall(r"pid=(\d+)", kubernetes.kubelet.log("place-worker-1"))
    os.kill(int(victim), signal.SIGKILL)
    (kubernetes.folder / "go").touch()
    status = kubernetes.wait_for_condition("place", "Succeeded", deadline_s=SLOW_S)
    after = kubernetes.pods("place")
    assert {name: pod["metadata"]["uid"] for name, pod in after.items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    assert status["restartsTotal"] == 0 and len(set(hashes(kubernetes, "place"))) == 1


@pytest.mark.timeout(300)
@pytest.mark.long
def test_process_returning_from_a_lost_node_is_refused(kubernetes: Kubernetes) -> None:
    """The node is lost and its process stopped; after the replacement has joined, the process is continued."""
    script = scripts(kubernetes)["loop"]
    kubernetes.kubelet.environment["MS_NODE_TIMEOUT"] = "3"
    kubernetes.operator()
    source = training("fence", ["python", script], ["python", script], "recover")
    source["metadata"]["annotations"]["covey/node-lost-seconds"] = "0.2"
    kubernetes.apply(source)
    for index in range(WORKERS):
        kubernetes.wait_for_log(f"fence-worker-{index}", "step 4", SLOW_S)
    pods = kubernetes.pods("fence")
    pods_per_node = Counter(pod["spec"]["nodeName"] for pod in pods.values())
    lost = next(name for name, pod in pods.items() if "worker" in name and pods_per_node[pod["spec"]["nodeName"]] == 1)
    old = kubernetes.kubelet.pid(lost)
    os.killpg(old, signal.SIGSTOP)
    kubernetes.do(kubernetes.kubelet.lose_node(pods[lost]["spec"]["nodeName"]))
    kubernetes.wait(lambda: _uid(kubernetes, lost) not in ("", pods[lost]["metadata"]["uid"]), "a replacement")
    (kubernetes.folder / "go").touch()
    kubernetes.wait(lambda: kubernetes.kubelet.log(lost).count("pid=") == 2, "the replacement to join", SLOW_S)
    os.killpg(old, signal.SIGCONT)
    kubernetes.wait_for_condition("fence", "Succeeded", deadline_s=SLOW_S)
    kubernetes.wait(lambda: not psutil.pid_exists(old) or psutil.Process(old).status() == psutil.STATUS_ZOMBIE, "it to exit")
    assert len(set(hashes(kubernetes, "fence"))) == 1 and len(hashes(kubernetes, "fence")) == WORKERS


@pytest.mark.timeout(300)
def test_killed_covey_run_pod_is_replaced_within_the_step(kubernetes: Kubernetes) -> None:
    """The operator reports the pod as gone to the job's scheduler, which therefore does not wait for the long node timeout."""
    script = scripts(kubernetes)["loop"]
    kubernetes.kubelet.environment["MS_NODE_TIMEOUT"] = "600"
    kubernetes.operator()
    scheduler = replica(1, ["python", "-c", "import covey; covey.init()"])
    scheduler["template"]["spec"]["containers"][0]["env"] = [{"name": "MS_SCHED_MANAGE_PORT", "value": str(free_port())}]
    roles = {"Scheduler": scheduler, "Worker": replica(2, ["covey", "run", "--no-live", "--tail_worker_log", "-1", script])}
    annotations = {"recover-strategy": "recover-in-place,recover"}
    kubernetes.apply(job("again", roles=roles, labels=GRACE, annotations=annotations, successPolicy="AllWorkers"))
    for index in range(2):
        kubernetes.wait_for_log(f"again-worker-{index}", "step 4", SLOW_S)
    kubernetes.wait(lambda: kubernetes.status("again").get("progress", {}).get("step", 0) >= 4, "progress in status")
    before = kubernetes.pods("again")
    kubernetes.kubelet.kill("again-worker-1")
    kubernetes.wait(lambda: kubernetes.kubelet.log("again-worker-1").count("rank=1") == 2, "rank 1 in the next pod", SLOW_S)
    (kubernetes.folder / "go").touch()
    status = kubernetes.wait_for_condition("again", "Succeeded", deadline_s=SLOW_S)
    after = kubernetes.pods("again")
    assert {name for name in after if after[name]["metadata"]["uid"] != before[name]["metadata"]["uid"]} == {"again-worker-1"}
    assert kubernetes.kubelet.log("again-worker-0").count("pid=") == 1, "rank 0 keeps its process"
    assert status["restartsTotal"] == 1 and len(set(hashes(kubernetes, "again"))) == 1
