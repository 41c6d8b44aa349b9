"""The reconciler: what is to be done about a job, given all that can be seen of it.

A plan is a function of the job, its pods, services and nodes, and the time; nothing is remembered outside the job's status. So
it may be computed again at any moment, by another process, after a crash at any line: what was done is seen, what was not is
asked for again. Two rules make that true. Status is written before what it counts is carried out: a pod to be replaced is
noted by its UID first, so a second look deletes it without counting it twice. And every action names what it means (a name, a
UID), so carrying it out twice does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from covey.core.jobs.actions import Action, CreatePod, CreatePodGroup, CreateSecret, CreateService, RecordEvent, ReportPodGone
from covey.core.jobs.failure_policy import PodFailureAction, decide_pod_failure
from covey.core.jobs.pod_state import PodState, describe_node_problems
from covey.core.jobs.reconcile_context import Observed
from covey.core.jobs.resize import REQUEST_RETRY_S, Resizing
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.core.jobs.spec import InvalidJob, ReplicaDuty, ReplicaSpec, parse_job, pod_name
from covey.core.jobs.status import CREATED, FAILED, RESTARTING, RUNNING, SUCCEEDED, SUSPENDED, JobStatus
from covey.core.jobs.timestamps import format_timestamp, parse_timestamp
from covey.core.types import Phase

LATE_REPLACEMENT = "late"
AVOIDED_NODES_MAX = 50  # nodes that a pod is kept off
RESYNC_INTERVAL_S = 600.0  # a running job without timers is looked at this often anyway


class ReconcilePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`status` None: it is right as it is. Status is written before the actions are carried out."""

    actions: tuple[Action, ...] = ()
    status: dict[str, Any] | None = None
    requeue_after: float | None = None
    reason: str = ""


def plan_job(job: Mapping[str, Any], observed: Observed, now: float) -> ReconcilePlan:
    """What is to be done about an MSJob now."""
    status = JobStatus(job, now)
    if job.get("metadata", {}).get("deletionTimestamp"):
        return ReconcilePlan(reason="the job is being deleted: what it owns goes with it")
    try:
        spec = parse_job(job)
    except InvalidJob as invalid:
        return _plan_invalid_job(status, str(invalid))
    made = _Planner(spec, observed, status, now)
    made.record_remarks(job)
    reason = made.reconcile_finished() if status.final_condition else made.reconcile_active()
    status.drop_empty_fields()
    return ReconcilePlan(
        actions=tuple(made.actions),
        status=status.content if status.is_changed else None,
        requeue_after=made.requeue_after,
        reason=reason,
    )


def _plan_invalid_job(status: JobStatus, sentence: str) -> ReconcilePlan:
    if status.final_condition:
        return ReconcilePlan(reason=sentence)
    if status.world:  # it was right when it started: what runs goes on, and nothing is done until it is right again
        if status.content.get("refused") == sentence:
            return ReconcilePlan(reason=sentence)
        status.content["refused"] = sentence
        return ReconcilePlan(actions=(RecordEvent("Warning", "InvalidSpec", sentence),), status=status.content, reason=sentence)
    status.set_condition(FAILED, "InvalidSpec", sentence)
    status.drop_empty_fields()
    return ReconcilePlan(actions=(RecordEvent("Warning", "InvalidSpec", sentence),), status=status.content, reason=sentence)


