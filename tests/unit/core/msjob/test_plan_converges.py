"""Property tests: from any observed state, repeated passes converge, and invariants hold after each pass."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.core.msjob.msjobs import NOW, FakeCluster, KubeObject, container, job, node, pod

from covey.core.msjob.actions import CreatePod, DeleteJob, RecordEvent

PASSES = 12  # more than any state needs
NAMES = ["train-scheduler-0", *(f"train-worker-{n}" for n in range(4)), "train-ps-0"]
CODES = [0, 1, 2, 128, 137, 138, 143]

policies = st.fixed_dictionaries(
    {},
    optional={
        "cleanPodPolicy": st.sampled_from(["All", "Running", "None"]),
        "backoffLimit": st.integers(0, 3),
        "activeDeadlineSeconds": st.integers(0, 200),
        "ttlSecondsAfterFinished": st.integers(0, 200),
        "pendingTimeoutSeconds": st.integers(0, 200),
        "suspend": st.booleans(),
    },
)
labels = st.fixed_dictionaries(
    {},
    optional={
        "fault-scheduling": st.sampled_from(["grace", "force", "off"]),
        "pod-rescheduling": st.sampled_from(["on", "off"]),
        "fault-retry-times": st.sampled_from(["0", "1", "3"]),
        "process-recover-enable": st.sampled_from(["on", "pause"]),
        "subHealthyStrategy": st.sampled_from(["ignore", "graceExit", "forceExit"]),
    },
)
recovery_annotations = st.fixed_dictionaries(
    {}, optional={"recover-strategy": st.sampled_from(["recover", "recover-in-place", "elastic-training", "retry,dump"])}
)


@st.composite
def jobs(draw: st.DrawFn) -> KubeObject:
    roles = {"Worker": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        roles["Scheduler"] = 1
    if draw(st.booleans()):
        roles["PS"] = draw(st.integers(0, 1))
    return job(
        roles=roles,
        restart=draw(st.sampled_from(["Never", "OnFailure", "Always", "ExitCode"])),
        labels=draw(labels),
        annotations=draw(recovery_annotations),
        runPolicy=draw(policies),
        successPolicy=draw(st.sampled_from(["", "AllWorkers"])),
        enableDynamicWorker=draw(st.booleans()),
    )


@st.composite
def pods(draw: st.DrawFn) -> KubeObject:
    name = draw(st.sampled_from(NAMES))
    drawn = pod(name, uid=f"{name}-{draw(st.integers(1, 3))}", owner=draw(st.sampled_from(["job-uid", "job-uid", "", "other"])))
    phase = draw(st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]))
    code = draw(st.sampled_from(CODES))
    states: dict[str, KubeObject] = {
        "Pending": container("waiting", {"reason": "ErrImagePull"}),
        "Running": container("running", {}, phase="Running", restarts=draw(st.integers(0, 2))),
        "Succeeded": container("terminated", {"exitCode": 0}, phase="Succeeded"),
        "Failed": container("terminated", {"exitCode": code or 1}, phase="Failed") if code else {"phase": "Failed"},
    }
    drawn["status"] = states[phase]
    if draw(st.booleans()):
        drawn["spec"]["nodeName"] = draw(st.sampled_from(["good", "lost", "unhealthy", "none"]))
    if draw(st.integers(0, 3)) == 0:
        drawn["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return drawn


changes = st.one_of(
    st.tuples(st.just("pod"), pods()),
    st.tuples(st.just("gone"), st.sampled_from(NAMES)),
    st.tuples(st.just("time"), st.floats(0, 400)),
    st.tuples(st.just("scale"), st.integers(0, 4)),
    st.tuples(st.just("suspend"), st.booleans()),
)


def apply_change(cluster: FakeCluster, change: tuple[str, Any]) -> None:
    kind, value = change
    if kind == "pod":
        cluster.pods[value["metadata"]["name"]] = value
    elif kind == "gone":
        cluster.pods.pop(value, None)
    elif kind == "time":
        cluster.now += value
    elif kind == "scale":
        cluster.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = value
    else:
        cluster.job["spec"]["runPolicy"]["suspend"] = value


def run_pass(cluster: FakeCluster) -> bool:
    """Run one pass, apply it and check the invariants. Return whether it had actions or changed the status."""
    before, final = dict(cluster.status), cluster.conditions() & {"Succeeded", "Failed"}
    plan = cluster.reconcile()
    now = cluster.conditions()
    assert not {"Succeeded", "Failed"} <= now
    assert final <= now, "a finished job stays finished"
    assert len(now & {"Running", "Restarting", "Suspended"}) <= 1
    assert cluster.status.get("restarts", 0) >= before.get("restarts", 0)
    created = [a for a in plan.actions if isinstance(a, CreatePod)]
    names = [f"train-{a.role.lower()}-{a.index}" for a in created]
    assert not set(names) & set(cluster.pods) and len(set(names)) == len(names)
    assert not (created and now & {"Succeeded", "Failed", "Suspended"})
    cluster.apply(plan)
    return bool(plan.actions) or before != cluster.status


def test_overdue_replacement_whose_name_is_taken_is_reported_once_and_then_fails_the_job() -> None:
    """A pod of another owner has the name of the replacement, so the job has no pod of that name."""
    labels, annotations = {"fault-scheduling": "grace"}, {"recover-strategy": "recover"}
    cluster = FakeCluster(job(roles={"Worker": 1}, labels=labels, annotations=annotations, runPolicy={}, successPolicy=""))
    cluster.pods = {"train-worker-0": pod("train-worker-0", phase="Failed")}
    run_pass(cluster)
    cluster.pods["train-worker-0"] = pod("train-worker-0", uid="foreign", owner="other", phase="Pending")
    timeouts = 0
    for _ in range(PASSES):
        cluster.now += 100.0
        before = cluster.reconcile()
        timeouts += sum(isinstance(action, RecordEvent) and action.reason == "RescheduleTimeout" for action in before.actions)
        cluster.apply(before)
    assert timeouts == 2 and cluster.conditions() & {"Failed"}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs(), st.lists(pods(), max_size=6), st.lists(changes, max_size=8))
def test_repeated_passes_converge(source: KubeObject, existing: list[KubeObject], sequence: list[tuple[str, Any]]) -> None:
    cluster = FakeCluster(source)
    cluster.nodes = {"good": node("good"), "lost": node("lost", ready="Unknown", since=NOW), "unhealthy": node("unhealthy")}
    cluster.nodes["unhealthy"]["status"]["conditions"].append({"type": "KernelDeadlock", "status": "True"})
    cluster.pods = {p["metadata"]["name"]: p for p in existing}
    for change in sequence:
        run_pass(cluster)
        apply_change(cluster, change)
    for _ in range(PASSES):
        if not run_pass(cluster):
            return
        if any(isinstance(action, DeleteJob) for action in cluster.reconcile().actions):
            return  # the job is deleted
    last = cluster.reconcile()
    recorded = [action for action in last.actions if isinstance(action, RecordEvent)]
    raise AssertionError(f"not converged after {PASSES} passes: {last.reason}, {last.actions}, {recorded}")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["kill", "reconcile", "run"]), st.integers(0, 6)), max_size=25))
def test_restart_is_counted_once_if_the_operator_is_killed_at_any_point(sequence: list[tuple[int, str, int]]) -> None:
    """In each pass only the first few effects are applied (the status is the first), then the operator is killed."""
    cluster = FakeCluster(job(roles={"Worker": 3}, restart="ExitCode")).start()
    killed = 0
    for index, change, effects in sequence:
        name = f"train-worker-{index}"
        if change == "kill" and cluster.pods.get(name, {}).get("status", {}).get("phase") == "Running":
            cluster.set_terminated(name, 137)
            killed += 1
        elif change == "run" and name in cluster.pods and cluster.pods[name]["status"]["phase"] == "Pending":
            cluster.set_running(name)
        else:
            cluster.crash_after(effects)
    for _ in range(PASSES):
        run_pass(cluster)
        for name in cluster.pods:
            if cluster.pods[name]["status"]["phase"] == "Pending":
                cluster.set_running(name)
    assert cluster.status["restarts"] == killed if killed else cluster.status.get("restarts", 0) == 0
    assert len(cluster.pods) == 3 and "Running" in cluster.conditions()
