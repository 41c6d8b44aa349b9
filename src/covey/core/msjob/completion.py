"""Steps of a reconcile pass that end a job, clean up after it by its cleanPodPolicy and delete it when its TTL expires.

A step that ends the pass returns the reason, its verdict; otherwise it returns "" or None.
"""

from __future__ import annotations

from covey.core.msjob.actions import DeleteJob, DeletePodGroup, DeleteService, TerminatePod
from covey.core.msjob.plan_builder import PlanBuilder
from covey.core.msjob.reconcile_context import ReconcileContext
from covey.core.msjob.spec import FORCE_DELETE_AFTER_S, CleanPodPolicy, ReplicaDuty, pod_name
from covey.core.msjob.status import FAILED, SUCCEEDED, JobStatus


def check_success(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """End the job as Succeeded, and return the verdict, if enough workers succeeded; otherwise return "".

    All workers are enough; worker 0 is enough unless successPolicy is AllWorkers. With dynamic workers, at least one is
    enough if the rest failed.
    """
    job, pods, finished = context.job, context.pods, status.finished_pods
    workers = context.expected_workers(status.world)
    done = [name for name in workers if name in finished]
    first = bool(workers) and workers[0] in finished and not job.needs_all_workers
    others_failed = job.has_dynamic_workers and all(name in done or (name in pods and pods[name].failed) for name in workers)
    if workers and (len(done) == len(workers) or first or (done and others_failed)):
        by = f"worker 0 ({workers[0]})" if first and len(done) < len(workers) else f"{len(done)} of {len(workers)} workers"
        return end_job(context, status, out, SUCCEEDED, "MSJobSucceeded", f"{by} succeeded")
    return ""


def check_deadline(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """End the job as Failed, and return the verdict, if activeDeadlineSeconds have passed since it started or resumed."""
    started, deadline_s = status.read_time("startTime"), context.job.deadline_s
    if deadline_s is None or started is None:
        return ""
    if context.now < started + deadline_s:
        out.requeue_at(started + deadline_s)
        return ""
    message = f"the job was active for more than activeDeadlineSeconds {deadline_s:g}"
    return end_job(context, status, out, FAILED, "DeadlineExceeded", message)


def end_job(context: ReconcileContext, status: JobStatus, out: PlanBuilder, condition: str, reason: str, message: str) -> str:
    """Record an event, set the final condition, Succeeded or Failed, and clean up. Return `message` as the verdict."""
    out.record_event(reason, message, warn=condition == FAILED)
    status.set_condition(condition, reason, message)
    apply_clean_policy(context, status, out)
    update_counters(context, status)
    return message


def apply_clean_policy(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Delete pods by the job's cleanPodPolicy, with their services, and the PodGroup.

    All: every pod; Running: those that have not ended. In both cases, services without a pod are deleted too. With None no pod
    is deleted, but the processes of a failed job are ended.
    """
    policy = context.job.clean_policy
    for pod in context.pods.values():
        has_ended = pod.succeeded or pod.failed
        if policy is CleanPodPolicy.ALL or (policy is CleanPodPolicy.RUNNING and not has_ended):
            out.delete_pod(pod)
            if pod.name in context.services:
                out.add(DeleteService(pod.name))
        elif (
            policy is CleanPodPolicy.NONE
            and status.has_condition(FAILED)
            and not (has_ended or pod.is_terminating or pod.termination_requested)
        ):
            out.add(TerminatePod(pod.name))
    if policy is not CleanPodPolicy.NONE:
        for name in context.services:
            if name not in context.pods:
                out.add(DeleteService(name))
    if context.has_pod_group:
        out.add(DeletePodGroup())


def force_deletions(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> None:
    """Force-delete pods that are still terminating FORCE_DELETE_AFTER_S after their deletion was due.

    If the pod's node is gone or not ready, the limit is the job's node-lost timeout instead.
    """
    for pod in context.pods.values():
        if pod.deletion_due_at is None:
            continue
        lost = pod.node_lost_since(context.observed.nodes) is not None
        force_at = pod.deletion_due_at + (context.job.node_lost_timeout_s if lost else FORCE_DELETE_AFTER_S)
        if context.now >= force_at:
            out.delete_pod(pod, grace=0)
            out.record_event("ForcedDeletion", f"{pod.name} did not terminate in time and is force-deleted", warn=True)
        else:
            out.requeue_at(force_at)


def check_ttl(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    """Delete the job, and return the verdict, if ttlSecondsAfterFinished have passed since its end."""
    ended, ttl_s = status.read_time("completionTime"), context.job.ttl_s
    if ttl_s is None or ended is None:
        return ""
    if context.now < ended + ttl_s:
        out.requeue_at(ended + ttl_s)
        return ""
    out.add(DeleteJob())
    return f"ttlSecondsAfterFinished {ttl_s:g} has expired: deleting the job"


def report_finished(context: ReconcileContext, status: JobStatus, out: PlanBuilder) -> str:
    update_counters(context, status)
    return f"the job is {status.final_condition}"


def count_restarts(context: ReconcileContext, status: JobStatus) -> int:
    """Return the number of restarts: those by the operator after failures, and those by the kubelet of existing and replaced
    pods."""
    replaced = {note["uid"] for note in status.replacements.values()}
    kubelet = sum(pod.kubelet_restarts for pod in context.pods.values() if pod.uid not in replaced)
    return status.read_count("restarts") + kubelet


def update_counters(context: ReconcileContext, status: JobStatus) -> None:
    """Set the counters of the status."""
    job, world = context.job, status.world or context.job.desired_replicas
    statuses: dict[str, dict[str, int]] = {}
    for role in job.roles:
        pods = [pod for pod in context.pods.values() if pod.replica_type == role.key.lower()]
        names = {pod_name(job.name, role.key, index) for index in range(world.get(role.key, 0))}
        statuses[role.key] = {
            "active": sum(pod.running for pod in pods),
            "ready": sum(pod.ready for pod in pods),
            "pending": sum(pod.phase == "Pending" and not pod.is_terminating for pod in pods),
            "succeeded": len(names & status.finished_pods),
            "failed": sum(pod.failed and not pod.is_terminating for pod in pods),
        }
    active = sum(statuses[role.key]["active"] for role in job.roles_with_duty(ReplicaDuty.WORKER))
    status.set_counters(
        statuses,
        workers=f"{active}/{context.count_workers(job.desired_replicas)}",
        selector=f"training.kubeflow.org/job-name={job.name},training.kubeflow.org/replica-type=worker",
        restarts_total=count_restarts(context, status),
    )
