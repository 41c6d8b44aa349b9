"""MSJobs on a real API server, with pods that are processes: what is created, what a fault leads to, what is left."""

from __future__ import annotations

import signal
from typing import Any

import httpx2
import pytest
from tests.kubernetes.cluster import Kubernetes, conditions, job, replica

from covey.core.jobs.pod_state import JOB_LABEL
from covey.kubernetes.api_client import CRD, MSJOB, POD, POD_GROUP, ApiError, KubeObject, ResourceKind

STAY = "while [ ! -e $GO ]; do sleep 0.05; done"


@pytest.fixture
def held(kubernetes: Kubernetes) -> Kubernetes:
    """Pods that run STAY end when `go` is there."""
    kubernetes.kubelet.environment = {"GO": str(kubernetes.folder / "go")}
    kubernetes.operator()
    return kubernetes


def up(kubernetes: Kubernetes, *names: str) -> dict[str, KubeObject]:
    """The pods of these names, as soon as all run."""

    def running() -> dict[str, KubeObject] | None:
        pods = kubernetes.pods()
        return pods if all(pods.get(n, {}).get("status", {}).get("phase") == "Running" for n in names) else None

    found: dict[str, KubeObject] = kubernetes.wait(running, f"{names} to run")
    return found


def replaced(kubernetes: Kubernetes, old: KubeObject) -> KubeObject:
    """The pod in the place of another, as soon as it runs."""
    name, uid = old["metadata"]["name"], old["metadata"]["uid"]

    def found() -> KubeObject | None:
        pod = kubernetes.pods().get(name)
        fresh = pod is not None and pod["metadata"]["uid"] != uid and pod["status"].get("phase") == "Running"
        return pod if fresh else None

    made: KubeObject = kubernetes.wait(found, f"a replacement of {name}")
    return made


def test_a_job_runs_to_its_end(held: Kubernetes) -> None:
    roles = {"Scheduler": (1, "true"), "Worker": (2, f"env; {STAY}"), "PS": (1, "env")}
    made = held.apply(job("train", roles=roles, successPolicy="AllWorkers", runPolicy={"cleanPodPolicy": "None"}))
    status = held.until("train", "Running")
    assert status["startTime"] and status["state"] == "Running"
    pods = up(held, "train-worker-0", "train-worker-1")
    (held.folder / "go").touch()
    status = held.until("train", "Succeeded")
    assert set(conditions(status)) == {"Created", "Succeeded"} and status["completionTime"]
    held.wait(lambda: held.status("train")["replicaStatuses"]["Worker"]["succeeded"] == 2, "both to be counted")
    pod = pods["train-worker-1"]
    [owner] = pod["metadata"]["ownerReferences"]
    assert owner["uid"] == made["metadata"]["uid"] and owner["controller"] and owner["kind"] == "MSJob"
    assert pod["metadata"]["labels"]["replica-index"] == pod["metadata"]["labels"]["training.kubeflow.org/replica-index"] == "1"
    said = dict(line.split("=", 1) for line in held.kubelet.log("train-worker-1").splitlines() if "=" in line)
    service = held.services()["train-scheduler-0"]
    variables = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert variables["MS_SCHED_HOST"] == service["spec"]["clusterIP"] and said["MS_SCHED_PORT"] == "2222"
    assert (said["MS_ROLE"], said["MS_NODE_ID"], said["MS_WORKER_NUM"]) == ("MS_WORKER", "train-worker-1", "2")
    assert said["MS_SERVER_NUM"] == "1" and len(said["COVEY_SECRET"]) == 48
    assert "MS_ROLE=MS_PSERVER" in held.kubelet.log("train-ps-0")
    assert [port["name"] for port in service["spec"]["ports"]] == ["msjob-port"]


def test_a_single_worker_without_scheduler_is_alone(held: Kubernetes) -> None:
    held.apply(job("one", roles={"Worker": (1, "env")}))
    held.until("one", "Succeeded")
    assert "MS_SCHED_HOST" not in held.kubelet.log("one-worker-0") and held.services() == {}


def test_workers_without_scheduler_get_torch_s_variables(held: Kubernetes) -> None:
    held.apply(job("torch", roles={"Worker": (2, "env")}, successPolicy="AllWorkers", runPolicy={"cleanPodPolicy": "None"}))
    held.until("torch", "Succeeded")
    log = held.kubelet.log("torch-worker-1")
    assert "RANK=1\n" in log and "WORLD_SIZE=2\n" in log and "MASTER_PORT=2222\n" in log


