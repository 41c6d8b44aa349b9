"""Aggregation strategies: how the next model is made from a round's updates. Users may write their own.

`make` receives the current model, the mean of the updates, and `state`, a dict of arrays that is stored with the model and
passed to the next round. A strategy that needs single updates sets `sees_all`; `column` then receives all updates, a block of
values at a time, and its results replace the mean. The constructors below raise `UsageError` for a setting out of range.

    class Half(Strategy):
        def make(self, model, mean, state):
            return (model + mean) / 2
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.errors import UsageError
from covey.federated.model_codec import Floats
from covey.federated.server.model_store import StrategyState

Doubles = NDArray[np.float64]


class Strategy:
    """Base class of strategies. A strategy that overrides nothing is FedAvg."""

    sees_all = False
    staleness = 0  # maximum age, in rounds, of the model that a device began with; 0: only that of the current round

    def make(self, model: Floats, mean: Doubles, state: StrategyState) -> NDArray[Any]:
        """Return the next model, an array of the shape of `model`, from the mean of the updates.

        With `sees_all`, `mean` has the results of `column` instead. Changes of `state` are stored with the next model.
        """
        return mean

    def column(self, values: Floats, weights: Doubles) -> NDArray[Any]:
        """Return the aggregate of each column of a block of values. Called only with `sees_all`.

        `values` has one row per device, in any order; `weights` has the number of samples of each row.
        """
        raise NotImplementedError

    def contribution(self, values: Floats, began: Floats, age: int) -> Floats:
        """Return the values to add for an update whose device began with the model `began`, `age` rounds ago.

        Called only if `staleness` is above 0.
        """
        return values

    def for_devices(self, iteration: int) -> dict[str, float]:
        """Return additional settings for devices in an iteration; devices receive them as `settings` of their plan."""
        return {}


class FedAvg(Strategy):
    """Mean of the updates, weighted by samples; not weighted if the cluster uses differential privacy."""


class FedProx(Strategy):
    """FedAvg with a proximal term: the plan tells devices to add mu/2 * |w - w0|^2 to their loss.

    `w0` is the model a device began with. `mu` must be above 0.
    """

    def __init__(self, mu: float = 0.01) -> None:
        self.mu = _check_positive("mu", mu)

    def for_devices(self, iteration: int) -> dict[str, float]:
        return {"proximal_mu": self.mu}


class FedAvgM(Strategy):
    """FedAvg with momentum on the server: velocity = momentum * velocity + mean - model.

    The next model is model + learning_rate * velocity. `momentum` is from 0 to below 1, `learning_rate` above 0.
    """

    def __init__(self, momentum: float = 0.9, learning_rate: float = 1.0) -> None:
        self.momentum = _check_fraction("momentum", momentum)
        self.learning_rate = _check_positive("learning_rate", learning_rate)

    def make(self, model: Floats, mean: Doubles, state: StrategyState) -> NDArray[Any]:
        velocity = self.momentum * state.get("velocity", np.zeros(len(model))) + (mean - model)
        state["velocity"] = velocity
        return model + self.learning_rate * velocity


class FedAdam(Strategy):
    """Adam on the server, without bias correction, as in Reddi et al. 2021; mean - model is the negative gradient.

    `learning_rate` and `tau` must be above 0, `beta1` and `beta2` from 0 to below 1.
    """

    def __init__(self, learning_rate: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        self.learning_rate, self.tau = _check_positive("learning_rate", learning_rate), _check_positive("tau", tau)
        self.beta1, self.beta2 = _check_fraction("beta1", beta1), _check_fraction("beta2", beta2)

    def make(self, model: Floats, mean: Doubles, state: StrategyState) -> NDArray[Any]:
        delta = mean - model
        first = self.beta1 * state.get("first", np.zeros(len(model))) + (1 - self.beta1) * delta
        before = state.get("second", np.full(len(model), self.tau**2))
        second = self.second(before, delta * delta)
        state.update(first=first, second=second)
        return np.asarray(model + self.learning_rate * first / (np.sqrt(second) + self.tau))

    def second(self, before: NDArray[Any], square: Doubles) -> NDArray[Any]:
        """Return the new second-moment estimate from the previous one and the squared gradient."""
        return np.asarray(self.beta2 * before + (1 - self.beta2) * square)


class FedYogi(FedAdam):
    """FedAdam with Yogi's second-moment estimate, which moves by (1 - beta2) * gradient^2 towards gradient^2."""

    def second(self, before: NDArray[Any], square: Doubles) -> NDArray[Any]:
        return np.asarray(before - (1 - self.beta2) * square * np.sign(before - square))


class FedBuff(Strategy):
    """Asynchronous strategy: a round also counts updates of devices that began up to `staleness` rounds earlier (1 to 100).

    An update contributes its difference to the model that its device began with, divided by sqrt(1 + age in rounds). The
    weighted mean of the contributions, times `learning_rate` (above 0), is added to the model.
    """

    def __init__(self, staleness: int = 10, learning_rate: float = 1.0) -> None:
        if not 1 <= staleness <= 100:
            raise UsageError(f"FedBuff(staleness={staleness!r}) is invalid: expected an integer from 1 to 100")
        self.staleness = staleness
        self.learning_rate = _check_positive("learning_rate", learning_rate)

    def contribution(self, values: Floats, began: Floats, age: int) -> Floats:
        return (values - began) * np.float32((1 + age) ** -0.5)

    def make(self, model: Floats, mean: Doubles, state: StrategyState) -> NDArray[Any]:
        return model + self.learning_rate * mean


class Median(Strategy):
    """Median of each value over all updates, not weighted by samples."""

    sees_all = True

    def column(self, values: Floats, weights: Doubles) -> NDArray[Any]:
        return np.median(values, axis=0)


class TrimmedMean(Strategy):
    """Mean of each value over all updates, leaving out the n highest and n lowest values; not weighted by samples.

    n is `share` times the number of updates, rounded down, so with few updates it may be 0. `share` is from 0 to below 0.5.
    """

    sees_all = True

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share < 0.5:
            raise UsageError(f"TrimmedMean(share={share!r}) is invalid: expected a number from 0, below 0.5")
        self.share = share

    def column(self, values: Floats, weights: Doubles) -> NDArray[Any]:
        cut = int(len(values) * self.share)
        ordered = np.sort(values, axis=0)[cut : len(values) - cut]
        return np.asarray(ordered.mean(axis=0, dtype=np.float64))


def find_strategy(name: str) -> Strategy:
    """Return a built-in strategy with default settings by its class name, ignoring upper and lower case.

    Raise `UsageError` for an unknown name.
    """
    found = {cls.__name__.lower(): cls for cls in (FedAvg, FedProx, FedAvgM, FedAdam, FedYogi, FedBuff, Median, TrimmedMean)}
    if name.lower() not in found:
        raise UsageError(f"strategy {name} is unknown: expected one of {', '.join(cls.__name__ for cls in found.values())}")
    return found[name.lower()]()


def _check_positive(name: str, value: float) -> float:
    if not value > 0:
        raise UsageError(f"{name}={value!r} is invalid: expected a number above 0")
    return value


def _check_fraction(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise UsageError(f"{name}={value!r} is invalid: expected a number from 0, below 1")
    return value
