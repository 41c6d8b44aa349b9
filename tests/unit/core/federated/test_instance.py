"""Tests of the federated instance: iterations, end conditions, privacy loss."""

from __future__ import annotations

from typing import NoReturn

import msgspec

from covey.core.effects import Level, PublishEvent
from covey.core.federated.dp_accounting import Noise
from covey.core.federated.instance import FederatedInstance
from covey.core.federated.messages import InstanceState, RoundPlan
from covey.core.federated.outbox import Outbox, Step

PLAN = RoundPlan(iterations=2)


def no_record() -> NoReturn:
    raise AssertionError("an instance must not persist a record itself")


def step() -> Step:
    return Step(0.0, "c", Outbox(no_record))


def events(done: Step) -> list[tuple[str, str]]:
    return [(effect.what, effect.reason) for effect in done.out.effects if isinstance(effect, PublishEvent)]


def test_instance_finishes_after_last_iteration() -> None:
    instance, now = FederatedInstance(PLAN), step()
    instance.start_round(now, 2)
    assert (instance.state, now.out.effects) == (InstanceState.RUNNING, [])
    instance.start_round(now, 3)
    assert instance.state is InstanceState.FINISHED
    assert events(now) == [("finished", "all 2 iterations are done; the model is still served")]
    instance.set_enabled(now, True)
    assert instance.state is InstanceState.FINISHED


def test_requested_instance_starts_with_next_round() -> None:
    instance, now = FederatedInstance(PLAN), step()
    instance.count_missed()
    instance.request(msgspec.structs.replace(PLAN, iterations=9))
    assert instance.plan is PLAN
    instance.start_round(now, 2)
    assert (instance.plan.iterations, instance.next_plan, instance.base, instance.iteration_of(2)) == (9, None, 1, 1)
    assert instance.missed_count == 0 and events(now) == [("new instance", "9 iterations from the newest model")]


def test_repeated_iteration_uses_next_round_number() -> None:
    instance = FederatedInstance(PLAN)
    assert instance.iteration_of(1) == 1
    instance.repeat_iteration()
    assert (instance.iteration_of(2), instance.missed_count) == (1, 1)


def test_instance_finishes_without_budget_for_next_round() -> None:
    noise = Noise(local=False, clip=1.0, multiplier=2.0, delta=1e-5)
    noise = msgspec.structs.replace(noise, budget=noise.epsilon_after(noise.mu_squared_per_round))
    instance, now = FederatedInstance(RoundPlan(noise=noise)), step()
    instance.start_round(now, 1)
    assert now.out.effects == [], "the budget suffices for exactly one round"
    instance.on_round_done(now, 1, {})
    instance.start_round(now, 2)
    assert instance.state is InstanceState.FINISHED and instance.spent == noise.mu_squared_per_round
    (warning,) = now.out.effects
    assert isinstance(warning, PublishEvent) and warning.level is Level.WARNING


def test_first_job_name_is_used_until_cluster_forms() -> None:
    instance = FederatedInstance(PLAN)
    for name in ("", "first", "second"):
        instance.note_job(name)
    assert instance.job == "first"
    instance.form(None, "")
    assert (instance.job, instance.plan) == ("first", PLAN)
    instance.form(RoundPlan(threshold=7), "chosen")
    assert (instance.job, instance.plan.threshold) == ("chosen", 7)
