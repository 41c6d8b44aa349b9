"""Updates as integers modulo 2^32: sums are exact, and a uniform mask hides a number completely.

A device sends the difference to the model it received, times its samples. The unit is derived from the samples of all devices
of the round, so that the sum cannot overflow. A value out of range is refused, never clipped. The values are followed by a few
metrics of the training, so that servers learn only their sums too.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from covey.errors import UsageError

Words = NDArray[np.uint32]
HALF_MODULUS: Final = 2**31
METRIC_COUNT: Final = 8  # fields of `DeviceMetrics`, stored after the values
METRIC_MAX: Final = 1024.0


class DeviceMetrics(NamedTuple):
    """Metrics of a device's training and evaluation, weighted by the device's samples in the sum."""

    loss_weight: float = 0.0  # 1 if a loss is reported
    loss: float = 0.0
    accuracy: float = 0.0
    eval_weight: float = 0.0
    eval_loss: float = 0.0
    eval_accuracy: float = 0.0
    accuracy_weight: float = 0.0  # 1 if an accuracy is reported
    eval_accuracy_weight: float = 0.0


class FixedPointScale(NamedTuple):
    """Scale factors of a round: powers of two, chosen by the greatest possible sum over all devices."""

    reach: float  # the greatest value a device may send
    value_factor: float
    metric_factor: float


def make_scale(reach: float, samples: int, devices: int) -> FixedPointScale:
    """Return the scale of a round of `devices` devices with `samples` samples in total.

    Raise `ValueError` if the numbers are invalid or the devices too many.
    """
    if not (reach > 0 and samples >= devices >= 1):
        raise ValueError(
            f"{devices} devices, {samples} samples and a reach of {reach} are invalid: "
            "expected a reach above 0 and at least one sample per device"
        )
    return FixedPointScale(reach, _choose_factor(reach * samples, devices), _choose_factor(METRIC_MAX * samples, devices))


def _choose_factor(most: float, devices: int) -> float:
    limit = HALF_MODULUS - 1 - devices  # each device's rounding error is at most half a unit
    if limit <= 0:
        raise ValueError(f"{devices} devices are too many for a sum modulo 2^32")
    return 2.0 ** math.floor(math.log2(limit / most))


def check_reach(values: NDArray[np.float32], reach: float) -> None:
    """Raise `UsageError` if a value is not finite or its magnitude exceeds `reach`."""
    if len(values) and not np.isfinite(values).all():
        raise UsageError("the update has values that are not finite: nothing was sent")
    greatest = float(np.abs(values).max()) if len(values) else 0.0
    if greatest > reach:
        raise UsageError(
            f"a value of the update is {greatest:g} away from the model, but update_reach is {reach:g}: nothing was sent; "
            "train with a smaller learning rate or raise update_reach"
        )


def encode_update(values: NDArray[np.float32], metrics: DeviceMetrics, weight: int, scale: FixedPointScale) -> Words:
    """Return a device's values and metrics times `weight` as integers, ready to be masked.

    Metrics that are not finite or above METRIC_MAX are replaced by zeros. Raise `UsageError` if a value is out of range.
    """
    check_reach(values, scale.reach)
    numbers = np.empty(len(values) + METRIC_COUNT, np.float64)
    np.multiply(values, weight * scale.value_factor, out=numbers[: len(values)], dtype=np.float64)
    fits = all(math.isfinite(number) and abs(number) <= METRIC_MAX for number in metrics)
    numbers[len(values) :] = np.array(metrics if fits else DeviceMetrics()) * weight * scale.metric_factor
    return np.rint(numbers).astype(np.int64).astype(np.uint32)


def decode_sum(total: Words, scale: FixedPointScale) -> tuple[NDArray[np.float64], DeviceMetrics]:
    """Return the weighted sums of the devices' values and of their metrics."""
    signed = total.view(np.int32)
    metrics = DeviceMetrics(*(signed[len(signed) - METRIC_COUNT :] / scale.metric_factor).tolist())
    return signed[: len(signed) - METRIC_COUNT] / scale.value_factor, metrics
