"""The plan of an MSJob, with plain dicts: what it asks for, what it remembers, when it comes back."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.jobs.msjobs import NOW, World, container, job, node, pod, service

from covey.core.jobs import Observed, ReconcilePlan, plan_job
from covey.core.jobs.actions import (
    AdoptOrphan,
    CreatePod,
    CreatePodGroup,
    CreateSecret,
    CreateService,
    DeleteJob,
    DeletePod,
    DeleteService,
    RecordEvent,
    ReportPodGone,
    SetLabel,
    TerminatePod,
)
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.core.jobs.timestamps import format_timestamp
from covey.core.types import Phase


def states(made: ReconcilePlan) -> dict[str, str]:
    assert made.status is not None
    return {c["type"]: c["status"] for c in made.status["conditions"]}


def reasons(made: ReconcilePlan) -> dict[str, str]:
    assert made.status is not None
    return {c["type"]: c["reason"] for c in made.status["conditions"]}


def of(made: ReconcilePlan, kind: type) -> list[Any]:
    return [action for action in made.actions if isinstance(action, kind)]


def told(made: ReconcilePlan) -> dict[str, str]:
    return {action.reason: action.message for action in of(made, RecordEvent)}


def test_first_the_service_then_everyone() -> None:
    made = plan_job(job(), Observed(), NOW)
    assert of(made, CreateService) == [CreateService("Scheduler")] and not of(made, CreatePod)
    assert states(made) == {"Created": "True"}
    made = plan_job(job(status=made.status), Observed(services=[service("train-scheduler-0")]), NOW)
    assert [(a.role, a.index) for a in of(made, CreatePod)] == [("Scheduler", 0), ("Worker", 0), ("Worker", 1)]
    assert not of(made, CreateService) and of(made, CreateSecret)


def test_a_single_worker_needs_no_service() -> None:
    made = plan_job(job(roles={"Worker": 1}), Observed(), NOW)
    assert [(a.role, a.index) for a in of(made, CreatePod)] == [("Worker", 0)] and not of(made, CreateService)


def test_letter_case_of_roles_does_not_matter() -> None:
    made = plan_job(job(roles={"worker": 1}), Observed(), NOW)
    assert [a.role for a in of(made, CreatePod)] == ["Worker"]


# -- success ---------------------------------------------------------------------------------------------------------


def test_by_default_worker_0_decides() -> None:
    world = World(job()).start()
    world.ends("train-worker-1", 0)
    assert world.look().reason != "" and "Succeeded" not in world.conditions()
    world.ends("train-worker-0", 0)
    made = world.look()
    assert states(made) == {"Running": "False", "Created": "True", "Succeeded": "True"}
    assert made.status is not None and made.status["state"] == "Succeeded" and made.status["completionTime"]


def test_all_workers_wait_for_the_last() -> None:
    world = World(job(successPolicy="AllWorkers")).start()
    world.ends("train-worker-0", 0)
    world.look()
    assert "Succeeded" not in world.conditions()
    world.ends("train-worker-1", 0)
    world.look()
    assert "Succeeded" in world.conditions()


def test_a_succeeded_pod_that_was_collected_does_not_run_again() -> None:
    world = World(job(successPolicy="AllWorkers")).start()
    world.ends("train-worker-0", 0)
    world.look()
    del world.pods["train-worker-0"]
    assert not of(world.look(), CreatePod)
    world.ends("train-worker-1", 0)
    world.look()
    assert "Succeeded" in world.conditions()


# -- failure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_never_means_the_first_failure_is_the_last(role: str) -> None:
    world = World(job()).start()
    world.ends(f"train-{role}-0", 3)
    made = world.look()
    assert states(made)["Failed"] == "True" and "exit code 3" in told(made)["MSJobFailed"]
    assert "Succeeded" not in states(made)


def test_a_failure_and_a_success_in_one_look_are_one_condition() -> None:
    world = World(job()).start()
    world.ends("train-worker-0", 0)
    world.ends("train-worker-1", 1)
    made = world.look()
    assert len({"Succeeded", "Failed"} & {k for k, v in states(made).items() if v == "True"}) == 1


@pytest.mark.parametrize("code", [130, 137, 138, 143])
def test_retryable_codes_bring_a_replacement(code: int) -> None:
    world = World(job(restart="ExitCode")).start()
    world.ends("train-worker-1", code)
    made = world.look()
    [deleted] = of(made, DeletePod)
    assert deleted.name == "train-worker-1" and deleted.uid == world.pods["train-worker-1"]["metadata"]["uid"]
    assert states(made)["Restarting"] == "True" and states(made)["Running"] == "False"
    del world.pods["train-worker-1"]
    assert [(a.role, a.index) for a in of(world.look(), CreatePod)] == [("Worker", 1)]
    world.runs("train-worker-1")
    made = world.look()
    assert states(made)["Running"] == "True" and made.status is not None and made.status["restartsTotal"] == 1


@pytest.mark.parametrize("code", [1, 2, 126, 127, 128, 139, 77])
def test_permanent_codes_end_the_job(code: int) -> None:
    world = World(job(restart="ExitCode")).start()
    world.ends("train-worker-1", code)
    assert states(world.look())["Failed"] == "True"


def test_a_restart_is_counted_once_however_often_it_is_looked_at() -> None:
    world = World(job(restart="ExitCode")).start()
    world.ends("train-worker-1", 137)
    for _ in range(3):
        made = world.look()
        assert world.status["restarts"] == 1 and len(of(made, DeletePod)) == 1


def test_backoff_limit_counts_our_restarts() -> None:
    world = World(job(restart="ExitCode", runPolicy={"backoffLimit": 2})).start()
    for _ in range(2):
        world.ends("train-worker-1", 137)
        world.look()
        del world.pods["train-worker-1"]
        world.look()
        world.runs("train-worker-1")
        world.look()
    world.ends("train-worker-1", 137)
    made = world.look()
    assert reasons(made)["Failed"] == "BackoffLimitExceeded" and made.status is not None
    assert made.status["restartsTotal"] == 2


def test_backoff_limit_counts_the_kubelets_restarts() -> None:
    world = World(job(restart="OnFailure", runPolicy={"backoffLimit": 1})).start()
    world.runs("train-worker-0", restarts=1)
    made = world.look()
    assert "Failed" not in states(made) and "ContainerRestarted" in told(made)
    world.runs("train-worker-0", restarts=2)
    assert reasons(world.look())["Failed"] == "BackoffLimitExceeded"


def test_restarts_of_a_replaced_pod_stay_counted() -> None:
    world = World(job(restart="OnFailure")).start()
    world.runs("train-worker-0", restarts=3)
    world.look()
    world.pods["train-worker-0"]["status"] |= {"phase": "Failed", "reason": "Evicted"}
    world.look()
    assert world.status["restartsTotal"] == 4
    del world.pods["train-worker-0"]
    world.look()
    world.runs("train-worker-0")
    world.look()
    assert world.status["restartsTotal"] == 4


def test_dynamic_workers_may_fail_but_not_all() -> None:
    world = World(job(enableDynamicWorker=True)).start()
    world.ends("train-worker-1", 1)
    made = world.look()
    assert "Failed" not in states(made) and "WorkerLost" in told(made)
    assert "WorkerLost" not in told(world.look())
    world.ends("train-worker-0", 1)
    assert states(world.look())["Failed"] == "True"


def test_dynamic_workers_do_not_excuse_the_scheduler() -> None:
    world = World(job(enableDynamicWorker=True)).start()
    world.ends("train-scheduler-0", 1)
    assert states(world.look())["Failed"] == "True"


def test_a_dynamic_job_succeeds_with_those_that_are_left() -> None:
    world = World(job(enableDynamicWorker=True, successPolicy="AllWorkers")).start()
    world.ends("train-worker-1", 1)
    world.look()
    world.ends("train-worker-0", 0)
    assert states(world.look())["Succeeded"] == "True"


# -- after the end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        ("All", {"train-scheduler-0", "train-worker-0", "train-worker-1"}),
        ("Running", {"train-scheduler-0", "train-worker-1"}),
        ("None", set()),
    ],
)
def test_clean_pod_policy(policy: str, deleted: set[str]) -> None:
    world = World(job(runPolicy={"cleanPodPolicy": policy})).start()
    world.ends("train-worker-0", 0)
    made = world.look()
    assert {a.name for a in of(made, DeletePod)} == deleted
    assert bool(of(made, DeleteService)) == (policy != "None")
    assert not of(made, TerminatePod)


def test_under_none_the_pods_of_a_failed_job_are_ended_and_kept() -> None:
    world = World(job(runPolicy={"cleanPodPolicy": "None"})).start()
    world.ends("train-worker-0", 1)
    made = world.look()
    assert {a.name for a in of(made, TerminatePod)} == {"train-scheduler-0", "train-worker-1"} and not of(made, DeletePod)
    for name in ("train-scheduler-0", "train-worker-1"):
        world.pods[name]["spec"]["activeDeadlineSeconds"] = 1
    assert not of(world.look(), TerminatePod)


def test_ttl_is_a_timer() -> None:
    world = World(job(runPolicy={"ttlSecondsAfterFinished": 100})).start()
    world.ends("train-worker-0", 0)
    world.look()
    made = world.look()
    assert made.requeue_after == pytest.approx(100, abs=1) and not of(made, DeleteJob)
    world.now += 101
    assert of(world.look(), DeleteJob)


def test_the_deadline_is_a_timer() -> None:
    world = World(job(runPolicy={"activeDeadlineSeconds": 50})).start()
    made = world.look()
    assert made.requeue_after == pytest.approx(50, abs=1)
    world.now += 51
    assert reasons(world.look())["Failed"] == "DeadlineExceeded"


def test_a_finished_job_stays_finished() -> None:
    world = World(job()).start()
    world.ends("train-worker-0", 0)
    world.look()
    world.pods.clear()
    made = world.look()
    assert not of(made, CreatePod) and not of(made, CreateService) and "Succeeded" in world.conditions()
    world.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 5
    assert not of(world.look(), CreatePod)


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    deleted = job()
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert plan_job(deleted, Observed(pods=[pod("train-worker-0", phase="Failed")]), NOW).actions == ()


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_why_nothing_starts_is_told_when_it_changes() -> None:
    world = World(job()).start(phase="Pending")
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes have a GPU"}
    world.pods["train-worker-1"]["status"]["conditions"] = [unscheduled]
    made = world.look()
    assert told(made)["Pending"] == "train-worker-1: Unschedulable: 0/3 nodes have a GPU"
    assert "Pending" not in told(world.look())
    world.pods["train-worker-1"]["status"] = container("waiting", {"reason": "ErrImagePull", "message": "no such image"})
    assert told(world.look())["Pending"] == "train-worker-1: ErrImagePull: no such image"


def test_a_pending_timeout_ends_in_a_condition() -> None:
    world = World(job(runPolicy={"pendingTimeoutSeconds": 60})).start(phase="Pending")
    made = world.look()
    assert made.requeue_after == pytest.approx(60, abs=1)
    world.now += 61
    assert reasons(world.look())["Failed"] == "PendingTimeout"


def test_a_pod_that_cannot_even_be_created_times_out_too() -> None:
    world = World(job(roles={"Worker": 1}, runPolicy={"pendingTimeoutSeconds": 60}))
    world.look()
    world.now += 61
    assert reasons(world.look())["Failed"] == "PendingTimeout"


# -- nodes -----------------------------------------------------------------------------------------------------------


def test_a_pod_on_a_lost_node_is_replaced_by_force() -> None:
    world = World(job(restart="OnFailure")).start()
    world.nodes = {"n0": node("n0", ready="Unknown", since=NOW), "n1": node("n1")}
    world.pods["train-worker-0"]["spec"]["nodeName"] = "n0"
    world.pods["train-worker-1"]["spec"]["nodeName"] = "n1"
    made = world.look()
    assert not of(made, DeletePod) and made.requeue_after == pytest.approx(60, abs=1)
    world.now += 61
    made = world.look()
    assert [(a.name, a.grace_period_s) for a in of(made, DeletePod)] == [("train-worker-0", 0)]
    assert world.status["restarts"] == 1


def test_a_deletion_that_hangs_on_a_lost_node_is_forced() -> None:
    world = World(job(restart="OnFailure")).start()
    world.nodes = {"n0": node("n0", ready="Unknown", since=NOW - 1000)}
    for name in ("train-scheduler-0", "train-worker-0"):
        world.pods[name]["spec"].pop("nodeName", None)
    world.pods["train-worker-1"]["spec"]["nodeName"] = "n0"
    world.pods["train-worker-1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert ("train-worker-1", 0) in [(a.name, a.grace_period_s) for a in of(world.look(), DeletePod)]


# -- recovery --------------------------------------------------------------------------------------------------------

GRACE = {"fault-scheduling": "grace"}


def test_recover_moves_the_one_pod_to_another_node() -> None:
    world = World(job(labels=GRACE, annotations={"recover-strategy": "recover"})).start()
    assert (
        SetLabel("process-recover-enable", "on")
        in plan_job(job(labels=GRACE, annotations={"recover-strategy": "recover"}), Observed(), NOW).actions
    )
    world.pods["train-worker-0"]["spec"]["nodeName"] = "bad"
    world.ends("train-worker-0", 1)
    made = world.look()
    assert [a.name for a in of(made, DeletePod)] == ["train-worker-0"]
    del world.pods["train-worker-0"]
    [created] = of(world.look(), CreatePod)
    assert (created.role, created.index, created.excluded_nodes) == ("Worker", 0, ("bad",))
    world.runs("train-worker-0")
    world.pods["train-worker-0"]["spec"]["nodeName"] = "worse"
    world.look()
    world.ends("train-worker-0", 1)
    world.look()
    del world.pods["train-worker-0"]
    assert [a.excluded_nodes for a in of(world.look(), CreatePod)] == [("worse",)]  # or soon no node would be left


def covey_run(**more: Any) -> World:
    """A job whose pods run `covey run`."""
    asked = job(labels=GRACE, annotations={"recover-strategy": "recover-in-place,recover"}, **more)
    asked["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"] = ["covey", "run", "train.py"]
    return World(asked).start()


def heals(*lives: str) -> SchedulerStatus:
    """A cluster inside that waits for who is replaced, with members in these pods."""
    return SchedulerStatus(phase=Phase.READY, generation=1, supports_healing=True, pod_uids=frozenset(lives))


def test_a_pod_of_covey_run_is_replaced_alone_and_the_scheduler_inside_is_told_until_it_knows() -> None:
    world = covey_run()
    uid = world.pods["train-worker-1"]["metadata"]["uid"]
    world.live = heals(uid, "another")
    world.ends("train-worker-1", 137)
    made = world.look()
    assert [a.name for a in of(made, DeletePod)] == ["train-worker-1"]
    assert of(made, ReportPodGone) == of(world.look(), ReportPodGone) == [ReportPodGone("train-worker-1", uid)]
    del world.pods["train-worker-1"]
    made = world.look()
    assert of(made, ReportPodGone) and [a.index for a in of(made, CreatePod)] == [1]
    world.live = heals("another")
    assert not of(world.look(), ReportPodGone)


def test_a_pod_that_is_asked_to_go_and_still_runs_is_not_said_to_be_gone() -> None:
    labels, notes = {**GRACE, "subHealthyStrategy": "graceExit"}, {"recover-strategy": "recover"}
    world = World(job(labels=labels, annotations=notes)).start()
    ill = node("n")
    ill["status"]["conditions"].append({"type": "DiskPressure", "status": "True"})
    world.pods["train-worker-1"]["spec"]["nodeName"], world.nodes = "n", {"n": ill}
    world.live = heals(world.pods["train-worker-1"]["metadata"]["uid"])
    made = world.look()
    assert of(made, DeletePod) and not of(made, ReportPodGone)
    del world.pods["train-worker-1"]
    assert of(world.look(), ReportPodGone)


@pytest.mark.parametrize(
    ("name", "code", "roles", "why"),
    [
        ("train-worker-1", 1, None, "is not known"),  # a program that failed: its cluster ends as well
        ("train-worker-0", 137, {"Worker": 2}, "is not known"),  # the scheduler was in this pod
        ("train-scheduler-0", 137, None, "journal went with its pod"),
    ],
)
def test_where_nobody_would_wait_all_start_anew_and_that_counts_once(
    name: str, code: int, roles: dict[str, int] | None, why: str
) -> None:
    world = covey_run(roles=roles)
    world.live = heals(world.pods[name]["metadata"]["uid"])
    world.ends(name, code)
    made = world.look()
    assert len(of(made, DeletePod)) == len(world.pods) and world.status["restarts"] == 1
    assert why in told(made)["MSJobRestarting"] and not of(made, ReportPodGone)


def test_elastic_training_goes_on_without_a_pod_that_has_no_place_and_grows_back() -> None:
    notes = {"recover-strategy": "elastic-training", "wait-reschedule-timeout": "30"}
    world = World(job(labels=GRACE, annotations=notes, runPolicy={"pendingTimeoutSeconds": 60})).start()
    both = {"0": "train-worker-0", "1": "train-worker-1"}
    world.live = SchedulerStatus(phase=Phase.READY, has_finished_step=True, workers=both)
    world.ends("train-worker-1", 137)
    made = world.look()
    assert [a.name for a in of(made, DeletePod)] == ["train-worker-1"] and "without it" in told(made)["MSJobRestarting"]
    del world.pods["train-worker-1"]
    made = world.look()
    assert [a.excluded_nodes for a in of(made, CreatePod)] == [()], "any node will do"
    world.carry_out(made)
    world.live = SchedulerStatus(phase=Phase.READY, has_finished_step=True, workers={"0": "train-worker-0"})
    made = world.look()
    assert "without train-worker-1" in told(made)["MSJobShrunk"] and "Running" in world.conditions()
    world.now += 1000
    assert not told(world.look()) and "Failed" not in world.conditions(), "it may be Pending for as long as it takes"
    world.runs("train-worker-1")
    assert "joins" in told(world.look())["MSJobGrows"] and "replacing" not in world.status
    assert world.status["restarts"] == 1


def test_elastic_training_needs_a_loop_that_has_finished_a_step() -> None:
    world = World(job(labels=GRACE, annotations={"recover-strategy": "elastic-training"})).start()
    world.live = SchedulerStatus(phase=Phase.READY, workers={"0": "train-worker-0", "1": "train-worker-1"})
    world.ends("train-worker-1", 137)
    assert "Failed" in states(world.look())


def test_elastic_training_does_not_wait_for_ever_for_a_world_that_does_not_go_on() -> None:
    notes = {"recover-strategy": "recover,elastic-training", "wait-reschedule-timeout": "30"}
    world = World(job(labels=GRACE, annotations=notes)).start()
    world.live = SchedulerStatus(phase=Phase.HEALING, has_finished_step=True, workers={"0": "train-worker-0"})
    world.ends("train-worker-1", 137)
    world.look()
    del world.pods["train-worker-1"]
    world.now += 31
    assert "did not run within" in told(world.look())["RescheduleTimeout"]


def test_recover_of_covey_run_whose_cluster_is_not_known_starts_everyone_anew() -> None:
    world = covey_run()
    world.ends("train-worker-0", 137)
    assert len(of(world.look(), DeletePod)) == 3 and world.status["restarts"] == 1
    for name in ("train-scheduler-0", "train-worker-1"):  # they fail in consequence, which counts no further
        world.ends(name, 30)
    world.look()
    assert world.status["restarts"] == 1


def test_recovery_is_off_without_fault_scheduling() -> None:
    asked = job(annotations={"recover-strategy": "recover"})
    assert "no effect" in told(plan_job(asked, Observed(), NOW))["Remark"]
    world = World(asked).start()
    world.ends("train-worker-0", 1)
    assert states(world.look())["Failed"] == "True"


def test_fault_scheduling_alone_restarts_everyone() -> None:
    world = World(job(labels={**GRACE, "fault-retry-times": "1"})).start()
    world.ends("train-worker-1", 1)
    made = world.look()
    assert {a.name for a in of(made, DeletePod)} == {"train-scheduler-0", "train-worker-0", "train-worker-1"}
    assert world.status["restarts"] == 1
    world.pods.clear()
    assert len(of(world.look(), CreatePod)) == 3
    for name in ("train-scheduler-0", "train-worker-0", "train-worker-1"):
        world.runs(name)
    world.look()
    world.ends("train-worker-1", 1)
    assert reasons(world.look())["Failed"] == "FaultRetryTimesExceeded"


def test_pod_rescheduling_replaces_one() -> None:
    world = World(job(labels={**GRACE, "fault-retry-times": "2", "pod-rescheduling": "on"})).start()
    world.ends("train-worker-1", 1)
    assert [a.name for a in of(world.look(), DeletePod)] == ["train-worker-1"]


def test_force_does_not_wait() -> None:
    world = World(job(labels={"fault-scheduling": "force", "fault-retry-times": "2", "pod-rescheduling": "on"})).start()
    world.ends("train-worker-1", 1)
    assert [a.grace_period_s for a in of(world.look(), DeletePod)] == [0]


def test_a_replacement_that_does_not_come_escalates_once_then_fails() -> None:
    notes = {"recover-strategy": "recover", "wait-reschedule-timeout": "30"}
    world = World(job(labels=GRACE, annotations=notes)).start()
    world.ends("train-worker-0", 1)
    world.look()
    del world.pods["train-worker-0"]
    made = world.look()
    assert made.requeue_after == pytest.approx(30, abs=1)
    world.pods["train-worker-0"] = pod("train-worker-0", uid="new", phase="Pending")
    world.now += 31
    made = world.look()
    assert "RescheduleTimeout" in told(made) and len(of(made, DeletePod)) == 3 and "Failed" not in states(made)
    world.pods.clear()
    world.look()
    world.now += 31
    assert reasons(world.look())["Failed"] == "RescheduleTimeout"


# -- suspend, scale, adoption, gang ----------------------------------------------------------------------------------


def test_suspend_takes_pods_away_and_resume_brings_them_back() -> None:
    world = World(job()).start()
    world.job["spec"]["runPolicy"] = {"suspend": True}
    made = world.look()
    assert len(of(made, DeletePod)) == 3 and states(made)["Suspended"] == "True" and states(made)["Running"] == "False"
    world.pods.clear()
    world.look()
    world.job["spec"]["runPolicy"] = {"suspend": False}
    made = world.look()
    assert len(of(made, CreatePod)) == 3 and states(made)["Suspended"] == "False" and world.status.get("restarts", 0) == 0


def goes(world: World, name: str, code: int) -> None:
    """A pod that was told to go has ended, and is still to be seen."""
    world.pods[name]["metadata"]["deletionTimestamp"] = format_timestamp(world.now + 30)
    world.ends(name, code)


@pytest.mark.parametrize("code", [0, 143])
def test_how_a_pod_of_before_a_suspension_ends_says_nothing_about_the_job(code: int) -> None:
    world = World(job()).start()
    world.job["spec"]["runPolicy"] = {"suspend": True}
    world.now += 5
    assert len(of(world.look(), DeletePod)) == 3 and world.status["state"] == "Suspended"
    world.job["spec"]["runPolicy"] = {"suspend": False}
    world.now += 5
    for name in world.pods:
        goes(world, name, code)
    made = world.look()
    assert world.conditions() == {"Created"} and world.status["state"] == "Created"
    assert not of(made, CreatePod), "no place is free yet"
    del world.pods["train-worker-0"]
    assert [(a.role, a.index) for a in of(world.look(), CreatePod)] == [("Worker", 0)]


def test_a_pod_that_is_replaced_and_ends_well_has_not_finished_the_job() -> None:
    """A script that ends in order when it is told to go is common."""
    world = World(job(labels=GRACE)).start()
    world.pods["train-worker-1"]["status"] = {"phase": "Failed", "reason": "Evicted"}
    assert len(of(world.look(), DeletePod)) == 3, "all start anew"
    goes(world, "train-worker-0", 0)
    world.look()
    assert "finished" not in world.status and "Succeeded" not in world.conditions()
    del world.pods["train-worker-0"]["metadata"]["deletionTimestamp"]
    assert "train-worker-0" in {a.name for a in of(world.look(), DeletePod)}, "it was not told yet: it is now"


def test_a_pod_that_somebody_takes_away_is_no_fault_of_the_program() -> None:
    world = World(job(labels={**GRACE, "fault-retry-times": "1"})).start()
    goes(world, "train-worker-1", 143)
    world.look()
    assert "faults" not in world.status and world.status["restarts"] == 1


def test_dynamic_workers_scale_while_they_run() -> None:
    world = World(job(enableDynamicWorker=True)).start()
    world.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 3
    assert [(a.role, a.index) for a in of(world.look(), CreatePod)] == [("Worker", 2)]
    world.runs("train-worker-2")
    world.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 1
    assert {a.name for a in of(world.look(), DeletePod)} == {"train-worker-1", "train-worker-2"}


def test_a_job_that_does_not_run_yet_takes_the_new_number() -> None:
    world = World(job()).start(phase="Pending")
    world.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = 3
    assert len(of(world.look(), DeletePod)) == 3
    world.pods.clear()
    created = of(world.look(), CreatePod)
    assert len(created) == 4 and created[0].world == {"Scheduler": 1, "Worker": 3}


def test_orphans_are_adopted_and_strangers_left_alone() -> None:
    orphan, stranger = pod("train-worker-0", owner=""), pod("train-worker-1", owner="another")
    observed = Observed(pods=[orphan, stranger], services=[service("train-scheduler-0", owner="")])
    made = plan_job(job(), observed, NOW)
    assert {a.name for a in of(made, AdoptOrphan)} == {"train-worker-0", "train-scheduler-0"}
    assert [a.role for a in of(made, CreatePod)] == ["Scheduler"] and "NameTaken" in told(made)
    assert not of(made, DeletePod)


def test_a_gang_is_made_when_asked() -> None:
    made = plan_job(job(runPolicy={"schedulingPolicy": {"queue": "big"}}), Observed(uses_pod_groups=True), NOW)
    assert of(made, CreatePodGroup) == [CreatePodGroup(3, {"queue": "big"})]


def test_a_gang_of_an_earlier_job_of_this_name_is_not_this_ones_and_goes_with_it() -> None:
    """What that one owned may be collected after this one has its pods."""
    there = [pod(name, phase="Pending") for name in ("train-scheduler-0", "train-worker-0", "train-worker-1")]
    service_there = [service("train-scheduler-0")]
    for group, wanted in ((None, 1), (service("train", owner="another"), 1), (service("train"), 0)):
        made = plan_job(job(), Observed(uses_pod_groups=True, pods=there, services=service_there, pod_group=group), NOW)
        assert len(of(made, CreatePodGroup)) == wanted and not of(made, CreatePod)


# -- what cannot be --------------------------------------------------------------------------------------------------


def test_an_invalid_job_fails_with_the_path() -> None:
    bad = job()
    bad["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"] = [{"name": "script_data"}]
    made = plan_job(bad, Observed(), NOW)
    assert reasons(made)["Failed"] == "InvalidSpec"
    assert "spec.msReplicaSpecs.Worker.template.spec.volumes[0].name: 'script_data'" in told(made)["InvalidSpec"]


def test_an_invalid_change_does_not_end_a_running_job() -> None:
    world = World(job()).start()
    world.job["spec"]["successPolicy"] = "Most"
    made = world.look()
    assert "spec.successPolicy" in told(made)["InvalidSpec"] and "Failed" not in states(made)
    assert world.look().actions == ()


# -- nodes that are not well -----------------------------------------------------------------------------------------


def ill(name: str) -> dict[str, Any]:
    made = node(name)
    made["status"]["conditions"].append({"type": "KernelDeadlock", "status": "True"})
    made["status"]["conditions"].append({"type": "DiskPressure", "status": "False"})
    return made


def on_ill_node(strategy: str, **more: Any) -> World:
    world = World(job(labels={"fault-scheduling": "grace", "subHealthyStrategy": strategy}, **more)).start()
    for name, where in (("train-scheduler-0", "good"), ("train-worker-0", "good"), ("train-worker-1", "ill")):
        world.pods[name]["spec"]["nodeName"] = where
    world.nodes = {"good": node("good"), "ill": ill("ill")}
    return world


def test_a_node_that_is_not_well_is_ignored_by_default() -> None:
    assert on_ill_node("ignore").look().actions == ()


def test_pods_leave_a_node_that_is_not_well() -> None:
    world = on_ill_node("graceExit", annotations={"recover-strategy": "recover"})
    made = world.look()
    assert [(a.name, a.grace_period_s) for a in of(made, DeletePod)] == [("train-worker-1", None)]
    assert "not well (KernelDeadlock)" in told(made)["MSJobRestarting"]
    world.carry_out(made)
    assert [a.excluded_nodes for a in of(world.look(), CreatePod)] == [("ill",)]
    assert "faults" not in world.status, "the program did not fail"


def test_force_exit_waits_for_nobody_and_all_start_anew_elsewhere() -> None:
    world = on_ill_node("forceExit")
    made = world.look()
    assert {(a.name, a.grace_period_s) for a in of(made, DeletePod)} == {(name, 0) for name in world.pods}
    world.carry_out(made)
    assert {a.excluded_nodes for a in of(world.look(), CreatePod)} == {("ill",)}


def test_hot_switch_is_done_as_grace_exit_and_says_so() -> None:
    made = plan_job(job(labels={"fault-scheduling": "grace", "subHealthyStrategy": "hotSwitch"}), Observed(), NOW)
    assert "hotSwitch is done as graceExit" in told(made)["Remark"]
    made = plan_job(job(labels={"subHealthyStrategy": "sometimes"}), Observed(), NOW)
    assert "metadata.labels[subHealthyStrategy]" in told(made)["InvalidSpec"]
