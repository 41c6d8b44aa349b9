"""A data set and its loader: the samples of this rank, batch by batch.

Which samples those are is the course's affair. Each batch is loaded under random numbers of its own, so augmentation repeats
when a batch is loaded again, with or without loader workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from covey.errors import UsageError
from covey.train import course
from covey.train.arguments import whole
from covey.train.chance import seed_all
from covey.train.course import Course, Share
from covey.train.gloo import torch_module


class Seeded:
    """A data set whose batches are loaded under their own random numbers."""

    def __init__(self, dataset: Any, share: Share) -> None:
        self._dataset = dataset
        self._share = share

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, numbers: list[tuple[int, int]]) -> Any:
        """What torch's loader calls for a batch. Our sampler gives it one number, the batch's."""
        [(step, micro)] = numbers
        samples = self._share.samples(step, micro)
        seed_all(self._share.seed(step, micro))
        if whole := getattr(self._dataset, "__getitems__", None):
            return whole(samples)
        return [self._dataset[sample] for sample in samples]


class Numbers:
    """What torch takes for a sampler: every micro-batch of a share, from a step on."""

    def __init__(self, share: Share, first: int) -> None:
        self._share = share
        self._first = first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._share.numbers(self._first)


class Data:
    """A map-style data set, cut into batches for this rank. `options` go to torch's DataLoader (num_workers, ...).

    `batch_size` is a rank's at the first start. In a smaller world a rank's part of a step is larger: it comes in micro-batches
    of at most `limit` samples. Without a limit, a loop that accumulates takes at most `batch_size` at once, and any other takes
    its part of a step as one batch, because its program steps the optimizer after each.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, limit: int | None = None, shuffle: bool = True, **options: Any
    ) -> None:
        for name in ("sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise UsageError(f"Data(..., {name}=...) is not possible: the batches follow from seed, step and rank")
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError("Data needs a map-style data set, with a length and samples by number")
        whole("Data", "batch_size", batch_size, 1)
        whole("Data", "limit", 1 if limit is None else limit, 1)
        self.dataset = dataset
        self.batch_size = batch_size
        self.limit = limit
        self.shuffle = shuffle
        self.options = options

    def course(self, *, seed: int, world: int, accumulate: int) -> Course:
        """The way through this data of a training that starts."""
        return course.begin(
            len(self.dataset),
            batch_size=self.batch_size,
            accumulate=accumulate,
            world=world,
            shuffle=self.shuffle,
            seed=seed,
        )

    def batches(self, share: Share, first: int) -> Iterator[Any]:
        """Every micro-batch of a share from a step on, from one loader over all epochs."""
        torch = torch_module()
        return iter(
            torch.utils.data.DataLoader(Seeded(self.dataset, share), batch_sampler=Numbers(share, first), **self.options)
        )
