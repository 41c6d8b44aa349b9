"""Streams in one process: the same batches from any position, with and without loader workers."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from covey.errors import UsageError
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.collectives.communicator import Communicator
from covey.training.data import stream
from covey.training.data.loader import Data
from covey.training.loop import Loop


class Stateless(IterableDataset):  # type: ignore[misc]
    """Seven samples, repeated; each with a random part, like augmented data."""

    reads = 0

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        lane = getattr(get_worker_info(), "id", 0)
        while self.position < 7:
            self.position += 1
            type(self).reads += 1
            yield torch.tensor([lane * 100 + self.position + 0.5 * random.random()])
        self.position = 0


class Stateful(Stateless):
    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def loop(dataset: Any, **options: Any) -> Loop:
    net = nn.Linear(1, 1)
    checkpoint = options.pop("checkpoint", None)
    steps, accumulate = options.pop("steps", 40), options.pop("accumulate", 1)
    data = Data(dataset, 3, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    return Loop(
        net, optimizer, data, steps=steps, accumulate=accumulate, checkpoint=checkpoint, seed=5, group=Communicator(None)
    )


def batch_values(training: Loop) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in training]


@pytest.mark.parametrize("kind", [Stateless, Stateful])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_stream_continues_with_the_next_batch(tmp_path: Path, kind: Any, workers: int) -> None:
    """Resumes from step 33 of 40. A stateful data set is not read from its start."""
    everything = batch_values(loop(kind(), num_workers=workers))
    assert len(everything) == 40 and len(set(map(tuple, everything))) == 40, "augmentation differs in each batch"
    checkpoint = {"checkpoint": Checkpoint(tmp_path, every=33)}
    assert batch_values(loop(kind(), num_workers=workers, steps=34, **checkpoint)) == everything[:34]
    kind.reads = 0
    assert batch_values(loop(kind(), num_workers=workers, **checkpoint)) == everything[33:]
    if workers == 0:
        expected = 40 * 3 if kind is Stateless else 40 * 3 - 32 * 3
        assert kind.reads == expected, "the position exchanged in step 32 is after batch 32"


def test_repeated_step_gets_the_same_batches() -> None:
    everything = batch_values(loop(Stateful(), accumulate=3, steps=20))
    repeated: list[list[float]] = []
    failed: set[int] = set()
    training = loop(Stateful(), accumulate=3, steps=20)
    for batch in training:
        with training.retry(ConnectionError):
            if training.step in (2, 9, 17) and training.boundary and training.step not in failed:
                failed.add(training.step)
                del repeated[-2:]
                raise ConnectionError
            repeated.append(batch.flatten().tolist())
    assert repeated == everything and failed == {2, 9, 17}


class NotRestartable(IterableDataset):  # type: ignore[misc]
    """Yields nothing when it is iterated over a second time."""

    def __init__(self) -> None:
        self.samples = iter([torch.zeros(1)] * 5)

    def __iter__(self) -> Iterator[Any]:
        return self.samples


def test_streams_refuse_what_they_do_not_support(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Loop\(..., steps=N\) is required with an iterable data set"):
        loop(Stateless(), steps=None)
    with pytest.raises(UsageError, match="limit"):
        Data(Stateless(), 3, limit=2)
    with pytest.raises(UsageError, match="yielded no sample: iterating over it again must restart it"):
        batch_values(loop(NotRestartable()))
    checkpoint = {"checkpoint": Checkpoint(tmp_path, every=5), "steps": 10}
    batch_values(loop(Stateful(), **checkpoint))
    with pytest.raises(UsageError, match=r"was read by 1 loaders.* num_workers"):
        loop(Stateful(), num_workers=2, **checkpoint)


def test_limitations_of_a_stream_are_logged_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "covey"):
        loop(Stateless())
    assert [record.getMessage() for record in caplog.records] == [
        "the data is a stream: each sample is used once only while the world size does not change",
        "the data set has no state_dict and load_state_dict: a replacement reads it again from its start",
    ]


def test_members_of_a_stream_have_equal_weights() -> None:
    schedule = stream.initial_stream_schedule(4, 2, 3, 1)
    assert [schedule.member_weight(0, index, (0, 1, 2)) for index in range(4)] == [1 / 3, 1 / 3, 1 / 3, 0.0]
    assert schedule.member_weight(0, 0, (0, 2)) == 1 / 2
    assert schedule.next_schedule(0, (0, 2)).seats == (0, 2)
    assert [len(part) for part in schedule.micro_batches(5, 1, None)] == [4, 4]
