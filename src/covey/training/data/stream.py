"""Data that comes as a stream: an iterable data set, of which each rank reads its own, batch by batch.

A stream can only be read on from a *position*, which is what its `state_dict` says. Batches are numbered, and loaded under
random numbers that follow from their number: so from an older position the same batches come again. Therefore positions need
not be exact. Every few batches a loader takes one down; every few steps all ranks tell each other theirs; and a replacement, or
a training that resumes, reads on from the last it knows and lets go of what it need not see again. A data set without
`state_dict` is read again from its beginning.

Loader workers each read a stream of their own, a *lane*: batch n is the next of lane n % lanes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from covey.errors import UsageError
from covey.training.collectives.communicator import Communicator
from covey.training.data.sample_schedule import SampleSchedule
from covey.training.seeding import derive_seed, seed_all
from covey.training.state.pytree import from_byte_tensor, to_byte_tensor

BATCHES_PER_POSITION: Final = 8  # batches of a lane between two positions
STEPS_PER_EXCHANGE: Final = 16  # steps between two exchanges of positions
POSITION_BYTES_MAX: Final = 16 * 1024 * 1024  # bytes

log = logging.getLogger("covey")

Position = tuple[int, bytes]  # after so many batches of a lane, and the data set's state then; without one it is the beginning
START_POSITION: Final[Position] = (0, b"")


class StreamSchedule(SampleSchedule, frozen=True, kw_only=True):
    """A course through data without numbers: every member has the same share of each step, whoever they are."""

    @property
    def steps_per_epoch(self) -> int:
        """A stream is one epoch."""
        return self.steps

    def locate_step(self, step: int) -> tuple[int, int]:
        return divmod(step, max(1, self.steps))

    def micro_batches(self, step: int, index: int, limit: int | None) -> list[range]:
        return [range(i * self.batch_size, (i + 1) * self.batch_size) for i in range(self.accumulate)]

    def member_weight(self, step: int, index: int, present: tuple[int, ...]) -> float:
        """Who came in the middle of a step counts from the next, unless nobody else is left."""
        counted = len(set(present) & set(self.seats))
        if not counted:
            return 1 / len(present)
        return 1 / counted if index < len(self.seats) else 0.0

    def next_schedule(self, step: int, present: tuple[int, ...]) -> SampleSchedule:
        return self if present == self.seats else self.with_members(present)


def initial_stream_schedule(batch_size: int, accumulate: int, world: int, seed: int) -> StreamSchedule:
    """The course of a training that starts; the loop says how many steps it has."""
    return StreamSchedule(
        sample_count=0,
        shuffle=False,
        seed=seed,
        batch_size=batch_size,
        accumulate=accumulate,
        world=world,
        steps=0,
        seats=tuple(range(world)),
    )


class StreamDataset(IterableDataset):  # type: ignore[misc]
    """What torch's loader reads, perhaps in a process of its own: batches from a number on, some with the position after."""

    def __init__(
        self,
        dataset: Any,
        initial_state: bytes,
        batch_size: int,
        collate: Callable[[list[Any]], Any],
        seed: int,
        first_batch: int,
        lane_positions: list[Position],
    ) -> None:
        self._dataset, self._initial_state = dataset, initial_state
        self._batch_size = batch_size
        self._collate = collate
        self._seed = seed
        self._first_batch, self._lane_positions = first_batch, lane_positions

    def __iter__(self) -> Iterator[tuple[Any, tuple[int, int, bytes] | None]]:
        worker = get_worker_info()
        lane = worker.id if worker is not None else 0
        count, state = self._lane_positions[lane]
        if state:
            _load_dataset_state(self._dataset, state)
        samples = self._iterate_endlessly()
        while True:
            number = count * len(self._lane_positions) + lane
            seed_all(derive_seed(self._seed, number))
            drawn = [next(samples) for _ in range(self._batch_size)]
            count += 1
            if number >= self._first_batch:
                due = count % BATCHES_PER_POSITION == 0 and is_stateful(self._dataset)
                yield self._collate(drawn), (lane, count, dataset_state(self._dataset)) if due else None

    def _iterate_endlessly(self) -> Iterator[Any]:
        """The samples; when they end, from the beginning."""
        fruitless = False
        while True:
            given = False
            for sample in self._dataset:
                given = True
                yield sample
            if not given and (fruitless or not self._initial_state):
                raise UsageError("the data set gave no sample: after its end, iterating over it must begin anew")
            if not given:
                _load_dataset_state(self._dataset, self._initial_state)
            fruitless = not given


