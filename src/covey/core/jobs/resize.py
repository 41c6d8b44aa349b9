"""Another number of pods is asked for: may the job have it while it runs, and how?

Four ways, tried in this order. Dynamic workers, and jobs of which nothing runs yet, simply have the new number. A training that
covey runs changes its size without a restart: to grow, pods are created whose workers join the world; to shrink, the scheduler
lets the workers of the last pods go, and then the pods go. Where no such scheduler answers, or its program cannot do it, all
pods start anew with the new number if the job's policies allow restarts; else the job stays as it is. Each records an event.

`scaling` has the states of a resize.
"""

from __future__ import annotations

from collections.abc import Mapping

from covey.core.jobs.actions import AnnounceWorkers, ReleaseWorkers
from covey.core.jobs.plan_builder import PlanBuilder
from covey.core.jobs.reconcile_context import ReconcileContext
from covey.core.jobs.scaling import ScalingState
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.core.jobs.spec import ReplicaDuty, RestartPolicy, pod_name
from covey.core.jobs.status import RESTARTING, JobStatus
from covey.core.plurals import count_noun

WORKER_ROLE = "Worker"
REQUEST_RETRY_S = 5.0  # a request to the job's scheduler that has shown no effect is repeated
NO_SCHEDULER_AFTER_S = 30.0  # a job that has run this long without a status of its scheduler has none that answers
RESIZABLE_TIMEOUT_S = 90.0  # for a scheduler that answers to come to the point at which its world can change


