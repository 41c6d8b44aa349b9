"""Tests of administrative requests to a federated cluster: published events, state, and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.core.federated.test_rounds import PLAN, Harness
from tests.unit.core.federated.test_rounds_effects import published

from covey.core.federated.messages import SERVERS_MAX, InstanceState
from covey.errors import UsageError


def test_scale_out_and_rollback_publish_target_size() -> None:
    machine = Harness().form().machine
    assert published(machine.scale_out(1, 0.0)) == ["cluster scale out: waiting for 1 server"]
    assert (machine.roster.wanted, machine.roster.wanted_before, machine.roster.operation) == (3, 2, "out")
    assert published(machine.roll_back(0.0)) == ["cluster rolled back: target size: 2 servers"]
    assert (machine.roster.wanted, machine.state) == (2, "CLUSTER_READY")
    assert published(machine.scale_out(SERVERS_MAX - 2, 0.0)) == [f"cluster scale out: waiting for {SERVERS_MAX - 2} servers"]


def test_scale_in_publishes_ids_of_leaving_servers() -> None:
    machine = Harness(3).form(3).machine
    assert published(machine.scale_in(["0", "2", "0"], 0.0)) == ["cluster scale in: draining 2 servers: 0, 2"]
    assert (machine.roster.wanted, machine.roster.wanted_before, machine.roster.operation) == (1, 3, "in")


def test_disable_and_enable_publish_event_and_change_state() -> None:
    machine = Harness().form().machine
    assert published(machine.set_enabled(False, 0.0)) == ["cluster disabled: requested"]
    assert (machine.instance.state, machine.state) == (InstanceState.DISABLED, "CLUSTER_DISABLE_FLS")
    assert published(machine.set_enabled(True, 0.0)) == ["cluster enabled: requested"]
    assert (machine.instance.state, machine.state) == (InstanceState.RUNNING, "CLUSTER_READY")


def test_invalid_requests_raise_usage_error_with_reason() -> None:
    formed, forming = Harness().form().machine, Harness().machine
    refusals: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: formed.scale_out(0, 0.0), "The value should not be less than 0."),
        (lambda: formed.scale_out(SERVERS_MAX - 1, 0.0), f"The cluster has 2 servers, and at most {SERVERS_MAX} are allowed."),
        (lambda: formed.scale_in([], 0.0), "The node ids should not be empty."),
        (lambda: formed.scale_in(["9"], 0.0), "The node id:9 is illegal."),
        (lambda: formed.scale_in(["0", "1"], 0.0), "The cluster has 2 servers, and at least one must remain."),
        (lambda: formed.roll_back(0.0), "The cluster is not in CLUSTER_SCALE_OUT: there is nothing to roll back."),
        (lambda: forming.set_enabled(True, 0.0), "The cluster is not ready."),
        (lambda: forming.request_new_instance(PLAN, 0.0), "The cluster is not ready: it is in CLUSTER_STARTING."),
    )
    for request, reason in refusals:
        with pytest.raises(UsageError) as refused:
            request()
        assert str(refused.value) == reason
