"""Hugging Face Accelerate on `covey.Loop`:

    accelerator = covey.integrations.accelerate.Accelerator(epochs=10)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in accelerator.epochs():
        for batch in loader: ...

Each rank is an accelerator of one process, so Accelerate builds no process group. `prepare` creates a `covey.Loop` of its
arguments. `accelerator.backward` averages the gradients; with accumulation, in the last micro-batch of a step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

import accelerate
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

import covey
from covey.errors import UsageError

# Hidden from Accelerate, which would build a process group that does not heal.
RANK_VARIABLES: Final = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class AccelerateBatches:
    """The training batches, which `prepare` returns in place of the DataLoader. It can be iterated over once in each epoch of
    `Accelerator.epochs`; another iteration raises `UsageError`."""

    def __init__(self, loop: Any, device: Any) -> None:
        self._loop, self._device = loop, device
        self._epoch_batches: Iterator[Any] | None = None

    def begin_epoch(self, batches: Iterator[Any]) -> None:
        """Set the batches of the next iteration."""
        self._epoch_batches = batches

    def __len__(self) -> int:
        return int(self._loop.steps_per_epoch * self._loop.accumulate)

    def __iter__(self) -> Iterator[Any]:
        batches, self._epoch_batches = self._epoch_batches, None
        if batches is None:
            raise UsageError(
                "the batches of an epoch can be iterated over once: iterate over them in `for epoch in accelerator.epochs():`"
            )
        for batch in batches:
            yield send_to_device(batch, self._device)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An Accelerator of one process per rank on a `covey.Loop`. Creating it calls `covey.init()`.

    `loop`: further options of `covey.Loop` (checkpoint, seed); `options`: those of Accelerate's class.
    """

    def __init__(self, *, epochs: int, loop: dict[str, Any] | None = None, **options: Any) -> None:
        covey.init()
        with _hide_rank_variables():
            super().__init__(**options)
        self._epochs, self._options = epochs, loop or {}
        self._loop: Any = None
        self._batches: AccelerateBatches | None = None
        state = accelerate.PartialState()
        state.process_index, state.local_process_index = covey.get_rank(), covey.get_local_rank()

    def prepare(self, *args: Any, **named: Any) -> Any:
        """Prepare one model, its optimizer, the DataLoader to train on, and schedulers; return a tuple in the order of `args`.

        Loaders after the first are for evaluation. They are returned unchanged, so each rank iterates over all samples. Raise
        `UsageError` at a second call, without a loader, or if there is not exactly one model and one optimizer.
        """
        models = [arg for arg in args if isinstance(arg, torch.nn.Module)]
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        loaders = [arg for arg in args if isinstance(arg, DataLoader)]
        if self._loop is not None or len(models) != 1 or len(optimizers) != 1 or not loaders:
            raise UsageError(
                "prepare(...) is invalid: expected one model, one optimizer and the DataLoader to train on, in a single call"
            )
        rest = [arg for arg in args if arg not in loaders]
        prepared = super().prepare(*rest, **named)
        by_id = dict(zip(map(id, rest), prepared, strict=True))
        self._loop = covey.Loop(
            models[0],
            optimizers[0],
            loaders[0],
            epochs=self._epochs,
            accumulate=self.gradient_accumulation_steps,
            schedulers=[arg for arg in args if isinstance(arg, torch.optim.lr_scheduler.LRScheduler)],
            scaler=self.scaler,
            **self._options,
        )
        self._batches = by_id[id(loaders[0])] = AccelerateBatches(self._loop, self.device)
        return tuple(by_id.get(id(arg), arg) for arg in args)

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch, starting with the current one. Raise `UsageError` before `prepare`, or if the batches
        of an epoch were not all consumed."""
        if self._batches is None:
            raise UsageError("epochs() was called before prepare(...): call prepare(model, optimizer, loader) first")
        for epoch, batches in self._loop.epochs():
            self._batches.begin_epoch(batches)
            yield epoch

    def gather(self, tensor: Any) -> Any:
        """Return the concatenation of all ranks' tensors, in rank order. Their shapes and dtypes must be equal."""
        return torch.cat([torch.atleast_1d(part) for part in covey.all_gather(tensor)])

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        raise UsageError("gather_for_metrics is not supported: every rank evaluates all samples; use its own results")

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return covey.all_reduce(tensor.detach().clone(), reduction) * scale

    def wait_for_everyone(self) -> None:
        covey.barrier()


@contextlib.contextmanager
def _hide_rank_variables() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
