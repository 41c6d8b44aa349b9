"""One look at a job: what is there of it, the words a plan is made of, and how a job ends.

`plan` is built on this. Here is what every plan needs (pods by name, the places a job has, its counters) and what is left to do
for a job that has ended: clean up by its policy, and go when its time is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from covey.core.jobs.actions import (
    Action,
    AdoptOrphan,
    DeleteJob,
    DeletePod,
    DeletePodGroup,
    DeleteService,
    RecordEvent,
    SetLabel,
    TerminatePod,
)
from covey.core.jobs.pod_state import PodState, controller_uid_of
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.core.jobs.spec import FORCE_DELETE_AFTER_S, CleanPodPolicy, Job, ReplicaDuty, ReplicaSpec, pod_name
from covey.core.jobs.status import CREATED, FAILED, JobStatus


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All that can be seen of a job. `nodes` None: nodes may not be looked at."""

    pods: Sequence[Mapping[str, Any]] = ()
    services: Sequence[Mapping[str, Any]] = ()
    nodes: Mapping[str, Mapping[str, Any]] | None = None
    uses_pod_groups: bool = False  # pods are scheduled together, by a PodGroup
    pod_group: Mapping[str, Any] | None = None
    scheduler_status: SchedulerStatus | None = None  # the cluster inside, where it can be asked


