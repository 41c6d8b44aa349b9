"""`Scaling`: its states, its transitions, and the fields of `status.scaling` that it writes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.msjob.msjobs import NOW

from covey.core.msjob.scaling_status import TRANSITIONS, Scaling, ScalingState
from covey.core.msjob.timestamps import format_timestamp

TIME = format_timestamp(NOW)
FIELDS: dict[ScalingState, dict[str, Any]] = {
    ScalingState.NONE: {},
    ScalingState.WAITING: {"to": 5, "since": TIME},
    ScalingState.GROWING: {"to": 5, "since": TIME, "from": 3},
    ScalingState.SHRINKING: {"to": 5, "since": TIME, "asked": TIME},
    ScalingState.FAILED: {"to": 5, "since": TIME, "failed": "no room"},
}


def enter(scaling: Scaling, state: ScalingState) -> None:
    if state is ScalingState.WAITING:
        scaling.wait(5)
    elif state is ScalingState.GROWING:
        scaling.grow(3)
    elif state is ScalingState.SHRINKING:
        scaling.request_release()
    else:
        scaling.fail("no room")


@pytest.mark.parametrize("state", ScalingState)
def test_state_follows_from_the_fields_that_are_stored(state: ScalingState) -> None:
    assert Scaling(dict(FIELDS[state]), NOW).state is state


@pytest.mark.parametrize("after", [state for state in ScalingState if state is not ScalingState.NONE])
@pytest.mark.parametrize("before", ScalingState)
def test_transition_outside_the_table_is_an_error(before: ScalingState, after: ScalingState) -> None:
    fields = dict(FIELDS[before])
    if after in TRANSITIONS[before]:
        enter(Scaling(fields, NOW), after)
        assert fields == FIELDS[after]
    else:
        with pytest.raises(AssertionError):
            enter(Scaling(fields, NOW), after)
        assert fields == FIELDS[before]


@pytest.mark.parametrize("state", ScalingState)
def test_reset_leads_from_every_state_to_none(state: ScalingState) -> None:
    fields = {**FIELDS[state], "said": TIME, "told": "cannot change"}
    Scaling(fields, NOW).reset()
    assert fields == {}


def test_growing_state_has_target_and_previous_number() -> None:
    scaling = Scaling(dict(FIELDS[ScalingState.GROWING]), NOW)
    assert (scaling.target, scaling.previous, scaling.read_time("since")) == (5, 3, NOW)
    assert Scaling({}, NOW).target is None


def test_announcement_does_not_change_the_state() -> None:
    fields: dict[str, Any] = {}
    scaling = Scaling(fields, NOW)
    scaling.announce(4)
    assert fields == {"to": 4, "said": TIME} and scaling.state is ScalingState.NONE
    scaling.end_announcement()
    assert fields == {"to": 4}


def test_unsupported_resize_is_new_only_once_per_message() -> None:
    scaling = Scaling({}, NOW)
    assert scaling.warn_unsupported("one") and not scaling.warn_unsupported("one") and scaling.warn_unsupported("two")
