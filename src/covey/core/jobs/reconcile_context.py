"""One look at a job: what is there of it, the words a plan is made of, and how a job ends.

`plan` is built on this. Here is what every plan needs (pods by name, the places a job has, its counters) and what is left to do
for a job that has ended: clean up by its policy, and go when its time is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from covey.core.jobs.actions import Action, Adopt, DeleteGang, DeleteJob, DeletePod, DeleteService, EndPod, Label, Tell
from covey.core.jobs.pod_state import Seen, owner
from covey.core.jobs.scheduler_status import Live
from covey.core.jobs.spec import FORCE_AFTER_S, Clean, Duty, Job, Role, pod_name
from covey.core.jobs.status import CREATED, FAILED, Status


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All that can be seen of a job. `nodes` None: nodes may not be looked at."""

    pods: Sequence[Mapping[str, Any]] = ()
    services: Sequence[Mapping[str, Any]] = ()
    nodes: Mapping[str, Mapping[str, Any]] | None = None
    gang: bool = False  # pods are scheduled together, by a PodGroup
    pod_group: Mapping[str, Any] | None = None
    live: Live | None = None  # the cluster inside, where it can be asked


class Turn:
    """The job, what is observed of it, its status to be, and the actions so far."""

    def __init__(self, job: Job, observed: Observed, status: Status, now: float) -> None:
        self.job = job
        self.observed = observed
        self.status = status
        self.now = now
        self.actions: list[Action] = []
        self.requeue: float | None = None
        seen = [Seen(pod, job.container) for pod in observed.pods]
        self.pods = {pod.name: pod for pod in seen if pod.owner in (job.uid, "")}
        self.foreign = {pod.name: pod for pod in seen if pod.name not in self.pods}
        self.services = {s["metadata"]["name"]: s for s in observed.services if owner(s) in (job.uid, "")}
        self.has_gang = observed.pod_group is not None and owner(observed.pod_group) == job.uid

    def tell(self, reason: str, message: str, *, warn: bool = False) -> None:
        self.actions.append(Tell("Warning" if warn else "Normal", reason, message))

    def look_again(self, at: float) -> None:
        """Come back at a moment, or before."""
        wait = max(0.0, at - self.now)
        self.requeue = wait if self.requeue is None else min(self.requeue, wait)

    def delete(self, pod: Seen, *, grace: int | None = None) -> None:
        if not pod.ending or grace == 0:
            self.actions.append(DeletePod(pod.name, pod.uid, grace))

    def remark(self, job: Mapping[str, Any]) -> None:
        """What the job asks for in vain, told once: while nothing of it is there yet."""
        labels = job["metadata"].get("labels") or {}
        if self.job.recovery.strategies and "process-recover-enable" not in labels:
            self.actions.append(Label("process-recover-enable", "on"))
        if not self.status.holds(CREATED):
            for remark in self.job.remarks:
                self.tell("Remark", remark, warn=True)

    def _adopt(self) -> None:
        for pod in self.pods.values():
            if not pod.owner and not pod.ending:
                self.actions.append(Adopt("Pod", pod.name, pod.uid))
        for name, service in self.services.items():
            if not owner(service):
                self.actions.append(Adopt("Service", name, service["metadata"]["uid"]))

    @property
    def _places(self) -> list[tuple[Role, int, str]]:
        """Every pod this start of the job has: role, index, name; in the order in which they are created."""
        world = self.status.world
        return [
            (role, index, pod_name(self.job.name, role.key, index))
            for role in self.job.roles
            for index in range(world.get(role.key, 0))
        ]

    def _note_finished(self) -> None:
        """Pods that succeeded are remembered: they may be collected, and must not run again."""
        there = [self.pods[name] for _, _, name in self._places if name in self.pods]
        done = {pod.name for pod in there if pod.succeeded and not self._is_given_up(pod)}
        kept = set(self.status.content.get("finished") or [])
        if done - kept:
            self.status.content["finished"] = sorted(done | kept)

    def _is_given_up(self, pod: Seen) -> bool:
        """It is to go, or goes and is left from before a suspension: how it ends says nothing about the job."""
        started = self.status.time("startTime") or 0.0
        left = pod.ending and pod.created is not None and pod.created < started
        return left or self.status.replacing.get(pod.name, {}).get("uid") == pod.uid

    @property
    def _finished(self) -> set[str]:
        return set(self.status.content.get("finished") or [])

    def _failed(self, name: str) -> bool:
        return name in self.pods and self.pods[name].failed

    def _restarts(self) -> int:
        """Every restart so far: ours, and the kubelet's in pods that are still there."""
        replaced = {note["uid"] for note in self.status.replacing.values()}
        kubelet = sum(pod.restarts for pod in self.pods.values() if pod.uid not in replaced)
        return int(self.status.content.get("restarts", 0)) + kubelet

    def _end(self, kind: str, reason: str, message: str) -> str:
        self.tell(reason, message, warn=kind == FAILED)
        self.status.say(kind, reason, message)
        self.status.content.pop("replacing", None)
        self._clean()
        return message

    def _clean(self) -> None:
        """What cleanPodPolicy says; under None the pods of a failed job are ended and kept."""
        for pod in self.pods.values():
            over = pod.succeeded or pod.failed
            if self.job.clean is Clean.ALL or (self.job.clean is Clean.RUNNING and not over):
                self.delete(pod)
                if pod.name in self.services:
                    self.actions.append(DeleteService(pod.name))
            elif self.job.clean is Clean.NONE and self.status.holds(FAILED) and not (over or pod.ending or pod.told_to_end):
                self.actions.append(EndPod(pod.name))
        if self.job.clean is not Clean.NONE:
            gone = [name for name in self.services if name not in self.pods]
            self.actions += [DeleteService(name) for name in gone if DeleteService(name) not in self.actions]
        if self.has_gang:
            self.actions.append(DeleteGang())

    def _force(self) -> None:
        """A deletion that does not end: at once where the node is lost, else after a long patience."""
        for pod in self.pods.values():
            if pod.gone_by is None:
                continue
            force_at = pod.gone_by + (self.job.lost_s if pod.lost_since(self.observed.nodes) is not None else FORCE_AFTER_S)
            if self.now >= force_at:
                self.delete(pod, grace=0)
                self.tell("ForcedDeletion", f"{pod.name} did not end in time and is removed by force", warn=True)
            else:
                self.look_again(force_at)

    def _count(self) -> None:
        content, world = self.status.content, self.status.world or self.job.wanted
        statuses: dict[str, dict[str, int]] = {}
        for role in self.job.roles:
            mine = [p for p in self.pods.values() if p.kind == role.key.lower()]
            names = {pod_name(self.job.name, role.key, index) for index in range(world.get(role.key, 0))}
            statuses[role.key] = {
                "active": sum(p.running for p in mine),
                "ready": sum(p.ready for p in mine),
                "pending": sum(p.phase == "Pending" and not p.ending for p in mine),
                "succeeded": len(names & self._finished),
                "failed": sum(p.failed and not p.ending for p in mine),
            }
        content["replicaStatuses"] = statuses
        keys = [role.key for role in self.job.of(Duty.WORKER)]
        ready, wanted = (sum(statuses[key]["active"] for key in keys), sum(self.job.wanted[key] for key in keys))
        content["workers"] = f"{ready}/{wanted}"
        content["workerReplicas"] = statuses.get("Worker", {}).get("active", 0)
        content["selector"] = f"training.kubeflow.org/job-name={self.job.name},training.kubeflow.org/replica-type=worker"
        content["restartsTotal"] = self._restarts()

    def finished(self) -> str:
        self._clean()
        self._force()
        ended = self.status.time("completionTime")
        if self.job.ttl_s is not None and ended is not None:
            if self.now >= ended + self.job.ttl_s:
                self.actions.append(DeleteJob())
                return f"ttlSecondsAfterFinished {self.job.ttl_s:g} is over"
            self.look_again(ended + self.job.ttl_s)
        self._count()
        return f"the job is {self.status.final}"
