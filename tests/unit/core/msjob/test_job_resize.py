"""Resize of a running job: without a restart if its scheduler supports it, else with one or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.msjob.msjobs import FakeCluster, job
from tests.unit.core.msjob.test_job_plan import actions_of, events

from covey.core.cluster.view import ClusterView, NodeView
from covey.core.incidents import Incident, Outcome, Stage
from covey.core.msjob import scheduler_status as scheduler_statuses
from covey.core.msjob.actions import AnnounceWorkers, CreatePod, DeletePod, ReleaseWorkers
from covey.core.msjob.resize import NO_SCHEDULER_AFTER_S, REQUEST_RETRY_S, RESIZABLE_TIMEOUT_S
from covey.core.msjob.scheduler_status import SchedulerStatus
from covey.core.types import Phase, Role


def scheduler_of(*pods: int, resizable: bool = True, processes: int = 1, goal: int = 0) -> SchedulerStatus:
    """Return the status of a scheduler whose world has the workers of these pods, `processes` in each."""
    names = [f"train-worker-{index}" for index in pods]
    if processes == 1:
        workers = {name: name for name in names}
    else:
        workers = {str(n): name for n, name in enumerate(name for name in names for _ in range(processes))}
    return SchedulerStatus(phase=Phase.READY, generation=1, step=7, resizable=resizable, workers=workers, target_workers=goal)


def running(*, scheduler_status: SchedulerStatus | None, **more: Any) -> FakeCluster:
    cluster = FakeCluster(job(roles={"Scheduler": 1, "Worker": 3}, **more)).start()
    cluster.scheduler_status = scheduler_status
    cluster.reconcile()
    return cluster


def scale(cluster: FakeCluster, number: int) -> None:
    cluster.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = number


def test_scale_out_creates_pods_and_ends_when_their_workers_joined() -> None:
    cluster = running(scheduler_status=scheduler_of(0, 1, 2))
    scale(cluster, 5)
    plan = cluster.reconcile()
    new = actions_of(plan, CreatePod)
    assert [(a.index, a.world["Worker"]) for a in new] == [(3, 3), (4, 3)], (
        "new pods get the number with which the cluster formed"
    )
    assert not actions_of(plan, DeletePod) and "train-worker-3, train-worker-4" in events(plan)["MSJobScaling"]
    cluster.apply(plan)
    for name in ("train-worker-3", "train-worker-4"):
        cluster.set_running(name)
    assert "MSJobScaled" not in events(cluster.reconcile())
    cluster.scheduler_status = scheduler_of(0, 1, 2, 3, 4)
    plan = cluster.reconcile()
    assert "without a restart" in events(plan)["MSJobScaled"] and "scaling" not in cluster.status
    assert not actions_of(cluster.reconcile(), CreatePod) and not events(cluster.reconcile())


def test_additional_workers_are_announced_until_the_scheduler_target_matches() -> None:
    cluster = running(scheduler_status=scheduler_of(0, 1, 2, goal=3))
    scale(cluster, 5)
    plan = cluster.reconcile()
    assert actions_of(plan, AnnounceWorkers) == [AnnounceWorkers(2)] and len(actions_of(plan, CreatePod)) == 2
    cluster.apply(plan)
    assert not actions_of(cluster.reconcile(), AnnounceWorkers)
    cluster.now += REQUEST_RETRY_S
    assert actions_of(cluster.reconcile(), AnnounceWorkers) == [AnnounceWorkers(2)], "repeated while it has no effect"
    cluster.scheduler_status = scheduler_of(0, 1, 2, goal=5)
    assert not actions_of(cluster.reconcile(), AnnounceWorkers)
    cluster.set_running("train-worker-3")
    cluster.set_terminated("train-worker-3", 1)
    cluster.apply(cluster.reconcile())
    cluster.reconcile()
    cluster.now += REQUEST_RETRY_S
    assert actions_of(cluster.reconcile(), AnnounceWorkers) == [AnnounceWorkers(0)], "a rolled-back pod is no longer announced"
    cluster.scheduler_status = scheduler_of(0, 1, 2, goal=3)
    assert not actions_of(cluster.reconcile(), AnnounceWorkers)


def test_failed_new_pod_rolls_back_the_scale_out_only() -> None:
    cluster = running(scheduler_status=scheduler_of(0, 1, 2))
    scale(cluster, 4)
    cluster.apply(cluster.reconcile())
    cluster.set_running("train-worker-3")
    cluster.set_terminated("train-worker-3", 20)
    plan = cluster.reconcile()
    assert [a.name for a in actions_of(plan, DeletePod)] == ["train-worker-3"] and "exit code 20" in events(plan)["ScaleFailed"]
    cluster.apply(plan)
    for _ in range(3):
        plan = cluster.reconcile()
        assert not actions_of(plan, CreatePod) and not events(plan), "a failed scale-out is not retried"
    assert "Running" in cluster.conditions() and cluster.status["world"]["Worker"] == 3
    scale(cluster, 5)
    assert [a.index for a in actions_of(cluster.reconcile(), CreatePod)] == [3, 4], "a different number starts a new scale-out"


def test_two_new_pods_that_fail_between_two_passes_roll_back_the_scale_out_only() -> None:
    cluster = running(scheduler_status=scheduler_of(0, 1, 2))
    scale(cluster, 5)
    cluster.apply(cluster.reconcile())
    for name in ("train-worker-3", "train-worker-4"):
        cluster.set_running(name)
        cluster.set_terminated(name, 20)
    plan = cluster.reconcile()
    assert sorted(a.name for a in actions_of(plan, DeletePod)) == ["train-worker-3", "train-worker-4"]
    cluster.apply(plan)
    cluster.apply(cluster.reconcile())
    assert "Running" in cluster.conditions() and "Failed" not in cluster.conditions()
    assert cluster.status["world"]["Worker"] == 3


def test_pending_new_pod_rolls_back_the_scale_out() -> None:
    cluster = running(scheduler_status=scheduler_of(0, 1, 2), runPolicy={"pendingTimeoutSeconds": 60})
    scale(cluster, 4)
    cluster.apply(cluster.reconcile())
    cluster.now += 61
    assert "Pending for more than 60 s" in events(cluster.reconcile())["ScaleFailed"] and "Failed" not in cluster.conditions()


@pytest.mark.parametrize("processes", [1, 2])
def test_scale_in_deletes_pods_after_their_workers_left(processes: int) -> None:
    annotations = {"covey/processes-per-pod": str(processes)}
    cluster = running(scheduler_status=scheduler_of(0, 1, 2, processes=processes), annotations=annotations)
    scale(cluster, 1)
    plan = cluster.reconcile()
    leaving = ["train-worker-1", "train-worker-2"] if processes == 1 else ["2", "3", "4", "5"]
    assert actions_of(plan, ReleaseWorkers) == [ReleaseWorkers(tuple(leaving))] and not actions_of(plan, DeletePod)
    assert not actions_of(cluster.reconcile(), ReleaseWorkers), "requested once"
    cluster.now += REQUEST_RETRY_S
    assert actions_of(cluster.reconcile(), ReleaseWorkers), "repeated while it has no effect"
    cluster.set_terminated("train-worker-2", 0)
    cluster.set_terminated("train-worker-1", 137)  # the exit code of a departing pod is ignored
    assert "Failed" not in cluster.conditions() and not actions_of(cluster.reconcile(), CreatePod)
    cluster.scheduler_status = scheduler_of(0, processes=processes)
    plan = cluster.reconcile()
    assert sorted(a.name for a in actions_of(plan, DeletePod)) == ["train-worker-1", "train-worker-2"]
    assert "without a restart" in events(plan)["MSJobScaled"]
    cluster.apply(plan)
    assert cluster.reconcile().actions == () and cluster.conditions() == {"Created", "Running"}


def test_pod_removed_by_scale_in_is_created_by_a_later_scale_out() -> None:
    cluster = running(scheduler_status=scheduler_of(0, 1, 2))
    scale(cluster, 2)
    cluster.reconcile()
    cluster.set_terminated("train-worker-2", 0)
    cluster.reconcile()
    cluster.scheduler_status = scheduler_of(0, 1)
    cluster.apply(cluster.reconcile())
    scale(cluster, 3)
    assert [a.index for a in actions_of(cluster.reconcile(), CreatePod)] == [2]


def test_replacement_after_a_scale_out_gets_the_formed_world_size() -> None:
    cluster = running(scheduler_status=scheduler_of(0, 1, 2), restart="ExitCode")
    scale(cluster, 4)
    cluster.apply(cluster.reconcile())
    cluster.set_running("train-worker-3")
    cluster.scheduler_status = scheduler_of(0, 1, 2, 3)
    cluster.reconcile()
    cluster.set_terminated("train-worker-1", 137)
    cluster.apply(cluster.reconcile())
    assert [a.world["Worker"] for a in actions_of(cluster.reconcile(), CreatePod)] == [3]


def test_job_without_covey_scheduler_keeps_its_size_with_a_warning() -> None:
    cluster = running(scheduler_status=None)
    cluster.now += NO_SCHEDULER_AFTER_S
    scale(cluster, 4)
    plan = cluster.reconcile()
    assert "no covey scheduler" in events(plan)["ScaleUnsupported"] and not actions_of(plan, CreatePod)
    assert not events(cluster.reconcile()) and cluster.status["world"]["Worker"] == 3


def test_resize_without_scheduler_restarts_all_pods_if_allowed() -> None:
    cluster = running(scheduler_status=None, restart="OnFailure", runPolicy={"backoffLimit": 0})
    cluster.now += NO_SCHEDULER_AFTER_S
    scale(cluster, 4)
    plan = cluster.reconcile()
    assert len(actions_of(plan, DeletePod)) == 4 and "all pods restart" in events(plan)["MSJobScaled"]
    created = actions_of(plan, CreatePod)
    cluster.apply(plan)
    plan = cluster.reconcile()
    created += actions_of(plan, CreatePod)
    assert len(created) == 5 and {a.world["Worker"] for a in created} == {4}
    assert cluster.status["restartsTotal"] == 0, "a requested restart is not counted"
    cluster.apply(plan)
    for name in cluster.pods:
        cluster.set_running(name)
    assert cluster.reconcile().status and cluster.conditions() == {"Created", "Running"} and "replacing" not in cluster.status


def test_restart_with_fewer_pods_waits_only_for_the_remaining_pods() -> None:
    cluster = running(scheduler_status=None, restart="OnFailure", labels={"fault-scheduling": "grace"})
    cluster.now += NO_SCHEDULER_AFTER_S
    scale(cluster, 2)
    for _ in range(3):
        cluster.apply(cluster.reconcile())
    for name in cluster.pods:
        cluster.set_running(name)
    cluster.reconcile()
    assert "replacing" not in cluster.status and sorted(cluster.pods) == [
        "train-scheduler-0",
        "train-worker-0",
        "train-worker-1",
    ]


def test_resize_waits_until_the_scheduler_is_resizable_or_times_out() -> None:
    cluster = running(scheduler_status=None)
    scale(cluster, 4)
    plan = cluster.reconcile()
    assert not events(plan) and plan.requeue_after is not None and plan.requeue_after <= NO_SCHEDULER_AFTER_S
    cluster.scheduler_status = scheduler_of(0, 1, 2, resizable=False)
    cluster.reconcile()
    cluster.now += RESIZABLE_TIMEOUT_S - 1
    assert not events(cluster.reconcile())
    cluster.now += 1
    assert "covey.Loop" in events(cluster.reconcile())["ScaleUnsupported"]
    cluster.scheduler_status = scheduler_of(0, 1, 2)
    assert [a.index for a in actions_of(cluster.reconcile(), CreatePod)] == [3], (
        "a resizable scheduler is used even after the timeout"
    )


def test_single_worker_job_cannot_be_scaled_out() -> None:
    cluster = FakeCluster(job(roles={"Worker": 1})).start()
    scale(cluster, 2)
    assert "two or more worker processes" in events(cluster.reconcile())["ScaleUnsupported"]


def test_progress_is_written_only_when_it_changed() -> None:
    nodes = [
        NodeView(Role.SCHEDULER, "sched", -1, "h", "a", "alive", True),
        NodeView(Role.WORKER, "train-worker-0", 0, "h", "a", "alive", True, step=41, restarts=1, host_id="train-worker-0"),
        NodeView(Role.WORKER, "train-worker-1", 1, "h", "a", "alive", True, step=42, host_id="train-worker-1"),
    ]
    waterfall = {Stage.DETECTED: 3.0, Stage.DECIDED: 0.5, Stage.RESUMED: 90.0}
    done = Incident(1, 0.0, "worker:1", 1, "killed", "recover", "why", Outcome.RESUMED, waterfall, 93.5)
    view = ClusterView("id", Phase.READY, "", 3, 2, 0, 0.0, 0.0, nodes, recoveries=[done, Incident(2, 0, "", 0, "", "", "")])
    cluster = running(scheduler_status=scheduler_statuses.scheduler_status_from_view(view))
    progress = cluster.status["progress"]
    assert {**progress, "updated": "", "recovery": ""} == {
        "phase": "ready",
        "world": 2,
        "generation": 3,
        "restarts": 1,
        "step": 42,
        "recovery": "",
        "updated": "",
    }
    assert "recover of worker:1 (killed): detected 3 ms" in progress["recovery"]
    cluster.now += 100
    cluster.reconcile()
    assert cluster.status["progress"]["updated"] == progress["updated"]
    cluster.scheduler_status = None
    cluster.reconcile()
    assert cluster.status["progress"] == progress, "the last progress and its time are kept"
