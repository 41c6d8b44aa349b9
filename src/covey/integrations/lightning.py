"""Lightning's Trainer on `covey.Loop`:

    trainer = lightning.Trainer(max_epochs=10, strategy=covey.integrations.lightning.CoveyStrategy())

Each rank is a trainer on one device, without a process group. The strategy creates a `covey.Loop` of the trainer's model,
optimizer and training data, and passes its batches to the trainer. Gradients are averaged at the end of a step's last backward
pass. If the loop does not start at step 0 (in a replacement, or after a checkpoint was loaded), the trainer's counters are set
to the loop's step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only

import covey
from covey.errors import UsageError

# Required values of arguments that could end an epoch or the training at another step than the loop.
REQUIRED_TRAINER_VALUES: Final = {
    "max_steps": -1,
    "limit_train_batches": 1.0,
    "overfit_batches": 0.0,
    "reload_dataloaders_every_n_epochs": 0,
}


class LightningBatches:
    """The loop as the trainer's data loader; the trainer iterates over it once per epoch."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._epochs = loop.epochs()
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return int(self._loop.steps_per_epoch * self._loop.accumulate)

    def __iter__(self) -> Iterator[Any]:
        self._finish_epoch()
        _, self._batches = next(self._epochs)
        for batch in self._batches:  # noqa: UP028  `yield from` would close it when the trainer drops this iterator
            yield batch

    def _finish_epoch(self) -> None:
        """End the iteration over the epoch's batches, because the trainer does not request one more after the last. Raise
        `UsageError` if a batch is left."""
        if any(True for _ in self._batches):
            raise UsageError(
                "a Lightning trainer cannot continue after a resize: use a strategy without elastic-training (COVEY_STRATEGY)"
            )

    def finish(self) -> None:
        """Commit the last step of the training. Do nothing if the trainer was stopped before it."""
        if self._loop.step + 1 >= self._loop.steps:
            self._finish_epoch()
            next(self._epochs, None)


class CoveyStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A Lightning strategy of one device per rank on a `covey.Loop`. Creating it calls `covey.init()`. `options` go to
    `covey.Loop` (checkpoint, seed)."""

    strategy_name = "covey"

    def __init__(self, device: Any = "cpu", **options: Any) -> None:
        super().__init__(device=device)
        covey.init()
        self._options = options
        self._batches: LightningBatches | None = None
        self.global_rank, self.local_rank = covey.get_rank(), covey.get_local_rank()
        rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        return bool(self.global_rank == 0)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Create the loop at the first call during training, and return its batches. Return other data, such as for validation,
        unchanged. Raise `UsageError` if an argument of the trainer, or the module, is not supported."""
        trainer = self.lightning_module.trainer
        if not trainer.training or self._batches is not None:
            return dataloader
        self._check_trainer(trainer)
        loop = covey.Loop(
            self.lightning_module,
            self.optimizers[0],
            dataloader,
            epochs=trainer.max_epochs,
            accumulate=trainer.accumulate_grad_batches,
            schedulers=[config.scheduler for config in self.lr_scheduler_configs],
            **self._options,
        )
        stateful = {callback.state_key: callback for callback in trainer.callbacks if callback.state_dict()}

        def load_states(states: dict[str, Any]) -> None:
            for key, state in states.items():
                stateful[key].load_state_dict(state)

        loop.register("callbacks", lambda: {key: copy.deepcopy(c.state_dict()) for key, c in stateful.items()}, load_states)
        if loop.step:
            _set_counters(trainer, loop)
        self._batches = LightningBatches(loop)
        return self._batches

    def _check_trainer(self, trainer: Any) -> None:
        for name, value in REQUIRED_TRAINER_VALUES.items():
            if (actual := getattr(trainer, name)) != value:
                raise UsageError(f"Trainer({name}={actual!r}) is not supported with covey: limit the training by max_epochs")
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise UsageError("Trainer(max_epochs=N) is required with covey: set a number of epochs")
        if trainer.val_check_interval != 1.0:
            raise UsageError(
                "Trainer(val_check_interval=...) is not supported with covey: omit it to validate after each epoch"
            )
        if not self.lightning_module.automatic_optimization or len(self.optimizers) != 1:
            raise UsageError("this LightningModule is not supported: covey needs one optimizer and automatic optimization")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a copy of `tensor` reduced over all ranks, for `log(..., sync_dist=True)`. Return the argument unchanged if it
        is not a tensor or the loop does not exist yet."""
        if self._batches is None or not isinstance(tensor, torch.Tensor):
            return tensor
        return covey.all_reduce(tensor.detach().clone(), {"avg": "mean"}.get(str(reduce_op).lower(), str(reduce_op).lower()))

    def teardown(self) -> None:
        if self._batches is not None:
            self._batches.finish()
        super().teardown()


def _set_counters(trainer: Any, loop: Any) -> None:
    epoch, within, step = loop.epoch, loop.step_of_epoch, loop.step
    fit, steps = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for progress in (fit.epoch_progress.current, fit.epoch_progress.total):
        progress.ready = progress.started = epoch + (within > 0)  # the trainer counts an epoch that it begins itself
        progress.processed = progress.completed = epoch
    optimizer = steps.automatic_optimization.optim_progress.optimizer
    micro = trainer.accumulate_grad_batches
    for progresses, per_step in ((steps.batch_progress, micro), (optimizer.step, 1), (optimizer.zero_grad, 1)):
        for progress, count in ((progresses.current, within), (progresses.total, step)):
            for name in vars(progress):
                setattr(progress, name, count * per_step)
    steps._batches_that_stepped = step
    fit._loaded_from_state_dict = fit._resuming_from_checkpoint = True  # else the trainer creates a second iterator
    fit.restarting = within > 0
