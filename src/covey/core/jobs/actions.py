"""What a plan asks for: wishes in the imperative, each harmless when it is carried out twice."""

from __future__ import annotations

from typing import Any

import msgspec


class CreateService(msgspec.Struct, frozen=True, tag=True):
    """The address of a role's first pod."""

    role: str


class CreateSecret(msgspec.Struct, frozen=True, tag=True):
    """What lets the job's processes into its cluster."""


class CreatePod(msgspec.Struct, frozen=True, tag=True):
    role: str
    index: int
    world: dict[str, int]  # how many pods of each role this start of the job has
    excluded_nodes: tuple[str, ...] = ()  # nodes it may not run on


class DeletePod(msgspec.Struct, frozen=True, tag=True):
    """`grace_period_s` None: the pod's own."""

    name: str
    uid: str
    grace_period_s: int | None = None


class TerminatePod(msgspec.Struct, frozen=True, tag=True):
    """End its processes and keep the object, so that its log can be read."""

    name: str


class DeleteService(msgspec.Struct, frozen=True, tag=True):
    name: str


class AdoptOrphan(msgspec.Struct, frozen=True, tag=True):
    """An orphan with the job's labels becomes the job's."""

    kind: str
    name: str
    uid: str


class CreatePodGroup(msgspec.Struct, frozen=True, tag=True):
    """A Volcano PodGroup of this many pods."""

    min_members: int
    scheduling_policy: dict[str, Any]


class DeletePodGroup(msgspec.Struct, frozen=True, tag=True):
    pass


class DeleteJob(msgspec.Struct, frozen=True, tag=True):
    pass


class ReleaseWorkers(msgspec.Struct, frozen=True, tag=True):
    """Ask the job's own scheduler to let these workers leave the world; what came of it is seen in the next look."""

    node_ids: tuple[str, ...]


class AnnounceWorkers(msgspec.Struct, frozen=True, tag=True):
    """Tell the job's own scheduler that so many workers more than it has now may join."""

    additional_workers: int


class ReportPodGone(msgspec.Struct, frozen=True, tag=True):
    """Tell the job's own scheduler that a pod is over: who was in it is waited for no longer, and not let in again."""

    name: str
    uid: str


class SetLabel(msgspec.Struct, frozen=True, tag=True):
    key: str
    value: str


class RecordEvent(msgspec.Struct, frozen=True, tag=True):
    """An event; one with the same words is told once."""

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