@pytest.mark.parametrize("way", ["kill", "evict"])
def test_exit_code_policy_replaces_a_pod(held: Kubernetes, way: str) -> None:
    held.apply(job("heal", roles={"Worker": replica(2, STAY, "ExitCode")}, successPolicy="AllWorkers"))
    before = up(held, "heal-worker-0", "heal-worker-1")
    getattr(held.kubelet, way)("heal-worker-1")
    after = replaced(held, before["heal-worker-1"])
    assert after["metadata"]["ownerReferences"] == before["heal-worker-1"]["metadata"]["ownerReferences"]
    assert "heal-worker-1" in held.told("heal", "MSJobRestarting")
    held.wait(lambda: "Running" in conditions(held.status("heal")), "the job to run again")
    (held.folder / "go").touch()
    status = held.until("heal", "Succeeded")
    assert status["restartsTotal"] == 1
    assert held.pods()["heal-worker-0"]["metadata"]["uid"] == before["heal-worker-0"]["metadata"]["uid"]


def test_the_kubelets_restarts_count(held: Kubernetes) -> None:
    held.apply(job("loop", roles={"Worker": replica(1, "exit 1", "OnFailure")}, runPolicy={"backoffLimit": 2}))
    status = held.until("loop", "Failed")
    assert conditions(status)["Failed"]["reason"] == "BackoffLimitExceeded" and "2" in held.told("loop", "BackoffLimitExceeded")


def test_after_a_failure_nothing_runs_on_and_logs_stay(held: Kubernetes) -> None:
    """Under cleanPodPolicy None the pods of a failed job are ended, not deleted: their accelerators are free, logs readable."""
    roles = {"Scheduler": (1, STAY), "Worker": replica(2, "case $MS_NODE_ID in *0) exit 3;; esac; " + STAY)}
    held.apply(job("fail", roles=roles, runPolicy={"cleanPodPolicy": "None"}))
    status = held.until("fail", "Failed")
    assert "exit code 3" in conditions(status)["Failed"]["message"] and "Succeeded" not in conditions(status)
    held.wait(lambda: all(not held.kubelet.pid(name) for name in ("fail-worker-1", "fail-scheduler-0")), "all to end")
    assert len(held.pods()) == 3


@pytest.mark.parametrize(("policy", "left"), [("Running", {"gone-worker-0"}), ("All", set[str]())])
def test_clean_pod_policy(held: Kubernetes, policy: str, left: set[str]) -> None:
    roles = {"Scheduler": (1, STAY), "Worker": replica(2, "case $MS_NODE_ID in *0) exit 1;; esac; " + STAY)}
    held.apply(job("gone", roles=roles, runPolicy={"cleanPodPolicy": policy}))
    held.until("gone", "Failed")
    held.wait(lambda: set(held.pods()) == left and not held.services(), f"only {left} to be left")


def test_a_lost_node(held: Kubernetes) -> None:
    """Its pod is removed by force after the job's patience and runs elsewhere; what runs there still is fenced by covey."""
    notes = {"covey/node-lost-seconds": "0.2"}
    held.apply(job("lost", roles={"Worker": replica(2, STAY, "OnFailure")}, annotations=notes, successPolicy="AllWorkers"))
    before = up(held, "lost-worker-0", "lost-worker-1")
    held.do(held.kubelet.lose(before["lost-worker-0"]["spec"]["nodeName"]))
    after = replaced(held, before["lost-worker-0"])
    assert after["spec"]["nodeName"] != before["lost-worker-0"]["spec"]["nodeName"]
    (held.folder / "go").touch()
    held.until("lost", "Succeeded")


def test_ttl_and_deadline_are_timers(held: Kubernetes) -> None:
    """Nothing happens to these jobs but time."""
    held.apply(job("short", roles={"Worker": (1, "true")}, runPolicy={"ttlSecondsAfterFinished": 1}))
    held.apply(job("long", roles={"Worker": (1, STAY)}, runPolicy={"activeDeadlineSeconds": 1}))
    status = held.until("long", "Failed")
    assert conditions(status)["Failed"]["reason"] == "DeadlineExceeded"

    def gone() -> bool:
        try:
            held.job("short")
        except ApiError as error:
            return error.code == 404
        return False

    held.wait(gone, "the finished job to be deleted")


