"""Sum of a round's masked updates, modulo 2^32.

A masked update is kept as the 32-bit words that the device sent. Update logs and `add` handle these words as float32, which has
the same size; they are never interpreted as floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.core.federated.messages import RoundTotals
from covey.federated.model_codec import Floats
from covey.federated.privacy.fixed_point_ring import METRIC_COUNT, Words
from covey.federated.server.accumulator import EMPTY_TOTALS, WEIGHT_MAX


class MaskedSum:
    """Sum of masked updates of a model with `size` values, with their number and total weight."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sum: Words = np.zeros(size + METRIC_COUNT, np.uint32)
        self.totals = RoundTotals()

    def make_empty(self) -> MaskedSum:
        """Return an empty sum for the same model."""
        return MaskedSum(self._size)

    def check_update(self, values: Floats, weight: int) -> None:
        """Raise `ValueError` if `weight` is not from 1 to WEIGHT_MAX, or the number of words is wrong."""
        if not 1 <= weight <= WEIGHT_MAX:
            raise ValueError(f"data_size is {weight}: expected 1 to {WEIGHT_MAX}")
        if len(values) != len(self._sum):
            raise ValueError(f"the masked update has {len(values)} numbers: expected {len(self._sum)}")

    def add(self, values: Floats, weight: int, reported: RoundTotals = EMPTY_TOTALS) -> None:
        """Add one masked update, 32-bit words viewed as float32.

        `reported` is ignored, because the metrics are among the masked numbers.
        """
        self._sum += values.view(np.uint32)
        self.totals = self.totals + RoundTotals(1, weight)

    def get_sum(self) -> Words:
        """Return the masked sum so far: the array itself, not a copy."""
        return self._sum

    def merge(self, total: NDArray[Any], numbers: RoundTotals) -> None:
        """Add another masked sum and its totals."""
        self._sum += total
        self.totals = self.totals + numbers
