"""The status of a job: all state that reconcile passes share.

`JobStatus` is the only writer of the status. Its part `Scaling` owns the field `scaling`. The other fields:

    conditions state completionTime   `set_condition`, `clear_condition`
    world startTime formed            number of pods of each role; time of the start or resumption; number at the formation
    replacing restarts faults         replaced pods, by name; restarts so far; failures of the program itself
    finished                          names of pods that succeeded
    progress                          last status of the job's scheduler
    waiting refused ignored taken     texts and names already reported, so that an event is recorded once
    replicaStatuses workers workerReplicas selector restartsTotal   `set_counters`
    lastReconcileTime                 `finish`

Succeeded and Failed are final and exclude each other. Of Running, Restarting and Suspended at most one is true. A condition's
transition time changes only with its status.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from covey.core.msjob.scaling_status import Scaling
from covey.core.msjob.timestamps import format_timestamp, parse_timestamp

CREATED, RUNNING, RESTARTING, SUSPENDED, SUCCEEDED, FAILED = (
    *("Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed"),
)
FINAL_CONDITIONS = (SUCCEEDED, FAILED)
MESSAGE_CHARS_MAX = 1000
OMITTED_IF_EMPTY = ("replacing", "finished", "scaling")


class JobStatus:
    """Working copy of a job's status in a reconcile pass at the time `now`."""

    def __init__(self, job: Mapping[str, Any], now: float) -> None:
        self._original: dict[str, Any] = copy.deepcopy(dict(job.get("status") or {}))
        self._content: dict[str, Any] = copy.deepcopy(self._original)
        self._now = now
        self.scaling = Scaling(self._content.setdefault("scaling", {}), now)

    @property
    def content(self) -> dict[str, Any]:
        """The status to write, without the fields of `OMITTED_IF_EMPTY` that are empty."""
        return {field: value for field, value in self._content.items() if value or field not in OMITTED_IF_EMPTY}

    def finish(self) -> dict[str, Any] | None:
        """Return the status to write, with the time of this pass; None if it has not changed."""
        content = self.content
        return {**content, "lastReconcileTime": format_timestamp(self._now)} if content != self._original else None

    def read_time(self, field: str) -> float | None:
        return parse_timestamp(self._content.get(field))

    def read_count(self, field: str) -> int:
        return int(self._content.get(field, 0))

    # -- conditions --------------------------------------------------------------------------------------------------

    def has_condition(self, kind: str) -> bool:
        return any(c["type"] == kind and c["status"] == "True" for c in self._content.get("conditions", []))

    @property
    def final_condition(self) -> str:
        """Succeeded or Failed; "" if the job has not ended."""
        return next((kind for kind in FINAL_CONDITIONS if self.has_condition(kind)), "")

    @property
    def running_since(self) -> float | None:
        """Time at which Running last became true or false, in seconds since 1970; None if the job never ran."""
        conditions = self._content.get("conditions", [])
        return parse_timestamp(next((c["lastTransitionTime"] for c in conditions if c["type"] == RUNNING), None))

    def set_condition(self, kind: str, reason: str, message: str) -> bool:
        """Set a condition to true, and return whether it was not true before.

        Those of Running, Restarting and Suspended that it excludes are set to false. `state` is set to the condition; if it was
        not true, it is moved to the end of the list. A final condition also sets completionTime, if that is not set, and drops
        the replacements.
        """
        was_false = not self.has_condition(kind)
        self._put_condition(kind, "True", reason, message)
        if kind in (RUNNING, RESTARTING, SUSPENDED):
            for other in {RUNNING, RESTARTING, SUSPENDED} - {kind}:
                self.clear_condition(other, reason, message)
        elif kind in FINAL_CONDITIONS:
            for other in (RUNNING, RESTARTING, SUSPENDED):
                self.clear_condition(other, reason, message)
            self._content.setdefault("completionTime", format_timestamp(self._now))
            self._drop("replacing")
        self._content["state"] = kind
        return was_false

    def clear_condition(self, kind: str, reason: str, message: str) -> None:
        """Set a condition to false if it is true; `state` is then the last condition in the list."""
        if self.has_condition(kind):
            self._put_condition(kind, "False", reason, message)
            self._content["state"] = self._content["conditions"][-1]["type"]

    def _put_condition(self, kind: str, status: str, reason: str, message: str) -> None:
        conditions: list[dict[str, Any]] = self._content.setdefault("conditions", [])
        old = next((c for c in conditions if c["type"] == kind), None)
        message = message[:MESSAGE_CHARS_MAX]
        if old is not None and (old["status"], old["reason"], old["message"]) == (status, reason, message):
            return
        has_changed = old is None or old["status"] != status
        new = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastUpdateTime": format_timestamp(self._now),
            "lastTransitionTime": format_timestamp(self._now) if has_changed or old is None else old["lastTransitionTime"],
        }
        if old is not None and not has_changed:
            conditions[conditions.index(old)] = new
            return
        conditions[:] = [c for c in conditions if c["type"] != kind]
        # A condition that became false goes to the front, so that the last condition is the job's state.
        conditions.insert(len(conditions) if status == "True" else 0, new)

    # -- number of pods ----------------------------------------------------------------------------------------------

    @property
    def world(self) -> dict[str, int]:
        """Number of pods of each role; {} if the job has not started or is suspended."""
        return dict(self._content.get("world") or {})

    @property
    def formed_world(self) -> dict[str, int]:
        """Number of pods of each role that the variables of new pods contain: the number with which the cluster formed.

        Until the cluster has formed, and with enableDynamicWorker, it is the present number.
        """
        return dict(self._content.get("formed") or self.world)

    def start(self, world: dict[str, int]) -> None:
        self._content |= {"world": world, "startTime": format_timestamp(self._now)}

    def resize(self, world: dict[str, int]) -> None:
        """Change the number of pods of each role of a started job."""
        self._content["world"] = world

    def keep_formed_world(self) -> None:
        """Record the present numbers as those with which the cluster formed, unless an earlier resize recorded them."""
        self._content.setdefault("formed", self.world)

    def drop_formed_world(self) -> None:
        self._content.pop("formed", None)

    def restart(self, world: dict[str, int]) -> None:
        """Record a restart of all pods with these numbers: drop the formed numbers, the finished pods and the resize."""
        self._drop("formed", "finished")
        self.scaling.reset()
        self._content["world"] = world

    def suspend(self) -> None:
        """Record that all pods are deleted: drop their numbers and start time, replaced and finished pods, progress, resize."""
        self._drop("world", "formed", "startTime", "replacing", "finished", "progress")
        self.scaling.reset()

    def _drop(self, *fields: str) -> None:
        for field in fields:
            self._content.pop(field, None)

    # -- replaced and finished pods ----------------------------------------------------------------------------------

    @property
    def replacements(self) -> Mapping[str, Mapping[str, Any]]:
        """Pods whose replacement does not run yet, by name.

        `uid`: UID of the replaced pod; `at`: time of the decision; `all`: part of a restart of all pods; `node`: node that the
        replacement avoids, if any; `without`: an event was recorded that the other workers train without it.
        """
        found: Mapping[str, Mapping[str, Any]] = self._content.get("replacing") or {}
        return found

    def add_replacement(self, name: str, uid: str, *, in_restart: bool, avoided_node: str = "") -> None:
        note = {"uid": uid, "at": format_timestamp(self._now), "all": in_restart}
        self._content.setdefault("replacing", {})[name] = {**note, "node": avoided_node} if avoided_node else note

    def drop_replacement(self, name: str) -> None:
        self._content.get("replacing", {}).pop(name, None)

    def mark_trained_without(self, name: str) -> None:
        self._content["replacing"][name]["without"] = True

    def count_restarts(self, number: int) -> None:
        self._content["restarts"] = self.read_count("restarts") + number

    def count_fault(self) -> None:
        self._content["faults"] = self.read_count("faults") + 1

    @property
    def finished_pods(self) -> set[str]:
        return set(self._content.get("finished") or [])

    def add_finished_pods(self, names: set[str]) -> None:
        if names - self.finished_pods:
            self._content["finished"] = sorted(self.finished_pods | names)

    def drop_finished_pods(self, names: Collection[str]) -> None:
        self._content["finished"] = [name for name in self._content.get("finished") or [] if name not in names]

    # -- progress, reports and counters ------------------------------------------------------------------------------

    @property
    def has_progress(self) -> bool:
        """Whether the job's scheduler has answered since the job started or resumed."""
        return "progress" in self._content

    def update_progress(self, progress: Mapping[str, Any]) -> None:
        """Record the progress that the job's scheduler reported, with the time, if it differs from the last one."""
        recorded = self._content.get("progress") or {}
        if {key: value for key, value in recorded.items() if key != "updated"} != progress:
            self._content["progress"] = {**progress, "updated": format_timestamp(self._now)}

    def report_once(self, field: str, name: str) -> bool:
        """Add a name to the list `field`. Return whether the list did not contain it."""
        reported: list[str] = self._content.setdefault(field, [])
        if name in reported:
            return False
        reported.append(name)
        return True

    def report_text(self, field: str, text: str) -> bool:
        """Set `field`, or drop it if `text` is empty. Return whether `text` is not empty and differs from the last one."""
        if text == self._content.get(field, ""):
            return False
        self._content[field] = text
        if not text:
            self._drop(field)
        return bool(text)

    def set_counters(
        self, replica_statuses: dict[str, dict[str, int]], *, workers: str, selector: str, restarts_total: int
    ) -> None:
        self._content |= {
            "replicaStatuses": replica_statuses,
            "workers": workers,
            "workerReplicas": replica_statuses.get("Worker", {}).get("active", 0),
            "selector": selector,
            "restartsTotal": restarts_total,
        }
