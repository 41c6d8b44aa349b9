"""The reconciler: `plan_job` returns the actions and the status that a job needs now.

A plan is a function of the job, its observed objects (pods, services, nodes, PodGroup), the status of its scheduler, and the
time. All state is in the job's status, so another process can compute the plan again at any time, also after a crash. Two rules
make that safe. First, the status is written before the actions are carried out: a pod to be replaced is recorded with its UID,
so that the next pass deletes it without counting it twice. Second, repeating an action does no harm; the deletion of a pod, for
example, contains its UID.

A pass is a list of steps. A step reads the context and the status, changes the status and adds actions. If it returns a
verdict, the pass ends with that reason. The order of `ACTIVE_STEPS` is the contract: success and deadline are checked before
failed and late pods, and missing pods are created after all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from covey.core.msjob.actions import AdoptOrphan, CreatePod, CreatePodGroup, CreateSecret, CreateService, SetLabel
from covey.core.msjob.completion import (
    apply_clean_policy,
    check_deadline,
    check_success,
    check_ttl,
    force_deletions,
    report_finished,
    update_counters,
)
from covey.core.msjob.plan_builder import PlanBuilder, ReconcilePlan
from covey.core.msjob.pod_failures import (
    check_kubelet_restarts,
    check_overdue_replacements,
    check_pending_pods,
    drop_finished_replacements,
    handle_failed_pods,
    record_finished_pods,
    report_gone_pods,
    trains_without_replaced,
    unhealthy_nodes,
)
from covey.core.msjob.pod_state import controller_uid_of
from covey.core.msjob.reconcile_context import Observed, ReconcileContext, make_context
from covey.core.msjob.resize import scale_workers
from covey.core.msjob.spec import InvalidJob, parse_job, pod_name
from covey.core.msjob.status import CREATED, FAILED, RUNNING, SUSPENDED, JobStatus

Step = Callable[[ReconcileContext, JobStatus, PlanBuilder], str | None]  # returns the verdict; "" or None: continue

AVOIDED_NODES_MAX = 50  # unhealthy nodes that a new pod's affinity excludes
NAME_RETRY_S = 5.0  # seconds between attempts to create a pod whose name is taken
RESYNC_INTERVAL_S = 600.0  # maximum seconds between two passes of a job that has started


def plan_job(job: Mapping[str, Any], observed: Observed, now: float) -> ReconcilePlan:
    """Return the plan for an MSJob at the time `now`, in seconds since 1970. `job` is not modified.

    The plan for a job that is being deleted has no actions. An invalid job fails if it has not started or is suspended;
    otherwise its pods and conditions stay as they are.
    """
    status, out = JobStatus(job, now), PlanBuilder(now)
    if job.get("metadata", {}).get("deletionTimestamp"):
        return out.build(None, "the job is being deleted: Kubernetes deletes the objects it owns")
    try:
        context = make_context(job, parse_job(job), observed, now)
    except InvalidJob as invalid:
        return _plan_invalid_job(status, out, str(invalid))
    steps = FINISHED_STEPS if status.final_condition else ACTIVE_STEPS
    reason = next(verdict for step in steps if (verdict := step(context, status, out)))
    return out.build(status.finish(), reason)


def _plan_invalid_job(status: JobStatus, out: PlanBuilder, message: str) -> ReconcilePlan:
    """Fail a job that has not started or is suspended.

    If the job has started, only record an event, unless `message` is the last one recorded. If it has ended, do nothing.
    """
    if status.final_condition or (status.world and not status.report_text("refused", message)):
        return out.build(None, message)
    out.record_event("InvalidSpec", message, warn=True)
    if status.world:
        return out.build(status.content, message)
    status.set_condition(FAILED, "InvalidSpec", message)
    return out.build(status.finish(), message)


def record_remarks(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Record an event for each remark about the spec, unless the job has the condition Created already.

    Also set the label process-recover-enable to on if the job has recovery strategies and lacks this label.
    """
    if context.job.recovery.strategies and "process-recover-enable" not in context.labels:
        out.add(SetLabel("process-recover-enable", "on"))
    if not status.has_condition(CREATED):
        for remark in context.job.remarks:
            out.record_event("Remark", remark, warn=True)


