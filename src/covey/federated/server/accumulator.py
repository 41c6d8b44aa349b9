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

FIXED_POINT_SCALE: Final = 2.0**24
WEIGHTED_VALUE_MAX: Final = 2.0**27  # of a value and its weight: beyond it the low bits would not hold
SERVER_SUM_MAX: Final = 2.0**32  # of all of them on one server: SERVERS_MAX of them fit into an int64
WEIGHT_MAX: Final = 2**27
_ROUNDING_BIAS: Final = 1.5 * 2.0**52
_ROUNDING_BIAS_BITS: Final = np.array([_ROUNDING_BIAS]).view(np.int64)[0]
EMPTY_TOTALS: Final = RoundTotals()
BLOCK_SIZE: Final = 16384  # values at a time, so that a block stays in the cache


class Accumulator:
    """One server's part of a round."""

    def __init__(self, size: int) -> None:
        self._sum = np.zeros(size, np.int64)
        self._bias_count = 0  # how many updates' constants are still in the sum
        self._headroom = SERVER_SUM_MAX
        self._scratch = np.empty(BLOCK_SIZE, np.float64)
        self.totals = RoundTotals()

    def check_update(self, values: Floats, weight: int) -> float:
        """The greatest value; raises `ValueError` with a sentence for an update that must not be added."""
        if not 1 <= weight <= WEIGHT_MAX:
            raise ValueError(f"data_size is {weight}, and 1 to {WEIGHT_MAX} are possible")
        greatest = max(abs(float(values.max())), abs(float(values.min())), 0.0)
        if not math.isfinite(greatest):
            raise ValueError("the update has values that are not finite")
        if greatest * weight >= WEIGHTED_VALUE_MAX:
            raise ValueError(
                f"the greatest value times data_size is {greatest * weight:g}, and must stay below {WEIGHTED_VALUE_MAX:g}"
            )
        if greatest * weight > self._headroom:
            raise ValueError("the sum of this round has no room for the update: its values are too large")
        return greatest

    def add(self, values: Floats, weight: int, reported: RoundTotals = EMPTY_TOTALS) -> None:
        """Add one update and what its device told. It must have passed `check`."""
        self._headroom -= max(float(values.max()), -float(values.min()), 0.0) * weight
        factor = weight * FIXED_POINT_SCALE
        for start in range(0, len(values), BLOCK_SIZE):
            piece = values[start : start + BLOCK_SIZE]
            block = self._scratch[: len(piece)]
            np.multiply(piece, factor, out=block, dtype=np.float64)
            block += _ROUNDING_BIAS
            self._sum[start : start + BLOCK_SIZE] += block.view(np.int64)
        self._bias_count += 1
        self.totals = self.totals + reported + RoundTotals(1, weight)

    def make_empty(self) -> Accumulator:
        """Another one for the same model."""
        return Accumulator(len(self._sum))

    def get_sum(self) -> NDArray[np.int64]:
        """The sum so far."""
        if self._bias_count:
            with np.errstate(over="ignore"):
                self._sum -= _multiply_bias(self._bias_count)
            self._bias_count = 0
        return self._sum

    def merge(self, total: NDArray[Any], numbers: RoundTotals) -> None:
        """Add another server's part."""
        self.get_sum()
        self._sum += total
        self.totals = self.totals + numbers

    def mean(self) -> NDArray[np.float64]:
        """The weighted mean of all updates."""
        return self.get_sum() / (FIXED_POINT_SCALE * self.totals.size)


def _multiply_bias(count: int) -> np.int64:
    """The constant's bits `count` times, as int64 arithmetic wraps."""
    wrapped = (int(_ROUNDING_BIAS_BITS) * count) % 2**64
    return np.int64(wrapped - 2**64 if wrapped >= 2**63 else wrapped)


def to_weighted_fixed_point(size: int, value: float | None) -> tuple[int, int]:
    """For sums of a loss or accuracy over devices: the number of samples, and the value times that number as a whole number.

    Zeros where it tells none. Raises `ValueError` for one that would spoil a sum.
    """
    if value is None or not math.isfinite(value):  # a device whose training ran away still has a say in the model
        return 0, 0
    if not abs(value) * size < WEIGHTED_VALUE_MAX:
        raise ValueError(f"a loss or accuracy of {value:g} for {size} samples is too large to be added up")
    return size, round(value * size * FIXED_POINT_SCALE)
