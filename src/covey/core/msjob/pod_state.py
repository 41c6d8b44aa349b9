"""Interpretation of a pod's state: its phase, its exit, the reason why it is pending, and the state of its node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.core.msjob.timestamps import parse_timestamp

JOB_LABEL = "training.kubeflow.org/job-name"
TYPE_LABEL = "training.kubeflow.org/replica-type"
INDEX_LABEL = "training.kubeflow.org/replica-index"
OPERATOR_LABEL = "training.kubeflow.org/operator-name"
OPERATOR_NAME = "msjob-controller"

RETRYABLE_EXIT_CODES = frozenset({130, 137, 138, 143})  # SIGINT, SIGKILL, SIGUSR1 (the script requests a retry), SIGTERM
REASON_CHARS_MAX = 300

Pod = Mapping[str, Any]


class PodState:
    """One observed pod. Times are in seconds since 1970."""

    def __init__(self, pod: Pod, main_container: str) -> None:
        self.pod = pod
        self._main_container = main_container
        metadata = pod.get("metadata", {})
        self.name: str = metadata.get("name", "")
        self.uid: str = metadata.get("uid", "")
        labels = metadata.get("labels") or {}
        self.replica_type = str(labels.get(TYPE_LABEL, ""))
        text = str(labels.get(INDEX_LABEL, ""))
        self.index = int(text) if text.isdigit() and len(text) < 7 else -1  # -1: the label is missing or invalid
        self.node_name = str(pod.get("spec", {}).get("nodeName") or "")  # "": not scheduled yet
        self._status: Mapping[str, Any] = pod.get("status") or {}
        self.phase = str(self._status.get("phase") or "Pending")

    @property
    def controller_uid(self) -> str:
        return controller_uid_of(self.pod)

    @property
    def is_terminating(self) -> bool:
        return bool(self.pod["metadata"].get("deletionTimestamp"))

    @property
    def deletion_due_at(self) -> float | None:
        """Time by which a terminating pod must be gone, grace period included; None if it is not being deleted."""
        return parse_timestamp(self.pod["metadata"].get("deletionTimestamp"))

    @property
    def created_at(self) -> float | None:
        return parse_timestamp(self.pod["metadata"].get("creationTimestamp"))

    @property
    def running(self) -> bool:
        return self.phase == "Running" and not self.is_terminating

    @property
    def ready(self) -> bool:
        return self.running and any(
            c.get("type") == "Ready" and c.get("status") == "True" for c in self._status.get("conditions") or []
        )

    @property
    def succeeded(self) -> bool:
        return self.phase == "Succeeded"

    @property
    def failed(self) -> bool:
        return self.phase == "Failed"

    @property
    def termination_requested(self) -> bool:
        """Whether the pod has the deadline of 1 s by which `actions.TerminatePod` ends its processes."""
        return bool(self.pod.get("spec", {}).get("activeDeadlineSeconds") == 1)

    @property
    def kubelet_restarts(self) -> int:
        statuses = [*(self._status.get("initContainerStatuses") or []), *(self._status.get("containerStatuses") or [])]
        return sum(int(status.get("restartCount") or 0) for status in statuses)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the main container; None if it has not terminated, or its status is missing (evicted, node lost)."""
        for status in self._status.get("containerStatuses") or []:
            ended = (status.get("state") or {}).get("terminated")
            if status.get("name") == self._main_container and ended:
                return int(ended.get("exitCode", 0))
        return None

    @property
    def disrupted(self) -> bool:
        """Whether the pod failed without an exit code of its main container (such as by eviction) or while being deleted."""
        return self.failed and (self.exit_code is None or self.is_terminating)

    @property
    def end_reason(self) -> str:
        if self.exit_code is not None:
            signal = f" (signal {self.exit_code - 128})" if 128 < self.exit_code < 160 else ""
            return f"exit code {self.exit_code}{signal}"
        reason, message = str(self._status.get("reason") or ""), str(self._status.get("message") or "")
        return ": ".join(word for word in (reason, message) if word)[:REASON_CHARS_MAX] or "no exit code is known"

    @property
    def pending_reason(self) -> str:
        """Reason why the pod is Pending, such as an image that cannot be pulled, or no node with enough resources.

        "" if it is not Pending or gives no reason.
        """
        if self.phase != "Pending":
            return ""
        for status in [*(self._status.get("initContainerStatuses") or []), *(self._status.get("containerStatuses") or [])]:
            waiting = (status.get("state") or {}).get("waiting")
            if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return _describe_reason(waiting)
        for condition in self._status.get("conditions") or []:
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                return _describe_reason(condition)
        return ""

    def node_lost_since(self, nodes: Mapping[str, Mapping[str, Any]] | None) -> float | None:
        """Return since when the pod's node is not ready; 0 if the node does not exist, or the time is unknown.

        None if the node is ready or has no condition Ready, if the pod has no node yet, or if `nodes` is None.
        """
        if not self.node_name or nodes is None:
            return None
        node = nodes.get(self.node_name)
        if node is None:
            return 0.0
        for condition in (node.get("status") or {}).get("conditions") or []:
            if condition.get("type") == "Ready" and condition.get("status") != "True":
                return parse_timestamp(condition.get("lastTransitionTime")) or 0.0
        return None


def describe_node_problems(node: Mapping[str, Any]) -> str:
    """Return the types of a node's true conditions other than Ready, such as "DiskPressure, MemoryPressure"; "" if none."""
    others = [c for c in (node.get("status") or {}).get("conditions") or [] if c.get("type") != "Ready"]
    return ", ".join(sorted(str(c.get("type")) for c in others if c.get("status") == "True"))


def controller_uid_of(obj: Mapping[str, Any]) -> str:
    """Return the UID of an object's controller; "" for an orphan."""
    for reference in obj.get("metadata", {}).get("ownerReferences") or []:
        if reference.get("controller"):
            return str(reference.get("uid", ""))
    return ""


def _describe_reason(state: Mapping[str, Any]) -> str:
    words = (str(state.get("reason") or ""), str(state.get("message") or ""))
    return ": ".join(word for word in words if word)[:REASON_CHARS_MAX]
