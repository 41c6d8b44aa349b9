"""kill -9 of any process of a `covey run`: the agent, the template, the scheduler, a rank inside a collective."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from tests.processes.command import FAILS, PATIENT, STUBBORN, Shell
from tests.processes.harness import until


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_killed_agent_leaves_no_processes_of_the_run(shell: Shell, start: str) -> None:
    shell.script(STUBBORN, "t.py")
    run = shell.covey("run", "-n", "3", "--start", start, "t.py", env=PATIENT)
    for rank in range(3):
        shell.wait_for_log(rank, "up")
    pids = {node["pid"] for node in shell.nodes()}
    assert len(pids) == 4 and 0 not in pids
    nodes = [process for process in shell.own_processes() if process.pid in pids]
    assert len(nodes) == len(pids)
    run.kill()
    shell.assert_no_processes()
    until(lambda: not any(map(lives, nodes)), "the end of every node", details=shell.tails)


def test_directories_of_killed_run_are_removed_by_the_next(shell: Shell, tmp_path: Path) -> None:
    """The directories of a running run stay."""
    places = {"TMPDIR": str(tmp_path / "t"), "XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "t").mkdir()

    def folders() -> set[Path]:
        return set((tmp_path / "t").glob("covey-*"))

    shell.script("import time; print('up', flush=True); time.sleep(1000)", "t.py")
    killed = shell.covey("run", "-n", "1", "t.py", env=PATIENT | places)
    shell.wait_for_log(0, "up")
    of_the_killed = folders()
    living = shell.covey("run", "-n", "1", "--log-dir", "living", "t.py", name="living", env=PATIENT | places)
    until((shell.folder / "living" / "worker_0.log").exists, "the second run")
    of_the_living = folders() - of_the_killed
    assert len(of_the_killed) == len(of_the_living) == 2  # an agent's and a scheduler's
    killed.kill()
    killed.wait()
    assert folders() == of_the_killed | of_the_living
    assert shell.run_command("run", "-n", "1", "--no-python", "true", env=places).code == 0
    assert folders() == of_the_living
    assert living.alive


def test_removed_directories_and_edited_script_do_not_end_run(shell: Shell, tmp_path: Path) -> None:
    """A cleaner may remove the temporary directories and that of the logs during a run. Replacements find new ones, and run the
    same code as the other ranks."""
    scratch = tmp_path / "t"
    scratch.mkdir()
    env = {"MS_NODE_TIMEOUT": 600, "COVEY_STRATEGY": "recover-in-place,exit", "TMPDIR": str(scratch)}
    run = shell.covey("run", "-n", "2", shell.default, shell.go, env=env)
    shell.wait_for_log(0, "rank=0")
    shell.wait_for_log(1, "rank=1")
    for folder in (*scratch.iterdir(), shell.logs):
        shutil.rmtree(folder)
    shell.default.write_text("not a program (")
    until(lambda: list(scratch.glob("covey-run-*/scheduler.journal")), "the rewritten journal")
    scheduler, _, worker = shell.nodes()
    os.kill(scheduler["pid"], signal.SIGKILL)
    shell.wait_for_log("scheduler", "cluster ready: all members re-attached")
    os.kill(worker["pid"], signal.SIGKILL)
    shell.wait_for_log(1, "rank=1")
    shell.release()
    assert run.wait() == 0, run.tail()
    shell.assert_no_processes()
    assert not list(scratch.iterdir())


def test_death_of_template_does_not_affect_run(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go)
    shell.wait_for_log(0, "rank=0")
    shell.wait_for_log(1, "rank=1")
    template = shell.template(run)
    template.kill()
    until(lambda: shell.template(run).pid != template.pid, "another template")
    shell.release()
    assert run.wait() == 0, run.tail()
    assert "done" in shell.log(0) and "done" in shell.log(1)
    shell.assert_no_processes()


def test_restarted_template_forks_replacements(shell: Shell) -> None:
    die_once = "sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 9)"
    shell.script(FAILS.replace("rank == 1 and ", ""), "t.py")
    run = shell.covey("run", "-n", "2", "--max-restarts", "1", "t.py", shell.go, die_once, "covey")
    shell.wait_for_log(0, "rank=0")
    shell.wait_for_log(1, "rank=1")
    shell.template(run).kill()
    shell.release()
    assert run.wait() == 0, run.tail()
    assert [shell.log(rank).count("rank=") for rank in (0, 1)] == [2, 2]
    shell.assert_no_processes()


def test_killed_scheduler_is_restarted(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go, env={"MS_NODE_TIMEOUT": 600})
    shell.wait_for_log(0, "rank=0")
    shell.wait_for_log(1, "rank=1")
    for life in (2, 3):
        scheduler, *workers = shell.nodes()
        os.kill(scheduler["pid"], signal.SIGKILL)
        shell.wait_for_log("scheduler", "scheduler of cluster", count=life)
        shell.wait_for_log("scheduler", "cluster ready: all members re-attached", count=life - 1)
        found, *again = shell.nodes()
        assert found["pid"] != scheduler["pid"]
        fixed = ("node_id", "rank", "pid", "incarnation", "restarts", "state", "host", "log")
        assert [[node[key] for key in fixed] for node in again] == [[node[key] for key in fixed] for node in workers]
    assert len(set(re.findall(r"scheduler of cluster (\w+)", shell.log("scheduler")))) == 1
    shell.release()
    assert run.wait() == 0, run.tail()
    assert "done" in shell.log(0) and "done" in shell.log(1)
    shell.assert_no_processes()


def test_restarted_scheduler_has_pid_of_worker_without_covey(shell: Shell) -> None:
    """Only the agent has its pid."""
    shell.script(STUBBORN, "t.py")
    run = shell.covey("run", "-n", "1", "t.py", env=PATIENT)
    shell.wait_for_log(0, "up")
    scheduler, worker = shell.nodes()
    os.kill(scheduler["pid"], signal.SIGKILL)
    shell.wait_for_log("scheduler", "cluster ready: all members re-attached")
    until(lambda: shell.nodes()[1]["pid"] == worker["pid"], "the worker's pid", details=shell.tails)
    run.kill()
    shell.assert_no_processes()


def test_exits_during_scheduler_outage_are_reported_after_restart(shell: Shell) -> None:
    run = shell.covey("run", "-n", "2", shell.default, shell.go, env={"MS_NODE_TIMEOUT": 600})
    shell.wait_for_log(0, "rank=0")
    shell.wait_for_log(1, "rank=1")
    scheduler = psutil.Process(shell.nodes()[0]["pid"])
    scheduler.suspend()  # so that the exits of the workers are not received
    shell.release()
    until(lambda: "done" in shell.log(0) and "done" in shell.log(1), "both to finish")
    scheduler.kill()
    assert run.wait() == 0, run.tail()
    assert "all 2 workers finished" in run.text()
    shell.assert_no_processes()


def test_scheduler_that_always_dies_ends_the_run(shell: Shell) -> None:
    """A recovery directory that cannot be written gives one error message, not endless restarts."""
    (shell.folder / "a-file").write_text("no folder")
    run = shell.run_command("run", "-n", "1", "--recovery-path", shell.folder / "a-file" / "below", shell.default)
    assert run.code in (40, 41), run.tail()
    assert "Traceback" not in run.text() + shell.log("scheduler")
    assert shell.log("scheduler").strip(), "the scheduler must log the reason"
    shell.assert_no_processes()


def test_repeatedly_killed_scheduler_ends_the_run(shell: Shell) -> None:
    run = shell.covey("run", "-n", "1", shell.default, shell.go, env={"MS_NODE_TIMEOUT": 600})
    shell.wait_for_log(0, "rank=0")
    for life in range(1, 7):
        shell.wait_for_log("scheduler", "scheduler of cluster", count=life)
        [scheduler] = until(shell.schedulers, "a scheduler")
        scheduler.kill()
        scheduler.wait()
    assert run.wait() == 31, run.tail()
    assert re.search(r"the scheduler died 6 times \(killed by SIGKILL\)", run.text())
    shell.assert_no_processes()


STEPS = """
import pathlib, sys, time
import numpy as np
import covey, torch

