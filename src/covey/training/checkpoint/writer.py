"""When a checkpoint is written, and what follows where it cannot be.

A disk that refuses is no reason to end a training that has a checkpoint to go back to: it is said, and tried again when the
next one is due. (Not sooner: a full disk would be written to in every step, and ranks would have checkpoints of different
steps.) A training that has none yet ends: nobody would know that it never had one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from covey.core.messages import CheckpointFailed
from covey.errors import StoreError
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.worker_context import WorkerContext

log = logging.getLogger("covey")


class CheckpointWriter:
    """One rank's checkpoints. `write` makes one of the state as it is, and raises `StoreError`."""

    def __init__(self, checkpoint: Checkpoint, write: Callable[[Checkpoint], None], context: WorkerContext | None) -> None:
        self._checkpoint, self._write, self._context = checkpoint, write, context
        self._last_written_step: int | None = None  # of those this process has written
        self._failed_step: int | None = None  # the newest that was due and could not be written

    def is_due(self, step: int) -> bool:
        return self._checkpoint.due(step)

    def save(self, step: int) -> None:
        """Write a checkpoint, or say why not. Raises `StoreError` where there is no earlier one."""
        try:
            self._write(self._checkpoint)
        except StoreError as error:
            newest = self._newest_step()
            if newest is None:
                raise
            self._failed_step = step
            self._report_failure(step, f"{error}; training goes on, the newest is that of step {newest}")
        else:
            self._last_written_step, self._failed_step = step, None

    def retry_failed(self, step: int) -> None:
        """The training is complete: what is missing is tried once more, as it is now."""
        if self._failed_step is not None:
            self.save(step)

    def close(self) -> None:
        """The training ends here: who looks for its last checkpoint must know that it is not there."""
        if self._failed_step is not None:
            missing, self._failed_step = self._failed_step, None
            self._report_failure(
                missing,
                f"this training ends without the checkpoint of step {missing}, which could not be written to"
                f" {self._checkpoint.folder}: the newest is that of step {self._newest_step()}",
            )

    def _newest_step(self) -> int | None:
        return self._last_written_step if self._last_written_step is not None else self._checkpoint.newest_step()

    def _report_failure(self, step: int, sentence: str) -> None:
        log.warning("%s", sentence)
        if self._context is not None:
            self._context.send_to_scheduler(CheckpointFailed(step, sentence))