def test_why_nothing_starts_is_told_and_a_timeout_ends_it(held: Kubernetes) -> None:
    held.kubelet.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    held.apply(job("gpu", roles={"Worker": (1, "true")}, runPolicy={"pendingTimeoutSeconds": 1}))
    assert "Insufficient nvidia.com/gpu" in held.told("gpu", "Pending")
    status = held.until("gpu", "Failed")
    assert conditions(status)["Failed"]["reason"] == "PendingTimeout" and "gpu" in conditions(status)["Failed"]["message"]


def test_an_image_that_cannot_be_pulled_is_told(held: Kubernetes) -> None:
    held.apply(job("image", roles={"Worker": replica(1, "true", image="missing")}))
    assert "ErrImagePull" in held.told("image", "Pending")
    assert "ErrImagePull" in held.status("image")["waiting"]


def test_a_quota_that_is_used_up_is_told(held: Kubernetes) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    held.do(held.api.create(ResourceKind("api/v1", "resourcequotas", "ResourceQuota"), held.namespace, quota))
    patch = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}  # the quota controller's part
    held.do(held.api.patch(ResourceKind("api/v1", "resourcequotas", "ResourceQuota"), held.namespace, "none", patch, "status"))
    held.apply(job("quota", roles={"Worker": (1, "true")}))
    assert "exceeded quota" in held.told("quota", "FailedAction")


def test_suspend_and_resume(held: Kubernetes) -> None:
    held.apply(job("nap", roles={"Worker": (2, STAY)}, successPolicy="AllWorkers"))
    up(held, "nap-worker-0", "nap-worker-1")
    held.patch("nap", {"spec": {"runPolicy": {"suspend": True}}})
    held.until("nap", "Suspended")
    held.wait(lambda: not held.pods(), "the pods to be gone")
    held.patch("nap", {"spec": {"runPolicy": {"suspend": False}, "msReplicaSpecs": {"Worker": {"replicas": 3}}}})
    pods = up(held, "nap-worker-0", "nap-worker-2")
    variables = {entry["name"]: entry.get("value") for entry in pods["nap-worker-0"]["spec"]["containers"][0]["env"]}
    assert variables["MS_WORKER_NUM"] == "3" and held.status("nap")["restartsTotal"] == 0
    (held.folder / "go").touch()
    held.until("nap", "Succeeded")


def test_the_scale_subresource(held: Kubernetes) -> None:
    """A world of one says that it cannot; with dynamic workers it grows and shrinks."""
    held.apply(job("fixed", roles={"Worker": (1, STAY)}))
    held.apply(job("grow", roles={"Worker": (1, STAY)}, enableDynamicWorker=True, successPolicy="AllWorkers"))
    up(held, "fixed-worker-0", "grow-worker-0")
    held.wait(lambda: held.status("grow").get("workerReplicas") == 1, "the worker to be counted")
    scale = held.do(held.api.get(MSJOB, held.namespace, "grow", "scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 1 and "job-name=grow" in scale["status"]["selector"]
    for name in ("fixed", "grow"):
        held.patch(name, {"spec": {"replicas": 2}}, sub="scale")
    up(held, "grow-worker-1")
    assert "cannot change live" in held.told("fixed", "ScaleUnsupported")
    assert "fixed-worker-1" not in held.pods()
    held.patch("grow", {"spec": {"replicas": 1}}, sub="scale")
    held.wait(lambda: "grow-worker-1" not in held.pods(), "the extra worker to be gone")


def test_the_columns_of_kubectl_get(held: Kubernetes) -> None:
    held.apply(job("table", roles={"Worker": (1, "true")}))
    held.until("table", "Succeeded")
    headers = {"Authorization": f"Bearer {held.server.token}", "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    url = f"{held.server.url}{MSJOB.path(held.namespace)}"
    table: Any = httpx2.get(url, headers=headers, verify=False).json()
    assert [column["name"] for column in table["columnDefinitions"]] == ["Name", "State", "Workers", "Restarts", "Age"]
    assert table["rows"][0]["cells"][:2] == ["table", "Succeeded"]


def test_orphans_are_adopted(held: Kubernetes) -> None:
    """A pod that carries the job's labels and has no owner, as after `kubectl delete --cascade=orphan` and a new apply."""
    held.apply(job("old", roles={"Worker": (1, STAY)}))
    before = up(held, "old-worker-0")["old-worker-0"]
    held.patch("old-worker-0", {"metadata": {"ownerReferences": None}}, POD)
    held.wait(lambda: held.pods()["old-worker-0"]["metadata"].get("ownerReferences"), "the pod to be adopted")
    assert held.pods()["old-worker-0"]["metadata"]["uid"] == before["metadata"]["uid"]


def test_finished_jobs_stay_finished(held: Kubernetes) -> None:
    held.apply(job("done", roles={"Worker": (1, "true")}))
    held.until("done", "Succeeded")
    held.delete(POD, "done-worker-0", grace=0)
    held.apply(job("next", roles={"Worker": (1, "true")}))  # something to wait for
    held.until("next", "Succeeded")
    assert JOB_LABEL and "done-worker-0" not in held.pods() and set(conditions(held.status("done"))) == {"Created", "Succeeded"}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"metadata": {"name": "with_underscore"}}, "metadata.name"),
        ({"spec": {"runPolicy": {"cleanPodPolicy": "Most"}}}, "spec.runPolicy.cleanPodPolicy"),
        ({"spec": {"runPolicy": {"backoffLimit": -1}}}, "spec.runPolicy.backoffLimit"),
        ({"spec": {"successPolicy": "Some"}}, "spec.successPolicy"),
        ({"spec": {"msReplicaSpecs": {"Worker": replica(1, "true", "Sometimes")}}}, "spec.msReplicaSpecs.Worker.restartPolicy"),
        ({"spec": {"msReplicaSpecs": {"Worker": replica(1, "true", image="")}}}, ".containers"),
        ({"spec": {"msReplicaSpecs": {"Worker": replica(1, "true", name="mind_spore")}}}, ".containers"),
        ({"spec": {}}, "spec.msReplicaSpecs"),
    ],
)
def test_the_api_server_refuses_with_the_path(kubernetes: Kubernetes, change: KubeObject, path: str) -> None:
    bad = job("bad")
    for part, given in change.items():
        bad[part] = {**bad[part], **given} if given else {}
    with pytest.raises(ApiError) as refused:
        kubernetes.apply(bad)
    assert refused.value.code == 422 and path in str(refused.value)


