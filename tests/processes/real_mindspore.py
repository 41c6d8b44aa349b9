"""Real MindSpore scripts under `covey run --framework mindspore`. `make test` does not collect this file: MindSpore has 2.8 GB.

python -m bench.peers mindspore && pytest tests/processes/real_mindspore.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest
from bench.peers import FOLDER
from tests.processes.command import Shell
from tests.processes.harness import Process
from tests.requirements import Requirement, needs

ROOT = Path(__file__).parents[2]
PEER = FOLDER / "mindspore"
PYTHON = os.environ.get("MINDSPORE_PYTHON") or (str(PEER / "bin" / "python") if (PEER / "installed").exists() else "")
MINDSPORE = Requirement(
    "MindSpore is not installed", "python -m bench.peers mindspore, or set MINDSPORE_PYTHON", lambda: bool(PYTHON)
)
END_S = 240.0  # it imports for 2 CPU-seconds in each process, and forms for 7 to 9 s

pytestmark = [needs(MINDSPORE), pytest.mark.timeout(600)]

# Reduces until it is ended.
REDUCES = """
import os

import mindspore
from mindspore import ops
from mindspore.communication import get_rank, init

mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
init()
life, step, reduce = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 0, mindspore.jit(ops.AllReduce())
while True:
    total = reduce(mindspore.Tensor([get_rank() + 1.0])).asnumpy()[0]
    if step < 3:
        print(f"life {life}: process {os.getpid()} of rank {get_rank()} has {total:g}", flush=True)
    step += 1
"""


def run(shell: Shell, *arguments: str | Path) -> Process:
    """`covey run` in MindSpore's environment, which has no torch."""
    command = [PYTHON, "-m", "covey.cli.main", "run", "--framework", "mindspore", "--log-dir", shell.logs, *arguments]
    return shell.start(command, env={"PYTHONPATH": str(ROOT / "src")})


def test_training_ends_with_equal_weights_and_separate_logs(shell: Shell) -> None:
    training = run(shell, "-n", "3", ROOT / "examples" / "integrations" / "mindspore_script.py")
    assert training.wait(END_S) == 0, training.tail()
    assert float(shell.wait_for_log(0, r"test accuracy (0\.\d+)")[1]) > 0.7
    assert len({shell.wait_for_log(rank, r"test accuracy .*, test loss \S+")[0] for rank in range(3)}) == 1
    for rank in range(3):
        assert f"rank {rank} of 3: epoch 2, loss" in shell.log(rank)
    assert "MetaServerNode" in shell.log("mindspore_scheduler") and "MetaServerNode" not in shell.log(0)
    shell.assert_no_processes()


def test_killed_mindspore_scheduler_restarts_all_and_killed_worker_ends_the_run(shell: Shell) -> None:
    script = shell.script(REDUCES)
    training = run(shell, "-n", "2", "--max-restarts", "1", script)
    shell.wait_for_log(1, "life 0: .* has 3", count=3)
    [scheduler] = [p for p in shell.own_processes() if p.environ().get("MS_ROLE") == "MS_SCHED" and str(script) in p.cmdline()]
    scheduler.kill()
    training.wait_for(r"worker:0 died \(exit code 137\), restart 1 of 1")
    shell.wait_for_log(0, "MindSpore's scheduler exited before the workers: killed by SIGKILL.")
    shell.wait_for_log(0, "life 1: .* has 3", count=3)
    psutil.Process(int(shell.wait_for_log(1, r"life 1: process (\d+) of rank 1 has 3", count=3)[1])).kill()
    assert training.wait(END_S) == 137, training.tail()
    assert re.search("first failure: rank 1 .*killed by SIGKILL", training.text()), training.tail()
    shell.assert_no_processes()
