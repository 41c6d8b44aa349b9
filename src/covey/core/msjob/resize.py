"""Resizing of a job whose spec has a new number of pods.

There are four ways, tried in this order; each records an event:

1. Jobs with dynamic workers, and jobs of which no pod has started, take the new number immediately.
2. If only the number of Worker pods changes (from two or more worker processes, and not to 0 workers), covey's scheduler
   answers and its world is resizable, the job is resized without a restart. To scale out, new pods are created and their
   workers join the world; if one of them fails, the scale-out is rolled back and not tried again. To scale in, the scheduler
   releases the workers of the last pods, which are then deleted.
3. Otherwise all pods restart with the new number, if the job's policies allow restarts and no pod is being replaced.
4. Otherwise the job keeps its size.

`scaling_status` has the states of a resize.
"""

from __future__ import annotations

from collections.abc import Mapping

from covey.core.msjob.actions import AnnounceWorkers, ReleaseWorkers
from covey.core.msjob.plan_builder import PlanBuilder
from covey.core.msjob.reconcile_context import ReconcileContext
from covey.core.msjob.scaling_status import ScalingState
from covey.core.msjob.scheduler_status import SchedulerStatus
from covey.core.msjob.spec import ReplicaDuty, RestartPolicy, pod_name
from covey.core.msjob.status import RESTARTING, JobStatus
from covey.core.plurals import count_noun

WORKER_ROLE = "Worker"
REQUEST_RETRY_S = 5.0  # seconds after which a request to the job's scheduler is repeated until it takes effect
NO_SCHEDULER_AFTER_S = 30.0  # seconds in Running without an answer of a scheduler, after which the job counts as one without it
RESIZABLE_TIMEOUT_S = 90.0  # seconds for a scheduler that has answered to become resizable


