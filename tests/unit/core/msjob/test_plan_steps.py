"""Each step of a pass by itself: its verdict, changes of the status, actions and requeue time."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.msjob.msjobs import NOW, KubeObject, container, job, node, pod, service

from covey.core.msjob import completion, plan, pod_failures, resize
from covey.core.msjob.actions import (
    Action,
    AdoptOrphan,
    CreatePod,
    CreateSecret,
    CreateService,
    DeleteJob,
    DeletePod,
    RecordEvent,
    ReportPodGone,
    SetLabel,
)
from covey.core.msjob.plan_builder import PlanBuilder
from covey.core.msjob.reconcile_context import Observed, ReconcileContext, make_context
from covey.core.msjob.scaling_status import ScalingState
from covey.core.msjob.scheduler_status import SchedulerStatus
from covey.core.msjob.spec import parse_job
from covey.core.msjob.status import FAILED, RUNNING, SUSPENDED, JobStatus
from covey.core.msjob.timestamps import format_timestamp
from covey.core.types import Phase

TIME = format_timestamp(NOW)
WORLD = {"Scheduler": 1, "Worker": 2}
NAMES = ["train-scheduler-0", "train-worker-0", "train-worker-1"]


class StepRun:
    """Input of a step and, after `run`, its results."""

    def __init__(self, source: KubeObject, **observed: Any) -> None:
        self.context: ReconcileContext = make_context(source, parse_job(source), Observed(**observed), NOW)
        self.status = JobStatus(source, NOW)
        self.verdict: str | None = None
        self.actions: tuple[Action, ...] = ()
        self.requeue_after: float | None = None

    def run(self, step: plan.Step) -> StepRun:
        out = PlanBuilder(NOW)
        self.verdict = step(self.context, self.status, out)
        result = out.build(None, "")
        self.actions, self.requeue_after = result.actions, result.requeue_after
        return self

    def events(self) -> list[str]:
        return [action.reason for action in self.actions if isinstance(action, RecordEvent)]


def started(**more: Any) -> KubeObject:
    return job(status={"world": WORLD, "startTime": TIME, **more.pop("status", {})}, **more)


def failed(name: str, code: int = 1) -> KubeObject:
    return {**pod(name), "status": container("terminated", {"exitCode": code}, phase="Failed")}


def scheduler(*pods: str, **more: Any) -> SchedulerStatus:
    return SchedulerStatus(phase=Phase.READY, resizable=True, workers={name: name for name in pods}, **more)


def test_order_of_the_steps_is_the_contract() -> None:
    assert [step.__name__ for step in plan.ACTIVE_STEPS] == [
        "record_remarks",
        "record_created",
        "adopt_orphans",
        "drop_finished_replacements",
        "suspend_job",
        "start_job",
        "update_progress",
        "scale_workers",
        "record_finished_pods",
        "check_success",
        "check_deadline",
        "handle_failed_pods",
        "check_overdue_replacements",
        "check_kubelet_restarts",
        "check_pending_pods",
        "report_gone_pods",
        "delete_extra_pods",
        "force_deletions",
        "create_missing",
        "update_conditions",
    ]
    assert [step.__name__ for step in plan.FINISHED_STEPS] == [
        "record_remarks",
        "apply_clean_policy",
        "force_deletions",
        "check_ttl",
        "report_finished",
    ]


@pytest.mark.parametrize("step", [step for step in plan.ACTIVE_STEPS if step is not plan.update_conditions])
def test_step_of_a_running_job_gives_no_verdict_and_changes_nothing(step: plan.Step) -> None:
    source = started(status={"conditions": [{"type": "Created", "status": "True"}], "state": "Created"})
    result = StepRun(source, pods=[pod(name) for name in NAMES], services=[service(NAMES[0])]).run(step)
    assert not result.verdict and result.actions == () and result.status.finish() is None


def test_record_remarks_sets_the_label_and_warns_before_the_job_was_created() -> None:
    labels, annotations = {"fault-scheduling": "grace"}, {"recover-strategy": "recover"}
    result = StepRun(job(labels=labels, annotations=annotations)).run(plan.record_remarks)
    assert result.actions == (SetLabel("process-recover-enable", "on"),)
    result = StepRun(job(annotations=annotations)).run(plan.record_remarks)
    assert result.events() == ["Remark"]


def test_record_created_drops_the_message_of_an_invalid_spec() -> None:
    result = StepRun(started(status={"refused": "an error message"})).run(plan.record_created)
    assert result.events() == ["MSJobCreated"] and "refused" not in result.status.content


def test_adopt_orphans_ignores_owned_and_terminating_pods() -> None:
    terminating = pod("train-worker-1", owner="")
    terminating["metadata"]["deletionTimestamp"] = TIME
    pods = [pod("train-scheduler-0"), pod("train-worker-0", owner=""), terminating]
    assert StepRun(started(), pods=pods).run(plan.adopt_orphans).actions == (
        AdoptOrphan("Pod", "train-worker-0", "train-worker-0-1"),
    )


def test_suspend_job_ends_the_pass() -> None:
    result = StepRun(started(runPolicy={"suspend": True}), pods=[pod("train-worker-0")]).run(plan.suspend_job)
    assert result.verdict and result.status.has_condition(SUSPENDED) and result.status.world == {}
    assert [type(action) for action in result.actions] == [DeletePod, RecordEvent]


def test_start_job_starts_once() -> None:
    result = StepRun(job()).run(plan.start_job)
    assert result.status.content == {"world": WORLD, "startTime": TIME}
    other = {"Scheduler": 1, "Worker": 7}
    assert StepRun(started(status={"world": other})).run(plan.start_job).status.world == other


def test_update_progress_needs_a_scheduler() -> None:
    assert not StepRun(started()).run(plan.update_progress).status.has_progress
    result = StepRun(started(), scheduler_status=scheduler("train-worker-0")).run(plan.update_progress)
    assert result.status.content["progress"]["world"] == 1


@pytest.mark.parametrize(
    ("reported", "state", "world"),
    [
        (None, ScalingState.WAITING, 2),
        (scheduler("train-worker-0", "train-worker-1"), ScalingState.GROWING, 4),
    ],
)
def test_scale_workers_scales_out_if_the_scheduler_is_resizable(
    reported: SchedulerStatus | None, state: ScalingState, world: int
) -> None:
    source = started(roles={"Scheduler": 1, "Worker": 4})
    result = StepRun(source, pods=[pod(name) for name in NAMES], scheduler_status=reported).run(resize.scale_workers)
    assert result.status.scaling.state is state and result.status.world["Worker"] == world


def test_scale_workers_requests_release_before_it_reduces_the_number() -> None:
    source = started(roles={"Scheduler": 1, "Worker": 1})
    both = scheduler("train-worker-0", "train-worker-1")
    result = StepRun(source, pods=[pod(name) for name in NAMES], scheduler_status=both).run(resize.scale_workers)
    assert result.status.scaling.state is ScalingState.SHRINKING and result.status.world == WORLD
    assert resize.is_leaving(result.context, result.status, "train-worker-1")
    assert not resize.is_leaving(result.context, result.status, "train-worker-0")
    one = scheduler("train-worker-0")
    result = StepRun(source, pods=[pod(name) for name in NAMES], scheduler_status=one).run(resize.scale_workers)
    assert result.status.scaling.state is ScalingState.NONE and result.status.world["Worker"] == 1
    assert result.status.formed_world == WORLD


def test_roll_back_growth_restores_the_number_and_keeps_the_reason() -> None:
    growing = {"to": 2, "since": TIME, "from": 1}
    result = StepRun(started(status={"scaling": growing, "replacing": {"train-worker-1": {"uid": "u"}}}))
    assert resize.is_joining(result.context, result.status, "train-worker-1")
    resize.roll_back_growth(result.context, result.status, PlanBuilder(NOW), "no room")
    assert result.status.scaling.state is ScalingState.FAILED and result.status.world["Worker"] == 1
    assert result.status.replacements == {} and not resize.is_joining(result.context, result.status, "train-worker-1")


def test_record_finished_pods_ignores_a_pod_that_is_replaced() -> None:
    pods = [pod("train-worker-0", phase="Succeeded"), pod("train-worker-1", phase="Succeeded")]
    replacing = {"train-worker-1": {"uid": "train-worker-1-1", "at": TIME}}
    result = StepRun(started(status={"replacing": replacing}), pods=pods).run(pod_failures.record_finished_pods)
    assert result.status.finished_pods == {"train-worker-0"}


def test_check_success_ends_the_job_and_updates_the_counters() -> None:
    result = StepRun(started(status={"finished": ["train-worker-0"]})).run(completion.check_success)
    assert result.verdict == "worker 0 (train-worker-0) succeeded" and result.status.final_condition == "Succeeded"
    assert result.status.content["replicaStatuses"]["Worker"]["succeeded"] == 1


@pytest.mark.parametrize(("age", "requeue"), [(59, 1), (60, None)])
def test_check_deadline_requeues_until_the_deadline(age: float, requeue: float | None) -> None:
    source = started(status={"startTime": format_timestamp(NOW - age)}, runPolicy={"activeDeadlineSeconds": 60})
    result = StepRun(source).run(completion.check_deadline)
    assert result.requeue_after == requeue and bool(result.verdict) is (requeue is None)


def test_handle_failed_pods_fails_or_replaces_by_the_policy() -> None:
    pods = [failed("train-worker-1", 137)]
    result = StepRun(started(), pods=pods).run(pod_failures.handle_failed_pods)
    assert result.verdict and result.status.final_condition == "Failed"
    result = StepRun(started(restart="ExitCode"), pods=pods).run(pod_failures.handle_failed_pods)
    assert not result.verdict and set(result.status.replacements) == {"train-worker-1"}
    assert result.actions[0] == DeletePod("train-worker-1", "train-worker-1-1") and result.status.read_count("restarts") == 1


@pytest.mark.parametrize(("in_restart", "ends"), [(False, False), (True, True)])
def test_check_overdue_replacements_restarts_all_pods_once(in_restart: bool, ends: bool) -> None:
    note = {"uid": "old", "at": format_timestamp(NOW - 1000), "all": in_restart}
    source = started(labels={"fault-scheduling": "grace"}, status={"replacing": {"train-worker-1": note}})
    result = StepRun(source, pods=[pod(name) for name in NAMES[:2]]).run(pod_failures.check_overdue_replacements)
    assert result.events() == ["RescheduleTimeout"] and bool(result.verdict) is ends
    assert len(result.status.replacements) == (0 if ends else 3)


def test_check_kubelet_restarts_counts_against_the_limit() -> None:
    restarted = {**pod("train-worker-0"), "status": container("running", {}, phase="Running", restarts=2)}
    result = StepRun(started(runPolicy={"backoffLimit": 2}), pods=[restarted]).run(pod_failures.check_kubelet_restarts)
    assert not result.verdict and result.events() == ["ContainerRestarted"]
    result = StepRun(started(runPolicy={"backoffLimit": 1}), pods=[restarted]).run(pod_failures.check_kubelet_restarts)
    assert result.verdict == "2 restarts exceed backoffLimit 1"


def test_check_pending_pods_fails_the_job_or_rolls_back_the_scale_out() -> None:
    late = [pod("train-scheduler-0"), pod("train-worker-0"), pod("train-worker-1", phase="Pending", created=NOW - 60)]
    source = started(runPolicy={"pendingTimeoutSeconds": 60})
    assert StepRun(source, pods=late).run(pod_failures.check_pending_pods).verdict
    source["status"]["scaling"] = {"to": 2, "since": TIME, "from": 1}
    result = StepRun(source, pods=late).run(pod_failures.check_pending_pods)
    assert not result.verdict and result.status.scaling.state is ScalingState.FAILED


def test_report_gone_pods_repeats_until_the_scheduler_drops_the_uid() -> None:
    source = started(status={"replacing": {"train-worker-1": {"uid": "old", "at": TIME, "all": False}}})
    result = StepRun(source, scheduler_status=scheduler(pod_uids=frozenset({"old"}))).run(pod_failures.report_gone_pods)
    assert result.actions == (ReportPodGone("train-worker-1", "old"),) and result.requeue_after == resize.REQUEST_RETRY_S
    assert StepRun(source, scheduler_status=scheduler()).run(pod_failures.report_gone_pods).actions == ()


def test_drop_finished_replacements_keeps_those_that_do_not_run_yet() -> None:
    note = {"uid": "old", "at": TIME, "all": False}
    source = started(status={"replacing": {"train-worker-0": note, "train-worker-1": note, "train-worker-9": note}})
    pods = [pod("train-worker-0"), pod("train-worker-1", phase="Pending")]
    result = StepRun(source, pods=pods).run(pod_failures.drop_finished_replacements)
    assert set(result.status.replacements) == {"train-worker-1"}


def test_delete_extra_pods_deletes_pods_beyond_the_world() -> None:
    result = StepRun(started(), pods=[pod("train-worker-1"), pod("train-worker-2")]).run(plan.delete_extra_pods)
    assert result.actions == (DeletePod("train-worker-2", "train-worker-2-1"),)


def test_force_deletions_waits_less_on_a_lost_node() -> None:
    hanging = pod("train-worker-0")
    hanging["metadata"]["deletionTimestamp"], hanging["spec"]["nodeName"] = format_timestamp(NOW - 61), "n"
    result = StepRun(started(), pods=[hanging], nodes={"n": node("n")}).run(completion.force_deletions)
    assert result.actions == () and result.requeue_after
    result = StepRun(started(), pods=[hanging], nodes={}).run(completion.force_deletions)
    assert result.actions[0] == DeletePod("train-worker-0", "train-worker-0-1", 0) and result.events() == ["ForcedDeletion"]


def test_create_missing_creates_pods_once_the_service_has_an_address() -> None:
    assert StepRun(started()).run(plan.create_missing).actions == (CreateService("Scheduler"),)
    replacing = {"train-worker-1": {"uid": "old", "at": TIME, "all": False, "node": "bad"}}
    source = started(status={"finished": ["train-worker-0"], "replacing": replacing})
    result = StepRun(source, services=[service("train-scheduler-0")]).run(plan.create_missing)
    assert result.actions == (CreateSecret(), CreatePod("Scheduler", 0, WORLD), CreatePod("Worker", 1, WORLD, ("bad",)))


def test_update_conditions_gives_the_reason_of_the_pass() -> None:
    result = StepRun(started(), pods=[pod("train-worker-0")]).run(plan.update_conditions)
    assert result.verdict == "1 of 2 workers run" and result.status.has_condition(RUNNING)
    assert result.requeue_after == plan.RESYNC_INTERVAL_S
    source = started(status={"replacing": {"train-worker-1": {"uid": "old", "at": TIME, "all": False}}})
    result = StepRun(source, pods=[pod("train-worker-0")]).run(plan.update_conditions)
    assert result.verdict == "waiting for the replacement of train-worker-1" and not result.status.has_condition(RUNNING)


@pytest.mark.parametrize(("age", "deleted"), [(99, False), (100, True)])
def test_check_ttl_deletes_the_job_after_the_ttl(age: float, deleted: bool) -> None:
    source = started(status={"completionTime": format_timestamp(NOW - age)}, runPolicy={"ttlSecondsAfterFinished": 100})
    result = StepRun(source).run(completion.check_ttl)
    assert result.actions == ((DeleteJob(),) if deleted else ()) and bool(result.verdict) is deleted


def test_report_finished_names_the_final_condition() -> None:
    result = StepRun(started())
    result.status.set_condition(FAILED, "Why", "because")
    assert result.run(completion.report_finished).verdict == "the job is Failed"


def test_address_role_is_the_scheduler_or_the_first_of_several_workers() -> None:
    role = StepRun(job()).context.address_role(WORLD)
    assert role is not None and role.key == "Scheduler"
    context = StepRun(job(roles={"Worker": 2})).context
    role = context.address_role({"Worker": 2})
    assert role is not None and role.key == "Worker" and context.address_role({"Worker": 1}) is None
    assert StepRun(job(roles={"Worker": 2}, enableDynamicWorker=True)).context.address_role({"Worker": 2}) is None
