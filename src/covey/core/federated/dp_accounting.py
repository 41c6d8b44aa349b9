"""Privacy loss of Gaussian noise over any number of rounds: exact values, not bounds.

A round whose noise is z times the greatest influence of one device is "Gaussian differentially private" with mu = 1/z (Dong,
Roth, Su). The squares of mu add up over rounds, and mu and delta determine epsilon (Balle and Wang). Every device is assumed to
take part in every round. Sampling of devices does not reduce the loss here, because the sample is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

EPSILON_MAX = 1e6


class Noise(msgspec.Struct, frozen=True):
    """Noise settings of a plan."""

    local: bool  # true: each device adds noise to its own update; false: the servers add it to the mean of all
    clip: Annotated[float, Meta(gt=0)]  # the greatest norm of an update
    multiplier: Annotated[float, Meta(gt=0)]  # the noise in units of one device's influence
    delta: Annotated[float, Meta(gt=0, lt=1)]
    budget: float = 0.0  # epsilon that no round may exceed; 0: no limit

    @property
    def mu_squared_per_round(self) -> float:
        """Amount that one round adds to mu squared."""
        return 1 / self.multiplier**2

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on one device's values (local) or on the sum (central).

        With local noise the sensitivity is 2 * clip, because an update may be replaced by any other.
        """
        return self.multiplier * self.clip * (2 if self.local else 1)

    def epsilon_after(self, spent: float) -> float:
        """Return epsilon for a sum of mu squared."""
        return compute_epsilon(math.sqrt(spent), self.delta)


def compute_delta(eps: float, mu: float) -> float:
    """Return the smallest delta at an epsilon."""
    if mu == 0:
        return 0.0
    second = eps + _log_normal_cdf(-eps / mu - mu / 2)
    return max(0.0, math.exp(_log_normal_cdf(-eps / mu + mu / 2)) - math.exp(min(second, 700.0)))


def compute_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon at a delta."""
    if compute_delta(0.0, mu) <= delta:
        return 0.0
    return _smallest_fitting(lambda eps: compute_delta(eps, mu) <= delta, EPSILON_MAX)


def compute_noise_multiplier(eps: float, delta: float) -> float:
    """Return the smallest noise multiplier for which one round is (eps, delta)-private."""
    return _smallest_fitting(lambda z: compute_delta(eps, 1 / z) <= delta, EPSILON_MAX)


def _smallest_fitting(fits: Callable[[float], bool], limit: float) -> float:
    """Return the smallest number that fits, rounded up. All greater numbers must fit too; the search ends above `limit`."""
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
    # An asymptotic series: its first terms are exact to 1e-7 here, and its error has the safe sign or is negligible.
    square = x * x
    series = 1 - 1 / square + 3 / square**2 - 15 / square**3 + 105 / square**4
    return -square / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)
