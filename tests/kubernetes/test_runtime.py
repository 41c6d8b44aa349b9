"""The operator's own troubles: lost connections and replies, forgotten versions, a kill, two replicas, few rights."""

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
from tests.kubernetes.test_jobs import STAY, replaced, up
from tests.processes.harness import until

from covey.kubernetes import manifests
from covey.kubernetes.api_client import CONFIG_MAP, LEASE, POD, SERVICE, Api, ApiError, KubeObject, ResourceKind, connect
from covey.kubernetes.install import apply_objects
from covey.kubernetes.reflector import Reflector


@pytest.fixture
def held(kubernetes: Kubernetes) -> Kubernetes:
    kubernetes.kubelet.environment = {"GO": str(kubernetes.folder / "go")}
    return kubernetes


def proxied(kubernetes: Kubernetes) -> tuple[Proxy, str]:
    proxy = Proxy(kubernetes.server.url)
    return proxy, kubernetes.do(proxy.start())


def test_a_network_that_cuts_and_loses_replies(held: Kubernetes) -> None:
    """Replies to creates are lost, so the same is asked for again: nothing is there twice, nothing is counted twice."""
    proxy, url = proxied(held)
    held.operator(url=url)
    proxy.deaf = True
    held.apply(job("deaf", roles={"Scheduler": (1, STAY), "Worker": replica(2, STAY, "ExitCode")}))
    held.do(asyncio.sleep(0.3))  # requests go out, replies do not come back
    proxy.deaf = False
    held.do(proxy.cut())
    before = up(held, "deaf-worker-0", "deaf-worker-1")
    proxy.refuse = True
    held.do(proxy.cut())
    held.kubelet.kill("deaf-worker-1")  # while nobody looks
    held.wait(lambda: held.pods()["deaf-worker-1"]["status"]["phase"] == "Failed", "the pod to fail")
    proxy.refuse = False
    replaced(held, before["deaf-worker-1"])
    held.wait(lambda: "Running" in conditions(held.status("deaf")), "the job to run again")
    assert len(held.pods()) == 3 and held.status("deaf")["restartsTotal"] == 1
    (held.folder / "go").touch()
    held.until("deaf", "Succeeded")


def test_a_version_the_server_forgot(held: Kubernetes) -> None:
    """410: the reflector lists again, and hears of what it missed. ConfigMaps, because the server caches none of their past."""
    seen: list[str] = []

    def make(name: str) -> int:
        made = held.do(held.api.create(CONFIG_MAP, held.namespace, {"metadata": {"name": name}}))
        return int(made["metadata"]["resourceVersion"])

    async def reflect(version: int) -> Reflector:
        api = connect(str(held.kubeconfig))
        reflector = Reflector(
            api, CONFIG_MAP, namespace=held.namespace, on_change=lambda thing: seen.append(thing["metadata"]["name"])
        )
        reflector._resource_version = str(version)  # where it was when the connection broke
        asyncio.get_running_loop().create_task(reflector.run())
        return reflector

    early, _, late = make("early"), make("middle"), make("late")
    answer = httpx2.post(f"{held.server.etcd}/v3/kv/compaction", json={"revision": str(late)})
    assert answer.status_code == 200, answer.text
    reflector = held.do(reflect(early))
    until(lambda: {"early", "late"} <= set(seen), "both to be seen")
    assert reflector.list_count == 1
    make("later")
    until(lambda: "later" in seen, "the watch to go on")
    assert reflector.list_count == 1


