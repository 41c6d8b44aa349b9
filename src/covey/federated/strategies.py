"""How a round's updates become the next model: one small class each, and a user's own beside them.

`make` gets the present model, the weighted mean of the updates and the arrays it kept last time, all flat; what it leaves in
`state` is stored with the model and given to the next round, on whichever server that runs. A strategy that must see every
update sets `sees_all` and is given columns of them, a block at a time.

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
    """FedAvg, and the base of the others."""

    sees_all = False
    staleness = 0  # how many rounds old the model may be that a device began with

    def make(self, model: Floats, mean: Doubles, state: StrategyState) -> NDArray[Any]:
        """The next model."""
        return mean

    def column(self, values: Floats, weights: Doubles) -> NDArray[Any]:
        """With `sees_all`: the aggregate of a block of all updates, one row per device, in no particular order."""
        raise NotImplementedError

    def contribution(self, values: Floats, began: Floats, age: int) -> Floats:
        """What is added of an update: of a device that began with the model `began`, `age` rounds ago. By default all of it."""
        return values

    def for_devices(self, iteration: int) -> dict[str, float]:
        """What devices are told in an iteration, beside the plan."""
        return {}


class FedAvg(Strategy):
    """The mean, weighted by samples."""


class FedProx(Strategy):
    """FedAvg whose devices pull towards the model they began with: they add mu/2 * |w - w0|^2 to their loss."""

    def __init__(self, mu: float = 0.01) -> None:
        self.mu = _check_positive("mu", mu)

    def for_devices(self, iteration: int) -> dict[str, float]:
        return {"proximal_mu": self.mu}


class FedAvgM(Strategy):
    """Momentum at the server."""

    def __init__(self, momentum: float = 0.9, learning_rate: float = 1.0) -> None:
        self.momentum = _check_fraction("momentum", momentum)
        self.learning_rate = _check_positive("learning_rate", learning_rate)

    def make(self, model: Floats, mean: Doubles, state: StrategyState) -> NDArray[Any]:
        velocity = self.momentum * state.get("velocity", np.zeros(len(model))) + (mean - model)
        state["velocity"] = velocity
        return model + self.learning_rate * velocity


class FedAdam(Strategy):
    """Adam at the server, without bias correction, as in Reddi et al. 2021."""

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
        """The estimate of the squares."""
        return np.asarray(self.beta2 * before + (1 - self.beta2) * square)


class FedYogi(FedAdam):
    """FedAdam whose estimate of the squares moves by their size, not by its own."""

    def second(self, before: NDArray[Any], square: Doubles) -> NDArray[Any]:
        return np.asarray(before - (1 - self.beta2) * square * np.sign(before - square))


class FedBuff(Strategy):
    """Asynchronous: every `start_fl_job_threshold` updates make a model, whenever their devices began.

    What counts is the difference to the model a device began with, the less the older that is: 1 / sqrt(1 + age).
    """

    def __init__(self, staleness: int = 10, learning_rate: float = 1.0) -> None:
        if not 1 <= staleness <= 100:
            raise UsageError(f"FedBuff(staleness={staleness!r}) is not possible: give a whole number from 1 to 100")
        self.staleness = staleness
        self.learning_rate = _check_positive("learning_rate", learning_rate)

    def contribution(self, values: Floats, began: Floats, age: int) -> Floats:
        return (values - began) * np.float32((1 + age) ** -0.5)

    def make(self, model: Floats, mean: Doubles, state: StrategyState) -> NDArray[Any]:
        return model + self.learning_rate * mean


class Median(Strategy):
    """The median of each value over all devices, whatever their samples."""

    sees_all = True

    def column(self, values: Floats, weights: Doubles) -> NDArray[Any]:
        return np.median(values, axis=0)


class TrimmedMean(Strategy):
    """The mean of each value without the greatest and the least `share` of the devices."""

    sees_all = True

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share < 0.5:
            raise UsageError(f"TrimmedMean(share={share!r}) is not possible: give a number from 0, below 0.5")
        self.share = share

    def column(self, values: Floats, weights: Doubles) -> NDArray[Any]:
        cut = int(len(values) * self.share)
        ordered = np.sort(values, axis=0)[cut : len(values) - cut]
        return np.asarray(ordered.mean(axis=0, dtype=np.float64))


def find_strategy(name: str) -> Strategy:
    """A strategy by its class's name, as options give it."""
    found = {cls.__name__.lower(): cls for cls in (FedAvg, FedProx, FedAvgM, FedAdam, FedYogi, FedBuff, Median, TrimmedMean)}
    if name.lower() not in found:
        raise UsageError(f"there is no strategy {name}: {', '.join(cls.__name__ for cls in found.values())} are known")
    return found[name.lower()]()


def _check_positive(name: str, value: float) -> float:
    if not value > 0:
        raise UsageError(f"{name}={value!r} is not possible: give a number above 0")
    return value


def _check_fraction(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise UsageError(f"{name}={value!r} is not possible: give a number from 0, below 1")
    return value
