"""Streams: iterable data sets, of which each rank reads its own, batch by batch.

A stream is resumed from a *position*, which contains the data set's `state_dict`. Batches are numbered and loaded with seeds
derived from their number, so an older position yields the same batches again. Positions are therefore recorded only every few
batches, and exchanged between ranks every few steps. A replacement, or a training that resumes, starts at the last known
position and discards batches it does not need. A data set without `state_dict` and `load_state_dict` is read from its start.

Each loader worker reads a stream of its own, a *lane*: batch n is the next of lane n % lanes. Without workers there is one
lane.
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
POSITION_BYTES_MAX: Final = 16 * 1024 * 1024  # of all lanes of a rank

log = logging.getLogger("covey")

Position = tuple[int, bytes]  # number of batches read of a lane, and the data set's state after them; b"": the start
START_POSITION: Final[Position] = (0, b"")


class StreamSchedule(SampleSchedule, frozen=True, kw_only=True):
    """Schedule of a stream: in each step every member has `accumulate` micro-batches of `batch_size` samples of its own."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of the training, because a stream is one epoch."""
        return self.steps

    def locate_step(self, step: int) -> tuple[int, int]:
        return divmod(step, max(1, self.steps))

    def micro_batches(self, step: int, index: int, limit: int | None) -> list[range]:
        return [range(i * self.batch_size, (i + 1) * self.batch_size) for i in range(self.accumulate)]

    def member_weight(self, step: int, index: int, participants: tuple[int, ...]) -> float:
        """Return the weight of the index-th member: the same for all participants, but 0 for one that joined during the step.

        If all participants joined during the step, they have the same weight.
        """
        counted = len(set(participants) & set(self.seats))
        if not counted:
            return 1 / len(participants)
        return 1 / counted if index < len(self.seats) else 0.0

    def next_schedule(self, step: int, participants: tuple[int, ...]) -> SampleSchedule:
        return self if participants == self.seats else self.with_members(participants)


def initial_stream_schedule(batch_size: int, accumulate: int, world: int, seed: int) -> StreamSchedule:
    """Return the schedule of a training that starts, with 0 steps."""
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
    """Data set for torch's loader, which may run in another process: endless batches of a lane, from `first_batch` on.

    Iteration yields (batch, position). The position is (lane, batches read, state) for every `BATCHES_PER_POSITION`-th batch of
    a lane if the data set has a state, otherwise None.
    """

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
        """Yield samples without end, in one iteration over the data set after another.

        If an iteration yields no sample, load the data set's initial state and iterate again. Raise `UsageError` if that yields
        none either, or the data set has no state.
        """
        was_empty = False
        while True:
            is_empty = True
            for sample in self._dataset:
                is_empty = False
                yield sample
            if is_empty and (was_empty or not self._initial_state):
                raise UsageError("the data set yielded no sample: iterating over it again must restart it")
            if is_empty:
                _load_dataset_state(self._dataset, self._initial_state)
            was_empty = is_empty


class Stream:
    """One rank's stream, and the last known positions of all ranks."""

    def __init__(self, dataset: Any, batch_size: int, accumulate: int, seed: int, options: dict[str, Any]) -> None:
        self._lane_count = max(1, options.get("num_workers", 0))
        self._batches_per_step = accumulate
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._collate = options.get("collate_fn") or default_collate
        self._options = {key: value for key, value in options.items() if key != "collate_fn"}
        # By member index: the first step of its stream ("began"), and a position of each lane ("lanes").
        self._positions_by_member: dict[int, dict[str, Any]] = {}
        self._member_index, self._first_step = 0, 0
        self._recorded_positions: list[list[Position]] = []  # by lane, the oldest first
        self._batch_iterator: Iterator[Any] | None = None
        self._next_batch_number = -1
        self._initial_state = dataset_state(dataset) if is_stateful(dataset) else b""

    def log_limitations(self) -> None:
        """Log what a stream does not guarantee."""
        log.info("the data is a stream: each sample is used once only while the world size does not change")
        if not is_stateful(self._dataset):
            log.info("the data set has no state_dict and load_state_dict: a replacement reads it again from its start")

    # -- positions ---------------------------------------------------------------------------------------------------

    def reset_positions(self, seats: tuple[int, ...]) -> None:
        """Set the positions of the members `seats` to the start, and forget all other positions."""
        self._positions_by_member = {seat: {"began": 0, "lanes": [START_POSITION] * self._lane_count} for seat in seats}

    def current_state(self) -> dict[str, Any]:
        """Return the state for a replacement or a checkpoint: the last known positions of all members."""
        return {"lanes": self._lane_count, "places": self._positions_by_member}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the positions that `current_state` returned; raise `UsageError` if they are of another number of lanes."""
        if state["lanes"] != self._lane_count:
            raise UsageError(
                f"this stream was read by {state['lanes']} loaders and cannot be resumed by {self._lane_count}:"
                f" set Data(..., num_workers=...) as before"
            )
        self._positions_by_member = state["places"]

    def set_member(self, seat: int, step: int) -> None:
        """Set this rank's member index; if no position of this member is known, its stream starts with this step."""
        known = self._positions_by_member.get(seat)
        self._member_index, self._first_step = seat, known["began"] if known is not None else step
        lanes = known["lanes"] if known is not None else [START_POSITION] * self._lane_count
        self._recorded_positions = [[(count, state)] for count, state in lanes]

    def begin_step(self, step: int, group: Communicator) -> None:
        """Forget positions older than the newest of each lane, and exchange positions every `STEPS_PER_EXCHANGE` steps.

        The exchange runs collectives. Raise `UsageError` if the positions of a rank exceed `POSITION_BYTES_MAX`.
        """
        self._recorded_positions = [taken[-1:] for taken in self._recorded_positions]
        if step and step % STEPS_PER_EXCHANGE == 0:
            self._exchange_positions(group)

    def _exchange_positions(self, group: Communicator) -> None:
        own = {
            "seat": self._member_index,
            "began": self._first_step,
            "lanes": [taken[0] for taken in self._recorded_positions],
        }
        flat = to_byte_tensor(own)
        size = int(group.all_reduce(torch.tensor(flat.numel()), "max"))
        if size > POSITION_BYTES_MAX:
            raise UsageError(
                f"the data set's state_dict has {size} bytes, the limit is {POSITION_BYTES_MAX}: keep samples out of it"
            )
        padded = torch.zeros(size, dtype=torch.uint8)
        padded[: flat.numel()] = flat
        positions = [from_byte_tensor(found) for found in group.all_gather(padded)]
        self._positions_by_member = {member.pop("seat"): member for member in positions}

    # -- batches -----------------------------------------------------------------------------------------------------

    def batches(self, step: int) -> Iterator[Any]:
        """Yield batches from a step on, without end; the open loader continues if its next batch is the first of the step."""
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
        """Release the loader, which would otherwise stay open because a stream has no end."""
        self._batch_iterator = None

    def _first_batch_of_step(self, step: int) -> int:
        return (step - self._first_step) * self._batches_per_step

    def _open_loader(self, number: int) -> None:
        # torch takes the first batch from worker 0, so the loader begins with a batch of lane 0, and the surplus is skipped.
        # Lanes keep their workers, because a data set may read the worker's id.
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
            _load_dataset_state(self._dataset, self._initial_state)  # an earlier loader read it in this process
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