def test_a_watch_that_falls_silent(held: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays open and says nothing: it is given up, and the watch goes on from the last version."""
    monkeypatch.setattr("covey.kubernetes.api_client.WATCH_SILENCE_MAX_S", 0.5)
    monkeypatch.setattr("covey.kubernetes.api_client.REQUEST_TIMEOUT_S", 2.0)
    proxy, url = proxied(held)
    held.operator(url=url)
    proxy.deaf = True
    held.apply(job("quiet", roles={"Worker": (1, "true")}))
    held.do(asyncio.sleep(0.6))
    proxy.deaf = False
    held.until("quiet", "Succeeded")


def start(held: Kubernetes, *words: str) -> Any:
    """`covey operator run`, as a process of its own."""
    command = [sys.executable, "-m", "covey.cli.main", "operator", "run", "--namespace", held.namespace, *words]
    env = {"KUBECONFIG": str(held.kubeconfig), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    return held.processes.start(command, name="operator", env=env)


def test_killed_and_started_again(held: Kubernetes) -> None:
    """kill -9 while it creates, and while it replaces: the next one goes on from what is there."""
    words = ["--no-leader-elect", "--metrics-port", "-1"]
    first = start(held, *words)
    for number in range(4):
        held.apply(job(f"many-{number}", roles={"Worker": replica(3, STAY, "ExitCode")}))
    held.wait(held.pods, "the first pods")
    first.kill()
    second = start(held, *words)
    names = [f"many-{number}-worker-{index}" for number in range(4) for index in range(3)]
    before = up(held, *names)
    for name in names[::3]:
        held.kubelet.kill(name)
    held.wait(lambda: any(held.status(f"many-{n}").get("restarts") for n in range(4)), "a first restart")
    second.kill()
    start(held, *words)
    for name in names[::3]:
        replaced(held, before[name])
    held.wait(lambda: all("Running" in conditions(held.status(f"many-{n}")) for n in range(4)), "all to run")
    assert [held.status(f"many-{number}")["restartsTotal"] for number in range(4)] == [1, 1, 1, 1]
    assert set(held.pods()) == set(names)


def test_two_replicas_one_acts(held: Kubernetes) -> None:
    """SIGTERM hands the lease over at once; kill -9 lets it run out."""
    words = ["--lease-namespace", held.namespace, "--lease-duration", "2"]
    replicas = [start(held, *words), start(held, *words)]

    def holder() -> str:
        try:
            lease = held.do(held.api.get(LEASE, held.namespace, "covey-operator"))
        except ApiError:
            return ""
        return str(lease["spec"].get("holderIdentity") or "")

    def leader() -> Any:
        return next((r for r in replicas if f"_{r.pid}_" in holder()), None)

    first = held.wait(leader, "a leader")
    held.apply(job("one", roles={"Worker": (1, "true")}))
    held.until("one", "Succeeded")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    second = held.wait(lambda: leader() if leader() not in (None, first) else None, "the other to lead")
    held.apply(job("two", roles={"Worker": (1, "true")}))
    held.until("two", "Succeeded")
    replicas.append(start(held, *words))
    second.kill()
    held.wait(lambda: leader() not in (None, second), "the third to lead")
    held.apply(job("three", roles={"Worker": (1, "true")}))
    held.until("three", "Succeeded")


ACCOUNT = ResourceKind("api/v1", "serviceaccounts", "ServiceAccount")
# What no peaceful run needs: another's pod of that name, an event that is told twice, a gang, what an admission plugin asks.
RARE = {"get pods", "get services", "get events", "patch events", "update msjobs/finalizers"}
RARE |= {f"{verb} podgroups" for verb in ("list", "watch", "create", "delete")}


def verb_of(method: str, path: str, watch: bool = False) -> str:
    """What a request needs a right for: "get pods", "update msjobs/status"."""
    words = re.sub(r"^/(api/v1|apis/[^/]+/[^/]+)(/namespaces/[^/]+(?=/))?/", "", path).split("/")
    verbs = {
        "GET": "get" if len(words) > 1 else "list",
        "POST": "create",
        "PUT": "update",
        "PATCH": "patch",
        "DELETE": "delete",
    }
    return f"{'watch' if watch else verbs[method]} {'/'.join(words[::2])}"


def recorded(held: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The rights that operators make use of from now on: all but the test's own requests."""
    used: set[str] = set()
    ask, stream = Api._request, Api._stream_lines

    async def asking(api: Api, method: str, path: str, **more: Any) -> KubeObject:
        if api is not held.api:
            used.add(verb_of(method, path))
        return await ask(api, method, path, **more)

    def streaming(api: Api, path: str, *more: Any) -> Any:
        if api is not held.api:
            used.add(verb_of("GET", path, watch=True))
        return stream(api, path, *more)

    monkeypatch.setattr(Api, "_request", asking)
    monkeypatch.setattr(Api, "_stream_lines", streaming)
    return used


@pytest.fixture
def turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One at a time on the API server that all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    with ((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("turn")  # an operator for all namespaces would do the work of the one that is counted here
@pytest.mark.parametrize("watched", [False, True])
def test_the_rights_that_are_installed_suffice_and_none_is_idle(
    held: Kubernetes, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    """A service account of its own, with a cluster's role, and with that of one namespace, which may not look at nodes."""
    things = [t for t in manifests.make_manifests(watched=held.namespace if watched else "") if "Role" in t["kind"]]

    async def grant() -> str:
        await held.api.create(ACCOUNT, held.namespace, {"metadata": {"name": "operator"}})
        for thing in things:
            metadata = thing["metadata"]
            metadata["name"] += f"-{held.namespace}"
            if metadata.get("namespace") == manifests.OPERATOR_NAMESPACE:
                metadata["namespace"] = held.namespace
            if "roleRef" in thing:
                thing["roleRef"]["name"] += f"-{held.namespace}"
                thing["subjects"] = [{"kind": "ServiceAccount", "name": "operator", "namespace": held.namespace}]
        async for _ in apply_objects(held.api, things):
            pass
        token = await held.api.create(ACCOUNT, held.namespace, {"spec": {}}, "operator", "token")
        return str(token["status"]["token"])

    token = held.do(grant())
    namespace, used = held.namespace if watched else "", recorded(held, monkeypatch)
    held.operator(token=token, namespace=namespace, leader_elect=True, lease_namespace=held.namespace)
    notes = {"annotations": {"recover-strategy": "recover"}, "labels": {"fault-scheduling": "grace"}}
    roles, policy = {"Scheduler": (1, STAY), "Worker": replica(2, STAY)}, {"cleanPodPolicy": "All"}
    held.apply(job("rights", roles=roles, successPolicy="AllWorkers", runPolicy=policy, **notes))
    held.apply(job("gone", roles={"Worker": (1, "true")}, runPolicy={"ttlSecondsAfterFinished": 0}))
    before = up(held, "rights-worker-0", "rights-worker-1")
    held.patch("rights-worker-1", {"metadata": {"ownerReferences": None}}, POD)
    held.patch("rights-scheduler-0", {"metadata": {"ownerReferences": None}}, SERVICE)
    held.kubelet.kill("rights-worker-0")
    replaced(held, before["rights-worker-0"])
    held.wait(lambda: held.services()["rights-scheduler-0"]["metadata"].get("ownerReferences"), "the service to be adopted")
    (held.folder / "go").touch()
    held.until("rights", "Succeeded")
    held.told("rights", "MSJobSucceeded")
    rules = [rule for thing in things for rule in thing.get("rules", [])]
    granted = {f"{verb} {what}" for rule in rules for what in rule["resources"] for verb in rule["verbs"]}
    other = {right for right in granted if "ascendjobs" in right}  # the same kind under another name
    with contextlib.suppress(AssertionError):  # the next line says more
        held.wait(lambda: granted - other - RARE <= used, "every right to be made use of")
    idle = granted - other - RARE - used
    assert idle == set()


def test_metrics(held: Kubernetes) -> None:
    operator = held.operator()
    held.apply(job("good", roles={"Worker": (1, "true")}))
    held.apply(job("bad", roles={"Worker": (1, "false")}))
    held.until("good", "Succeeded")
    held.until("bad", "Failed")
    text = httpx2.get(f"http://127.0.0.1:{operator.metrics_port}/metrics").text
    for line in ("created_total 2.0", "successful_total 1.0", "failed_total 1.0", "restarted_total 0.0", "deleted_total 0.0"):
        assert f"training_operator_jobs_{line}" in text
    assert httpx2.get(f"http://127.0.0.1:{operator.metrics_port}/readyz").status_code == 200


def test_the_verbs(held: Kubernetes) -> None:
    """submit, jobs, and a cluster that is not there."""
    held.operator()
    script = held.folder / "count.py"
    script.write_text("import covey\ncovey.init()\nprint('rank', covey.get_rank(), flush=True)\n")

    def covey(*words: str) -> subprocess.CompletedProcess[str]:
        env = held.processes.environ({"KUBECONFIG": str(held.kubeconfig), "PYTHONPATH": ":".join(p for p in sys.path if p)})
        command = [sys.executable, "-m", "covey.cli.main", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    held.kubelet.environment = {"MS_SCHED_MANAGE_PORT": "0"}
    made = covey("submit", str(script), "-n", "2", "--processes", "2", "--image", "covey:test")
    assert made.returncode == 0 and "count is submitted" in made.stdout, made.stderr
    held.until("count", "Succeeded")
    said = held.kubelet.log("count-worker-0") + held.kubelet.log("count-worker-1")
    assert "rank 0" in said
    listed = covey("jobs")
    assert "count" in listed.stdout and "Succeeded" in listed.stdout
    again = covey("submit", str(script), "--image", "x")
    assert again.returncode == 10 and again.stderr.count("\n") == 1 and "already" in again.stderr
    lost = covey("logs", "7", "--job", "count")
    assert lost.returncode == 10 and "expected 0 to 3" in lost.stderr
