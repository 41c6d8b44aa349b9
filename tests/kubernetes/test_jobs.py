"""MSJobs on a real API server with pods that are processes: created objects, reactions to failures, cleanup."""

from __future__ import annotations

import signal
from typing import Any

import httpx2
import pytest
from tests.kubernetes.cluster import Kubernetes, conditions, job, replica

from covey.core.msjob.pod_state import JOB_LABEL
from covey.kubernetes.api_client import CRD, MSJOB, POD, POD_GROUP, ApiError, KubeObject, ResourceKind

STAY = "while [ ! -e $GO ]; do sleep 0.05; done"


@pytest.fixture
def cluster(kubernetes: Kubernetes) -> Kubernetes:
    """Return a namespace with an operator, in which pods that run STAY end when the file `go` exists."""
    kubernetes.kubelet.environment = {"GO": str(kubernetes.folder / "go")}
    kubernetes.operator()
    return kubernetes


def wait_until_running(kubernetes: Kubernetes, *names: str) -> dict[str, KubeObject]:
    """Wait until all pods of these names run; return all pods of the namespace by name."""

    def running() -> dict[str, KubeObject] | None:
        pods = kubernetes.pods()
        return pods if all(pods.get(n, {}).get("status", {}).get("phase") == "Running" for n in names) else None

    found: dict[str, KubeObject] = kubernetes.wait(running, f"{names} to run")
    return found


def wait_for_replacement(kubernetes: Kubernetes, old: KubeObject) -> KubeObject:
    """Wait until a pod of the same name with another UID runs, and return it."""
    name, uid = old["metadata"]["name"], old["metadata"]["uid"]

    def found() -> KubeObject | None:
        pod = kubernetes.pods().get(name)
        is_new = pod is not None and pod["metadata"]["uid"] != uid and pod["status"].get("phase") == "Running"
        return pod if is_new else None

    replacement: KubeObject = kubernetes.wait(found, f"a replacement of {name}")
    return replacement


def test_job_with_all_roles_succeeds(cluster: Kubernetes) -> None:
    roles = {"Scheduler": (1, "true"), "Worker": (2, f"env; {STAY}"), "PS": (1, "env")}
    applied = cluster.apply(job("train", roles=roles, successPolicy="AllWorkers", runPolicy={"cleanPodPolicy": "None"}))
    status = cluster.wait_for_condition("train", "Running")
    assert status["startTime"] and status["state"] == "Running"
    pods = wait_until_running(cluster, "train-worker-0", "train-worker-1")
    (cluster.folder / "go").touch()
    status = cluster.wait_for_condition("train", "Succeeded")
    assert set(conditions(status)) == {"Created", "Succeeded"} and status["completionTime"]
    cluster.wait(lambda: cluster.status("train")["replicaStatuses"]["Worker"]["succeeded"] == 2, "both to be counted")
    pod = pods["train-worker-1"]
    [owner] = pod["metadata"]["ownerReferences"]
    assert owner["uid"] == applied["metadata"]["uid"] and owner["controller"] and owner["kind"] == "MSJob"
    assert pod["metadata"]["labels"]["replica-index"] == pod["metadata"]["labels"]["training.kubeflow.org/replica-index"] == "1"
    printed = dict(line.split("=", 1) for line in cluster.kubelet.log("train-worker-1").splitlines() if "=" in line)
    service = cluster.services()["train-scheduler-0"]
    variables = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert variables["MS_SCHED_HOST"] == service["spec"]["clusterIP"] and printed["MS_SCHED_PORT"] == "2222"
    assert (printed["MS_ROLE"], printed["MS_NODE_ID"], printed["MS_WORKER_NUM"]) == ("MS_WORKER", "train-worker-1", "2")
    assert printed["MS_SERVER_NUM"] == "1" and len(printed["COVEY_SECRET"]) == 48
    assert "MS_ROLE=MS_PSERVER" in cluster.kubelet.log("train-ps-0")
    assert [port["name"] for port in service["spec"]["ports"]] == ["msjob-port"]


def test_single_worker_without_scheduler_gets_no_cluster_variables(cluster: Kubernetes) -> None:
    cluster.apply(job("one", roles={"Worker": (1, "env")}))
    cluster.wait_for_condition("one", "Succeeded")
    assert "MS_SCHED_HOST" not in cluster.kubelet.log("one-worker-0") and cluster.services() == {}


