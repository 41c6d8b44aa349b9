"""Which events of the scheduler `covey run --on-event` passes on."""

from __future__ import annotations

import asyncio

import pytest

from covey.cli.run.event_hooks import EventHooks
from covey.core.event_log import Event
from covey.core.incidents import Outcome
from covey.runtime.node_runtime import SchedulerAddress


def hook_event_kind(event: Event) -> str | None:
    async def convert() -> str | None:
        made = EventHooks("true", SchedulerAddress("127.0.0.1", 1), "job")._make_hook_event(event)
        return made.event if made is not None else None

    return asyncio.run(convert())


@pytest.mark.parametrize("outcome", [*Outcome, None])
def test_recovery_is_passed_on_by_outcome_and_not_by_wording(outcome: Outcome | None) -> None:
    expected = "recovery" if outcome in (Outcome.RESUMED, Outcome.RESTARTED) else None
    for reason in ("recover of worker:1, resumed", "any other text"):
        assert hook_event_kind(Event(1.0, "cluster", "recovery", reason, outcome=outcome)) == expected


@pytest.mark.parametrize(("what", "kind"), [("died", "death"), ("gone", "death"), ("formed", None), ("ended", None)])
def test_other_events_are_passed_on_by_name(what: str, kind: str | None) -> None:
    assert hook_event_kind(Event(1.0, "worker:1", what, "a reason")) == kind
