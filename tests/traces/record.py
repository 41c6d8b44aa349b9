"""The record: a file for each game in `record/`, with a line for each seed: calls, digest with prose, digest without."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from tests.traces.games import GAMES, SCENARIOS, label, run
from tests.traces.recorder import Call

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "record"
PARTS = ROOT / ".traces"  # of a recording that is not complete
SOURCES = (
    "src/covey/core",
    "src/covey/train",
    "src/covey/errors.py",
    "tests/simulation",
    "tests/scenarios",
    "tests/soak/fuzz.py",
)
TOOL = ("machines.py", "rendering.py", "recorder.py", "games.py", "renames.json")


def digests(name: str, numbers: Iterable[int], processes: int) -> Iterator[str]:
    """Play these games in the given number of processes; yield their lines in order."""
    if processes == 1:
        yield from (line(name, number) for number in numbers)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap(functools.partial(line, name), numbers, chunksize=4)


def line(name: str, number: int) -> str:
    """Play one game; return its line in the record."""
    return f"{label(name, number)} {run(name, number)}"


def write(name: str, processes: int) -> None:
    """Record one game. What an interrupted run of the same code has recorded is kept."""
    part = PARTS / fingerprint() / f"{name}.txt"
    part.parent.mkdir(parents=True, exist_ok=True)
    found = part.read_text().splitlines(keepends=True) if part.exists() else []
    done = [one for one in found if one.endswith("\n")]
    part.write_text("".join(done))
    with part.open("a") as out:
        for one in digests(name, range(len(done), GAMES[name].size), processes):
            out.write(f"{one}\n")
            out.flush()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.txt").write_text(part.read_text())
    print(f"{name}: {GAMES[name].size} games recorded, {len(done)} of them by an earlier run", flush=True)


def fingerprint() -> str:
    """Return a digest of the code that decides what is recorded."""
    digest = hashlib.sha256()
    named = [*(ROOT / name for name in SOURCES), *(Path(__file__).with_name(name) for name in TOOL)]
    for path in sorted(found for one in named for found in ([one] if one.is_file() else one.rglob("*"))):
        if path.suffix in (".py", ".json", ".txt"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def compare(name: str, numbers: Iterable[int], processes: int, plain: bool = False) -> list[str]:
    """Return a line for each of these games that differs from the record."""
    path = FOLDER / f"{name}.txt"
    known = path.read_text().splitlines() if path.exists() else []
    return differences(known, digests(name, numbers, processes), plain)


def differences(recorded: Iterable[str], found: Iterable[str], plain: bool = False) -> list[str]:
    """Return what differs in the lines that were found: the label, and whether effects or prose alone differ."""
    known = {one.split()[0]: one.split()[1:] for one in recorded}
    differing = []
    for one in found:
        key, *values = one.split()
        before = known.get(key)
        if before is None:
            differing.append(f"{key} is not in the record")
        elif (before[0], before[2]) != (values[0], values[2]):
            differing.append(f"{key} has other effects")
        elif before != values and not plain:
            differing.append(f"{key} has other texts and the same effects")
    return differing


def number(name: str, line: str) -> int:
    """Return the number of the game whose line this is."""
    key = line.split()[0]
    if name != "scenarios":
        return int(key)
    if key not in SCENARIOS:
        raise SystemExit(f"{key} is not a scenario: expected one of {', '.join(SCENARIOS)}")
    return SCENARIOS.index(key)


def encoded(call: Call) -> str:
    """Return a call as one line of JSON."""
    return msgspec.json.encode(call).decode()
