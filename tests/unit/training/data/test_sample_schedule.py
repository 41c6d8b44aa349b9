"""Every sample of an epoch counts once, whatever the world does."""

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


def begun(
    samples: int = 100,
    *,
    batch_size: int = 2,
    accumulate: int = 1,
    world: int = 3,
    epochs: int = 1,
    drop_last: bool = True,
) -> SampleSchedule:
    sizes = {"batch_size": batch_size, "accumulate": accumulate, "world": world}
    made = sample_schedule.initial_schedule(samples, **sizes, shuffle=True, seed=7, drop_last=drop_last)
    return msgspec.structs.replace(made, steps=epochs * made.steps_per_epoch)


def held(path: SampleSchedule, step: int, seat: int, limit: int | None = None) -> list[int]:
    share = RankShare(path, path.seats.index(seat), limit)
    return [sample for micro in range(len(share.micro_batches(step))) for sample in share.micro_batch_samples(step, micro)]


def test_in_the_first_world_a_rank_has_every_worlds_th_batch_of_the_epoch() -> None:
    path = begun(batch_size=4, accumulate=2, world=3)
    order = [sample for k in range(path.steps) for sample in in_order(path, k)]
    for step in range(path.steps):
        for rank in range(3):
            share = RankShare(path, rank, 4)
            for micro in range(2):
                start = ((step * 2 + micro) * 3 + rank) * 4
                assert share.micro_batch_samples(step, micro) == order[start : start + 4]


def in_order(path: SampleSchedule, step: int) -> list[int]:
    epoch, within = path.locate_step(step)
    order = sample_schedule._epoch_order(path.sample_count, path.shuffle, derive_seed(path.seed, epoch))
    return order[within * path.global_batch_size : (within + 1) * path.global_batch_size]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7])
def test_any_world_shares_the_same_batches(world: int) -> None:
    first = begun(28, batch_size=7, world=1)
    path = msgspec.structs.replace(first, seats=tuple(range(world)))
    for step in range(path.steps):
        parts = [held(path, step, seat) for seat in range(world)]
        assert [sample for part in parts for sample in part] == first.global_batch(step)
        assert sum(path.member_weight(step, i, path.seats) for i in range(world)) == pytest.approx(1)
        assert {len(part) for part in parts} <= {7 // world, 7 // world + 1}


def test_weights_are_those_of_ranks_where_shares_are_equal() -> None:
    path = begun(batch_size=4, accumulate=3, world=3)
    assert {path.member_weight(0, i, path.seats) for i in range(3)} == {1.0 / 3}


def test_a_share_is_cut_evenly_within_the_limit() -> None:
    path = msgspec.structs.replace(begun(40, batch_size=4, world=5), seats=(0, 1, 2))
    assert [[len(part) for part in path.micro_batches(0, i, 4)] for i in range(3)] == [[3, 3], [3, 4], [3, 4]]
    assert [len(path.micro_batches(0, i, None)) for i in range(3)] == [1, 1, 1]


def test_loading_draws_other_numbers_in_each_micro_batch() -> None:
    path = msgspec.structs.replace(begun(40, batch_size=4, accumulate=2, world=5), seats=(0,))
    share = RankShare(path, 0, 4)
    numbers = [number for [number] in share.micro_batch_numbers(0, all_epochs=True)]
    assert len({share.micro_batch_seed(*number) for number in numbers}) == len(numbers) == 10


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_of_an_epoch_counts_once_over_deaths_and_growth(seed: int) -> None:
    chance = random.Random(seed)
    world, accumulate = chance.randint(1, 6), chance.choice([1, 2])
    sizes: Any = {"batch_size": chance.randint(1, 3), "accumulate": accumulate, "world": world, "epochs": 3}
    sizes["drop_last"] = chance.random() < 0.5
    path = begun(97, **sizes)
    counted: dict[int, Counter[int]] = {}
    step, fresh = 0, world
    while step < path.total_steps:
        gone = chance.sample(path.seats, chance.randint(0, len(path.seats) - 1)) if chance.random() < 0.3 else []
        present = tuple(seat for seat in path.seats if seat not in gone)
        chosen = [present[i] for i in chance.sample(range(len(present)), len(present))]
        parts = [held(path, step, seat, chance.choice([None, 1, 2])) for seat in present]
        holders = [part for part, seat in zip(parts, present, strict=True) if path.member_range(step, path.seats.index(seat))]
        counts = counted.setdefault(path.locate_step(step)[0], Counter())
        counts.update(sample for part in holders or parts[:1] for sample in part)
        assert sum(path.member_weight(step, path.seats.index(seat), present) for seat in present) == pytest.approx(1)
        path = path.next_schedule(step, tuple(chosen) if gone else path.seats)
        step += 1
        if chance.random() < 0.2:
            path = path.with_members((*path.seats, fresh))
            fresh += 1
        path = begun(97, **sizes).with_state(path.state())
    assert sorted(counted) == [0, 1, 2]
    for epoch, found in counted.items():
        order = sample_schedule._epoch_order(97, True, derive_seed(7, epoch))
        assert found == Counter(order[: path.steps_per_epoch * path.global_batch_size])


def test_who_has_no_part_of_an_extra_step_still_takes_part() -> None:
    path = begun(8, batch_size=1, world=4)
    path = path.next_schedule(1, (0, 1, 2))
    assert (path.total_steps, path.locate_step(2), path.samples_in_step(2)) == (3, (0, 2), 1)
    assert [held(path, 2, seat) for seat in (0, 1, 2)] == [list(path.carried)] * 3
    assert [path.member_weight(2, i, path.seats) for i in range(3)] == [0.0, 0.0, 1.0]


def test_whoever_stands_in_for_the_holders_of_a_step_takes_its_first_batch() -> None:
    path = begun(8, batch_size=2, world=4).next_schedule(0, (0, 1, 2))
    assert (path.total_steps, [len(path.member_range(1, i)) for i in range(3)]) == (2, [0, 1, 1])
    assert held(path, 1, 0) == list(path.carried) and path.member_weight(1, 0, (0,)) == 1.0
    assert (path.next_schedule(1, (0,)).total_steps, path.next_schedule(1, (0,)).carried) == (2, ())
    path = begun(20, batch_size=1, world=4).next_schedule(0, (0, 1, 2)).next_schedule(4, (0, 1, 2))
    path = msgspec.structs.replace(path, carried=(7, 8), carried_to=5, extra=(5,))
    assert held(path, 5, 0) == [7], "a batch is one sample here"
    assert (path.next_schedule(5, (0,)).total_steps, path.next_schedule(5, (0,)).carried) == (7, (8,))


def test_seven_samples_over_three_ranks_are_one_smaller_batch() -> None:
    path = begun(7, batch_size=4, drop_last=False)
    assert (path.total_steps, [len(held(path, 0, seat)) for seat in range(3)]) == (1, [2, 2, 3])
    assert sorted(sample for seat in range(3) for sample in held(path, 0, seat)) == list(range(7))
    assert [path.member_weight(0, i, path.seats) for i in range(3)] == [2 / 7, 2 / 7, 3 / 7]
    with pytest.raises(UsageError, match="7 samples do not fill one batch of 4 on 3 ranks"):
        begun(7, batch_size=4)
    with pytest.raises(UsageError, match="the data set has no samples"):
        begun(0, drop_last=False)
