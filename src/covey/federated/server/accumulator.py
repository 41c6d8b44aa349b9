"""The sum of a round's updates, in fixed point: it depends neither on their order nor on how many servers added them.

A value times its weight, in units of 2^-24, is rounded to a whole number and added to an int64. Adding 1.5 * 2^52 to a
float64 leaves that whole number in its low bits, so a sum of the bits is a sum of the numbers once the constant is taken off
again: three passes per update, none of which converts.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from covey.core.federated.messages import RoundTotals
from covey.federated.model_codec import Floats

UNIT: Final = 2.0**24
PRODUCT_MAX: Final = 2.0**27  # of a value and its weight: beyond it the low bits would not hold
TOTAL_MAX: Final = 2.0**32  # of all of them on one server: SERVERS_MAX of them fit into an int64
WEIGHT_MAX: Final = 2**27
_MAGIC: Final = 1.5 * 2.0**52
_BITS: Final = np.array([_MAGIC]).view(np.int64)[0]
NOTHING: Final = RoundTotals()
BLOCK: Final = 16384  # values at a time, so that a block stays in the cache


class Accumulator:
    """One server's part of a round."""

    def __init__(self, size: int) -> None:
        self._sum = np.zeros(size, np.int64)
        self._biased = 0  # how many updates' constants are still in the sum
        self._room = TOTAL_MAX
        self._block = np.empty(BLOCK, np.float64)
        self.numbers = RoundTotals()

    def check(self, values: Floats, weight: int) -> float:
        """The greatest value; raises `ValueError` with a sentence for an update that must not be added."""
        if not 1 <= weight <= WEIGHT_MAX:
            raise ValueError(f"data_size is {weight}, and 1 to {WEIGHT_MAX} are possible")
        greatest = max(abs(float(values.max())), abs(float(values.min())), 0.0)
        if not math.isfinite(greatest):
            raise ValueError("the update has values that are not finite")
        if greatest * weight >= PRODUCT_MAX:
            raise ValueError(
                f"the greatest value times data_size is {greatest * weight:g}, and must stay below {PRODUCT_MAX:g}"
            )
        if greatest * weight > self._room:
            raise ValueError("the sum of this round has no room for the update: its values are too large")
        return greatest

    def add(self, values: Floats, weight: int, told: RoundTotals = NOTHING) -> None:
        """Add one update and what its device told. It must have passed `check`."""
        self._room -= max(float(values.max()), -float(values.min()), 0.0) * weight
        factor = weight * UNIT
        for start in range(0, len(values), BLOCK):
            piece = values[start : start + BLOCK]
            block = self._block[: len(piece)]
            np.multiply(piece, factor, out=block, dtype=np.float64)
            block += _MAGIC
            self._sum[start : start + BLOCK] += block.view(np.int64)
        self._biased += 1
        self.numbers = self.numbers + told + RoundTotals(1, weight)

    def empty(self) -> Accumulator:
        """Another one for the same model."""
        return Accumulator(len(self._sum))

    def total(self) -> NDArray[np.int64]:
        """The sum so far."""
        if self._biased:
            with np.errstate(over="ignore"):
                self._sum -= _times(self._biased)
            self._biased = 0
        return self._sum

    def merge(self, total: NDArray[Any], numbers: RoundTotals) -> None:
        """Add another server's part."""
        self.total()
        self._sum += total
        self.numbers = self.numbers + numbers

    def mean(self) -> NDArray[np.float64]:
        """The weighted mean of all updates."""
        return self.total() / (UNIT * self.numbers.size)


def _times(count: int) -> np.int64:
    """The constant's bits `count` times, as int64 arithmetic wraps."""
    wrapped = (int(_BITS) * count) % 2**64
    return np.int64(wrapped - 2**64 if wrapped >= 2**63 else wrapped)


def weighed(size: int, value: float | None) -> tuple[int, int]:
    """For sums of a loss or accuracy over devices: the number of samples, and the value times that number as a whole number.

    Zeros where it tells none. Raises `ValueError` for one that would spoil a sum.
    """
    if value is None or not math.isfinite(value):  # a device whose training ran away still has a say in the model
        return 0, 0
    if not abs(value) * size < PRODUCT_MAX:
        raise ValueError(f"a loss or accuracy of {value:g} for {size} samples is too large to be added up")
    return size, round(value * size * UNIT)
