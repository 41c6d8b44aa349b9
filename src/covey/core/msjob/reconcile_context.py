"""Input of a reconcile pass: the job, its observed objects and the time. A pass changes none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from covey.core.msjob.pod_state import PodState, controller_uid_of
from covey.core.msjob.scheduler_status import SchedulerStatus
from covey.core.msjob.spec import Job, ReplicaDuty, ReplicaSpec, pod_name


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Observed objects of a job, and all nodes of the Kubernetes cluster."""

    pods: Sequence[Mapping[str, Any]] = ()  # with the job's labels, whatever their owner
    services: Sequence[Mapping[str, Any]] = ()  # as `pods`
    nodes: Mapping[str, Mapping[str, Any]] | None = None  # by name; None: the operator may not list nodes
    uses_pod_groups: bool = False  # pods are scheduled together, by a PodGroup
    pod_group: Mapping[str, Any] | None = None  # with the job's name; None: there is none
    scheduler_status: SchedulerStatus | None = None  # None: unknown, for example because no covey scheduler answers


class ReconcileContext(msgspec.Struct, frozen=True, kw_only=True):
    """The job, its observed objects, and the time.

    Methods that need the number of pods of each role take it as `world`, because a pass can change it in the status.
    """

    job: Job
    labels: Mapping[str, str]  # of the job
    observed: Observed
    now: float  # seconds since 1970
    pods: Mapping[str, PodState]  # by name: pods that the job owns, and orphans with its labels
    foreign_pods: frozenset[str]  # names of observed pods that have another owner
    services: Mapping[str, Mapping[str, Any]]  # by name: services that the job owns, and orphans
    has_pod_group: bool

    def expected_pods(self, world: Mapping[str, int]) -> list[tuple[ReplicaSpec, int, str]]:
        """Return role, index and name of every pod in a world of this size, in the order of `job.roles` and by index."""
        return [
            (role, index, pod_name(self.job.name, role.key, index))
            for role in self.job.roles
            for index in range(world.get(role.key, 0))
        ]

    def expected_workers(self, world: Mapping[str, int]) -> list[str]:
        return [name for role, _, name in self.expected_pods(world) if role.duty is ReplicaDuty.WORKER]

    def count_workers(self, world: Mapping[str, int]) -> int:
        """Return the number of pods with the duty WORKER."""
        return sum(world.get(role.key, 0) for role in self.job.roles_with_duty(ReplicaDuty.WORKER))

    def address_role(self, world: Mapping[str, int]) -> ReplicaSpec | None:
        """Return the role whose first pod the other pods connect to: Scheduler or, if the job has none, the first worker role.

        Return None if pods do not connect to each other: without a Scheduler, if there is at most one worker pod, or if workers
        are dynamic.
        """
        for role in self.job.roles_with_duty(ReplicaDuty.SCHEDULER):
            return role
        if self.job.has_dynamic_workers or self.count_workers(world) <= 1:
            return None
        return self.job.roles_with_duty(ReplicaDuty.WORKER)[0]


def make_context(source: Mapping[str, Any], job: Job, observed: Observed, now: float) -> ReconcileContext:
    """Return the context of a pass for the object `source`, from which `job` was parsed."""
    seen = [PodState(pod, job.main_container) for pod in observed.pods]
    pods = {pod.name: pod for pod in seen if pod.controller_uid in (job.uid, "")}
    return ReconcileContext(
        job=job,
        labels=source["metadata"].get("labels") or {},
        observed=observed,
        now=now,
        pods=pods,
        foreign_pods=frozenset(pod.name for pod in seen if pod.name not in pods),
        services={s["metadata"]["name"]: s for s in observed.services if controller_uid_of(s) in (job.uid, "")},
        has_pod_group=observed.pod_group is not None and controller_uid_of(observed.pod_group) == job.uid,
    )
