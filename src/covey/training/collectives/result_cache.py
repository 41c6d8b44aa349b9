"""Results of collectives that another rank may need: the last one, for who missed it; and for who is new, those of the step, of
what the program ran before its first step, and of what it runs before an epoch's first batch, which a replacement runs too.

They are kept up to a limit. Above it only the last one is: who missed it can still be helped, who is new cannot.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

from covey.core.messages import CollectiveNumber

BEFORE_FIRST_STEP: Final = -1  # the step before the first


class ResultLifetime(enum.Enum):
    """How long a result is needed."""

    TRAINING = enum.auto()
    EPOCH = enum.auto()
    STEP = enum.auto()


class ResultCache:
    """What one rank keeps; `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.last_completed: CollectiveNumber | None = None  # the last one
        self._limit_bytes = limit
        self._results: dict[CollectiveNumber, list[Any]] = {}
        self._transient_number: CollectiveNumber | None = None
        self._epoch_start = (
            BEFORE_FIRST_STEP,
            0,
        )  # the first step of this epoch, and how many of its collectives came before its first batch
        self._bytes_by_lifetime = dict.fromkeys(ResultLifetime, 0)
        self._complete_by_lifetime = dict.fromkeys(ResultLifetime, True)

    @property
    def is_complete(self) -> bool:
        """Whether all that a replacement needs is here."""
        return all(self._complete_by_lifetime.values())

    @property
    def last_result(self) -> dict[CollectiveNumber, list[Any]]:
        """The result of the last one."""
        assert self.last_completed is not None
        return {self.last_completed: self._results[self.last_completed]}

    def results_of_step(self, step: int, first: int = 0) -> dict[CollectiveNumber, list[Any]]:
        """The results of a step, from one on."""
        return {number: results for number, results in self._results.items() if number.step == step and number.index >= first}

    def results_for_replacement(self, step: int) -> dict[CollectiveNumber, list[Any]]:
        """What a replacement needs that begins at this step."""
        here = {
            number: results for number, results in self._results.items() if self._lifetime_of(number) is not ResultLifetime.STEP
        }
        return here | self.results_of_step(step) | (self.last_result if self.last_completed is not None else {})

    def replace_with_received(self, last: CollectiveNumber, results: Mapping[CollectiveNumber, list[Any]]) -> None:
        """From another rank: this one may be the only one left who has them."""
        self.last_completed, self._results = last, dict(results)

    def add(self, number: CollectiveNumber, results: list[Any], *, passing: bool, limited: bool) -> None:
        """A `passing` one is part of the state afterwards: it is needed only until the first step."""
        if passing:
            self._transient_number = number
        if self.last_completed is None or number > self.last_completed:  # what was handed out again is not the last one
            self.last_completed = number
        self._results[number] = results
        if limited and not passing:
            self._enforce_limit(self._lifetime_of(number), results)

    def _enforce_limit(self, span: ResultLifetime, results: list[Any]) -> None:
        self._bytes_by_lifetime[span] += sum(tensor.numel() * tensor.element_size() for tensor in results)
        if sum(self._bytes_by_lifetime.values()) > self._limit_bytes:
            self._bytes_by_lifetime[span], self._complete_by_lifetime[span] = 0, False
            for old in [n for n in self._results if self._lifetime_of(n) is span and n != self.last_completed]:
                del self._results[old]

    def begin_epoch(self, step: int) -> None:
        """An epoch begins with this step: what was kept for the one before is not needed."""
        self._epoch_start = (step, 1 << 62)  # until `opened`, whatever comes
        self._bytes_by_lifetime[ResultLifetime.EPOCH], self._complete_by_lifetime[ResultLifetime.EPOCH] = 0, True

    def on_first_batch(self, count: int) -> None:
        """Its first batch comes: so many were run before it."""
        self._epoch_start = (self._epoch_start[0], count)

    def begin_step(self, step: int) -> None:
        """A step begins: what only the one before needed is let go."""
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
