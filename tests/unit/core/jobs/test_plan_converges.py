"""From whatever is observed, a plan that is carried out again and again comes to rest; and what holds on the way."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.core.jobs.msjobs import NOW, Thing, World, container, job, node, pod

from covey.core.jobs.actions import CreatePod, DeleteJob, RecordEvent

TURNS = 12  # more than any state needs
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
notes = st.fixed_dictionaries(
    {}, optional={"recover-strategy": st.sampled_from(["recover", "recover-in-place", "elastic-training", "retry,dump"])}
)


@st.composite
def jobs(draw: st.DrawFn) -> Thing:
    roles = {"Worker": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        roles["Scheduler"] = 1
    if draw(st.booleans()):
        roles["PS"] = draw(st.integers(0, 1))
    return job(
        roles=roles,
        restart=draw(st.sampled_from(["Never", "OnFailure", "Always", "ExitCode"])),
        labels=draw(labels),
        annotations=draw(notes),
        runPolicy=draw(policies),
        successPolicy=draw(st.sampled_from(["", "AllWorkers"])),
        enableDynamicWorker=draw(st.booleans()),
    )


@st.composite
def pods(draw: st.DrawFn) -> Thing:
    name = draw(st.sampled_from(NAMES))
    made = pod(name, uid=f"{name}-{draw(st.integers(1, 3))}", owner=draw(st.sampled_from(["job-uid", "job-uid", "", "other"])))
    phase = draw(st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]))
    code = draw(st.sampled_from(CODES))
    states: dict[str, Thing] = {
        "Pending": container("waiting", {"reason": "ErrImagePull"}),
        "Running": container("running", {}, phase="Running", restarts=draw(st.integers(0, 2))),
        "Succeeded": container("terminated", {"exitCode": 0}, phase="Succeeded"),
        "Failed": container("terminated", {"exitCode": code or 1}, phase="Failed") if code else {"phase": "Failed"},
    }
    made["status"] = states[phase]
    if draw(st.booleans()):
        made["spec"]["nodeName"] = draw(st.sampled_from(["good", "lost", "ill", "none"]))
    if draw(st.integers(0, 3)) == 0:
        made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return made


moves = st.one_of(
    st.tuples(st.just("pod"), pods()),
    st.tuples(st.just("gone"), st.sampled_from(NAMES)),
    st.tuples(st.just("time"), st.floats(0, 400)),
    st.tuples(st.just("scale"), st.integers(0, 4)),
    st.tuples(st.just("suspend"), st.booleans()),
)


def happen(world: World, move: tuple[str, Any]) -> None:
    kind, what = move
    if kind == "pod":
        world.pods[what["metadata"]["name"]] = what
    elif kind == "gone":
        world.pods.pop(what, None)
    elif kind == "time":
        world.now += what
    elif kind == "scale":
        world.job["spec"]["msReplicaSpecs"]["Worker"]["replicas"] = what
    else:
        world.job["spec"]["runPolicy"]["suspend"] = what


def turn(world: World) -> bool:
    """One plan, carried out and judged; whether it asked for anything."""
    before, final = dict(world.status), world.conditions() & {"Succeeded", "Failed"}
    made = world.look()
    now = world.conditions()
    assert not {"Succeeded", "Failed"} <= now
    assert final <= now, "a finished job stays finished"
    assert len(now & {"Running", "Restarting", "Suspended"}) <= 1
    assert world.status.get("restarts", 0) >= before.get("restarts", 0)
    created = [a for a in made.actions if isinstance(a, CreatePod)]
    names = [f"train-{a.role.lower()}-{a.index}" for a in created]
    assert not set(names) & set(world.pods) and len(set(names)) == len(names)
    assert not (created and now & {"Succeeded", "Failed", "Suspended"})
    world.carry_out(made)
    return bool(made.actions) or before != world.status


def test_overdue_replacement_whose_name_is_taken_is_reported_once_and_then_fails_the_job() -> None:
    """A pod of another owner has the name of the replacement, so the job has no pod of that name."""
    labels, annotations = {"fault-scheduling": "grace"}, {"recover-strategy": "recover"}
    world = World(job(roles={"Worker": 1}, labels=labels, annotations=annotations, runPolicy={}, successPolicy=""))
    world.pods = {"train-worker-0": pod("train-worker-0", phase="Failed")}
    turn(world)
    world.pods["train-worker-0"] = pod("train-worker-0", uid="foreign", owner="other", phase="Pending")
    timeouts = 0
    for _ in range(TURNS):
        world.now += 100.0
        before = world.look()
        timeouts += sum(isinstance(action, RecordEvent) and action.reason == "RescheduleTimeout" for action in before.actions)
        world.carry_out(before)
    assert timeouts == 2 and world.conditions() & {"Failed"}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs(), st.lists(pods(), max_size=6), st.lists(moves, max_size=8))
def test_it_comes_to_rest(asked: Thing, there: list[Thing], story: list[tuple[str, Any]]) -> None:
    world = World(asked)
    world.nodes = {"good": node("good"), "lost": node("lost", ready="Unknown", since=NOW), "ill": node("ill")}
    world.nodes["ill"]["status"]["conditions"].append({"type": "KernelDeadlock", "status": "True"})
    world.pods = {p["metadata"]["name"]: p for p in there}
    for move in story:
        turn(world)
        happen(world, move)
    for _ in range(TURNS):
        if not turn(world):
            return
        if any(isinstance(action, DeleteJob) for action in world.look().actions):
            return  # the job itself is gone next
    last = world.look()
    told = [action for action in last.actions if isinstance(action, RecordEvent)]
    raise AssertionError(f"it does not come to rest: {last.reason}, {last.actions}, {told}")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["kill", "look", "run"]), st.integers(0, 6)), max_size=25))
def test_an_operator_killed_anywhere_counts_every_restart_once(story: list[tuple[int, str, int]]) -> None:
    """After each look only the first few effects happen (status is the first of them), then the operator is gone."""
    world = World(job(roles={"Worker": 3}, restart="ExitCode")).start()
    killed = 0
    for index, move, effects in story:
        name = f"train-worker-{index}"
        if move == "kill" and world.pods.get(name, {}).get("status", {}).get("phase") == "Running":
            world.ends(name, 137)
            killed += 1
        elif move == "run" and name in world.pods and world.pods[name]["status"]["phase"] == "Pending":
            world.runs(name)
        else:
            world.crash_after(effects)
    for _ in range(TURNS):
        turn(world)
        for name in world.pods:
            if world.pods[name]["status"]["phase"] == "Pending":
                world.runs(name)
    assert world.status["restarts"] == killed if killed else world.status.get("restarts", 0) == 0
    assert len(world.pods) == 3 and "Running" in world.conditions()