def test_workers_without_scheduler_get_torch_variables(cluster: Kubernetes) -> None:
    cluster.apply(job("torch", roles={"Worker": (2, "env")}, successPolicy="AllWorkers", runPolicy={"cleanPodPolicy": "None"}))
    cluster.wait_for_condition("torch", "Succeeded")
    log = cluster.kubelet.log("torch-worker-1")
    assert "RANK=1\n" in log and "WORLD_SIZE=2\n" in log and "MASTER_PORT=2222\n" in log


@pytest.mark.parametrize("way", ["kill", "evict"])
def test_exit_code_policy_replaces_a_killed_or_evicted_pod(cluster: Kubernetes, way: str) -> None:
    cluster.apply(job("heal", roles={"Worker": replica(2, STAY, "ExitCode")}, successPolicy="AllWorkers"))
    before = wait_until_running(cluster, "heal-worker-0", "heal-worker-1")
    getattr(cluster.kubelet, way)("heal-worker-1")
    after = wait_for_replacement(cluster, before["heal-worker-1"])
    assert after["metadata"]["ownerReferences"] == before["heal-worker-1"]["metadata"]["ownerReferences"]
    assert "heal-worker-1" in cluster.wait_for_event("heal", "MSJobRestarting")
    cluster.wait(lambda: "Running" in conditions(cluster.status("heal")), "the job to run again")
    (cluster.folder / "go").touch()
    status = cluster.wait_for_condition("heal", "Succeeded")
    assert status["restartsTotal"] == 1
    assert cluster.pods()["heal-worker-0"]["metadata"]["uid"] == before["heal-worker-0"]["metadata"]["uid"]


def test_kubelet_restarts_exceed_backoff_limit(cluster: Kubernetes) -> None:
    cluster.apply(job("loop", roles={"Worker": replica(1, "exit 1", "OnFailure")}, runPolicy={"backoffLimit": 2}))
    status = cluster.wait_for_condition("loop", "Failed")
    assert conditions(status)["Failed"]["reason"] == "BackoffLimitExceeded" and "2" in cluster.wait_for_event(
        "loop", "BackoffLimitExceeded"
    )


def test_pods_of_a_failed_job_are_terminated_and_kept_with_policy_none(cluster: Kubernetes) -> None:
    """Terminated pods free their accelerators, and their logs stay readable."""
    roles = {"Scheduler": (1, STAY), "Worker": replica(2, "case $MS_NODE_ID in *0) exit 3;; esac; " + STAY)}
    cluster.apply(job("fail", roles=roles, runPolicy={"cleanPodPolicy": "None"}))
    status = cluster.wait_for_condition("fail", "Failed")
    assert "exit code 3" in conditions(status)["Failed"]["message"] and "Succeeded" not in conditions(status)
    cluster.wait(lambda: all(not cluster.kubelet.pid(name) for name in ("fail-worker-1", "fail-scheduler-0")), "all to end")
    assert len(cluster.pods()) == 3


@pytest.mark.parametrize(("policy", "left"), [("Running", {"gone-worker-0"}), ("All", set[str]())])
def test_clean_pod_policy_selects_the_deleted_pods(cluster: Kubernetes, policy: str, left: set[str]) -> None:
    roles = {"Scheduler": (1, STAY), "Worker": replica(2, "case $MS_NODE_ID in *0) exit 1;; esac; " + STAY)}
    cluster.apply(job("gone", roles=roles, runPolicy={"cleanPodPolicy": policy}))
    cluster.wait_for_condition("gone", "Failed")
    cluster.wait(lambda: set(cluster.pods()) == left and not cluster.services(), f"only {left} to be left")


def test_pod_of_a_lost_node_is_replaced_on_another_node(cluster: Kubernetes) -> None:
    """The pod is force-deleted after covey/node-lost-seconds; the scheduler refuses processes that still run on the node."""
    annotations = {"covey/node-lost-seconds": "0.2"}
    cluster.apply(
        job("lost", roles={"Worker": replica(2, STAY, "OnFailure")}, annotations=annotations, successPolicy="AllWorkers")
    )
    before = wait_until_running(cluster, "lost-worker-0", "lost-worker-1")
    cluster.do(cluster.kubelet.lose_node(before["lost-worker-0"]["spec"]["nodeName"]))
    after = wait_for_replacement(cluster, before["lost-worker-0"])
    assert after["spec"]["nodeName"] != before["lost-worker-0"]["spec"]["nodeName"]
    (cluster.folder / "go").touch()
    cluster.wait_for_condition("lost", "Succeeded")


