"""When a checkpoint is written, and what follows where it cannot be.

A disk that refuses is no reason to end a training that has a checkpoint to go back to: it is said, and tried again when the
next one is due. (Not sooner: a full disk would be written to in every step, and ranks would have checkpoints of different
steps.) A training that has none yet ends: nobody would know that it never had one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from covey.core.messages import Unsaved
from covey.errors import StoreError
from covey.train.checkpoint import Checkpoint
from covey.train.group import Group

if TYPE_CHECKING:
    from covey.train.served import Served  # which imports torch

log = logging.getLogger("covey")


class Keeping:
    """One rank's checkpoints."""

    def __init__(self, checkpoint: Checkpoint, group: Group, served: Served) -> None:
        self._checkpoint, self._group, self._served = checkpoint, group, served
        self._newest: int | None = None  # of those this process has written
        self._missing: int | None = None  # the newest that was due and could not be written

    def due(self, step: int) -> bool:
        return self._checkpoint.due(step)

    def save(self, step: int, state: Any) -> None:
        """Write a checkpoint, or say why not. Raises `StoreError` where there is no earlier one."""
        try:
            self._write(step, state)
        except StoreError as error:
            newest = self._newest if self._newest is not None else self._checkpoint.newest_step()
            if newest is None:
                raise
            self._missing = step
            self._say(step, f"{error}; training goes on, the newest is that of step {newest}")
        else:
            self._newest, self._missing = step, None

    def finish(self, step: int, state: Any) -> None:
        """The training is complete: what is missing is tried once more, as it is now."""
        if self._missing is not None and not self._served.any:
            self.save(step, state)

    def close(self) -> None:
        """The training ends here: who looks for its last checkpoint must know that it is not there."""
        if self._missing is not None:
            newest = self._newest if self._newest is not None else self._checkpoint.newest_step()
            self._say(
                self._missing,
                f"this training ends without the checkpoint of step {self._missing}, which could not be"
                f" written to {self._checkpoint.folder}: the newest is that of step {newest}",
            )
            self._missing = None

    def _write(self, step: int, state: Any) -> None:
        checkpoint, group = self._checkpoint, self._group
        if self._served.any and (group.rank == 0 or not self._served.independent):  # by all: any may die
            self._served.save(step, str(checkpoint.folder.absolute()), checkpoint.keep)
        generation = group.meeting.place.generation if group.meeting is not None else 0
        checkpoint.save(step, state, rank=group.rank, world=group.world, generation=generation)

    def _say(self, step: int, sentence: str) -> None:
        log.warning("%s", sentence)
        if self._group.meeting is not None:
            self._group.meeting.say(Unsaved(step, sentence))
