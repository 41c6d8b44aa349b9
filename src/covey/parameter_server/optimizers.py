"""Optimizers that run on the servers.

Adam changes all rows of a parameter in each update, even rows without a gradient, as its definition requires. LazyAdam and the
other optimizers change only rows with a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

CHUNK_ELEMENTS: Final = 1 << 16  # elements of each array that are updated at a time

Array = np.ndarray[Any, np.dtype[Any]]
OptimizerKind = Literal["sgd", "momentum", "adam", "lazy_adam", "adagrad", "ftrl"]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e9)]
Fraction = Annotated[float, Meta(ge=0.0, lt=1.0)]


class OptimizerRule(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer and its hyperparameters. Create it with the functions below, which raise `UsageError` if a hyperparameter is
    invalid."""

    kind: OptimizerKind
    lr: NonNegative  # the servers use the learning rate of each push instead
    momentum: Fraction = 0.0
    dampening: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    decoupled: bool = False  # weight decay as in AdamW
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: NonNegative = 1e-8
    lr_decay: NonNegative = 0.0
    initial: NonNegative = 0.0  # initial value of the accumulator (Adagrad, FTRL)
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    lr_power: Annotated[float, Meta(le=0.0, ge=-10.0)] = -0.5

    @property
    def updates_all_rows(self) -> bool:
        """Whether an update changes rows without a gradient too."""
        return self.kind == "adam"

    @property
    def initial_states(self) -> dict[str, float]:
        """Initial value of each state array, by name. State arrays have the shape of the weights."""
        return {
            "sgd": {},
            "momentum": {"momentum": 0.0},
            "adam": {"mean": 0.0, "square": 0.0},
            "lazy_adam": {"mean": 0.0, "square": 0.0},
            "adagrad": {"sum": self.initial},
            "ftrl": {"accumulator": self.initial, "linear": 0.0},
        }[self.kind]


def SGD(lr: float, *, weight_decay: float = 0.0) -> OptimizerRule:
    return _validate_rule(OptimizerRule(kind="sgd", lr=lr, weight_decay=weight_decay))


def Momentum(
    lr: float, momentum: float = 0.9, *, dampening: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> OptimizerRule:
    return _validate_rule(
        OptimizerRule(
            kind="momentum", lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=weight_decay
        )
    )


def Adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    *,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> OptimizerRule:
    first, second = betas
    return _validate_rule(
        OptimizerRule(kind="adam", lr=lr, beta1=first, beta2=second, eps=eps, weight_decay=weight_decay, decoupled=decoupled)
    )


def LazyAdam(lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), *, eps: float = 1e-8) -> OptimizerRule:
    return _validate_rule(OptimizerRule(kind="lazy_adam", lr=lr, beta1=betas[0], beta2=betas[1], eps=eps))


def Adagrad(
    lr: float = 1e-2, *, lr_decay: float = 0.0, weight_decay: float = 0.0, initial: float = 0.0, eps: float = 1e-10
) -> OptimizerRule:
    return _validate_rule(
        OptimizerRule(kind="adagrad", lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, initial=initial, eps=eps)
    )


def FTRL(lr: float = 1e-3, *, lr_power: float = -0.5, l1: float = 0.0, l2: float = 0.0, initial: float = 0.1) -> OptimizerRule:
    return _validate_rule(OptimizerRule(kind="ftrl", lr=lr, lr_power=lr_power, l1=l1, l2=l2, initial=initial))


def _validate_rule(rule: OptimizerRule) -> OptimizerRule:
    from covey.errors import UsageError

    try:
        return msgspec.convert(msgspec.to_builtins(rule), OptimizerRule)
    except msgspec.ValidationError as error:
        raise UsageError(f"the optimizer {rule.kind} is invalid: {error}") from None


def update_weights(rule: OptimizerRule, lr: float, t: int, weights: Array, gradient: Array, states: list[Array]) -> None:
    """Update weights and their states in place. `t` counts the updates of the parameter; the first is 1."""
    if weights.size == 0:
        return
    flat = [array.reshape(-1) for array in (weights, gradient, *states)]  # views: the arrays are contiguous
    step = UPDATE_FUNCTIONS[rule.kind]
    for start in range(0, flat[0].size, CHUNK_ELEMENTS):
        w, g, *s = (array[start : start + CHUNK_ELEMENTS] for array in flat)
        step(rule, lr, t, w, g, s)


