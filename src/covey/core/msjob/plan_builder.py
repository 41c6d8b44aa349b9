"""Result of a reconcile pass, and the builder that the steps of the pass fill."""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.msjob.actions import Action, DeletePod, RecordEvent
from covey.core.msjob.pod_state import PodState


class ReconcilePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one reconcile pass. `status` must be written before the actions are carried out."""

    actions: tuple[Action, ...] = ()
    status: dict[str, Any] | None = None  # None: unchanged
    requeue_after: float | None = None  # seconds; None: no timer is needed
    reason: str = ""


class PlanBuilder:
    """Actions of one reconcile pass, in order, and the earliest time at which the next one is needed."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._actions: list[Action] = []
        self._requeue_after: float | None = None

    def add(self, action: Action) -> None:
        self._actions.append(action)

    def record_event(self, reason: str, message: str, *, warn: bool = False) -> None:
        self._actions.append(RecordEvent("Warning" if warn else "Normal", reason, message))

    def delete_pod(self, pod: PodState, *, grace: int | None = None) -> None:
        """Delete a pod unless it is terminating; with `grace` 0, delete it immediately in any case.

        `grace` is the grace period in seconds; None: the pod's own.
        """
        if not pod.is_terminating or grace == 0:
            self._actions.append(DeletePod(pod.name, pod.uid, grace))

    def requeue_at(self, at: float) -> None:
        """Reconcile again at this time at the latest."""
        wait = max(0.0, at - self._now)
        self._requeue_after = wait if self._requeue_after is None else min(self._requeue_after, wait)

    def build(self, status: dict[str, Any] | None, reason: str) -> ReconcilePlan:
        return ReconcilePlan(actions=tuple(self._actions), status=status, requeue_after=self._requeue_after, reason=reason)
