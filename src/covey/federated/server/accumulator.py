"""Sum of a round's updates in fixed point, which does not depend on their order or on the number of servers.

A value times its weight, in units of 2^-24, is rounded to an integer and added to an int64. The integer is read from the low
bits of a float64: adding the constant 1.5 * 2^52 puts it there. The bits are added, and `get_sum` subtracts the constants, so
that no conversion from float to integer is needed.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from covey.core.federated.messages import RoundTotals
from covey.federated.model_codec import Floats

FIXED_POINT_SCALE: Final = 2.0**24
WEIGHTED_VALUE_MAX: Final = 2.0**27  # of a value times its weight: a greater one does not fit into the low bits
SERVER_SUM_MAX: Final = 2.0**32  # of one server's weighted values: the sums of SERVERS_MAX servers fit into an int64
WEIGHT_MAX: Final = 2**27
_ROUNDING_BIAS: Final = 1.5 * 2.0**52
_ROUNDING_BIAS_BITS: Final = np.array([_ROUNDING_BIAS]).view(np.int64)[0]
EMPTY_TOTALS: Final = RoundTotals()
BLOCK_SIZE: Final = 16384  # values at a time, so that a block fits into the CPU cache


class Accumulator:
    """Sum of a round's updates, with totals of their weights and metrics."""

    def __init__(self, size: int) -> None:
        self._sum = np.zeros(size, np.int64)
        self._bias_count = 0  # number of rounding constants that are still in the sum
        self._headroom = SERVER_SUM_MAX
        self._scratch = np.empty(BLOCK_SIZE, np.float64)
        self.totals = RoundTotals()

    def check_update(self, values: Floats, weight: int) -> float:
        """Return the greatest magnitude of the values.

        Raise `ValueError` if `weight` is not from 1 to WEIGHT_MAX, a value is not finite, or weighted values are too large for
        the sum.
        """
        if not 1 <= weight <= WEIGHT_MAX:
            raise ValueError(f"data_size is {weight}: expected 1 to {WEIGHT_MAX}")
        greatest = max(abs(float(values.max())), abs(float(values.min())), 0.0)
        if not math.isfinite(greatest):
            raise ValueError("the update has values that are not finite")
        if greatest * weight >= WEIGHTED_VALUE_MAX:
            raise ValueError(
                f"the greatest value times data_size is {greatest * weight:g}: expected less than {WEIGHTED_VALUE_MAX:g}"
            )
        if greatest * weight > self._headroom:
            raise ValueError("the update would overflow the sum of this round: its values are too large")
        return greatest

    def add(self, values: Floats, weight: int, reported: RoundTotals = EMPTY_TOTALS) -> None:
        """Add one update, and its metrics `reported`, to sum and totals. It must have passed `check_update`."""
        self._headroom -= max(float(values.max()), -float(values.min()), 0.0) * weight
        factor = weight * FIXED_POINT_SCALE
        for start in range(0, len(values), BLOCK_SIZE):
            chunk = values[start : start + BLOCK_SIZE]
            block = self._scratch[: len(chunk)]
            np.multiply(chunk, factor, out=block, dtype=np.float64)
            block += _ROUNDING_BIAS
            self._sum[start : start + BLOCK_SIZE] += block.view(np.int64)
        self._bias_count += 1
        self.totals = self.totals + reported + RoundTotals(1, weight)

    def make_empty(self) -> Accumulator:
        """Return an empty sum for the same model."""
        return Accumulator(len(self._sum))

    def get_sum(self) -> NDArray[np.int64]:
        """Return the sum of value * weight so far, in units of 2^-24: the array itself, not a copy."""
        if self._bias_count:
            with np.errstate(over="ignore"):
                self._sum -= _multiply_bias(self._bias_count)
            self._bias_count = 0
        return self._sum

    def merge(self, total: NDArray[Any], numbers: RoundTotals) -> None:
        """Add the sum (in units of 2^-24) and the totals of another accumulator."""
        self.get_sum()
        self._sum += total
        self.totals = self.totals + numbers

    def mean(self) -> NDArray[np.float64]:
        """Return the weighted mean of all updates; NaN if there are none."""
        return self.get_sum() / (FIXED_POINT_SCALE * self.totals.size)


def _multiply_bias(count: int) -> np.int64:
    """Return `count` times the bits of the rounding constant, modulo 2^64."""
    wrapped = (int(_ROUNDING_BIAS_BITS) * count) % 2**64
    return np.int64(wrapped - 2**64 if wrapped >= 2**63 else wrapped)


def to_weighted_fixed_point(size: int, value: float | None) -> tuple[int, int]:
    """Return (`size`, `value` * `size` in units of 2^-24) for sums over devices; (0, 0) if the value is None or not finite.

    Raise `ValueError` if the magnitude of `value` * `size` is 2^27 or more.
    """
    if value is None or not math.isfinite(value):  # a diverged loss does not exclude the device's update
        return 0, 0
    if not abs(value) * size < WEIGHTED_VALUE_MAX:
        raise ValueError(f"a loss or accuracy of {value:g} for {size} samples is too large for the sum")
    return size, round(value * size * FIXED_POINT_SCALE)
