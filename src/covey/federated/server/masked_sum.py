"""The sum of a round's masked updates, modulo 2^32. What it is of nobody knows until the masks are off.

A masked update is in memory and in the log as the words that the device sent; in the log they pass for float32, which have
the same size and are never looked at.
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
    """One server's part of a secure round, for a model of `size` values."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sum: Words = np.zeros(size + METRIC_COUNT, np.uint32)
        self.totals = RoundTotals()

    def make_empty(self) -> MaskedSum:
        """Another one for the same model."""
        return MaskedSum(self._size)

    def check_update(self, values: Floats, weight: int) -> None:
        """Raises `ValueError` with a sentence for an update that must not be added."""
        if not 1 <= weight <= WEIGHT_MAX:
            raise ValueError(f"data_size is {weight}, and 1 to {WEIGHT_MAX} are possible")
        if len(values) != len(self._sum):
            raise ValueError(f"a masked update has {len(self._sum)} numbers here, and {len(values)} came")

    def add(self, values: Floats, weight: int, reported: RoundTotals = EMPTY_TOTALS) -> None:
        """Add one masked update. What devices tell about their training is among its numbers."""
        self._sum += values.view(np.uint32)
        self.totals = self.totals + RoundTotals(1, weight)

    def get_sum(self) -> Words:
        """The sum so far."""
        return self._sum

    def merge(self, total: NDArray[Any], numbers: RoundTotals) -> None:
        """Add another server's part."""
        self._sum += total
        self.totals = self.totals + numbers
