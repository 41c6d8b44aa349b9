"""The privacy that Gaussian noise gives, and what is left of it after many rounds. Exact, not a bound.

A round whose noise is z times the greatest influence of one device is "Gaussian differentially private" with mu = 1/z (Dong,
Roth, Su). Rounds add up by their squares, and (mu, delta) says epsilon (Balle and Wang). That holds for rounds that every
device may take part in: nothing is gained here from sampling devices, because who is sampled is no secret.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

EPSILON_MAX = 1e6


class Noise(msgspec.Struct, frozen=True):
    """What a plan says about noise."""

    local: bool  # added by each device to its own update, else by the servers to the mean of all
    clip: Annotated[float, Meta(gt=0)]  # the greatest norm of an update
    multiplier: Annotated[float, Meta(gt=0)]  # the noise in units of one device's influence
    delta: Annotated[float, Meta(gt=0, lt=1)]
    budget: float = 0.0  # epsilon past which no round begins; 0: none

    @property
    def mu_squared_per_round(self) -> float:
        """What a round adds to mu squared."""
        return 1 / self.multiplier**2

    @property
    def noise_std(self) -> float:
        """Of the noise on one device's values (local) or on the sum (central). An update may change to any other: 2 clips."""
        return self.multiplier * self.clip * (2 if self.local else 1)

    def epsilon_after(self, spent: float) -> float:
        """What a mu squared means."""
        return compute_epsilon(math.sqrt(spent), self.delta)


def compute_delta(eps: float, mu: float) -> float:
    """The least delta at an epsilon."""
    if mu == 0:
        return 0.0
    second = eps + _log_normal_cdf(-eps / mu - mu / 2)
    return max(0.0, math.exp(_log_normal_cdf(-eps / mu + mu / 2)) - math.exp(min(second, 700.0)))


def compute_epsilon(mu: float, at: float) -> float:
    """The least epsilon at a delta."""
    if compute_delta(0.0, mu) <= at:
        return 0.0
    return _smallest_fitting(lambda eps: compute_delta(eps, mu) <= at, EPSILON_MAX)


def compute_noise_multiplier(eps: float, at: float) -> float:
    """The least noise that keeps to an epsilon and a delta in one round."""
    return _smallest_fitting(lambda z: compute_delta(eps, 1 / z) <= at, EPSILON_MAX)


def _smallest_fitting(fits: Callable[[float], bool], most: float) -> float:
    """The least number that fits, where all greater ones do; rounded up."""
    low, high = 0.0, 1.0
    while not fits(high) and high < most:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _log_normal_cdf(x: float) -> float:
    """The logarithm of the chance that a standard normal number is below x."""
    if x > -8:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2)))
    square = (
        x * x
    )  # an asymptotic series: its first terms are exact to 1e-7 here, and its error has the safe sign or is negligible
    series = 1 - 1 / square + 3 / square**2 - 15 / square**3 + 105 / square**4
    return -square / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)
