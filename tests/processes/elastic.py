"""A training for tests of resizes: it records the samples of each step, and its result shows how each sample was counted.

The model is one number from which each step subtracts the mean of its samples. The final number is therefore correct only if
each mean is that of the recorded samples. `FAULTS` as in `healing`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from tests.processes.command import Shell
from tests.processes.harness import Process

LADDER = "retry,elastic-training,exit"  # no restarts: the world shrinks
SAMPLES, BATCH, WORLD, STEPS = 64, 2, 3, 15
LONG_S = 100.0

SCRIPT = '''
import json, os, pathlib, signal, sys, time
import torch
import covey

folder = pathlib.Path(sys.argv[1])
wanted = {tuple(word.split(":")[:3]): (word.split(":") + ["kill"])[3] for word in os.environ.get("FAULTS", "").split()}


def hold(mark):
    while not mark.with_suffix(".go").exists():
        time.sleep(0.01)


def send(number):
    return lambda mark: os.kill(os.getpid(), number)


FAULTS = {"kill": send(signal.SIGKILL), "stop": send(signal.SIGSTOP), "hold": hold}


def fault(step, phase):
    """Inject a fault, selected by the member index of this process."""
    key = (str(seat), str(step), phase)
    mark = folder / "-".join(key)
    if key in wanted and not mark.exists():
        mark.touch()
        FAULTS[wanted[key]](mark)


def pace(step):
    """Wait at the limit that a test sets, if any."""
    path = folder / "limit"
    while path.exists() and step >= int(path.read_text() or 0):
        time.sleep(0.005)


def write(**line):
    with open(folder / "lines", "a") as file:
        file.write(json.dumps(line | {"pid": os.getpid()}) + "\\n")


class Ids(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor(index, dtype=torch.float64)


class Number(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.last = torch.nn.Parameter(torch.zeros(300_000))                        # makes a second bucket

    def forward(self, x):
        return self.value * x + self.last.sum()


covey.init()
seat = covey.get_rank()
fault(0, "joined")
torch.set_num_threads(1)
net = Number()
optimizer = torch.optim.SGD([net.value], 1.0)
loop = covey.Loop(
    net, optimizer, covey.Data(Ids(), 2, num_workers=int(os.environ.get("LOADERS", "0"))), seed=7,
    steps=int(os.environ.get("STEPS", "15")), accumulate=int(os.environ.get("ACCUMULATE", "2")),
    checkpoint=covey.Checkpoint(str(folder / "ckpt"), every=int(os.environ.get("EVERY", "1000"))),
)
seat = loop._cursor.member_index
net.last.register_hook(lambda grad: fault(loop.step, "reduction") if loop.boundary else None)
optimizer.register_step_pre_hook(lambda *_: fault(loop.step, "optimizer"))
print("BEGINS at", loop.step, flush=True)
ids = []
for x in loop:
    pace(loop.step)
    fault(loop.step, "forward")
    ids += [int(i) for i in x]
    if loop.boundary:
        write(kind="took", step=loop.step, epoch=loop.epoch, seat=seat, ids=ids, world=covey.get_group_size(),
              stands_in=not loop._cursor.schedule.member_range(loop.step, loop._cursor.member_position))
        ids = []
    (net(x).mean() * loop.weight).backward()
    if loop.boundary:
        optimizer.step()
        optimizer.zero_grad()
        write(kind="counted", step=loop.step, seat=seat, seats=list(loop._cursor.schedule_ahead.seats))
        if loop.step % 4 == 3:
            fault(loop.step, "evaluation")
            worlds = covey.all_gather(torch.tensor(covey.get_rank()))
            assert len(worlds) == covey.get_group_size(), worlds
        fault(loop.step, "between")
assert [int(value) for value in covey.all_gather(torch.tensor(covey.get_rank()))] == list(range(covey.get_group_size()))
write(kind="end", value=net.value.item(), rank=covey.get_rank(), world=covey.get_group_size(), steps=loop.step)
print("ENDS as rank", covey.get_rank(), flush=True)
'''


def start(shell: Shell, *options: str, before: Sequence[str] = (), **env: str) -> Process:
    """Start the training. `before` is a prefix of the command."""
    (shell.folder / "marks").mkdir(exist_ok=True)
    shell.script(SCRIPT, "train.py")
    sized = "-n" in options or "--nnodes" in options
    arguments = ["run", *(options if sized else ("-n", str(WORLD), *options)), "train.py", str(shell.folder / "marks")]
    return shell.covey(*arguments, before=before, env={"COVEY_STRATEGY": LADDER} | env)


def train(shell: Shell, *options: str, **env: str) -> str:
    """Run the whole training; return the output of `covey run`."""
    run = start(shell, *options, **env)
    assert run.wait(LONG_S) == 0, run.tail()
    return run.text()


def check(shell: Shell, world: int = WORLD, accumulate: int = 2) -> list[dict[str, Any]]:
    """Assert that each sample of each epoch was counted once with its weight; return the final records of the last
    processes."""
    lines = [json.loads(line) for line in (shell.folder / "marks" / "lines").read_text().splitlines()]
    took = {(line["step"], line["seat"]): line for line in lines if line["kind"] == "took"}
    counted = {line["step"]: set(line["seats"]) for line in lines if line["kind"] == "counted"}
    last = {line["pid"]: line["step"] for line in lines if line["kind"] == "counted"}
    finished_pids = {line["pid"] for line in lines if line["kind"] == "end"}
    for line in lines:  # except a rank that died with the only result of a step, which the others repeated without it
        if line["kind"] == "counted" and (line["step"] < last[line["pid"]] or line["pid"] in finished_pids):
            result = [other for other in lines if other.get("step") == line["step"]]
            assert set(line["seats"]) == counted[line["step"]], f"ranks differ in the members counted: {result}"
    ends = [line for line in lines if line["kind"] == "end"]
    assert sorted(counted) == list(range(ends[-1]["steps"]))
    found: dict[int, Counter[int]] = {}
    value = 0.0
    for step in sorted(counted):
        lines = [line for (k, seat), line in took.items() if k == step and seat in counted[step]]
        assert len({line["epoch"] for line in lines}) == 1
        ids = [sample for line in lines if not line["stands_in"] for sample in line["ids"]] or lines[0]["ids"]
        found.setdefault(lines[0]["epoch"], Counter()).update(ids)
        value -= sum(ids) / len(ids)
    size = BATCH * world * accumulate
    per_epoch = SAMPLES // size * size
    assert [(epoch, len(ids), ids.total()) for epoch, ids in sorted(found.items())] == [
        (epoch, per_epoch, per_epoch) for epoch in range(len(found))
    ], found
    for end in ends:
        if end["steps"] < ends[-1]["steps"]:  # of an earlier run
            continue
        assert end["value"] == pytest.approx(value, rel=1e-12)
    return ends
