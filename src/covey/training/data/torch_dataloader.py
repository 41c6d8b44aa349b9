"""A torch DataLoader as our data: what it says about its batches is kept, or refused in one sentence.

Which samples a rank gets is the course's affair, so of a sampler only one thing is kept, whether it shuffles.
"""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from covey.errors import UsageError
from covey.training.data.loader import Data

# As torch names them, both as arguments and as attributes.
LOADER_OPTIONS: Final = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
WORKER_OPTIONS: Final = ("prefetch_factor", "persistent_workers")


def is_torch_dataloader(data: Any) -> bool:
    return isinstance(data, DataLoader)


def data_from_dataloader(loader: Any) -> Data:
    """The same data set in batches of the same size, loaded in the same manner."""
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            "Loop cannot keep this DataLoader's batches, which are the program's own (batch_sampler=, or batch_size=None):"
            " give it a data set and a batch_size"
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
        f"Loop cannot keep this DataLoader's order, which a {type(sampler).__name__} of the program makes: it shuffles"
        " (shuffle=True or a DistributedSampler), or takes the samples in their order"
    )
