"""Privacy loss of Gaussian noise, added up over rounds.

A round whose noise has a standard deviation of z times the greatest influence of one device is "Gaussian differentially
private" with mu = 1/z (Dong, Roth, Su). The squares of mu add up over rounds, and mu and delta determine epsilon (Balle and
Wang). Every device is assumed to take part in every round, also if rounds sample devices, because the sample is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

EPSILON_MAX = 1e6  # greater values of epsilon and of the noise multiplier are not computed


class Noise(msgspec.Struct, frozen=True):
    """Settings of differential privacy in a plan."""

    local: bool  # true: each device adds noise to its own update; false: the servers add it to the mean of all
    clip: Annotated[float, Meta(gt=0)]  # the greatest L2 norm of the difference between an update and its model
    multiplier: Annotated[float, Meta(gt=0)]  # standard deviation of the noise, divided by one device's influence
    delta: Annotated[float, Meta(gt=0, lt=1)]
    budget: float = 0.0  # epsilon that all rounds together may not exceed; 0: no limit

    @property
    def mu_squared_per_round(self) -> float:
        return 1 / self.multiplier**2

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each value: of one device's update if local, else of the sum of all updates.

        With local noise the influence of a device is 2 * clip, because its update may be replaced by any other.
        """
        return self.multiplier * self.clip * (2 if self.local else 1)

    def epsilon_after(self, spent: float) -> float:
        """Return epsilon, at `delta`, after rounds whose mu squared add up to `spent`."""
        return compute_epsilon(math.sqrt(spent), self.delta)


def compute_delta(eps: float, mu: float) -> float:
    """Return the smallest delta for which a mu-Gaussian mechanism is (eps, delta)-private; 0 if mu is 0."""
    if mu == 0:
        return 0.0
    second = eps + _log_normal_cdf(-eps / mu - mu / 2)
    return max(0.0, math.exp(_log_normal_cdf(-eps / mu + mu / 2)) - math.exp(min(second, 700.0)))


def compute_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which a mu-Gaussian mechanism is (epsilon, delta)-private.

    The result is at most 2^20, also if the true epsilon is greater.
    """
    if compute_delta(0.0, mu) <= delta:
        return 0.0
    return _smallest_fitting(lambda eps: compute_delta(eps, mu) <= delta, EPSILON_MAX)


def compute_noise_multiplier(eps: float, delta: float) -> float:
    """Return the smallest noise multiplier for which one round is (eps, delta)-private.

    The result is at most 2^20, also if that is not enough noise.
    """
    return _smallest_fitting(lambda z: compute_delta(eps, 1 / z) <= delta, EPSILON_MAX)


def _smallest_fitting(fits: Callable[[float], bool], limit: float) -> float:
    """Return the smallest positive number that fits; every greater number must fit too.

    If no number up to the first power of two that is at least `limit` fits, return that power.
    """
    low, high = 0.0, 1.0
    while not fits(high) and high < limit:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _log_normal_cdf(x: float) -> float:
    """Return the logarithm of the probability that a standard normal variable is below x."""
    if x > -8:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2)))
    # An asymptotic series, which is too great by less than 1e-6 here.
    square = x * x
    series = 1 - 1 / square + 3 / square**2 - 15 / square**3 + 105 / square**4
    return -square / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)
