"""`plan_job` over several passes: actions, status and requeue times."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.msjob.msjobs import NOW, FakeCluster, container, job, node, pod, service

from covey.core.msjob import Observed, ReconcilePlan, actions, plan_job
from covey.core.msjob.scheduler_status import SchedulerStatus
from covey.core.msjob.timestamps import format_timestamp
from covey.core.types import Phase


def states(plan: ReconcilePlan) -> dict[str, str]:
    assert plan.status is not None
    return {c["type"]: c["status"] for c in plan.status["conditions"]}


def reasons(plan: ReconcilePlan) -> dict[str, str]:
    assert plan.status is not None
    return {c["type"]: c["reason"] for c in plan.status["conditions"]}


def actions_of(plan: ReconcilePlan, kind: type) -> list[Any]:
    return [action for action in plan.actions if isinstance(action, kind)]


def events(plan: ReconcilePlan) -> dict[str, str]:
    return {action.reason: action.message for action in actions_of(plan, actions.RecordEvent)}


def test_pods_are_created_after_the_service_has_an_address() -> None:
    plan = plan_job(job(), Observed(), NOW)
    assert actions_of(plan, actions.CreateService) == [actions.CreateService("Scheduler")] and not actions_of(
        plan, actions.CreatePod
    )
    assert states(plan) == {"Created": "True"}
    plan = plan_job(job(status=plan.status), Observed(services=[service("train-scheduler-0")]), NOW)
    assert [(a.role, a.index) for a in actions_of(plan, actions.CreatePod)] == [("Scheduler", 0), ("Worker", 0), ("Worker", 1)]
    assert not actions_of(plan, actions.CreateService) and actions_of(plan, actions.CreateSecret)


def test_single_worker_gets_no_service() -> None:
    plan = plan_job(job(roles={"Worker": 1}), Observed(), NOW)
    assert [(a.role, a.index) for a in actions_of(plan, actions.CreatePod)] == [("Worker", 0)] and not actions_of(
        plan, actions.CreateService
    )


def test_role_names_are_case_insensitive() -> None:
    plan = plan_job(job(roles={"worker": 1}), Observed(), NOW)
    assert [a.role for a in actions_of(plan, actions.CreatePod)] == ["Worker"]


# -- success ---------------------------------------------------------------------------------------------------------


def test_job_succeeds_with_worker_0_by_default() -> None:
    cluster = FakeCluster(job()).start()
    cluster.set_terminated("train-worker-1", 0)
    assert cluster.reconcile().reason != "" and "Succeeded" not in cluster.conditions()
    cluster.set_terminated("train-worker-0", 0)
    plan = cluster.reconcile()
    assert states(plan) == {"Running": "False", "Created": "True", "Succeeded": "True"}
    assert plan.status is not None and plan.status["state"] == "Succeeded" and plan.status["completionTime"]


def test_all_workers_policy_succeeds_when_every_worker_succeeded() -> None:
    cluster = FakeCluster(job(successPolicy="AllWorkers")).start()
    cluster.set_terminated("train-worker-0", 0)
    cluster.reconcile()
    assert "Succeeded" not in cluster.conditions()
    cluster.set_terminated("train-worker-1", 0)
    cluster.reconcile()
    assert "Succeeded" in cluster.conditions()


def test_succeeded_pod_is_not_recreated_after_garbage_collection() -> None:
    cluster = FakeCluster(job(successPolicy="AllWorkers")).start()
    cluster.set_terminated("train-worker-0", 0)
    cluster.reconcile()
    del cluster.pods["train-worker-0"]
    assert not actions_of(cluster.reconcile(), actions.CreatePod)
    cluster.set_terminated("train-worker-1", 0)
    cluster.reconcile()
    assert "Succeeded" in cluster.conditions()


# -- failure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_job_fails_at_first_failure_with_restart_policy_never(role: str) -> None:
    cluster = FakeCluster(job()).start()
    cluster.set_terminated(f"train-{role}-0", 3)
    plan = cluster.reconcile()
    assert states(plan)["Failed"] == "True" and "exit code 3" in events(plan)["MSJobFailed"]
    assert "Succeeded" not in states(plan)


def test_success_and_failure_in_one_pass_set_one_final_condition() -> None:
    cluster = FakeCluster(job()).start()
    cluster.set_terminated("train-worker-0", 0)
    cluster.set_terminated("train-worker-1", 1)
    plan = cluster.reconcile()
    assert len({"Succeeded", "Failed"} & {k for k, v in states(plan).items() if v == "True"}) == 1


@pytest.mark.parametrize("code", [130, 137, 138, 143])
def test_pod_is_replaced_after_retryable_exit_code(code: int) -> None:
    cluster = FakeCluster(job(restart="ExitCode")).start()
    cluster.set_terminated("train-worker-1", code)
    plan = cluster.reconcile()
    [deleted] = actions_of(plan, actions.DeletePod)
    assert deleted.name == "train-worker-1" and deleted.uid == cluster.pods["train-worker-1"]["metadata"]["uid"]
    assert states(plan)["Restarting"] == "True" and states(plan)["Running"] == "False"
    del cluster.pods["train-worker-1"]
    assert [(a.role, a.index) for a in actions_of(cluster.reconcile(), actions.CreatePod)] == [("Worker", 1)]
    cluster.set_running("train-worker-1")
    plan = cluster.reconcile()
    assert states(plan)["Running"] == "True" and plan.status is not None and plan.status["restartsTotal"] == 1


@pytest.mark.parametrize("code", [1, 2, 126, 127, 128, 139, 77])
def test_job_fails_after_permanent_exit_code(code: int) -> None:
    cluster = FakeCluster(job(restart="ExitCode")).start()
    cluster.set_terminated("train-worker-1", code)
    assert states(cluster.reconcile())["Failed"] == "True"


def test_restart_is_counted_once_over_several_passes() -> None:
    cluster = FakeCluster(job(restart="ExitCode")).start()
    cluster.set_terminated("train-worker-1", 137)
    for _ in range(3):
        plan = cluster.reconcile()
        assert cluster.status["restarts"] == 1 and len(actions_of(plan, actions.DeletePod)) == 1


def test_backoff_limit_includes_replaced_pods() -> None:
    cluster = FakeCluster(job(restart="ExitCode", runPolicy={"backoffLimit": 2})).start()
    for _ in range(2):
        cluster.set_terminated("train-worker-1", 137)
        cluster.reconcile()
        del cluster.pods["train-worker-1"]
        cluster.reconcile()
        cluster.set_running("train-worker-1")
        cluster.reconcile()
    cluster.set_terminated("train-worker-1", 137)
    plan = cluster.reconcile()
    assert reasons(plan)["Failed"] == "BackoffLimitExceeded" and plan.status is not None
    assert plan.status["restartsTotal"] == 2


def test_backoff_limit_includes_kubelet_restarts() -> None:
    cluster = FakeCluster(job(restart="OnFailure", runPolicy={"backoffLimit": 1})).start()
    cluster.set_running("train-worker-0", restarts=1)
    plan = cluster.reconcile()
    assert "Failed" not in states(plan) and "ContainerRestarted" in events(plan)
    cluster.set_running("train-worker-0", restarts=2)
    assert reasons(cluster.reconcile())["Failed"] == "BackoffLimitExceeded"


def test_kubelet_restarts_of_a_replaced_pod_stay_counted() -> None:
    cluster = FakeCluster(job(restart="OnFailure")).start()
    cluster.set_running("train-worker-0", restarts=3)
    cluster.reconcile()
    cluster.pods["train-worker-0"]["status"] |= {"phase": "Failed", "reason": "Evicted"}
    cluster.reconcile()
    assert cluster.status["restartsTotal"] == 4
    del cluster.pods["train-worker-0"]
    cluster.reconcile()
    cluster.set_running("train-worker-0")
    cluster.reconcile()
    assert cluster.status["restartsTotal"] == 4


def test_job_with_dynamic_workers_fails_only_when_all_workers_failed() -> None:
    cluster = FakeCluster(job(enableDynamicWorker=True)).start()
    cluster.set_terminated("train-worker-1", 1)
    plan = cluster.reconcile()
    assert "Failed" not in states(plan) and "WorkerLost" in events(plan)
    assert "WorkerLost" not in events(cluster.reconcile())
    cluster.set_terminated("train-worker-0", 1)
    assert states(cluster.reconcile())["Failed"] == "True"


def test_job_with_dynamic_workers_fails_if_its_scheduler_fails() -> None:
    cluster = FakeCluster(job(enableDynamicWorker=True)).start()
    cluster.set_terminated("train-scheduler-0", 1)
    assert states(cluster.reconcile())["Failed"] == "True"


def test_job_with_dynamic_workers_succeeds_if_the_remaining_workers_do() -> None:
    cluster = FakeCluster(job(enableDynamicWorker=True, successPolicy="AllWorkers")).start()
    cluster.set_terminated("train-worker-1", 1)
    cluster.reconcile()
    cluster.set_terminated("train-worker-0", 0)
    assert states(cluster.reconcile())["Succeeded"] == "True"


# -- after the end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        ("All", {"train-scheduler-0", "train-worker-0", "train-worker-1"}),
        ("Running", {"train-scheduler-0", "train-worker-1"}),
        ("None", set()),
    ],
)
def test_clean_pod_policy_selects_the_deleted_pods(policy: str, deleted: set[str]) -> None:
    cluster = FakeCluster(job(runPolicy={"cleanPodPolicy": policy})).start()
    cluster.set_terminated("train-worker-0", 0)
    plan = cluster.reconcile()
    assert {a.name for a in actions_of(plan, actions.DeletePod)} == deleted
    assert bool(actions_of(plan, actions.DeleteService)) == (policy != "None")
    assert not actions_of(plan, actions.TerminatePod)


def test_clean_pod_policy_none_terminates_and_keeps_pods_of_a_failed_job() -> None:
    cluster = FakeCluster(job(runPolicy={"cleanPodPolicy": "None"})).start()
    cluster.set_terminated("train-worker-0", 1)
    plan = cluster.reconcile()
    assert {a.name for a in actions_of(plan, actions.TerminatePod)} == {
        "train-scheduler-0",
        "train-worker-1",
    } and not actions_of(plan, actions.DeletePod)
    for name in ("train-scheduler-0", "train-worker-1"):
        cluster.pods[name]["spec"]["activeDeadlineSeconds"] = 1
    assert not actions_of(cluster.reconcile(), actions.TerminatePod)


def test_job_is_deleted_after_ttl() -> None:
    cluster = FakeCluster(job(runPolicy={"ttlSecondsAfterFinished": 100})).start()
    cluster.set_terminated("train-worker-0", 0)
    cluster.reconcile()
    plan = cluster.reconcile()
    assert plan.requeue_after == pytest.approx(100, abs=1) and not actions_of(plan, actions.DeleteJob)
    cluster.now += 101
    assert actions_of(cluster.reconcile(), actions.DeleteJob)


def test_job_fails_after_active_deadline() -> None:
    cluster = FakeCluster(job(runPolicy={"activeDeadlineSeconds": 50})).start()
    plan = cluster.reconcile()
    assert plan.requeue_after == pytest.approx(50, abs=1)
    cluster.now += 51
    assert reasons(cluster.reconcile())["Failed"] == "DeadlineExceeded"


def test_finished_job_creates_no_pods() -> None:
    cluster = FakeCluster(job()).start()
    cluster.set_terminated("train-worker-0", 0)
    cluster.reconcile()
    cluster.pods.clear()
    plan = cluster.reconcile()
    assert (
        not actions_of(plan, actions.CreatePod)
        and not actions_of(plan, actions.CreateService)
        and "Succeeded" in cluster.conditions()
    )
    cluster.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 5
    assert not actions_of(cluster.reconcile(), actions.CreatePod)


def test_job_being_deleted_gets_no_actions() -> None:
    deleted = job()
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert plan_job(deleted, Observed(pods=[pod("train-worker-0", phase="Failed")]), NOW).actions == ()


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_pending_reason_is_recorded_when_it_changes() -> None:
    cluster = FakeCluster(job()).start(phase="Pending")
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes have a GPU"}
    cluster.pods["train-worker-1"]["status"]["conditions"] = [unscheduled]
    plan = cluster.reconcile()
    assert events(plan)["Pending"] == "train-worker-1: Unschedulable: 0/3 nodes have a GPU"
    assert "Pending" not in events(cluster.reconcile())
    cluster.pods["train-worker-1"]["status"] = container("waiting", {"reason": "ErrImagePull", "message": "no such image"})
    assert events(cluster.reconcile())["Pending"] == "train-worker-1: ErrImagePull: no such image"


def test_job_fails_if_a_pod_is_pending_too_long() -> None:
    cluster = FakeCluster(job(runPolicy={"pendingTimeoutSeconds": 60})).start(phase="Pending")
    plan = cluster.reconcile()
    assert plan.requeue_after == pytest.approx(60, abs=1)
    cluster.now += 61
    assert reasons(cluster.reconcile())["Failed"] == "PendingTimeout"


def test_job_fails_if_a_pod_is_missing_too_long() -> None:
    cluster = FakeCluster(job(roles={"Worker": 1}, runPolicy={"pendingTimeoutSeconds": 60}))
    cluster.reconcile()
    cluster.now += 61
    assert reasons(cluster.reconcile())["Failed"] == "PendingTimeout"


# -- nodes -----------------------------------------------------------------------------------------------------------


def test_pod_on_lost_node_is_force_deleted_and_replaced() -> None:
    cluster = FakeCluster(job(restart="OnFailure")).start()
    cluster.nodes = {"n0": node("n0", ready="Unknown", since=NOW), "n1": node("n1")}
    cluster.pods["train-worker-0"]["spec"]["nodeName"] = "n0"
    cluster.pods["train-worker-1"]["spec"]["nodeName"] = "n1"
    plan = cluster.reconcile()
    assert not actions_of(plan, actions.DeletePod) and plan.requeue_after == pytest.approx(60, abs=1)
    cluster.now += 61
    plan = cluster.reconcile()
    assert [(a.name, a.grace_period_s) for a in actions_of(plan, actions.DeletePod)] == [("train-worker-0", 0)]
    assert cluster.status["restarts"] == 1


def test_terminating_pod_on_lost_node_is_force_deleted() -> None:
    cluster = FakeCluster(job(restart="OnFailure")).start()
    cluster.nodes = {"n0": node("n0", ready="Unknown", since=NOW - 1000)}
    for name in ("train-scheduler-0", "train-worker-0"):
        cluster.pods[name]["spec"].pop("nodeName", None)
    cluster.pods["train-worker-1"]["spec"]["nodeName"] = "n0"
    cluster.pods["train-worker-1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert ("train-worker-1", 0) in [(a.name, a.grace_period_s) for a in actions_of(cluster.reconcile(), actions.DeletePod)]


# -- recovery --------------------------------------------------------------------------------------------------------

GRACE = {"fault-scheduling": "grace"}


def test_recover_replaces_the_failed_pod_on_another_node() -> None:
    cluster = FakeCluster(job(labels=GRACE, annotations={"recover-strategy": "recover"})).start()
    assert (
        actions.SetLabel("process-recover-enable", "on")
        in plan_job(job(labels=GRACE, annotations={"recover-strategy": "recover"}), Observed(), NOW).actions
    )
    cluster.pods["train-worker-0"]["spec"]["nodeName"] = "bad"
    cluster.set_terminated("train-worker-0", 1)
    plan = cluster.reconcile()
    assert [a.name for a in actions_of(plan, actions.DeletePod)] == ["train-worker-0"]
    del cluster.pods["train-worker-0"]
    [created] = actions_of(cluster.reconcile(), actions.CreatePod)
    assert (created.role, created.index, created.excluded_nodes) == ("Worker", 0, ("bad",))
    cluster.set_running("train-worker-0")
    cluster.pods["train-worker-0"]["spec"]["nodeName"] = "worse"
    cluster.reconcile()
    cluster.set_terminated("train-worker-0", 1)
    cluster.reconcile()
    del cluster.pods["train-worker-0"]
    assert [a.excluded_nodes for a in actions_of(cluster.reconcile(), actions.CreatePod)] == [
        ("worse",)
    ]  # not "bad" as well, or soon no node would be left


def covey_run(**more: Any) -> FakeCluster:
    """Start a job whose workers run `covey run`."""
    source = job(labels=GRACE, annotations={"recover-strategy": "recover-in-place,recover"}, **more)
    source["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"] = ["covey", "run", "train.py"]
    return FakeCluster(source).start()


def healing_scheduler(*uids: str) -> SchedulerStatus:
    """Return the status of a scheduler that supports healing and has members in the pods with these UIDs."""
    return SchedulerStatus(phase=Phase.READY, generation=1, supports_healing=True, pod_uids=frozenset(uids))


def test_covey_run_pod_is_replaced_and_reported_gone_until_the_scheduler_drops_it() -> None:
    cluster = covey_run()
    uid = cluster.pods["train-worker-1"]["metadata"]["uid"]
    cluster.scheduler_status = healing_scheduler(uid, "another")
    cluster.set_terminated("train-worker-1", 137)
    plan = cluster.reconcile()
    assert [a.name for a in actions_of(plan, actions.DeletePod)] == ["train-worker-1"]
    gone = [actions.ReportPodGone("train-worker-1", uid)]
    assert actions_of(plan, actions.ReportPodGone) == actions_of(cluster.reconcile(), actions.ReportPodGone) == gone
    del cluster.pods["train-worker-1"]
    plan = cluster.reconcile()
    assert actions_of(plan, actions.ReportPodGone) and [a.index for a in actions_of(plan, actions.CreatePod)] == [1]
    cluster.scheduler_status = healing_scheduler("another")
    assert not actions_of(cluster.reconcile(), actions.ReportPodGone)


def test_deleted_pod_is_not_reported_gone_while_it_runs() -> None:
    labels, annotations = {**GRACE, "subHealthyStrategy": "graceExit"}, {"recover-strategy": "recover"}
    cluster = FakeCluster(job(labels=labels, annotations=annotations)).start()
    unhealthy = node("n")
    unhealthy["status"]["conditions"].append({"type": "DiskPressure", "status": "True"})
    cluster.pods["train-worker-1"]["spec"]["nodeName"], cluster.nodes = "n", {"n": unhealthy}
    cluster.scheduler_status = healing_scheduler(cluster.pods["train-worker-1"]["metadata"]["uid"])
    plan = cluster.reconcile()
    assert actions_of(plan, actions.DeletePod) and not actions_of(plan, actions.ReportPodGone)
    del cluster.pods["train-worker-1"]
    assert actions_of(cluster.reconcile(), actions.ReportPodGone)


@pytest.mark.parametrize(
    ("name", "code", "roles", "why"),
    [
        pytest.param("train-worker-1", 1, None, "it is unknown whether", id="program failed"),
        pytest.param("train-worker-0", 137, {"Worker": 2}, "it is unknown whether", id="scheduler in the failed pod"),
        pytest.param("train-scheduler-0", 137, None, "journal was lost with its pod", id="scheduler pod"),
    ],
)
def test_recover_restarts_all_pods_once_if_workers_do_not_wait(
    name: str, code: int, roles: dict[str, int] | None, why: str
) -> None:
    cluster = covey_run(roles=roles)
    cluster.scheduler_status = healing_scheduler(cluster.pods[name]["metadata"]["uid"])
    cluster.set_terminated(name, code)
    plan = cluster.reconcile()
    assert len(actions_of(plan, actions.DeletePod)) == len(cluster.pods) and cluster.status["restarts"] == 1
    assert why in events(plan)["MSJobRestarting"] and not actions_of(plan, actions.ReportPodGone)


def test_elastic_training_continues_without_a_pending_replacement() -> None:
    annotations = {"recover-strategy": "elastic-training", "wait-reschedule-timeout": "30"}
    cluster = FakeCluster(job(labels=GRACE, annotations=annotations, runPolicy={"pendingTimeoutSeconds": 60})).start()
    both = {"0": "train-worker-0", "1": "train-worker-1"}
    cluster.scheduler_status = SchedulerStatus(phase=Phase.READY, has_finished_step=True, workers=both)
    cluster.set_terminated("train-worker-1", 137)
    plan = cluster.reconcile()
    assert [a.name for a in actions_of(plan, actions.DeletePod)] == ["train-worker-1"] and "without it" in events(plan)[
        "MSJobRestarting"
    ]
    del cluster.pods["train-worker-1"]
    plan = cluster.reconcile()
    assert [a.excluded_nodes for a in actions_of(plan, actions.CreatePod)] == [()], "no node is excluded"
    cluster.apply(plan)
    cluster.scheduler_status = SchedulerStatus(phase=Phase.READY, has_finished_step=True, workers={"0": "train-worker-0"})
    plan = cluster.reconcile()
    assert "without train-worker-1" in events(plan)["MSJobShrunk"] and "Running" in cluster.conditions()
    cluster.now += 1000
    assert not events(cluster.reconcile()) and "Failed" not in cluster.conditions(), "a Pending replacement has no deadline"
    cluster.set_running("train-worker-1")
    assert "joins" in events(cluster.reconcile())["MSJobGrows"] and "replacing" not in cluster.status
    assert cluster.status["restarts"] == 1


def test_elastic_training_fails_the_job_before_the_first_finished_step() -> None:
    cluster = FakeCluster(job(labels=GRACE, annotations={"recover-strategy": "elastic-training"})).start()
    cluster.scheduler_status = SchedulerStatus(phase=Phase.READY, workers={"0": "train-worker-0", "1": "train-worker-1"})
    cluster.set_terminated("train-worker-1", 137)
    assert "Failed" in states(cluster.reconcile())


def test_elastic_training_times_out_if_the_remaining_workers_do_not_train() -> None:
    annotations = {"recover-strategy": "recover,elastic-training", "wait-reschedule-timeout": "30"}
    cluster = FakeCluster(job(labels=GRACE, annotations=annotations)).start()
    cluster.scheduler_status = SchedulerStatus(phase=Phase.HEALING, has_finished_step=True, workers={"0": "train-worker-0"})
    cluster.set_terminated("train-worker-1", 137)
    cluster.reconcile()
    del cluster.pods["train-worker-1"]
    cluster.now += 31
    assert "did not run within" in events(cluster.reconcile())["RescheduleTimeout"]


def test_recover_restarts_all_covey_run_pods_without_scheduler_status() -> None:
    cluster = covey_run()
    cluster.set_terminated("train-worker-0", 137)
    assert len(actions_of(cluster.reconcile(), actions.DeletePod)) == 3 and cluster.status["restarts"] == 1
    for name in ("train-scheduler-0", "train-worker-1"):  # consequential failures are not counted
        cluster.set_terminated(name, 30)
    cluster.reconcile()
    assert cluster.status["restarts"] == 1


def test_recover_strategy_has_no_effect_without_fault_scheduling() -> None:
    source = job(annotations={"recover-strategy": "recover"})
    assert "no effect" in events(plan_job(source, Observed(), NOW))["Remark"]
    cluster = FakeCluster(source).start()
    cluster.set_terminated("train-worker-0", 1)
    assert states(cluster.reconcile())["Failed"] == "True"


def test_fault_scheduling_alone_restarts_all_pods() -> None:
    cluster = FakeCluster(job(labels={**GRACE, "fault-retry-times": "1"})).start()
    cluster.set_terminated("train-worker-1", 1)
    plan = cluster.reconcile()
    assert {a.name for a in actions_of(plan, actions.DeletePod)} == {"train-scheduler-0", "train-worker-0", "train-worker-1"}
    assert cluster.status["restarts"] == 1
    cluster.pods.clear()
    assert len(actions_of(cluster.reconcile(), actions.CreatePod)) == 3
    for name in ("train-scheduler-0", "train-worker-0", "train-worker-1"):
        cluster.set_running(name)
    cluster.reconcile()
    cluster.set_terminated("train-worker-1", 1)
    assert reasons(cluster.reconcile())["Failed"] == "FaultRetryTimesExceeded"


def test_pod_rescheduling_replaces_only_the_failed_pod() -> None:
    cluster = FakeCluster(job(labels={**GRACE, "fault-retry-times": "2", "pod-rescheduling": "on"})).start()
    cluster.set_terminated("train-worker-1", 1)
    assert [a.name for a in actions_of(cluster.reconcile(), actions.DeletePod)] == ["train-worker-1"]


def test_fault_scheduling_force_deletes_without_grace_period() -> None:
    cluster = FakeCluster(job(labels={"fault-scheduling": "force", "fault-retry-times": "2", "pod-rescheduling": "on"})).start()
    cluster.set_terminated("train-worker-1", 1)
    assert [a.grace_period_s for a in actions_of(cluster.reconcile(), actions.DeletePod)] == [0]


def test_overdue_replacement_restarts_all_pods_once_then_fails_the_job() -> None:
    annotations = {"recover-strategy": "recover", "wait-reschedule-timeout": "30"}
    cluster = FakeCluster(job(labels=GRACE, annotations=annotations)).start()
    cluster.set_terminated("train-worker-0", 1)
    cluster.reconcile()
    del cluster.pods["train-worker-0"]
    plan = cluster.reconcile()
    assert plan.requeue_after == pytest.approx(30, abs=1)
    cluster.pods["train-worker-0"] = pod("train-worker-0", uid="new", phase="Pending")
    cluster.now += 31
    plan = cluster.reconcile()
    assert (
        "RescheduleTimeout" in events(plan) and len(actions_of(plan, actions.DeletePod)) == 3 and "Failed" not in states(plan)
    )
    cluster.pods.clear()
    cluster.reconcile()
    cluster.now += 31
    assert reasons(cluster.reconcile())["Failed"] == "RescheduleTimeout"


# -- suspend, scale, adoption, gang ----------------------------------------------------------------------------------


def test_suspend_deletes_all_pods_and_resume_creates_them() -> None:
    cluster = FakeCluster(job()).start()
    cluster.job["spec"]["runPolicy"] = {"suspend": True}
    plan = cluster.reconcile()
    assert (
        len(actions_of(plan, actions.DeletePod)) == 3
        and states(plan)["Suspended"] == "True"
        and states(plan)["Running"] == "False"
    )
    cluster.pods.clear()
    cluster.reconcile()
    cluster.job["spec"]["runPolicy"] = {"suspend": False}
    plan = cluster.reconcile()
    assert (
        len(actions_of(plan, actions.CreatePod)) == 3
        and states(plan)["Suspended"] == "False"
        and cluster.status.get("restarts", 0) == 0
    )


def set_deleted(cluster: FakeCluster, name: str, code: int) -> None:
    """Make a pod a deleted one whose container has exited and whose object still exists."""
    cluster.pods[name]["metadata"]["deletionTimestamp"] = format_timestamp(cluster.now + 30)
    cluster.set_terminated(name, code)


@pytest.mark.parametrize("code", [0, 143])
def test_outcome_of_a_pod_from_before_a_suspension_is_ignored(code: int) -> None:
    cluster = FakeCluster(job()).start()
    cluster.job["spec"]["runPolicy"] = {"suspend": True}
    cluster.now += 5
    assert len(actions_of(cluster.reconcile(), actions.DeletePod)) == 3 and cluster.status["state"] == "Suspended"
    cluster.job["spec"]["runPolicy"] = {"suspend": False}
    cluster.now += 5
    for name in cluster.pods:
        set_deleted(cluster, name, code)
    plan = cluster.reconcile()
    assert cluster.conditions() == {"Created"} and cluster.status["state"] == "Created"
    assert not actions_of(plan, actions.CreatePod), "the old pods still exist"
    del cluster.pods["train-worker-0"]
    assert [(a.role, a.index) for a in actions_of(cluster.reconcile(), actions.CreatePod)] == [("Worker", 0)]


def test_success_of_a_replaced_pod_is_ignored() -> None:
    """Many scripts exit with 0 on SIGTERM."""
    cluster = FakeCluster(job(labels=GRACE)).start()
    cluster.pods["train-worker-1"]["status"] = {"phase": "Failed", "reason": "Evicted"}
    assert len(actions_of(cluster.reconcile(), actions.DeletePod)) == 3, "all pods restart"
    set_deleted(cluster, "train-worker-0", 0)
    cluster.reconcile()
    assert "finished" not in cluster.status and "Succeeded" not in cluster.conditions()
    del cluster.pods["train-worker-0"]["metadata"]["deletionTimestamp"]
    assert "train-worker-0" in {a.name for a in actions_of(cluster.reconcile(), actions.DeletePod)}, (
        "the recorded deletion is repeated"
    )


def test_failure_of_a_deleted_pod_is_not_counted_as_fault() -> None:
    cluster = FakeCluster(job(labels={**GRACE, "fault-retry-times": "1"})).start()
    set_deleted(cluster, "train-worker-1", 143)
    cluster.reconcile()
    assert "faults" not in cluster.status and cluster.status["restarts"] == 1


def test_dynamic_workers_are_resized_immediately() -> None:
    cluster = FakeCluster(job(enableDynamicWorker=True)).start()
    cluster.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 3
    assert [(a.role, a.index) for a in actions_of(cluster.reconcile(), actions.CreatePod)] == [("Worker", 2)]
    cluster.set_running("train-worker-2")
    cluster.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 1
    assert {a.name for a in actions_of(cluster.reconcile(), actions.DeletePod)} == {"train-worker-1", "train-worker-2"}


def test_pending_job_recreates_all_pods_with_the_new_number() -> None:
    cluster = FakeCluster(job()).start(phase="Pending")
    cluster.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 3
    assert len(actions_of(cluster.reconcile(), actions.DeletePod)) == 3
    cluster.pods.clear()
    created = actions_of(cluster.reconcile(), actions.CreatePod)
    assert len(created) == 4 and created[0].world == {"Scheduler": 1, "Worker": 3}


def test_orphans_are_adopted_and_foreign_pods_ignored() -> None:
    orphan, foreign = pod("train-worker-0", owner=""), pod("train-worker-1", owner="another")
    observed = Observed(pods=[orphan, foreign], services=[service("train-scheduler-0", owner="")])
    plan = plan_job(job(), observed, NOW)
    assert {a.name for a in actions_of(plan, actions.AdoptOrphan)} == {"train-worker-0", "train-scheduler-0"}
    assert [a.role for a in actions_of(plan, actions.CreatePod)] == ["Scheduler"] and "NameTaken" in events(plan)
    assert not actions_of(plan, actions.DeletePod)


def test_pod_group_is_created_with_a_gang_scheduler() -> None:
    plan = plan_job(job(runPolicy={"schedulingPolicy": {"queue": "big"}}), Observed(uses_pod_groups=True), NOW)
    assert actions_of(plan, actions.CreatePodGroup) == [actions.CreatePodGroup(3, {"queue": "big"})]


def test_pod_group_of_an_earlier_job_of_the_same_name_is_ignored() -> None:
    """Kubernetes may delete the earlier job's PodGroup only after this job has its pods."""
    pods = [pod(name, phase="Pending") for name in ("train-scheduler-0", "train-worker-0", "train-worker-1")]
    services = [service("train-scheduler-0")]
    for group, expected in ((None, 1), (service("train", owner="another"), 1), (service("train"), 0)):
        plan = plan_job(job(), Observed(uses_pod_groups=True, pods=pods, services=services, pod_group=group), NOW)
        assert len(actions_of(plan, actions.CreatePodGroup)) == expected and not actions_of(plan, actions.CreatePod)


