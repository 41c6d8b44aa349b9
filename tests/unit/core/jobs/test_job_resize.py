"""Another number of workers for a running job: live where its scheduler can, else anew or not at all; each with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.jobs.msjobs import World, job
from tests.unit.core.jobs.test_job_plan import of, told

from covey.core.cluster.view import ClusterView, NodeView
from covey.core.incidents import Incident, Outcome, Stage
from covey.core.jobs import scheduler_status as lives
from covey.core.jobs.actions import AnnounceWorkers, CreatePod, DeletePod, ReleaseWorkers
from covey.core.jobs.resize import NO_SCHEDULER_AFTER_S, REQUEST_RETRY_S, RESIZABLE_TIMEOUT_S
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.core.types import Phase, Role


def cluster(*pods: int, resizable: bool = True, processes: int = 1, goal: int = 0) -> SchedulerStatus:
    """A world with the workers of these pods, `processes` in each."""
    names = [f"train-worker-{index}" for index in pods]
    if processes == 1:
        workers = {name: name for name in names}
    else:
        workers = {str(n): name for n, name in enumerate(name for name in names for _ in range(processes))}
    return SchedulerStatus(phase=Phase.READY, generation=1, step=7, resizable=resizable, workers=workers, target_workers=goal)


def running(*, live: SchedulerStatus | None, **more: Any) -> World:
    world = World(job(roles={"Scheduler": 1, "Worker": 3}, **more)).start()
    world.live = live
    world.look()
    return world


def scale(world: World, number: int) -> None:
    world.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = number


def test_growth_creates_pods_that_join_the_world() -> None:
    world = running(live=cluster(0, 1, 2))
    scale(world, 5)
    made = world.look()
    new = of(made, CreatePod)
    assert [(a.index, a.world["Worker"]) for a in new] == [(3, 3), (4, 3)], "newcomers are told with how many it formed"
    assert not of(made, DeletePod) and "train-worker-3, train-worker-4" in told(made)["MSJobScaling"]
    world.carry_out(made)
    for name in ("train-worker-3", "train-worker-4"):
        world.runs(name)
    assert "MSJobScaled" not in told(world.look())
    world.live = cluster(0, 1, 2, 3, 4)
    made = world.look()
    assert "nobody was restarted" in told(made)["MSJobScaled"] and "scaling" not in world.status
    assert not of(world.look(), CreatePod) and not told(world.look())


def test_the_scheduler_is_told_whom_to_let_in_until_it_knows() -> None:
    world = running(live=cluster(0, 1, 2, goal=3))
    scale(world, 5)
    made = world.look()
    assert of(made, AnnounceWorkers) == [AnnounceWorkers(2)] and len(of(made, CreatePod)) == 2
    world.carry_out(made)
    assert not of(world.look(), AnnounceWorkers)
    world.now += REQUEST_RETRY_S
    assert of(world.look(), AnnounceWorkers) == [AnnounceWorkers(2)], "said again where nothing came of it"
    world.live = cluster(0, 1, 2, goal=5)
    assert not of(world.look(), AnnounceWorkers)
    world.runs("train-worker-3")
    world.ends("train-worker-3", 1)
    world.carry_out(world.look())
    world.look()
    world.now += REQUEST_RETRY_S
    assert of(world.look(), AnnounceWorkers) == [AnnounceWorkers(0)], "who was taken back is not expected any more"
    world.live = cluster(0, 1, 2, goal=3)
    assert not of(world.look(), AnnounceWorkers)


def test_a_newcomer_that_fails_takes_the_growth_back_and_harms_nobody() -> None:
    world = running(live=cluster(0, 1, 2))
    scale(world, 4)
    world.carry_out(world.look())
    world.runs("train-worker-3")
    world.ends("train-worker-3", 20)
    made = world.look()
    assert [a.name for a in of(made, DeletePod)] == ["train-worker-3"] and "exit code 20" in told(made)["ScaleFailed"]
    world.carry_out(made)
    for _ in range(3):
        made = world.look()
        assert not of(made, CreatePod) and not told(made), "it is not tried again by itself"
    assert "Running" in world.conditions() and world.status["world"]["Worker"] == 3
    scale(world, 5)
    assert [a.index for a in of(world.look(), CreatePod)] == [3, 4], "another number is another try"


def test_a_newcomer_that_stays_pending_takes_the_growth_back() -> None:
    world = running(live=cluster(0, 1, 2), runPolicy={"pendingTimeoutSeconds": 60})
    scale(world, 4)
    world.carry_out(world.look())
    world.now += 61
    assert "Pending for more than 60 s" in told(world.look())["ScaleFailed"] and "Failed" not in world.conditions()


@pytest.mark.parametrize("processes", [1, 2])
def test_shrinking_lets_workers_leave_before_their_pods_go(processes: int) -> None:
    notes = {"covey/processes-per-pod": str(processes)}
    world = running(live=cluster(0, 1, 2, processes=processes), annotations=notes)
    scale(world, 1)
    made = world.look()
    leaving = ["train-worker-1", "train-worker-2"] if processes == 1 else ["2", "3", "4", "5"]
    assert of(made, ReleaseWorkers) == [ReleaseWorkers(tuple(leaving))] and not of(made, DeletePod)
    assert not of(world.look(), ReleaseWorkers), "asked once"
    world.now += REQUEST_RETRY_S
    assert of(world.look(), ReleaseWorkers), "and again where nothing came of it"
    world.ends("train-worker-2", 0)
    world.ends("train-worker-1", 137)  # however it ends, its work is no longer missed
    assert "Failed" not in world.conditions() and not of(world.look(), CreatePod)
    world.live = cluster(0, processes=processes)
    made = world.look()
    assert sorted(a.name for a in of(made, DeletePod)) == ["train-worker-1", "train-worker-2"]
    assert "nobody was restarted" in told(made)["MSJobScaled"]
    world.carry_out(made)
    assert world.look().actions == () and world.conditions() == {"Created", "Running"}


def test_a_pod_that_left_can_come_again() -> None:
    world = running(live=cluster(0, 1, 2))
    scale(world, 2)
    world.look()
    world.ends("train-worker-2", 0)
    world.look()
    world.live = cluster(0, 1)
    world.carry_out(world.look())
    scale(world, 3)
    assert [a.index for a in of(world.look(), CreatePod)] == [2]


def test_after_a_growth_a_replacement_is_told_the_number_of_the_formation() -> None:
    world = running(live=cluster(0, 1, 2), restart="ExitCode")
    scale(world, 4)
    world.carry_out(world.look())
    world.runs("train-worker-3")
    world.live = cluster(0, 1, 2, 3)
    world.look()
    world.ends("train-worker-1", 137)
    world.carry_out(world.look())
    assert [a.world["Worker"] for a in of(world.look(), CreatePod)] == [3]


def test_a_job_whose_scheduler_is_no_covey_stays_and_says_so() -> None:
    world = running(live=None)
    world.now += NO_SCHEDULER_AFTER_S
    scale(world, 4)
    made = world.look()
    assert "no scheduler of covey" in told(made)["ScaleUnsupported"] and not of(made, CreatePod)
    assert not told(world.look()) and world.status["world"]["Worker"] == 3


def test_where_restarts_are_allowed_all_start_anew_with_the_new_number() -> None:
    world = running(live=None, restart="OnFailure", runPolicy={"backoffLimit": 0})
    world.now += NO_SCHEDULER_AFTER_S
    scale(world, 4)
    made = world.look()
    assert len(of(made, DeletePod)) == 4 and "start anew" in told(made)["MSJobScaled"]
    created = of(made, CreatePod)
    world.carry_out(made)
    made = world.look()
    created += of(made, CreatePod)
    assert len(created) == 5 and {a.world["Worker"] for a in created} == {4}
    assert world.status["restartsTotal"] == 0, "it was asked for: no limit counts it"
    world.carry_out(made)
    for name in world.pods:
        world.runs(name)
    assert world.look().status and world.conditions() == {"Created", "Running"} and "replacing" not in world.status


def test_anew_with_fewer_waits_for_nobody_who_is_not_to_come() -> None:
    world = running(live=None, restart="OnFailure", labels={"fault-scheduling": "grace"})
    world.now += NO_SCHEDULER_AFTER_S
    scale(world, 2)
    for _ in range(3):
        world.carry_out(world.look())
    for name in world.pods:
        world.runs(name)
    world.look()
    assert "replacing" not in world.status and sorted(world.pods) == ["train-scheduler-0", "train-worker-0", "train-worker-1"]


def test_a_young_scheduler_has_time_to_answer() -> None:
    world = running(live=None)
    scale(world, 4)
    made = world.look()
    assert not told(made) and made.requeue_after is not None and made.requeue_after <= NO_SCHEDULER_AFTER_S
    world.live = cluster(0, 1, 2, resizable=False)
    world.look()
    world.now += RESIZABLE_TIMEOUT_S - 1
    assert not told(world.look())
    world.now += 1
    assert "covey.Loop" in told(world.look())["ScaleUnsupported"]
    world.live = cluster(0, 1, 2)
    assert [a.index for a in of(world.look(), CreatePod)] == [3], "late is not too late"


def test_a_world_of_one_cannot_grow() -> None:
    world = World(job(roles={"Worker": 1})).start()
    scale(world, 2)
    assert "world of several" in told(world.look())["ScaleUnsupported"]


def test_progress_is_shown_and_written_only_when_it_changed() -> None:
    nodes = [
        NodeView(Role.SCHEDULER, "sched", -1, "h", "a", "alive", True),
        NodeView(Role.WORKER, "train-worker-0", 0, "h", "a", "alive", True, step=41, restarts=1, host_id="train-worker-0"),
        NodeView(Role.WORKER, "train-worker-1", 1, "h", "a", "alive", True, step=42, host_id="train-worker-1"),
    ]
    waterfall = {Stage.DETECTED: 3.0, Stage.DECIDED: 0.5, Stage.RESUMED: 90.0}
    done = Incident(1, 0.0, "worker:1", 1, "killed", "recover", "why", Outcome.RESUMED, waterfall, 93.5)
    view = ClusterView("id", Phase.READY, "", 3, 2, 0, 0.0, 0.0, nodes, recoveries=[done, Incident(2, 0, "", 0, "", "", "")])
    world = running(live=lives.scheduler_status_from_view(view))
    shown = world.status["progress"]
    assert {**shown, "updated": "", "recovery": ""} == {
        "phase": "ready",
        "world": 2,
        "generation": 3,
        "restarts": 1,
        "step": 42,
        "recovery": "",
        "updated": "",
    }
    assert "recover of worker:1 (killed): detected 3 ms" in shown["recovery"]
    world.now += 100
    world.look()
    assert world.status["progress"]["updated"] == shown["updated"]
    world.live = None
    world.look()
    assert world.status["progress"] == shown, "what was known last stays, with its time"
