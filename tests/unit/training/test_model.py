"""The training in one call: what it prints, what it keeps, where it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from covey.errors import UsageError
from covey.training.collectives.communicator import Communicator
from covey.training.data.loader import Data
from covey.training.loop import Loop
from covey.training.model import Callback, CheckpointConfig, LossMonitor, Model, ModelCheckpoint

SAMPLES = torch.utils.data.TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 3)


class Seen(Callback):
    """What a callback is told; it can stop a training after a number of steps, as a power cut would."""

    def __init__(self, stop_after: int = -1) -> None:
        self.losses: list[float] = []
        self.epochs: list[int] = []
        self._left = stop_after

    def step_end(self, loop: Loop, loss: Any) -> None:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        self.losses.append(loss.item())

    def epoch_end(self, loop: Loop) -> None:
        self.epochs.append(loop.epoch)


def made() -> Model:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    return Model(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), 1e-2), group=Communicator(None))


def kept(folder: Path, every: int = 4) -> ModelCheckpoint:
    return ModelCheckpoint("train", str(folder / "0"), CheckpointConfig(save_checkpoint_steps=every, keep_checkpoint_max=2))


def test_the_loss_is_printed_in_the_originals_words(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    made().train(2, Data(SAMPLES, 8), callbacks=[LossMonitor(3), seen])
    assert seen.epochs == [0, 1] and len(seen.losses) == 10
    assert capsys.readouterr().out.splitlines() == [
        f"epoch: 1 step: 3, loss is {seen.losses[2]}",
        f"epoch: 2 step: 1, loss is {seen.losses[5]}",
        f"epoch: 2 step: 4, loss is {seen.losses[8]}",
    ]


def test_a_monitor_says_nothing_while_a_step_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    model = made()
    loop = Loop(model.net, model.optimizer, Data(SAMPLES, 8), group=Communicator(None))
    for replaying in (True, False):
        loop._handover.replaying = replaying
        LossMonitor(1).step_end(loop, torch.tensor(0.5))
    assert capsys.readouterr().out == "epoch: 1 step: 1, loss is 0.5\n"


def test_a_training_goes_on_from_its_newest_checkpoint_as_if_nothing_had_been(tmp_path: Path) -> None:
    straight, whole = made(), Seen()
    straight.train(3, SAMPLES, callbacks=[whole], batch_size=8)

    with pytest.raises(KeyboardInterrupt):
        made().train(3, SAMPLES, callbacks=[kept(tmp_path), Seen(stop_after=9)], batch_size=8)
    resumed, rest = made(), Seen()
    resumed.train(3, SAMPLES, callbacks=[kept(tmp_path), rest], batch_size=8)

    assert rest.losses == whole.losses[8:]
    for left, right in zip(straight.net.state_dict().values(), resumed.net.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    assert sorted(path.name for path in (tmp_path / "0").glob("*.json")) == ["train-12.json", "train-8.json"]


@pytest.mark.parametrize(
    ("callbacks", "options", "words"),
    [
        ([], {}, "needs a batch size"),
        ([ModelCheckpoint(), ModelCheckpoint()], {"batch_size": 8}, "takes one ModelCheckpoint, not 2"),
        ([ModelCheckpoint(directory="ckpt")], {"batch_size": 8}, "not possible on rank 0: .* ends in its rank, as '0'"),
    ],
)
def test_what_cannot_be_is_one_sentence(callbacks: list[Callback], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made().train(1, SAMPLES, callbacks=callbacks, **options)


def test_one_checkpoint_is_too_few() -> None:
    with pytest.raises(UsageError, match="2 is the least"):
        ModelCheckpoint(config=CheckpointConfig(keep_checkpoint_max=1))


@pytest.mark.parametrize("times", [-1, True, 2.0])
def test_a_monitor_counts_in_whole_steps(times: Any) -> None:
    with pytest.raises(UsageError, match="give a number of steps"):
        LossMonitor(times)
