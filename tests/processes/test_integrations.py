"""Existing scripts with covey's lines heal and end with the bits of an undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.processes.command import Shell
from tests.processes.healing import LADDER, LONG_S, WORLD

SCRIPTS = Path(__file__).parents[2] / "examples" / "integrations"

# Runs an example. DEATHS="1:5:forward" kills rank 1 in the forward pass of the sixth step of its process, once.
WITH_DEATHS = """
import hashlib, os, pathlib, runpy, signal, sys
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

folder, rank, steps, last = pathlib.Path(sys.argv[2]), os.environ["RANK"], 0, None

def die(phase):
    mark = folder / f"{rank}-{steps}-{phase}"
    if f"{rank}:{steps}:{phase}" in os.environ.get("DEATHS", "").split() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def stepped(optimizer, *_):
    global steps, last
    last = optimizer
    die("stepped")
    steps += 1

def forward(module, *_):
    if torch.is_grad_enabled():
        die("forward")

register_module_forward_pre_hook(forward)
register_optimizer_step_pre_hook(lambda *_: die("stepping"))
register_optimizer_step_post_hook(stepped)
runpy.run_path(sys.argv[1], run_name="__main__")
bits = hashlib.sha256()
for group in last.param_groups:
    for parameter in group["params"]:
        bits.update(parameter.detach().numpy().tobytes())
        bits.update(last.state[parameter]["momentum_buffer"].numpy().tobytes())
print("BITS", bits.hexdigest(), group["lr"], flush=True)
"""

# Fourteen steps per epoch: rank 0 dies in the last of its first.
DEATHS = "1:5:forward 0:13:stepped 2:30:stepping"


def bits(shell: Shell, example: str, name: str, deaths: str = "") -> str:
    """Return the final hash of all ranks of an example, and its last output line."""
    marks = shell.folder / name
    marks.mkdir()
    shell.logs = shell.folder / f"logs-{name}"
    shell.script(WITH_DEATHS, "with_deaths.py")
    preload = ",".join(["torch", *(word for word in ("lightning", "accelerate") if example.startswith(word))])
    arguments: list[str | Path] = ["run", "-n", str(WORLD), "--preload", preload, "with_deaths.py", SCRIPTS / example, marks]
    run = shell.covey(*arguments, name=name, env={"DEATHS": deaths, "COVEY_STRATEGY": LADDER})
    assert run.wait(LONG_S) == 0, f"{run.tail()}\n{[shell.log(rank) for rank in range(WORLD)]}"
    assert {mark.name for mark in marks.iterdir()} == {death.replace(":", "-") for death in deaths.split()}
    found = {match for rank in range(WORLD) for match in re.findall("BITS .*", shell.log(rank))}
    assert len(found) == 1, found
    output = re.findall("test accuracy .*", shell.log(0))
    assert len(output) == 1
    return f"{found.pop()} {output[0]}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("example", "deaths"),
    [
        ("ddp.py", DEATHS),
        pytest.param("lightning_trainer.py", DEATHS, marks=pytest.mark.long),
        pytest.param("accelerate_script.py", DEATHS, marks=pytest.mark.long),
    ],
)
def test_example_is_bitwise_equal_after_any_death(shell: Shell, example: str, deaths: str) -> None:
    undisturbed = bits(shell, example, "calm")
    assert bits(shell, example, "disturbed", deaths) == undisturbed


# The networking of a MindSpore script: the same program as scheduler and as worker, selected by MS_* variables.
STAND_IN = """
import os, signal, socket, sys, time

place = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
world, role, life = int(os.environ["MS_WORKER_NUM"]), os.environ["MS_ROLE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if role == "MS_SCHED":
    with socket.create_server(place) as server:
        members = [server.accept()[0] for _ in range(world)]
        for member in members:
            member.send(b"!")
        for member in members:
            member.recv(1)
    print(f"life {life}: the scheduler has ended in order", flush=True)
    sys.exit()
while True:
    try:
        scheduler = socket.create_connection(place)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
assert scheduler.recv(1) == b"!"
print(f"life {life}: node {os.environ['MS_NODE_ID']} of {world} on device {os.environ['DEVICE_ID']}", flush=True)
if life == "0" and os.environ["MS_NODE_ID"] == sys.argv[1]:
    exec(sys.argv[2])
"""


@pytest.mark.timeout(300)
def test_mindspore_scheduler_and_workers_are_started_and_restarted(shell: Shell) -> None:
    shell.script(STAND_IN, "train.py")
    arguments = ["run", "-n", "2", "--framework", "mindspore"]
    ends = shell.covey(*arguments, "train.py", "1", 'sys.exit("the operator failed")')
    assert ends.wait(LONG_S) == 1 and "first failure: rank 1" in ends.text() and "the operator failed" in ends.text(), (
        ends.tail()
    )
    for failing, how, result in (
        (
            "0",
            "os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL",
        ),  # its parent, which covey watches, ends in the same way
        ("1", "sys.exit(3)", "exit code 3"),
    ):
        shell.logs = shell.folder / f"logs-{failing}"
        again = shell.covey(*arguments, "--max-restarts", "1", "train.py", failing, how, name=f"again-{failing}")
        assert again.wait(LONG_S) == 0, again.tail()
        assert f"worker:{failing} died ({result}), restart 1 of 1" in again.text(), again.tail()
        for rank in (0, 1):
            assert f"life 1: node {rank} of 2 on device {rank}" in shell.log(rank)
        assert "life 1: the scheduler has ended in order" in shell.log("mindspore_scheduler")
    shell.assert_no_processes()