class Stream:
    """One rank's stream, and what is known of all ranks' positions."""

    def __init__(self, dataset: Any, batch_size: int, accumulate: int, seed: int, options: dict[str, Any]) -> None:
        self._lane_count = max(1, options.get("num_workers", 0))
        self._batches_per_step = accumulate
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._collate = options.get("collate_fn") or default_collate
        self._options = {key: value for key, value in options.items() if key != "collate_fn"}
        self._positions_by_member: dict[
            int, dict[str, Any]
        ] = {}  # by seat: the step its stream began in, and a position of each lane
        self._member_index, self._first_step = 0, 0
        self._recorded_positions: list[list[Position]] = []  # by lane, the oldest first
        self._batch_iterator: Iterator[Any] | None = None
        self._next_batch_number = -1  # of the batch that comes next
        self._initial_state = dataset_state(dataset) if is_stateful(dataset) else b""

    def log_limitations(self) -> None:
        """What to expect of it, once at the start."""
        log.info("the data is a stream: each sample counts once as long as the world keeps its size, and not beyond")
        if not is_stateful(self._dataset):
            log.info("the data set has no state_dict and load_state_dict: a replacement reads it again from its beginning")

    # -- positions ---------------------------------------------------------------------------------------------------

    def reset_positions(self, seats: tuple[int, ...]) -> None:
        """A training that starts: these all begin at their beginning."""
        self._positions_by_member = {seat: {"began": 0, "lanes": [START_POSITION] * self._lane_count} for seat in seats}

    def current_state(self) -> dict[str, Any]:
        """For a replacement or a checkpoint."""
        return {"lanes": self._lane_count, "places": self._positions_by_member}

    def load_state(self, known: dict[str, Any]) -> None:
        if known["lanes"] != self._lane_count:
            raise UsageError(
                f"this stream was read by {known['lanes']} loaders, and a position of one of {self._lane_count} does not follow"
                " from that: give Data the num_workers it had"
            )
        self._positions_by_member = known["places"]

    def set_member(self, seat: int, step: int) -> None:
        """Who this rank is. One that nobody knows a position of is new: its stream begins with this step."""
        place = self._positions_by_member.get(seat)
        self._member_index, self._first_step = seat, place["began"] if place is not None else step
        lanes = place["lanes"] if place is not None else [START_POSITION] * self._lane_count
        self._recorded_positions = [[(count, state)] for count, state in lanes]

    def begin_step(self, step: int, group: Communicator) -> None:
        """A step begins: nothing before it is needed any more. From time to time, hear where the others are."""
        self._recorded_positions = [taken[-1:] for taken in self._recorded_positions]
        if step and step % STEPS_PER_EXCHANGE == 0:
            self._exchange_positions(group)

    def _exchange_positions(self, group: Communicator) -> None:
        mine = {
            "seat": self._member_index,
            "began": self._first_step,
            "lanes": [taken[0] for taken in self._recorded_positions],
        }
        flat = to_byte_tensor(mine)
        size = int(group.all_reduce(torch.tensor(flat.numel()), "max"))
        if size > POSITION_BYTES_MAX:
            raise UsageError(
                f"the data set's state_dict has {size} bytes, {POSITION_BYTES_MAX} is the limit: keep samples out of it"
            )
        padded = torch.zeros(size, dtype=torch.uint8)
        padded[: flat.numel()] = flat
        positions = [from_byte_tensor(found) for found in group.all_gather(padded)]
        self._positions_by_member = {place.pop("seat"): place for place in positions}

    # -- batches -----------------------------------------------------------------------------------------------------

    def batches(self, step: int) -> Iterator[Any]:
        """From a step on, without end."""
        if self._batch_iterator is None or self._next_batch_number != self._first_batch_of_step(step):
            self._open_loader(self._first_batch_of_step(step))
        while True:
            assert self._batch_iterator is not None
            batch, taken = next(self._batch_iterator)
            self._next_batch_number += 1
            if taken is not None:
                lane, *position = taken
                self._recorded_positions[lane].append((position[0], position[1]))
            yield batch

    def close(self) -> None:
        """No more batches are needed: it has no end by itself."""
        self._batch_iterator = None

    def _first_batch_of_step(self, step: int) -> int:
        """The number of a step's first batch."""
        return (step - self._first_step) * self._batches_per_step

    def _open_loader(self, number: int) -> None:
        # torch begins with the first worker, whose lane must be the first: the data set may ask
        skipped = number % self._lane_count
        dataset = StreamDataset(
            self._dataset,
            self._initial_state,
            self._batch_size,
            self._collate,
            derive_seed(self._seed, self._member_index),
            number - skipped,
            [taken[0] for taken in self._recorded_positions],
        )
        if self._batch_iterator is not None and self._initial_state and not self._options.get("num_workers", 0):
            _load_dataset_state(self._dataset, self._initial_state)  # it was read here before
        self._recorded_positions = [taken[:1] for taken in self._recorded_positions]
        self._next_batch_number = number
        self._batch_iterator = iter(DataLoader(dataset, batch_size=None, collate_fn=_identity, **self._options))
        for _ in range(skipped):
            next(self._batch_iterator)


def is_stateful(dataset: Any) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def dataset_state(dataset: Any) -> bytes:
    found: bytes = to_byte_tensor({"state": dataset.state_dict()}).numpy().tobytes()
    return found


def _load_dataset_state(dataset: Any, state: bytes) -> None:
    dataset.load_state_dict(from_byte_tensor(torch.frombuffer(bytearray(state), dtype=torch.uint8))["state"])


def _identity(item: Any) -> Any:
    return item
