"""`covey.Model`: printed loss, checkpoints, resuming."""

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


class Recorder(Callback):
    """Records losses and epochs. Raises KeyboardInterrupt after `stop_after` steps; -1: never."""

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


def make_model() -> Model:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    return Model(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), 1e-2), group=Communicator(None))


def make_checkpoint(folder: Path, every: int = 4) -> ModelCheckpoint:
    return ModelCheckpoint("train", str(folder / "0"), CheckpointConfig(save_checkpoint_steps=every, keep_checkpoint_max=2))


def test_loss_monitor_prints_mindspores_line_every_n_steps(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    make_model().train(2, Data(SAMPLES, 8), callbacks=[LossMonitor(3), recorder])
    assert recorder.epochs == [0, 1] and len(recorder.losses) == 10
    assert capsys.readouterr().out.splitlines() == [
        f"epoch: 1 step: 3, loss is {recorder.losses[2]}",
        f"epoch: 2 step: 1, loss is {recorder.losses[5]}",
        f"epoch: 2 step: 4, loss is {recorder.losses[8]}",
    ]


def test_loss_monitor_prints_nothing_while_replaying(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    loop = Loop(model.net, model.optimizer, Data(SAMPLES, 8), group=Communicator(None))
    for replaying in (True, False):
        loop._state_manager.replaying = replaying
        LossMonitor(1).step_end(loop, torch.tensor(0.5))
    assert capsys.readouterr().out == "epoch: 1 step: 1, loss is 0.5\n"


def test_training_resumed_from_checkpoint_has_the_same_losses_and_weights(tmp_path: Path) -> None:
    uninterrupted, expected = make_model(), Recorder()
    uninterrupted.train(3, SAMPLES, callbacks=[expected], batch_size=8)

    with pytest.raises(KeyboardInterrupt):
        make_model().train(3, SAMPLES, callbacks=[make_checkpoint(tmp_path), Recorder(stop_after=9)], batch_size=8)
    resumed, rest = make_model(), Recorder()
    resumed.train(3, SAMPLES, callbacks=[make_checkpoint(tmp_path), rest], batch_size=8)

    assert rest.losses == expected.losses[8:]
    for left, right in zip(uninterrupted.net.state_dict().values(), resumed.net.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    assert sorted(path.name for path in (tmp_path / "0").glob("*.json")) == ["train-12.json", "train-8.json"]


@pytest.mark.parametrize(
    ("callbacks", "options", "message"),
    [
        ([], {}, "needs a batch size"),
        ([ModelCheckpoint(), ModelCheckpoint()], {"batch_size": 8}, "got 2 ModelCheckpoint callbacks"),
        ([ModelCheckpoint(directory="ckpt")], {"batch_size": 8}, "is invalid on rank 0: .* be the rank, as in '0'"),
    ],
    ids=["no batch size", "two checkpoints", "directory without rank"],
)
def test_train_refuses_invalid_arguments(callbacks: list[Callback], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_model().train(1, SAMPLES, callbacks=callbacks, **options)


def test_model_checkpoint_refuses_to_keep_only_one() -> None:
    with pytest.raises(UsageError, match="expected 2 or more"):
        ModelCheckpoint(config=CheckpointConfig(keep_checkpoint_max=1))


@pytest.mark.parametrize("times", [-1, True, 2.0])
def test_loss_monitor_refuses_an_invalid_interval(times: Any) -> None:
    with pytest.raises(UsageError, match="expected a number of steps"):
        LossMonitor(times)
