"""What follows a failed pod: nothing, a replacement, everyone anew, or the end of the job; and why.

Two tables meet here. MSJob's restartPolicy says which pods come back. MindCluster's labels say more: `fault-scheduling` turns
rescheduling on, `recover-strategy: recover` replaces the one pod on another node while the others wait, `pod-rescheduling: on`
replaces the one pod, else everyone starts anew; `elastic-training` replaces it while the others go on without it;
`fault-retry-times` limits how often the program itself may fail. Every restart counts against backoffLimit.
"""

from __future__ import annotations

from enum import StrEnum

from covey.core.jobs.pod_state import RETRYABLE, Seen
from covey.core.jobs.scheduler_status import Live
from covey.core.jobs.spec import Duty, Job, Restart, Role

SIGNAL = 128  # exit codes above it are signals


class After(StrEnum):
    IGNORE = "ignore"
    REPLACE = "replace"
    MOVE = "move"  # replaced on another node
    RESTART_ALL = "restart all"
    FAIL = "fail"


def decide(
    job: Job, role: Role, pod: Seen, *, restarts: int, faults: int, where: str, live: Live | None = None
) -> tuple[After, str, str]:
    """The verdict, a reason in one word and a sentence. `restarts` and `faults` are those before this one.

    `where`: what is wrong with its node, as "on the lost node n"; "" where nothing is. `live`: the cluster inside, where
    it is known and does not go with this pod.
    """
    where = where and f" {where}"
    what = f"{pod.name}{where} failed with {pod.why_ended}" if pod.failed else f"{pod.name} is{where}"
    if (
        "recover-in-place" in job.recovery.strategies
        and role.duty is Duty.WORKER
        and pod.failed
        and (pod.exit_code or 0) > SIGNAL
    ):
        what += " (recover-in-place: no supervisor was left in the container, neither covey run's nor covey.init()'s)"
    program = not (pod.disrupted or where)
    if program and (pod.exit_code or 0) <= SIGNAL:
        live = None  # a program that failed took its cluster along
    after, word, why = _policy(job, role, pod, faults=faults, program=program, live=live)
    if after in (After.IGNORE, After.FAIL):
        return after, word, f"{what}: {why}"
    if job.backoff is not None and restarts >= job.backoff:
        return After.FAIL, "BackoffLimitExceeded", f"{what}: backoffLimit {job.backoff} allows no further restart"
    return after, word, f"{what}: {why}"


def _policy(job: Job, role: Role, pod: Seen, *, faults: int, program: bool, live: Live | None) -> tuple[After, str, str]:
    recovery = job.recovery
    if recovery.on:
        if program and recovery.retries is not None and faults >= recovery.retries:
            return After.FAIL, "FaultRetryTimesExceeded", f"fault-retry-times {recovery.retries} allows no further restart"
        if "recover" in recovery.strategies and role.duty is Duty.SCHEDULER and not role.keeps:
            why = "recover: the scheduler's journal went with its pod, so all pods start anew"
            return After.RESTART_ALL, "MSJobRestarting", why
        if "recover" in recovery.strategies and role.duty is Duty.WORKER and role.supervised and not (live and live.heals):
            why = "recover: whether the others would wait for this pod of covey run is not known, so all pods start anew"
            return After.RESTART_ALL, "MSJobRestarting", why
        if "recover" in recovery.strategies:
            return After.MOVE, "MSJobRestarting", "recover: a replacement starts on another node, the others wait for it"
        if recovery.elastic and role.duty is Duty.WORKER and live is not None and live.trains:
            why = "elastic-training: the others go on without it, and its replacement joins them when it has a place"
            return After.REPLACE, "MSJobRestarting", why
        if recovery.retries is not None or not program:
            if recovery.pod_level:
                return After.REPLACE, "MSJobRestarting", "pod-rescheduling: the pod is replaced, the others go on"
            return After.RESTART_ALL, "MSJobRestarting", "fault-scheduling: all pods start anew"
    if role.restart is Restart.EXIT_CODE:
        if pod.exit_code is None or pod.exit_code in RETRYABLE:
            return After.REPLACE, "MSJobRestarting", "restartPolicy ExitCode: it is worth another try"
        return After.FAIL, "MSJobFailed", "restartPolicy ExitCode: this code is permanent"
    if role.restart in (Restart.ALWAYS, Restart.ON_FAILURE):
        return After.REPLACE, "MSJobRestarting", f"restartPolicy {role.restart}: it is replaced"
    if job.dynamic and role.duty is Duty.WORKER:
        return After.IGNORE, "WorkerLost", "enableDynamicWorker: the others go on without it"
    return After.FAIL, "MSJobFailed", "restartPolicy Never"
