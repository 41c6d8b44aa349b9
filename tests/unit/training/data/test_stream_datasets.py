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


class Plain(IterableDataset):  # type: ignore[misc]
    """Seven samples, again and again; each with a random part, as augmentation has."""

    reads = 0

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        lane = getattr(get_worker_info(), "id", 0)
        while self.at < 7:
            self.at += 1
            type(self).reads += 1
            yield torch.tensor([lane * 100 + self.at + 0.5 * random.random()])
        self.at = 0


class Stateful(Plain):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loop(dataset: Any, **options: Any) -> Loop:
    net = nn.Linear(1, 1)
    checkpoint = options.pop("checkpoint", None)
    steps, accumulate = options.pop("steps", 40), options.pop("accumulate", 1)
    data = Data(dataset, 3, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    return Loop(
        net, optimizer, data, steps=steps, accumulate=accumulate, checkpoint=checkpoint, seed=5, group=Communicator(None)
    )


def seen(found: Loop) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in found]


@pytest.mark.parametrize("kind", [Plain, Stateful])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_reads_on(tmp_path: Path, kind: Any, workers: int) -> None:
    """From the checkpoint of step 33 of 40; a stateful one does not begin at its beginning."""
    everything = seen(loop(kind(), num_workers=workers))
    assert len(everything) == 40 and len(set(map(tuple, everything))) == 40, "augmentation differs each time"
    checkpoint = {"checkpoint": Checkpoint(tmp_path, every=33)}
    assert seen(loop(kind(), num_workers=workers, steps=34, **checkpoint)) == everything[:34]
    kind.reads = 0
    assert seen(loop(kind(), num_workers=workers, **checkpoint)) == everything[33:]
    if workers == 0:
        assert kind.reads == (40 * 3 if kind is Plain else 40 * 3 - 32 * 3), "the position told in step 32 is after batch 32"


def test_a_step_is_repeated_in_place_with_the_same_batches() -> None:
    everything = seen(loop(Stateful(), accumulate=3, steps=20))
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


class Once(IterableDataset):  # type: ignore[misc]
    """Ends for good."""

    def __init__(self) -> None:
        self.samples = iter([torch.zeros(1)] * 5)

    def __iter__(self) -> Iterator[Any]:
        return self.samples


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Loop\(..., steps=...\) is needed with an iterable data set"):
        loop(Plain(), steps=None)
    with pytest.raises(UsageError, match="limit"):
        Data(Plain(), 3, limit=2)
    with pytest.raises(UsageError, match="gave no sample: after its end, iterating over it must begin anew"):
        seen(loop(Once()))
    checkpoint = {"checkpoint": Checkpoint(tmp_path, every=5), "steps": 10}
    seen(loop(Stateful(), **checkpoint))
    with pytest.raises(UsageError, match=r"was read by 1 loaders.* give Data the num_workers it had"):
        loop(Stateful(), num_workers=2, **checkpoint)


def test_what_to_expect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "covey"):
        loop(Plain())
    assert [record.getMessage() for record in caplog.records] == [
        "the data is a stream: each sample counts once as long as the world keeps its size, and not beyond",
        "the data set has no state_dict and load_state_dict: a replacement reads it again from its beginning",
    ]


def test_members_count_equally() -> None:
    course = stream.initial_stream_schedule(4, 2, 3, 1)
    assert [course.member_weight(0, index, (0, 1, 2)) for index in range(4)] == [1 / 3, 1 / 3, 1 / 3, 0.0]
    assert course.member_weight(0, 0, (0, 2)) == 1 / 2
    assert course.next_schedule(0, (0, 2)).seats == (0, 2)
    assert [len(part) for part in course.micro_batches(5, 1, None)] == [4, 4]
