"""The operator process: caches, controllers, leader election and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from covey.core.effects import Level, PublishEvent
from covey.core.event_log import EventLog
from covey.core.msjob import ascend_job
from covey.core.msjob.actions import RecordEvent
from covey.core.msjob.pod_state import JOB_LABEL, OPERATOR_LABEL, OPERATOR_NAME
from covey.core.plurals import count_noun
from covey.errors import PeerError
from covey.kubernetes import operator_lease, operator_metrics, scheduler_rest_client
from covey.kubernetes.api_client import (
    ASCENDJOB,
    MSJOB,
    NODE,
    NOT_FOUND,
    POD,
    POD_GROUP,
    SERVICE,
    Api,
    ApiError,
    KubeObject,
    ResourceKind,
)
from covey.kubernetes.controller import Caches, Controller, OwnedObjects
from covey.kubernetes.reflector import ObjectKey, Reflector, object_key
from covey.log import log

DEFAULT_WORKERS = 16
OWNED_SELECTOR = f"{OPERATOR_LABEL}={OPERATOR_NAME}"


class OperatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an operator process."""

    namespace: str = ""  # watched namespace; "": all
    lease_namespace: str = "default"  # of the lease and of the operator's key
    leader_elect: bool = True
    lease_duration_s: float = operator_lease.LEASE_DURATION_S
    gang_scheduler: str = ""  # schedulerName of pods; "": no gang scheduling
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # 0: any free port; negative: no metrics
    workers: int = DEFAULT_WORKERS  # jobs of each kind reconciled at the same time