class _Planner(Resizing):
    """The turn of a job that goes on: ends are looked for first, then failures, then what is missing is made."""

    def reconcile_active(self) -> str:
        status = self.status
        if not status.has_condition(CREATED):
            self.record_event("MSJobCreated", f"the job {self.job.name} was taken up")
            status.set_condition(CREATED, "MSJobCreated", f"the job {self.job.name} was taken up")
        status.content.pop("refused", None)
        self._adopt_orphans()
        self._drop_finished_replacements()
        if self.job.suspend:
            return self._suspend_job()
        if status.has_condition(SUSPENDED):
            status.clear_condition(SUSPENDED, "MSJobResumed", "the job goes on")
            self.record_event("MSJobResumed", "the job goes on")
        if not status.world:
            status.content["world"] = self.job.desired_replicas
            status.content["startTime"] = format_timestamp(self.now)
        if self.observed.scheduler_status is not None:
            self._update_progress(self.observed.scheduler_status)
        self._scale_workers()
        self._record_finished_pods()
        verdict = (
            self._check_success()
            or self._check_deadline()
            or self._handle_failed_pods()
            or self._check_kubelet_restarts()
            or self._check_pending_pods()
        )
        if verdict:
            self._update_counters()
            return verdict
        self._report_gone_pods()
        self._delete_extra_pods()
        self._force_deletions()
        self._create_missing()
        return self._update_conditions()

    def _update_progress(self, live: SchedulerStatus) -> None:
        """How far the training is, and since when that is known."""
        known = live.progress_fields()
        shown = self.status.content.get("progress") or {}
        if {key: value for key, value in shown.items() if key != "updated"} != known:
            self.status.content["progress"] = {**known, "updated": format_timestamp(self.now)}

    def _drop_finished_replacements(self) -> None:
        """A replacement that runs, or ended, is no longer awaited; nor is one for which there is no place any more."""
        replacing = self.status.replacements
        places = {name for _, _, name in self._expected_pods}
        for name, note in list(replacing.items()):
            pod = self.pods.get(name)
            there = pod is not None and pod.uid != note["uid"] and (pod.running or pod.succeeded)
            if there or name not in places:
                del replacing[name]
            if there and note.get("without"):
                self.record_event("MSJobGrows", f"{name} has a place again and joins the others")

    def _suspend_job(self) -> str:
        for pod in self.pods.values():
            self.delete_pod(pod)
        message = "runPolicy.suspend is set: the job's pods are taken away"
        if self.status.set_condition(SUSPENDED, "MSJobSuspended", message):
            self.record_event("MSJobSuspended", message)
        for field in ("world", "formed", "startTime", "replacing", "finished", "scaling", "progress"):
            self.status.content.pop(field, None)
        if not self.pods:
            self._update_counters()
        return message

    def _check_deadline(self) -> str:
        started = self.status.read_time("startTime")
        if self.job.deadline_s is None or started is None:
            return ""
        over_at = started + self.job.deadline_s
        if self.now < over_at:
            self.requeue_at(over_at)
            return ""
        return self._end_job(
            FAILED, "DeadlineExceeded", f"the job was active for more than activeDeadlineSeconds {self.job.deadline_s:g}"
        )

    def _check_success(self) -> str:
        workers = [name for role, _, name in self._expected_pods if role.duty is ReplicaDuty.WORKER]
        done = [name for name in workers if name in self._finished_pods]
        first = bool(workers) and workers[0] in self._finished_pods and not self.job.needs_all_workers
        lost = self.job.has_dynamic_workers and all(name in done or self._has_failed(name) for name in workers)
        if workers and (len(done) == len(workers) or first or (done and lost)):
            by = f"worker 0 ({workers[0]})" if first and len(done) < len(workers) else f"{len(done)} of {len(workers)} workers"
            return self._end_job(SUCCEEDED, "MSJobSucceeded", f"{by} succeeded")
        return ""

    def _handle_failed_pods(self) -> str:
        """Look at every pod that failed or is on a lost node, in order; what must be, is noted before it is done."""
        ignored = []
        for role, _, name in self._expected_pods:
            pod = self.pods.get(name)
            if pod is None:
                continue
            if self._is_abandoned(pod):
                self.delete_pod(pod, grace=self._grace_period_s)  # noted in an earlier pass
                continue
            if pod.succeeded:
                continue
            where = self._describe_node_problem(pod)
            if (not pod.failed and not where) or self._is_leaving(name):
                continue
            if self._is_joining(name):
                self._roll_back_growth(f"{name} failed with {pod.end_reason}" if pod.failed else f"{name} is {where}")
                continue
            faults = self.status.content.get("faults", 0)
            after, word, message = decide_pod_failure(
                self.job,
                role,
                pod,
                restarts=self._count_restarts(),
                faults=faults,
                where=where,
                live=self._scheduler_status_outside(name),
            )
            if after is PodFailureAction.FAIL:
                return self._end_job(FAILED, word, message)
            if after is PodFailureAction.IGNORE:
                ignored.append(name)
                self._record_event_once("ignored", name, word, message)
                continue
            self._replace_pods(pod, after, word, message, where=where)
            if after is PodFailureAction.RESTART_ALL:
                break
        workers = [name for role, _, name in self._expected_pods if role.duty is ReplicaDuty.WORKER]
        if ignored and len(ignored) == len(workers):
            return self._end_job(FAILED, "MSJobFailed", "every worker failed")
        return self._check_overdue_replacements()

    def _scheduler_status_outside(self, name: str) -> SchedulerStatus | None:
        """The cluster inside, unless its scheduler is in this very pod."""
        first = self._address_role
        return self.observed.scheduler_status if first is not None and name != pod_name(self.job.name, first.key, 0) else None

    def _can_train_without(self, name: str) -> bool:
        """Whether the others train on in a smaller world, so that nobody need hurry to fill this place."""
        live = self.observed.scheduler_status
        return (
            self.job.recovery.is_elastic and live is not None and live.phase is Phase.READY and not live.workers_in_pods({name})
        )

    def _report_gone_pods(self) -> None:
        """The scheduler inside need not find out by itself that a pod is over, as long as it has not."""
        lives = self.observed.scheduler_status.pod_uids if self.observed.scheduler_status is not None else frozenset()
        for name, note in self.status.replacements.items():
            pod = self.pods.get(name)
            runs = pod is not None and pod.uid == note["uid"] and not pod.failed and not self._is_node_lost(pod)
            if note["uid"] in lives and not (runs or note.get("all")):
                self.actions.append(ReportPodGone(name, note["uid"]))
                self.requeue_at(self.now + REQUEST_RETRY_S)

    def _record_event_once(self, field: str, name: str, word: str, message: str) -> None:
        told: list[str] = self.status.content.setdefault(field, [])
        if name not in told:
            told.append(name)
            self.record_event(word, message, warn=True)

    def _describe_node_problem(self, pod: PodState) -> str:
        """What is wrong with a pod's node, so that it must not stay there; "" where nothing is."""
        if self._is_node_lost(pod):
            return f"on the lost node {pod.node_name}"
        minds = self.job.recovery.subhealthy_strategy and not (pod.is_terminating or pod.failed)
        what = describe_node_problems((self.observed.nodes or {}).get(pod.node_name) or {}) if minds else ""
        return f"on the node {pod.node_name}, which is not well ({what})" if what else ""

    def _is_node_lost(self, pod: PodState) -> bool:
        since = pod.node_lost_since(self.observed.nodes)
        if since is None or pod.succeeded or pod.failed:
            return False
        lost_at = max(since, pod.created_at or 0.0) + self.job.node_lost_timeout_s
        if self.now < lost_at:
            self.requeue_at(lost_at)
        return self.now >= lost_at

    def _replace_pods(self, pod: PodState, after: PodFailureAction, word: str, message: str, *, where: str) -> None:
        """`where`: what is wrong with its node. All pods of that node leave it, if all start anew."""
        lost = where == LATE_REPLACEMENT or self._is_node_lost(pod)
        content = self.status.content
        content["restarts"] = content.get("restarts", 0) + 1
        if not (where or pod.disrupted):
            content["faults"] = content.get("faults", 0) + 1
        if after is PodFailureAction.RESTART_ALL:
            given_up = [p for p in self.pods.values() if not p.succeeded or p.name == pod.name]
            for field in ("formed", "finished", "scaling"):
                content.pop(field, None)
            content["world"] = self.job.desired_replicas
            if pod.name not in self.pods:  # its replacement never came: the next timeout ends the job
                self.status.replacements[pod.name] = {"uid": pod.uid, "at": format_timestamp(self.now), "all": True}
        else:
            given_up = [pod]
        for one in given_up:
            content["restarts"] += one.kubelet_restarts  # the kubelet's restarts leave with the pod that counted them
            note: dict[str, Any] = {
                "uid": one.uid,
                "at": format_timestamp(self.now),
                "all": after is PodFailureAction.RESTART_ALL,
            }
            if one.node_name and (after is PodFailureAction.MOVE or (where and one.node_name == pod.node_name)):
                note["node"] = one.node_name  # which its replacement avoids; others may go there
            self.status.replacements[one.name] = note
            at_once = (lost and one is pod) or (where and self.job.recovery.subhealthy_strategy == "forceExit")
            self.delete_pod(one, grace=0 if at_once else self._grace_period_s)
        self.record_event(word, message, warn=True)
        self.status.set_condition(RESTARTING, word, message)

    @property
    def _grace_period_s(self) -> int | None:
        return 0 if self.job.recovery.fault_scheduling == "force" else None

    def _check_overdue_replacements(self) -> str:
        """A replacement that does not come in time: everyone starts anew, once; a second time the job has failed."""
        if not self.job.recovery.is_enabled:
            return ""
        for name, note in self.status.replacements.items():
            late_at = (parse_timestamp(note["at"]) or self.now) + self.job.recovery.reschedule_timeout_s
            pod = self.pods.get(name)
            if self._can_train_without(name):
                continue
            if self.now < late_at:
                self.requeue_at(late_at)
                continue
            why = f" ({pod.pending_reason})" if pod is not None and pod.pending_reason else ""
            message = (
                f"the replacement of {name} did not run within wait-reschedule-timeout "
                f"{self.job.recovery.reschedule_timeout_s:g} s{why}"
            )
            if note.get("all") or (self.job.backoff_limit is not None and self._count_restarts() >= self.job.backoff_limit):
                return self._end_job(FAILED, "RescheduleTimeout", message)
            one = pod or PodState({"metadata": {"name": name, "uid": note["uid"]}}, self.job.main_container)
            self._replace_pods(
                one,
                PodFailureAction.RESTART_ALL,
                "RescheduleTimeout",
                f"{message}: all pods start anew",
                where=LATE_REPLACEMENT,
            )
            break
        return ""

    def _check_kubelet_restarts(self) -> str:
        """The kubelet restarts containers by itself; they count as well, and are told."""
        total = self._count_restarts()
        shown = int(self.status.content.get("restartsTotal", 0))
        if self.job.backoff_limit is not None and total > self.job.backoff_limit:
            return self._end_job(
                *(FAILED, "BackoffLimitExceeded"),
                f"{total} restarts are more than backoffLimit {self.job.backoff_limit} allows",
            )
        if total > shown and total > int(self.status.content.get("restarts", 0)):
            names = ", ".join(sorted(pod.name for pod in self.pods.values() if pod.kubelet_restarts))
            self.record_event(
                "ContainerRestarted", f"{total} restarts so far; the kubelet restarted containers of {names}", warn=True
            )
        return ""

    def _check_pending_pods(self) -> str:
        """A pod that does not come to run in time ends the job, with what it waited for."""
        if self.job.pending_timeout_s is None:
            return ""
        started = self.status.read_time("startTime") or self.now
        for _, _, name in self._expected_pods:
            pod = self.pods.get(name)
            if name in self._finished_pods or (pod is not None and (pod.phase != "Pending" or pod.is_terminating)):
                continue
            if name in self.status.replacements and self._can_train_without(name):
                continue
            note = self.status.replacements.get(name, {})
            since = pod.created_at if pod is not None else max(started, parse_timestamp(note.get("at")) or 0.0)
            late_at = (since or self.now) + self.job.pending_timeout_s
            if self.now >= late_at:
                why = (pod.pending_reason if pod is not None else "it could not be created") or "no reason is known"
                sentence = f"{name} was Pending for more than {self.job.pending_timeout_s:g} s: {why}"
                if self._is_joining(name):
                    self._roll_back_growth(sentence)
                    return ""
                return self._end_job(FAILED, "PendingTimeout", sentence)
            self.requeue_at(late_at)
        return ""

    def _delete_extra_pods(self) -> None:
        names = {name for _, _, name in self._expected_pods}
        for pod in self.pods.values():
            if pod.name not in names:
                self.delete_pod(pod)

    @property
    def _address_role(self) -> ReplicaSpec | None:
        """The role whose first pod the others call: the Scheduler; without one, the first worker of several.

        Dynamic workers without a Scheduler are no world: each is alone.
        """
        for role in self.job.roles_with_duty(ReplicaDuty.SCHEDULER):
            return role
        if self.job.has_dynamic_workers:
            return None
        workers = self.job.roles_with_duty(ReplicaDuty.WORKER)
        several = sum(self.status.world.get(role.key, 0) for role in workers) > 1
        return workers[0] if several else None

    def _create_missing(self) -> None:
        missing = [place for place in self._expected_pods if place[2] not in self.pods and place[2] not in self._finished_pods]
        for _, _, name in missing:
            if name in self.foreign_pods:
                self._record_event_once("taken", name, "NameTaken", f"a pod {name} that belongs to another owner is in the way")
                self.requeue_at(self.now + 5.0)
        role = self._address_role
        service = self.services.get(pod_name(self.job.name, role.key, 0)) if role else None
        if role is not None and service is None:
            self.actions.append(CreateService(role.key))
        if self.observed.uses_pod_groups and not self.has_pod_group:  # also for pods that are there: they wait for it
            policy = self.job.scheduling_policy or {}
            members = int(policy.get("minAvailable") or sum(self.status.world.values()))
            self.actions.append(CreatePodGroup(members, policy))
        if not missing:
            return
        if role is not None and not (service or {}).get("spec", {}).get("clusterIP"):
            return  # its address is part of every pod
        possible = [place for place in missing if place[2] not in self.foreign_pods]
        if possible:
            self.actions.append(CreateSecret())  # whether it is there may not be looked at, and need not
        unwell = self._unhealthy_nodes() if possible else ()
        for role, index, name in possible:
            node = self.status.replacements.get(name, {}).get("node")
            avoided = tuple(dict.fromkeys((node, *unwell) if node else unwell))
            self.actions.append(CreatePod(role.key, index, self.status.formed_world, avoided))

    def _unhealthy_nodes(self) -> tuple[str, ...]:
        """Where no pod of a job that minds may start."""
        if not self.job.recovery.subhealthy_strategy:
            return ()
        nodes = self.observed.nodes or {}
        return tuple(sorted(name for name, node in nodes.items() if describe_node_problems(node)))[:AVOIDED_NODES_MAX]

    def _update_conditions(self) -> str:
        running = [pod for pod in self.pods.values() if pod.running]
        workers = [name for role, _, name in self._expected_pods if role.duty is ReplicaDuty.WORKER]
        up = [name for name in workers if name in self.pods and self.pods[name].running]
        self._update_counters()
        if self.status.replacements and not self._check_elastic_shrink():
            names = ", ".join(sorted(self.status.replacements))
            reason = f"waiting for the replacement of {names}"
        elif up:
            reason = f"{len(up)} of {len(workers)} workers run"
            if self.status.set_condition(RUNNING, "MSJobRunning", f"the job {self.job.name} is running"):
                self.record_event("MSJobRunning", f"the job {self.job.name} is running")
        else:
            reason = f"{len(running)} of {len(self._expected_pods)} pods run"
        self._update_waiting_reason()
        self.requeue_at(self.now + RESYNC_INTERVAL_S)
        return reason

    def _check_elastic_shrink(self) -> bool:
        """Whether all who are missed are those without whom the others go on; told once for each."""
        for name, note in self.status.replacements.items():
            if not self._can_train_without(name):
                return False
            if not note.get("without"):
                note["without"] = True
                self.record_event(
                    "MSJobShrunk", f"elastic-training: the others go on without {name}, until it has a place", warn=True
                )
        return True

    def _update_waiting_reason(self) -> None:
        """Why nothing starts, in status and as an event, when the answer changes."""
        waiting = {pod.name: pod.pending_reason for pod in self.pods.values() if pod.pending_reason and not pod.is_terminating}
        sentence = "; ".join(f"{name}: {why}" for name, why in sorted(waiting.items())[:3])
        if sentence == self.status.content.get("waiting", ""):
            return
        if sentence:
            self.status.content["waiting"] = sentence
            self.record_event("Pending", sentence, warn=True)
        else:
            self.status.content.pop("waiting", None)
