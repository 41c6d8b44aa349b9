"""What is remembered about a job, in its status: conditions, counters, and which pods are being replaced.

Conditions are monotone: what has become true of a finished job stays so, Succeeded and Failed exclude each other, and a
condition's transition time changes only with its status.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from covey.core.jobs.timestamps import format_timestamp, parse_timestamp

CREATED, RUNNING, RESTARTING, SUSPENDED, SUCCEEDED, FAILED = (
    *("Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed"),
)
FINAL_CONDITIONS = (SUCCEEDED, FAILED)
MESSAGE_CHARS_MAX = 1000


class JobStatus:
    """A working copy of a job's status. `content` is what is to be written."""

    def __init__(self, job: Mapping[str, Any], now: float) -> None:
        self._original: dict[str, Any] = copy.deepcopy(dict(job.get("status") or {}))
        self.content: dict[str, Any] = copy.deepcopy(self._original)
        self._now = now

    @property
    def is_changed(self) -> bool:
        return self.content != self._original

    # -- conditions --------------------------------------------------------------------------------------------------

    def has_condition(self, kind: str) -> bool:
        return any(c["type"] == kind and c["status"] == "True" for c in self.content.get("conditions", []))

    @property
    def final_condition(self) -> str:
        """Succeeded or Failed, "" for a job that goes on."""
        return next((kind for kind in FINAL_CONDITIONS if self.has_condition(kind)), "")

    def set_condition(self, kind: str, reason: str, message: str) -> bool:
        """Make a condition true; it becomes the last one. Returns whether it was not true before."""
        fresh = not self.has_condition(kind)
        self._put_condition(kind, "True", reason, message)
        if kind in (RUNNING, RESTARTING, SUSPENDED):
            for other in {RUNNING, RESTARTING, SUSPENDED} - {kind}:
                self.clear_condition(other, reason, message)
        elif kind in FINAL_CONDITIONS:
            for other in (RUNNING, RESTARTING, SUSPENDED):
                self.clear_condition(other, reason, message)
            self.content.setdefault("completionTime", format_timestamp(self._now))
        self.content["state"] = kind
        return fresh

    def clear_condition(self, kind: str, reason: str, message: str) -> None:
        """Make a condition that was true false."""
        if self.has_condition(kind):
            self._put_condition(kind, "False", reason, message)
            self.content["state"] = self.content["conditions"][-1]["type"]

    def _put_condition(self, kind: str, status: str, reason: str, message: str) -> None:
        conditions: list[dict[str, Any]] = self.content.setdefault("conditions", [])
        old = next((c for c in conditions if c["type"] == kind), None)
        message = message[:MESSAGE_CHARS_MAX]
        if old is not None and (old["status"], old["reason"], old["message"]) == (status, reason, message):
            return
        turned = old is None or old["status"] != status
        new = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastUpdateTime": format_timestamp(self._now),
            "lastTransitionTime": format_timestamp(self._now) if turned or old is None else old["lastTransitionTime"],
        }
        if old is not None and not turned:
            conditions[conditions.index(old)] = new
            return
        conditions[:] = [c for c in conditions if c["type"] != kind]
        # A condition that turned false goes before the true ones, so that the last one says what the job is.
        conditions.insert(len(conditions) if status == "True" else 0, new)

    # -- times and counters ------------------------------------------------------------------------------------------

    def read_time(self, field: str) -> float | None:
        return parse_timestamp(self.content.get(field))

    @property
    def world(self) -> dict[str, int]:
        """How many pods of each role this start of the job has; {} where it has not started."""
        return dict(self.content.get("world") or {})

    @property
    def formed_world(self) -> dict[str, int]:
        """How many there were when the cluster formed: what every pod of it is told, whatever the world is now."""
        return dict(self.content.get("formed") or self.world)

    @property
    def replacements(self) -> dict[str, dict[str, Any]]:
        """By pod name: the UID that was given up, when, and the node to avoid. It is here until the replacement runs."""
        found: dict[str, dict[str, Any]] = self.content.setdefault("replacing", {})
        return found

    def drop_empty_fields(self) -> None:
        """Leave nothing behind that says nothing."""
        for field in ("replacing", "finished", "scaling"):
            if not self.content.get(field):
                self.content.pop(field, None)
        if self.is_changed:
            self.content["lastReconcileTime"] = format_timestamp(self._now)
