"""MSJobs, pods and nodes as the API server sends them, as plain dicts; and a world in which a plan is carried out."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import msgspec

from covey.core.jobs import Observed, ReconcilePlan, plan_job
from covey.core.jobs.actions import AdoptOrphan, CreatePod, CreateService, DeletePod, DeleteService, SetLabel, TerminatePod
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.core.jobs.spec import pod_name
from covey.core.jobs.timestamps import format_timestamp

NOW = 1_800_000_000.0
UID = "job-uid"
Thing = dict[str, Any]


def job(
    *,
    roles: dict[str, int] | None = None,
    restart: str = "Never",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    status: Thing | None = None,
    **spec: Any,
) -> Thing:
    """A job named train: by default a Scheduler and two workers."""
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


def pod(name: str, *, phase: str = "Running", uid: str = "", owner: str = UID, created: float = NOW, **status: Any) -> Thing:
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


def service(name: str, *, owner: str = UID) -> Thing:
    references = [{"uid": owner, "controller": True}] if owner else []
    return {"metadata": {"name": name, "uid": f"{name}-s", "ownerReferences": references}, "spec": {"clusterIP": "10.0.0.7"}}


def node(name: str, *, ready: str = "True", since: float = NOW) -> Thing:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": format_timestamp(since)}
    return {"metadata": {"name": name}, "status": {"conditions": [condition]}}


def container(state: str, what: Thing, *, phase: str = "Pending", restarts: int = 0) -> Thing:
    """A pod's status with the state of its container."""
    return {"phase": phase, "containerStatuses": [{"name": "mindspore", "restartCount": restarts, "state": {state: what}}]}


class World:
    """A job and what there is of it. `look` plans and carries out what is not about pods; `carry_out` also that."""

    def __init__(self, job: Thing) -> None:
        self.job = job
        self.pods: dict[str, Thing] = {}
        self.services: dict[str, Thing] = {}
        self.nodes: dict[str, Thing] | None = None
        self.live: SchedulerStatus | None = None
        self.now = NOW
        self._lives = itertools.count(2)

    @property
    def status(self) -> Thing:
        found: Thing = self.job.get("status") or {}
        return found

    def conditions(self) -> set[str]:
        return {c["type"] for c in self.status.get("conditions", []) if c["status"] == "True"}

    def start(self, phase: str = "Running") -> World:
        """Until all pods are there, in that phase."""
        for _ in range(2):
            self.carry_out(self.look())
        for name in self.pods:
            self.pods[name]["status"]["phase"] = phase
        self.look()
        return self

    def look(self) -> ReconcilePlan:
        """Plan, and carry out all but what is about pods. The plan's status is the job's afterwards, changed or not."""
        made = self._plan()
        if made.status is not None:
            self.job["status"] = copy.deepcopy(made.status)
        for action in made.actions:
            if isinstance(action, CreateService):
                name = pod_name("train", action.role, 0)
                self.services[name] = service(name)
            elif isinstance(action, DeleteService):
                self.services.pop(action.name, None)
            elif isinstance(action, SetLabel):
                self.job["metadata"].setdefault("labels", {})[action.key] = action.value
        return made if made.status is not None else msgspec.structs.replace(made, status=self.status)

    def _plan(self) -> ReconcilePlan:
        pods, services = list(self.pods.values()), list(self.services.values())
        observed = Observed(pods=pods, services=services, nodes=self.nodes, scheduler_status=self.live)
        return plan_job(copy.deepcopy(self.job), observed, self.now)

    def crash_after(self, effects: int) -> None:
        """Plan, and carry out only the first effects: status, then one action after the other."""
        made = self._plan()
        if effects and made.status is not None:
            self.job["status"] = copy.deepcopy(made.status)
        self.carry_out(msgspec.structs.replace(made, actions=made.actions[: max(0, effects - 1)]))

    def carry_out(self, made: ReconcilePlan) -> None:
        for action in made.actions:
            if isinstance(action, CreatePod):
                name = pod_name("train", action.role, action.index)
                uid = f"{name}-{next(self._lives)}"
                self.pods.setdefault(name, pod(name, uid=uid, phase="Pending", created=self.now))
            elif isinstance(action, DeletePod) and self.pods.get(action.name, {}).get("metadata", {}).get("uid") == action.uid:
                del self.pods[action.name]
            elif isinstance(action, TerminatePod) and action.name in self.pods:
                self.pods[action.name]["spec"]["activeDeadlineSeconds"] = 1
            elif isinstance(action, AdoptOrphan):
                things = self.pods if action.kind == "Pod" else self.services
                things[action.name]["metadata"]["ownerReferences"] = [{"uid": UID, "controller": True}]

    def runs(self, name: str, restarts: int = 0) -> None:
        if name not in self.pods:
            self.pods[name] = pod(name, uid=f"{name}-{next(self._lives)}", created=self.now)
        self.pods[name]["status"] = container("running", {}, phase="Running", restarts=restarts)

    def ends(self, name: str, code: int) -> None:
        ended = {"exitCode": code}
        self.pods[name]["status"] = container("terminated", ended, phase="Failed" if code else "Succeeded")
