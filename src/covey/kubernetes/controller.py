"""One job at a time: read what is, ask for a plan, carry it out.

Nothing is decided here. Whatever goes wrong on the way (a conflict, a lost reply, a server that is away) ends this turn, and
the name comes up again, later each time.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from covey.core.jobs import Observed, ReconcilePlan, parse_job, plan
from covey.core.jobs.actions import (
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
from covey.core.jobs.pod_state import JOB_LABEL, controller_uid_of
from covey.core.jobs.spec import InvalidJob, Job, ReplicaDuty, ReplicaSpec, pod_name
from covey.errors import PeerError
from covey.kubernetes import pod_builder
from covey.kubernetes.api_client import CONFLICT, MISSING, POD, POD_GROUP, SECRET, SERVICE, Api, ApiError, Kind, Thing
from covey.kubernetes.event_recorder import Events
from covey.kubernetes.operator_metrics import Metrics
from covey.kubernetes.reflector import Index, Key, Reflector
from covey.kubernetes.scheduler_client import Clusters, Place, token_of
from covey.kubernetes.work_queue import Queue
from covey.log import log

AT_ONCE = 16  # actions of one kind of one job
SHOW_S = 1.0  # how soon pods that were just created are counted, if nothing else happens to their job


class Owned:
    """The pods and services of jobs of every kind, watched once."""

    def __init__(self, pods: Reflector, services: Reflector) -> None:
        self.pods = pods
        self.services = services
        self.pods_of = Index(pods, _job_of)
        self.services_of = Index(services, _job_of)
        self.pods_on = Index(pods, lambda pod: pod["spec"].get("nodeName"))
        pods.listeners.append(self._note)
        services.listeners.append(self.services_of.note)

    def made(self, pod: Thing) -> None:
        """A pod of our own making: nobody need be woken for it."""
        self.pods.put(pod, tell=False)
        self._note(pod)

    def _note(self, pod: Thing) -> None:
        self.pods_of.note(pod)
        self.pods_on.note(pod)


class Caches:
    """What the operator sees of the world for one kind of job. `nodes` and `groups` None: not looked at."""

    def __init__(self, jobs: Reflector, owned: Owned) -> None:
        self.jobs = jobs
        self.owned = owned
        self.nodes: Reflector | None = None
        self.groups: Reflector | None = None


def _job_of(thing: Thing) -> Key:
    metadata = thing["metadata"]
    return metadata.get("namespace", ""), (metadata.get("labels") or {}).get(JOB_LABEL, "")


def _first(job: Job) -> ReplicaSpec:
    """The role whose first pod the others call."""
    return next(iter(job.roles_with_duty(ReplicaDuty.SCHEDULER) or job.roles_with_duty(ReplicaDuty.WORKER)))


class Controller:
    """Jobs of one kind. `convert` turns an object of that kind into an MSJob."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        caches: Caches,
        metrics: Metrics,
        *,
        convert: Callable[[Thing], Thing] = lambda thing: thing,
        gang_scheduler: str = "",
        secret_key: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.queue: Queue[Key] = Queue()
        self.clusters = Clusters(self.queue.add)
        self._key = secret_key
        self.go = asyncio.Event()  # the caches are filled
        self._api = api
        self.kind = kind
        self._caches = caches
        self._metrics = metrics
        self._convert = convert
        self._gang = gang_scheduler
        self._clock = clock
        self.events = Events(api, self.queue, clock)

    @property
    def jobs(self) -> Reflector:
        return self._caches.jobs

    async def run(self, workers: int) -> None:
        """For ever, with so many jobs at once."""
        await self.go.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.events.run())
            group.create_task(self.clusters.run())
            for _ in range(workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                made = await self.reconcile(key)
                if made is not None and any(isinstance(action, CreateService) for action in made.actions):
                    await self.reconcile(key)  # pods waited for its address: they need not wait for a turn as well
                self.queue.forget(key)
            except ApiError as error:
                delay = self.queue.retry(key)
                level = log.debug if error.code == CONFLICT else log.warning
                level("%s/%s: %s; again in %.2f s", *key, error, delay)
            except Exception:
                self._metrics.errors.inc()
                log.exception("%s/%s: the turn broke off; again in %.2f s", *key, self.queue.retry(key))
            finally:
                self.queue.done(key)

    async def reconcile(self, key: Key) -> ReconcilePlan | None:
        """One turn. None where there is no such job."""
        thing = self._caches.jobs.get(key)
        if thing is None:
            self.queue.drop(key)
            self.clusters.follow(key, None)
            return None
        began = time.perf_counter()
        thing = {"apiVersion": self.kind.root.removeprefix("apis/"), "kind": self.kind.name, **thing}
        job = self._convert(thing)
        made = plan(job, self._observe(key, thing), self._clock())
        if made.status is not None:
            written = await self._write_status(thing, made.status)
            self._metrics.note(thing.get("status") or {}, made.status)
            thing = {**thing, **written}
        self._follow(key, job, made)
        await self._carry_out(thing, job, made)
        if any(isinstance(action, CreatePod) for action in made.actions):
            self.queue.add_after(key, SHOW_S)
        if made.requeue_after is not None:
            self.queue.add_after(key, made.requeue_after)
        if made.actions or made.status is not None:
            log.info("%s/%s: %s", *key, made.reason)
        self._metrics.turns.observe(time.perf_counter() - began)
        return made

    def _observe(self, key: Key, job: Thing) -> Observed:
        caches = self._caches
        return Observed(
            pods=caches.owned.pods_of.of(key),
            services=caches.owned.services_of.of(key),
            nodes={node["metadata"]["name"]: node for node in caches.nodes} if caches.nodes is not None else None,
            uses_pod_groups=bool(self._gang),
            pod_group=caches.groups.get(key) if caches.groups is not None else None,
            scheduler_status=self.clusters.live(key),
        )

    def _follow(self, key: Key, thing: Thing, made: ReconcilePlan) -> None:
        """Look into the job's cluster while the pod of its scheduler runs."""
        status = made.status if made.status is not None else thing.get("status") or {}
        hurry = bool(status.get("scaling") or status.get("replacing"))
        self.clusters.follow(key, self._scheduler_of(key, thing, status), hurry=hurry)

    def _scheduler_of(self, key: Key, thing: Thing, status: Mapping[str, Any]) -> Place | None:
        if not self._key or status.get("state") not in ("Running", "Restarting"):
            return None
        try:
            job = parse_job(thing)
        except InvalidJob:
            return None
        first = _first(job)
        pod = self._caches.owned.pods.get((job.namespace, pod_name(job.name, first.key, 0)))
        address, port = ((pod or {}).get("status") or {}).get("podIP"), pod_builder.manage_port_of(job, first)
        if (
            pod is None
            or not address
            or not port
            or pod["status"].get("phase") != "Running"
            or controller_uid_of(pod) != job.uid
        ):
            return None
        return Place(str(address), port, token_of(self._key, job.uid))

    async def _write_status(self, thing: Thing, status: Mapping[str, Any]) -> Thing:
        body = {**thing, "status": status}
        namespace = thing["metadata"]["namespace"]
        answer = await self._api.replace(self.kind, namespace, body, "status", brief=True)
        written = {**body, "metadata": answer["metadata"]}
        self._caches.jobs.put(written)
        return written

    # -- carrying out ------------------------------------------------------------------------------------------------

    async def _carry_out(self, thing: Thing, job: Thing, made: ReconcilePlan) -> None:
        """First what pods need, then pods, then the job itself. All are tried; the first that failed is told."""
        for action in made.actions:
            if isinstance(action, RecordEvent):
                self.events.tell(thing, action)
        try:
            spec = parse_job(job)
        except InvalidJob:
            return
        first = [a for a in made.actions if not isinstance(a, RecordEvent | CreatePod | DeletePod | TerminatePod | DeleteJob)]
        then = [a for a in made.actions if isinstance(a, CreatePod | DeletePod | TerminatePod)]
        last = [a for a in made.actions if isinstance(a, DeleteJob)]
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(action: Action) -> None:
            async with turn:
                await self._act(thing, spec, action)

        for batch in (first, then, last):
            results = await asyncio.gather(*(one(action) for action in batch), return_exceptions=True)
            for action, result in zip(batch, results, strict=True):
                if isinstance(result, ApiError) and not result.transient and result.code != CONFLICT:
                    self.events.tell(thing, RecordEvent("Warning", "FailedAction", f"{type(action).__name__}: {result}"))
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def _act(self, thing: Thing, job: Job, action: Action) -> None:
        namespace, owner = job.namespace, pod_builder.owner_of(thing)
        api = self._api
        if isinstance(action, CreatePod):
            body = pod_builder.pod(job, action, owner, address=self._address(job), gang_scheduler=self._gang)
            await self._create(POD, self._caches.owned.made, body, job, brief=True)
        elif isinstance(action, CreateService):
            await self._create(SERVICE, self._caches.owned.services.put, pod_builder.service(job, action.role, owner), job)
        elif isinstance(action, CreateSecret):
            secret = pod_builder.secret(job, secrets.token_hex(24), token_of(self._key, job.uid), owner)
            await self._unless(api.create(SECRET, namespace, secret, brief=True), CONFLICT)
        elif isinstance(action, CreatePodGroup):
            await self._unless(api.create(POD_GROUP, namespace, pod_builder.gang(job, action, owner)), CONFLICT)
        elif isinstance(action, DeletePod):
            asked = api.delete(POD, namespace, action.name, uid=action.uid, grace=action.grace_period_s)
            await self._unless(asked, MISSING, CONFLICT)  # another pod of that name is not meant: as good as gone
        elif isinstance(action, TerminatePod):
            await self._unless(api.patch(POD, namespace, action.name, {"spec": {"activeDeadlineSeconds": 1}}), MISSING)
        elif isinstance(action, DeleteService):
            await self._unless(api.delete(SERVICE, namespace, action.name), MISSING)
        elif isinstance(action, DeletePodGroup):
            await self._unless(api.delete(POD_GROUP, namespace, job.name), MISSING)
        elif isinstance(action, AdoptOrphan):
            await self._adopt(thing, action)
        elif isinstance(action, SetLabel):
            patch = {"metadata": {"labels": {action.key: action.value}}}
            self._caches.jobs.put(await api.patch(self.kind, namespace, job.name, patch))
        elif isinstance(action, ReleaseWorkers | AnnounceWorkers):
            await self._resize(thing, job, action)
        elif isinstance(action, ReportPodGone):
            await self._say_gone(job, action)
        elif isinstance(action, DeleteJob):
            await self._unless(api.delete(self.kind, namespace, job.name, uid=job.uid), MISSING)

    async def _resize(self, thing: Thing, job: Job, action: ReleaseWorkers | AnnounceWorkers) -> None:
        key = (job.namespace, job.name)
        try:
            if isinstance(action, ReleaseWorkers):
                await self.clusters.let_go(key, action.node_ids)
            else:
                await self.clusters.expect(key, action.additional_workers)
        except PeerError as error:  # it is asked again, as long as it is wanted
            self.events.tell(thing, RecordEvent("Warning", "ScaleRefused", str(error)))

    async def _say_gone(self, job: Job, action: ReportPodGone) -> None:
        try:
            await self.clusters.gone((job.namespace, job.name), action.uid, f"the pod {action.name} is over")
        except PeerError as error:  # it finds out by itself, later
            log.info("%s/%s: its scheduler was not told that %s is over: %s", job.namespace, job.name, action.name, error)

    async def _unless(self, asked: Awaitable[Any], *codes: int) -> None:
        """What is already so need not be made so."""
        try:
            await asked
        except ApiError as error:
            if error.code not in codes:
                raise

    async def _create(self, kind: Kind, know: Callable[[Thing], None], body: Thing, job: Job, *, brief: bool = False) -> None:
        """Create; what is there already, because the reply to an earlier try was lost, is looked at.

        `brief`: of what the server adds, its metadata is all that is known until the watch tells the rest.
        """
        try:
            made = await self._api.create(kind, job.namespace, body, brief=brief)
            made = {**body, "metadata": made["metadata"]} if brief else made
        except ApiError as error:
            if error.code != CONFLICT:
                raise
            made = await self._api.get(kind, job.namespace, body["metadata"]["name"])
            if controller_uid_of(made) != job.uid:
                raise ApiError(
                    CONFLICT, "NameTaken", f"the {kind.name} {body['metadata']['name']} is another owner's"
                ) from None
        know(made)

    def _address(self, job: Job) -> str:
        service = self._caches.owned.services.get((job.namespace, pod_name(job.name, _first(job).key, 0)))
        return str((service or {}).get("spec", {}).get("clusterIP") or "")

    async def _adopt(self, thing: Thing, action: AdoptOrphan) -> None:
        """Only after a fresh look at the job: the cached one may be gone, with another in its place."""
        metadata = thing["metadata"]
        fresh = await self._api.get(self.kind, metadata["namespace"], metadata["name"])
        if fresh["metadata"]["uid"] != metadata["uid"] or fresh["metadata"].get("deletionTimestamp"):
            return
        kind, cache = (POD, self._caches.owned.pods) if action.kind == "Pod" else (SERVICE, self._caches.owned.services)
        patch = {"metadata": {"uid": action.uid, "ownerReferences": [pod_builder.owner_of(thing)]}}
        cache.put(await self._api.patch(kind, metadata["namespace"], action.name, patch))
