"""Conversion of a torch DataLoader into a `covey.Data`.

The sample schedule selects the samples; of the loader's sampler, only whether it shuffles is kept.
"""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from covey.errors import UsageError
from covey.training.data.loader import Data

# Names of torch, of both arguments and attributes. Other options of a loader, such as its generator, are not kept.
LOADER_OPTIONS: Final = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
WORKER_OPTIONS: Final = ("prefetch_factor", "persistent_workers")  # valid only with num_workers above 0


def is_torch_dataloader(data: Any) -> bool:
    return isinstance(data, DataLoader)


def data_from_dataloader(loader: Any) -> Data:
    """Return a `covey.Data` with the loader's data set, batch size, shuffling, `drop_last` and supported options.

    Raise `UsageError` for a custom sampler or batch sampler, and for `batch_size=None`.
    """
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            "Loop cannot use a DataLoader with batch_sampler= or batch_size=None: create it with a data set and a batch_size"
        )
    names = LOADER_OPTIONS + (WORKER_OPTIONS if loader.num_workers else ())
    options = {name: getattr(loader, name) for name in names}
    stream = isinstance(loader.dataset, IterableDataset)
    shuffle = False if stream else _shuffles(loader.sampler)
    return Data(loader.dataset, loader.batch_size, shuffle=shuffle, drop_last=loader.drop_last, **options)


def _shuffles(sampler: Any) -> bool:
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return True
    raise UsageError(
        f"Loop cannot use a DataLoader whose sampler is a {type(sampler).__name__}: use shuffle=True or False, or a"
        " DistributedSampler"
    )
