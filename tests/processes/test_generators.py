"""Random generators of the program: the numbers under `covey run` are those of a run alone."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys

import pytest
from tests.processes.command import Shell
from tests.processes.harness import Process, free_port, nodes_of, until
from tests.processes.healing import LADDER, LONG_S

from covey.errors import CoveyError

SECRET = "a word"
HOLDS = 4  # times that a worker waits until the scheduler has received a further heartbeat

# A worker that holds has reported its own number, and waits until the test has seen that number in the cluster's view.
# Only a heartbeat carries it. With the word "die", rank 1 kills itself once, after its hold number 2.
HEAD = """
import os, pathlib, random, signal, sys, time

folder, lonely = pathlib.Path(sys.argv[1]), "RANK" not in os.environ
rank = int(os.environ.get("RANK", "0"))


def draw(where):
    print("DREW", where, random.random(), np.random.rand(), torch.rand(1).item(), flush=True)


def hold(number):
    while not lonely and not (folder / f"{rank}-{number}").exists():
        time.sleep(0.01)
    mark = folder / "died"
    if number == 2 and rank == 1 and "die" in sys.argv and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


import numpy as np
import torch
"""

BARE = (
    HEAD
    + """
seed(5)
for number in range(20):
    time.sleep(0.05)
    draw(number)
"""
)

INIT = (
    HEAD
    + """
import covey

covey.init()
seed(5)
for number in range(HOLDS):
    covey.report(number, "holds")
    hold(number)
    draw(number)
covey.barrier()
draw("barrier")
"""
)

LOOP = (
    HEAD
    + """
import covey


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([float(index), random.random(), np.random.rand(), torch.rand(1).item()])


covey.init()
seed(5)
covey.report(0, "holds")
hold(0)
draw("before")
model = torch.nn.Linear(4, 1)
loop = covey.Loop(
    model, torch.optim.SGD(model.parameters(), 0.01), covey.Data(Samples(), 4, num_workers=int(sys.argv[2])), steps=HOLDS + 2
)
for epoch, batches in loop.epochs():
    draw(f"epoch {epoch}")
    for batch in batches:
        loop.optimizer.zero_grad()
        draw(f"step {loop.step}")
        if 0 < loop.step < HOLDS:
            hold(loop.step)  # the commit of the previous step has reported this number
        model(batch).mean().backward()
        draw(f"step {loop.step} {batch.sum().item()}")
        loop.optimizer.step()
draw("after")
"""
)


def alone(shell: Shell, script: str, *arguments: str) -> list[str]:
    """Return the program's numbers when `python` starts it."""
    path = shell.script(script.replace("HOLDS", str(HOLDS)), "draws.py")
    ended = shell.run([sys.executable, path, shell.folder, *arguments], name="alone")
    assert ended.code == 0, ended.tail()
    return drawn(ended.text())


def drawn(text: str) -> list[str]:
    found: list[str] = re.findall(r"DREW (.*)", text)
    assert found
    return found


def start(shell: Shell, script: str, world: int, *arguments: str) -> Process:
    """Run the program under `covey run`, with at least ten heartbeats a second."""
    (shell.folder / "marks").mkdir(exist_ok=True)
    path = shell.script(script.replace("HOLDS", str(HOLDS)), "draws.py")
    env = {
        "MS_RETRY_INTERVAL_LOWER": "0.05",
        "MS_RETRY_INTERVAL_UPPER": "0.1",
        "COVEY_SECRET": SECRET,
        "COVEY_STRATEGY": LADDER,
    }
    shell.port = free_port()
    at = ["--master", f"127.0.0.1:{shell.port}"]
    return shell.covey("run", "-n", str(world), *at, path, shell.folder / "marks", *arguments, env=env)


def release(shell: Shell, run: Process, world: int) -> None:
    """Release each rank from each hold when the scheduler has received the heartbeat for it."""
    held = {(rank, number) for rank in range(world) for number in range(HOLDS)}

    def released() -> bool:
        assert run.alive, shell.tails()
        with contextlib.suppress(CoveyError):  # not available yet
            for node in nodes_of(shell.view(SECRET)).values():
                for number in range(node.step + 1):
                    (shell.folder / "marks" / f"{node.rank}-{number}").touch()
                    held.discard((node.rank, number))
        return not held

    until(released, "every rank to have held", LONG_S, lambda: f"{held}\n{shell.tails()}")


def test_random_generators_without_covey_match_python(shell: Shell) -> None:
    expected = alone(shell, BARE)
    run = start(shell, BARE, 2)
    assert run.wait() == 0, run.tail()
    assert drawn(shell.log(0)) == drawn(shell.log(1)) == expected


@pytest.mark.parametrize("deaths", [[], ["die"]], ids=["calm", "death"])
def test_random_generators_after_init_match_python(shell: Shell, deaths: list[str]) -> None:
    expected = alone(shell, INIT)
    run = start(shell, INIT, 2, *deaths)
    release(shell, run, 2)
    assert run.wait(LONG_S) == 0, run.tail()
    assert drawn(shell.log(0)) == expected
    died = expected[:2] if deaths else []  # the first incarnation of rank 1 writes to the same log
    assert drawn(shell.log(1)) == died + expected


def test_random_generators_of_loop_with_one_worker(shell: Shell) -> None:
    expected = alone(shell, LOOP, "0")
    run = start(shell, LOOP, 1, "0")
    release(shell, run, 1)
    assert run.wait(LONG_S) == 0, run.tail()
    assert drawn(shell.log(0)) == expected


def test_random_generators_of_loop_with_loader_workers_and_a_death(shell: Shell) -> None:
    """The Loop seeds each micro-batch by (seed, step, micro-batch, rank), so ranks differ and runs do not."""
    expected: list[list[str]] = []
    for deaths in ([], ["die"]):
        shell.logs = shell.folder / "-".join(["logs", *deaths])
        run = start(shell, LOOP, 3, "2", *deaths)
        release(shell, run, 3)
        assert run.wait(LONG_S) == 0, run.tail()
        expected = expected or [drawn(shell.log(rank)) for rank in range(3)]
        shutil.rmtree(shell.folder / "marks")
    assert [drawn(shell.log(rank)) for rank in (0, 2)] == [expected[0], expected[2]]
    # The first incarnation of rank 1 ends in step 2, before its backward. The second draws again before the Loop and at the
    # head of the epoch, and runs step 2 from its beginning.
    begins = next(n for n, line in enumerate(expected[1]) if line.startswith("step 2 "))
    assert drawn(shell.log(1)) == [*expected[1][: begins + 1], *expected[1][:2], *expected[1][begins:]]
