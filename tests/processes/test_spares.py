"""Warm spares: a process that has already built its model replaces any dead rank, and the bits are the same."""

from __future__ import annotations

import functools
import os
import re
import signal
from typing import Any

import psutil
import pytest
from tests.processes.command import Shell
from tests.processes.harness import Process, until
from tests.processes.healing import LONG_S, SCRIPT, WORLD, final_hash, release, start, wait_for_fault

pytestmark = pytest.mark.timeout(300)

BEGIN, REST = SCRIPT.split("covey.init()\n")
HEAD, BODY = REST.split('fault(0, "before")\n')
# The same training, whose first lines do not need the rank: a spare runs up to the loop.
READY = f"{BEGIN}covey.init()\ntorch.set_num_threads(1)\ncovey.set_seed(1)\nscale = torch.tensor([2.0])\n{BODY}"


def stands_by(shell: Shell, hold: str, *, count: int = 1) -> str:
    """Release a held rank when the spare is ready for the `count`th time; return the line at which the spare waits."""
    wait_for_fault(shell, hold)
    where = shell.wait_for_log("scheduler", r"spare:0 stands by: (\S+)", count=count)[1]
    release(shell, hold)
    return where


def spare_of(shell: Shell) -> dict[str, Any]:
    [spare] = [node for node in shell.nodes() if node["role"] == "spare"]
    return spare


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def line(script: str, arguments: str) -> str:
    """Return the line of the script with this text."""
    return f"train.py:{script[: script.index(arguments)].count(chr(10)) + 1}"


@pytest.mark.long
def test_spare_replaces_one_of_two_dead_and_next_spare_a_third(shell: Shell, undisturbed: str) -> None:
    first, second = "0:2:forward:hold", "2:10:forward:hold"
    faults = f"{first} 0:4:backward 1:4:forward {second} 2:12:optimizer"
    run = start(shell, "--spares", "1", script=READY, FAULTS=faults, COVEY_SPARE_EVERY="1")
    assert stands_by(shell, first) == line(READY, "loop = covey.Loop(")
    wait_for_fault(shell, second)
    shell.wait_for_log("scheduler", "spare:0 stands by", count=2)
    until(lambda: spare_of(shell)["step"] == 10, "the spare to follow the step that the others are in")
    release(shell, second)
    assert run.wait(LONG_S) == 0, run.tail()
    assert final_hash(shell) == undisturbed
    output = shell.log("scheduler")
    assert len(re.findall(r"cluster promote: spare:0 on \S+ replaces worker:[012]", output)) == 2, output
    assert len(re.findall(r"cluster recover-in-place: worker:[01] is restarted", output)) == 1, output
    assert re.search(r"recover of worker:2 \(killed by SIGKILL\): .*, resumed", output), output
    assert [shell.log(rank).count("BEGINS at") for rank in range(WORLD)] == [2, 2, 2], (
        "a promoted spare must write to the rank's log"
    )
    assert "BEGINS at" not in shell.log("spare_0")
    assert re.search("spare promoted: rank 2, generation .*, with a copy of the state of step 10", shell.log(2))


def test_dead_spare_is_restarted_and_waits_for_a_rank(shell: Shell, undisturbed: str) -> None:
    hold = "0:2:forward:hold"
    run = start(shell, "--spares", "1", FAULTS=f"{hold} 1:8:between")
    wait_for_fault(shell, hold)
    shell.wait_for_log("scheduler", "spare:0 stands by")
    spare = spare_of(shell)
    assert spare["alive"] and spare["phase"] == line(SCRIPT, "    key = (str(covey.get_rank())")
    os.kill(spare["pid"], signal.SIGKILL)
    shell.wait_for_log("scheduler", "spare:0 died: killed by SIGKILL")
    stands_by(shell, hold, count=2)
    assert run.wait(LONG_S) == 0, run.tail()
    assert final_hash(shell) == undisturbed
    output = shell.log("scheduler")
    assert re.findall(r"generation (\d)", shell.log(0)) == ["2"], "the death of a spare must not start a generation"
    assert re.findall(r"recovery: (\S+) of (\S+)", output) == [("recover", "worker:1")]


@pytest.mark.long
def test_late_host_of_spares_replaces_lost_host(shell: Shell, undisturbed: str) -> None:
    hold, other = "0:2:forward:hold", "2:6:backward:hold"

    def host(number: int, *arguments: str) -> Process:
        master = ["-n", "3", "--master", f"127.0.0.1:{shell.port}"]
        env = {"FAULTS": f"{hold} {other}", "COVEY_HOST_ID": f"host-{number}"}
        return start(shell, *master, *arguments, script=READY, **env)

    stays = host(0, "--local", "1")
    shell.listening(shell.port)
    lost = host(1, "--local", "2")
    wait_for_fault(shell, hold)
    spares = host(2, "--local", "0", "--spares", "1")
    stands_by(shell, hold)
    wait_for_fault(shell, other)
    lost.kill()
    assert [run.wait(LONG_S) for run in (stays, spares)] == [0, 0], shell.tails()
    assert final_hash(shell) == undisturbed
    output = shell.log("scheduler")
    assert len(re.findall(r"cluster promote: spare:0 on \S+ replaces worker:[12]", output)) == 1, output
    assert len(re.findall(r"cluster recover: worker:[12] is restarted", output)) == 1, output


@pytest.mark.long
def test_worker_and_spare_dead_during_suspension_are_replaced(shell: Shell, undisturbed: str) -> None:
    """The scheduler may promote a dead spare: the agent then reports its exit, and the next process is forked."""
    hold = "0:4:forward:hold"
    run = start(shell, "--spares", "1", script=READY, FAULTS=hold)
    wait_for_fault(shell, hold)
    shell.wait_for_log("scheduler", "spare:0 stands by")
    pids = {node["role"] + str(node["rank"]): node["pid"] for node in shell.nodes()}
    os.kill(pids["scheduler0"], signal.SIGSTOP)
    for victim in ("worker1", "spare0"):
        os.kill(pids[victim], signal.SIGKILL)
        until(functools.partial(gone, pids[victim]), f"{victim} to be gone, and its agent to know")
    os.kill(pids["scheduler0"], signal.SIGCONT)
    release(shell, hold)
    assert run.wait(LONG_S) == 0, run.tail()
    assert final_hash(shell) == undisturbed


def test_worker_is_replaced_if_spare_and_scheduler_die_too(shell: Shell, undisturbed: str) -> None:
    """The scheduler dies after the promotion: the spare and its agent use the rank in the journal."""
    hold, second = "0:2:forward:hold", "1:9:forward:hold"
    run = start(shell, "--spares", "1", script=READY, FAULTS=f"{hold} 2:4:forward {second} 0:11:reduction")
    stands_by(shell, hold)
    shell.wait_for_log("scheduler", "spare:0 promoted: its process is worker:2 now")
    wait_for_fault(shell, second)
    [scheduler] = [node for node in shell.nodes() if node["role"] == "scheduler"]
    os.kill(scheduler["pid"], signal.SIGKILL)
    shell.wait_for_log("scheduler", "worker:2 re-attached: rank 2 continues")
    stands_by(shell, second, count=2)
    assert run.wait(LONG_S) == 0, run.tail()
    assert final_hash(shell) == undisturbed


def test_spares_without_recover_strategies_are_refused(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", "--spares", "1", "--strategy", "recover-in-place,exit", "train.py")
    assert run.wait() == 10, run.tail()
    assert "--spares 1 needs the strategy recover" in run.text()
