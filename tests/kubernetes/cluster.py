"""A namespace of a real API server with a fake kubelet, which runs pods as processes, and operators; one per test.

    def test_it(kubernetes: Kubernetes) -> None:
        kubernetes.operator()
        kubernetes.apply(job("train", roles={"Worker": (2, "true")}))
        kubernetes.wait_for_condition("train", "Succeeded")

Coroutines run on an event loop in a separate thread; tests are plain functions that wait for events.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.server import Server
from tests.processes.harness import Processes, until

from covey.core.msjob.pod_state import JOB_LABEL
from covey.kubernetes.api_client import (
    ASCENDJOB,
    CRD,
    EVENT,
    MSJOB,
    NAMESPACE,
    NODE,
    POD,
    SERVICE,
    Api,
    ApiError,
    KubeObject,
    ResourceKind,
    connect,
)
from covey.kubernetes.crd import make_ascendjob_crd, make_msjob_crd
from covey.kubernetes.operator import Operator, OperatorOptions

T = TypeVar("T")
DEADLINE_S = 90.0


class Kubernetes:
    """One namespace, its fake kubelet and the operators that a test starts."""

    def __init__(self, server: Server, namespace: str, folder: Path) -> None:
        self.server = server
        self.namespace = namespace
        self.folder = folder
        self.kubeconfig = server.kubeconfig(folder / "kubeconfig", namespace=namespace)
        self.processes = Processes(folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._running: list[Future[Any]] = []
        self.api: Api = self.do(self._connect())
        self.kubelet: Kubelet = self.do(self._kubelet())
        self.do(self._prepare())
        self._running.append(self.begin(self.kubelet.run()))

    async def _connect(self) -> Api:
        return connect(str(self.kubeconfig))

    async def _kubelet(self) -> Kubelet:
        return Kubelet(self.api, self.namespace, self.folder / "pods")

    async def _prepare(self) -> None:
        """Create the custom resource definitions, which all tests share, and the namespace of this test."""
        for definition, kind in ((make_msjob_crd(), MSJOB), (make_ascendjob_crd(), ASCENDJOB)):
            try:
                await self.api.create(CRD, "", definition)
            except ApiError as error:
                assert error.code == 409, error
            while True:
                try:
                    await self.api.list(kind)
                    break
                except ApiError as error:
                    assert error.code == 404, error
                    await asyncio.sleep(0.05)
        await self.api.create(NAMESPACE, "", {"metadata": {"name": self.namespace}})
        await self.kubelet.prepare()

    # -- running -----------------------------------------------------------------------------------------------------

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.begin(work).result(DEADLINE_S)

    def operator(self, *, url: str = "", token: str = "", **options: Any) -> Operator:
        """Start an operator of this namespace in this process; `url` and `token` replace those of the API server."""
        kubeconfig = self.folder / f"kubeconfig-{len(self._running)}"
        self.server._replace(url=url or self.server.url).kubeconfig(kubeconfig, token=token, namespace=self.namespace)

        async def make() -> Operator:
            values = {"leader_elect": False, "namespace": self.namespace, **options}
            return Operator(connect(str(kubeconfig)), OperatorOptions(**values))

        operator = self.do(make())
        self._running.append(self.begin(operator.run()))
        if not options.get("leader_elect"):
            until(lambda: operator.leading.is_set() or self._running[-1].done(), "the operator to act", DEADLINE_S)
        return operator

    def end(self) -> None:
        for task in self._running:
            task.cancel()
        for task in self._running:
            with contextlib.suppress(BaseException):
                task.result(20)
        self.processes.end()

        async def clean_up() -> None:
            for node in self.kubelet.nodes:
                await self.api.delete(NODE, "", node)
            await self.api.close()
            remaining = asyncio.all_tasks() - {asyncio.current_task()}
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)

        self.do(clean_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # -- objects -----------------------------------------------------------------------------------------------------

    def apply(self, job: KubeObject) -> KubeObject:
        kind = ASCENDJOB if job.get("kind") == "AscendJob" else MSJOB
        return self.do(self.api.create(kind, self.namespace, job))

    def patch(self, name: str, patch: KubeObject, kind: ResourceKind = MSJOB, sub: str = "") -> KubeObject:
        return self.do(self.api.patch(kind, self.namespace, name, patch, sub))

    def delete(self, kind: ResourceKind, name: str, **options: Any) -> None:
        self.do(self.api.delete(kind, self.namespace, name, **options))

    def job(self, name: str, kind: ResourceKind = MSJOB) -> KubeObject:
        return self.do(self.api.get(kind, self.namespace, name))

    def status(self, name: str, kind: ResourceKind = MSJOB) -> KubeObject:
        return self.job(name, kind).get("status") or {}

    def pods(self, job: str = "") -> dict[str, KubeObject]:
        page = self.do(self.api.list(POD, self.namespace, f"{JOB_LABEL}={job}" if job else ""))
        return {pod["metadata"]["name"]: pod for pod in page.items}

    def services(self) -> dict[str, KubeObject]:
        return {s["metadata"]["name"]: s for s in self.do(self.api.list(SERVICE, self.namespace)).items}

    def events(self, job: str) -> dict[str, str]:
        """Return the message of the last event of a job by reason."""
        events = [e for e in self.do(self.api.list(EVENT, self.namespace)).items if e["involvedObject"]["name"] == job]
        return {event["reason"]: event["message"] for event in events}

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, happened: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
        return until(happened, what, deadline_s, self.diagnostics)

    def wait_for_condition(
        self, name: str, condition: str, kind: ResourceKind = MSJOB, deadline_s: float = DEADLINE_S
    ) -> KubeObject:
        """Wait until a condition is true and return the job's status; fail early if the job ends with another condition."""

        def is_true() -> KubeObject | None:
            status = self.status(name, kind)
            final = {"Succeeded", "Failed"} & set(conditions(status)) - {condition}
            assert not final or condition in conditions(status), f"{name} is {final}, not {condition}\n{self.diagnostics()}"
            return status if condition in conditions(status) else None

        found: KubeObject = self.wait(is_true, f"{name} to be {condition}", deadline_s)
        return found

    def wait_for_log(self, pod: str, text: str, deadline_s: float = DEADLINE_S) -> None:
        self.wait(lambda: text in self.kubelet.log(pod), f"{text!r} in the log of {pod}", deadline_s)

    def wait_for_event(self, job: str, reason: str) -> str:
        """Wait for an event with this reason and return its message."""
        message: str = self.wait(lambda: self.events(job).get(reason), f"the event {reason}")
        return message

    def diagnostics(self) -> str:
        """Return status, events and logs of all jobs and pods, for the message of a failed test."""
        lines = []
        for kind in (MSJOB, ASCENDJOB):
            for job in self.do(self.api.list(kind, self.namespace)).items:
                lines.append(f"--- {job['metadata']['name']}: {job.get('status')}")
                lines += [f"{reason}: {message}" for reason, message in self.events(job["metadata"]["name"]).items()]
        for name, pod in self.pods().items():
            lines.append(f"--- {name}: {pod['status']}\n{self.kubelet.log(name)[-1500:]}")
        return "\n".join(lines) + "\n" + self.processes.tails()


