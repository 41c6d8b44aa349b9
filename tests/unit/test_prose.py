"""Texts avoid words that hide which component acts. docs/glossary.md has the terms; CONTRIBUTING.md has the rules."""

from __future__ import annotations

import re
import subprocess

import pytest
from tests.documents import ROOT

WORDS = r"\b(?:who|whoever|somebody|nobody|everyone|anew|go(?:es)? on|so many|for ever)\b"
PATTERN = re.compile(rf"{WORDS}|(?<!there )\bis no (?!longer\b)", re.IGNORECASE)
SUFFIXES = (".py", ".md", ".js", ".html", ".css", ".yaml", ".yml", ".sh", ".toml")
GENERATED = ("docs/reference/", "bench/results/", "tests/traces/record/", "tests/snapshots/", "CHANGELOG.md")
EXPLAINED = ("tests/unit/test_prose.py", "CONTRIBUTING.md")  # they quote the words

# A hit that is right, by file: a person, or an interface.
ALLOWED = {
    "docs/console.md": ("user who can reach the port", "user who runs the scheduler"),
    "docs/privacy.md": ("An operator who",),
    "docs/security.md": ("user who runs the scheduler",),
    "src/covey/core/cluster/recovery.py": ("restarted by a user, who may",),
    "src/covey/core/cluster/server_resize.py": ('"shared anew"',),  # the kind of an event
    "src/covey/management/web/actions.js": ("user who runs the scheduler",),
    "tests/unit/core/cluster/test_scheduler_machine_effects.py": ("servers shared anew",),
}


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    return [path for path in listed.stdout.split() if path.endswith(SUFFIXES) and not path.startswith((*GENERATED, *EXPLAINED))]


def find_hits(path: str) -> list[str]:
    """Return the lines with a hit that is not allowed, each with its number."""
    allowed = ALLOWED.get(path, ())
    lines = enumerate((ROOT / path).read_text().splitlines(), 1)
    return [f"{path}:{n}: {line.strip()}" for n, line in lines if PATTERN.search(line) and not any(a in line for a in allowed)]


def test_texts_name_the_component_that_acts() -> None:
    assert [hit for path in tracked_files() for hit in find_hits(path)] == []


def test_every_allowed_text_exists() -> None:
    missing = [(path, text) for path, texts in ALLOWED.items() for text in texts if text not in (ROOT / path).read_text()]
    assert missing == []


@pytest.mark.parametrize("line", ["Whoever calls again", "the training goes on", "this is no error", "Everyone waits"])
def test_pattern_finds(line: str) -> None:
    assert PATTERN.search(line)


@pytest.mark.parametrize("line", ["there is no checkpoint", "it is no longer used", "whose rank", "an anyone-can-join cluster"])
def test_pattern_ignores(line: str) -> None:
    assert not PATTERN.search(line)
