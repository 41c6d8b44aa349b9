"""One rank on its course: the step it stands at, which samples are its own there, and where their batches come from.

The course is the same on all ranks, and who took part in a step's reduction decides how it goes on. What a rank adds is its
seat, which gives it a share of each step, and a loader, which is ahead of it.
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
    """`step` counts optimizer steps from 0, `micro` the micro-batches within one. `start_at_rank` must be called before use."""

    schedule: SampleSchedule
    member_index: int  # this rank's number for life
    micro_batches: list[range]  # this rank's part of the step, in micro-batches

    def __init__(self, data: Data, *, epochs: int, steps: int | None, accumulate: int, seed: int) -> None:
        """What can be done before this rank is known."""
        self.step, self.micro = 0, 0
        self.indexes_version = 0  # the newest `MemberIndexes` by which the data is shared; 0: none
        self.member_position = 0  # of the seat among those of the course
        self.next_schedule: SampleSchedule | None = None  # the course after this step, once its reduction is complete
        self.stream = data.make_stream(seed=seed, accumulate=accumulate)
        if self.stream is not None and steps is None:
            raise UsageError("Loop(..., steps=...) is needed with an iterable data set, which does not say where it ends")
        self._data, self._epochs, self._steps, self._accumulate, self._seed = data, epochs, steps, accumulate, seed
        self._micro_batch_limit = data.limit if data.limit is not None else data.batch_size if accumulate > 1 else None
        self._rank_share: RankShare | None = None  # of the course, for this rank
        self._loader: Iterator[Any] = iter(())
        self._loader_share: RankShare | None = None  # what the loader is for
        self._collectives: NumberedCollectives | None = None
        self._unchanged_members = torch_module().empty(0, dtype=torch_module().int64)  # made once: a step has little time

    def start_at_rank(self, group: Communicator, collectives: NumberedCollectives | None) -> None:
        """This rank has its place."""
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

    def begin_training(self, *, aloud: bool) -> None:
        """It is known where the training begins. `aloud`: say what is to be expected of the data."""
        if (left_out := self._data.describe_left_out(self.schedule)) and aloud:
            log.warning(left_out)
        if self.stream is not None:
            self.stream.set_member(self.member_index, self.step)
            if aloud:
                self.stream.log_limitations()

    def restore_schedule(self, course: dict[str, Any]) -> None:
        """Continue the schedule of a received state or a checkpoint."""
        self.schedule = self._with_step_count(self.schedule.with_state(course))

    def move_to_step(self, step: int) -> None:
        """Continue at this step."""
        self.step = step

    def share_among_members(self, world: int) -> None:
        """Share the data among the members of the present world, in a training that starts or resumes."""
        indexes = self._collectives.member_indexes if self._collectives is not None else None
        if indexes is not None:
            self.indexes_version = indexes.version
        self.schedule = self.schedule.with_members(tuple(indexes.indexes) if indexes is not None else tuple(range(world)))

    def _with_step_count(self, schedule: SampleSchedule) -> SampleSchedule:
        """With the number of steps that was asked for: an epoch has as many as the first world's batches fill."""
        steps = self._steps if self._steps is not None else self._epochs * schedule.steps_per_epoch
        return msgspec.structs.replace(schedule, steps=steps)

    # -- where it stands ---------------------------------------------------------------------------------------------

    @property
    def schedule_ahead(self) -> SampleSchedule:
        """The course as it goes on from this step, as far as that is known."""
        return self.next_schedule or self.schedule

    @property
    def ends_epoch(self) -> bool:
        """Whether this step is its epoch's last. Certain once the step's gradients are there."""
        return self.schedule_ahead.locate_step(self.step + 1)[0] != self.schedule.locate_step(self.step)[0]

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is its step's last."""
        return self.micro == len(self.micro_batches) - 1

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """This rank's part of it."""
        if self._rank_share is None or self._rank_share.schedule != self.schedule:
            seats = self.schedule.seats
            self.member_position = seats.index(self.member_index) if self.member_index in seats else len(seats)
            self._rank_share = RankShare(self.schedule, self.member_position, self._micro_batch_limit)
        self.micro_batches = self._rank_share.micro_batches(self.step)

    def prepare_loader(self, *, anew: bool = False) -> None:
        """Have a loader whose next batch is this step's first: `anew`, if some of the step's were taken already."""
        self.micro = 0
        if anew or self._loader_share is not self._rank_share:
            self._loader, self._loader_share = self._open_batches(), self._rank_share

    def discard_loader(self, *, ends: bool = True) -> None:
        """What was loaded ahead is not what comes next. Not `ends`: an epoch is over, beyond which some loaders go."""
        if ends or not self._data.has_persistent_workers:
            self._loader_share = None

    def _open_batches(self) -> Iterator[Any]:
        if self.stream is not None:
            found: Iterator[Any] = self.stream.batches(self.step)
            return found
        assert self._rank_share is not None
        return self._data.batches(self._rank_share, self.step)

    def next_micro_batch(self) -> Any:
        """The next micro-batch; the random numbers are its own from here on."""
        batch = next(self._loader)
        seed_all(derive_seed(self._seed, self.step, self.micro, self.member_position))
        return batch

    def end_micro_batch(self) -> None:
        """Continue with the step's next micro-batch."""
        self.micro += 1

    def seed_outside(self, step: int) -> None:
        """The random numbers of what the program does ahead of an epoch that begins with this step, or after the last one."""
        seed_all(derive_seed(self._seed, step, self.member_position))

    def end_step(self) -> None:
        """On to the next one."""
        self.schedule = self.next_schedule or self.schedule.next_schedule(self.step, self.schedule.seats)
        self.next_schedule = None
        self.step += 1

    # -- what this rank's samples count for (reducer.Shares) -----------------------------------------------------------

    def _participants(self) -> tuple[int, ...]:
        """Who takes part in a reduction that begins now."""
        assert self._collectives is not None
        indexes = self._collectives.member_indexes
        if indexes is None or indexes.version <= self.indexes_version:
            return self.schedule.seats
        return tuple(indexes.indexes)

    def gradient_scale(self) -> float:
        """What this rank's gradients count for among those of all who take part now."""
        return self.schedule.member_weight(self.step, self.member_position, self._participants())

    def participants_tensor(self) -> Any:
        """The seating by which a reduction was made, if it is not the one of the course."""
        assert self._collectives is not None
        present, indexes = self._participants(), self._collectives.member_indexes
        if present is self.schedule.seats or indexes is None:
            return self._unchanged_members
        return torch_module().tensor([indexes.version, *present], dtype=torch_module().int64)

    def on_reduction_complete(self, present: Any) -> None:
        """The step's reduction is complete. Who did not take part in it is gone, and what it held is carried over."""
        if self.next_schedule is None:
            seats = self.schedule.seats
            if present.numel():
                self.indexes_version, *found = present.tolist()
                seats = tuple(found)
            self.next_schedule = self.schedule.next_schedule(self.step, seats)