def scale_workers(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Bring the numbers of pods closer to those of the spec."""
    world, wanted, scaling = status.world, context.job.desired_replicas, status.scaling
    if scaling.target not in (None, wanted.get(WORKER_ROLE)):
        scaling.reset()  # the spec has changed since
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
        why = "only workers of a world of several can become more or fewer while they run"
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
    """Return whether this pod belongs to a growth under way: its workers are not in the world yet."""
    scaling = status.scaling
    return scaling.state is ScalingState.GROWING and name in _worker_pods_from(context, status, scaling.previous)


def is_leaving(context: ReconcileContext, status: JobStatus, name: str) -> bool:
    """Return whether the scheduler was asked to release the workers of this pod."""
    scaling = status.scaling
    return scaling.state is ScalingState.SHRINKING and name in _worker_pods_from(context, status, scaling.target or 0)


def roll_back_growth(context: ReconcileContext, status: JobStatus, out: PlanBuilder, why: str) -> None:
    """Take a growth back: the others train on as they were, until the spec has another number."""
    previous, target = status.scaling.previous, status.scaling.target
    for name in _worker_pods_from(context, status, previous):
        status.drop_replacement(name)
    status.resize({**status.world, WORKER_ROLE: previous})
    status.scaling.fail(why)
    out.record_event("ScaleFailed", f"the growth to {count_noun(target or 0, 'pod')} is taken back: {why}", warn=True)


def _worker_pods_from(context: ReconcileContext, status: JobStatus, number: int) -> set[str]:
    """Return the names of Worker pods from that number on, of those that exist or are expected."""
    last = max(status.world.get(WORKER_ROLE, 0), 1 + max((pod.index for pod in context.pods.values()), default=0))
    return {pod_name(context.job.name, WORKER_ROLE, index) for index in range(number, last)}


def _apply_new_size(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Take the new numbers at once: no pod runs yet, or each worker trains alone."""
    world, wanted = status.world, context.job.desired_replicas
    status.drop_formed_world()
    status.resize(wanted)
    if not context.job.has_dynamic_workers:  # every pod is created again, with the new numbers
        for pod in context.pods.values():
            out.delete_pod(pod)
    out.record_event("MSJobScaled", f"the job has {describe_world(wanted)} now, it had {describe_world(world)}")


def _await_scheduler(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Wait until the job's scheduler answers and its world can change; after a timeout, do without it."""
    late_at = (status.running_since or context.now) + NO_SCHEDULER_AFTER_S
    why = "no scheduler of covey is heard in it"
    if status.has_progress:
        late_at = (status.scaling.read_time("since") or context.now) + RESIZABLE_TIMEOUT_S
        why = "its program does not come to a point at which its world could change (a covey.Loop that has finished a step)"
    if context.now < late_at:
        return out.requeue_at(late_at)
    return _restart_or_keep_size(context, status, out, why)


def _restart_or_keep_size(context: ReconcileContext, status: JobStatus, out: PlanBuilder, why: str) -> None:
    """Restart all pods with the new numbers if the job's policies allow it, else warn that the job keeps its size."""
    job, wanted = context.job, describe_world(context.job.desired_replicas) or "no pod"
    request = f"{wanted} is asked for where {describe_world(status.world)} run, and that cannot change live: {why}"
    may_restart = (
        all(role.restart_policy is not RestartPolicy.NEVER for role in job.roles_with_duty(ReplicaDuty.WORKER))
        or job.recovery.is_enabled
    )
    if may_restart and not status.replacements:
        return _restart_all(context, status, out, f"{request}; all pods start anew with the new number")
    message = f"{request}; runPolicy.suspend true and then false starts it anew with the new number"
    if status.scaling.warn_unsupported(message):
        out.record_event("ScaleUnsupported", message, warn=True)
    return None


def _restart_all(context: ReconcileContext, status: JobStatus, out: PlanBuilder, message: str) -> None:
    """Restart all pods. This was asked for, so it counts against no limit; the kubelet's restarts stay counted."""
    status.count_restarts(sum(pod.kubelet_restarts for pod in context.pods.values()))
    status.restart(context.job.desired_replicas)
    names = {name for _, _, name in context.expected_pods(status.world)}
    for pod in context.pods.values():
        if pod.name in names:
            status.add_replacement(pod.name, pod.uid, in_restart=True)
    out.record_event("MSJobScaled", message)
    status.set_condition(RESTARTING, "MSJobScaled", message)


def _start_growth(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Expect more pods. They get the numbers with which the cluster formed, because these identify it."""
    wanted, previous = context.job.desired_replicas, status.world[WORKER_ROLE]
    status.keep_formed_world()
    status.resize(wanted)
    status.scaling.grow(previous)
    _announce_workers(context, status, out)
    names = ", ".join(sorted(_worker_pods_from(context, status, previous)))
    out.record_event(
        "MSJobScaling",
        f"the world grows from {previous} to {count_noun(wanted[WORKER_ROLE], 'pod')}: {names} join it as it runs",
    )


def _finish_growth_if_joined(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """End the resize when the workers of all new pods are in the world."""
    scaling, scheduler = status.scaling, context.observed.scheduler_status
    _announce_workers(context, status, out)
    if scaling.state is not ScalingState.GROWING:
        if scaling.read_time("said") is None:
            scaling.reset()
    elif scheduler is not None and all(
        scheduler.workers_in_pods({name}) for name in _worker_pods_from(context, status, scaling.previous)
    ):
        out.record_event("MSJobScaled", f"the job has {describe_world(status.world)} now; nobody was restarted")
        scaling.reset()


def _announce_workers(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Send the scheduler the number of workers that may join: those of the pods that the job has and the world has not."""
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
    """Ask the scheduler to release the workers of the last pods; when they have left, take the new numbers."""
    world, wanted, scaling = status.world, context.job.desired_replicas, status.scaling
    leaving = _worker_pods_from(context, status, wanted[WORKER_ROLE])
    workers = scheduler.workers_in_pods(leaving)
    if workers:
        requested_at = scaling.read_time("asked")
        if requested_at is None:
            out.record_event(
                "MSJobScaling",
                f"the world shrinks from {world[WORKER_ROLE]} to {count_noun(wanted[WORKER_ROLE], 'pod')}: "
                f"{', '.join(workers[:8])} leave it",
            )
        if requested_at is None or context.now >= requested_at + REQUEST_RETRY_S:
            scaling.request_release()
            out.add(ReleaseWorkers(tuple(workers)))
        return out.requeue_at((scaling.read_time("asked") or context.now) + REQUEST_RETRY_S)
    status.keep_formed_world()
    status.resize(wanted)
    status.drop_finished_pods(leaving)
    message = f"the job has {describe_world(wanted)} now, it had {describe_world(world)}; nobody was restarted"
    out.record_event("MSJobScaled", message)
    return scaling.reset()


def describe_world(world: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {key}" for key, number in world.items() if number)
