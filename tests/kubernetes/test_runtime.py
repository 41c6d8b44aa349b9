"""Faults of the operator: lost connections and replies, expired versions, SIGKILL, two replicas, minimal permissions."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from tests.kubernetes.cluster import Kubernetes, conditions, job, replica
from tests.kubernetes.proxy import Proxy
from tests.kubernetes.test_jobs import STAY, wait_for_replacement, wait_until_running
from tests.processes.harness import until

from covey.kubernetes import manifests
from covey.kubernetes.api_client import CONFIG_MAP, LEASE, POD, SERVICE, Api, ApiError, KubeObject, ResourceKind, connect
from covey.kubernetes.reflector import Reflector
from covey.kubernetes.server_side_apply import apply_objects


@pytest.fixture
def cluster(kubernetes: Kubernetes) -> Kubernetes:
    kubernetes.kubelet.environment = {"GO": str(kubernetes.folder / "go")}
    return kubernetes


def proxied(kubernetes: Kubernetes) -> tuple[Proxy, str]:
    proxy = Proxy(kubernetes.server.url)
    return proxy, kubernetes.do(proxy.start())


def test_operator_creates_and_counts_once_despite_lost_replies(cluster: Kubernetes) -> None:
    """Replies to creates are lost and the requests repeated: no pod is created twice, no restart counted twice."""
    proxy, url = proxied(cluster)
    cluster.operator(url=url)
    proxy.drop_replies = True
    cluster.apply(job("deaf", roles={"Scheduler": (1, STAY), "Worker": replica(2, STAY, "ExitCode")}))
    cluster.do(asyncio.sleep(0.3))  # requests arrive, replies are dropped
    proxy.drop_replies = False
    cluster.do(proxy.abort_connections())
    before = wait_until_running(cluster, "deaf-worker-0", "deaf-worker-1")
    proxy.refuse = True
    cluster.do(proxy.abort_connections())
    cluster.kubelet.kill("deaf-worker-1")  # while the operator is disconnected
    cluster.wait(lambda: cluster.pods()["deaf-worker-1"]["status"]["phase"] == "Failed", "the pod to fail")
    proxy.refuse = False
    wait_for_replacement(cluster, before["deaf-worker-1"])
    cluster.wait(lambda: "Running" in conditions(cluster.status("deaf")), "the job to run again")
    assert len(cluster.pods()) == 3 and cluster.status("deaf")["restartsTotal"] == 1
    (cluster.folder / "go").touch()
    cluster.wait_for_condition("deaf", "Succeeded")


def test_reflector_lists_again_after_an_expired_version(cluster: Kubernetes) -> None:
    """After 410 the reflector lists again and reports missed changes. The server keeps no watch cache of ConfigMaps."""
    seen: list[str] = []

    def create(name: str) -> int:
        created = cluster.do(cluster.api.create(CONFIG_MAP, cluster.namespace, {"metadata": {"name": name}}))
        return int(created["metadata"]["resourceVersion"])

    async def reflect(version: int) -> Reflector:
        api = connect(str(cluster.kubeconfig))
        reflector = Reflector(
            api, CONFIG_MAP, namespace=cluster.namespace, on_change=lambda obj: seen.append(obj["metadata"]["name"])
        )
        reflector._resource_version = str(version)  # as if the connection had been lost then
        asyncio.get_running_loop().create_task(reflector.run())
        return reflector

    early, _, late = create("early"), create("middle"), create("late")
    response = httpx2.post(f"{cluster.server.etcd}/v3/kv/compaction", json={"revision": str(late)})
    assert response.status_code == 200, response.text
    reflector = cluster.do(reflect(early))
    until(lambda: {"early", "late"} <= set(seen), "both to be seen")
    assert reflector.list_count == 1
    create("later")
    until(lambda: "later" in seen, "an event of the watch")
    assert reflector.list_count == 1


def test_silent_watch_is_replaced_by_a_new_one(cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch whose connection stays open without data is closed and continued from the last version."""
    monkeypatch.setattr("covey.kubernetes.api_client.WATCH_SILENCE_MAX_S", 0.5)
    monkeypatch.setattr("covey.kubernetes.api_client.REQUEST_TIMEOUT_S", 2.0)
    proxy, url = proxied(cluster)
    cluster.operator(url=url)
    proxy.drop_replies = True
    cluster.apply(job("quiet", roles={"Worker": (1, "true")}))
    cluster.do(asyncio.sleep(0.6))
    proxy.drop_replies = False
    cluster.wait_for_condition("quiet", "Succeeded")


