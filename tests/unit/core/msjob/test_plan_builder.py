"""`PlanBuilder`: the order of actions, which deletions it adds, and the earliest requeue."""

from __future__ import annotations

import pytest
from tests.unit.core.msjob.msjobs import NOW, pod

from covey.core.msjob.actions import CreateSecret, DeletePod, RecordEvent
from covey.core.msjob.plan_builder import PlanBuilder, ReconcilePlan
from covey.core.msjob.pod_state import PodState


def pod_state(*, terminating: bool = False) -> PodState:
    source = pod("train-worker-0")
    if terminating:
        source["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    return PodState(source, "mindspore")


def test_empty_plan_has_no_action_and_no_requeue() -> None:
    assert PlanBuilder(NOW).build(None, "nothing") == ReconcilePlan(reason="nothing")


def test_actions_are_in_order_of_addition() -> None:
    out = PlanBuilder(NOW)
    out.record_event("One", "first")
    out.add(CreateSecret())
    out.record_event("Two", "second", warn=True)
    plan = out.build({"state": "Running"}, "why")
    assert plan.actions == (RecordEvent("Normal", "One", "first"), CreateSecret(), RecordEvent("Warning", "Two", "second"))
    assert plan.status == {"state": "Running"} and plan.reason == "why"


@pytest.mark.parametrize(
    ("terminating", "grace", "deleted"), [(False, None, True), (False, 0, True), (True, None, False), (True, 0, True)]
)
def test_terminating_pod_is_deleted_again_only_by_force(terminating: bool, grace: int | None, deleted: bool) -> None:
    out = PlanBuilder(NOW)
    out.delete_pod(pod_state(terminating=terminating), grace=grace)
    expected = (DeletePod("train-worker-0", "train-worker-0-1", grace),) if deleted else ()
    assert out.build(None, "").actions == expected


def test_earliest_requeue_wins_and_is_never_negative() -> None:
    out = PlanBuilder(NOW)
    out.requeue_at(NOW + 60)
    out.requeue_at(NOW + 5)
    out.requeue_at(NOW + 30)
    assert out.build(None, "").requeue_after == 5
    out.requeue_at(NOW - 10)
    assert out.build(None, "").requeue_after == 0