def record_created(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    status.report_text("refused", "")
    if not status.has_condition(CREATED):
        message = f"the job {context.job.name} was accepted"
        out.record_event("MSJobCreated", message)
        status.set_condition(CREATED, "MSJobCreated", message)


def adopt_orphans(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    for pod in context.pods.values():
        if not pod.controller_uid and not pod.is_terminating:
            out.add(AdoptOrphan("Pod", pod.name, pod.uid))
    for name, service in context.services.items():
        if not controller_uid_of(service):
            out.add(AdoptOrphan("Service", name, service["metadata"]["uid"]))


def suspend_job(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """If runPolicy.suspend is set, delete all pods, set the condition Suspended and return the verdict; otherwise return ""."""
    if not context.job.suspend:
        return ""
    for pod in context.pods.values():
        out.delete_pod(pod)
    message = "runPolicy.suspend is set: the job's pods are deleted"
    if status.set_condition(SUSPENDED, "MSJobSuspended", message):
        out.record_event("MSJobSuspended", message)
    status.suspend()
    if not context.pods:
        update_counters(context, status)
    return message


def start_job(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Record number of pods and start time of a job that is new or was suspended; do nothing for other jobs."""
    if status.has_condition(SUSPENDED):
        message = "runPolicy.suspend is no longer set: the job's pods are created again"
        status.clear_condition(SUSPENDED, "MSJobResumed", message)
        out.record_event("MSJobResumed", message)
    if not status.world:
        status.start(context.job.desired_replicas)


def update_progress(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    if context.observed.scheduler_status is not None:
        status.update_progress(context.observed.scheduler_status.progress_fields())


def delete_extra_pods(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    names = {name for _, _, name in context.expected_pods(status.world)}
    for pod in context.pods.values():
        if pod.name not in names:
            out.delete_pod(pod)


def create_missing(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Create the service, the PodGroup, the secret and the pods that are missing.

    If the job needs a service, pods are created only once it has an address. If another owner's pod has the name of a missing
    one, retry every `NAME_RETRY_S` and record one event.
    """
    finished, foreign = status.finished_pods, context.foreign_pods
    missing = [pod for pod in context.expected_pods(status.world) if pod[2] not in context.pods and pod[2] not in finished]
    for _, _, name in missing:
        if name in foreign:
            if status.report_once("taken", name):
                message = f"cannot create the pod {name}: another owner's pod has this name; delete it or rename the job"
                out.record_event("NameTaken", message, warn=True)
            out.requeue_at(context.now + NAME_RETRY_S)
    first = context.address_role(status.world)
    service = context.services.get(pod_name(context.job.name, first.key, 0)) if first else None
    if first is not None and service is None:
        out.add(CreateService(first.key))
    if context.observed.uses_pod_groups and not context.has_pod_group:  # also if all pods exist: they need it
        policy = context.job.scheduling_policy or {}
        out.add(CreatePodGroup(int(policy.get("minAvailable") or sum(status.world.values())), policy))
    possible = [pod for pod in missing if pod[2] not in foreign]
    if not possible or (first is not None and not (service or {}).get("spec", {}).get("clusterIP")):
        return
    out.add(CreateSecret())  # even if it exists: the operator may not read secrets, and the action ignores an existing one
    unhealthy = unhealthy_nodes(context)[:AVOIDED_NODES_MAX]
    for role, index, name in possible:
        node = status.replacements.get(name, {}).get("node")
        avoided = tuple(dict.fromkeys([node, *unhealthy] if node else unhealthy))
        out.add(CreatePod(role.key, index, status.formed_world, avoided))


def update_conditions(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """Set counters and conditions. Return the reason of a pass in which the job continues."""
    update_counters(context, status)
    workers = context.expected_workers(status.world)
    running = {pod.name for pod in context.pods.values() if pod.running}
    if status.replacements and not trains_without_replaced(context, status, out):
        reason = f"waiting for the replacement of {', '.join(sorted(status.replacements))}"
    elif running.intersection(workers):
        reason = f"{len(running.intersection(workers))} of {len(workers)} workers run"
        message = f"the job {context.job.name} is running"
        if status.set_condition(RUNNING, "MSJobRunning", message):
            out.record_event("MSJobRunning", message)
    else:
        reason = f"{len(running)} of {len(context.expected_pods(status.world))} pods run"
    waiting = sorted((pod.name, pod.pending_reason) for pod in context.pods.values() if not pod.is_terminating)
    message = "; ".join([f"{name}: {why}" for name, why in waiting if why][:3])
    if status.report_text("waiting", message):
        out.record_event("Pending", message, warn=True)
    out.requeue_at(context.now + RESYNC_INTERVAL_S)
    return reason


ACTIVE_STEPS: tuple[Step, ...] = (
    record_remarks,
    record_created,
    adopt_orphans,
    drop_finished_replacements,
    suspend_job,
    start_job,
    update_progress,
    scale_workers,
    record_finished_pods,
    check_success,
    check_deadline,
    handle_failed_pods,
    check_overdue_replacements,
    check_kubelet_restarts,
    check_pending_pods,
    report_gone_pods,
    delete_extra_pods,
    force_deletions,
    create_missing,
    update_conditions,
)
FINISHED_STEPS: tuple[Step, ...] = (record_remarks, apply_clean_policy, force_deletions, check_ttl, report_finished)
