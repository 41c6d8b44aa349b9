"""Tests of noise and privacy accounting, against the dp-accounting library, samples, and the scheduler's state machine."""

from __future__ import annotations

import math

import dp_accounting as peer
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.federated.test_rounds import PLAN, Harness

from covey.core.federated import dp_accounting as dp
from covey.core.federated.dp_accounting import Noise
from covey.core.federated.messages import InstanceState, RoundTotals
from covey.errors import UsageError
from covey.federated.privacy import dp_noise


def test_epsilon_matches_dp_accounting_library() -> None:
    """`dp-accounting`: its numeric accountant agrees, and its RDP bound is above."""
    for z, rounds, delta in ((1.0, 1, 1e-5), (4.0, 50, 1e-5), (5.0, 10, 1e-2)):
        event = peer.SelfComposedDpEvent(peer.GaussianDpEvent(z), rounds)
        ours = dp.compute_epsilon(math.sqrt(rounds) / z, delta)
        numeric = peer.pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(delta)
        assert ours == pytest.approx(numeric, rel=2e-3, abs=2e-3)
    for z in (0.3, 1.0, 20.0):
        for rounds in (1, 1000):
            event = peer.SelfComposedDpEvent(peer.GaussianDpEvent(z), rounds)
            bound = peer.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
            assert 0.75 * bound < dp.compute_epsilon(math.sqrt(rounds) / z, 1e-5) <= bound


@pytest.mark.parametrize(("eps", "mu"), [(0.0, 0.5), (1.0, 1.0), (0.5, 2.0), (3.0, 1.0), (2.0, 4.0)])
def test_delta_matches_numeric_integral(eps: float, mu: float) -> None:
    """Compare with the integral of max(0, p - e^epsilon * q) over all outputs, for densities p with and q without a device."""
    seen = np.arange(-30.0, 30.0, 1e-4)
    with_it, without = (np.exp(-((seen - mean) ** 2) / 2) / math.sqrt(2 * math.pi) for mean in (mu, 0.0))
    integral = float(np.maximum(0.0, with_it - math.exp(eps) * without).sum() * 1e-4)
    assert dp.compute_delta(eps, mu) == pytest.approx(integral, rel=1e-6)
    assert dp.compute_epsilon(mu, integral) == pytest.approx(eps, abs=1e-5)


def test_log_normal_cdf_is_accurate_in_far_tails() -> None:
    """Compare the series with math.erfc, which is still accurate at these values."""
    for x in (-37.0, -20.0, -10.0, -8.5, -8.0, -7.9, -3.0, -0.5, 0.0, 1.0):
        assert dp._log_normal_cdf(x) == pytest.approx(math.log(math.erfc(-x / math.sqrt(2)) / 2), abs=1e-6)
    assert math.exp(dp._log_normal_cdf(-10.0)) == pytest.approx(7.61985302e-24, rel=1e-6)
    assert dp._log_normal_cdf(-1000.0) == pytest.approx(-500007.826694, abs=1e-5), "the result is finite where erfc underflows"
    assert dp.compute_delta(0.0, 0.0) == 0.0 and dp.compute_epsilon(1e-3, 0.5) == 0.0


@given(st.floats(0.05, 1000), st.floats(1e-9, 0.5))
def test_noise_multiplier_is_the_smallest_for_epsilon_and_delta(eps: float, delta: float) -> None:
    z = dp.compute_noise_multiplier(eps, delta)
    assert dp.compute_delta(eps, 1 / z) <= delta
    assert dp.compute_delta(eps, 1 / (0.99 * z)) > delta
    assert dp.compute_epsilon(1 / z, delta) <= eps * (1 + 1e-6)


def test_mu_squared_adds_up_over_rounds() -> None:
    plan = Noise(local=False, clip=1.0, multiplier=2.0, delta=1e-5)
    assert plan.epsilon_after(9 * plan.mu_squared_per_round) == pytest.approx(dp.compute_epsilon(1.5, 1e-5))
    assert plan.epsilon_after(0.0) == 0.0


@given(st.integers(1, 300), st.floats(0.01, 100), st.floats(0.01, 10))
def test_clipped_update_has_norm_of_at_most_clip(size: int, length: float, clip: float) -> None:
    change = np.full(size, length, np.float32)
    found = dp_noise.clip_update(change, clip)
    assert float(np.linalg.norm(found.astype(np.float64))) <= clip
    assert np.array_equal(found, change) or float(np.linalg.norm(found.astype(np.float64))) > 0.999 * clip


def test_noise_is_normal_with_configured_standard_deviation() -> None:
    drawn = dp_noise.draw_normal(bytes(32), 200_001)
    assert abs(drawn.mean()) < 0.01 and abs(drawn.std() - 1) < 0.01
    assert abs((np.abs(drawn) < 1).mean() - 0.6827) < 0.005 and np.abs(drawn).max() < 6
    local = Noise(local=True, clip=0.5, multiplier=3.0, delta=0.01)
    sent = dp_noise.add_device_noise(np.zeros(100_000, np.float32), local)
    assert sent.std() == pytest.approx(2 * 0.5 * 3.0, rel=0.02), "the sensitivity of local noise is 2 * clip"
    central = Noise(local=False, clip=0.5, multiplier=3.0, delta=0.01)
    first = dp_noise.draw_mean_noise(100_000, central, 10, b"k", 1)
    assert first.std() == pytest.approx(0.5 * 3.0 / 10, rel=0.02)
    assert np.array_equal(first, dp_noise.draw_mean_noise(100_000, central, 10, b"k", 1)), (
        "every aggregator must make the same model"
    )
    assert not np.array_equal(first, dp_noise.draw_mean_noise(100_000, central, 10, b"k", 2))


def test_instance_finishes_before_budget_is_exceeded() -> None:
    noisy = Noise(local=False, clip=1.0, multiplier=1.0, delta=1e-5, budget=dp.compute_epsilon(math.sqrt(2.5), 1e-5))
    plan = msgspec.structs.replace(PLAN, iterations=9, noise=noisy)
    harness = Harness(1, plan=plan).form(1)
    for number in (1, 2):
        assert harness.machine.instance.state is InstanceState.RUNNING
        harness.report(1, round=number, totals=RoundTotals(2, 2))
        harness.report(1, sealed=True)
        harness.report(1, model_round=number, digest=f"m{number}")
    assert harness.machine.instance.state is InstanceState.FINISHED
    assert harness.machine.instance.spent == pytest.approx(2.0)
    (sentence,) = harness.reasons("finished")
    assert "another round would raise epsilon to" in sentence and "the budget is" in sentence
    with pytest.raises(UsageError, match="the budget is"):
        harness.machine.request_new_instance(plan, harness.now)
    kept = harness.machine.make_instructions()
    assert kept.instance is InstanceState.FINISHED