def test_ttl_and_deadline_take_effect_without_other_events(cluster: Kubernetes) -> None:
    """The operator's own timers trigger the reconcile."""
    cluster.apply(job("short", roles={"Worker": (1, "true")}, runPolicy={"ttlSecondsAfterFinished": 1}))
    cluster.apply(job("long", roles={"Worker": (1, STAY)}, runPolicy={"activeDeadlineSeconds": 1}))
    status = cluster.wait_for_condition("long", "Failed")
    assert conditions(status)["Failed"]["reason"] == "DeadlineExceeded"

    def gone() -> bool:
        try:
            cluster.job("short")
        except ApiError as error:
            return error.code == 404
        return False

    cluster.wait(gone, "the finished job to be deleted")


def test_unschedulable_pod_is_reported_and_fails_the_job_after_the_timeout(cluster: Kubernetes) -> None:
    cluster.kubelet.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    cluster.apply(job("gpu", roles={"Worker": (1, "true")}, runPolicy={"pendingTimeoutSeconds": 1}))
    assert "Insufficient nvidia.com/gpu" in cluster.wait_for_event("gpu", "Pending")
    status = cluster.wait_for_condition("gpu", "Failed")
    assert conditions(status)["Failed"]["reason"] == "PendingTimeout" and "gpu" in conditions(status)["Failed"]["message"]


def test_image_pull_error_is_reported(cluster: Kubernetes) -> None:
    cluster.apply(job("image", roles={"Worker": replica(1, "true", image="missing")}))
    assert "ErrImagePull" in cluster.wait_for_event("image", "Pending")
    assert "ErrImagePull" in cluster.status("image")["waiting"]


def test_exceeded_quota_is_reported(cluster: Kubernetes) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    cluster.do(cluster.api.create(ResourceKind("api/v1", "resourcequotas", "ResourceQuota"), cluster.namespace, quota))
    patch = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}  # the quota controller's part
    cluster.do(
        cluster.api.patch(ResourceKind("api/v1", "resourcequotas", "ResourceQuota"), cluster.namespace, "none", patch, "status")
    )
    cluster.apply(job("quota", roles={"Worker": (1, "true")}))
    assert "exceeded quota" in cluster.wait_for_event("quota", "FailedAction")


def test_resumed_job_starts_with_the_new_number_of_workers(cluster: Kubernetes) -> None:
    cluster.apply(job("nap", roles={"Worker": (2, STAY)}, successPolicy="AllWorkers"))
    wait_until_running(cluster, "nap-worker-0", "nap-worker-1")
    cluster.patch("nap", {"spec": {"runPolicy": {"suspend": True}}})
    cluster.wait_for_condition("nap", "Suspended")
    cluster.wait(lambda: not cluster.pods(), "the pods to be gone")
    cluster.patch("nap", {"spec": {"runPolicy": {"suspend": False}, "msReplicaSpecs": {"Worker": {"replicas": 3}}}})
    pods = wait_until_running(cluster, "nap-worker-0", "nap-worker-2")
    variables = {entry["name"]: entry.get("value") for entry in pods["nap-worker-0"]["spec"]["containers"][0]["env"]}
    assert variables["MS_WORKER_NUM"] == "3" and cluster.status("nap")["restartsTotal"] == 0
    (cluster.folder / "go").touch()
    cluster.wait_for_condition("nap", "Succeeded")


