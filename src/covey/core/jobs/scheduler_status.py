"""What the job's own scheduler says of the cluster inside the pods: how far the training is, and who is in its world.

The operator reads it over REST where it can. A plan works without it: real MindSpore and plain torch have no such scheduler.
"""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.incidents import Outcome
from covey.core.types import Phase, Role


class SchedulerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a running cluster."""

    phase: Phase
    generation: int = 0
    restarts: int = 0  # of workers, of any kind that happened inside the pods
    step: int = -1
    resizable: bool = False
    target_workers: int = 0  # how many workers its scheduler lets in
    workers: dict[str, str] = {}  # of the world now, by node id: the pod each is in
    pod_uids: frozenset[str] = frozenset()  # the UIDs of the pods of those who are there, or are waited for
    supports_healing: bool = False  # the others wait for one that is started again
    has_finished_step: bool = False  # the others can go on without one that is lost
    last_recovery: str = ""  # the newest that is over, in short

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def workers_in_pods(self, pods: set[str]) -> list[str]:
        """The node ids of the workers in these pods."""
        return sorted(node for node, pod in self.workers.items() if pod in pods)

    def progress_fields(self) -> dict[str, Any]:
        """As a job's status shows it."""
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
    """What matters to a job of what its scheduler shows. Under the operator a host's identity is its pod's name, its life the
    pod's UID."""
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