def update_rows(
    rule: OptimizerRule, lr: float, t: int, weights: Array, rows: Array, gradient: Array, states: list[Array]
) -> None:
    """Update the rows at the indexes `rows`, each given once, and their states in place. If the rule updates all rows, the
    other rows are updated with gradient 0."""
    if rule.updates_all_rows:
        width = weights.shape[1]
        chunk = max(1, CHUNK_ELEMENTS // max(1, width))
        order = np.argsort(rows, kind="stable")
        rows, gradient = rows[order], gradient[order]
        for start in range(0, len(weights), chunk):
            stop = min(start + chunk, len(weights))
            full = np.zeros((stop - start, width), weights.dtype)
            low, high = np.searchsorted(rows, (start, stop))
            full[rows[low:high] - start] = gradient[low:high]
            update_weights(rule, lr, t, weights[start:stop], full, [state[start:stop] for state in states])
        return
    w, s = weights[rows], [state[rows] for state in states]
    update_weights(rule, lr, t, w, gradient, s)
    weights[rows] = w
    for state, updated in zip(states, s, strict=True):
        state[rows] = updated


def _add_weight_decay(rule: OptimizerRule, w: Array, g: Array) -> Array:
    return g + w.dtype.type(rule.weight_decay) * w if rule.weight_decay else g


def _sgd(rule: OptimizerRule, lr: float, t: int, w: Array, g: Array, s: list[Array]) -> None:
    w -= w.dtype.type(lr) * _add_weight_decay(rule, w, g)


def _momentum(rule: OptimizerRule, lr: float, t: int, w: Array, g: Array, s: list[Array]) -> None:
    kind, decayed = w.dtype.type, _add_weight_decay(rule, w, g)
    buffer = s[0]
    if t == 1:
        buffer[...] = decayed
    else:
        buffer *= kind(rule.momentum)
        buffer += kind(1.0 - rule.dampening) * decayed
    w -= kind(lr) * (decayed + kind(rule.momentum) * buffer if rule.nesterov else buffer)


def _update_moments(rule: OptimizerRule, g: Array, s: list[Array]) -> None:
    kind, (mean, square) = g.dtype.type, s
    mean += (g - mean) * kind(1.0 - rule.beta1)
    square *= kind(rule.beta2)
    square += kind(1.0 - rule.beta2) * g * g


def _adam(rule: OptimizerRule, lr: float, t: int, w: Array, g: Array, s: list[Array]) -> None:
    kind = w.dtype.type
    if rule.decoupled:
        w *= kind(1.0 - lr * rule.weight_decay)
    else:
        g = _add_weight_decay(rule, w, g)
    _update_moments(rule, g, s)
    root = np.sqrt(s[1])
    root /= kind(math.sqrt(1.0 - rule.beta2**t))
    root += kind(rule.eps)
    w -= kind(lr / (1.0 - rule.beta1**t)) * s[0] / root


def _lazy_adam(rule: OptimizerRule, lr: float, t: int, w: Array, g: Array, s: list[Array]) -> None:
    kind = w.dtype.type
    _update_moments(rule, g, s)
    root = np.sqrt(s[1])
    root += kind(rule.eps)
    w -= kind(lr * math.sqrt(1.0 - rule.beta2**t) / (1.0 - rule.beta1**t)) * s[0] / root


def _adagrad(rule: OptimizerRule, lr: float, t: int, w: Array, g: Array, s: list[Array]) -> None:
    kind, g = w.dtype.type, _add_weight_decay(rule, w, g)
    s[0] += g * g
    root = np.sqrt(s[0])
    root += kind(rule.eps)
    w -= kind(lr / (1.0 + (t - 1) * rule.lr_decay)) * g / root


def _ftrl(rule: OptimizerRule, lr: float, t: int, w: Array, g: Array, s: list[Array]) -> None:
    kind, (accumulator, linear) = w.dtype.type, s
    power = kind(-rule.lr_power)
    before = accumulator**power
    accumulator += g * g
    after = accumulator**power
    linear += g - (after - before) / kind(lr) * w
    quadratic = after / kind(lr) + kind(2.0 * rule.l2)
    above_l1 = np.abs(linear) > kind(rule.l1)
    nonzero = above_l1 & (quadratic != 0)
    w[...] = np.divide(np.sign(linear) * kind(rule.l1) - linear, quadratic, out=np.zeros_like(w), where=nonzero)


UPDATE_FUNCTIONS: Final[dict[str, Callable[[OptimizerRule, float, int, Array, Array, list[Array]], None]]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "lazy_adam": _lazy_adam,
    "adagrad": _adagrad,
    "ftrl": _ftrl,
}
