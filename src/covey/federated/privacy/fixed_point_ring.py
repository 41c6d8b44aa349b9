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
HALF: Final = 2**31
TOLD: Final = 8  # numbers behind the values, see `Told`
TOLD_RANGE: Final = 1024.0


class Told(NamedTuple):
    """What a device says about its training and its evaluation; each counts by the device's samples."""

    told: float = 0.0  # 1 if a loss is said
    loss: float = 0.0
    accuracy: float = 0.0
    evaluated: float = 0.0
    eval_loss: float = 0.0
    eval_accuracy: float = 0.0
    judged: float = 0.0  # 1 if an accuracy is said
    eval_judged: float = 0.0


class Scale(NamedTuple):
    """The units of a round: powers of two, by what all devices together may come to."""

    reach: float  # the greatest value a device may send
    values: float
    told: float


def scale(reach: float, samples: int, devices: int) -> Scale:
    """For a round of so many devices with so many samples in all. Raises `ValueError` where no unit would do."""
    if not (reach > 0 and samples >= devices >= 1):
        raise ValueError(f"{devices} devices with {samples} samples and a reach of {reach} make no round")
    return Scale(reach, _unit(reach * samples, devices), _unit(TOLD_RANGE * samples, devices))


def _unit(most: float, devices: int) -> float:
    room = HALF - 1 - devices  # half a unit each for rounding, and more
    if room <= 0:
        raise ValueError(f"{devices} devices are more than a sum modulo 2^32 holds")
    return 2.0 ** math.floor(math.log2(room / most))


def check(values: NDArray[np.float32], reach: float) -> None:
    """Raises `UsageError` for values that do not fit."""
    if len(values) and not np.isfinite(values).all():
        raise UsageError("the update has values that are not finite: nothing was sent")
    greatest = float(np.abs(values).max()) if len(values) else 0.0
    if greatest > reach:
        raise UsageError(
            f"a value of the update is {greatest:g} away from the model, and {reach:g} is the reach: nothing was sent; "
            "train with a smaller learning rate or raise update_reach"
        )


def encode(values: NDArray[np.float32], told: Told, weight: int, units: Scale) -> Words:
    """A device's numbers, ready to be masked. Raises `UsageError` for values that do not fit."""
    check(values, units.reach)
    numbers = np.empty(len(values) + TOLD, np.float64)
    np.multiply(values, weight * units.values, out=numbers[: len(values)], dtype=np.float64)
    fits = all(math.isfinite(number) and abs(number) <= TOLD_RANGE for number in told)
    numbers[len(values) :] = np.array(told if fits else Told()) * weight * units.told
    return np.rint(numbers).astype(np.int64).astype(np.uint32)


def decode(total: Words, units: Scale) -> tuple[NDArray[np.float64], Told]:
    """The sum of the devices' values times samples, and of what they told times samples."""
    signed = total.view(np.int32)
    told = Told(*(signed[len(signed) - TOLD :] / units.told).tolist())
    return signed[: len(signed) - TOLD] / units.values, told
