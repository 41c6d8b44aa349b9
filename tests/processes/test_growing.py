"""Hosts that join a running training, are lost, and return: the world is resized, and every sample is counted once."""

from __future__ import annotations

import pytest
from tests.processes.command import Shell
from tests.processes.elastic import LONG_S, SCRIPT, check, start
from tests.processes.harness import Process
from tests.processes.healing import release, wait_for_fault

pytestmark = pytest.mark.timeout(300)
LADDER = "retry,recover-in-place,recover,elastic-training,exit"


def host(shell: Shell, name: str, *options: str, **env: str) -> Process:
    """Start `covey run` on a host of that name; the first one has the scheduler."""
    given = {"COVEY_HOST_ID": name, "COVEY_STRATEGY": LADDER, "COVEY_EXTRA_RANKS": "0", "COVEY_SHRINK_AFTER": "0"} | env
    run = start(shell, *options, "--master", f"127.0.0.1:{shell.port}", **given)
    shell.listening(shell.port)
    return run


def test_hosts_join_running_world_up_to_the_maximum(shell: Shell) -> None:
    """One host forms alone after the last call; two more join together or in sequence, a third is refused; the world grows to
    3."""
    held, grown = "0:2:forward:hold", "0:6:forward:hold"
    env = {"FAULTS": f"{held} {grown}", "COVEY_LAST_CALL": "0", "STEPS": "32"}
    arguments = ("--nnodes", "1:3", "--nproc-per-node", "1")
    runs = [host(shell, "a", *arguments, **env)]
    wait_for_fault(shell, held)
    runs += [host(shell, name, *arguments, **env) for name in ("b", "c")]
    shell.wait_for_log("scheduler", "the world grows from 1 to [23] workers because .* joined")
    release(shell, held)
    shell.wait_for_log("scheduler", "the world grows from [12] to 3 workers because .* joined")
    late = host(shell, "d", *arguments, **env)
    assert late.wait(LONG_S) == 21, late.tail()
    assert "formed with its 3 workers: this host registered too late" in late.text()
    release(shell, grown)
    assert [run.wait(LONG_S) for run in runs] == [0, 0, 0], shell.tails()
    assert [end["world"] for end in check(shell, world=1)] == [3, 3, 3]


def split(shell: Shell, **env: str) -> tuple[Process, Process]:
    """Start three workers: rank 0 on the host of the scheduler, 1 and 2 on another."""
    return host(shell, "a", "-n", "3", "--local", "1", **env), again(shell, **env)


def again(shell: Shell, **env: str) -> Process:
    return host(shell, "b", "-n", "3", "--local", "2", **env)


@pytest.mark.long
def test_world_grows_back_when_lost_host_returns(shell: Shell) -> None:
    lost, alone, whole = "2:3:reduction:hold", "0:7:forward:hold", "0:9:forward:hold"
    env = {"FAULTS": f"{lost} {alone} {whole}"}
    stays, goes = split(shell, **env)
    wait_for_fault(shell, lost)
    goes.kill()
    shell.wait_for_log("scheduler", "the world size is now 1")
    wait_for_fault(shell, alone)
    back = again(shell, **env)
    shell.wait_for_log("scheduler", "the world grows from 1 to 3 workers")
    release(shell, alone)
    wait_for_fault(shell, whole)
    release(shell, whole)
    assert [run.wait(LONG_S) for run in (stays, back)] == [0, 0], shell.tails()
    assert [end["world"] for end in check(shell)] == [3, 3, 3]


def test_host_that_returns_in_time_prevents_shrinking(shell: Shell) -> None:
    """The host takes its former ranks within the current step; the other ranks are not restarted."""
    lost = "2:3:reduction:hold"
    env = {"FAULTS": lost, "COVEY_SHRINK_AFTER": "600"}
    stays, goes = split(shell, **env)
    wait_for_fault(shell, lost)
    goes.kill()
    shell.wait_for_log("scheduler", "waiting for a host to join; the world shrinks after 600 s")
    back = again(shell, **env)
    assert [run.wait(LONG_S) for run in (stays, back)] == [0, 0], shell.tails()
    assert [end["world"] for end in check(shell)] == [3, 3, 3]
    assert "resized" not in shell.log("scheduler")
    assert "worker:1, worker:2 restarted on" in shell.log("scheduler")


def test_world_shrinks_if_no_host_returns_within_shrink_after(shell: Shell) -> None:
    lost = "1:3:reduction:hold"
    env = {"FAULTS": lost, "COVEY_SHRINK_AFTER": "0.5"}
    stays, goes = split(shell, **env)
    wait_for_fault(shell, lost)
    goes.kill()
    assert stays.wait(LONG_S) == 0, shell.tails()
    assert [end["world"] for end in check(shell)] == [1]
    assert "no host joined for worker:1, worker:2 within 0.5 s" in shell.log("scheduler")


@pytest.mark.long
def test_manually_started_workers_join_leave_and_rejoin(shell: Shell) -> None:
    """Two form; one joins; rank 0 is killed, the world shrinks, and it returns."""
    come, die, back = "0:3:forward:hold", "1:6:forward:hold", "1:8:forward:hold"
    shell.default, marks = shell.script(SCRIPT, "train.py"), shell.folder / "marks"
    marks.mkdir()
    shell.env |= {"COVEY_STRATEGY": LADDER, "COVEY_WORKER_MAX": 3, "COVEY_LAST_CALL": 0, "FAULTS": f"{come} {die} {back}"}
    shell.scheduler()
    first, *others = [shell.worker(node_id, args=[marks], STEPS="16") for node_id in (0, 1)]
    wait_for_fault(shell, come)
    others.append(shell.worker("seven", args=[marks], STEPS="16"))
    shell.until(lambda view: "grows from 2 to 3" in view.reason, "the third")
    release(shell, come)
    wait_for_fault(shell, die)
    first.kill()
    release(shell, die)
    wait_for_fault(shell, back)
    others.append(shell.worker(0, args=[marks], STEPS="16"))
    shell.until(lambda view: "grows from 2 to 3" in view.reason, "the first again")
    release(shell, back)
    assert [worker.wait(LONG_S) for worker in others] == [0, 0, 0], shell.tails()
    assert [end["world"] for end in check(shell, world=2)] == [3, 3, 3]


@pytest.mark.long
def test_lost_host_is_awaited_if_recovery_is_enabled(shell: Shell) -> None:
    """The scheduler is elsewhere, as in its own pod; one of two hosts is lost, and its pod restarts."""
    lost = "2:3:reduction:hold"
    shell.env |= {"MS_ENABLE_RECOVERY": 1, "MS_RECOVERY_PATH": str(shell.folder / "journal"), "MS_NODE_TIMEOUT": 6}
    shell.workers = 4
    scheduler = shell.scheduler(COVEY_STRATEGY="retry,recover-in-place,recover,exit", COVEY_EXTRA_RANKS=0)

    def pod(rank: int) -> Process:
        arguments = ("-n", "4", "--local", "2", "--node-rank", str(rank))
        return host(shell, f"pod-{rank}", *arguments, MS_ROLE="MS_WORKER", MS_NODE_TIMEOUT="6", FAULTS=lost, STEPS="16")

    stays, goes = pod(0), pod(1)
    wait_for_fault(shell, lost)
    goes.kill()
    back = pod(1)
    assert [run.wait(LONG_S) for run in (stays, back, scheduler)] == [0, 0, 0], shell.tails()
    assert [end["world"] for end in check(shell, world=4)] == [4] * 4
    assert "worker:2, worker:3 restarted on" in scheduler.text()
