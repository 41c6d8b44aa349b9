"""MindSpore-style training in one call.

    model = covey.Model(net, loss_fn=loss_fn, optimizer=optimizer)
    model.train(10, data, callbacks=[LossMonitor(20), ModelCheckpoint(directory=f"./ckpt_of_rank/{rank}")])

`train` runs a `covey.Loop`, which heals failures. Callbacks run inside a step, so their collectives are healed too. A
replacement that repeats a step calls the step's callbacks again; while `loop.replaying` is true, a callback should skip side
effects such as printing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey.errors import UsageError
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.collectives.communicator import Communicator
from covey.training.data.loader import Data
from covey.training.loop import Loop


class Callback:
    """Base class of callbacks. `loop.step` is the step that ends, counted from 0."""

    def step_end(self, loop: Loop, loss: Any) -> None:
        """Called after the steps of optimizer and schedulers. `loss` is this rank's, a tensor without autograd history."""

    def epoch_end(self, loop: Loop) -> None:
        """Called at the end of an epoch's last step, after `step_end` of all callbacks."""


class LossMonitor(Callback):
    """Callback that prints this rank's loss every `per_print_times` steps, except while `loop.replaying`; 0: never.

    Epochs and steps are counted from 1. Raise `UsageError` for an invalid `per_print_times`.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if isinstance(per_print_times, bool) or not isinstance(per_print_times, int) or per_print_times < 0:
            raise UsageError(f"LossMonitor({per_print_times!r}) is invalid: expected a number of steps, 0 to print nothing")
        self.per_print_times = per_print_times

    def step_end(self, loop: Loop, loss: Any) -> None:
        if loop.replaying or not self.per_print_times or (loop.step + 1) % self.per_print_times:
            return
        within = loop.step_of_epoch + 1
        print(f"epoch: {loop.epoch + 1} step: {within}, loss is {loss.item()}", flush=True)  # noqa: T201


class CheckpointConfig:
    """Interval of checkpoints in steps, and the number of checkpoints to keep per rank (at least 2)."""

    def __init__(self, save_checkpoint_steps: int = 100, keep_checkpoint_max: int = 5) -> None:
        self.save_checkpoint_steps = save_checkpoint_steps
        self.keep_checkpoint_max = keep_checkpoint_max


class ModelCheckpoint(Callback):
    """Callback that makes the loop write checkpoints between steps, and resume from them.

    The last part of `directory` must be the rank; None: `ckpt_of_rank/<rank>`. Directories of other ranks beside it are also
    used to resume. Raise `UsageError` for an invalid `prefix` or `config`.
    """

    def __init__(self, prefix: str = "train", directory: str | None = None, config: CheckpointConfig | None = None) -> None:
        config = config or CheckpointConfig()
        self.directory = Path(directory) if directory is not None else None
        every, keep = config.save_checkpoint_steps, config.keep_checkpoint_max
        folder = {} if self.directory is None else {"folder": self.directory.parent}
        self.checkpoint = Checkpoint(**folder, every=every, keep=keep, prefix=prefix)

    def check(self, rank: int) -> None:
        """Raise `UsageError` if `directory` is given and its last part is not `rank`."""
        if self.directory is not None and self.directory.name != str(rank):
            raise UsageError(
                f"ModelCheckpoint(directory={str(self.directory)!r}) is invalid on rank {rank}: the last part of the path must"
                f" be the rank, as in {str(self.directory.parent / str(rank))!r}"
            )


class Model:
    """A network, its loss and its optimizer."""

    def __init__(self, net: Any, loss_fn: Callable[[Any, Any], Any], optimizer: Any, *, group: Communicator) -> None:
        self.net, self.loss_fn, self.optimizer = net, loss_fn, optimizer
        self._group = group

    def train(
        self,
        epochs: int,
        data: Any,
        callbacks: Sequence[Callback] = (),
        *,
        batch_size: int | None = None,
        schedulers: Sequence[Any] = (),
        seed: int = 0,
    ) -> Loop:
        """Train for `epochs` epochs, or the rest of them after a checkpoint, and return the loop. Set the net to training mode.

        `data` is a map-style data set, with a `batch_size` per rank, or a `covey.Data`, which has its own. The last item of a
        batch is the labels, the others are the net's inputs. `schedulers` step after each optimizer step. Raise `UsageError`
        for an invalid argument, such as an iterable data set or two `ModelCheckpoint` callbacks.
        """
        loop = Loop(
            self.net,
            self.optimizer,
            self._as_data(data, batch_size),
            epochs=epochs,
            schedulers=schedulers,
            seed=seed,
            checkpoint=self._find_checkpoint(callbacks),
            group=self._group,
        )
        self.net.train()
        for *inputs, label in loop:
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.net(*inputs), label)
            loss.backward()
            self.optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            for callback in callbacks:
                callback.step_end(loop, loss.detach())
            if loop.ends_epoch:
                for callback in callbacks:
                    callback.epoch_end(loop)
        return loop

    def _as_data(self, data: Any, batch_size: int | None) -> Data:
        if isinstance(data, Data):
            if batch_size is not None:
                raise UsageError(
                    "train(..., batch_size=...) is invalid with a covey.Data, which has its own batch size: omit it"
                )
            return data
        if batch_size is None:
            raise UsageError(
                "train() needs a batch size: pass covey.Data(dataset, batch_size), or batch_size=N with a data set"
            )
        return Data(data, batch_size)

    def _find_checkpoint(self, callbacks: Sequence[Callback]) -> Checkpoint | None:
        found = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        if len(found) > 1:
            raise UsageError(f"train() got {len(found)} ModelCheckpoint callbacks: pass at most one")
        for callback in found:
            callback.check(self._group.rank)
        return found[0].checkpoint if found else None
