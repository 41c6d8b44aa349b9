"""Which samples a rank trains on at which step: a function of (seed, step, rank) and nothing else.

A replacement therefore takes up exactly where its predecessor was, and a rollback is exact. Each batch is loaded under random
numbers seeded by (seed, its number, rank), so augmentation repeats too, with or without loader workers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from covey.errors import UsageError
from covey.train.gloo import torch_module

MIX: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(*numbers: int) -> int:
    """A seed from several numbers: the same everywhere, and different for neighbours."""
    value = 0
    for number in numbers:
        value = (value + number + 1) * MIX[0] & (1 << 64) - 1
        value = (value ^ value >> 30) * MIX[1] & (1 << 64) - 1
        value = (value ^ value >> 27) * MIX[2] & (1 << 64) - 1
        value ^= value >> 31
    return value >> 1


def seed_all(seed: int) -> None:
    """Python's, numpy's and torch's generators; quickly, because it happens for every batch."""
    for put in _seeders():
        put(seed)


@functools.cache
def _seeders() -> tuple[Callable[[int], object], ...]:
    import numpy as np

    torch = torch_module()

    def seed_numpy(seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)

    def seed_cuda(seed: int) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)

    return random.seed, seed_numpy, torch.default_generator.manual_seed, seed_cuda


class Plan:
    """The batches of one rank: `batch(k)` is the list of the samples of its k-th micro-batch."""

    def __init__(self, samples: int, batch_size: int, *, shuffle: bool, seed: int, rank: int, world: int) -> None:
        if samples < batch_size * world:
            raise UsageError(
                f"{samples} samples do not fill one batch of {batch_size} on {world} ranks: use a smaller batch or world"
            )
        self._samples = samples
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._rank = rank
        self._world = world
        self._order: tuple[int, list[int]] = (-1, [])
        self.per_epoch = samples // (batch_size * world)

    def seed(self, k: int) -> int:
        """Of the random numbers under which that batch is loaded."""
        return mix(self._seed, k, self._rank)

    def batch(self, k: int) -> list[int]:
        epoch, within = divmod(k, self.per_epoch)
        start = (within * self._world + self._rank) * self._batch_size
        order = self._epoch_order(epoch)
        return order[start : start + self._batch_size]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            torch = torch_module()
            generator = torch.Generator().manual_seed(mix(self._seed, epoch))
            order = torch.randperm(self._samples, generator=generator) if self._shuffle else torch.arange(self._samples)
            self._order = (epoch, order.tolist())
        return self._order[1]


class Seeded:
    """A data set whose batches are loaded under their own random numbers."""

    def __init__(self, dataset: Any, plan: Plan) -> None:
        self._dataset = dataset
        self._plan = plan

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, numbers: list[int]) -> Any:
        """What torch's loader calls for a batch. Our sampler gives it one number, the batch's."""
        [k] = numbers
        samples = self._plan.batch(k)
        seed_all(self._plan.seed(k))
        if whole := getattr(self._dataset, "__getitems__", None):
            return whole(samples)
        return [self._dataset[sample] for sample in samples]


class Data:
    """A map-style data set, cut into batches for this rank. `options` go to torch's DataLoader (num_workers, ...)."""

    def __init__(self, dataset: Any, batch_size: int, *, shuffle: bool = True, **options: Any) -> None:
        for name in ("sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise UsageError(f"Data(..., {name}=...) is not possible: the batches follow from seed, step and rank")
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError("Data needs a map-style data set, with a length and samples by number")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.options = options

    def plan(self, *, seed: int, rank: int, world: int) -> Plan:
        return Plan(len(self.dataset), self.batch_size, shuffle=self.shuffle, seed=seed, rank=rank, world=world)

    def batches(self, plan: Plan, *, first: int, last: int) -> Iterator[Any]:
        """Micro-batches `first` to `last` (not included), from one loader over all epochs."""
        torch = torch_module()
        numbers = torch.utils.data.BatchSampler(range(first, last), batch_size=1, drop_last=False)
        return iter(torch.utils.data.DataLoader(Seeded(self.dataset, plan), batch_sampler=numbers, **self.options))
