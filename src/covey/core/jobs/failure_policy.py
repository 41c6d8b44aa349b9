"""What follows a failed pod: nothing, a replacement, everyone anew, or the end of the job; and why.

Two tables meet here. MSJob's restartPolicy says which pods come back. MindCluster's labels say more: `fault-scheduling` turns
rescheduling on, `recover-strategy: recover` replaces the one pod on another node while the others wait, `pod-rescheduling: on`
replaces the one pod, else everyone starts anew; `elastic-training` replaces it while the others go on without it;
`fault-retry-times` limits how often the program itself may fail. Every restart counts against backoffLimit.
"""

from __future__ import annotations

from enum import StrEnum

from covey.core.jobs.pod_state import RETRYABLE_EXIT_CODES, PodState
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.core.jobs.spec import Job, ReplicaDuty, ReplicaSpec, RestartPolicy

SIGNAL_EXIT_BASE = 128  # exit codes above it are signals


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
    """Return the action, a reason in one word and a message. `restarts` and `faults` are those before this one.

    `node_problem`: why the pod must leave its node, as "on the lost node n"; "" if it need not. `scheduler_status`: of the
    job's scheduler, if it is known and the scheduler is not in this pod.
    """
    where = node_problem and f" {node_problem}"
    what = f"{pod.name}{where} failed with {pod.end_reason}" if pod.failed else f"{pod.name} is{where}"
    if (
        "recover-in-place" in job.recovery.strategies
        and role.duty is ReplicaDuty.WORKER
        and pod.failed
        and (pod.exit_code or 0) > SIGNAL_EXIT_BASE
    ):
        what += " (recover-in-place: no supervisor was left in the container, neither covey run's nor covey.init()'s)"
    is_fault = not (pod.disrupted or node_problem)
    if is_fault and (pod.exit_code or 0) <= SIGNAL_EXIT_BASE:
        scheduler_status = None  # a program that failed took its cluster along
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
            why = "recover: the scheduler's journal went with its pod, so all pods start anew"
            return PodFailureAction.RESTART_ALL, "MSJobRestarting", why
        if (
            "recover" in recovery.strategies
            and role.duty is ReplicaDuty.WORKER
            and role.is_supervised
            and not (scheduler_status and scheduler_status.supports_healing)
        ):
            why = "recover: whether the others would wait for this pod of covey run is not known, so all pods start anew"
            return PodFailureAction.RESTART_ALL, "MSJobRestarting", why
        if "recover" in recovery.strategies:
            return (
                PodFailureAction.MOVE,
                "MSJobRestarting",
                "recover: a replacement starts on another node, the others wait for it",
            )
        if (
            recovery.is_elastic
            and role.duty is ReplicaDuty.WORKER
            and scheduler_status is not None
            and scheduler_status.has_finished_step
        ):
            why = "elastic-training: the others go on without it, and its replacement joins them when it has a place"
            return PodFailureAction.REPLACE, "MSJobRestarting", why
        if recovery.fault_retry_limit is not None or not is_fault:
            if recovery.pod_rescheduling:
                return PodFailureAction.REPLACE, "MSJobRestarting", "pod-rescheduling: the pod is replaced, the others go on"
            return PodFailureAction.RESTART_ALL, "MSJobRestarting", "fault-scheduling: all pods start anew"
    if role.restart_policy is RestartPolicy.EXIT_CODE:
        if pod.exit_code is None or pod.exit_code in RETRYABLE_EXIT_CODES:
            return PodFailureAction.REPLACE, "MSJobRestarting", "restartPolicy ExitCode: it is worth another try"
        return PodFailureAction.FAIL, "MSJobFailed", "restartPolicy ExitCode: this code is permanent"
    if role.restart_policy in (RestartPolicy.ALWAYS, RestartPolicy.ON_FAILURE):
        return PodFailureAction.REPLACE, "MSJobRestarting", f"restartPolicy {role.restart_policy}: it is replaced"
    if job.has_dynamic_workers and role.duty is ReplicaDuty.WORKER:
        return PodFailureAction.IGNORE, "WorkerLost", "enableDynamicWorker: the others go on without it"
    return PodFailureAction.FAIL, "MSJobFailed", "restartPolicy Never"
