"""Which samples count at which step, and whose they are: so that each sample of an epoch counts exactly once in any world.

Step k's *global batch* is a list of samples that follows from the seed, the epoch and k alone. Its size is fixed when a
training first starts (`batch_size` times `accumulate` times the world) and stays, whatever the world becomes later. The members
of the world, by their *seats*, share the list in their order: the i-th of w takes [i*n//w, (i+1)*n//w).

When members are gone in the middle of a step, what they held did not count: it is carried over into the next step, which is so
much larger, or into an extra step at the end of the epoch. Every rank works out the same, from who took part in the reduction.

A course does not change: `after` returns the next one. A seat is a member's number for life; a rank may change.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from covey.errors import UsageError
from covey.training.lazy_torch import torch_module
from covey.training.seeding import derive_seed


class SampleSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """The way through the data as it is known at the boundary of one step."""

    sample_count: int
    shuffle: bool
    seed: int
    batch_size: int  # these three as they were at the first start
    accumulate: int
    world: int
    steps: int  # without the extra ones
    seats: tuple[int, ...]  # of the members who share the batches, in their order
    drop_last: bool = True  # what does not fill a global batch at the end of an epoch is left out, not a smaller one
    carried: tuple[int, ...] = ()  # samples that did not count so far,
    carried_to: int = -1  # and the step they are part of
    extra: tuple[int, ...] = ()  # steps that have nothing but what was carried over

    @property
    def global_batch_size(self) -> int:
        """Of the global batch."""
        return self.batch_size * self.accumulate * self.world

    @property
    def steps_per_epoch(self) -> int:
        return (
            self.sample_count // self.global_batch_size if self.drop_last else -(-self.sample_count // self.global_batch_size)
        )

    @property
    def total_steps(self) -> int:
        """How many steps there are in all."""
        return self.steps + len(self.extra)

    def locate_step(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and which step of the epoch it is; an extra one follows its epoch's last."""
        number = step - bisect_left(self.extra, step)
        if step in self.extra:
            epoch, within = divmod(number - 1, self.steps_per_epoch)
            return epoch, within + 1
        return divmod(number, self.steps_per_epoch)

    def global_batch(self, step: int) -> list[int]:
        """The global batch of a step."""
        return self.samples_at(step, range(self.samples_in_step(step)))

    def samples_at(self, step: int, places: Iterable[int]) -> list[int]:
        """Some places of the global batch. A rank's micro-batches, next to other ranks' in the order of the epoch, are next to
        each other here: so in the first world each rank has what it would have if there were no other worlds."""
        base = self._fresh_samples_in_step(step)
        epoch, within = self.locate_step(step)
        order = _epoch_order(self.sample_count, self.shuffle, derive_seed(self.seed, epoch))
        found = []
        for place in places:
            if place >= base:
                found.append(self.carried[place - base])
            elif base < self.global_batch_size:
                found.append(order[within * self.global_batch_size + place])
            else:
                rank, rest = divmod(place, self.accumulate * self.batch_size)
                micro, i = divmod(rest, self.batch_size)
                found.append(order[within * self.global_batch_size + (micro * self.world + rank) * self.batch_size + i])
        return found

    def samples_in_step(self, step: int) -> int:
        """Of the global batch, without making it."""
        carried = len(self.carried) if step == self.carried_to else 0
        return carried + self._fresh_samples_in_step(step)

    def _fresh_samples_in_step(self, step: int) -> int:
        """How many samples of the global batch are not carried over: the last of an epoch may have fewer than the others."""
        if step in self.extra:
            return 0
        return (
            self.global_batch_size
            if self.drop_last
            else min(self.global_batch_size, self.sample_count - self.locate_step(step)[1] * self.global_batch_size)
        )

    def member_range(self, step: int, index: int) -> range:
        """Which part of the global batch the index-th member has."""
        n, w = self.samples_in_step(step), len(self.seats)
        if index >= w:  # who has come in the middle of this step has a part of the next
            return range(0)
        return range(index * n // w, (index + 1) * n // w)

    def micro_batches(self, step: int, index: int, limit: int | None) -> list[range]:
        """A member's part in micro-batches: as few as keep to the limit, and as equal as can be, since some layers cannot do
        with a single sample. A member without a part still takes part in the step: a batch, which counts for nothing."""
        span = self.member_range(step, index)
        if not span:
            return [self._idle_member_range(step)]
        count = -(-len(span) // limit) if limit is not None else 1
        return [range(span.start + i * len(span) // count, span.start + (i + 1) * len(span) // count) for i in range(count)]

    def member_weight(self, step: int, index: int, present: tuple[int, ...]) -> float:
        """What the mean over a member's samples counts for in that of all samples whose holders are present."""
        total = (
            self.samples_in_step(step)
            if present == self.seats
            else sum(len(span) for span in self._present_ranges(step, present))
        )
        return len(self.member_range(step, index)) / total if total else 1 / len(present)

    def _present_ranges(self, step: int, present: tuple[int, ...]) -> list[range]:
        here = set(present)
        return [self.member_range(step, i) for i, seat in enumerate(self.seats) if seat in here]

    def counted_positions(self, step: int, present: tuple[int, ...]) -> list[int]:
        """The places that count when these are present. Where nobody is left who has a part, all have taken the first batch,
        which was to count for nothing (see `cut`): then it is the one that counts."""
        return [place for span in self._present_ranges(step, present) for place in span] or list(self._idle_member_range(step))

    def _idle_member_range(self, step: int) -> range:
        """What a member without a part takes."""
        return range(min(self.batch_size, self.samples_in_step(step)))

    def next_schedule(self, step: int, present: tuple[int, ...]) -> SampleSchedule:
        """The course once a step has counted for those who were present at its reduction; they share the next one."""
        if present == self.seats and not self.carried:
            return self
        counted = set(self.counted_positions(step, present))
        carried = tuple(self.samples_at(step, [place for place in range(self.samples_in_step(step)) if place not in counted]))
        at_end = self.locate_step(step)[1] + 1 >= self.steps_per_epoch or step + 1 == self.total_steps
        extra = (*self.extra, step + 1) if carried and at_end else self.extra
        return msgspec.structs.replace(
            self, seats=present, carried=carried, carried_to=step + 1 if carried else -1, extra=extra
        )

    def with_members(self, seats: tuple[int, ...]) -> SampleSchedule:
        """The course among other members, from a step's boundary on."""
        return msgspec.structs.replace(self, seats=seats)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep: all that does not follow from the program and its world."""
        names = ("batch_size", "accumulate", "world", "seats", "carried", "carried_to", "extra")
        return {name: getattr(self, name) for name in names}

    def with_state(self, state: dict[str, Any]) -> SampleSchedule:
        """The course of a state, in the world of that state."""
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in state.items()}
        return msgspec.structs.replace(self, **fields)


class RankShare(msgspec.Struct, frozen=True):
    """One member's part of a course, as a loader needs it, also in a process of its own."""

    schedule: SampleSchedule
    member_position: int
    micro_batch_limit: int | None

    def micro_batch_numbers(self, first: int, *, all_epochs: bool) -> Iterator[list[tuple[int, int]]]:
        """Every micro-batch from a step on, of its epoch or of all, as (step, micro-batch)."""
        epoch = self.schedule.locate_step(first)[0]
        for step in range(first, self.schedule.total_steps):
            if not all_epochs and self.schedule.locate_step(step)[0] != epoch:
                return
            for micro in range(len(self.micro_batches(step))):
                yield [(step, micro)]

    def micro_batches(self, step: int) -> list[range]:
        return self.schedule.micro_batches(step, self.member_position, self.micro_batch_limit)

    def micro_batch_samples(self, step: int, micro: int) -> list[int]:
        return self.schedule.samples_at(step, self.micro_batches(step)[micro])

    def micro_batch_seed(self, step: int, micro: int) -> int:
        """Of the random numbers under which a micro-batch is loaded."""
        usual = self.schedule.accumulate
        number = derive_seed(self.schedule.seed, step * usual + min(micro, usual - 1), self.member_position)
        return number if micro < usual else derive_seed(number, micro)


def initial_schedule(
    samples: int, *, batch_size: int, accumulate: int, world: int, shuffle: bool, seed: int, drop_last: bool = True
) -> SampleSchedule:
    """The course of a training that starts; `steps` is one epoch."""
    course = SampleSchedule(
        sample_count=samples,
        shuffle=shuffle,
        seed=seed,
        batch_size=batch_size,
        accumulate=accumulate,
        world=world,
        steps=0,
        seats=tuple(range(world)),
        drop_last=drop_last,
    )
    if not samples:
        raise UsageError("the data set has no samples: give one that has some")
    if drop_last and samples < batch_size * world:
        raise UsageError(
            f"{samples} samples do not fill one batch of {batch_size} on {world} ranks: use a smaller batch or world,"
            " or drop_last=False"
        )
    if not course.steps_per_epoch:
        micro = samples // (batch_size * world)
        raise UsageError(f"accumulate={accumulate} needs more micro-batches than one epoch has ({micro})")
    return msgspec.structs.replace(course, steps=course.steps_per_epoch)


@functools.lru_cache(maxsize=2)
def _epoch_order(samples: int, shuffle: bool, seed: int) -> list[int]:
    """The samples of an epoch in their order."""
    torch = torch_module()
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)) if shuffle else torch.arange(samples)
    found: list[int] = order.tolist()
    return found
