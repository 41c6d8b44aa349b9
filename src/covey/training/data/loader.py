"""`covey.Data`: a data set and the loader of this rank's batches.

The sample schedule, or for iterable data sets the stream, determines the samples. The global random generators are seeded for
each batch, so random augmentation that uses them is the same when a batch is loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from covey.errors import UsageError
from covey.training.argument_checks import check_int
from covey.training.data import sample_schedule
from covey.training.data.sample_schedule import RankShare, SampleSchedule
from covey.training.lazy_torch import torch_module
from covey.training.seeding import seed_all

if TYPE_CHECKING:
    from covey.training.data.stream import Stream  # which imports torch


class SeededDataset:
    """A data set whose micro-batches are each loaded with their own random seed."""

    def __init__(self, dataset: Any, share: RankShare) -> None:
        self._dataset = dataset
        self._rank_share = share

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, numbers: list[tuple[int, int]]) -> Any:
        """Return the samples of one micro-batch; `numbers` is an item that `MicroBatchSampler` yields."""
        [(step, micro)] = numbers
        samples = self._rank_share.micro_batch_samples(step, micro)
        seed_all(self._rank_share.micro_batch_seed(step, micro))
        if get_batch := getattr(self._dataset, "__getitems__", None):
            return get_batch(samples)
        return [self._dataset[sample] for sample in samples]


class MicroBatchSampler:
    """Batch sampler for torch's DataLoader: the micro-batches of a share from a step on, to the end of its epoch.

    `all_epochs`: to the end of the training.
    """

    def __init__(self, share: RankShare, first: int, *, all_epochs: bool) -> None:
        self._rank_share, self._first_step, self._all_epochs = share, first, all_epochs

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._rank_share.micro_batch_numbers(self._first_step, all_epochs=self._all_epochs)


class Data:
    """A data set, split into batches for this rank. `options` go to torch's DataLoader (num_workers, ...).

    A map-style data set is distributed over the ranks. An iterable one is a stream: each rank reads its own, in its own order;
    `shuffle` and `drop_last` have no effect, and `limit` is refused.

    `batch_size` is per rank at the first start; in a smaller world a rank's share of a step is larger. The share is split into
    as few micro-batches of at most `limit` samples as possible. If `limit` is None, a loop with accumulate > 1 uses
    `batch_size` as the limit. Any other loop gets the share as one batch, because its script steps the optimizer after each.

    With `drop_last` the samples of an epoch that do not fill a batch of all ranks are left out. Otherwise they are a last,
    smaller batch of all ranks, except that they are left out if accumulate > 1. Raise `UsageError` for an invalid argument.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        limit: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler"):
            if name in options:
                raise UsageError(
                    f"Data(..., {name}=...) is not supported: batches are derived from seed, step and rank; omit it"
                )
        self.is_stream = _is_stream(dataset)
        if not self.is_stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise UsageError("the data set of Data is invalid: expected __len__ and __getitem__, or an iterable data set")
        if self.is_stream and limit is not None:
            raise UsageError(
                "Data(..., limit=...) is not supported with an iterable data set, whose batch size is fixed: omit it"
            )
        check_int("Data", "batch_size", batch_size, 1)
        check_int("Data", "limit", 1 if limit is None else limit, 1)
        self.dataset = dataset
        self.batch_size = batch_size
        self.limit = limit
        self.shuffle = shuffle
        self.drop_last = drop_last or self.is_stream
        self.options = options

    def make_stream(self, *, seed: int, accumulate: int) -> Stream | None:
        """Return this rank's stream; None for a map-style data set."""
        if not self.is_stream:
            return None
        from covey.training.data.stream import Stream

        return Stream(self.dataset, self.batch_size, accumulate, seed, self.options)

    def make_schedule(self, *, seed: int, world: int, accumulate: int) -> SampleSchedule:
        """Return the sample schedule at the start of a training. It has the steps of one epoch; for a stream, 0 steps.

        Raise `UsageError` if the data set has too few samples.
        """
        if self.is_stream:
            from covey.training.data.stream import initial_stream_schedule

            return initial_stream_schedule(self.batch_size, accumulate, world, seed)
        return sample_schedule.initial_schedule(
            len(self.dataset),
            batch_size=self.batch_size,
            accumulate=accumulate,
            world=world,
            shuffle=self.shuffle,
            seed=seed,
            drop_last=self.drop_last or accumulate > 1,
        )

    def describe_left_out(self, schedule: SampleSchedule) -> str:
        """Return a message if the schedule leaves out samples although `drop_last` is false; otherwise ""."""
        rest = schedule.sample_count % schedule.global_batch_size if schedule.drop_last and not self.drop_last else 0
        if not rest:
            return ""
        return (
            f"each epoch leaves out {rest} of {schedule.sample_count} samples, which do not fill a batch of all ranks"
            f" ({schedule.global_batch_size} samples): drop_last=False has no effect with accumulate above 1"
        )

    def batches(self, share: RankShare, first: int) -> Iterator[Any]:
        """Start the loader and return an iterator of a share's micro-batches, from step `first` to the end of its epoch.

        With persistent workers the iterator continues to the last step of the training.
        """
        torch = torch_module()
        # torch's loader draws its base seed from the script's generator, which `next_micro_batch` seeds before the script runs.
        numbers = MicroBatchSampler(share, first, all_epochs=self.has_persistent_workers)
        return iter(torch.utils.data.DataLoader(SeededDataset(self.dataset, share), batch_sampler=numbers, **self.options))

    @property
    def has_persistent_workers(self) -> bool:
        return bool(self.options.get("persistent_workers"))


def _is_stream(dataset: Any) -> bool:
    """torch's IterableDataset is recognized by name, to avoid the import; its `__getitem__` only raises."""
    named = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    return named or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"))
