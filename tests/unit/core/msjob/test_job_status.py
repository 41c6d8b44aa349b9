"""Complete texts of the events and conditions of an MSJob."""

from __future__ import annotations

from typing import Any

from tests.unit.core.msjob.msjobs import NOW, FakeCluster, container, job, pod

from covey.core.msjob import Observed, ReconcilePlan, plan_job
from covey.core.msjob.actions import RecordEvent
from covey.core.msjob.timestamps import format_timestamp


def events(plan: ReconcilePlan) -> list[RecordEvent]:
    return [action for action in plan.actions if isinstance(action, RecordEvent)]


def condition(plan: ReconcilePlan, kind: str) -> tuple[str, str, str]:
    assert plan.status is not None
    (found,) = [c for c in plan.status["conditions"] if c["type"] == kind]
    return found["status"], found["reason"], found["message"]


def test_events_and_conditions_of_a_job_that_succeeds() -> None:
    cluster = FakeCluster(job())
    plan = cluster.reconcile()
    assert events(plan) == [RecordEvent("Normal", "MSJobCreated", "the job train was accepted")]
    assert condition(plan, "Created") == ("True", "MSJobCreated", "the job train was accepted")
    assert cluster.status["startTime"] == format_timestamp(NOW) and cluster.status["world"] == {"Scheduler": 1, "Worker": 2}
    cluster.apply(cluster.reconcile())
    for name in cluster.pods:
        cluster.set_running(name)
    plan = cluster.reconcile()
    assert events(plan) == [RecordEvent("Normal", "MSJobRunning", "the job train is running")]
    assert condition(plan, "Running") == ("True", "MSJobRunning", "the job train is running")
    cluster.set_terminated("train-worker-0", 0)
    plan = cluster.reconcile()
    assert condition(plan, "Succeeded") == ("True", "MSJobSucceeded", "worker 0 (train-worker-0) succeeded")
    assert RecordEvent("Normal", "MSJobSucceeded", "worker 0 (train-worker-0) succeeded") in events(plan)


def test_suspension_and_resume_are_recorded_and_reset_the_status() -> None:
    cluster = FakeCluster(job()).start()
    dropped = {"formed": True, "replacing": {}, "finished": [], "scaling": {}, "progress": {"step": 3}}
    cluster.job["status"].update(dropped)
    cluster.job["spec"]["runPolicy"] = {"suspend": True}
    message = "runPolicy.suspend is set: the job's pods are deleted"
    plan = cluster.reconcile()
    assert events(plan) == [RecordEvent("Normal", "MSJobSuspended", message)] and plan.reason == message
    assert condition(plan, "Suspended") == ("True", "MSJobSuspended", message)
    assert not {"world", "startTime", *dropped} & cluster.status.keys(), "the fields of the deleted pods are dropped"
    cluster.apply(plan)
    assert events(cluster.reconcile()) == [], "recorded once"
    cluster.job["spec"]["runPolicy"] = {"suspend": False}
    cluster.now += 60
    plan = cluster.reconcile()
    message = "runPolicy.suspend is no longer set: the job's pods are created again"
    assert RecordEvent("Normal", "MSJobResumed", message) in events(plan)
    assert condition(plan, "Suspended") == ("False", "MSJobResumed", message)
    assert cluster.status["startTime"] == format_timestamp(NOW + 60)


def test_invalid_spec_fails_a_new_job_and_only_warns_for_a_started_one() -> None:
    invalid: dict[str, Any] = {"successPolicy": "NoWorkers"}
    plan = plan_job(job(**invalid), Observed(), NOW)
    (event,) = events(plan)
    assert (event.event_type, event.reason) == ("Warning", "InvalidSpec") and event.message == plan.reason
    assert condition(plan, "Failed") == ("True", "InvalidSpec", event.message)
    ended = plan_job(job(status=plan.status, **invalid), Observed(), NOW)
    assert (ended.actions, ended.status, ended.reason) == ((), None, event.message), "recorded once"
    cluster = FakeCluster(job()).start()
    cluster.job["spec"].update(invalid)
    plan = cluster.reconcile()
    assert events(plan) == [event] and plan.reason == event.message and cluster.status["refused"] == event.message
    again = cluster._plan()
    assert (again.actions, again.status, again.reason) == ((), None, event.message), "the job keeps running"
    cluster.job["spec"]["successPolicy"] = ""
    assert "refused" not in (cluster.reconcile().status or {})


def test_deleted_job_gets_no_actions_and_no_status() -> None:
    deleted = job()
    deleted["metadata"]["deletionTimestamp"] = format_timestamp(NOW)
    plan = plan_job(deleted, Observed(pods=[pod("train-worker-0")]), NOW)
    reason = "the job is being deleted: Kubernetes deletes the objects it owns"
    assert (plan.actions, plan.status, plan.reason) == ((), None, reason)


def test_kubelet_restarts_are_recorded_as_warning_with_pod_names() -> None:
    cluster = FakeCluster(job(restart="OnFailure")).start()
    for name, restarts in (("train-worker-0", 1), ("train-worker-1", 2)):
        cluster.pods[name]["status"] = container("running", {}, phase="Running", restarts=restarts)
    message = "3 restarts so far; the kubelet restarted containers of train-worker-0, train-worker-1"
    assert events(cluster.reconcile()) == [RecordEvent("Warning", "ContainerRestarted", message)]
    assert events(cluster.reconcile()) == [], "recorded once per number of restarts"


def test_deadline_is_exceeded_exactly_at_its_second() -> None:
    cluster = FakeCluster(job(runPolicy={"activeDeadlineSeconds": 60})).start()
    cluster.now = NOW + 59
    plan = cluster.reconcile()
    assert plan.requeue_after is not None and 0 < plan.requeue_after <= 1 and "Failed" not in cluster.conditions()
    cluster.now = NOW + 60
    message = "the job was active for more than activeDeadlineSeconds 60"
    assert condition(cluster.reconcile(), "Failed") == ("True", "DeadlineExceeded", message)
