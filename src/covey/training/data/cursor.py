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
from covey.training.collectives.communicator import Group
from covey.training.collectives.gloo_group import torch_module
from covey.training.data.loader import Data
from covey.training.data.sample_schedule import Course, Share
from covey.training.seeding import mix, seed_all

if TYPE_CHECKING:
    from covey.training.collectives.numbered import Collectives

log = logging.getLogger("covey")


class Walk:
    """`step` counts optimizer steps from 0, `micro` the micro-batches within one. In use once `set_out` was called."""

    course: Course
    seat: int  # this rank's number for life
    cut: list[range]  # this rank's part of the step, in micro-batches

    def __init__(self, data: Data, *, epochs: int, steps: int | None, accumulate: int, seed: int) -> None:
        """What can be done before this rank is known."""
        self.step, self.micro = 0, 0
        self.index = 0  # of the seat among those of the course
        self.following: Course | None = None  # the course after this step, once its reduction is complete
        self.stream = data.stream(seed=seed, accumulate=accumulate)
        if self.stream is not None and steps is None:
            raise UsageError("Loop(..., steps=...) is needed with an iterable data set, which does not say where it ends")
        self._data, self._epochs, self._steps, self._accumulate, self._seed = data, epochs, steps, accumulate, seed
        self._limit = data.limit if data.limit is not None else data.batch_size if accumulate > 1 else None
        self._share: Share | None = None  # of the course, for this rank
        self._loader: Iterator[Any] = iter(())
        self._loaded: Share | None = None  # what the loader is for
        self._collectives: Collectives | None = None
        self._as_seated = torch_module().empty(0, dtype=torch_module().int64)  # made once: a step has little time

    def set_out(self, group: Group, collectives: Collectives | None) -> None:
        """This rank has its place."""
        self._collectives = collectives
        self.seat = group.place.member_index if group.place is not None and group.place.member_index >= 0 else group.rank
        self.course = self._to_the_end(self._data.course(seed=self._seed, world=group.world, accumulate=self._accumulate))
        self.cut = self.course.cut(0, 0, self._limit)
        if self.stream is not None:
            self.stream.expect(self.course.seats)

    def begin(self, *, aloud: bool) -> None:
        """It is known where the training begins. `aloud`: say what is to be expected of the data."""
        if (left_out := self._data.left_out(self.course)) and aloud:
            log.warning(left_out)
        if self.stream is not None:
            self.stream.sit(self.seat, self.step)
            if aloud:
                self.stream.say()

    def restore(self, course: dict[str, Any]) -> None:
        """Go on where a state was."""
        self.course = self._to_the_end(self.course.restored(course))

    def _to_the_end(self, course: Course) -> Course:
        """With the number of steps that was asked for: an epoch has as many as the first world's batches fill."""
        steps = self._steps if self._steps is not None else self._epochs * course.steps_per_epoch
        return msgspec.structs.replace(course, steps=steps)

    # -- where it stands ---------------------------------------------------------------------------------------------

    @property
    def ahead(self) -> Course:
        """The course as it goes on from this step, as far as that is known."""
        return self.following or self.course

    @property
    def ends_epoch(self) -> bool:
        """Whether this step is its epoch's last. Certain once the step's gradients are there."""
        return self.ahead.place(self.step + 1)[0] != self.course.place(self.step)[0]

    @property
    def boundary(self) -> bool:
        """Whether this micro-batch is its step's last."""
        return self.micro == len(self.cut) - 1

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """This rank's part of it."""
        if self._share is None or self._share.course != self.course:
            seats = self.course.seats
            self.index = seats.index(self.seat) if self.seat in seats else len(seats)
            self._share = Share(self.course, self.index, self._limit)
        self.cut = self._share.cut(self.step)

    def load(self, *, anew: bool = False) -> None:
        """Have a loader whose next batch is this step's first: `anew`, if some of the step's were taken already."""
        self.micro = 0
        if anew or self._loaded is not self._share:
            self._loader, self._loaded = self._batches(), self._share

    def unload(self, *, ends: bool = True) -> None:
        """What was loaded ahead is not what comes next. Not `ends`: an epoch is over, beyond which some loaders go."""
        if ends or not self._data.lasting:
            self._loaded = None

    def _batches(self) -> Iterator[Any]:
        if self.stream is not None:
            found: Iterator[Any] = self.stream.batches(self.step)
            return found
        assert self._share is not None
        return self._data.batches(self._share, self.step)

    def take(self) -> Any:
        """The next micro-batch; the random numbers are its own from here on."""
        batch = next(self._loader)
        seed_all(mix(self._seed, self.step, self.micro, self.index))
        return batch

    def seed_outside(self, step: int) -> None:
        """The random numbers of what the program does ahead of an epoch that begins with this step, or after the last one."""
        seed_all(mix(self._seed, step, self.index))

    def end_step(self) -> None:
        """On to the next one."""
        self.course = self.following or self.course.after(self.step, self.course.seats)
        self.following = None
        self.step += 1

    # -- what this rank's samples count for (reducer.Shares) -----------------------------------------------------------

    def _here(self) -> tuple[int, ...]:
        """Who takes part in a reduction that begins now."""
        assert self._collectives is not None
        seating = self._collectives.seating
        if seating is None or seating.version <= self._collectives.seated:
            return self.course.seats
        return tuple(seating.indexes)

    def scale(self) -> float:
        """What this rank's gradients count for among those of all who take part now."""
        return self.course.weight(self.step, self.index, self._here())

    def present(self) -> Any:
        """The seating by which a reduction was made, if it is not the one of the course."""
        assert self._collectives is not None
        here, seating = self._here(), self._collectives.seating
        if here is self.course.seats or seating is None:
            return self._as_seated
        return torch_module().tensor([seating.version, *here], dtype=torch_module().int64)

    def counted(self, present: Any) -> None:
        """The step's reduction is complete. Who did not take part in it is gone, and what it held is carried over."""
        assert self._collectives is not None
        if self.following is None:
            seats = self.course.seats
            if present.numel():
                self._collectives.seated, *found = present.tolist()
                seats = tuple(found)
            self.following = self.course.after(self.step, seats)
