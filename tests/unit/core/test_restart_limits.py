"""Limits of restarts: one default each, in every record, message and option."""

from __future__ import annotations

import msgspec
import pytest

from covey.agent.agent import AgentJob
from covey.cli.run.options import help_text
from covey.cli.run.plan import RunOptions, RunPlan
from covey.core.messages import DesiredChildren, RegisterAgent
from covey.core.restart_limits import MAX_RESTARTS, NO_HOST_LIMIT, REPLACEMENTS_MAX, replacement_limit
from covey.core.types import AgentInfo, AgentRecord, ClusterSettings
from covey.runtime.child_environment import SchedulerHandoff


def test_max_restarts_limits_replacements_and_0_means_default() -> None:
    assert replacement_limit(5) == 5
    assert replacement_limit(MAX_RESTARTS) == REPLACEMENTS_MAX == ClusterSettings(worker_num=1).replacements_max


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        *((kind, MAX_RESTARTS) for kind in (ClusterSettings, DesiredChildren, RunOptions, RunPlan, SchedulerHandoff)),
        *((kind, NO_HOST_LIMIT) for kind in (AgentInfo, AgentRecord, AgentJob, RegisterAgent)),
    ],
)
def test_all_records_have_the_same_default_limits(kind: type, default: int) -> None:
    assert {field.name: field.default for field in msgspec.structs.fields(kind)}["max_restarts"] == default


def test_help_lists_both_defaults() -> None:
    assert f"limit of full restarts ({MAX_RESTARTS}), and of replaced processes per host ({REPLACEMENTS_MAX})" in help_text()