class Turn:
    """The job, what is observed of it, its status to be, and the actions so far."""

    def __init__(self, job: Job, observed: Observed, status: JobStatus, now: float) -> None:
        self.job = job
        self.observed = observed
        self.status = status
        self.now = now
        self.actions: list[Action] = []
        self.requeue_after: float | None = None
        seen = [PodState(pod, job.main_container) for pod in observed.pods]
        self.pods = {pod.name: pod for pod in seen if pod.controller_uid in (job.uid, "")}
        self.foreign_pods = {pod.name: pod for pod in seen if pod.name not in self.pods}
        self.services = {s["metadata"]["name"]: s for s in observed.services if controller_uid_of(s) in (job.uid, "")}
        self.has_pod_group = observed.pod_group is not None and controller_uid_of(observed.pod_group) == job.uid

    def record_event(self, reason: str, message: str, *, warn: bool = False) -> None:
        self.actions.append(RecordEvent("Warning" if warn else "Normal", reason, message))

    def requeue_at(self, at: float) -> None:
        """Come back at a moment, or before."""
        wait = max(0.0, at - self.now)
        self.requeue_after = wait if self.requeue_after is None else min(self.requeue_after, wait)

    def delete_pod(self, pod: PodState, *, grace: int | None = None) -> None:
        if not pod.is_terminating or grace == 0:
            self.actions.append(DeletePod(pod.name, pod.uid, grace))

    def record_remarks(self, job: Mapping[str, Any]) -> None:
        """What the job asks for in vain, told once: while nothing of it is there yet."""
        labels = job["metadata"].get("labels") or {}
        if self.job.recovery.strategies and "process-recover-enable" not in labels:
            self.actions.append(SetLabel("process-recover-enable", "on"))
        if not self.status.has_condition(CREATED):
            for remark in self.job.remarks:
                self.record_event("Remark", remark, warn=True)

    def _adopt_orphans(self) -> None:
        for pod in self.pods.values():
            if not pod.controller_uid and not pod.is_terminating:
                self.actions.append(AdoptOrphan("Pod", pod.name, pod.uid))
        for name, service in self.services.items():
            if not controller_uid_of(service):
                self.actions.append(AdoptOrphan("Service", name, service["metadata"]["uid"]))

    @property
    def _expected_pods(self) -> list[tuple[ReplicaSpec, int, str]]:
        """Every pod this start of the job has: role, index, name; in the order in which they are created."""
        world = self.status.world
        return [
            (role, index, pod_name(self.job.name, role.key, index))
            for role in self.job.roles
            for index in range(world.get(role.key, 0))
        ]

    def _record_finished_pods(self) -> None:
        """Pods that succeeded are remembered: they may be collected, and must not run again."""
        there = [self.pods[name] for _, _, name in self._expected_pods if name in self.pods]
        done = {pod.name for pod in there if pod.succeeded and not self._is_abandoned(pod)}
        kept = set(self.status.content.get("finished") or [])
        if done - kept:
            self.status.content["finished"] = sorted(done | kept)

    def _is_abandoned(self, pod: PodState) -> bool:
        """It is to go, or goes and is left from before a suspension: how it ends says nothing about the job."""
        started = self.status.read_time("startTime") or 0.0
        left = pod.is_terminating and pod.created_at is not None and pod.created_at < started
        return left or self.status.replacements.get(pod.name, {}).get("uid") == pod.uid

    @property
    def _finished_pods(self) -> set[str]:
        return set(self.status.content.get("finished") or [])

    def _has_failed(self, name: str) -> bool:
        return name in self.pods and self.pods[name].failed

    def _count_restarts(self) -> int:
        """Every restart so far: ours, and the kubelet's in pods that are still there."""
        replaced = {note["uid"] for note in self.status.replacements.values()}
        kubelet = sum(pod.kubelet_restarts for pod in self.pods.values() if pod.uid not in replaced)
        return int(self.status.content.get("restarts", 0)) + kubelet

    def _end_job(self, kind: str, reason: str, message: str) -> str:
        self.record_event(reason, message, warn=kind == FAILED)
        self.status.set_condition(kind, reason, message)
        self.status.content.pop("replacing", None)
        self._apply_clean_policy()
        return message

    def _apply_clean_policy(self) -> None:
        """What cleanPodPolicy says; under None the pods of a failed job are ended and kept."""
        for pod in self.pods.values():
            over = pod.succeeded or pod.failed
            if self.job.clean_policy is CleanPodPolicy.ALL or (self.job.clean_policy is CleanPodPolicy.RUNNING and not over):
                self.delete_pod(pod)
                if pod.name in self.services:
                    self.actions.append(DeleteService(pod.name))
            elif (
                self.job.clean_policy is CleanPodPolicy.NONE
                and self.status.has_condition(FAILED)
                and not (over or pod.is_terminating or pod.termination_requested)
            ):
                self.actions.append(TerminatePod(pod.name))
        if self.job.clean_policy is not CleanPodPolicy.NONE:
            gone = [name for name in self.services if name not in self.pods]
            self.actions += [DeleteService(name) for name in gone if DeleteService(name) not in self.actions]
        if self.has_pod_group:
            self.actions.append(DeletePodGroup())

    def _force_deletions(self) -> None:
        """A deletion that does not end: at once where the node is lost, else after a long patience."""
        for pod in self.pods.values():
            if pod.deletion_due_at is None:
                continue
            force_at = pod.deletion_due_at + (
                self.job.node_lost_timeout_s if pod.node_lost_since(self.observed.nodes) is not None else FORCE_DELETE_AFTER_S
            )
            if self.now >= force_at:
                self.delete_pod(pod, grace=0)
                self.record_event("ForcedDeletion", f"{pod.name} did not end in time and is removed by force", warn=True)
            else:
                self.requeue_at(force_at)

    def _update_counters(self) -> None:
        content, world = self.status.content, self.status.world or self.job.desired_replicas
        statuses: dict[str, dict[str, int]] = {}
        for role in self.job.roles:
            mine = [p for p in self.pods.values() if p.replica_type == role.key.lower()]
            names = {pod_name(self.job.name, role.key, index) for index in range(world.get(role.key, 0))}
            statuses[role.key] = {
                "active": sum(p.running for p in mine),
                "ready": sum(p.ready for p in mine),
                "pending": sum(p.phase == "Pending" and not p.is_terminating for p in mine),
                "succeeded": len(names & self._finished_pods),
                "failed": sum(p.failed and not p.is_terminating for p in mine),
            }
        content["replicaStatuses"] = statuses
        keys = [role.key for role in self.job.roles_with_duty(ReplicaDuty.WORKER)]
        ready, wanted = (sum(statuses[key]["active"] for key in keys), sum(self.job.desired_replicas[key] for key in keys))
        content["workers"] = f"{ready}/{wanted}"
        content["workerReplicas"] = statuses.get("Worker", {}).get("active", 0)
        content["selector"] = f"training.kubeflow.org/job-name={self.job.name},training.kubeflow.org/replica-type=worker"
        content["restartsTotal"] = self._count_restarts()

    def reconcile_finished(self) -> str:
        self._apply_clean_policy()
        self._force_deletions()
        ended = self.status.read_time("completionTime")
        if self.job.ttl_s is not None and ended is not None:
            if self.now >= ended + self.job.ttl_s:
                self.actions.append(DeleteJob())
                return f"ttlSecondsAfterFinished {self.job.ttl_s:g} is over"
            self.requeue_at(ended + self.job.ttl_s)
        self._update_counters()
        return f"the job is {self.status.final_condition}"
