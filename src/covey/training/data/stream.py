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
from covey.training.collectives.communicator import Group
from covey.training.data.sample_schedule import Course
from covey.training.seeding import mix, seed_all
from covey.training.state.pytree import from_bytes, to_bytes

TAKE_DOWN: Final = 8  # batches of a lane between two positions
TELL: Final = 16  # steps between two exchanges of positions
POSITION_MAX: Final = 16 * 1024 * 1024  # bytes

log = logging.getLogger("covey")

Position = tuple[int, bytes]  # after so many batches of a lane, and the data set's state then; without one it is the beginning
BEGINNING: Final[Position] = (0, b"")


class StreamCourse(Course, frozen=True, kw_only=True):
    """A course through data without numbers: every member has the same share of each step, whoever they are."""

    @property
    def steps_per_epoch(self) -> int:
        """A stream is one epoch."""
        return self.steps

    def place(self, step: int) -> tuple[int, int]:
        return divmod(step, max(1, self.steps))

    def cut(self, step: int, index: int, limit: int | None) -> list[range]:
        return [range(i * self.batch_size, (i + 1) * self.batch_size) for i in range(self.accumulate)]

    def weight(self, step: int, index: int, present: tuple[int, ...]) -> float:
        """Who came in the middle of a step counts from the next, unless nobody else is left."""
        counted = len(set(present) & set(self.seats))
        if not counted:
            return 1 / len(present)
        return 1 / counted if index < len(self.seats) else 0.0

    def after(self, step: int, present: tuple[int, ...]) -> Course:
        return self if present == self.seats else self.seated(present)


def begin(batch_size: int, accumulate: int, world: int, seed: int) -> StreamCourse:
    """The course of a training that starts; the loop says how many steps it has."""
    return StreamCourse(
        samples=0,
        shuffle=False,
        seed=seed,
        batch_size=batch_size,
        accumulate=accumulate,
        world=world,
        steps=0,
        seats=tuple(range(world)),
    )