covey.init()
step = 0
while True:
    step += 1
    mean = covey.all_reduce(np.array([step, float(pathlib.Path(sys.argv[1]).exists())]), "mean")
    assert mean[0] == step, (mean, step)
    print("step", step, flush=True)
    if mean[1] == 1.0:
        break
    time.sleep(0.01)
"""


def test_collectives_continue_while_scheduler_is_killed(shell: Shell) -> None:
    shell.script(STEPS, "t.py")
    run = shell.covey("run", "-n", "3", "t.py", shell.go, env={"MS_NODE_TIMEOUT": 600})
    shell.wait_for_log(2, "step 3")
    scheduler, *workers = shell.nodes()
    os.kill(scheduler["pid"], signal.SIGKILL)
    shell.wait_for_log("scheduler", "cluster ready: all members re-attached")
    now = shell.log(0).count("step")
    shell.wait_for_log(0, f"step {now + 10}\n")
    assert [[n["rank"], n["pid"], n["incarnation"]] for n in shell.nodes()[1:]] == [
        [n["rank"], n["pid"], n["incarnation"]] for n in workers
    ]
    shell.release()
    assert run.wait() == 0, run.tail()
    assert len({shell.log(rank).splitlines()[-1] for rank in range(3)}) == 1
    assert all(shell.log(rank).count("step 1\n") == 1 for rank in range(3)), "no rank may have restarted"
    shell.assert_no_processes()


def test_ranks_in_a_collective_end_when_one_dies(shell: Shell) -> None:
    text = STEPS.replace("    step += 1\n", "    step += 1\n    if step == 5 and covey.get_rank() == 1: sys.exit(7)\n")
    shell.script(text, "t.py")
    run = shell.run_command("run", "-n", "3", "t.py", shell.go, env=PATIENT)
    assert run.code == 7, run.tail()
    assert "first failure: rank 1 (worker:1)" in run.text()
    shell.assert_no_processes()
