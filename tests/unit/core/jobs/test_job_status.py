"""What the owner of an MSJob reads: its events and conditions in full, from the first to the last."""

from __future__ import annotations

from typing import Any

from tests.unit.core.jobs.msjobs import NOW, World, container, job, pod

from covey.core.jobs import Observed, ReconcilePlan, plan_job
from covey.core.jobs.actions import RecordEvent
from covey.core.jobs.timestamps import format_timestamp


def told(made: ReconcilePlan) -> list[RecordEvent]:
    return [action for action in made.actions if isinstance(action, RecordEvent)]


def condition(made: ReconcilePlan, kind: str) -> tuple[str, str, str]:
    assert made.status is not None
    (found,) = [c for c in made.status["conditions"] if c["type"] == kind]
    return found["status"], found["reason"], found["message"]


def test_a_job_is_taken_up_runs_and_succeeds_in_these_words() -> None:
    world = World(job())
    made = world.look()
    assert told(made) == [RecordEvent("Normal", "MSJobCreated", "the job train was taken up")]
    assert condition(made, "Created") == ("True", "MSJobCreated", "the job train was taken up")
    assert world.status["startTime"] == format_timestamp(NOW) and world.status["world"] == {"Scheduler": 1, "Worker": 2}
    world.carry_out(world.look())
    for name in world.pods:
        world.runs(name)
    made = world.look()
    assert told(made) == [RecordEvent("Normal", "MSJobRunning", "the job train is running")]
    assert condition(made, "Running") == ("True", "MSJobRunning", "the job train is running")
    world.ends("train-worker-0", 0)
    made = world.look()
    assert condition(made, "Succeeded") == ("True", "MSJobSucceeded", "worker 0 (train-worker-0) succeeded")
    assert RecordEvent("Normal", "MSJobSucceeded", "worker 0 (train-worker-0) succeeded") in told(made)


def test_a_suspension_and_its_end_are_told_and_the_next_start_is_a_new_one() -> None:
    world = World(job()).start()
    kept = {"formed": True, "replacing": {}, "finished": [], "scaling": {}, "progress": {"step": 3}}
    world.job["status"].update(kept)
    world.job["spec"]["runPolicy"] = {"suspend": True}
    message = "runPolicy.suspend is set: the job's pods are taken away"
    made = world.look()
    assert told(made) == [RecordEvent("Normal", "MSJobSuspended", message)] and made.reason == message
    assert condition(made, "Suspended") == ("True", "MSJobSuspended", message)
    assert not {"world", "startTime", *kept} & world.status.keys(), "nothing of it is counted on"
    world.carry_out(made)
    assert told(world.look()) == [], "once"
    world.job["spec"]["runPolicy"] = {"suspend": False}
    world.now += 60
    made = world.look()
    assert RecordEvent("Normal", "MSJobResumed", "the job goes on") in told(made)
    assert condition(made, "Suspended") == ("False", "MSJobResumed", "the job goes on")
    assert world.status["startTime"] == format_timestamp(NOW + 60)


def test_what_is_wrong_before_the_start_is_the_end_and_later_it_is_told_until_it_is_right() -> None:
    wrong: dict[str, Any] = {"successPolicy": "Nobody"}
    made = plan_job(job(**wrong), Observed(), NOW)
    (said,) = told(made)
    assert (said.event_type, said.reason) == ("Warning", "InvalidSpec") and said.message == made.reason
    assert condition(made, "Failed") == ("True", "InvalidSpec", said.message)
    ended = plan_job(job(status=made.status, **wrong), Observed(), NOW)
    assert (ended.actions, ended.status, ended.reason) == ((), None, said.message), "it is said once"
    world = World(job()).start()
    world.job["spec"].update(wrong)
    made = world.look()
    assert told(made) == [said] and made.reason == said.message and world.status["refused"] == said.message
    again = world._plan()
    assert (again.actions, again.status, again.reason) == ((), None, said.message), "what runs goes on"
    world.job["spec"]["successPolicy"] = ""
    assert "refused" not in (world.look().status or {})


def test_a_job_that_is_deleted_needs_nothing() -> None:
    gone = job()
    gone["metadata"]["deletionTimestamp"] = format_timestamp(NOW)
    made = plan_job(gone, Observed(pods=[pod("train-worker-0")]), NOW)
    assert (made.actions, made.status, made.reason) == ((), None, "the job is being deleted: what it owns goes with it")


def test_what_the_kubelet_restarts_is_a_warning_with_names() -> None:
    world = World(job(restart="OnFailure")).start()
    for name, restarts in (("train-worker-0", 1), ("train-worker-1", 2)):
        world.pods[name]["status"] = container("running", {}, phase="Running", restarts=restarts)
    message = "3 restarts so far; the kubelet restarted containers of train-worker-0, train-worker-1"
    assert told(world.look()) == [RecordEvent("Warning", "ContainerRestarted", message)]
    assert told(world.look()) == [], "until there are more"


def test_time_is_over_at_its_last_moment_and_not_before() -> None:
    world = World(job(runPolicy={"activeDeadlineSeconds": 60})).start()
    world.now = NOW + 59
    made = world.look()
    assert made.requeue_after is not None and 0 < made.requeue_after <= 1 and "Failed" not in world.conditions()
    world.now = NOW + 60
    message = "the job was active for more than activeDeadlineSeconds 60"
    assert condition(world.look(), "Failed") == ("True", "DeadlineExceeded", message)