def test_what_a_schema_cannot_refuse_the_operator_does(held: Kubernetes) -> None:
    held.apply(job("roles", roles={"Boss": (1, "true"), "Worker": (1, "true")}))
    status = held.until("roles", "Failed")
    assert conditions(status)["Failed"]["reason"] == "InvalidSpec"
    assert "spec.msReplicaSpecs.Boss" in held.told("roles", "InvalidSpec") and not held.pods()


def test_a_gang_is_made_and_taken_away(kubernetes: Kubernetes) -> None:
    """Volcano's kind without Volcano: what the operator asks of it."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "podgroups", "singular": "podgroup", "kind": "PodGroup"}
    spec = {"group": "scheduling.volcano.sh", "scope": "Namespaced", "names": names, "versions": [version]}
    definition = {"metadata": {"name": "podgroups.scheduling.volcano.sh"}, "spec": spec}
    kubernetes.do(kubernetes.api.create(CRD, "", definition))
    kubernetes.wait(lambda: _served(kubernetes, POD_GROUP), "PodGroups to be served")
    kubernetes.kubelet.environment = {"GO": str(kubernetes.folder / "go")}
    kubernetes.operator(gang_scheduler="volcano")
    policy = {"schedulingPolicy": {"queue": "big", "minAvailable": 2}}
    kubernetes.apply(job("gang", roles={"Worker": (3, STAY)}, runPolicy=policy, successPolicy="AllWorkers"))
    pods = up(kubernetes, "gang-worker-0", "gang-worker-2")
    group = kubernetes.do(kubernetes.api.get(POD_GROUP, kubernetes.namespace, "gang"))
    assert group["spec"] == {"minMember": 2, "queue": "big"} and group["metadata"]["ownerReferences"]
    assert pods["gang-worker-0"]["spec"]["schedulerName"] == "volcano"
    (kubernetes.folder / "go").touch()
    kubernetes.until("gang", "Succeeded")
    kubernetes.wait(lambda: not kubernetes.do(kubernetes.api.list(POD_GROUP, kubernetes.namespace)).items, "it to be gone")


def _served(kubernetes: Kubernetes, kind: ResourceKind) -> bool:
    try:
        kubernetes.do(kubernetes.api.list(kind))
    except ApiError:
        return False
    return True


def test_a_terminated_worker_is_retried_by_its_code(held: Kubernetes) -> None:
    held.apply(job("term", roles={"Worker": replica(1, STAY, "ExitCode")}))
    before = up(held, "term-worker-0")
    held.kubelet.kill("term-worker-0", signal.SIGTERM)
    replaced(held, before["term-worker-0"])
    (held.folder / "go").touch()
    held.until("term", "Succeeded")