def test_scale_subresource_resizes_only_jobs_that_support_it(cluster: Kubernetes) -> None:
    """A job with one worker process records ScaleUnsupported; a job with dynamic workers is resized."""
    cluster.apply(job("fixed", roles={"Worker": (1, STAY)}))
    cluster.apply(job("grow", roles={"Worker": (1, STAY)}, enableDynamicWorker=True, successPolicy="AllWorkers"))
    wait_until_running(cluster, "fixed-worker-0", "grow-worker-0")
    cluster.wait(lambda: cluster.status("grow").get("workerReplicas") == 1, "the worker to be counted")
    scale = cluster.do(cluster.api.get(MSJOB, cluster.namespace, "grow", "scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 1 and "job-name=grow" in scale["status"]["selector"]
    for name in ("fixed", "grow"):
        cluster.patch(name, {"spec": {"replicas": 2}}, sub="scale")
    wait_until_running(cluster, "grow-worker-1")
    assert "cannot resize the running job" in cluster.wait_for_event("fixed", "ScaleUnsupported")
    assert "fixed-worker-1" not in cluster.pods()
    cluster.patch("grow", {"spec": {"replicas": 1}}, sub="scale")
    cluster.wait(lambda: "grow-worker-1" not in cluster.pods(), "the extra worker to be gone")


def test_kubectl_get_has_the_printer_columns(cluster: Kubernetes) -> None:
    cluster.apply(job("table", roles={"Worker": (1, "true")}))
    cluster.wait_for_condition("table", "Succeeded")
    headers = {"Authorization": f"Bearer {cluster.server.token}", "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    url = f"{cluster.server.url}{MSJOB.path(cluster.namespace)}"
    table: Any = httpx2.get(url, headers=headers, verify=False).json()
    assert [column["name"] for column in table["columnDefinitions"]] == ["Name", "State", "Workers", "Restarts", "Age"]
    assert table["rows"][0]["cells"][:2] == ["table", "Succeeded"]


def test_orphaned_pod_is_adopted(cluster: Kubernetes) -> None:
    """A pod with the job's labels and without an owner exists after `kubectl delete --cascade=orphan` and a new apply."""
    cluster.apply(job("old", roles={"Worker": (1, STAY)}))
    before = wait_until_running(cluster, "old-worker-0")["old-worker-0"]
    cluster.patch("old-worker-0", {"metadata": {"ownerReferences": None}}, POD)
    cluster.wait(lambda: cluster.pods()["old-worker-0"]["metadata"].get("ownerReferences"), "the pod to be adopted")
    assert cluster.pods()["old-worker-0"]["metadata"]["uid"] == before["metadata"]["uid"]


def test_pod_of_a_finished_job_is_not_recreated(cluster: Kubernetes) -> None:
    cluster.apply(job("done", roles={"Worker": (1, "true")}))
    cluster.wait_for_condition("done", "Succeeded")
    cluster.delete(POD, "done-worker-0", grace=0)
    cluster.apply(job("next", roles={"Worker": (1, "true")}))  # its success shows that the operator has handled the deletion
    cluster.wait_for_condition("next", "Succeeded")
    assert (
        JOB_LABEL
        and "done-worker-0" not in cluster.pods()
        and set(conditions(cluster.status("done"))) == {"Created", "Succeeded"}
    )


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
def test_api_server_refuses_an_invalid_job_with_the_path(kubernetes: Kubernetes, change: KubeObject, path: str) -> None:
    bad = job("bad")
    for part, given in change.items():
        bad[part] = {**bad[part], **given} if given else {}
    with pytest.raises(ApiError) as refused:
        kubernetes.apply(bad)
    assert refused.value.code == 422 and path in str(refused.value)


def test_operator_fails_a_job_with_an_unknown_role(cluster: Kubernetes) -> None:
    cluster.apply(job("roles", roles={"Boss": (1, "true"), "Worker": (1, "true")}))
    status = cluster.wait_for_condition("roles", "Failed")
    assert conditions(status)["Failed"]["reason"] == "InvalidSpec"
    assert "spec.msReplicaSpecs.Boss" in cluster.wait_for_event("roles", "InvalidSpec") and not cluster.pods()


def test_pod_group_is_created_and_deleted_with_the_job(kubernetes: Kubernetes) -> None:
    """Only Volcano's custom resource is installed, not Volcano."""
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
    pods = wait_until_running(kubernetes, "gang-worker-0", "gang-worker-2")
    group = kubernetes.do(kubernetes.api.get(POD_GROUP, kubernetes.namespace, "gang"))
    assert group["spec"] == {"minMember": 2, "queue": "big"} and group["metadata"]["ownerReferences"]
    assert pods["gang-worker-0"]["spec"]["schedulerName"] == "volcano"
    (kubernetes.folder / "go").touch()
    kubernetes.wait_for_condition("gang", "Succeeded")
    kubernetes.wait(
        lambda: not kubernetes.do(kubernetes.api.list(POD_GROUP, kubernetes.namespace)).items, "the PodGroup to be deleted"
    )


def _served(kubernetes: Kubernetes, kind: ResourceKind) -> bool:
    try:
        kubernetes.do(kubernetes.api.list(kind))
    except ApiError:
        return False
    return True


def test_worker_ended_by_sigterm_is_replaced_with_exit_code_policy(cluster: Kubernetes) -> None:
    cluster.apply(job("term", roles={"Worker": replica(1, STAY, "ExitCode")}))
    before = wait_until_running(cluster, "term-worker-0")
    cluster.kubelet.kill("term-worker-0", signal.SIGTERM)
    wait_for_replacement(cluster, before["term-worker-0"])
    (cluster.folder / "go").touch()
    cluster.wait_for_condition("term", "Succeeded")