def conditions(status: KubeObject) -> dict[str, KubeObject]:
    """Return the true conditions by type."""
    return {c["type"]: c for c in status.get("conditions") or [] if c["status"] == "True"}


def job(
    name: str, *, roles: dict[str, Any] | None = None, labels: Any = None, annotations: Any = None, **spec: Any
) -> KubeObject:
    """Return an MSJob; `roles` maps a role to (replicas, shell command) or to a complete replica spec."""
    specs = {}
    for key, value in (roles or {"Worker": (1, "true")}).items():
        specs[key] = value if isinstance(value, dict) else replica(*value)
    return {
        "apiVersion": "mindspore.gitee.com/v1",
        "kind": "MSJob",
        "metadata": {"name": name, "labels": labels or {}, "annotations": annotations or {}},
        "spec": {"msReplicaSpecs": specs, **spec},
    }


def replica(replicas: int, command: str | list[str], restart: str = "Never", **container: Any) -> KubeObject:
    arguments = ["sh", "-c", command] if isinstance(command, str) else command
    main = {"name": "mindspore", "image": "covey:test", "command": arguments, **container}
    template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [main]}}
    return {"replicas": replicas, "restartPolicy": restart, "template": template}


def running(server: Server, namespace: str, folder: Path) -> Iterator[Kubernetes]:
    """Yield a `Kubernetes` and end it; the body of the fixture."""
    kubernetes = Kubernetes(server, namespace, folder)
    try:
        yield kubernetes
    finally:
        kubernetes.end()
