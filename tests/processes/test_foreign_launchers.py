"""covey.init() under a launcher that is not covey's: refused in a larger world, a world of one otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Shell

SCRIPT = """
import covey

covey.init()
print(f"rank={covey.get_rank()} world={covey.get_group_size()}", flush=True)
"""
# A worker of covey starts another program, with all variables but those of the cluster.
OUTER = """
import os, subprocess, sys
import covey

covey.init()
inner = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
subprocess.run([sys.executable, "t.py"], env=inner, check=True)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as shell:
        shell.script(SCRIPT, "t.py")
        yield shell


def test_script_under_torchrun_is_refused(shell: Shell) -> None:
    run = shell.run([*TORCHRUN, "--nproc-per-node", "2", "--redirects", "3", "--log-dir", "out", "t.py"], name="torchrun")
    assert run.code != 0 and "exitcode  : 10" in run.text(), run.tail()
    output = "".join(path.read_text() for path in (shell.folder / "out").rglob("std*.log"))
    assert "covey: torchrun started this process (RANK=" in output and "world=" not in output and "Traceback" not in output
    assert "start the script with `covey run -n 2 t.py` instead" in output


def test_script_under_torchrun_with_one_process_is_a_world_of_one(shell: Shell) -> None:
    run = shell.run([*TORCHRUN, "--nproc-per-node", "1", "t.py"], name="torchrun")
    assert run.code == 0 and "rank=0 world=1" in run.text(), run.tail()


def test_plain_python_is_a_world_of_one(shell: Shell) -> None:
    alone = shell.run([sys.executable, "t.py"])
    assert (alone.code, alone.text()) == (0, "rank=0 world=1\n")


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_rank_of_another_launcher_is_refused(shell: Shell, variables: dict[str, str]) -> None:
    process = shell.run([sys.executable, "t.py"], env=variables)
    assert process.code == 10, process.tail()
    [line] = process.text().splitlines()
    assert line.startswith("covey: ") and "finds no covey scheduler to join" in line and "covey run -n 2 t.py` instead" in line


def test_program_started_by_a_worker_is_not_refused(shell: Shell) -> None:
    shell.script(OUTER, "outer.py")
    run = shell.run_command("run", "-n", "2", "outer.py")
    assert run.code == 0, run.tail()
    assert "rank=0 world=1" in shell.log(0) and "rank=0 world=1" in shell.log(1)
