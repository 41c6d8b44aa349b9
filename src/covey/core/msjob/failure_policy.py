"""Decision about a failed pod: ignore it, replace it, restart all pods, or fail the job.

If `fault-scheduling` is grace or force, MindCluster's labels are applied first, in this order:

    fault-retry-times                    number of failures of the program that are followed by a restart; then the job fails
    recover-strategy: recover            replace the pod on another node while the other pods wait; restart all pods if they
                                         may not be able to wait
    recover-strategy: elastic-training   replace a worker's pod while the other workers continue without it, if they can
    pod-rescheduling: on                 replace the pod; otherwise all pods restart

The last line applies to failures of the program only if fault-retry-times is set. If no label applies, the role's restartPolicy
decides; with Never the job fails, except that enableDynamicWorker ignores a failed worker. backoffLimit limits all restarts.
"""

from __future__ import annotations

from enum import StrEnum

from covey.core.msjob.pod_state import RETRYABLE_EXIT_CODES, PodState
from covey.core.msjob.scheduler_status import SchedulerStatus
from covey.core.msjob.spec import Job, ReplicaDuty, ReplicaSpec, RestartPolicy

SIGNAL_EXIT_BASE = 128  # an exit code above it is this number plus that of a signal


class PodFailureAction(StrEnum):
    IGNORE = "ignore"
    REPLACE = "replace"
    MOVE = "move"  # replaced on another node
    RESTART_ALL = "restart all"
    FAIL = "fail"


def decide_pod_failure(
    job: Job,
    role: ReplicaSpec,
    pod: PodState,
    *,
    restarts: int,
    faults: int,
    node_problem: str,
    scheduler_status: SchedulerStatus | None = None,
) -> tuple[PodFailureAction, str, str]:
    """Return the action, and a CamelCase reason and a message for the event.

    `restarts` (of any kind) and `faults` (failures of the program) are the counts before this failure. `node_problem` says why
    the pod must leave its node, such as "on the lost node n"; "" if it can stay. `scheduler_status` is None if it is unknown or
    the scheduler runs in this pod.
    """
    where = node_problem and f" {node_problem}"
    what = f"{pod.name}{where} failed with {pod.end_reason}" if pod.failed else f"{pod.name} is{where}"
    if (
        "recover-in-place" in job.recovery.strategies
        and role.duty is ReplicaDuty.WORKER
        and pod.failed
        and (pod.exit_code or 0) > SIGNAL_EXIT_BASE
    ):
        what += " (recover-in-place was not possible: no supervisor, covey run or covey.init(), was left in the container)"
    is_fault = not (pod.disrupted or node_problem)
    if is_fault and (pod.exit_code or 0) <= SIGNAL_EXIT_BASE:
        scheduler_status = None  # the program itself failed: its cluster may have ended with it
    action, reason, why = _choose_action(job, role, pod, faults=faults, is_fault=is_fault, scheduler_status=scheduler_status)
    if action in (PodFailureAction.IGNORE, PodFailureAction.FAIL):
        return action, reason, f"{what}: {why}"
    if job.backoff_limit is not None and restarts >= job.backoff_limit:
        return (
            PodFailureAction.FAIL,
            "BackoffLimitExceeded",
            f"{what}: backoffLimit {job.backoff_limit} allows no further restart",
        )
    return action, reason, f"{what}: {why}"


def _choose_action(
    job: Job, role: ReplicaSpec, pod: PodState, *, faults: int, is_fault: bool, scheduler_status: SchedulerStatus | None
) -> tuple[PodFailureAction, str, str]:
    recovery = job.recovery
    if recovery.is_enabled:
        if is_fault and recovery.fault_retry_limit is not None and faults >= recovery.fault_retry_limit:
            return (
                PodFailureAction.FAIL,
                "FaultRetryTimesExceeded",
                f"fault-retry-times {recovery.fault_retry_limit} allows no further restart",
            )
        if "recover" in recovery.strategies and role.duty is ReplicaDuty.SCHEDULER and not role.keeps_recovery_files:
            why = "recover: the scheduler's journal was lost with its pod, so all pods restart"
            return PodFailureAction.RESTART_ALL, "MSJobRestarting", why
        if (
            "recover" in recovery.strategies
            and role.duty is ReplicaDuty.WORKER
            and role.is_supervised
            and not (scheduler_status and scheduler_status.supports_healing)
        ):
            why = "recover: it is unknown whether the other workers wait for this covey run pod, so all pods restart"
            return PodFailureAction.RESTART_ALL, "MSJobRestarting", why
        if "recover" in recovery.strategies:
            return (
                PodFailureAction.MOVE,
                "MSJobRestarting",
                "recover: a replacement starts on another node while the other pods wait",
            )
        if (
            recovery.is_elastic
            and role.duty is ReplicaDuty.WORKER
            and scheduler_status is not None
            and scheduler_status.has_finished_step
        ):
            why = "elastic-training: the other workers continue without it, and its replacement joins once it runs"
            return PodFailureAction.REPLACE, "MSJobRestarting", why
        if recovery.fault_retry_limit is not None or not is_fault:
            if recovery.pod_rescheduling:
                why = "pod-rescheduling: the pod is replaced, the other pods keep running"
                return PodFailureAction.REPLACE, "MSJobRestarting", why
            return PodFailureAction.RESTART_ALL, "MSJobRestarting", "fault-scheduling: all pods restart"
    if role.restart_policy is RestartPolicy.EXIT_CODE:
        if pod.exit_code is None or pod.exit_code in RETRYABLE_EXIT_CODES:
            return PodFailureAction.REPLACE, "MSJobRestarting", "restartPolicy ExitCode: the failure is retryable"
        return PodFailureAction.FAIL, "MSJobFailed", "restartPolicy ExitCode: this exit code is permanent"
    if role.restart_policy in (RestartPolicy.ALWAYS, RestartPolicy.ON_FAILURE):
        return PodFailureAction.REPLACE, "MSJobRestarting", f"restartPolicy {role.restart_policy}: the pod is replaced"
    if job.has_dynamic_workers and role.duty is ReplicaDuty.WORKER:
        return PodFailureAction.IGNORE, "WorkerLost", "enableDynamicWorker: the other workers continue without it"
    return PodFailureAction.FAIL, "MSJobFailed", "restartPolicy Never"
