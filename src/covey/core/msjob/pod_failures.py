"""Steps of a reconcile pass for failed, lost and overdue pods and their replacements.

`failure_policy` decides about one pod. The steps here find the pods, record the decision in the status and add its actions. A
step that ends the job returns the reason, its verdict; otherwise it returns "" or None.
"""

from __future__ import annotations

from covey.core.msjob.actions import ReportPodGone
from covey.core.msjob.completion import count_restarts, end_job
from covey.core.msjob.failure_policy import PodFailureAction, decide_pod_failure
from covey.core.msjob.plan_builder import PlanBuilder
from covey.core.msjob.pod_state import PodState, describe_node_problems
from covey.core.msjob.reconcile_context import ReconcileContext
from covey.core.msjob.resize import REQUEST_RETRY_S, is_joining, is_leaving, roll_back_growth
from covey.core.msjob.scheduler_status import SchedulerStatus
from covey.core.msjob.spec import pod_name
from covey.core.msjob.status import FAILED, RESTARTING, JobStatus
from covey.core.msjob.timestamps import parse_timestamp
from covey.core.types import Phase

LATE_REPLACEMENT = "late"  # node problem of a replacement that did not run in time


def drop_finished_replacements(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Drop the notes about replacements that run or succeeded, and about pods that the job no longer has.

    Record an event for each replacement that has started, if the other workers had trained without its pod.
    """
    names = {name for _, _, name in context.expected_pods(status.world)}
    for name, note in list(status.replacements.items()):
        pod = context.pods.get(name)
        has_started = pod is not None and pod.uid != note["uid"] and (pod.running or pod.succeeded)
        if has_started or name not in names:
            status.drop_replacement(name)
        if has_started and note.get("without"):
            out.record_event("MSJobGrows", f"the replacement of {name} runs and joins the other workers")


def record_finished_pods(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Record the expected pods that succeeded, because they must not run again after their objects are garbage-collected."""
    existing = [context.pods[name] for _, _, name in context.expected_pods(status.world) if name in context.pods]
    status.add_finished_pods({pod.name for pod in existing if pod.succeeded and not is_abandoned(status, pod)})


def handle_failed_pods(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """Decide about expected pods that failed or must leave their node. Return the verdict if the job failed, else "".

    Such a pod of a scale-out rolls the scale-out back; that of a scale-in is left alone. If all workers failed and are ignored,
    the job fails.
    """
    job, ignored = context.job, []
    expected = list(context.expected_pods(status.world))
    joining = {name for _, _, name in expected if is_joining(context, status, name)}
    for role, _, name in expected:
        pod = context.pods.get(name)
        if pod is None:
            continue
        if is_abandoned(status, pod):
            out.delete_pod(pod, grace=_grace_period_s(context))  # recorded in an earlier pass
            continue
        if pod.succeeded:
            continue
        node_problem = _describe_node_problem(context, out, pod)
        if (not pod.failed and not node_problem) or is_leaving(context, status, name):
            continue
        if name in joining and not is_joining(context, status, name):
            continue  # another failed pod has rolled the scale-out back
        if name in joining:
            why = f"{name} failed with {pod.end_reason}" if pod.failed else f"{name} is {node_problem}"
            roll_back_growth(context, status, out, why)
            continue
        action, reason, message = decide_pod_failure(
            job,
            role,
            pod,
            restarts=count_restarts(context, status),
            faults=status.read_count("faults"),
            node_problem=node_problem,
            scheduler_status=_scheduler_status_outside(context, status, name),
        )
        if action is PodFailureAction.FAIL:
            return end_job(context, status, out, FAILED, reason, message)
        if action is PodFailureAction.IGNORE:
            ignored.append(name)
            if status.report_once("ignored", name):
                out.record_event(reason, message, warn=True)
            continue
        _replace_pods(context, status, out, pod, action, reason, message, node_problem=node_problem)
        if action is PodFailureAction.RESTART_ALL:
            break
    if ignored and len(ignored) == len(context.expected_workers(status.world)):
        return end_job(context, status, out, FAILED, "MSJobFailed", "every worker failed")
    return ""


def check_overdue_replacements(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """Restart all pods if a replacement does not run within wait-reschedule-timeout, in jobs with fault-scheduling.

    Instead fail the job, and return the verdict, if this late replacement is itself part of a restart of all pods, or if
    backoffLimit allows no further restart. A replacement is not late while the other workers train without it.
    """
    job, recovery = context.job, context.job.recovery
    if not recovery.is_enabled:
        return ""
    for name, note in status.replacements.items():
        late_at = (parse_timestamp(note["at"]) or context.now) + recovery.reschedule_timeout_s
        pod = context.pods.get(name)
        if _can_train_without(context, name):
            continue
        if context.now < late_at:
            out.requeue_at(late_at)
            continue
        why = f" ({pod.pending_reason})" if pod is not None and pod.pending_reason else ""
        message = (
            f"the replacement of {name} did not run within wait-reschedule-timeout {recovery.reschedule_timeout_s:g} s{why}"
        )
        if note.get("all") or (job.backoff_limit is not None and count_restarts(context, status) >= job.backoff_limit):
            return end_job(context, status, out, FAILED, "RescheduleTimeout", message)
        late = pod or PodState({"metadata": {"name": name, "uid": note["uid"]}}, job.main_container)
        _replace_pods(
            *(context, status, out, late, PodFailureAction.RESTART_ALL, "RescheduleTimeout"),
            f"{message}: all pods restart",
            node_problem=LATE_REPLACEMENT,
        )
        break
    return ""


def check_kubelet_restarts(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """Fail the job, and return the verdict, if the number of restarts, with those by the kubelet, exceeds backoffLimit.

    Otherwise record an event if this number has increased and the kubelet has restarted containers of existing pods.
    """
    total, limit = count_restarts(context, status), context.job.backoff_limit
    if limit is not None and total > limit:
        message = f"{total} restarts exceed backoffLimit {limit}"
        return end_job(context, status, out, FAILED, "BackoffLimitExceeded", message)
    if total > status.read_count("restartsTotal") and total > status.read_count("restarts"):
        names = ", ".join(sorted(pod.name for pod in context.pods.values() if pod.kubelet_restarts))
        message = f"{total} restarts so far; the kubelet restarted containers of {names}"
        out.record_event("ContainerRestarted", message, warn=True)
    return ""


def check_pending_pods(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """Fail the job, and return the verdict, if a pod is Pending or missing for pendingTimeoutSeconds; the message says why.

    If the pod belongs to a scale-out, roll that back instead. There is no limit for a replacement while the other workers train
    without it.
    """
    timeout_s = context.job.pending_timeout_s
    if timeout_s is None:
        return ""
    started = status.read_time("startTime") or context.now
    for _, _, name in context.expected_pods(status.world):
        pod = context.pods.get(name)
        if name in status.finished_pods or (pod is not None and (pod.phase != "Pending" or pod.is_terminating)):
            continue
        if name in status.replacements and _can_train_without(context, name):
            continue
        replaced_at = parse_timestamp(status.replacements.get(name, {}).get("at"))
        since = pod.created_at if pod is not None else max(started, replaced_at or 0.0)
        late_at = (since or context.now) + timeout_s
        if context.now >= late_at:
            why = (pod.pending_reason if pod is not None else "it could not be created") or "no reason is known"
            message = f"{name} was Pending for more than {timeout_s:g} s: {why}"
            if is_joining(context, status, name):
                roll_back_growth(context, status, out, message)
                return ""
            return end_job(context, status, out, FAILED, "PendingTimeout", message)
        out.requeue_at(late_at)
    return ""


def report_gone_pods(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Report replaced pods to the job's scheduler while it lists them, so that it need not wait for their node timeout.

    Pods that may still run, and those of a restart of all pods, are not reported.
    """
    scheduler = context.observed.scheduler_status
    expected = scheduler.pod_uids if scheduler is not None else frozenset()
    for name, note in status.replacements.items():
        pod = context.pods.get(name)
        runs = pod is not None and pod.uid == note["uid"] and not pod.failed and not _is_node_lost(context, out, pod)
        if note["uid"] in expected and not (runs or note.get("all")):
            out.add(ReportPodGone(name, note["uid"]))
            out.requeue_at(context.now + REQUEST_RETRY_S)


def trains_without_replaced(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> bool:
    """Return whether training continues without the pods that are being replaced; also True if no pod is being replaced.

    Record an event for each pod when training first continues without it.
    """
    for name, note in status.replacements.items():
        if not _can_train_without(context, name):
            return False
        if not note.get("without"):
            status.mark_trained_without(name)
            message = f"elastic-training: the other workers continue without {name} until its replacement runs"
            out.record_event("MSJobShrunk", message, warn=True)
    return True


def unhealthy_nodes(context: ReconcileContext) -> list[str]:
    """Return the sorted names of nodes with a problem such as DiskPressure, which new pods should avoid.

    Return [] if the job has no subHealthyStrategy in use, or if the operator may not list nodes.
    """
    if not context.job.recovery.subhealthy_strategy:
        return []
    return sorted(name for name, node in (context.observed.nodes or {}).items() if describe_node_problems(node))


def is_abandoned(status: JobStatus, pod: PodState) -> bool:
    """Return whether a pod's outcome is ignored: it is being replaced, or is terminating and predates the job's last start."""
    started = status.read_time("startTime") or 0.0
    is_from_earlier_start = pod.is_terminating and pod.created_at is not None and pod.created_at < started
    return is_from_earlier_start or status.replacements.get(pod.name, {}).get("uid") == pod.uid


def _scheduler_status_outside(context: ReconcileContext, status: JobStatus, name: str) -> SchedulerStatus | None:
    """Return the status of the job's scheduler; None if it is unknown, or no scheduler runs outside this pod."""
    first = context.address_role(status.world)
    is_outside = first is not None and name != pod_name(context.job.name, first.key, 0)
    return context.observed.scheduler_status if is_outside else None


def _can_train_without(context: ReconcileContext, name: str) -> bool:
    """Return whether elastic-training is set and the scheduler is READY without a worker in this pod."""
    scheduler = context.observed.scheduler_status
    return (
        context.job.recovery.is_elastic
        and scheduler is not None
        and scheduler.phase is Phase.READY
        and not scheduler.workers_in_pods({name})
    )


def _describe_node_problem(context: ReconcileContext, out: PlanBuilder, pod: PodState) -> str:
    """Return why a pod must leave its node, such as "on the lost node n"; "" if it need not."""
    if _is_node_lost(context, out, pod):
        return f"on the lost node {pod.node_name}"
    if not context.job.recovery.subhealthy_strategy or pod.is_terminating or pod.failed:
        return ""
    problems = describe_node_problems((context.observed.nodes or {}).get(pod.node_name) or {})
    return f"on the unhealthy node {pod.node_name} ({problems})" if problems else ""


def _is_node_lost(context: ReconcileContext, out: PlanBuilder, pod: PodState) -> bool:
    """Return whether a pod's node has been not ready for the job's node-lost timeout; False if the pod has ended.

    The timeout starts at the pod's creation or later, also if the node does not exist. While it runs, requeue for its end.
    """
    since = pod.node_lost_since(context.observed.nodes)
    if since is None or pod.succeeded or pod.failed:
        return False
    lost_at = max(since, pod.created_at or 0.0) + context.job.node_lost_timeout_s
    if context.now < lost_at:
        out.requeue_at(lost_at)
    return context.now >= lost_at


def _grace_period_s(context: ReconcileContext) -> int | None:
    return 0 if context.job.recovery.fault_scheduling == "force" else None


def _replace_pods(
    context: ReconcileContext,
    status: JobStatus,
    out: PlanBuilder,
    pod: PodState,
    action: PodFailureAction,
    reason: str,
    message: str,
    *,
    node_problem: str,
) -> None:
    """Record and delete a pod for replacement; for RESTART_ALL, also all other pods that have not succeeded.

    A replacement avoids its old node if the action is MOVE, or if that node has the `node_problem`.
    """
    job, restarts_all = context.job, action is PodFailureAction.RESTART_ALL
    is_lost = node_problem == LATE_REPLACEMENT or _is_node_lost(context, out, pod)
    status.count_restarts(1)
    if not (node_problem or pod.disrupted):
        status.count_fault()
    replaced = [pod]
    if restarts_all:
        replaced = [one for one in context.pods.values() if not one.succeeded or one.name == pod.name]
        status.restart(job.desired_replicas)
        if pod.name not in context.pods:  # not created in time: if it is late again, the job fails
            status.add_replacement(pod.name, pod.uid, in_restart=True)
    for one in replaced:
        status.count_restarts(one.kubelet_restarts)  # the pod's own count is deleted with it
        must_avoid = action is PodFailureAction.MOVE or (node_problem and one.node_name == pod.node_name)
        status.add_replacement(one.name, one.uid, in_restart=restarts_all, avoided_node=one.node_name if must_avoid else "")
        is_forced = (is_lost and one is pod) or (node_problem and job.recovery.subhealthy_strategy == "forceExit")
        out.delete_pod(one, grace=0 if is_forced else _grace_period_s(context))
    out.record_event(reason, message, warn=True)
    status.set_condition(RESTARTING, reason, message)