def scale_workers(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """If the numbers of pods in status and spec differ, advance the resize by one step.

    If they agree, end a scale-out of which all workers have joined.
    """
    world, wanted, scaling = status.world, context.job.desired_replicas, status.scaling
    if scaling.target not in (None, wanted.get(WORKER_ROLE)):
        scaling.reset()  # the spec changed after the resize began
    if world == wanted:
        return _finish_growth_if_joined(context, status, out)
    started = any(pod.phase != "Pending" for pod in context.pods.values())
    if context.job.has_dynamic_workers or not started:
        return _apply_new_size(context, status, out)
    if scaling.state is ScalingState.FAILED:
        return _announce_workers(context, status, out)
    if (
        WORKER_ROLE not in wanted
        or {**world, WORKER_ROLE: 0} != {**wanted, WORKER_ROLE: 0}
        or context.count_workers(world) * context.job.processes_per_pod <= 1
        or context.count_workers(wanted) < 1
    ):
        why = "only the Worker replicas of a job with two or more worker processes can change, and not to 0 workers"
        return _restart_or_keep_size(context, status, out, why)
    if scaling.state is ScalingState.NONE:
        scaling.wait(wanted[WORKER_ROLE])
    scheduler = context.observed.scheduler_status
    if scheduler is None or not scheduler.resizable:
        return _await_scheduler(context, status, out)
    if wanted[WORKER_ROLE] > world[WORKER_ROLE]:
        return _start_growth(context, status, out)
    return _shrink_workers(context, status, out, scheduler)


def is_joining(context: ReconcileContext, status: JobStatus, name: str) -> bool:
    """Return whether this is one of the new pods of a scale-out in progress."""
    scaling = status.scaling
    return scaling.state is ScalingState.GROWING and name in _worker_pods_from(context, status, scaling.previous)


def is_leaving(context: ReconcileContext, status: JobStatus, name: str) -> bool:
    """Return whether this is one of the pods that a scale-in in progress removes."""
    scaling = status.scaling
    return scaling.state is ScalingState.SHRINKING and name in _worker_pods_from(context, status, scaling.target or 0)


def roll_back_growth(context: ReconcileContext, status: JobStatus, out: PlanBuilder, why: str) -> None:
    """Roll the scale-out in progress back to the previous number of Worker pods; a later step deletes the new ones.

    The scale-out is not retried until the spec has another number.
    """
    previous, target = status.scaling.previous, status.scaling.target
    for name in _worker_pods_from(context, status, previous):
        status.drop_replacement(name)
    status.resize({**status.world, WORKER_ROLE: previous})
    status.scaling.fail(why)
    out.record_event("ScaleFailed", f"the scale-out to {count_noun(target or 0, 'pod')} is rolled back: {why}", warn=True)


def _worker_pods_from(context: ReconcileContext, status: JobStatus, number: int) -> set[str]:
    """Return the names of Worker pods from the index `number` to the highest index of any expected Worker or existing pod.

    Some of these pods may not exist.
    """
    last = max(status.world.get(WORKER_ROLE, 0), 1 + max((pod.index for pod in context.pods.values()), default=0))
    return {pod_name(context.job.name, WORKER_ROLE, index) for index in range(number, last)}


def _apply_new_size(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    world, wanted = status.world, context.job.desired_replicas
    status.drop_formed_world()
    status.resize(wanted)
    if not context.job.has_dynamic_workers:  # the variables of pods contain the numbers
        for pod in context.pods.values():
            out.delete_pod(pod)
    out.record_event("MSJobScaled", f"the job was resized from {describe_world(world)} to {describe_world(wanted)}")


def _await_scheduler(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Wait until a scheduler answers and is resizable; when the time for that has passed, restart or keep the size."""
    late_at = (status.running_since or context.now) + NO_SCHEDULER_AFTER_S
    why = "the job has no covey scheduler that answers"
    if status.has_progress:
        late_at = (status.scaling.read_time("since") or context.now) + RESIZABLE_TIMEOUT_S
        why = f"its script was not resizable within {RESIZABLE_TIMEOUT_S:g} s (no covey.Loop has finished a step)"
    if context.now < late_at:
        return out.requeue_at(late_at)
    return _restart_or_keep_size(context, status, out, why)


def _restart_or_keep_size(context: ReconcileContext, status: JobStatus, out: PlanBuilder, why: str) -> None:
    """Restart all pods with the new numbers if the job's policies allow it and no pod is being replaced.

    Otherwise keep the size, and record one event.
    """
    job, wanted = context.job, describe_world(context.job.desired_replicas) or "no pod"
    request = f"cannot resize the running job from {describe_world(status.world)} to {wanted}: {why}"
    may_restart = (
        all(role.restart_policy is not RestartPolicy.NEVER for role in job.roles_with_duty(ReplicaDuty.WORKER))
        or job.recovery.is_enabled
    )
    if may_restart and not status.replacements:
        return _restart_all(context, status, out, f"{request}; all pods restart with the new number")
    message = f"{request}; to restart the job with the new number, set runPolicy.suspend to true and then to false"
    if status.scaling.warn_unsupported(message):
        out.record_event("ScaleUnsupported", message, warn=True)
    return None


def _restart_all(context: ReconcileContext, status: JobStatus, out: PlanBuilder, message: str) -> None:
    """Record a restart of all pods with the numbers in the spec; later steps delete and create the pods.

    This restart is not counted; the kubelet's restarts of the present pods stay counted.
    """
    status.count_restarts(sum(pod.kubelet_restarts for pod in context.pods.values()))
    status.restart(context.job.desired_replicas)
    names = {name for _, _, name in context.expected_pods(status.world)}
    for pod in context.pods.values():
        if pod.name in names:
            status.add_replacement(pod.name, pod.uid, in_restart=True)
    out.record_event("MSJobScaled", message)
    status.set_condition(RESTARTING, "MSJobScaled", message)


def _start_growth(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    wanted, previous = context.job.desired_replicas, status.world[WORKER_ROLE]
    status.keep_formed_world()
    status.resize(wanted)
    status.scaling.grow(previous)
    _announce_workers(context, status, out)
    names = ", ".join(sorted(_worker_pods_from(context, status, previous)))
    out.record_event(
        "MSJobScaling",
        f"scaling out from {previous} to {count_noun(wanted[WORKER_ROLE], 'pod')} without a restart: {names} join",
    )


def _finish_growth_if_joined(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    scaling, scheduler = status.scaling, context.observed.scheduler_status
    _announce_workers(context, status, out)
    if scaling.state is not ScalingState.GROWING:
        if scaling.read_time("said") is None:
            scaling.reset()
    elif scheduler is not None and all(
        scheduler.workers_in_pods({name}) for name in _worker_pods_from(context, status, scaling.previous)
    ):
        out.record_event("MSJobScaled", f"the job was resized to {describe_world(status.world)} without a restart")
        scaling.reset()


def _announce_workers(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Send the scheduler the number of workers that may join; repeat that every `REQUEST_RETRY_S`.

    Send nothing while the scheduler is unknown or not resizable, has no target, or has the expected number of workers as its
    target, or while its world is larger than that number.
    """
    scaling, scheduler = status.scaling, context.observed.scheduler_status
    workers = context.count_workers(status.world) * context.job.processes_per_pod
    if (
        scheduler is None
        or not scheduler.resizable
        or scheduler.target_workers in (0, workers)
        or scheduler.world_size > workers
    ):
        return scaling.end_announcement()
    announced_at = scaling.read_time("said")
    if announced_at is None or context.now >= announced_at + REQUEST_RETRY_S:
        scaling.announce(context.job.desired_replicas.get(WORKER_ROLE))
        out.add(AnnounceWorkers(workers - scheduler.world_size))
    return out.requeue_at((scaling.read_time("said") or context.now) + REQUEST_RETRY_S)


def _shrink_workers(context: ReconcileContext, status: JobStatus, out: PlanBuilder, scheduler: SchedulerStatus) -> None:
    """Request that the scheduler releases the workers of the last pods, again every `REQUEST_RETRY_S`.

    When these workers have left, record the new number of pods; a later step deletes the pods.
    """
    world, wanted, scaling = status.world, context.job.desired_replicas, status.scaling
    leaving = _worker_pods_from(context, status, wanted[WORKER_ROLE])
    workers = scheduler.workers_in_pods(leaving)
    if workers:
        requested_at = scaling.read_time("asked")
        if requested_at is None:
            out.record_event(
                "MSJobScaling",
                f"scaling in from {world[WORKER_ROLE]} to {count_noun(wanted[WORKER_ROLE], 'pod')} without a restart: "
                f"{', '.join(workers[:8])} leave",
            )
        if requested_at is None or context.now >= requested_at + REQUEST_RETRY_S:
            scaling.request_release()
            out.add(ReleaseWorkers(tuple(workers)))
        return out.requeue_at((scaling.read_time("asked") or context.now) + REQUEST_RETRY_S)
    status.keep_formed_world()
    status.resize(wanted)
    status.drop_finished_pods(leaving)
    message = f"the job was resized from {describe_world(world)} to {describe_world(wanted)} without a restart"
    out.record_event("MSJobScaled", message)
    return scaling.reset()


def describe_world(world: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {key}" for key, number in world.items() if number)