# -- invalid jobs ----------------------------------------------------------------------------------------------------


def test_invalid_job_fails_with_the_path_of_the_field() -> None:
    invalid = job()
    invalid["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"] = [{"name": "script_data"}]
    plan = plan_job(invalid, Observed(), NOW)
    assert reasons(plan)["Failed"] == "InvalidSpec"
    assert "spec.msReplicaSpecs.Worker.template.spec.volumes[0].name: 'script_data'" in events(plan)["InvalidSpec"]


def test_running_job_survives_an_invalid_change() -> None:
    cluster = FakeCluster(job()).start()
    cluster.job["spec"]["successPolicy"] = "Most"
    plan = cluster.reconcile()
    assert "spec.successPolicy" in events(plan)["InvalidSpec"] and "Failed" not in states(plan)
    assert cluster.reconcile().actions == ()


# -- unhealthy nodes -------------------------------------------------------------------------------------------------


def unhealthy_node(name: str) -> dict[str, Any]:
    unhealthy = node(name)
    unhealthy["status"]["conditions"].append({"type": "KernelDeadlock", "status": "True"})
    unhealthy["status"]["conditions"].append({"type": "DiskPressure", "status": "False"})
    return unhealthy


def on_unhealthy_node(strategy: str, **more: Any) -> FakeCluster:
    cluster = FakeCluster(job(labels={"fault-scheduling": "grace", "subHealthyStrategy": strategy}, **more)).start()
    for name, node_name in (("train-scheduler-0", "good"), ("train-worker-0", "good"), ("train-worker-1", "bad")):
        cluster.pods[name]["spec"]["nodeName"] = node_name
    cluster.nodes = {"good": node("good"), "bad": unhealthy_node("bad")}
    return cluster


