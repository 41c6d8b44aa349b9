"""MSJobs, pods and nodes as plain dicts, like those of the API server, and a fake cluster in which plans are applied."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import msgspec

from covey.core.msjob import Observed, ReconcilePlan, plan_job
from covey.core.msjob.actions import AdoptOrphan, CreatePod, CreateService, DeletePod, DeleteService, SetLabel, TerminatePod
from covey.core.msjob.scheduler_status import SchedulerStatus
from covey.core.msjob.spec import pod_name
from covey.core.msjob.timestamps import format_timestamp

NOW = 1_800_000_000.0
UID = "job-uid"
KubeObject = dict[str, Any]


def job(
    *,
    roles: dict[str, int] | None = None,
    restart: str = "Never",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    status: KubeObject | None = None,
    **spec: Any,
) -> KubeObject:
    """Return a job named train; by default with a Scheduler and two workers."""
    template = {"spec": {"containers": [{"name": "mindspore", "image": "some", "command": ["train"]}]}}
    replicas = {
        key: {"replicas": number, "restartPolicy": restart, "template": copy.deepcopy(template)}
        for key, number in (roles or {"Scheduler": 1, "Worker": 2}).items()
    }
    return {
        "apiVersion": "mindspore.gitee.com/v1",
        "kind": "MSJob",
        "metadata": {
            "name": "train",
            "namespace": "default",
            "uid": UID,
            "creationTimestamp": format_timestamp(NOW),
            "labels": dict(labels or {}),
            "annotations": dict(annotations or {}),
        },
        "spec": {"msReplicaSpecs": replicas, **spec},
        **({"status": status} if status else {}),
    }


def pod(
    name: str, *, phase: str = "Running", uid: str = "", owner: str = UID, created: float = NOW, **status: Any
) -> KubeObject:
    _, kind, index = name.rsplit("-", 2)
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or f"{name}-1",
            "creationTimestamp": format_timestamp(created),
            "labels": {
                "training.kubeflow.org/job-name": "train",
                "training.kubeflow.org/replica-type": kind,
                "training.kubeflow.org/replica-index": index,
            },
            "ownerReferences": [{"uid": owner, "controller": True}] if owner else [],
        },
        "spec": {},
        "status": {"phase": phase, **status},
    }


def service(name: str, *, owner: str = UID) -> KubeObject:
    references = [{"uid": owner, "controller": True}] if owner else []
    return {"metadata": {"name": name, "uid": f"{name}-s", "ownerReferences": references}, "spec": {"clusterIP": "10.0.0.7"}}


def node(name: str, *, ready: str = "True", since: float = NOW) -> KubeObject:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": format_timestamp(since)}
    return {"metadata": {"name": name}, "status": {"conditions": [condition]}}


def container(state: str, details: KubeObject, *, phase: str = "Pending", restarts: int = 0) -> KubeObject:
    """Return the status of a pod whose main container has this state."""
    return {"phase": phase, "containerStatuses": [{"name": "mindspore", "restartCount": restarts, "state": {state: details}}]}


class FakeCluster:
    """A job and its objects. `reconcile` plans and applies all but the actions on pods; `apply` applies those."""

    def __init__(self, job: KubeObject) -> None:
        self.job = job
        self.pods: dict[str, KubeObject] = {}
        self.services: dict[str, KubeObject] = {}
        self.nodes: dict[str, KubeObject] | None = None
        self.scheduler_status: SchedulerStatus | None = None
        self.now = NOW
        self._uid_numbers = itertools.count(2)

    @property
    def status(self) -> KubeObject:
        status: KubeObject = self.job.get("status") or {}
        return status

    def conditions(self) -> set[str]:
        return {c["type"] for c in self.status.get("conditions", []) if c["status"] == "True"}

    def start(self, phase: str = "Running") -> FakeCluster:
        """Create all pods, in that phase."""
        for _ in range(2):
            self.apply(self.reconcile())
        for name in self.pods:
            self.pods[name]["status"]["phase"] = phase
        self.reconcile()
        return self

    def reconcile(self) -> ReconcilePlan:
        """Compute a plan and apply all but its actions on pods. The returned plan has the job's status, changed or not."""
        plan = self._plan()
        if plan.status is not None:
            self.job["status"] = copy.deepcopy(plan.status)
        for action in plan.actions:
            if isinstance(action, CreateService):
                name = pod_name("train", action.role, 0)
                self.services[name] = service(name)
            elif isinstance(action, DeleteService):
                self.services.pop(action.name, None)
            elif isinstance(action, SetLabel):
                self.job["metadata"].setdefault("labels", {})[action.key] = action.value
        return plan if plan.status is not None else msgspec.structs.replace(plan, status=self.status)

    def _plan(self) -> ReconcilePlan:
        pods, services = list(self.pods.values()), list(self.services.values())
        observed = Observed(pods=pods, services=services, nodes=self.nodes, scheduler_status=self.scheduler_status)
        return plan_job(copy.deepcopy(self.job), observed, self.now)

    def crash_after(self, effects: int) -> None:
        """Compute a plan and apply only the first `effects` effects: the status, then the actions in order."""
        plan = self._plan()
        if effects and plan.status is not None:
            self.job["status"] = copy.deepcopy(plan.status)
        self.apply(msgspec.structs.replace(plan, actions=plan.actions[: max(0, effects - 1)]))

    def apply(self, plan: ReconcilePlan) -> None:
        for action in plan.actions:
            if isinstance(action, CreatePod):
                name = pod_name("train", action.role, action.index)
                uid = f"{name}-{next(self._uid_numbers)}"
                self.pods.setdefault(name, pod(name, uid=uid, phase="Pending", created=self.now))
            elif isinstance(action, DeletePod) and self.pods.get(action.name, {}).get("metadata", {}).get("uid") == action.uid:
                del self.pods[action.name]
            elif isinstance(action, TerminatePod) and action.name in self.pods:
                self.pods[action.name]["spec"]["activeDeadlineSeconds"] = 1
            elif isinstance(action, AdoptOrphan):
                objects = self.pods if action.kind == "Pod" else self.services
                objects[action.name]["metadata"]["ownerReferences"] = [{"uid": UID, "controller": True}]

    def set_running(self, name: str, restarts: int = 0) -> None:
        if name not in self.pods:
            self.pods[name] = pod(name, uid=f"{name}-{next(self._uid_numbers)}", created=self.now)
        self.pods[name]["status"] = container("running", {}, phase="Running", restarts=restarts)

    def set_terminated(self, name: str, code: int) -> None:
        ended = {"exitCode": code}
        self.pods[name]["status"] = container("terminated", ended, phase="Failed" if code else "Succeeded")
