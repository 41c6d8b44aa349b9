"""The status of a job: everything that a reconcile pass remembers for the next one.

`JobStatus` is the only writer of the status, with one method per fact. Its part `Scaling` owns the field `scaling`. The others:

    conditions state completionTime   `set_condition`, `clear_condition`
    world startTime formed            the pods of this start of the job: `start`, `resize`, `restart`
    replacing restarts faults         replaced pods, by name; restarts so far; failures of the program itself
    finished                          pods that succeeded
    progress                          what the job's scheduler last reported
    waiting refused ignored taken     what was reported already, so that an event is recorded once
    replicaStatuses workers workerReplicas selector restartsTotal   `set_counters`
    lastReconcileTime                 `finish`

Conditions are monotone: what has become true of a finished job stays so, Succeeded and Failed exclude each other, and a
condition's transition time changes only with its status.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from covey.core.jobs.scaling import Scaling
from covey.core.jobs.timestamps import format_timestamp, parse_timestamp

CREATED, RUNNING, RESTARTING, SUSPENDED, SUCCEEDED, FAILED = (
    *("Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed"),
)
FINAL_CONDITIONS = (SUCCEEDED, FAILED)
MESSAGE_CHARS_MAX = 1000
OMITTED_IF_EMPTY = ("replacing", "finished", "scaling")


class JobStatus:
    """A working copy of a job's status, at the time `now` of a reconcile pass."""

    def __init__(self, job: Mapping[str, Any], now: float) -> None:
        self._original: dict[str, Any] = copy.deepcopy(dict(job.get("status") or {}))
        self._content: dict[str, Any] = copy.deepcopy(self._original)
        self._now = now
        self.scaling = Scaling(self._content.setdefault("scaling", {}), now)

    @property
    def content(self) -> dict[str, Any]:
        """The status as the API server is to have it, without empty notes."""
        return {field: value for field, value in self._content.items() if value or field not in OMITTED_IF_EMPTY}

    def finish(self) -> dict[str, Any] | None:
        """Return the status to write, with the time of this pass, or None if it has not changed."""
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
        """Succeeded or Failed, "" for a job that goes on."""
        return next((kind for kind in FINAL_CONDITIONS if self.has_condition(kind)), "")

    @property
    def running_since(self) -> float | None:
        """When Running last changed, to true or to false; None if the job never ran."""
        conditions = self._content.get("conditions", [])
        return parse_timestamp(next((c["lastTransitionTime"] for c in conditions if c["type"] == RUNNING), None))

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
            self._content.setdefault("completionTime", format_timestamp(self._now))
            self._drop("replacing")
        self._content["state"] = kind
        return fresh

    def clear_condition(self, kind: str, reason: str, message: str) -> None:
        """Make a condition that was true false."""
        if self.has_condition(kind):
            self._put_condition(kind, "False", reason, message)
            self._content["state"] = self._content["conditions"][-1]["type"]

    def _put_condition(self, kind: str, status: str, reason: str, message: str) -> None:
        conditions: list[dict[str, Any]] = self._content.setdefault("conditions", [])
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

    # -- the pods of this start of the job ---------------------------------------------------------------------------

    @property
    def world(self) -> dict[str, int]:
        """Number of pods of each role; {} if the job has not started."""
        return dict(self._content.get("world") or {})

    @property
    def formed_world(self) -> dict[str, int]:
        """Number of pods of each role when the cluster formed. Every pod gets these numbers, also after a resize."""
        return dict(self._content.get("formed") or self.world)

    def start(self, world: dict[str, int]) -> None:
        self._content |= {"world": world, "startTime": format_timestamp(self._now)}

    def resize(self, world: dict[str, int]) -> None:
        """Change the numbers of a started job."""
        self._content["world"] = world

    def keep_formed_world(self) -> None:
        """Record the present numbers as those with which the cluster formed, unless an earlier resize did."""
        self._content.setdefault("formed", self.world)

    def drop_formed_world(self) -> None:
        self._content.pop("formed", None)

    def restart(self, world: dict[str, int]) -> None:
        """All pods start again, with these numbers: drop what was known of the cluster that they formed."""
        self._drop("formed", "finished")
        self.scaling.reset()
        self._content["world"] = world

    def suspend(self) -> None:
        """All pods are deleted: drop everything that belongs to this start of the job."""
        self._drop("world", "formed", "startTime", "replacing", "finished", "progress")
        self.scaling.reset()

    def _drop(self, *fields: str) -> None:
        for field in fields:
            self._content.pop(field, None)

    # -- replaced and finished pods ----------------------------------------------------------------------------------

    @property
    def replacements(self) -> Mapping[str, Mapping[str, Any]]:
        """Pods whose replacement does not run yet, by name.

        `uid`: of the pod that was given up; `at`: since when; `all`: in a restart of all pods; `node`: which the replacement
        avoids; `without`: the others were reported to train without it.
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
        """Whether the job's scheduler reported since the job started."""
        return "progress" in self._content

    def update_progress(self, progress: Mapping[str, Any]) -> None:
        """Record what the scheduler reports and, if it differs from the last report, the time."""
        shown = self._content.get("progress") or {}
        if {key: value for key, value in shown.items() if key != "updated"} != progress:
            self._content["progress"] = {**progress, "updated": format_timestamp(self._now)}

    def report_once(self, field: str, name: str) -> bool:
        """Add a name to the list `field`. Return whether it was not there."""
        reported: list[str] = self._content.setdefault(field, [])
        if name in reported:
            return False
        reported.append(name)
        return True

    def report_text(self, field: str, text: str) -> bool:
        """Set or, if the text is empty, drop `field`. Return whether there is a text and it differs from the last one."""
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
