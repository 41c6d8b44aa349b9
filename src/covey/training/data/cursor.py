"""Data cursor of one rank: the current step, the rank's samples of it, and the loader of its batches.

The sample schedule is the same on all ranks; the members that took part in a step's reduction determine the schedule of the
next step. A *member index* is a worker's number, which a resize does not change; it selects the rank's share of each step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from covey.errors import UsageError
from covey.training.collectives.communicator import Communicator
from covey.training.data.loader import Data
from covey.training.data.sample_schedule import RankShare, SampleSchedule
from covey.training.lazy_torch import torch_module
from covey.training.seeding import derive_seed, seed_all

if TYPE_CHECKING:
    from covey.training.collectives.numbered import NumberedCollectives

log = logging.getLogger("covey")


class DataCursor:
    """Position of one rank in the data: `step` counts steps from 0, `micro` the micro-batches within a step.

    `start_at_rank` must be called before use.
    """

    schedule: SampleSchedule
    member_index: int  # does not change in a resize
    micro_batches: list[range]  # of this rank in this step: positions in the global batch

    def __init__(self, data: Data, *, epochs: int, steps: int | None, accumulate: int, seed: int) -> None:
        """Prepare what does not depend on the rank; raise `UsageError` if `steps` is None with an iterable data set."""
        self.step, self.micro = 0, 0
        self.indexes_version = 0  # of the newest `MemberIndexes` by which the data is distributed; 0: none
        self.member_position = 0  # of the member index in `schedule.seats`; their number if it is not among them
        self.next_schedule: SampleSchedule | None = None  # the schedule after this step, once its reduction is complete
        self.stream = data.make_stream(seed=seed, accumulate=accumulate)
        if self.stream is not None and steps is None:
            raise UsageError("Loop(..., steps=N) is required with an iterable data set, which has no length")
        self._data, self._epochs, self._steps, self._accumulate, self._seed = data, epochs, steps, accumulate, seed
        self._micro_batch_limit = data.limit if data.limit is not None else data.batch_size if accumulate > 1 else None
        self._rank_share: RankShare | None = None  # of the schedule, for this rank
        self._loader: Iterator[Any] = iter(())
        self._loader_share: RankShare | None = None  # the share that the loader reads; None: it must be opened
        self._collectives: NumberedCollectives | None = None
        self._unchanged_members = torch_module().empty(0, dtype=torch_module().int64)  # empty; created once, for speed

    def start_at_rank(self, group: Communicator, collectives: NumberedCollectives | None) -> None:
        """Set the member index, and create the schedule of a training that starts in the current world.

        `collectives` is None if the ranks run none. Raise `UsageError` as `Data.make_schedule` does.
        """
        self._collectives = collectives
        self.member_index = (
            group.assignment.member_index if group.assignment is not None and group.assignment.member_index >= 0 else group.rank
        )
        self.schedule = self._with_step_count(
            self._data.make_schedule(seed=self._seed, world=group.world, accumulate=self._accumulate)
        )
        self.micro_batches = self.schedule.micro_batches(0, 0, self._micro_batch_limit)
        if self.stream is not None:
            self.stream.reset_positions(self.schedule.seats)

    def begin_training(self, *, log_limits: bool) -> None:
        """Set a stream to this rank and step; with `log_limits`, log left-out samples and what a stream does not guarantee."""
        if (left_out := self._data.describe_left_out(self.schedule)) and log_limits:
            log.warning(left_out)
        if self.stream is not None:
            self.stream.set_member(self.member_index, self.step)
            if log_limits:
                self.stream.log_limitations()

    def restore_schedule(self, state: dict[str, Any]) -> None:
        """Continue the schedule of a received state or a checkpoint, with this loop's number of epochs or steps."""
        self.schedule = self._with_step_count(self.schedule.with_state(state))

    def move_to_step(self, step: int) -> None:
        """Set the current step. `begin_step` computes this rank's share of it."""
        self.step = step

    def share_among_members(self, world: int) -> None:
        """Distribute the data over the current members; for a training that starts or resumes from a checkpoint."""
        indexes = self._collectives.member_indexes if self._collectives is not None else None
        if indexes is not None:
            self.indexes_version = indexes.version
        self.schedule = self.schedule.with_members(tuple(indexes.indexes) if indexes is not None else tuple(range(world)))

    def _with_step_count(self, schedule: SampleSchedule) -> SampleSchedule:
        steps = self._steps if self._steps is not None else self._epochs * schedule.steps_per_epoch
        return msgspec.structs.replace(schedule, steps=steps)

    # -- position ----------------------------------------------------------------------------------------------------

    @property
    def schedule_ahead(self) -> SampleSchedule:
        """The schedule after this step if this step's reduction is complete, otherwise the current one."""
        return self.next_schedule or self.schedule

    @property
    def ends_epoch(self) -> bool:
        """Whether this step is the last of its epoch. Until its reduction is complete, an extra step may still follow."""
        return self.schedule_ahead.locate_step(self.step + 1)[0] != self.schedule.locate_step(self.step)[0]

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is the last of its step."""
        return self.micro == len(self.micro_batches) - 1

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Compute this rank's position and micro-batches in the current step."""
        if self._rank_share is None or self._rank_share.schedule != self.schedule:
            seats = self.schedule.seats
            self.member_position = seats.index(self.member_index) if self.member_index in seats else len(seats)
            self._rank_share = RankShare(self.schedule, self.member_position, self._micro_batch_limit)
        self.micro_batches = self._rank_share.micro_batches(self.step)

    def prepare_loader(self, *, restart: bool = False) -> None:
        """Provide a loader whose next batch is the first of this step, and set `micro` to 0.

        The open loader continues if this rank's share is unchanged, unless `restart`: batches of this step were already taken
        from it.
        """
        self.micro = 0
        if restart or self._loader_share is not self._rank_share:
            self._loader, self._loader_share = self._open_batches(), self._rank_share

    def discard_loader(self, *, keep_persistent: bool = False) -> None:
        """Discard the batches loaded ahead: the next `prepare_loader` opens another loader.

        `keep_persistent`: do nothing if the loader's workers are persistent.
        """
        if not (keep_persistent and self._data.has_persistent_workers):
            self._loader_share = None

    def _open_batches(self) -> Iterator[Any]:
        if self.stream is not None:
            found: Iterator[Any] = self.stream.batches(self.step)
            return found
        assert self._rank_share is not None
        return self._data.batches(self._rank_share, self.step)

    def next_micro_batch(self) -> Any:
        """Load and return the next micro-batch, and seed the random generators for the script's work on it."""
        batch = next(self._loader)
        seed_all(derive_seed(self._seed, self.step, self.micro, self.member_position))
        return batch

    def end_micro_batch(self) -> None:
        """Continue with the step's next micro-batch."""
        self.micro += 1

    def seed_outside(self, step: int) -> None:
        """Seed the random generators for code before an epoch that starts with this step, or after the last step."""
        seed_all(derive_seed(self._seed, step, self.member_position))

    def end_step(self) -> None:
        """Advance to the next step and its schedule. If this step had no reduction, the members stay the same."""
        self.schedule = self.next_schedule or self.schedule.next_schedule(self.step, self.schedule.seats)
        self.next_schedule = None
        self.step += 1

    # -- weight of this rank's samples (gradient_reducer.SampleWeights) ------------------------------------------------

    def _participants(self) -> tuple[int, ...]:
        """Return the member indexes that take part in a reduction that starts now."""
        assert self._collectives is not None
        indexes = self._collectives.member_indexes
        if indexes is None or indexes.version <= self.indexes_version:
            return self.schedule.seats
        return tuple(indexes.indexes)

    def gradient_scale(self) -> float:
        """Return the weight of this rank's gradients: its share of the samples of all participating members.

        If the participating members have no samples in this step, their weights are equal.
        """
        return self.schedule.member_weight(self.step, self.member_position, self._participants())

    def participants_tensor(self) -> Any:
        """Return a tensor: the version of the member indexes, then the indexes of the participating members.

        It is empty if the participants are the members of the schedule.
        """
        assert self._collectives is not None
        participants, indexes = self._participants(), self._collectives.member_indexes
        if participants is self.schedule.seats or indexes is None:
            return self._unchanged_members
        return torch_module().tensor([indexes.version, *participants], dtype=torch_module().int64)

    def on_reduction_complete(self, participants: Any) -> None:
        """Compute the next schedule, on the first reduction of a step; do nothing on further reductions of the step.

        `participants` is what `participants_tensor` returned on the rank whose result is used.
        """
        if self.next_schedule is None:
            seats = self.schedule.seats
            if participants.numel():
                self.indexes_version, *found = participants.tolist()
                seats = tuple(found)
            self.next_schedule = self.schedule.next_schedule(self.step, seats)
