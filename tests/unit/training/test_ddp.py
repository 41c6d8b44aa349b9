"""covey's DistributedDataParallel, and conversion of torch DataLoaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from covey.errors import UsageError
from covey.training.collectives.communicator import Communicator
from covey.training.ddp import DistributedDataParallel
from covey.training.loop import Loop

SAMPLES = TensorDataset(torch.arange(10.0).reshape(10, 1))


def loop(model: Any, loader: Any, **options: Any) -> Loop:
    return Loop(model, torch.optim.SGD(model.parameters(), 0.1), loader, group=Communicator(None), **options)


def gather(samples: list[Any]) -> list[float]:
    return [value.item() for (value,) in samples]


def test_dataloader_keeps_batch_size_order_and_drop_last() -> None:
    ordered = loop(nn.Linear(1, 1), DataLoader(SAMPLES, batch_size=4, collate_fn=gather), epochs=2)
    assert list(ordered) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    full_batches = loop(nn.Linear(1, 1), DataLoader(SAMPLES, batch_size=4, collate_fn=gather, drop_last=True))
    assert list(full_batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    sampler: Any = DistributedSampler(SAMPLES, num_replicas=2, rank=1)
    for loader in (
        DataLoader(SAMPLES, 5, shuffle=True, collate_fn=gather),
        DataLoader(SAMPLES, 5, sampler=sampler, collate_fn=gather),
    ):
        batches = list(loop(nn.Linear(1, 1), loader))
        assert sorted(batches[0] + batches[1]) == list(range(10)) != batches[0] + batches[1]


def test_omitted_samples_are_logged_if_accumulate_prevents_a_smaller_batch(caplog: pytest.LogCaptureFixture) -> None:
    loop(nn.Linear(1, 1), DataLoader(SAMPLES, batch_size=2, drop_last=True), accumulate=2)
    loop(nn.Linear(1, 1), DataLoader(SAMPLES, batch_size=4))
    assert not caplog.records
    loop(nn.Linear(1, 1), DataLoader(SAMPLES, batch_size=2), accumulate=2)
    assert "each epoch leaves out 2 of 10 samples" in caplog.text


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(SAMPLES, batch_size=None), "batch_size=None"),
        (
            DataLoader(SAMPLES, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(SAMPLES), 2, False)),
            "batch_sampler=",
        ),
        (DataLoader(SAMPLES, 2, sampler=WeightedRandomSampler([1.0] * 10, 10)), "sampler is a WeightedRandomSampler"),
    ],
    ids=["no batch size", "custom batch sampler", "custom sampler"],
)
def test_dataloader_with_custom_batches_or_order_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loop(nn.Linear(1, 1), loader)


def test_ddp_has_torchs_interface_and_needs_a_loop() -> None:
    inner = nn.Linear(1, 1)
    model = DistributedDataParallel(inner, find_unused_parameters=True, device_ids=None)
    assert model.module is inner and list(model.state_dict()) == ["module.weight", "module.bias"]
    with pytest.raises(UsageError, match="gradients would not be averaged"):
        model(torch.ones(1))
    with torch.no_grad():
        model(torch.ones(1))
    training = loop(model, DataLoader(SAMPLES, batch_size=2), accumulate=2)
    assert training.model is inner
    for (batch,) in training:
        if training.boundary:
            with pytest.raises(UsageError, match="last micro-batch"), model.no_sync():
                pass
        else:
            with model.no_sync():
                model(batch).sum().backward()
    with pytest.raises(UsageError, match="process_group"):
        DistributedDataParallel(inner, process_group=3)


def test_epochs_yields_each_epoch_and_requires_that_it_is_exhausted() -> None:
    training = loop(nn.Linear(1, 1), DataLoader(SAMPLES, batch_size=4, drop_last=True), epochs=3)
    seen = [(epoch, len(list(batches)), training.step) for epoch, batches in training.epochs()]
    assert seen == [(0, 2, 1), (1, 2, 3), (2, 2, 5)], "an epoch's last step is not committed before the next epoch"
    assert training.step == 6
    with pytest.raises(UsageError, match="must be exhausted"):
        for _, batches in loop(nn.Linear(1, 1), DataLoader(SAMPLES, batch_size=4), epochs=2).epochs():
            next(batches)


def test_closure_runs_once_before_the_optimizer_while_state_is_consistent() -> None:
    model = nn.Linear(1, 1)
    training = loop(model, DataLoader(SAMPLES, batch_size=5))
    states = []
    for (batch,) in training:

        def closure(batch: Any = batch) -> Any:
            states.append(training._state_manager.is_consistent)
            training.optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        before = model.weight.item()
        assert training.optimizer.step(closure) > 0 and model.weight.item() != before
    assert states == [True, True]