def test_unhealthy_node_is_ignored_with_strategy_ignore() -> None:
    assert on_unhealthy_node("ignore").reconcile().actions == ()


def test_grace_exit_replaces_the_pods_of_an_unhealthy_node() -> None:
    cluster = on_unhealthy_node("graceExit", annotations={"recover-strategy": "recover"})
    plan = cluster.reconcile()
    assert [(a.name, a.grace_period_s) for a in actions_of(plan, actions.DeletePod)] == [("train-worker-1", None)]
    assert "on the unhealthy node bad (KernelDeadlock)" in events(plan)["MSJobRestarting"]
    cluster.apply(plan)
    assert [a.excluded_nodes for a in actions_of(cluster.reconcile(), actions.CreatePod)] == [("bad",)]
    assert "faults" not in cluster.status, "an unhealthy node is not a fault of the program"


def test_force_exit_restarts_all_pods_without_grace_period_on_other_nodes() -> None:
    cluster = on_unhealthy_node("forceExit")
    plan = cluster.reconcile()
    assert {(a.name, a.grace_period_s) for a in actions_of(plan, actions.DeletePod)} == {(name, 0) for name in cluster.pods}
    cluster.apply(plan)
    assert {a.excluded_nodes for a in actions_of(cluster.reconcile(), actions.CreatePod)} == {("bad",)}


def test_hot_switch_is_remarked_and_unknown_strategy_is_invalid() -> None:
    plan = plan_job(job(labels={"fault-scheduling": "grace", "subHealthyStrategy": "hotSwitch"}), Observed(), NOW)
    assert "hotSwitch acts like graceExit" in events(plan)["Remark"]
    plan = plan_job(job(labels={"subHealthyStrategy": "sometimes"}), Observed(), NOW)
    assert "metadata.labels[subHealthyStrategy]" in events(plan)["InvalidSpec"]
