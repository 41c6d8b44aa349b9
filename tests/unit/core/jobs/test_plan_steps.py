"""Each step of a pass alone: a context, a status and a builder in; a verdict, a changed status and actions out."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.jobs.msjobs import NOW, Thing, container, job, node, pod, service

from covey.core.jobs import completion, plan, pod_failures, resize
from covey.core.jobs.actions import (
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
from covey.core.jobs.plan_builder import PlanBuilder
from covey.core.jobs.reconcile_context import Observed, ReconcileContext, make_context
from covey.core.jobs.scaling import ScalingState
from covey.core.jobs.scheduler_status import SchedulerStatus
from covey.core.jobs.spec import parse_job
from covey.core.jobs.status import FAILED, RUNNING, SUSPENDED, JobStatus
from covey.core.jobs.timestamps import format_timestamp
from covey.core.types import Phase

TIME = format_timestamp(NOW)
WORLD = {"Scheduler": 1, "Worker": 2}
NAMES = ["train-scheduler-0", "train-worker-0", "train-worker-1"]


class Pass:
    """The input of a step, and what one step made of it."""

    def __init__(self, source: Thing, **observed: Any) -> None:
        self.context: ReconcileContext = make_context(source, parse_job(source), Observed(**observed), NOW)
        self.status = JobStatus(source, NOW)
        self.verdict: str | None = None
        self.actions: tuple[Action, ...] = ()
        self.requeue_after: float | None = None

    def run(self, step: plan.Step) -> Pass:
        out = PlanBuilder(NOW)
        self.verdict = step(self.context, self.status, out)
        made = out.build(None, "")
        self.actions, self.requeue_after = made.actions, made.requeue_after
        return self

    def events(self) -> list[str]:
        return [action.reason for action in self.actions if isinstance(action, RecordEvent)]


def started(**more: Any) -> Thing:
    return job(status={"world": WORLD, "startTime": TIME, **more.pop("status", {})}, **more)


def failed(name: str, code: int = 1) -> Thing:
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
    made = Pass(source, pods=[pod(name) for name in NAMES], services=[service(NAMES[0])]).run(step)
    assert not made.verdict and made.actions == () and made.status.finish() is None


def test_record_remarks_sets_the_label_and_warns_before_the_job_was_created() -> None:
    labels, annotations = {"fault-scheduling": "grace"}, {"recover-strategy": "recover"}
    made = Pass(job(labels=labels, annotations=annotations)).run(plan.record_remarks)
    assert made.actions == (SetLabel("process-recover-enable", "on"),)
    made = Pass(job(annotations=annotations)).run(plan.record_remarks)
    assert made.events() == ["Remark"]


def test_record_created_drops_the_message_of_an_invalid_spec() -> None:
    made = Pass(started(status={"refused": "it was wrong"})).run(plan.record_created)
    assert made.events() == ["MSJobCreated"] and "refused" not in made.status.content


def test_adopt_orphans_leaves_owned_and_terminating_pods_alone() -> None:
    going = pod("train-worker-1", owner="")
    going["metadata"]["deletionTimestamp"] = TIME
    pods = [pod("train-scheduler-0"), pod("train-worker-0", owner=""), going]
    assert Pass(started(), pods=pods).run(plan.adopt_orphans).actions == (
        AdoptOrphan("Pod", "train-worker-0", "train-worker-0-1"),
    )


def test_suspend_job_ends_the_pass() -> None:
    made = Pass(started(runPolicy={"suspend": True}), pods=[pod("train-worker-0")]).run(plan.suspend_job)
    assert made.verdict and made.status.has_condition(SUSPENDED) and made.status.world == {}
    assert [type(action) for action in made.actions] == [DeletePod, RecordEvent]


def test_start_job_starts_once() -> None:
    made = Pass(job()).run(plan.start_job)
    assert made.status.content == {"world": WORLD, "startTime": TIME}
    other = {"Scheduler": 1, "Worker": 7}
    assert Pass(started(status={"world": other})).run(plan.start_job).status.world == other


def test_update_progress_needs_a_scheduler() -> None:
    assert not Pass(started()).run(plan.update_progress).status.has_progress
    made = Pass(started(), scheduler_status=scheduler("train-worker-0")).run(plan.update_progress)
    assert made.status.content["progress"]["world"] == 1


@pytest.mark.parametrize(
    ("live", "state", "world"),
    [
        (None, ScalingState.WAITING, 2),
        (scheduler("train-worker-0", "train-worker-1"), ScalingState.GROWING, 4),
    ],
)
def test_scale_workers_grows_if_the_scheduler_can(live: SchedulerStatus | None, state: ScalingState, world: int) -> None:
    source = started(roles={"Scheduler": 1, "Worker": 4})
    made = Pass(source, pods=[pod(name) for name in NAMES], scheduler_status=live).run(resize.scale_workers)
    assert made.status.scaling.state is state and made.status.world["Worker"] == world


def test_scale_workers_asks_for_the_release_of_workers_before_it_takes_the_smaller_number() -> None:
    source = started(roles={"Scheduler": 1, "Worker": 1})
    both = scheduler("train-worker-0", "train-worker-1")
    made = Pass(source, pods=[pod(name) for name in NAMES], scheduler_status=both).run(resize.scale_workers)
    assert made.status.scaling.state is ScalingState.SHRINKING and made.status.world == WORLD
    assert resize.is_leaving(made.context, made.status, "train-worker-1")
    assert not resize.is_leaving(made.context, made.status, "train-worker-0")
    one = scheduler("train-worker-0")
    made = Pass(source, pods=[pod(name) for name in NAMES], scheduler_status=one).run(resize.scale_workers)
    assert made.status.scaling.state is ScalingState.NONE and made.status.world["Worker"] == 1
    assert made.status.formed_world == WORLD


def test_roll_back_growth_restores_the_number_and_keeps_the_reason() -> None:
    growing = {"to": 2, "since": TIME, "from": 1}
    made = Pass(started(status={"scaling": growing, "replacing": {"train-worker-1": {"uid": "u"}}}))
    assert resize.is_joining(made.context, made.status, "train-worker-1")
    resize.roll_back_growth(made.context, made.status, PlanBuilder(NOW), "no room")
    assert made.status.scaling.state is ScalingState.FAILED and made.status.world["Worker"] == 1
    assert made.status.replacements == {} and not resize.is_joining(made.context, made.status, "train-worker-1")


def test_record_finished_pods_ignores_a_pod_that_is_replaced() -> None:
    pods = [pod("train-worker-0", phase="Succeeded"), pod("train-worker-1", phase="Succeeded")]
    replacing = {"train-worker-1": {"uid": "train-worker-1-1", "at": TIME}}
    made = Pass(started(status={"replacing": replacing}), pods=pods).run(pod_failures.record_finished_pods)
    assert made.status.finished_pods == {"train-worker-0"}


def test_check_success_ends_the_job_and_updates_the_counters() -> None:
    made = Pass(started(status={"finished": ["train-worker-0"]})).run(completion.check_success)
    assert made.verdict == "worker 0 (train-worker-0) succeeded" and made.status.final_condition == "Succeeded"
    assert made.status.content["replicaStatuses"]["Worker"]["succeeded"] == 1


@pytest.mark.parametrize(("age", "requeue"), [(59, 1), (60, None)])
def test_check_deadline_requeues_until_the_deadline(age: float, requeue: float | None) -> None:
    source = started(status={"startTime": format_timestamp(NOW - age)}, runPolicy={"activeDeadlineSeconds": 60})
    made = Pass(source).run(completion.check_deadline)
    assert made.requeue_after == requeue and bool(made.verdict) is (requeue is None)


def test_handle_failed_pods_fails_or_replaces_by_the_policy() -> None:
    pods = [failed("train-worker-1", 137)]
    made = Pass(started(), pods=pods).run(pod_failures.handle_failed_pods)
    assert made.verdict and made.status.final_condition == "Failed"
    made = Pass(started(restart="ExitCode"), pods=pods).run(pod_failures.handle_failed_pods)
    assert not made.verdict and set(made.status.replacements) == {"train-worker-1"}
    assert made.actions[0] == DeletePod("train-worker-1", "train-worker-1-1") and made.status.read_count("restarts") == 1


@pytest.mark.parametrize(("in_restart", "ends"), [(False, False), (True, True)])
def test_check_overdue_replacements_restarts_all_pods_once(in_restart: bool, ends: bool) -> None:
    note = {"uid": "old", "at": format_timestamp(NOW - 1000), "all": in_restart}
    source = started(labels={"fault-scheduling": "grace"}, status={"replacing": {"train-worker-1": note}})
    made = Pass(source, pods=[pod(name) for name in NAMES[:2]]).run(pod_failures.check_overdue_replacements)
    assert made.events() == ["RescheduleTimeout"] and bool(made.verdict) is ends
    assert len(made.status.replacements) == (0 if ends else 3)


def test_check_kubelet_restarts_counts_against_the_limit() -> None:
    restarted = {**pod("train-worker-0"), "status": container("running", {}, phase="Running", restarts=2)}
    made = Pass(started(runPolicy={"backoffLimit": 2}), pods=[restarted]).run(pod_failures.check_kubelet_restarts)
    assert not made.verdict and made.events() == ["ContainerRestarted"]
    made = Pass(started(runPolicy={"backoffLimit": 1}), pods=[restarted]).run(pod_failures.check_kubelet_restarts)
    assert made.verdict == "2 restarts are more than backoffLimit 1 allows"


def test_check_pending_pods_ends_the_job_or_rolls_a_growth_back() -> None:
    late = [pod("train-scheduler-0"), pod("train-worker-0"), pod("train-worker-1", phase="Pending", created=NOW - 60)]
    source = started(runPolicy={"pendingTimeoutSeconds": 60})
    assert Pass(source, pods=late).run(pod_failures.check_pending_pods).verdict
    source["status"]["scaling"] = {"to": 2, "since": TIME, "from": 1}
    made = Pass(source, pods=late).run(pod_failures.check_pending_pods)
    assert not made.verdict and made.status.scaling.state is ScalingState.FAILED


def test_report_gone_pods_repeats_until_the_scheduler_knows() -> None:
    source = started(status={"replacing": {"train-worker-1": {"uid": "old", "at": TIME, "all": False}}})
    made = Pass(source, scheduler_status=scheduler(pod_uids=frozenset({"old"}))).run(pod_failures.report_gone_pods)
    assert made.actions == (ReportPodGone("train-worker-1", "old"),) and made.requeue_after == resize.REQUEST_RETRY_S
    assert Pass(source, scheduler_status=scheduler()).run(pod_failures.report_gone_pods).actions == ()


def test_drop_finished_replacements_keeps_those_that_do_not_run_yet() -> None:
    note = {"uid": "old", "at": TIME, "all": False}
    source = started(status={"replacing": {"train-worker-0": note, "train-worker-1": note, "train-worker-9": note}})
    pods = [pod("train-worker-0"), pod("train-worker-1", phase="Pending")]
    made = Pass(source, pods=pods).run(pod_failures.drop_finished_replacements)
    assert set(made.status.replacements) == {"train-worker-1"}


def test_delete_extra_pods_deletes_what_the_world_does_not_have() -> None:
    made = Pass(started(), pods=[pod("train-worker-1"), pod("train-worker-2")]).run(plan.delete_extra_pods)
    assert made.actions == (DeletePod("train-worker-2", "train-worker-2-1"),)


def test_force_deletions_waits_less_on_a_lost_node() -> None:
    hanging = pod("train-worker-0")
    hanging["metadata"]["deletionTimestamp"], hanging["spec"]["nodeName"] = format_timestamp(NOW - 61), "n"
    made = Pass(started(), pods=[hanging], nodes={"n": node("n")}).run(completion.force_deletions)
    assert made.actions == () and made.requeue_after
    made = Pass(started(), pods=[hanging], nodes={}).run(completion.force_deletions)
    assert made.actions[0] == DeletePod("train-worker-0", "train-worker-0-1", 0) and made.events() == ["ForcedDeletion"]


def test_create_missing_creates_pods_once_the_service_has_an_address() -> None:
    assert Pass(started()).run(plan.create_missing).actions == (CreateService("Scheduler"),)
    replacing = {"train-worker-1": {"uid": "old", "at": TIME, "all": False, "node": "bad"}}
    source = started(status={"finished": ["train-worker-0"], "replacing": replacing})
    made = Pass(source, services=[service("train-scheduler-0")]).run(plan.create_missing)
    assert made.actions == (CreateSecret(), CreatePod("Scheduler", 0, WORLD), CreatePod("Worker", 1, WORLD, ("bad",)))


def test_update_conditions_gives_the_reason_of_the_pass() -> None:
    made = Pass(started(), pods=[pod("train-worker-0")]).run(plan.update_conditions)
    assert made.verdict == "1 of 2 workers run" and made.status.has_condition(RUNNING)
    assert made.requeue_after == plan.RESYNC_INTERVAL_S
    source = started(status={"replacing": {"train-worker-1": {"uid": "old", "at": TIME, "all": False}}})
    made = Pass(source, pods=[pod("train-worker-0")]).run(plan.update_conditions)
    assert made.verdict == "waiting for the replacement of train-worker-1" and not made.status.has_condition(RUNNING)


@pytest.mark.parametrize(("age", "deleted"), [(99, False), (100, True)])
def test_check_ttl_deletes_the_job_when_it_is_over(age: float, deleted: bool) -> None:
    source = started(status={"completionTime": format_timestamp(NOW - age)}, runPolicy={"ttlSecondsAfterFinished": 100})
    made = Pass(source).run(completion.check_ttl)
    assert made.actions == ((DeleteJob(),) if deleted else ()) and bool(made.verdict) is deleted


def test_report_finished_names_the_final_condition() -> None:
    made = Pass(started())
    made.status.set_condition(FAILED, "Why", "because")
    assert made.run(completion.report_finished).verdict == "the job is Failed"


def test_address_role_is_the_scheduler_or_the_first_of_several_workers() -> None:
    role = Pass(job()).context.address_role(WORLD)
    assert role is not None and role.key == "Scheduler"
    context = Pass(job(roles={"Worker": 2})).context
    role = context.address_role({"Worker": 2})
    assert role is not None and role.key == "Worker" and context.address_role({"Worker": 1}) is None
    assert Pass(job(roles={"Worker": 2}, enableDynamicWorker=True)).context.address_role({"Worker": 2}) is None
