"""Updates as integers modulo 2^32: sums are exact, and a uniform mask hides a number completely.

A device sends the difference to the model it received, times its weight (its samples; 1 with differential privacy), rounded to
a multiple of a unit. The unit is derived from the total weight of the round, so that the sum cannot overflow. A value out of
range is an error on the device. A few metrics of the training follow the values, so servers learn only their sums too.
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
    """Metrics of a device's training and evaluation. In the sum of a round, each field is multiplied by the device's weight."""

    loss_weight: float = 0.0  # 1 if a loss is reported
    loss: float = 0.0
    accuracy: float = 0.0
    eval_weight: float = 0.0  # 1 if the received model was evaluated
    eval_loss: float = 0.0
    eval_accuracy: float = 0.0
    accuracy_weight: float = 0.0  # 1 if an accuracy is reported
    eval_accuracy_weight: float = 0.0  # 1 if the evaluation has an accuracy


class FixedPointScale(NamedTuple):
    """Fixed-point scale of a round. The factors are powers of two with which the sum cannot overflow."""

    reach: float  # the greatest magnitude of a device's value before weighting
    value_factor: float  # integer = value * weight * value_factor, rounded
    metric_factor: float  # the same for metrics, whose limit is METRIC_MAX


def make_scale(reach: float, samples: int, devices: int) -> FixedPointScale:
    """Return the scale of a round of `devices` devices with a total weight of `samples` and values up to `reach`.

    Raise `ValueError` if `reach` is not above 0, `samples` is below `devices`, or the devices are none or too many.
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
    """Return a device's values and metrics, times `weight`, as integers modulo 2^32 in the fixed point of `scale`.

    If a metric is not finite or its magnitude exceeds METRIC_MAX, all metrics are sent as 0. Raise `UsageError` if a value is
    not finite or its magnitude exceeds `scale.reach`.
    """
    check_reach(values, scale.reach)
    numbers = np.empty(len(values) + METRIC_COUNT, np.float64)
    np.multiply(values, weight * scale.value_factor, out=numbers[: len(values)], dtype=np.float64)
    fits = all(math.isfinite(number) and abs(number) <= METRIC_MAX for number in metrics)
    numbers[len(values) :] = np.array(metrics if fits else DeviceMetrics()) * weight * scale.metric_factor
    return np.rint(numbers).astype(np.int64).astype(np.uint32)


def decode_sum(total: Words, scale: FixedPointScale) -> tuple[NDArray[np.float64], DeviceMetrics]:
    """Return the weighted sums of the devices' values and of their metrics from an unmasked sum of encoded updates."""
    signed = total.view(np.int32)
    metrics = DeviceMetrics(*(signed[len(signed) - METRIC_COUNT :] / scale.metric_factor).tolist())
    return signed[: len(signed) - METRIC_COUNT] / scale.value_factor, metrics
