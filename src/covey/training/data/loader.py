"""A data set and its loader: the samples of this rank, batch by batch.

Which samples those are is the course's affair, or, where the data set is a stream, the stream's. Each batch is loaded under
random numbers of its own, so augmentation repeats when a batch is loaded again, with or without loader workers.
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
    """A data set whose batches are loaded under their own random numbers."""

    def __init__(self, dataset: Any, share: RankShare) -> None:
        self._dataset = dataset
        self._rank_share = share

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, numbers: list[tuple[int, int]]) -> Any:
        """What torch's loader calls for a batch. Our sampler gives it one number, the batch's."""
        [(step, micro)] = numbers
        samples = self._rank_share.micro_batch_samples(step, micro)
        seed_all(self._rank_share.micro_batch_seed(step, micro))
        if whole := getattr(self._dataset, "__getitems__", None):
            return whole(samples)
        return [self._dataset[sample] for sample in samples]


class MicroBatchSampler:
    """What torch takes for a sampler: every micro-batch of a share, from a step on."""

    def __init__(self, share: RankShare, first: int, *, all_epochs: bool) -> None:
        self._rank_share, self._first_step, self._all_epochs = share, first, all_epochs

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._rank_share.micro_batch_numbers(self._first_step, all_epochs=self._all_epochs)


class Data:
    """A data set, cut into batches for this rank. `options` go to torch's DataLoader (num_workers, ...).

    One with a length and samples by number is shared among the ranks. One that can only be iterated over is a stream, of which
    each rank reads its own, in its own order.

    `batch_size` is a rank's at the first start. In a smaller world a rank's part of a step is larger: it comes in micro-batches
    of at most `limit` samples. Without a limit, a loop that accumulates takes at most `batch_size` at once, and any other takes
    its part of a step as one batch, because its program steps the optimizer after each.

    With `drop_last=False`, as torch's DataLoader has it, what is left of an epoch is a last, smaller batch of all ranks.
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
                raise UsageError(f"Data(..., {name}=...) is not possible: the batches follow from seed, step and rank")
        self.is_stream = _is_stream(dataset)
        if not self.is_stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise UsageError("Data needs a data set with a length and samples by number, or an iterable one")
        if self.is_stream and limit is not None:
            raise UsageError("Data(..., limit=...) is not possible with an iterable data set: its batches are always as large")
        check_int("Data", "batch_size", batch_size, 1)
        check_int("Data", "limit", 1 if limit is None else limit, 1)
        self.dataset = dataset
        self.batch_size = batch_size
        self.limit = limit
        self.shuffle = shuffle
        self.drop_last = drop_last or self.is_stream
        self.options = options

    def make_stream(self, *, seed: int, accumulate: int) -> Stream | None:
        """This rank's stream, if the data set is one."""
        if not self.is_stream:
            return None
        from covey.training.data.stream import Stream

        return Stream(self.dataset, self.batch_size, accumulate, seed, self.options)

    def make_schedule(self, *, seed: int, world: int, accumulate: int) -> SampleSchedule:
        """The way through this data of a training that starts."""
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

    def describe_left_out(self, course: SampleSchedule) -> str:
        """What was to be given and a course does not give, in a sentence."""
        rest = course.sample_count % course.global_batch_size if course.drop_last and not self.drop_last else 0
        if not rest:
            return ""
        return (
            f"each epoch leaves out {rest} of {course.sample_count} samples, which do not fill a batch of all ranks"
            f" ({course.global_batch_size} samples): with accumulate above 1 there is no last, smaller batch"
        )

    def batches(self, share: RankShare, first: int) -> Iterator[Any]:
        """Every micro-batch of a share from a step to the end of its epoch: as with torch, loader workers see in each epoch
        what the program has made of its data set (`set_epoch`). Those that are to stay alive go on to the last."""
        torch = torch_module()
        # torch's loader draws its base seed from the program's generator, which `Walk.take` seeds before the program draws.
        numbers = MicroBatchSampler(share, first, all_epochs=self.has_persistent_workers)
        return iter(torch.utils.data.DataLoader(SeededDataset(self.dataset, share), batch_sampler=numbers, **self.options))

    @property
    def has_persistent_workers(self) -> bool:
        """Whether loader workers outlive an epoch."""
        return bool(self.options.get("persistent_workers"))


def _is_stream(dataset: Any) -> bool:
    """torch's own have a `__getitem__` that only raises. By name: torch is not imported to find out."""
    named = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    return named or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"))
