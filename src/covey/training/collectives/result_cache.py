"""Cache of collective results that other ranks may need after a failure.

A survivor that missed the last collective needs its result. A replacement needs the results of all code that it runs again: the
current step, and what the script runs before the first step and before the epoch's first batch.

If the results exceed `limit` bytes when one is added, the others of its lifetime are dropped, except that of the last completed
collective. A survivor can then still be healed. A replacement cannot join until the step, epoch or training that needs the
dropped results is over.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

from covey.core.messages import CollectiveNumber

BEFORE_FIRST_STEP: Final = -1  # step number of collectives that run before the first step


class ResultLifetime(enum.Enum):
    """How long a result is needed."""

    TRAINING = enum.auto()  # of collectives before the first step
    EPOCH = enum.auto()  # of collectives before the epoch's first batch
    STEP = enum.auto()  # of all others


class ResultCache:
    """Result cache of one rank; `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.last_completed: CollectiveNumber | None = None  # None before the first collective
        self._limit_bytes = limit
        self._results: dict[CollectiveNumber, list[Any]] = {}
        self._transient_number: CollectiveNumber | None = None  # of the transient result that is still cached
        # first step of this epoch, and number of collectives before its first batch
        self._epoch_start = (BEFORE_FIRST_STEP, 0)
        self._bytes_by_lifetime = dict.fromkeys(ResultLifetime, 0)
        self._complete_by_lifetime = dict.fromkeys(ResultLifetime, True)

    @property
    def is_complete(self) -> bool:
        """Whether no result that a replacement needs was dropped."""
        return all(self._complete_by_lifetime.values())

    @property
    def last_result(self) -> dict[CollectiveNumber, list[Any]]:
        """The result of the last completed collective, by its number; there must be a completed one."""
        assert self.last_completed is not None
        return {self.last_completed: self._results[self.last_completed]}

    def results_of_step(self, step: int, first: int = 0) -> dict[CollectiveNumber, list[Any]]:
        """Return the cached results of the collectives of a step whose index is at least `first`."""
        return {number: results for number, results in self._results.items() if number.step == step and number.index >= first}

    def results_for_replacement(self, step: int) -> dict[CollectiveNumber, list[Any]]:
        """Return the cached results that a replacement needs if it starts at this step."""
        lasting = {
            number: results for number, results in self._results.items() if self._lifetime_of(number) is not ResultLifetime.STEP
        }
        return lasting | self.results_of_step(step) | (self.last_result if self.last_completed is not None else {})

    def replace_with_received(self, last: CollectiveNumber, results: Mapping[CollectiveNumber, list[Any]]) -> None:
        """Replace the cached results by received ones; `last` is the number of the last completed collective."""
        self.last_completed, self._results = last, dict(results)

    def add(self, number: CollectiveNumber, results: list[Any], *, transient: bool, limited: bool) -> None:
        """Cache the results of a collective.

        A `transient` result is needed only until a later collective has completed and a step begins. Transient results, and
        those that are not `limited`, do not count towards the limit.
        """
        if transient:
            self._transient_number = number
        if self.last_completed is None or number > self.last_completed:  # a replayed result is not the last one
            self.last_completed = number
        self._results[number] = results
        if limited and not transient:
            self._enforce_limit(self._lifetime_of(number), results)

    def _enforce_limit(self, span: ResultLifetime, results: list[Any]) -> None:
        self._bytes_by_lifetime[span] += sum(tensor.numel() * tensor.element_size() for tensor in results)
        if sum(self._bytes_by_lifetime.values()) > self._limit_bytes:
            self._bytes_by_lifetime[span], self._complete_by_lifetime[span] = 0, False
            for old in [n for n in self._results if self._lifetime_of(n) is span and n != self.last_completed]:
                del self._results[old]

    def begin_epoch(self, step: int) -> None:
        """Start an epoch whose first step is `step`."""
        self._epoch_start = (step, 1 << 62)  # until `on_first_batch` every collective belongs to the epoch's start
        self._bytes_by_lifetime[ResultLifetime.EPOCH], self._complete_by_lifetime[ResultLifetime.EPOCH] = 0, True

    def on_first_batch(self, count: int) -> None:
        """Record that `count` collectives ran before the epoch's first batch; their results are kept for the epoch."""
        self._epoch_start = (self._epoch_start[0], count)

    def begin_step(self, step: int) -> None:
        """Start a step and drop the results that only earlier steps needed, except the last one."""
        self._bytes_by_lifetime[ResultLifetime.STEP], self._complete_by_lifetime[ResultLifetime.STEP] = 0, True
        if self._transient_number is not None and self._transient_number != self.last_completed:
            self._results.pop(self._transient_number, None)
            self._transient_number = None
        for number in [
            n
            for n in self._results
            if self._lifetime_of(n) is ResultLifetime.STEP and n.step < step and n != self.last_completed
        ]:
            del self._results[number]

    def _lifetime_of(self, number: CollectiveNumber) -> ResultLifetime:
        if number.step == BEFORE_FIRST_STEP:
            return ResultLifetime.TRAINING
        step, count = self._epoch_start
        return ResultLifetime.EPOCH if number.step == step and number.index < count else ResultLifetime.STEP
