"""Actions of a reconcile plan, carried out by `covey.kubernetes.controller`. Repeating one does no harm."""

from __future__ import annotations

from typing import Any

import msgspec


class CreateService(msgspec.Struct, frozen=True, tag=True):
    """Create the service that gives a role's first pod a stable address."""

    role: str


class CreateSecret(msgspec.Struct, frozen=True, tag=True):
    """Create the secret with which the job's processes join its cluster; no effect if it exists."""


class CreatePod(msgspec.Struct, frozen=True, tag=True):
    role: str
    index: int
    world: dict[str, int]  # number of pods of each role when the job's cluster formed
    excluded_nodes: tuple[str, ...] = ()  # names of nodes on which the pod must not run


class DeletePod(msgspec.Struct, frozen=True, tag=True):
    name: str
    uid: str
    grace_period_s: int | None = None  # seconds; 0: delete immediately; None: the pod's own


class TerminatePod(msgspec.Struct, frozen=True, tag=True):
    """End the pod's processes and keep the object, so that its log can be read."""

    name: str


class DeleteService(msgspec.Struct, frozen=True, tag=True):
    name: str


class AdoptOrphan(msgspec.Struct, frozen=True, tag=True):
    """Make the job the owner of an object that has the job's labels and no controller."""

    kind: str  # Pod or Service
    name: str
    uid: str


class CreatePodGroup(msgspec.Struct, frozen=True, tag=True):
    """Create a PodGroup, by which the gang scheduler Volcano schedules the job's pods together."""

    min_members: int  # pods that must be schedulable before any is started
    scheduling_policy: dict[str, Any]  # runPolicy.schedulingPolicy


class DeletePodGroup(msgspec.Struct, frozen=True, tag=True):
    pass


class DeleteJob(msgspec.Struct, frozen=True, tag=True):
    pass


class ReleaseWorkers(msgspec.Struct, frozen=True, tag=True):
    """Request that the job's scheduler removes these workers; the result is in a later `SchedulerStatus`."""

    node_ids: tuple[str, ...]


class AnnounceWorkers(msgspec.Struct, frozen=True, tag=True):
    """Send the job's scheduler the number of workers that may join."""

    additional_workers: int  # beyond its present world size


class ReportPodGone(msgspec.Struct, frozen=True, tag=True):
    """Report to the job's scheduler that a pod is gone, so that it declares the pod's nodes dead and refuses their return."""

    name: str
    uid: str


class SetLabel(msgspec.Struct, frozen=True, tag=True):
    """Set a label of the job."""

    key: str
    value: str


class RecordEvent(msgspec.Struct, frozen=True, tag=True):
    """Record a Kubernetes event of the job; a repetition with the same reason and message increases its count."""

    event_type: str  # Normal or Warning
    reason: str
    message: str


Action = (
    CreateService
    | CreateSecret
    | CreatePod
    | DeletePod
    | TerminatePod
    | DeleteService
    | AdoptOrphan
    | CreatePodGroup
    | DeletePodGroup
    | DeleteJob
    | ReleaseWorkers
    | AnnounceWorkers
    | ReportPodGone
    | SetLabel
    | RecordEvent
)
