"""An error of the script ends the run after its first repetition; a full restart is reported with its cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.processes.command import Shell

DEFAULT = {"COVEY_STRATEGY": "retry,recover-in-place,recover,exit"}

# argv: where to fail, on which ranks, in which step ("any": in each)
LOOP = """
import sys, torch, covey
covey.init()
covey.set_seed(1)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = covey.Data(torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randn(256, 2)), batch_size=8)
where, ranks, step = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
loop = covey.Loop(model, optimizer, data, steps=20)

def fail(here):
    if here == where and step in ("any", str(loop.step)) and str(covey.get_rank()) in ranks:
        raise ValueError(f"a bad value on rank {covey.get_rank()}")

for x, y in loop:
    fail("before")
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
    fail("after")
"""

# A script without a loop: a replacement repeats it from the beginning.
REPORTS = """
import torch, covey
covey.init()
for step in range(20):
    value = torch.ones(1)
    covey.all_reduce(value)
    covey.report(step, "train")
    if step == 4 and covey.get_rank() == 1:
        print(los)
"""

BEFORE_THE_LOOP = """
import covey
covey.init()
print(los)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "arguments", "step"),
    [
        (BEFORE_THE_LOOP, (), ""),
        (REPORTS, (), ", last reported step 4"),
        (LOOP, ("before", "0", "12"), ", step 12"),
        (LOOP, ("before", "1", "12"), ", step 12"),
        (LOOP, ("before", "0,1,2", "0"), ", step 0"),
        (LOOP, ("after", "0", "any"), ", step 1"),
        (LOOP, ("after", "0,1,2", "any"), ", step 0"),
    ],
    ids=[
        "all ranks before a step",
        "rank 1 without a loop",
        "rank 0",
        "rank 1",
        "all ranks",
        "rank 0 after each step",
        "all ranks after each step",
    ],
)
def test_error_of_the_script_ends_the_run_with_one_traceback(
    shell: Shell, script: str, arguments: tuple[str, ...], step: str
) -> None:
    shell.script(script, "t.py")
    run = shell.covey("run", "-n", "3", "t.py", *arguments, env=DEFAULT)
    assert run.wait(200) == 1, run.tail()
    output = run.text()
    assert output.count("Traceback (most recent call last):") == 1, output
    assert "in all, resumed" not in output, output
    kind = "ValueError" if script is LOOP else "NameError"
    ends = re.search(r"covey: the run ended: worker:\d on \S+: exit code 1, (.*)", output)
    assert ends and re.match(rf"{kind} at \S*t\.py:\d+{step}: ", ends[1]) and ends[1].endswith(": correct the script"), output
    assert re.search(rf"first failure: rank \d \(worker:\d\) on \S+: exit code 1, {kind} at ", output), output
    shell.assert_no_processes()


@pytest.mark.timeout(300)
def test_transient_exception_is_recovered(shell: Shell) -> None:
    """The replacement receives the state after the step in which the exception was raised."""
    shell.script(LOOP, "t.py")
    run = shell.covey("run", "-n", "3", "t.py", "after", "1", "12", env=DEFAULT)
    assert run.wait(200) == 0, run.tail()
    output = run.text()
    assert re.search(r"recover-in-place of worker:1 \(exit code 1, ValueError at .*\): .* in all, (resumed|finished)", output)


# All ranks are killed in one step, once. argv: a directory for marks, and one for checkpoints unless it is "-".
ALL_KILLED = """
import os, signal, sys, time, torch, covey
covey.init()
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = covey.Data(torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randn(256, 2)), batch_size=8)
mark = os.path.join(sys.argv[1], f"killed-{covey.get_rank()}")
checkpoint = covey.Checkpoint(sys.argv[2], every=10) if sys.argv[2] != "-" else None
loop = covey.Loop(model, optimizer, data, steps=40, checkpoint=checkpoint)
for x, y in loop:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    if loop.step == 25 and not os.path.exists(mark):
        open(mark, "w").close()
        while sum(name.startswith("killed-") for name in os.listdir(sys.argv[1])) < covey.get_group_size():
            time.sleep(0.005)  # until all ranks are outside of a collective, so that none can hand over its state
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kept", [True, False], ids=["from a checkpoint", "from step 0"])
def test_full_restart_message_has_cause_and_step(shell: Shell, tmp_path: Path, kept: bool, workers: int) -> None:
    shell.script(ALL_KILLED, "t.py")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    run = shell.covey("run", "-n", str(workers), "t.py", tmp_path, folder if kept else "-", env=DEFAULT)
    assert run.wait(200) == 0, run.tail()
    output = run.text()
    started = r"step 20, the newest checkpoint" if kept else "step 0, because no checkpoint could be used"
    cause = "no rank holds the training state any more" if workers > 1 else "worker:0 died: killed by SIGKILL"
    line = rf"full restart 1: all ranks started from {started}; cause: {cause}"
    assert len(re.findall(rf"^covey: {line}$", output, re.MULTILINE)) == 1, output
    assert re.search(rf"^covey: (all 2 workers|the only worker) finished; {line}$", output, re.MULTILINE), (
        "the exit report must have it too"
    )
    assert "in all, resumed" not in output and output.count("in all, restarted") == workers, output
