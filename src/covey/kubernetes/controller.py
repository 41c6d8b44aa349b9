"""Controller of one kind of job: observe a job in the caches, compute its plan, write the status, carry out the actions.

`covey.core.msjob` makes the decisions. A failed reconcile of a job is retried with exponential backoff.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from covey.core.msjob import Observed, ReconcilePlan, parse_job, plan_job
from covey.core.msjob.actions import (
    Action,
    AdoptOrphan,
    AnnounceWorkers,
    CreatePod,
    CreatePodGroup,
    CreateSecret,
    CreateService,
    DeleteJob,
    DeletePod,
    DeletePodGroup,
    DeleteService,
    RecordEvent,
    ReleaseWorkers,
    ReportPodGone,
    SetLabel,
    TerminatePod,
)
from covey.core.msjob.pod_state import JOB_LABEL, controller_uid_of
from covey.core.msjob.spec import InvalidJob, Job, ReplicaDuty, ReplicaSpec, pod_name
from covey.errors import PeerError
from covey.kubernetes import pod_builder
from covey.kubernetes.api_client import (
    CONFLICT,
    NOT_FOUND,
    POD,
    POD_GROUP,
    SECRET,
    SERVICE,
    Api,
    ApiError,
    KubeObject,
    ResourceKind,
)
from covey.kubernetes.event_recorder import EventRecorder
from covey.kubernetes.operator_metrics import OperatorMetrics
from covey.kubernetes.reflector import Index, ObjectKey, Reflector
from covey.kubernetes.scheduler_rest_client import SchedulerClients, SchedulerEndpoint, derive_token
from covey.kubernetes.work_queue import WorkQueue
from covey.log import log

CONCURRENT_ACTIONS_MAX = 16  # per job
RECOUNT_DELAY_S = 1.0  # a job is reconciled again this soon after it created pods, to update its counters


class OwnedObjects:
    """Caches of the pods and services of the jobs of all kinds, with indexes: pods by job and by node, services by job."""

    def __init__(self, pods: Reflector, services: Reflector) -> None:
        self.pods = pods
        self.services = services
        self.pods_by_job = Index(pods, _job_key)
        self.services_by_job = Index(services, _job_key)
        self.pods_by_node = Index(pods, lambda pod: pod["spec"].get("nodeName"))
        pods.listeners.append(self._index_pod)
        services.listeners.append(self.services_by_job.update)

    def add_created_pod(self, pod: KubeObject) -> None:
        """Add a pod to cache and indexes without notifying other listeners. A newer version in the cache is kept."""
        self.pods.put(pod, notify=False)
        self._index_pod(pod)

    def _index_pod(self, pod: KubeObject) -> None:
        self.pods_by_job.update(pod)
        self.pods_by_node.update(pod)


class Caches:
    """Caches that the controller of one kind of job reads."""

    def __init__(self, jobs: Reflector, owned: OwnedObjects) -> None:
        self.jobs = jobs
        self.owned = owned
        self.nodes: Reflector | None = None  # None: the operator may not list nodes
        self.pod_groups: Reflector | None = None  # None: without a gang scheduler


def _job_key(obj: KubeObject) -> ObjectKey:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), (metadata.get("labels") or {}).get(JOB_LABEL, "")


def _scheduler_role(job: Job) -> ReplicaSpec:
    """Return the role in whose first pod the scheduler runs: Scheduler or, if the job has none, its first worker role."""
    return next(iter(job.roles_with_duty(ReplicaDuty.SCHEDULER) or job.roles_with_duty(ReplicaDuty.WORKER)))


class Controller:
    """Controller of the jobs of one kind. `convert` turns an object of that kind into an MSJob.

    `gang_scheduler` is the schedulerName of pods; "": no gang scheduling. If `secret_key` is b"", no request is sent to the
    schedulers of jobs. `clock` returns seconds since 1970.
    """

    def __init__(
        self,
        api: Api,
        kind: ResourceKind,
        caches: Caches,
        metrics: OperatorMetrics,
        *,
        convert: Callable[[KubeObject], KubeObject] = lambda obj: obj,
        gang_scheduler: str = "",
        secret_key: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.queue: WorkQueue[ObjectKey] = WorkQueue()
        self.scheduler_clients = SchedulerClients(self.queue.add)
        self._secret_key = secret_key
        self.caches_filled = asyncio.Event()  # no job is reconciled before this is set
        self._api = api
        self.kind = kind
        self._caches = caches
        self._metrics = metrics
        self._convert = convert
        self._gang_scheduler = gang_scheduler
        self._clock = clock
        self.events = EventRecorder(api, self.queue, clock)

    @property
    def jobs(self) -> Reflector:
        return self._caches.jobs

    async def run(self, workers: int) -> None:
        """Wait for `caches_filled`; then reconcile the queued jobs until cancelled, at most `workers` at the same time.

        Also write the recorded events and poll the schedulers of jobs.
        """
        await self.caches_filled.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.events.run())
            group.create_task(self.scheduler_clients.run())
            for _ in range(workers):
                group.create_task(self._run_worker())

    async def _run_worker(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                plan = await self.reconcile(key)
                if plan is not None and any(isinstance(action, CreateService) for action in plan.actions):
                    await self.reconcile(key)  # the service has its address now, so pods can be created
                self.queue.forget(key)
            except ApiError as error:
                delay = self.queue.retry(key)
                level = log.debug if error.code == CONFLICT else log.warning
                level("%s/%s: reconcile failed: %s; retrying in %.2f s", *key, error, delay)
            except Exception:
                self._metrics.errors.inc()
                log.exception("%s/%s: reconcile failed with a defect; retrying in %.2f s", *key, self.queue.retry(key))
            finally:
                self.queue.done(key)

    async def reconcile(self, key: ObjectKey) -> ReconcilePlan | None:
        """Compute the plan of a job, write its status, carry out its actions, and queue the next reconcile if one is due.

        Return the plan. If the job is not in the cache, only stop polling its scheduler, and return None. Raise `ApiError` if a
        request to the API server fails, unless its error shows that an action is done already.
        """
        obj = self._caches.jobs.get(key)
        if obj is None:
            self.queue.drop(key)
            self.scheduler_clients.set_endpoint(key, None)
            return None
        began = time.perf_counter()
        obj = {"apiVersion": self.kind.root.removeprefix("apis/"), "kind": self.kind.name, **obj}
        job = self._convert(obj)
        plan = plan_job(job, self._observe(key, obj), self._clock())
        if plan.status is not None:
            written = await self._write_status(obj, plan.status)
            self._metrics.count_status_change(obj.get("status") or {}, plan.status)
            obj = {**obj, **written}
        self._update_polling(key, job, plan)
        await self._apply_plan(obj, job, plan)
        if any(isinstance(action, CreatePod) for action in plan.actions):
            self.queue.add_after(key, RECOUNT_DELAY_S)
        if plan.requeue_after is not None:
            self.queue.add_after(key, plan.requeue_after)
        if plan.actions or plan.status is not None:
            log.info("%s/%s: %s", *key, plan.reason)
        self._metrics.reconcile_seconds.observe(time.perf_counter() - began)
        return plan

    def _observe(self, key: ObjectKey, job: KubeObject) -> Observed:
        caches = self._caches
        return Observed(
            pods=caches.owned.pods_by_job.get(key),
            services=caches.owned.services_by_job.get(key),
            nodes={node["metadata"]["name"]: node for node in caches.nodes} if caches.nodes is not None else None,
            uses_pod_groups=bool(self._gang_scheduler),
            pod_group=caches.pod_groups.get(key) if caches.pod_groups is not None else None,
            scheduler_status=self.scheduler_clients.status_of(key),
        )

    def _update_polling(self, key: ObjectKey, obj: KubeObject, plan: ReconcilePlan) -> None:
        status = plan.status if plan.status is not None else obj.get("status") or {}
        is_urgent = bool(status.get("scaling") or status.get("replacing"))
        self.scheduler_clients.set_endpoint(key, self._scheduler_endpoint(key, obj, status), is_urgent=is_urgent)

    def _scheduler_endpoint(self, key: ObjectKey, obj: KubeObject, status: Mapping[str, Any]) -> SchedulerEndpoint | None:
        if not self._secret_key or status.get("state") not in ("Running", "Restarting"):
            return None
        try:
            job = parse_job(obj)
        except InvalidJob:
            return None
        first = _scheduler_role(job)
        pod = self._caches.owned.pods.get((job.namespace, pod_name(job.name, first.key, 0)))
        address, port = ((pod or {}).get("status") or {}).get("podIP"), pod_builder.manage_port(job, first)
        if (
            pod is None
            or not address
            or not port
            or pod["status"].get("phase") != "Running"
            or controller_uid_of(pod) != job.uid
        ):
            return None
        return SchedulerEndpoint(str(address), port, derive_token(self._secret_key, job.uid))

    async def _write_status(self, obj: KubeObject, status: Mapping[str, Any]) -> KubeObject:
        body = {**obj, "status": status}
        namespace = obj["metadata"]["namespace"]
        response = await self._api.replace(self.kind, namespace, body, "status", brief=True)
        written = {**body, "metadata": response["metadata"]}
        self._caches.jobs.put(written)
        return written

    # -- actions -----------------------------------------------------------------------------------------------------

    async def _apply_plan(self, obj: KubeObject, job: KubeObject, plan: ReconcilePlan) -> None:
        """Record the events of a plan; then carry out its other actions in three batches.

        The second batch creates, deletes and terminates pods, the third deletes the job; the first has all other actions. If an
        action fails, complete its batch and raise the first error.
        """
        for action in plan.actions:
            if isinstance(action, RecordEvent):
                self.events.record_event(obj, action)
        try:
            spec = parse_job(job)
        except InvalidJob:
            return
        other = [a for a in plan.actions if not isinstance(a, RecordEvent | CreatePod | DeletePod | TerminatePod | DeleteJob)]
        pods = [a for a in plan.actions if isinstance(a, CreatePod | DeletePod | TerminatePod)]
        deletion = [a for a in plan.actions if isinstance(a, DeleteJob)]
        slots = asyncio.Semaphore(CONCURRENT_ACTIONS_MAX)

        async def apply(action: Action) -> None:
            async with slots:
                await self._apply_action(obj, spec, action)

        for batch in (other, pods, deletion):
            results = await asyncio.gather(*(apply(action) for action in batch), return_exceptions=True)
            for action, result in zip(batch, results, strict=True):
                if isinstance(result, ApiError) and not result.is_transient and result.code != CONFLICT:
                    self.events.record_event(obj, RecordEvent("Warning", "FailedAction", f"{type(action).__name__}: {result}"))
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def _apply_action(self, obj: KubeObject, job: Job, action: Action) -> None:
        namespace, owner = job.namespace, pod_builder.owner_reference(obj)
        api = self._api
        if isinstance(action, CreatePod):
            body = pod_builder.make_pod(
                job, action, owner, address=self._scheduler_address(job), gang_scheduler=self._gang_scheduler
            )
            await self._create_or_get(POD, self._caches.owned.add_created_pod, body, job, brief=True)
        elif isinstance(action, CreateService):
            await self._create_or_get(
                SERVICE, self._caches.owned.services.put, pod_builder.make_service(job, action.role, owner), job
            )
        elif isinstance(action, CreateSecret):
            secret = pod_builder.make_secret(job, secrets.token_hex(24), derive_token(self._secret_key, job.uid), owner)
            await self._ignore_status_codes(api.create(SECRET, namespace, secret, brief=True), CONFLICT)
        elif isinstance(action, CreatePodGroup):
            await self._ignore_status_codes(
                api.create(POD_GROUP, namespace, pod_builder.make_pod_group(job, action, owner)), CONFLICT
            )
        elif isinstance(action, DeletePod):
            deletion = api.delete(POD, namespace, action.name, uid=action.uid, grace=action.grace_period_s)
            await self._ignore_status_codes(deletion, NOT_FOUND, CONFLICT)  # CONFLICT: a newer pod has the name
        elif isinstance(action, TerminatePod):
            await self._ignore_status_codes(
                api.patch(POD, namespace, action.name, {"spec": {"activeDeadlineSeconds": 1}}), NOT_FOUND
            )
        elif isinstance(action, DeleteService):
            await self._ignore_status_codes(api.delete(SERVICE, namespace, action.name), NOT_FOUND)
        elif isinstance(action, DeletePodGroup):
            await self._ignore_status_codes(api.delete(POD_GROUP, namespace, job.name), NOT_FOUND)
        elif isinstance(action, AdoptOrphan):
            await self._adopt_orphan(obj, action)
        elif isinstance(action, SetLabel):
            patch = {"metadata": {"labels": {action.key: action.value}}}
            self._caches.jobs.put(await api.patch(self.kind, namespace, job.name, patch))
        elif isinstance(action, ReleaseWorkers | AnnounceWorkers):
            await self._resize(obj, job, action)
        elif isinstance(action, ReportPodGone):
            await self._report_pod_gone(job, action)
        elif isinstance(action, DeleteJob):
            await self._ignore_status_codes(api.delete(self.kind, namespace, job.name, uid=job.uid), NOT_FOUND)

    async def _resize(self, obj: KubeObject, job: Job, action: ReleaseWorkers | AnnounceWorkers) -> None:
        key = (job.namespace, job.name)
        try:
            if isinstance(action, ReleaseWorkers):
                await self.scheduler_clients.release_workers(key, action.node_ids)
            else:
                await self.scheduler_clients.announce_workers(key, action.additional_workers)
        except PeerError as error:  # the plan repeats the request while it is needed
            self.events.record_event(obj, RecordEvent("Warning", "ScaleRefused", str(error)))

    async def _report_pod_gone(self, job: Job, action: ReportPodGone) -> None:
        try:
            await self.scheduler_clients.report_pod_gone(
                (job.namespace, job.name), action.uid, f"the pod {action.name} is gone"
            )
        except PeerError as error:  # without the report the scheduler detects it by its node timeout
            log.info("%s/%s: cannot report the pod %s as gone: %s", job.namespace, job.name, action.name, error)

    async def _ignore_status_codes(self, request: Awaitable[Any], *codes: int) -> None:
        try:
            await request
        except ApiError as error:
            if error.code not in codes:
                raise

    async def _create_or_get(
        self, kind: ResourceKind, add_to_cache: Callable[[KubeObject], None], body: KubeObject, job: Job, *, brief: bool = False
    ) -> None:
        """Create an object, or get it if it exists because an earlier response was lost; call `add_to_cache` with it.

        Raise `ApiError` 409 if it exists and the job is not its controller. With `brief` a created object is cached as `body`
        with the server's metadata, until the watch delivers the complete object.
        """
        try:
            created = await self._api.create(kind, job.namespace, body, brief=brief)
            created = {**body, "metadata": created["metadata"]} if brief else created
        except ApiError as error:
            if error.code != CONFLICT:
                raise
            created = await self._api.get(kind, job.namespace, body["metadata"]["name"])
            if controller_uid_of(created) != job.uid:
                raise ApiError(CONFLICT, "NameTaken", f"the {kind.name} {body['metadata']['name']} has another owner") from None
        add_to_cache(created)

    def _scheduler_address(self, job: Job) -> str:
        service = self._caches.owned.services.get((job.namespace, pod_name(job.name, _scheduler_role(job).key, 0)))
        return str((service or {}).get("spec", {}).get("clusterIP") or "")

    async def _adopt_orphan(self, obj: KubeObject, action: AdoptOrphan) -> None:
        """Make the job the owner of an object, unless the API server's copy of the job has another UID or is being deleted."""
        metadata = obj["metadata"]
        fresh = await self._api.get(self.kind, metadata["namespace"], metadata["name"])
        if fresh["metadata"]["uid"] != metadata["uid"] or fresh["metadata"].get("deletionTimestamp"):
            return
        kind, cache = (POD, self._caches.owned.pods) if action.kind == "Pod" else (SERVICE, self._caches.owned.services)
        patch = {"metadata": {"uid": action.uid, "ownerReferences": [pod_builder.owner_reference(obj)]}}
        cache.put(await self._api.patch(kind, metadata["namespace"], action.name, patch))
