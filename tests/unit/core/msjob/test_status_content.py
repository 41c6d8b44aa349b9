"""`JobStatus`: each method writes its fields and no others."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.msjob.msjobs import NOW, job

from covey.core.msjob.scaling_status import ScalingState
from covey.core.msjob.status import CREATED, FAILED, RESTARTING, RUNNING, SUCCEEDED, SUSPENDED, JobStatus
from covey.core.msjob.timestamps import format_timestamp

TIME = format_timestamp(NOW)
WORLD = {"Scheduler": 1, "Worker": 3}
LARGER = {"Scheduler": 1, "Worker": 5}


def status_of(**content: Any) -> JobStatus:
    return JobStatus(job(status=content), NOW)


def test_unchanged_status_is_not_written() -> None:
    assert JobStatus(job(), NOW).finish() is None
    assert status_of(world=WORLD, state="Created").finish() is None


def test_changed_status_is_written_with_the_time_and_the_job_is_unmodified() -> None:
    source = job(status={"world": WORLD})
    status = JobStatus(source, NOW)
    status.count_restarts(1)
    assert status.finish() == {"world": WORLD, "restarts": 1, "lastReconcileTime": TIME}
    assert source["status"] == {"world": WORLD}


@pytest.mark.parametrize("field", ["replacing", "finished", "scaling"])
def test_empty_bookkeeping_fields_are_omitted(field: str) -> None:
    assert status_of(world=WORLD, **{field: {}}).finish() == {"world": WORLD, "lastReconcileTime": TIME}


def test_start_writes_the_world_and_the_time() -> None:
    status = JobStatus(job(), NOW)
    assert status.world == status.formed_world == {}
    status.start(WORLD)
    assert status.content == {"world": WORLD, "startTime": TIME}


def test_resize_keeps_the_world_in_which_the_cluster_formed() -> None:
    status = status_of(world=WORLD)
    status.keep_formed_world()
    status.resize(LARGER)
    assert (status.world, status.formed_world) == (LARGER, WORLD)
    status.keep_formed_world()
    assert status.formed_world == WORLD, "a second resize does not change it"
    status.drop_formed_world()
    assert status.formed_world == LARGER


def test_restart_drops_the_fields_of_the_former_cluster() -> None:
    scaling = {"to": 5, "since": TIME, "from": 3}
    status = status_of(world=LARGER, formed=WORLD, finished=["a"], scaling=scaling, restarts=2, startTime=TIME)
    status.restart(WORLD)
    assert status.content == {"world": WORLD, "restarts": 2, "startTime": TIME}
    assert status.scaling.state is ScalingState.NONE


def test_suspend_drops_the_fields_of_the_pods_and_keeps_the_counters() -> None:
    pod_fields = {"world": WORLD, "formed": WORLD, "startTime": TIME, "replacing": {"a": {}}, "finished": ["a"]}
    status = status_of(**pod_fields, scaling={"to": 2}, progress={"step": 3}, restarts=1, faults=1)
    status.suspend()
    assert status.content == {"restarts": 1, "faults": 1}


def test_replacement_is_recorded_until_it_is_dropped() -> None:
    status = JobStatus(job(), NOW)
    assert status.replacements == {}
    status.add_replacement("a", "uid-a", in_restart=False, avoided_node="bad")
    status.add_replacement("b", "uid-b", in_restart=True)
    a = {"uid": "uid-a", "at": TIME, "all": False, "node": "bad"}
    b = {"uid": "uid-b", "at": TIME, "all": True}
    assert status.replacements == {"a": a, "b": b}
    status.mark_trained_without("b")
    assert status.replacements["b"] == {**b, "without": True}
    status.drop_replacement("a")
    status.drop_replacement("unknown")
    assert set(status.replacements) == {"b"}


def test_restarts_and_faults_add_up() -> None:
    status = status_of(restarts=2)
    status.count_restarts(3)
    status.count_fault()
    assert status.content == {"restarts": 5, "faults": 1} and status.read_count("other") == 0


def test_finished_pods_are_sorted_and_can_be_dropped() -> None:
    status = status_of(finished=["b"])
    status.add_finished_pods({"c", "a"})
    assert status.content["finished"] == ["a", "b", "c"] and status.finished_pods == {"a", "b", "c"}
    status.drop_finished_pods({"c"})
    assert status.content["finished"] == ["a", "b"]


def test_progress_has_the_time_of_its_last_change() -> None:
    status = status_of(progress={"step": 3, "updated": "before"})
    status.update_progress({"step": 3})
    assert status.finish() is None and status.has_progress
    status.update_progress({"step": 4})
    assert status.content["progress"] == {"step": 4, "updated": TIME}


def test_report_returns_true_only_for_new_texts_and_names() -> None:
    status = JobStatus(job(), NOW)
    assert not status.report_text("waiting", "") and status.content == {}
    assert status.report_text("waiting", "for a node") and not status.report_text("waiting", "for a node")
    assert status.report_once("taken", "a") and not status.report_once("taken", "a") and status.report_once("taken", "b")
    assert status.content == {"waiting": "for a node", "taken": ["a", "b"]}
    assert not status.report_text("waiting", "") and "waiting" not in status.content


def test_running_restarting_and_suspended_exclude_each_other() -> None:
    status = JobStatus(job(), NOW)
    for kind in (CREATED, RUNNING, RESTARTING, SUSPENDED):
        assert status.set_condition(kind, "Why", "because") and not status.set_condition(kind, "Why", "because")
    true = [condition["type"] for condition in status.content["conditions"] if condition["status"] == "True"]
    assert true == [CREATED, SUSPENDED] and status.content["state"] == SUSPENDED
    assert status.running_since == NOW


@pytest.mark.parametrize("kind", [SUCCEEDED, FAILED])
def test_final_condition_sets_the_completion_time_once_and_drops_replacements(kind: str) -> None:
    status = status_of(replacing={"a": {"uid": "uid-a"}}, completionTime="before")
    status.set_condition(kind, "Why", "because")
    assert status.final_condition == kind and status.replacements == {} and status.content["completionTime"] == "before"
    status = JobStatus(job(), NOW)
    assert status.final_condition == ""
    status.set_condition(kind, "Why", "because")
    assert status.read_time("completionTime") == NOW


def test_counters_show_the_active_workers_to_the_scale_subresource() -> None:
    status = JobStatus(job(), NOW)
    status.set_counters({"Worker": {"active": 2}}, workers="2/3", selector="x=y", restarts_total=4)
    assert status.content == {
        "replicaStatuses": {"Worker": {"active": 2}},
        "workers": "2/3",
        "workerReplicas": 2,
        "selector": "x=y",
        "restartsTotal": 4,
    }
