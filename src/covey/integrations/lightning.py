"""Lightning's Trainer over our loop:

    trainer = lightning.Trainer(max_epochs=10, strategy=covey.integrations.lightning.CoveyStrategy())

Each rank is a trainer on one device, which knows of no other. The strategy makes a `covey.Loop` of the trainer's model,
optimizer and training data, and hands the trainer its batches; gradients are averaged as the backward pass ends. All that the
trainer counts follows from the loop's step, so a replacement's trainer is set to where the others are.
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

# What would end an epoch, or the training, elsewhere than the loop does.
REQUIRED_TRAINER_VALUES: Final = {
    "max_steps": -1,
    "limit_train_batches": 1.0,
    "overfit_batches": 0.0,
    "reload_dataloaders_every_n_epochs": 0,
}


class LightningBatches:
    """The loop as what the trainer takes for its loader: iterated over once per epoch."""

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
        """The trainer counts batches, and leaves an epoch's iterator at the last one."""
        if any(True for _ in self._batches):
            raise UsageError(
                "a Lightning trainer cannot go on in a world of another size: use a strategy without elastic-training"
            )

    def finish(self) -> None:
        """The last step is over. A trainer that was stopped early leaves the loop where it is."""
        if self._loop.step + 1 >= self._loop.steps:
            self._finish_epoch()
            next(self._epochs, None)


class CoveyStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """One device per rank, and the loop between them. `options` go to `covey.Loop` (checkpoint, seed)."""

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
        """The training's data becomes the loop's; others, as validation's, stay what they are, on every rank."""
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

        def put(states: dict[str, Any]) -> None:
            for key, state in states.items():
                stateful[key].load_state_dict(state)

        loop.register("callbacks", lambda: {key: copy.deepcopy(c.state_dict()) for key, c in stateful.items()}, put)
        if loop.step:
            _set_counters(trainer, loop)
        self._batches = LightningBatches(loop)
        return self._batches

    def _check_trainer(self, trainer: Any) -> None:
        for name, value in REQUIRED_TRAINER_VALUES.items():
            if (given := getattr(trainer, name)) != value:
                raise UsageError(f"Trainer({name}={given!r}) is not possible with covey: say how long to train by max_epochs")
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise UsageError("Trainer(max_epochs=...) is needed with covey: a training that can be healed has an end")
        if trainer.val_check_interval != 1.0:
            raise UsageError("Trainer(val_check_interval=...) is not possible with covey: validate after whole epochs")
        if not self.lightning_module.automatic_optimization or len(self.optimizers) != 1:
            raise UsageError("covey trains a LightningModule with one optimizer and automatic optimization")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """For `log(..., sync_dist=True)`: over all ranks once they train, the trainer's own before."""
        if self._batches is None or not isinstance(tensor, torch.Tensor):
            return tensor
        return covey.all_reduce(tensor.detach().clone(), {"avg": "mean"}.get(str(reduce_op).lower(), str(reduce_op).lower()))

    def teardown(self) -> None:
        if self._batches is not None:
            self._batches.finish()
        super().teardown()


def _set_counters(trainer: Any, loop: Any) -> None:
    """As if this trainer had come to the loop's step itself. An epoch that has not begun is left to it to begin."""
    epoch, within, step = loop.epoch, loop.step_of_epoch, loop.step
    fit, steps = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for progress in (fit.epoch_progress.current, fit.epoch_progress.total):
        progress.ready = progress.started = epoch + (within > 0)
        progress.processed = progress.completed = epoch
    optimizer = steps.automatic_optimization.optim_progress.optimizer
    micro = trainer.accumulate_grad_batches
    for progresses, per_step in ((steps.batch_progress, micro), (optimizer.step, 1), (optimizer.zero_grad, 1)):
        for progress, count in ((progresses.current, within), (progresses.total, step)):
            for name in vars(progress):
                setattr(progress, name, count * per_step)
    steps._batches_that_stepped = step
    fit._loaded_from_state_dict = fit._resuming_from_checkpoint = True  # the iterator of this epoch is there already
    fit.restarting = within > 0