def start(cluster: Kubernetes, *options: str) -> Any:
    """Start `covey operator run` as a process."""
    command = [sys.executable, "-m", "covey.cli.main", "operator", "run", "--namespace", cluster.namespace, *options]
    env = {"KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    return cluster.processes.start(command, name="operator", env=env)


def test_restarted_operator_continues_after_sigkill(cluster: Kubernetes) -> None:
    """SIGKILL while pods are created, and while pods are replaced: the next operator continues from the observed state."""
    options = ["--no-leader-elect", "--metrics-port", "-1"]
    first = start(cluster, *options)
    for number in range(4):
        cluster.apply(job(f"many-{number}", roles={"Worker": replica(3, STAY, "ExitCode")}))
    cluster.wait(cluster.pods, "the first pods")
    first.kill()
    second = start(cluster, *options)
    names = [f"many-{number}-worker-{index}" for number in range(4) for index in range(3)]
    before = wait_until_running(cluster, *names)
    for name in names[::3]:
        cluster.kubelet.kill(name)
    cluster.wait(lambda: any(cluster.status(f"many-{n}").get("restarts") for n in range(4)), "a first restart")
    second.kill()
    start(cluster, *options)
    for name in names[::3]:
        wait_for_replacement(cluster, before[name])
    cluster.wait(lambda: all("Running" in conditions(cluster.status(f"many-{n}")) for n in range(4)), "all to run")
    assert [cluster.status(f"many-{number}")["restartsTotal"] for number in range(4)] == [1, 1, 1, 1]
    assert set(cluster.pods()) == set(names)


def test_second_replica_takes_over_when_the_leader_ends(cluster: Kubernetes) -> None:
    """On SIGTERM the leader releases the lease; after SIGKILL the lease expires."""
    options = ["--lease-namespace", cluster.namespace, "--lease-duration", "2"]
    replicas = [start(cluster, *options), start(cluster, *options)]

    def holder() -> str:
        try:
            lease = cluster.do(cluster.api.get(LEASE, cluster.namespace, "covey-operator"))
        except ApiError:
            return ""
        return str(lease["spec"].get("holderIdentity") or "")

    def leader() -> Any:
        return next((r for r in replicas if f"_{r.pid}_" in holder()), None)

    first = cluster.wait(leader, "a leader")
    cluster.apply(job("one", roles={"Worker": (1, "true")}))
    cluster.wait_for_condition("one", "Succeeded")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    second = cluster.wait(lambda: leader() if leader() not in (None, first) else None, "the other to lead")
    cluster.apply(job("two", roles={"Worker": (1, "true")}))
    cluster.wait_for_condition("two", "Succeeded")
    replicas.append(start(cluster, *options))
    second.kill()
    cluster.wait(lambda: leader() not in (None, second), "the third to lead")
    cluster.apply(job("three", roles={"Worker": (1, "true")}))
    cluster.wait_for_condition("three", "Succeeded")


ACCOUNT = ResourceKind("api/v1", "serviceaccounts", "ServiceAccount")
# Permissions not used by this test: for a foreign pod of the same name, a repeated event, PodGroups, an admission plugin.
RARE = {"get pods", "get services", "get events", "patch events", "update msjobs/finalizers"}
RARE |= {f"{verb} podgroups" for verb in ("list", "watch", "create", "delete")}


def verb_of(method: str, path: str, watch: bool = False) -> str:
    """Return the permission that a request needs, such as "get pods" or "update msjobs/status"."""
    parts = re.sub(r"^/(api/v1|apis/[^/]+/[^/]+)(/namespaces/[^/]+(?=/))?/", "", path).split("/")
    verbs = {
        "GET": "get" if len(parts) > 1 else "list",
        "POST": "create",
        "PUT": "update",
        "PATCH": "patch",
        "DELETE": "delete",
    }
    return f"{'watch' if watch else verbs[method]} {'/'.join(parts[::2])}"


def record_permissions(cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set to which the permissions of all later requests are added, except those of the test itself."""
    used: set[str] = set()
    request, stream = Api._request, Api._stream_lines

    async def recorded_request(api: Api, method: str, path: str, **more: Any) -> KubeObject:
        if api is not cluster.api:
            used.add(verb_of(method, path))
        return await request(api, method, path, **more)

    def recorded_stream(api: Api, path: str, *more: Any) -> Any:
        if api is not cluster.api:
            used.add(verb_of("GET", path, watch=True))
        return stream(api, path, *more)

    monkeypatch.setattr(Api, "_request", recorded_request)
    monkeypatch.setattr(Api, "_stream_lines", recorded_stream)
    return used


@pytest.fixture
def exclusive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hold a lock that the processes of a test run share, because they share the API server."""
    base = tmp_path_factory.getbasetemp()
    with ((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exclusive").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("exclusive")  # another operator for all namespaces would do this one's work
@pytest.mark.parametrize("watched", [False, True])
def test_installed_permissions_are_sufficient_and_all_used(
    cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    """A service account with the ClusterRole, and one with the Role of a namespace, which may not list nodes."""
    objects = [o for o in manifests.make_manifests(watched=cluster.namespace if watched else "") if "Role" in o["kind"]]

    async def grant() -> str:
        await cluster.api.create(ACCOUNT, cluster.namespace, {"metadata": {"name": "operator"}})
        for obj in objects:
            metadata = obj["metadata"]
            metadata["name"] += f"-{cluster.namespace}"
            if metadata.get("namespace") == manifests.OPERATOR_NAMESPACE:
                metadata["namespace"] = cluster.namespace
            if "roleRef" in obj:
                obj["roleRef"]["name"] += f"-{cluster.namespace}"
                obj["subjects"] = [{"kind": "ServiceAccount", "name": "operator", "namespace": cluster.namespace}]
        async for _ in apply_objects(cluster.api, objects):
            pass
        token = await cluster.api.create(ACCOUNT, cluster.namespace, {"spec": {}}, "operator", "token")
        return str(token["status"]["token"])

    token = cluster.do(grant())
    namespace, used = cluster.namespace if watched else "", record_permissions(cluster, monkeypatch)
    cluster.operator(token=token, namespace=namespace, leader_elect=True, lease_namespace=cluster.namespace)
    annotations = {"annotations": {"recover-strategy": "recover"}, "labels": {"fault-scheduling": "grace"}}
    roles, policy = {"Scheduler": (1, STAY), "Worker": replica(2, STAY)}, {"cleanPodPolicy": "All"}
    cluster.apply(job("rights", roles=roles, successPolicy="AllWorkers", runPolicy=policy, **annotations))
    cluster.apply(job("gone", roles={"Worker": (1, "true")}, runPolicy={"ttlSecondsAfterFinished": 0}))
    before = wait_until_running(cluster, "rights-worker-0", "rights-worker-1")
    cluster.patch("rights-worker-1", {"metadata": {"ownerReferences": None}}, POD)
    cluster.patch("rights-scheduler-0", {"metadata": {"ownerReferences": None}}, SERVICE)
    cluster.kubelet.kill("rights-worker-0")
    wait_for_replacement(cluster, before["rights-worker-0"])
    cluster.wait(
        lambda: cluster.services()["rights-scheduler-0"]["metadata"].get("ownerReferences"), "the service to be adopted"
    )
    (cluster.folder / "go").touch()
    cluster.wait_for_condition("rights", "Succeeded")
    cluster.wait_for_event("rights", "MSJobSucceeded")
    rules = [rule for obj in objects for rule in obj.get("rules", [])]
    granted = {f"{verb} {resource}" for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    ascend = {permission for permission in granted if "ascendjobs" in permission}  # used like those of msjobs
    with contextlib.suppress(AssertionError):  # the assertion below shows which are unused
        cluster.wait(lambda: granted - ascend - RARE <= used, "all permissions to be used")
    unused = granted - ascend - RARE - used
    assert unused == set()


def test_metrics_count_jobs(cluster: Kubernetes) -> None:
    operator = cluster.operator()
    cluster.apply(job("good", roles={"Worker": (1, "true")}))
    cluster.apply(job("bad", roles={"Worker": (1, "false")}))
    cluster.wait_for_condition("good", "Succeeded")
    cluster.wait_for_condition("bad", "Failed")
    text = httpx2.get(f"http://127.0.0.1:{operator.metrics_port}/metrics").text
    for line in ("created_total 2.0", "successful_total 1.0", "failed_total 1.0", "restarted_total 0.0", "deleted_total 0.0"):
        assert f"training_operator_jobs_{line}" in text
    assert httpx2.get(f"http://127.0.0.1:{operator.metrics_port}/readyz").status_code == 200


def test_submit_jobs_and_logs_commands(cluster: Kubernetes) -> None:
    cluster.operator()
    script = cluster.folder / "count.py"
    script.write_text("import covey\ncovey.init()\nprint('rank', covey.get_rank(), flush=True)\n")

    def covey(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = cluster.processes.environ(
            {"KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": ":".join(p for p in sys.path if p)}
        )
        command = [sys.executable, "-m", "covey.cli.main", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    cluster.kubelet.environment = {"MS_SCHED_MANAGE_PORT": "0"}
    submitted = covey("submit", str(script), "-n", "2", "--processes", "2", "--image", "covey:test")
    assert submitted.returncode == 0 and "submitted job count" in submitted.stdout, submitted.stderr
    cluster.wait_for_condition("count", "Succeeded")
    logs = cluster.kubelet.log("count-worker-0") + cluster.kubelet.log("count-worker-1")
    assert "rank 0" in logs
    listed = covey("jobs")
    assert "count" in listed.stdout and "Succeeded" in listed.stdout
    again = covey("submit", str(script), "--image", "x")
    assert again.returncode == 10 and again.stderr.count("\n") == 1 and "already" in again.stderr
    unknown = covey("logs", "7", "--job", "count")
    assert unknown.returncode == 10 and "expected 0 to 3" in unknown.stderr
