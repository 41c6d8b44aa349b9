"""Failed checkpoint writes: the training continues if it has an earlier checkpoint."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.training.checkpoint.test_checkpoint import files_up_to

from covey.errors import StoreError
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.collectives.communicator import Communicator
from covey.training.data.loader import Data
from covey.training.loop import Loop

FULL = 2000  # bytes; less than the size of a checkpoint


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Messages that covey logs."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("covey").addHandler(handler)
    yield messages
    logging.getLogger("covey").removeHandler(handler)


def loop(folder: Path, steps: int) -> Loop:
    net = torch.nn.Linear(1000, 1)
    data = Data(torch.utils.data.TensorDataset(torch.ones(64, 1000)), 1)
    return Loop(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        data,
        steps=steps,
        checkpoint=Checkpoint(folder, every=5),
        group=Communicator(None),
    )


def train(training: Loop, full: range = range(0)) -> None:
    """Run a training whose disk is full while the steps in `full` are committed."""
    batches = iter(training)
    while True:
        with files_up_to(FULL if training.step + 1 in full else -1):
            if next(batches, None) is None:
                return


def test_training_continues_if_a_later_checkpoint_cannot_be_written(tmp_path: Path, lines: list[str]) -> None:
    train(loop(tmp_path, 22), range(8, 13))
    assert Checkpoint(tmp_path).available() == [20, 15, 5]
    (line,) = lines
    assert f"the checkpoint of step 10 cannot be written to {tmp_path}/0 (File too large" in line
    assert line.endswith("; training continues, the newest is that of step 5")


def test_missing_checkpoint_is_retried_at_the_end_and_reported_if_it_fails(tmp_path: Path, lines: list[str]) -> None:
    train(loop(tmp_path, 12), range(8, 12))  # the disk has space again when the last step is committed
    assert Checkpoint(tmp_path).available() == [12, 5] and len(lines) == 1
    train(loop(tmp_path, 17), range(13, 99))
    assert "this training ends without the checkpoint of step 17" in lines[-1]
    assert lines[-1].endswith("the newest is that of step 12") and len(lines) == 4


def test_missing_checkpoint_is_reported_if_the_script_leaves_the_loop_early(tmp_path: Path, lines: list[str]) -> None:
    training = loop(tmp_path, 100)
    for _ in training:
        if training.step == 13:
            break
        if training.step == 7:
            training._checkpoint.folder.joinpath("0").rename(tmp_path / "away")  # type: ignore[union-attr]
            (tmp_path / "0").touch()
    assert "ends without the checkpoint of step 10" in lines[-1]


def test_first_checkpoint_that_cannot_be_written_raises_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the checkpoint of step 5 cannot be written"):
        train(loop(tmp_path, 22), range(1, 9))
    damaged = Checkpoint(tmp_path)
    damaged.save(4, {"step": 4}, rank=1, world=2, generation=1)
    (tmp_path / "1" / "train-4.safetensors").write_bytes(b"")
    assert damaged.available() == [4] and damaged.newest_step() is None, "a damaged checkpoint is not an earlier one"


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_output_lost_on_a_full_disk_is_counted(tmp_path: Path, flags: list[str]) -> None:
    script = """
import resource, sys
from covey.runtime.full_disk_output import install_log_streams
install_log_streams()
print("before")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (7, hard))
print("x" * 99)
print("y" * 99, file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print("after")
"""
    log = tmp_path / "log"
    with log.open("ab") as file:
        done = subprocess.run([sys.executable, *flags, "-c", script], stdout=file, stderr=file, env=dict(os.environ))
    assert done.returncode == 0
    assert log.read_text() == "before\ncovey: 100 bytes of output were lost here: the disk was full\nafter\n"
