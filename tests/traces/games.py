"""The games whose effects are recorded: each simulation by seed, every scenario, and the fuzzer's sequences of messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.scenarios import scenario_player as theatre
from tests.simulation import seed_sweep
from tests.soak import fuzz
from tests.traces.recorder import Call, Recorder, Summary

SCENARIOS = sorted(path.stem for path in Path(theatre.__file__).parent.glob("*.txt"))
SEEDS = 2000


class Game(NamedTuple):
    """`play` takes a number from 0 to `size - 1`."""

    play: Callable[[int], object]
    size: int = SEEDS


def scenario(number: int) -> None:
    """Play one script; what it prints is compared elsewhere."""
    theatre.play((Path(theatre.__file__).parent / f"{SCENARIOS[number]}.txt").read_text())


def messages(seed: int) -> None:
    """Play a cluster of two that forms, and then hears anything, with each of the fuzzer's settings."""
    draw = random.Random(seed)
    events = fuzz.story(draw)
    for settings in fuzz.SETTINGS:
        fuzz.play(events, settings)


GAMES = {
    **{name: Game(play) for name, play in seed_sweep.GAMES.items()},
    "messages": Game(messages),
    "scenarios": Game(scenario, len(SCENARIOS)),
}


def label(name: str, number: int) -> str:
    """Return the name of one game in the record: its seed, or the script of a scenario."""
    return SCENARIOS[number] if name == "scenarios" else str(number)


def run(name: str, number: int) -> Summary:
    """Play one game; return its digests."""
    return _run(name, number, Recorder()).summary()


def calls(name: str, number: int) -> list[Call]:
    """Play one game; return every call of its machines."""
    return _run(name, number, Recorder(keep=True)).calls


def _run(name: str, number: int, recorder: Recorder) -> Recorder:
    with recorder.recording():
        try:
            GAMES[name].play(number)
        except Exception as error:  # a game that fails is a difference like any other
            recorder.note(Call("game", "", f"failed with {type(error).__name__}", []))
    return recorder
