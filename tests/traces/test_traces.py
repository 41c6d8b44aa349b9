"""The effects of the state machines are those of the record; and the tool that says so notices what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import msgspec
import pytest
from tests.traces import record
from tests.traces.games import GAMES, calls, run
from tests.traces.recorder import Call
from tests.traces.rendering import Renames, Rendering, full, plain
from tests.traces.versions import explain

PART = {"cluster": 100, "resizing": 100, "servers": 100, "federation": 250, "messages": 100, "scenarios": 1}  # every n-th seed
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", GAMES)
def test_effects_are_those_of_the_record(name: str) -> None:
    differing = record.compare(name, range(0, GAMES[name].size, PART[name]), processes=1)
    assert not differing, (
        f"{name}: {'; '.join(differing[:5])}. `make traces-check` prints the first difference. If it is intended, "
        "`make traces` records the present effects; commit the record together with the change."
    )


@pytest.mark.parametrize("name", GAMES)
def test_record_is_complete(name: str) -> None:
    lines = (record.FOLDER / f"{name}.txt").read_text().splitlines()
    assert [record.number(name, line) for line in lines] == list(range(GAMES[name].size))


def test_digests_do_not_depend_on_the_process() -> None:
    """Another hash seed orders sets differently; the effects must not follow."""
    asked = [
        sys.executable,
        "-m",
        "tests.traces",
        "digests",
        "--games",
        "cluster,federation",
        "--seeds",
        "30:32",
        "--processes",
        "1",
    ]
    said = [
        subprocess.run(
            asked, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] == "".join(f"{n} {run(name, n)}\n" for name in ("cluster", "federation") for n in (30, 31))


def test_every_machine_of_a_game_is_recorded() -> None:
    def words(name: str, number: int) -> set[str]:
        return {call.machine.rpartition(" ")[0] for call in calls(name, number)}

    assert words("cluster", 0) == {"scheduler", "node"}
    assert words("federation", 0) == {"federated scheduler", "federated server"}


# -- rendering -------------------------------------------------------------------------------------------------------


class Colour(StrEnum):
    RED = "red"


class Inner(msgspec.Struct, frozen=True):
    reason: str
    tail: list[str] = []


class Outer(msgspec.Struct, frozen=True):
    name: str
    inner: Inner
    share: float = 0.1
    colour: Colour = Colour.RED


def rendered(value: object, renames: Renames | None = None) -> str:
    return Rendering(renames or Renames()).text(value)


def test_values_have_one_text() -> None:
    assert rendered({"b": 1, "a": {3, 1}}) == rendered({"a": {1, 3}, "b": 1}) == "{'a': {1, 3}, 'b': 1}"
    assert rendered(0.1 + 0.2) == rendered(0.3) == "0.3"
    assert rendered([1.0, None, True, b"x", Colour.RED]) == "[1, None, True, b'x', 'red']"


def test_prose_is_left_out_of_the_plain_text_alone() -> None:
    text = rendered(Outer("a", Inner("because of it", ["line 1", ""])))
    assert full(text) == "Outer(colour='red', inner=Inner(reason='because of it', tail=['line 1', '']), name='a', share=0.1)"
    assert plain(text) == "Outer(colour='red', inner=Inner(reason=..., tail=[..., '']), name='a', share=0.1)"
    assert plain(rendered(Inner("another reason"))) == plain(rendered(Inner("a reason"))) != plain(rendered(Inner("")))


def test_renamed_types_and_fields_have_their_recorded_names() -> None:
    class Moved(msgspec.Struct, frozen=True):
        why: str
        tail: list[str] = []
        new: int = 0

    table = Renames({"Moved": "Inner"}, {"Moved.why": "reason", "Moved.new": ""})
    assert rendered(Moved("a sentence"), table) == rendered(Inner("a sentence"))


def test_object_without_stable_text_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no text that is the same in every run"):
        rendered(object())


# -- differences -----------------------------------------------------------------------------------------------------


def test_differences_tell_effects_from_prose() -> None:
    recorded = ["0 5 aa bb", "1 5 cc dd", "2 5 ee ff"]
    found = ["0 5 aa bb", "1 5 cx dd", "2 5 ex fx", "3 1 00 00"]
    effects = ["2 has other effects", "3 is not in the record"]
    assert record.differences(recorded, found) == ["1 has other texts and the same effects", *effects]
    assert record.differences(recorded, found, plain=True) == effects


def test_first_difference_is_explained() -> None:
    same = Call("scheduler 1", "1.5", "step(Ticked())", [])
    before = Call("scheduler 1", "2", "step(Ticked())", ["Close(link=1)", "Publish(reason=\x02'old'\x03)"])
    after = Call("scheduler 1", "2", "step(Ticked())", ["Close(link=2)", "Publish(reason=\x02'new'\x03)"])
    said = explain("cluster 7", ("old", [same, before]), ("new", [same, after]), False).splitlines()
    assert said[:2] == ["cluster 7: call 1 at 2 differs", "scheduler 1: step(Ticked())"]
    assert said[5:] == [
        " event at 2: scheduler 1 step(Ticked())",
        "-Close(link=1)",
        "-Publish(reason='old')",
        "+Close(link=2)",
        "+Publish(reason='new')",
    ]
    assert "reason" not in "".join(
        line for line in explain("", ("", [before]), ("", [after]), True).splitlines() if line[0] in "+-"
    )
    assert "(no further call)" in explain("", ("", [same]), ("", [same, before]), False)
