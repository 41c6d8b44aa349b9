"""Sample schedule: every sample of an epoch is used once, however the world size changes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from covey.errors import UsageError
from covey.training.data import sample_schedule
from covey.training.data.sample_schedule import RankShare, SampleSchedule
from covey.training.seeding import derive_seed


def make_schedule(
    samples: int = 100,
    *,
    batch_size: int = 2,
    accumulate: int = 1,
    world: int = 3,
    epochs: int = 1,
    drop_last: bool = True,
) -> SampleSchedule:
    sizes = {"batch_size": batch_size, "accumulate": accumulate, "world": world}
    schedule = sample_schedule.initial_schedule(samples, **sizes, shuffle=True, seed=7, drop_last=drop_last)
    return msgspec.structs.replace(schedule, steps=epochs * schedule.steps_per_epoch)


def member_samples(schedule: SampleSchedule, step: int, seat: int, limit: int | None = None) -> list[int]:
    share = RankShare(schedule, schedule.seats.index(seat), limit)
    return [sample for micro in range(len(share.micro_batches(step))) for sample in share.micro_batch_samples(step, micro)]


def test_batches_of_the_first_world_are_interleaved_over_its_ranks() -> None:
    schedule = make_schedule(batch_size=4, accumulate=2, world=3)
    order = [sample for k in range(schedule.steps) for sample in samples_in_epoch_order(schedule, k)]
    for step in range(schedule.steps):
        for rank in range(3):
            share = RankShare(schedule, rank, 4)
            for micro in range(2):
                start = ((step * 2 + micro) * 3 + rank) * 4
                assert share.micro_batch_samples(step, micro) == order[start : start + 4]


def samples_in_epoch_order(schedule: SampleSchedule, step: int) -> list[int]:
    epoch, within = schedule.locate_step(step)
    order = sample_schedule._epoch_order(schedule.sample_count, schedule.shuffle, derive_seed(schedule.seed, epoch))
    return order[within * schedule.global_batch_size : (within + 1) * schedule.global_batch_size]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7])
def test_worlds_of_any_size_divide_the_same_global_batches(world: int) -> None:
    first = make_schedule(28, batch_size=7, world=1)
    schedule = msgspec.structs.replace(first, seats=tuple(range(world)))
    for step in range(schedule.steps):
        parts = [member_samples(schedule, step, seat) for seat in range(world)]
        assert [sample for part in parts for sample in part] == first.global_batch(step)
        assert sum(schedule.member_weight(step, i, schedule.seats) for i in range(world)) == pytest.approx(1)
        assert {len(part) for part in parts} <= {7 // world, 7 // world + 1}


def test_equal_shares_have_equal_weights() -> None:
    schedule = make_schedule(batch_size=4, accumulate=3, world=3)
    assert {schedule.member_weight(0, i, schedule.seats) for i in range(3)} == {1.0 / 3}


def test_share_is_split_evenly_within_the_limit() -> None:
    schedule = msgspec.structs.replace(make_schedule(40, batch_size=4, world=5), seats=(0, 1, 2))
    assert [[len(part) for part in schedule.micro_batches(0, i, 4)] for i in range(3)] == [[3, 3], [3, 4], [3, 4]]
    assert [len(schedule.micro_batches(0, i, None)) for i in range(3)] == [1, 1, 1]


def test_every_micro_batch_has_its_own_loading_seed() -> None:
    schedule = msgspec.structs.replace(make_schedule(40, batch_size=4, accumulate=2, world=5), seats=(0,))
    share = RankShare(schedule, 0, 4)
    numbers = [number for [number] in share.micro_batch_numbers(0, all_epochs=True)]
    assert len({share.micro_batch_seed(*number) for number in numbers}) == len(numbers) == 10


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_of_an_epoch_is_used_once_across_resizes(seed: int) -> None:
    chance = random.Random(seed)
    world, accumulate = chance.randint(1, 6), chance.choice([1, 2])
    sizes: Any = {"batch_size": chance.randint(1, 3), "accumulate": accumulate, "world": world, "epochs": 3}
    sizes["drop_last"] = chance.random() < 0.5
    schedule = make_schedule(97, **sizes)
    counted: dict[int, Counter[int]] = {}
    step, next_index = 0, world
    while step < schedule.total_steps:
        gone = chance.sample(schedule.seats, chance.randint(0, len(schedule.seats) - 1)) if chance.random() < 0.3 else []
        participants = tuple(seat for seat in schedule.seats if seat not in gone)
        chosen = [participants[i] for i in chance.sample(range(len(participants)), len(participants))]
        parts = [member_samples(schedule, step, seat, chance.choice([None, 1, 2])) for seat in participants]
        indexes = [schedule.seats.index(seat) for seat in participants]
        holders = [part for part, index in zip(parts, indexes, strict=True) if schedule.member_range(step, index)]
        counts = counted.setdefault(schedule.locate_step(step)[0], Counter())
        counts.update(sample for part in holders or parts[:1] for sample in part)
        assert sum(schedule.member_weight(step, index, participants) for index in indexes) == pytest.approx(1)
        schedule = schedule.next_schedule(step, tuple(chosen) if gone else schedule.seats)
        step += 1
        if chance.random() < 0.2:
            schedule = schedule.with_members((*schedule.seats, next_index))
            next_index += 1
        schedule = make_schedule(97, **sizes).with_state(schedule.state())
    assert sorted(counted) == [0, 1, 2]
    for epoch, found in counted.items():
        order = sample_schedule._epoch_order(97, True, derive_seed(7, epoch))
        assert found == Counter(order[: schedule.steps_per_epoch * schedule.global_batch_size])


def test_member_without_share_of_an_extra_step_runs_a_batch_of_weight_0() -> None:
    schedule = make_schedule(8, batch_size=1, world=4)
    schedule = schedule.next_schedule(1, (0, 1, 2))
    assert (schedule.total_steps, schedule.locate_step(2), schedule.samples_in_step(2)) == (3, (0, 2), 1)
    assert [member_samples(schedule, 2, seat) for seat in (0, 1, 2)] == [list(schedule.carried)] * 3
    assert [schedule.member_weight(2, i, schedule.seats) for i in range(3)] == [0.0, 0.0, 1.0]


def test_first_batch_of_a_step_is_used_if_all_members_with_a_share_left() -> None:
    schedule = make_schedule(8, batch_size=2, world=4).next_schedule(0, (0, 1, 2))
    assert (schedule.total_steps, [len(schedule.member_range(1, i)) for i in range(3)]) == (2, [0, 1, 1])
    assert member_samples(schedule, 1, 0) == list(schedule.carried) and schedule.member_weight(1, 0, (0,)) == 1.0
    assert (schedule.next_schedule(1, (0,)).total_steps, schedule.next_schedule(1, (0,)).carried) == (2, ())
    schedule = make_schedule(20, batch_size=1, world=4).next_schedule(0, (0, 1, 2)).next_schedule(4, (0, 1, 2))
    schedule = msgspec.structs.replace(schedule, carried=(7, 8), carried_to=5, extra=(5,))
    assert member_samples(schedule, 5, 0) == [7], "batch_size is 1 here"
    assert (schedule.next_schedule(5, (0,)).total_steps, schedule.next_schedule(5, (0,)).carried) == (7, (8,))


def test_rest_of_an_epoch_is_one_smaller_batch_without_drop_last() -> None:
    schedule = make_schedule(7, batch_size=4, drop_last=False)
    assert (schedule.total_steps, [len(member_samples(schedule, 0, seat)) for seat in range(3)]) == (1, [2, 2, 3])
    assert sorted(sample for seat in range(3) for sample in member_samples(schedule, 0, seat)) == list(range(7))
    assert [schedule.member_weight(0, i, schedule.seats) for i in range(3)] == [2 / 7, 2 / 7, 3 / 7]
    with pytest.raises(UsageError, match="7 samples do not fill one batch of 4 on 3 ranks"):
        make_schedule(7, batch_size=4)
    with pytest.raises(UsageError, match="the data set is empty"):
        make_schedule(0, drop_last=False)
