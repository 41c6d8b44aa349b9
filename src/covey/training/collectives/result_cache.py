"""Results of collectives that another rank may need: the last one, for who missed it; and for who is new, those of the step, of
what the program ran before its first step, and of what it runs before an epoch's first batch, which a replacement runs too.

They are kept up to a limit. Above it only the last one is: who missed it can still be helped, who is new cannot.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

from covey.core.messages import CollectiveNumber

BEFORE: Final = -1  # the step before the first


class Span(enum.Enum):
    """How long a result is needed."""

    TRAINING = enum.auto()
    EPOCH = enum.auto()
    STEP = enum.auto()


class Kept:
    """What one rank keeps; `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.completed: CollectiveNumber | None = None  # the last one
        self._limit = limit
        self._results: dict[CollectiveNumber, list[Any]] = {}
        self._passing: CollectiveNumber | None = None
        self._opening = (BEFORE, 0)  # the first step of this epoch, and how many of its collectives came before its first batch
        self._bytes = dict.fromkeys(Span, 0)
        self._whole = dict.fromkeys(Span, True)

    @property
    def whole(self) -> bool:
        """Whether all that a replacement needs is here."""
        return all(self._whole.values())

    @property
    def last(self) -> dict[CollectiveNumber, list[Any]]:
        """The result of the last one."""
        assert self.completed is not None
        return {self.completed: self._results[self.completed]}

    def of(self, step: int, first: int = 0) -> dict[CollectiveNumber, list[Any]]:
        """The results of a step, from one on."""
        return {number: results for number, results in self._results.items() if number.step == step and number.index >= first}

    def needed(self, step: int) -> dict[CollectiveNumber, list[Any]]:
        """What a replacement needs that begins at this step."""
        here = {number: results for number, results in self._results.items() if self._span(number) is not Span.STEP}
        return here | self.of(step) | (self.last if self.completed is not None else {})

    def receive(self, last: CollectiveNumber, results: Mapping[CollectiveNumber, list[Any]]) -> None:
        """From another rank: this one may be the only one left who has them."""
        self.completed, self._results = last, dict(results)

    def keep(self, number: CollectiveNumber, results: list[Any], *, passing: bool, limited: bool) -> None:
        """A `passing` one is part of the state afterwards: it is needed only until the first step."""
        if passing:
            self._passing = number
        if self.completed is None or number > self.completed:  # what was handed out again is not the last one
            self.completed = number
        self._results[number] = results
        if limited and not passing:
            self._keep_to_limit(self._span(number), results)

    def _keep_to_limit(self, span: Span, results: list[Any]) -> None:
        self._bytes[span] += sum(tensor.numel() * tensor.element_size() for tensor in results)
        if sum(self._bytes.values()) > self._limit:
            self._bytes[span], self._whole[span] = 0, False
            for old in [n for n in self._results if self._span(n) is span and n != self.completed]:
                del self._results[old]

    def open(self, step: int) -> None:
        """An epoch begins with this step: what was kept for the one before is not needed."""
        self._opening = (step, 1 << 62)  # until `opened`, whatever comes
        self._bytes[Span.EPOCH], self._whole[Span.EPOCH] = 0, True

    def opened(self, count: int) -> None:
        """Its first batch comes: so many were run before it."""
        self._opening = (self._opening[0], count)

    def enter(self, step: int) -> None:
        """A step begins: what only the one before needed is let go."""
        self._bytes[Span.STEP], self._whole[Span.STEP] = 0, True
        if self._passing is not None and self._passing != self.completed:
            self._results.pop(self._passing, None)
            self._passing = None
        for number in [n for n in self._results if self._span(n) is Span.STEP and n.step < step and n != self.completed]:
            del self._results[number]

    def _span(self, number: CollectiveNumber) -> Span:
        if number.step == BEFORE:
            return Span.TRAINING
        step, count = self._opening
        return Span.EPOCH if number.step == step and number.index < count else Span.STEP
