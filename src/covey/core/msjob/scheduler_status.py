"""State of the cluster inside a job's pods, as the job's scheduler reports it: progress of the training, and its workers.

The operator reads it over REST. It is optional: jobs with real MindSpore or plain torch have no covey scheduler.
"""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.incidents import Outcome
from covey.core.types import Phase, Role


class SchedulerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of a running cluster, made from the scheduler's view."""

    phase: Phase
    generation: int = 0
    restarts: int = 0  # replaced processes of all present workers
    step: int = -1  # of the most advanced worker; -1: unknown
    resizable: bool = False  # the world size can change now
    target_workers: int = 0  # number of workers that the scheduler admits
    workers: dict[str, str] = {}  # pod name by node id, of all workers in the present world, also dead ones
    pod_uids: frozenset[str] = frozenset()  # UIDs of the pods in which a node is neither dead nor left
    supports_healing: bool = False  # the remaining workers wait for a restarted one (`ClusterView.heals`)
    has_finished_step: bool = False  # a covey.Loop has finished a step, so the world can shrink (`ClusterView.trains`)
    last_recovery: str = ""  # summary of the newest closed incident; "": none

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def workers_in_pods(self, pods: set[str]) -> list[str]:
        """Return the node ids of the workers in these pods, sorted."""
        return sorted(node for node, pod in self.workers.items() if pod in pods)

    def progress_fields(self) -> dict[str, Any]:
        """Return the fields of `status.progress`; `step` and `recovery` only if they are known."""
        fields: dict[str, Any] = {
            "phase": str(self.phase),
            "world": self.world_size,
            "generation": self.generation,
            "restarts": self.restarts,
        }
        if self.step >= 0:
            fields["step"] = self.step
        if self.last_recovery:
            fields["recovery"] = self.last_recovery
        return fields


def scheduler_status_from_view(view: ClusterView) -> SchedulerStatus:
    """Return the part of a scheduler's view that a plan needs.

    Under the operator, a node's `host_id` is its pod's name and its `host_life` the pod's UID.
    """
    workers = [node for node in view.nodes if node.role is Role.WORKER]
    closed = [incident for incident in view.recoveries if incident.outcome is not Outcome.OPEN]
    return SchedulerStatus(
        phase=view.phase,
        generation=view.generation,
        restarts=sum(node.restarts for node in workers),
        step=max((node.step for node in workers), default=-1),
        resizable=view.resizable,
        target_workers=view.goal,
        workers={node.node_id: node.host_id for node in workers},
        pod_uids=frozenset(node.host_life for node in view.nodes if node.alive and node.host_life),
        supports_healing=view.heals,
        has_finished_step=view.trains,
        last_recovery=str(closed[-1]) if closed else "",
    )
