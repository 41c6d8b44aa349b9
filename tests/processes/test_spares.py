"""Warm spares: whoever dies, a process that had already built its model takes the place, and the bits are the same."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes.command import Shell, shells
from tests.processes.harness import Process, until
from tests.processes.healing import LONG_S, SCRIPT, WORLD, outcome, reached, release, start

pytestmark = pytest.mark.timeout(300)

BEGIN, REST = SCRIPT.split("covey.init()\n")
HEAD, BODY = REST.split('fault(0, "before")\n')
# The same training, whose first lines do not ask for the rank: a spare gets as far as the loop.
READY = f"{BEGIN}covey.init()\ntorch.set_num_threads(1)\ncovey.set_seed(1)\nscale = torch.tensor([2.0])\n{BODY}"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


def stands_by(shell: Shell, hold: str, *, count: int = 1) -> str:
    """Let a rank that holds go on once the spare stands by for the `count`th time; says where it does."""
    reached(shell, hold)
    where = shell.heard("scheduler", r"spare:0 stands by: (\S+)", count=count)[1]
    release(shell, hold)
    return where


def spare_of(shell: Shell) -> dict[str, Any]:
    [spare] = [node for node in shell.nodes() if node["role"] == "spare"]
    return spare


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def line(script: str, words: str) -> str:
    """Where in the script these words are."""
    return f"train.py:{script[: script.index(words)].count(chr(10)) + 1}"


@pytest.mark.long
def test_two_die_at_once_with_one_spare_and_a_third_when_there_is_another(shell: Shell, undisturbed: str) -> None:
    first, second = "0:2:forward:hold", "2:10:forward:hold"
    faults = f"{first} 0:4:backward 1:4:forward {second} 2:12:optimizer"
    run = start(shell, "--spares", "1", script=READY, FAULTS=faults, COVEY_SPARE_EVERY="1")
    assert stands_by(shell, first) == line(READY, "loop = covey.Loop(")
    reached(shell, second)
    shell.heard("scheduler", "spare:0 stands by", count=2)
    until(lambda: spare_of(shell)["step"] == 10, "the spare to follow the step that the others are in")
    release(shell, second)
    assert run.wait(LONG_S) == 0, run.tail()
    assert outcome(shell) == undisturbed
    said = shell.log("scheduler")
    assert len(re.findall(r"cluster promote: spare:0 on \S+ takes the place of worker:[012]", said)) == 2, said
    assert len(re.findall(r"cluster recover-in-place: worker:[01] is started again", said)) == 1, said
    assert re.search(r"recover of worker:2 \(killed by SIGKILL\): .*, resumed", said), said
    assert [shell.log(rank).count("BEGINS at") for rank in range(WORLD)] == [2, 2, 2], (
        "a promoted spare writes to the rank's log"
    )
    assert "BEGINS at" not in shell.log("spare_0")
    assert re.search("this spare is rank 2 now, in generation .*, with a copy of the state of step 10", shell.log(2))


def test_a_spare_dies_and_is_started_again_and_waits_where_it_needs_its_rank(shell: Shell, undisturbed: str) -> None:
    hold = "0:2:forward:hold"
    run = start(shell, "--spares", "1", FAULTS=f"{hold} 1:8:between")
    reached(shell, hold)
    shell.heard("scheduler", "spare:0 stands by")
    spare = spare_of(shell)
    assert spare["alive"] and spare["phase"] == line(SCRIPT, "    key = (str(covey.get_rank())")
    os.kill(spare["pid"], signal.SIGKILL)
    shell.heard("scheduler", "spare:0 died: killed by SIGKILL")
    stands_by(shell, hold, count=2)
    assert run.wait(LONG_S) == 0, run.tail()
    assert outcome(shell) == undisturbed
    said = shell.log("scheduler")
    assert re.findall(r"generation (\d)", shell.log(0)) == ["2"], "the spare's death was nobody's business"
    assert re.findall(r"recovery: (\S+) of (\S+)", said) == [("recover", "worker:1")]


@pytest.mark.long
def test_a_host_of_spares_comes_late_and_takes_over_from_one_that_is_lost(shell: Shell, undisturbed: str) -> None:
    hold, other = "0:2:forward:hold", "2:6:backward:hold"

    def host(number: int, *words: str) -> Process:
        master = ["-n", "3", "--master", f"127.0.0.1:{shell.port}"]
        env = {"FAULTS": f"{hold} {other}", "COVEY_HOST_ID": f"host-{number}"}
        return start(shell, *master, *words, script=READY, **env)

    stays = host(0, "--local", "1")
    shell.listening(shell.port)
    lost = host(1, "--local", "2")
    reached(shell, hold)
    spares = host(2, "--local", "0", "--spares", "1")
    stands_by(shell, hold)
    reached(shell, other)
    lost.kill()
    assert [run.wait(LONG_S) for run in (stays, spares)] == [0, 0], shell.tails()
    assert outcome(shell) == undisturbed
    said = shell.log("scheduler")
    assert len(re.findall(r"cluster promote: spare:0 on \S+ takes the place of worker:[12]", said)) == 1, said
    assert len(re.findall(r"cluster recover: worker:[12] is started again", said)) == 1, said


@pytest.mark.long
def test_a_worker_and_the_spare_die_while_the_scheduler_sleeps(shell: Shell, undisturbed: str) -> None:
    """It may promote one that is dead: then the agent says so, and the next one is forked."""
    hold = "0:4:forward:hold"
    run = start(shell, "--spares", "1", script=READY, FAULTS=hold)
    reached(shell, hold)
    shell.heard("scheduler", "spare:0 stands by")
    pids = {node["role"] + str(node["rank"]): node["pid"] for node in shell.nodes()}
    os.kill(pids["scheduler0"], signal.SIGSTOP)
    for victim in ("worker1", "spare0"):
        os.kill(pids[victim], signal.SIGKILL)
        until(functools.partial(gone, pids[victim]), f"{victim} to be gone, and its agent to know")
    os.kill(pids["scheduler0"], signal.SIGCONT)
    release(shell, hold)
    assert run.wait(LONG_S) == 0, run.tail()
    assert outcome(shell) == undisturbed


def test_a_spare_and_the_scheduler_die_with_the_worker(shell: Shell, undisturbed: str) -> None:
    """The scheduler dies when it has promoted: the spare and its agent find the place as the journal has it."""
    hold, second = "0:2:forward:hold", "1:9:forward:hold"
    run = start(shell, "--spares", "1", script=READY, FAULTS=f"{hold} 2:4:forward {second} 0:11:reduction")
    stands_by(shell, hold)
    shell.heard("scheduler", "spare:0 promoted: its process is worker:2 now")
    reached(shell, second)
    [scheduler] = [node for node in shell.nodes() if node["role"] == "scheduler"]
    os.kill(scheduler["pid"], signal.SIGKILL)
    shell.heard("scheduler", "worker:2 re-attached: rank 2 continues")
    stands_by(shell, second, count=2)
    assert run.wait(LONG_S) == 0, run.tail()
    assert outcome(shell) == undisturbed


def test_spares_need_the_rung_in_which_they_take_over(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", "--spares", "1", "--strategy", "recover-in-place,exit", "train.py")
    assert run.wait() == 10, run.tail()
    assert "--spares 1 needs the strategy recover" in run.text()