class Feed(IterableDataset):  # type: ignore[misc]
    """What torch's loader reads, perhaps in a process of its own: batches from a number on, some with the position after."""

    def __init__(self, dataset: Any, begin: bytes, batch_size: int, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset, self._begin = dataset, begin
        self._batch_size = batch_size
        self._collate = collate
        self._seed = seed
        self.first = 0
        self.lanes = [BEGINNING]

    def __iter__(self) -> Iterator[tuple[Any, tuple[int, int, bytes] | None]]:
        worker = get_worker_info()
        lane = worker.id if worker is not None else 0
        count, state = self.lanes[lane]
        if state:
            _put_state(self._dataset, state)
        samples = self._endless()
        while True:
            number = count * len(self.lanes) + lane
            seed_all(mix(self._seed, number))
            drawn = [next(samples) for _ in range(self._batch_size)]
            count += 1
            if number >= self.first:
                due = count % TAKE_DOWN == 0 and stateful(self._dataset)
                yield self._collate(drawn), (lane, count, state_of(self._dataset)) if due else None

    def _endless(self) -> Iterator[Any]:
        """The samples; when they end, from the beginning."""
        fruitless = False
        while True:
            given = False
            for sample in self._dataset:
                given = True
                yield sample
            if not given and (fruitless or not self._begin):
                raise UsageError("the data set gave no sample: after its end, iterating over it must begin anew")
            if not given:
                _put_state(self._dataset, self._begin)
            fruitless = not given


class Stream:
    """One rank's stream, and what is known of all ranks' positions."""

    def __init__(self, dataset: Any, batch_size: int, accumulate: int, seed: int, options: dict[str, Any]) -> None:
        self._lanes = max(1, options.get("num_workers", 0))
        self._per_step = accumulate
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._collate = options.get("collate_fn") or default_collate
        self._options = {key: value for key, value in options.items() if key != "collate_fn"}
        self._places: dict[int, dict[str, Any]] = {}  # by seat: the step its stream began in, and a position of each lane
        self._seat, self._began = 0, 0
        self._taken: list[list[Position]] = []  # by lane, the oldest first
        self._batches: Iterator[Any] | None = None
        self._number = -1  # of the batch that comes next
        self._begin = state_of(dataset) if stateful(dataset) else b""

    def say(self) -> None:
        """What to expect of it, once at the start."""
        log.info("the data is a stream: each sample counts once as long as the world keeps its size, and not beyond")
        if not stateful(self._dataset):
            log.info("the data set has no state_dict and load_state_dict: a replacement reads it again from its beginning")

    # -- positions ---------------------------------------------------------------------------------------------------

    def expect(self, seats: tuple[int, ...]) -> None:
        """A training that starts: these all begin at their beginning."""
        self._places = {seat: {"began": 0, "lanes": [BEGINNING] * self._lanes} for seat in seats}

    def known(self) -> dict[str, Any]:
        """For a replacement or a checkpoint."""
        return {"lanes": self._lanes, "places": self._places}

    def put(self, known: dict[str, Any]) -> None:
        if known["lanes"] != self._lanes:
            raise UsageError(
                f"this stream was read by {known['lanes']} loaders, and a position of one of {self._lanes} does not follow"
                " from that: give Data the num_workers it had"
            )
        self._places = known["places"]

    def sit(self, seat: int, step: int) -> None:
        """Who this rank is. One that nobody knows a position of is new: its stream begins with this step."""
        place = self._places.get(seat)
        self._seat, self._began = seat, place["began"] if place is not None else step
        lanes = place["lanes"] if place is not None else [BEGINNING] * self._lanes
        self._taken = [[(count, state)] for count, state in lanes]

    def mark_boundary(self, step: int, group: Group) -> None:
        """A step begins: nothing before it is needed any more. From time to time, hear where the others are."""
        self._taken = [taken[-1:] for taken in self._taken]
        if step and step % TELL == 0:
            self._tell(group)

    def _tell(self, group: Group) -> None:
        mine = {"seat": self._seat, "began": self._began, "lanes": [taken[0] for taken in self._taken]}
        flat = to_bytes(mine)
        size = int(group.all_reduce(torch.tensor(flat.numel()), "max"))
        if size > POSITION_MAX:
            raise UsageError(f"the data set's state_dict has {size} bytes, {POSITION_MAX} is the limit: keep samples out of it")
        padded = torch.zeros(size, dtype=torch.uint8)
        padded[: flat.numel()] = flat
        told = [from_bytes(found) for found in group.all_gather(padded)]
        self._places = {place.pop("seat"): place for place in told}

    # -- batches -----------------------------------------------------------------------------------------------------

    def batches(self, step: int) -> Iterator[Any]:
        """From a step on, without end."""
        if self._batches is None or self._number != self._at(step):
            self._open(self._at(step))
        while True:
            assert self._batches is not None
            batch, taken = next(self._batches)
            self._number += 1
            if taken is not None:
                lane, *position = taken
                self._taken[lane].append((position[0], position[1]))
            yield batch

    def close(self) -> None:
        """No more batches are needed: it has no end by itself."""
        self._batches = None

    def _at(self, step: int) -> int:
        """The number of a step's first batch."""
        return (step - self._began) * self._per_step

    def _open(self, number: int) -> None:
        feed = Feed(self._dataset, self._begin, self._batch_size, self._collate, mix(self._seed, self._seat))
        over = number % self._lanes  # torch begins with the first worker, whose lane must be the first: the data set may ask
        feed.first, feed.lanes = number - over, [taken[0] for taken in self._taken]
        if self._batches is not None and self._begin and not self._options.get("num_workers", 0):
            _put_state(self._dataset, self._begin)  # it was read here before
        self._taken = [taken[:1] for taken in self._taken]
        self._number = number
        self._batches = iter(DataLoader(feed, batch_size=None, collate_fn=_as_it_is, **self._options))
        for _ in range(over):
            next(self._batches)


def stateful(dataset: Any) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def state_of(dataset: Any) -> bytes:
    found: bytes = to_bytes({"state": dataset.state_dict()}).numpy().tobytes()
    return found


def _put_state(dataset: Any, state: bytes) -> None:
    dataset.load_state_dict(from_bytes(torch.frombuffer(bytearray(state), dtype=torch.uint8))["state"])


def _as_it_is(item: Any) -> Any:
    return item