def slim_pod(pod: KubeObject) -> KubeObject:
    """Return a pod without most of the fields that plans do not read, to save memory."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    fields = (
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "labels",
        "ownerReferences",
        "deletionTimestamp",
        "creationTimestamp",
    )
    return {
        "metadata": {key: metadata[key] for key in fields if key in metadata},
        "spec": {key: spec[key] for key in ("nodeName", "activeDeadlineSeconds") if key in spec},
        "status": pod.get("status") or {},
    }


def slim_node(node: KubeObject) -> KubeObject:
    """Return a node without most of the fields that plans do not read, to save memory."""
    metadata = node["metadata"]
    conditions = (node.get("status") or {}).get("conditions") or []
    relevant = [c for c in conditions if c.get("type") == "Ready" or c.get("status") == "True"]
    slimmed = [{key: c.get(key) for key in ("type", "status", "lastTransitionTime")} for c in relevant]
    return {
        "metadata": {key: metadata[key] for key in ("name", "uid", "resourceVersion")},
        "status": {"conditions": slimmed},
    }


class Operator:
    """One replica of the operator. `run` returns only by cancellation or an error."""

    def __init__(self, api: Api, options: OperatorOptions) -> None:
        self.api = api
        self.options = options
        self.metrics = operator_metrics.OperatorMetrics()
        self.metrics_port = 0
        self.leading = asyncio.Event()
        self.event_log = EventLog()  # recent events of jobs, for the console
        self._controllers: list[Controller] = []  # one per kind of job, while this replica acts
        self._is_ready = False
        self._secret_key = b""

    def list_jobs(self) -> list[KubeObject]:
        """Return all cached jobs of all kinds; [] while this replica does not act."""
        return [obj for controller in self._controllers for obj in controller.jobs]

    # -- requests of users (`covey.management.jobs_api`) -------------------------------------------------------------

    async def forward_request(self, key: ObjectKey, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        """Forward a REST request to a job's scheduler; return status and body.

        Raise `PeerError` if the job does not exist, its scheduler is not known, or it does not answer.
        """
        return await self._scheduler_clients(key).forward_request(key, method, target, body)

    def stream(self, key: ObjectKey) -> AsyncIterator[bytes]:
        """Return the lines that a job's scheduler streams to the console. Raise `PeerError` as `forward_request` does."""
        return self._scheduler_clients(key).stream(key)

    async def scale(self, key: ObjectKey, workers: int) -> str:
        """Set the Worker replicas of a job's spec, like `kubectl scale`, and return a sentence for the user."""
        controller, job = self._find_job(key)
        field = "replicaSpecs" if controller.kind is ASCENDJOB else "msReplicaSpecs"
        role = next((role for role in job["spec"].get(field) or {} if role.lower() == "worker"), None)
        if role is None:
            raise PeerError(f"{'/'.join(key)} cannot be scaled: it has no role Worker")
        await self.api.patch(controller.kind, *key, {"spec": {field: {role: {"replicas": workers}}}})
        return f"{'/'.join(key)}: scaling to {count_noun(workers, 'worker')}"

    async def suspend(self, key: ObjectKey, suspended: bool) -> str:
        """Set runPolicy.suspend of a job and return a sentence for the user."""
        controller, _ = self._find_job(key)
        await self.api.patch(controller.kind, *key, {"spec": {"runPolicy": {"suspend": suspended}}})
        return f"{'/'.join(key)}: suspending, its pods are deleted" if suspended else f"{'/'.join(key)}: resuming with new pods"

    def _find_job(self, key: ObjectKey) -> tuple[Controller, KubeObject]:
        for controller in self._controllers:
            if (job := controller.jobs.get(key)) is not None:
                return controller, job
        raise PeerError(f"job {'/'.join(key)} not found")

    def _scheduler_clients(self, key: ObjectKey) -> scheduler_rest_client.SchedulerClients:
        controller, job = self._find_job(key)
        if not controller.scheduler_clients.is_polling(key):
            state = (job.get("status") or {}).get("state") or "not reconciled yet"
            raise PeerError(f"{'/'.join(key)} is {state}: only a running job with covey's scheduler answers requests")
        return controller.scheduler_clients

    def _append_event(self, obj: KubeObject, action: RecordEvent) -> None:
        name = f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}"
        level = Level.WARNING if action.event_type == "Warning" else Level.NOTE
        self.event_log.add(PublishEvent(name, action.reason, action.message, level), time.time())

    async def run(self) -> None:
        server = None
        if self.options.metrics_port >= 0:
            server = await operator_metrics.serve_metrics(
                self.metrics, self.options.metrics_host, self.options.metrics_port, lambda: self._is_ready
            )
            self.metrics_port = int(server.sockets[0].getsockname()[1])
        try:
            if not self.options.leader_elect:
                await self._run_controllers()
                return
            self._is_ready = True  # a replica that waits for the lease counts as ready
            lease = operator_lease.OperatorLease(
                self.api, self.options.lease_namespace, duration_s=self.options.lease_duration_s
            )
            await lease.run_while_held(self._run_controllers)
        finally:
            if server is not None:
                server.close()

    async def _run_controllers(self) -> None:
        kinds = [MSJOB, *([ASCENDJOB] if await self._is_served("mindxdl.gitee.com", "v1") else [])]
        gang = self.options.gang_scheduler
        self._secret_key = await scheduler_rest_client.load_or_create_key(self.api, self.options.lease_namespace)
        async with asyncio.TaskGroup() as group:
            nodes = await self._watch_nodes(group)
            owned_reflector = partial(Reflector, self.api, namespace=self.options.namespace, selector=OWNED_SELECTOR)
            owned = OwnedObjects(owned_reflector(POD, transform=slim_pod), owned_reflector(SERVICE))
            for reflector in (owned.pods, owned.services):
                group.create_task(reflector.run())
            for kind in kinds:
                controller = self._make_controller(kind, owned, nodes, gang, group)
                group.create_task(controller.run(self.options.workers))
            self._is_ready = True
            self.leading.set()
            self.metrics.leader.set(1)
            try:
                await asyncio.Event().wait()
            finally:
                self._controllers.clear()
                self.leading.clear()
                self.metrics.leader.set(0)

    def _make_controller(
        self, kind: ResourceKind, owned: OwnedObjects, nodes: Reflector | None, gang: str, group: asyncio.TaskGroup
    ) -> Controller:
        """Create the controller of one kind of job and its own caches; a change of an object queues the jobs it concerns."""
        api, namespace = self.api, self.options.namespace
        controllers: list[Controller] = []

        def queue_job_of(obj: KubeObject) -> None:
            metadata = obj["metadata"]
            job = (metadata.get("labels") or {}).get(JOB_LABEL)
            is_other_kind = any(o.get("controller") and o["kind"] != kind.name for o in metadata.get("ownerReferences") or [])
            if job and not is_other_kind:
                controllers[0].queue.add((metadata.get("namespace", ""), job))

        def job_changed(job: KubeObject) -> None:
            key = object_key(job)
            if caches.jobs.get(key) is None:
                self.metrics.jobs_deleted.inc()
            controllers[0].queue.add(key)

        def node_changed(node: KubeObject) -> None:
            for pod in owned.pods_by_node.get(node["metadata"]["name"]):
                queue_job_of(pod)

        caches = Caches(Reflector(api, kind, namespace=namespace, on_change=job_changed), owned)
        for reflector in (owned.pods, owned.services):
            reflector.listeners.append(queue_job_of)
        caches.nodes = nodes
        if nodes is not None:
            nodes.listeners.append(node_changed)
        own_reflectors = [caches.jobs]
        if gang:
            caches.pod_groups = Reflector(
                api, POD_GROUP, namespace=namespace, on_change=lambda g: controllers[0].queue.add(object_key(g))
            )
            own_reflectors.append(caches.pod_groups)
        convert = ascend_job.convert_ascend_job if kind is ASCENDJOB else (lambda obj: obj)
        controller = Controller(
            api, kind, caches, self.metrics, convert=convert, gang_scheduler=gang, secret_key=self._secret_key
        )
        controller.events.on_event = self._append_event
        controllers.append(controller)
        self._controllers.append(controller)
        for reflector in own_reflectors:
            group.create_task(reflector.run())
        group.create_task(self._start_when_synced(controller, [*own_reflectors, owned.pods, owned.services]))
        return controller

    async def _start_when_synced(self, controller: Controller, reflectors: list[Reflector]) -> None:
        """Start the controller when every cache is filled; before that, existing pods would seem to be missing."""
        for reflector in reflectors:
            await reflector.ready.wait()
        controller.caches_filled.set()

    async def _watch_nodes(self, group: asyncio.TaskGroup) -> Reflector | None:
        """Start and return a cache of nodes; None if the operator may not list nodes, as with a Role of one namespace."""
        try:
            await self.api.list(NODE)
        except ApiError as error:
            if error.code != 403:
                raise
            log.warning("nodes cannot be listed, so pods on lost nodes are not detected: %s", error)
            return None
        nodes = Reflector(self.api, NODE, transform=slim_node)
        group.create_task(nodes.run())
        await nodes.ready.wait()
        return nodes

    async def _is_served(self, group: str, version: str) -> bool:
        try:
            await self.api.get_api_resources(group, version)
        except ApiError as error:
            if error.code == NOT_FOUND:
                return False
            raise
        return True


async def run_operator(
    api: Api, options: OperatorOptions, serve_console: Callable[[Operator], Awaitable[None]] | None = None
) -> None:
    """Run an operator, and `serve_console` with it, until SIGTERM or SIGINT; then release the lease and return.

    An error of either is raised.
    """
    operator = Operator(api, options)
    work = [operator.run(), *([serve_console(operator)] if serve_console is not None else [])]
    task = asyncio.gather(*work)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_exception)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    except BaseExceptionGroup as several:
        raise _first_error(several) from None
    finally:
        await api.close()


def _on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log uvloop's SSL errors about aborted connections at debug level: the request that used the connection reports them."""
    if "SSL protocol" in str(context.get("message")):
        log.debug("%s: %s", context["message"], context.get("exception"))
    else:
        loop.default_exception_handler(context)


def _first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
