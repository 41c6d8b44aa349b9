"""Schedule of checkpoints, and handling of failed writes.

A failed checkpoint write does not end a training that has an earlier checkpoint: it is logged and reported
(`CheckpointFailed`). The next write is attempted when the next checkpoint is due, and at the end of a training without
parameter servers, because a retry on every step would give the ranks checkpoints of different steps. Without an earlier
checkpoint the error is raised, because a training that cannot be resumed must not look healthy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from covey.core.messages import CheckpointFailed
from covey.errors import StoreError
from covey.training.checkpoint.checkpoint import Checkpoint
from covey.training.node_interface import NodeInterface

log = logging.getLogger("covey")


class CheckpointWriter:
    """Writer of the checkpoints of one rank; `write` writes the current state, or raises `StoreError` if it cannot.

    `context` is None outside a cluster; failures are then not reported.
    """

    def __init__(self, checkpoint: Checkpoint, write: Callable[[Checkpoint], None], context: NodeInterface | None) -> None:
        self._checkpoint, self._write, self._context = checkpoint, write, context
        self._last_written_step: int | None = None  # by this process; None: none
        self._failed_step: int | None = None  # the newest whose write failed; None: no write is missing

    def is_due(self, step: int) -> bool:
        return self._checkpoint.due(step)

    def save(self, step: int) -> None:
        """Write a checkpoint; log and report a failure, but raise the `StoreError` if there is no earlier checkpoint."""
        try:
            self._write(self._checkpoint)
        except StoreError as error:
            newest = self._newest_step()
            if newest is None:
                raise
            self._failed_step = step
            self._report_failure(step, f"{error}; training continues, the newest is that of step {newest}")
        else:
            self._last_written_step, self._failed_step = step, None

    def retry_failed(self, step: int) -> None:
        """Write the current state if the last write failed, like `save`."""
        if self._failed_step is not None:
            self.save(step)

    def close(self) -> None:
        """Log and report that the last checkpoint is missing, if its write failed."""
        if self._failed_step is not None:
            missing, self._failed_step = self._failed_step, None
            self._report_failure(
                missing,
                f"this training ends without the checkpoint of step {missing}, which could not be written to"
                f" {self._checkpoint.folder}: the newest is that of step {self._newest_step()}",
            )

    def _newest_step(self) -> int | None:
        return self._last_written_step if self._last_written_step is not None else self._checkpoint.newest_step()

    def _report_failure(self, step: int, message: str) -> None:
        log.warning("%s", message)
        if self._context is not None:
            self._context.send_to_scheduler(CheckpointFailed(step, message))
