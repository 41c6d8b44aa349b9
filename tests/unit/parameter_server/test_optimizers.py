"""The servers' optimizers compared with torch's; FTRL, which torch lacks, with its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from covey.errors import UsageError
from covey.parameter_server.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Array,
    LazyAdam,
    Momentum,
    OptimizerRule,
    update_rows,
    update_weights,
)

STEPS, ROWS, WIDTH = 12, 40, 3

PAIRS: dict[str, tuple[OptimizerRule, Callable[[Any], Any]]] = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "sgd-decay": (SGD(0.1, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
    "momentum": (Momentum(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "dampened": (Momentum(0.1, 0.9, dampening=0.5), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5)),
    "nesterov": (Momentum(0.1, 0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    "adam": (Adam(0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    "adamw": (Adam(0.01, weight_decay=0.1, decoupled=True), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "adagrad": (Adagrad(0.1, lr_decay=0.1, initial=0.2), lambda p: torch.optim.Adagrad(p, 0.1, 0.1, 0.0, 0.2)),
}


def begin(rule: OptimizerRule, rows: int = ROWS) -> tuple[Array, list[Array]]:
    weights = np.random.default_rng(1).standard_normal((rows, WIDTH)).astype(np.float32)
    return weights, [np.full_like(weights, first) for first in rule.initial_states.values()]


def gradient(step: int, rows: int = ROWS) -> Array:
    return np.random.default_rng(100 + step).standard_normal((rows, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rows", [ROWS, 30_000], ids=["one chunk", "several chunks"])
def test_update_of_all_rows_equals_torchs(name: str, rows: int) -> None:
    rule, make = PAIRS[name]
    weights, states = begin(rule, rows)
    expected = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = make([expected])
    for step in range(STEPS if rows == ROWS else 3):
        expected.grad = torch.from_numpy(gradient(step, rows))
        optimizer.step()
        update_weights(rule, rule.lr, step + 1, weights, gradient(step, rows), states)
    np.testing.assert_allclose(weights, expected.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (Adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
        (LazyAdam(0.01), lambda p: torch.optim.SparseAdam(p, 0.01)),
    ],
    ids=["sgd", "adagrad", "lazy_adam"],
)
def test_update_of_some_rows_equals_torchs(rule: OptimizerRule, make: Callable[[Any], Any]) -> None:
    weights, states = begin(rule)
    expected = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = make([expected])
    for step in range(STEPS):
        rows = np.random.default_rng(step).choice(ROWS, 7, replace=False)
        row_gradient = gradient(step)[:7]
        expected.grad = torch.sparse_coo_tensor(torch.from_numpy(rows[None]), torch.from_numpy(row_gradient), (ROWS, WIDTH))
        optimizer.step()
        update_rows(rule, rule.lr, step + 1, weights, rows, row_gradient, states)
    np.testing.assert_allclose(weights, expected.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_adam_updates_rows_without_a_gradient_and_lazy_adam_does_not() -> None:
    rows = np.array([3, 1])
    for rule, updates_all in ((Adam(0.01), True), (LazyAdam(0.01), False)):
        weights, states = begin(rule)
        full = np.zeros((ROWS, WIDTH), np.float32)
        full[rows] = gradient(0)[:2]
        dense, dense_states = begin(rule)
        for t in (1, 2):
            update_rows(rule, rule.lr, t, weights, rows if t == 1 else np.array([0]), full[rows if t == 1 else [0]], states)
            update_weights(rule, rule.lr, t, dense, full if t == 1 else np.zeros_like(full), dense_states)
        before = begin(rule)[0]
        assert np.array_equal(weights, dense) is updates_all, rule.kind
        assert (weights[5] == before[5]).all(), "a row that never had a gradient does not change"


def test_ftrl_follows_its_definition() -> None:
    rule = FTRL(0.1, l1=0.05, l2=0.02, initial=0.1)
    weights, states = begin(rule)
    w, z, n = weights.astype(np.float64), np.zeros((ROWS, WIDTH)), np.full((ROWS, WIDTH), 0.1)
    for step in range(STEPS):
        g = gradient(step)
        update_weights(rule, rule.lr, step + 1, weights, g, states)
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / 0.1
        z += g - sigma * w
        n += g * g
        w = np.where(np.abs(z) <= 0.05, 0.0, -(z - np.sign(z) * 0.05) / (np.sqrt(n) / 0.1 + 2 * 0.02))
    np.testing.assert_allclose(weights, w, rtol=1e-4, atol=1e-5)
    assert (weights == 0).any() == (w == 0).any()


def test_hyperparameters_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="sgd"):
        SGD(-1.0)
    with pytest.raises(UsageError, match="adam"):
        Adam(0.1, betas=(1.0, 0.9))
