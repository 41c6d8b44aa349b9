"""Updates as whole numbers modulo 2^32: sums are exact, and a uniform mask hides a number completely.

A device sends the difference to the model it was given, times its samples, in units that follow from the samples of all
devices of the round: however many of them deliver, the sum cannot overflow. A value out of range is refused, never cut.
Behind the values come a few numbers about the training, so that they too are only known as sums.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from covey.errors import UsageError

Words = NDArray[np.uint32]
HALF_MODULUS: Final = 2**31
METRIC_COUNT: Final = 8  # numbers behind the values, see `DeviceMetrics`
METRIC_MAX: Final = 1024.0


class DeviceMetrics(NamedTuple):
    """What a device says about its training and its evaluation; each counts by the device's samples."""

    loss_weight: float = 0.0  # 1 if a loss is said
    loss: float = 0.0
    accuracy: float = 0.0
    eval_weight: float = 0.0
    eval_loss: float = 0.0
    eval_accuracy: float = 0.0
    accuracy_weight: float = 0.0  # 1 if an accuracy is said
    eval_accuracy_weight: float = 0.0


class FixedPointScale(NamedTuple):
    """The units of a round: powers of two, by what all devices together may come to."""

    reach: float  # the greatest value a device may send
    value_factor: float
    metric_factor: float


def make_scale(reach: float, samples: int, devices: int) -> FixedPointScale:
    """For a round of so many devices with so many samples in all. Raises `ValueError` where no unit would do."""
    if not (reach > 0 and samples >= devices >= 1):
        raise ValueError(f"{devices} devices with {samples} samples and a reach of {reach} make no round")
    return FixedPointScale(reach, _choose_factor(reach * samples, devices), _choose_factor(METRIC_MAX * samples, devices))


def _choose_factor(most: float, devices: int) -> float:
    room = HALF_MODULUS - 1 - devices  # half a unit each for rounding, and more
    if room <= 0:
        raise ValueError(f"{devices} devices are more than a sum modulo 2^32 holds")
    return 2.0 ** math.floor(math.log2(room / most))


def check_reach(values: NDArray[np.float32], reach: float) -> None:
    """Raises `UsageError` for values that do not fit."""
    if len(values) and not np.isfinite(values).all():
        raise UsageError("the update has values that are not finite: nothing was sent")
    greatest = float(np.abs(values).max()) if len(values) else 0.0
    if greatest > reach:
        raise UsageError(
            f"a value of the update is {greatest:g} away from the model, and {reach:g} is the reach: nothing was sent; "
            "train with a smaller learning rate or raise update_reach"
        )


def encode_update(values: NDArray[np.float32], told: DeviceMetrics, weight: int, units: FixedPointScale) -> Words:
    """A device's numbers, ready to be masked. Raises `UsageError` for values that do not fit."""
    check_reach(values, units.reach)
    numbers = np.empty(len(values) + METRIC_COUNT, np.float64)
    np.multiply(values, weight * units.value_factor, out=numbers[: len(values)], dtype=np.float64)
    fits = all(math.isfinite(number) and abs(number) <= METRIC_MAX for number in told)
    numbers[len(values) :] = np.array(told if fits else DeviceMetrics()) * weight * units.metric_factor
    return np.rint(numbers).astype(np.int64).astype(np.uint32)


def decode_sum(total: Words, units: FixedPointScale) -> tuple[NDArray[np.float64], DeviceMetrics]:
    """The sum of the devices' values times samples, and of what they told times samples."""
    signed = total.view(np.int32)
    told = DeviceMetrics(*(signed[len(signed) - METRIC_COUNT :] / units.metric_factor).tolist())
    return signed[: len(signed) - METRIC_COUNT] / units.value_factor, told
