"""A training in one call, for scripts written in the manner of MindSpore.

    model = covey.Model(net, loss_fn=loss_fn, optimizer=optimizer)
    model.train(10, data, callbacks=[LossMonitor(20), ModelCheckpoint(directory=f"./ckpt_of_rank/{rank}")])

It is a `Loop` and nothing more: it heals as a loop does. Callbacks run inside the step, so what they do is healed with it. They
are called in a replacement that repeats a step too, because the others may wait in a collective of theirs; but what concerns
the world outside, a line or a file, must then be left out: `loop.replaying` tells.
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
    """Something to do within a training. `loop.step` is the step that ends, counted from 0."""

    def step_end(self, loop: Loop, loss: Any) -> None:
        """After the optimizer; `loss` is this rank's, a tensor."""

    def epoch_end(self, loop: Loop) -> None:
        """After the last step of an epoch."""


class LossMonitor(Callback):
    """Prints the loss every so many steps; 0 means never. Epochs, and the steps of an epoch, are counted from 1."""

    def __init__(self, per_print_times: int = 1) -> None:
        if isinstance(per_print_times, bool) or not isinstance(per_print_times, int) or per_print_times < 0:
            raise UsageError(f"LossMonitor({per_print_times!r}) is not possible: give a number of steps, or 0 for silence")
        self.per_print_times = per_print_times

    def step_end(self, loop: Loop, loss: Any) -> None:
        if loop.replaying or not self.per_print_times or (loop.step + 1) % self.per_print_times:
            return
        within = loop.step_of_epoch + 1
        print(f"epoch: {loop.epoch + 1} step: {within}, loss is {loss.item()}", flush=True)  # noqa: T201


class CheckpointConfig:
    """How often a checkpoint is written, and how many are kept."""

    def __init__(self, save_checkpoint_steps: int = 100, keep_checkpoint_max: int = 5) -> None:
        self.save_checkpoint_steps = save_checkpoint_steps
        self.keep_checkpoint_max = keep_checkpoint_max


class ModelCheckpoint(Callback):
    """Asks for checkpoints, and for resuming from them; the loop writes them between two steps.

    `directory` is this rank's own folder and ends in its rank; beside it are the other ranks', any of whose copies will do.
    """

    def __init__(self, prefix: str = "train", directory: str | None = None, config: CheckpointConfig | None = None) -> None:
        config = config or CheckpointConfig()
        self.directory = Path(directory) if directory is not None else None
        every, keep = config.save_checkpoint_steps, config.keep_checkpoint_max
        folder = {} if self.directory is None else {"folder": self.directory.parent}
        self.checkpoint = Checkpoint(**folder, every=every, keep=keep, prefix=prefix)

    def check(self, rank: int) -> None:
        """A folder that is not this rank's own would mix the copies of all."""
        if self.directory is not None and self.directory.name != str(rank):
            raise UsageError(
                f"ModelCheckpoint(directory={str(self.directory)!r}) is not possible on rank {rank}: each rank writes into"
                f" a folder of its own that ends in its rank, as {str(self.directory.parent / str(rank))!r}"
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
        """Train for so many epochs, or what is left of them after a checkpoint.

        `data` is a `covey.Data`, or a map-style data set with a `batch_size` per rank; its samples end in the label.
        `schedulers` step after each optimizer step.
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
                raise UsageError("train(..., batch_size=...) is not possible with a covey.Data: it has a batch size already")
            return data
        if batch_size is None:
            raise UsageError("train() needs a batch size: give covey.Data(dataset, batch_size), or batch_size= with a data set")
        return Data(data, batch_size)

    def _find_checkpoint(self, callbacks: Sequence[Callback]) -> Checkpoint | None:
        found = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        if len(found) > 1:
            raise UsageError(f"train() takes one ModelCheckpoint, not {len(found)}: a training resumes from one place")
        for asked in found:
            asked.check(self._group.rank)
        return found[0].checkpoint if found else None
