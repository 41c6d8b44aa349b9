"""Sample schedule: the samples of each step and their distribution over the members.

The *global batch* of a step is a list of n samples; n is `batch_size` times `accumulate` times the world size when a training
first starts, and does not change with the world size. The last batch of an epoch may be smaller. The members, given by their
member indexes (`seats`), divide the list in order: the i-th of w has the positions i*n//w to (i+1)*n//w - 1. A member index
does not change in a resize; a rank may.

If members leave before a step's reduction, their unused samples are *carried* over into the next step, which is larger by them,
or into an extra step at the end of the epoch or of the training. Every rank computes the same schedule from the participants of
the reduction. A schedule is immutable: `next_schedule` returns the next one.
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
    """The sample schedule as known at one step boundary."""

    sample_count: int  # of the data set; 0: a stream
    shuffle: bool
    seed: int
    batch_size: int  # this, `accumulate` and `world` are those of the first start
    accumulate: int
    world: int
    steps: int  # of the training, without extra steps
    seats: tuple[int, ...]  # indexes of the members that divide the batches, in order
    drop_last: bool = True  # omit samples that do not fill a global batch; else the last batch of an epoch is smaller
    carried: tuple[int, ...] = ()  # samples that members which left did not use
    carried_to: int = -1  # the step to which they are carried; -1: none
    extra: tuple[int, ...] = ()  # numbers of the steps that consist of carried samples only, ascending

    @property
    def global_batch_size(self) -> int:
        """Number of samples of a step, without carried ones; the last step of an epoch may have fewer."""
        return self.batch_size * self.accumulate * self.world

    @property
    def steps_per_epoch(self) -> int:
        return (
            self.sample_count // self.global_batch_size if self.drop_last else -(-self.sample_count // self.global_batch_size)
        )

    @property
    def total_steps(self) -> int:
        """Number of steps of the training, with the steps that resizes have added so far (`extra`)."""
        return self.steps + len(self.extra)

    def locate_step(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step and the step's number in that epoch, both from 0.

        An extra step belongs to the epoch of the step before it; consecutive extra steps have the same number.
        """
        number = step - bisect_left(self.extra, step)
        if step in self.extra:
            epoch, within = divmod(number - 1, self.steps_per_epoch)
            return epoch, within + 1
        return divmod(number, self.steps_per_epoch)

    def global_batch(self, step: int) -> list[int]:
        """Return the samples of a step, carried ones last."""
        return self.samples_at(step, range(self.samples_in_step(step)))

    def samples_at(self, step: int, positions: Iterable[int]) -> list[int]:
        """Return the samples at some positions of the global batch.

        A full batch is ordered by the rank of the first world, then by micro-batch, so that in a world of that size each rank
        has the samples that it would have without elasticity.
        """
        base = self._fresh_samples_in_step(step)
        epoch, within = self.locate_step(step)
        order = _epoch_order(self.sample_count, self.shuffle, derive_seed(self.seed, epoch))
        found = []
        for position in positions:
            if position >= base:
                found.append(self.carried[position - base])
            elif base < self.global_batch_size:
                found.append(order[within * self.global_batch_size + position])
            else:
                rank, rest = divmod(position, self.accumulate * self.batch_size)
                micro, i = divmod(rest, self.batch_size)
                found.append(order[within * self.global_batch_size + (micro * self.world + rank) * self.batch_size + i])
        return found

    def samples_in_step(self, step: int) -> int:
        """Return the size of the global batch of a step, carried samples included."""
        carried = len(self.carried) if step == self.carried_to else 0
        return carried + self._fresh_samples_in_step(step)

    def _fresh_samples_in_step(self, step: int) -> int:
        if step in self.extra:
            return 0
        return (
            self.global_batch_size
            if self.drop_last
            else min(self.global_batch_size, self.sample_count - self.locate_step(step)[1] * self.global_batch_size)
        )

    def member_range(self, step: int, index: int) -> range:
        """Return the share of the index-th of `seats`, as positions in the global batch; empty if there are fewer members."""
        n, w = self.samples_in_step(step), len(self.seats)
        if index >= w:  # joined during this step: has samples from the next one on
            return range(0)
        return range(index * n // w, (index + 1) * n // w)

    def micro_batches(self, step: int, index: int, limit: int | None) -> list[range]:
        """Return the share of the index-th member as micro-batches of at most `limit` samples (None: one micro-batch).

        The micro-batches are as few as possible, and of nearly equal size, because some layers fail on a single sample. A
        member without a share gets the first samples of the global batch, because it still takes part in the step.
        """
        span = self.member_range(step, index)
        if not span:
            return [self._idle_member_range(step)]
        count = -(-len(span) // limit) if limit is not None else 1
        return [range(span.start + i * len(span) // count, span.start + (i + 1) * len(span) // count) for i in range(count)]

    def member_weight(self, step: int, index: int, participants: tuple[int, ...]) -> float:
        """Return the weight of the index-th member's mean in the mean over all samples of the participants.

        If the participants have no samples, their weights are equal.
        """
        total = (
            self.samples_in_step(step)
            if participants == self.seats
            else sum(len(span) for span in self._participant_ranges(step, participants))
        )
        return len(self.member_range(step, index)) / total if total else 1 / len(participants)

    def _participant_ranges(self, step: int, participants: tuple[int, ...]) -> list[range]:
        members = set(participants)
        return [self.member_range(step, i) for i, seat in enumerate(self.seats) if seat in members]

    def counted_positions(self, step: int, participants: tuple[int, ...]) -> list[int]:
        """Return the positions in the global batch that count in the reduction: the shares of the participants. If no
        participant has a share, these are the first `batch_size` positions."""
        used = [position for span in self._participant_ranges(step, participants) for position in span]
        return used or list(self._idle_member_range(step))

    def _idle_member_range(self, step: int) -> range:
        """Return the positions of the batch that a member without a share runs."""
        return range(min(self.batch_size, self.samples_in_step(step)))

    def next_schedule(self, step: int, participants: tuple[int, ...]) -> SampleSchedule:
        """Return the schedule after a step. `participants`: indexes of the members that took part in its reduction.

        The participants divide the next step; samples that they did not use are carried over.
        """
        if participants == self.seats and not self.carried:
            return self
        counted = set(self.counted_positions(step, participants))
        unused = [position for position in range(self.samples_in_step(step)) if position not in counted]
        carried = tuple(self.samples_at(step, unused))
        at_end = self.locate_step(step)[1] + 1 >= self.steps_per_epoch or step + 1 == self.total_steps
        extra = (*self.extra, step + 1) if carried and at_end else self.extra
        return msgspec.structs.replace(
            self, seats=participants, carried=carried, carried_to=step + 1 if carried else -1, extra=extra
        )

    def with_members(self, seats: tuple[int, ...]) -> SampleSchedule:
        """Return the schedule with these members and unchanged carried samples."""
        return msgspec.structs.replace(self, seats=seats)

    def state(self) -> dict[str, Any]:
        """Return the fields that a checkpoint or a replacement needs.

        These are the fields of the first start, the members, the carried samples and the extra steps.
        """
        names = ("batch_size", "accumulate", "world", "seats", "carried", "carried_to", "extra")
        return {name: getattr(self, name) for name in names}

    def with_state(self, state: dict[str, Any]) -> SampleSchedule:
        """Return the schedule with the fields that `state` returned; lists become tuples."""
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in state.items()}
        return msgspec.structs.replace(self, **fields)


class RankShare(msgspec.Struct, frozen=True):
    """One member's share of a schedule, for the data loader, whose workers may be other processes."""

    schedule: SampleSchedule
    member_position: int  # in `schedule.seats`
    micro_batch_limit: int | None  # samples; None: no limit

    def micro_batch_numbers(self, first: int, *, all_epochs: bool) -> Iterator[list[tuple[int, int]]]:
        """Yield [(step, micro-batch)] from step `first` on, to the end of its epoch, or with `all_epochs` of the training."""
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
        """Return the seed with which a micro-batch is loaded."""
        usual = self.schedule.accumulate
        number = derive_seed(self.schedule.seed, step * usual + min(micro, usual - 1), self.member_position)
        return number if micro < usual else derive_seed(number, micro)


def initial_schedule(
    samples: int, *, batch_size: int, accumulate: int, world: int, shuffle: bool, seed: int, drop_last: bool = True
) -> SampleSchedule:
    """Return the schedule of a training that starts, for one epoch.

    Raise `UsageError` if there are no samples, or with `drop_last` too few to fill a global batch.
    """
    schedule = SampleSchedule(
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
        raise UsageError("the data set is empty: expected at least one sample")
    if drop_last and samples < batch_size * world:
        raise UsageError(
            f"{samples} samples do not fill one batch of {batch_size} on {world} ranks: use a smaller batch_size or world,"
            " or drop_last=False"
        )
    if not schedule.steps_per_epoch:
        micro = samples // (batch_size * world)
        raise UsageError(f"accumulate={accumulate} is invalid: an epoch has only {micro} micro-batches")
    return msgspec.structs.replace(schedule, steps=schedule.steps_per_epoch)


@functools.lru_cache(maxsize=2)
def _epoch_order(samples: int, shuffle: bool, seed: int) -> list[int]:
    torch = torch_module()
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)) if shuffle else torch.arange(samples)
    found: list[int] = order.tolist()
    return found
