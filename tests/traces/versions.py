"""Compares the effects of two versions of the code, each in processes and a folder of its own."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.traces.record import differences
from tests.traces.recorder import Call
from tests.traces.rendering import full as with_prose
from tests.traces.rendering import plain as without_prose

import covey


class Version(NamedTuple):
    """A version of the code: what the user called it, and the folder that has it."""

    name: str
    root: Path


def check_source(root: Path) -> None:
    """Exit if the imported covey is not the one of this checkout."""
    found = Path(covey.__file__)
    if not found.is_relative_to(root):
        raise SystemExit(f"covey is imported from {found.parent}, not from {root}: set PYTHONPATH={root / 'src'}")


@contextmanager
def checkout(name: str, root: Path) -> Iterator[Version]:
    """Open a version: a folder as it is, a git revision in a worktree that is removed afterwards."""
    if Path(name).is_dir():
        yield _with_traces(Version(name, Path(name).resolve()))
        return
    with tempfile.TemporaryDirectory(prefix="covey-traces-") as folder:
        made = Path(folder) / "checkout"
        git = subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(made), name], cwd=root, capture_output=True, text=True
        )
        if git.returncode:
            raise SystemExit(f"{name} is neither a folder nor a revision: {git.stderr.strip()}")
        try:
            yield _with_traces(Version(name, made))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(made)], cwd=root, check=True)


def _with_traces(version: Version) -> Version:
    if not (version.root / "tests/traces/__main__.py").exists():
        raise SystemExit(f"{version.name} has no tests/traces: expected a version of the code that can record its effects")
    return version


def recorded_by(root: Path, path: Path) -> str:
    """Return the revision that last changed a file of the record, "" if git does not know one."""
    git = subprocess.run(["git", "log", "-1", "--format=%H", "--", str(path)], cwd=root, capture_output=True, text=True)
    return git.stdout.strip() if git.returncode == 0 else ""


def first_difference(old: Version, new: Version, name: str, numbers: range, plain: bool) -> str:
    """Return the first difference between two versions in these games as text; "" if there is none."""
    seeds = f"{numbers.start}:{numbers.stop}"
    sides = [_start(version, "digests", "--games", name, "--seeds", seeds, "--processes", "1") for version in (old, new)]
    try:
        assert sides[0].stdout is not None and sides[1].stdout is not None
        for before, after in zip_longest(sides[0].stdout, sides[1].stdout):
            if before is None or after is None:
                raise SystemExit(f"{(old if before is None else new).name} did not play all games: its error is above")
            if differences([before], [after], plain):
                key = after.split()[0]
                calls = [(version.name, _calls(version, name, key)) for version in (old, new)]
                return explain(f"{name} {key}", calls[0], calls[1], plain)
    finally:
        for side in sides:
            side.kill()
            side.wait()
    return ""


def _start(version: Version, *arguments: str) -> subprocess.Popen[str]:
    search = os.pathsep.join([str(version.root / "src"), str(version.root)])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.traces", *arguments],
        cwd=version.root,
        env=os.environ | {"PYTHONPATH": search},
        stdout=subprocess.PIPE,
        text=True,
    )


def _calls(version: Version, name: str, key: str) -> list[Call]:
    said, _ = _start(version, "show", name, key, "--json").communicate()
    return [msgspec.json.decode(one, type=Call) for one in said.splitlines()]


def explain(title: str, old: tuple[str, list[Call]], new: tuple[str, list[Call]], plain: bool) -> str:
    """Return the first call that differs: its number, time and event, and a diff of the effects."""
    shown: Callable[[str], str] = without_prose if plain else with_prose
    for index, (one, other) in enumerate(zip_longest(old[1], new[1])):
        before, after = _shown(one, shown), _shown(other, shown)
        if before == after:
            continue
        call = one or other
        assert call is not None
        diff = difflib.unified_diff(before, after, old[0], new[0], lineterm="", n=1000)
        return "\n".join([f"{title}: call {index} at {call.time} differs", shown(f"{call.machine}: {call.event}"), *diff])
    return f"{title}: the digests differed, and the calls do not: the game does not replay exactly"


def _shown(call: Call | None, shown: Callable[[str], str]) -> list[str]:
    if call is None:
        return ["(no further call)"]
    return [shown(one) for one in (f"event at {call.time}: {call.machine} {call.event}", *call.effects)]
