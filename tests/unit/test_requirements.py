"""Skipped tests: reasons in the summary, also with pytest-xdist, and --no-skips."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.documents import ROOT

TESTS = """
import pytest
from tests.requirements import Requirement, needs, require

ABSENT = Requirement("a part is not installed", "apt-get install a-part", lambda: False)
PRESENT = Requirement("nothing is missing", "true", lambda: True)


@needs(PRESENT, ABSENT)
@pytest.mark.parametrize("number", range(3))
def test_marked(number, never_made):
    raise AssertionError


@pytest.fixture
def never_made():
    raise AssertionError


@pytest.fixture
def part():
    require(ABSENT)


def test_with_a_fixture(part):
    raise AssertionError


@needs(PRESENT)
def test_that_runs():
    pass
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run TESTS in a separate pytest, without plugins that they do not need."""
    (folder / "test_some.py").write_text(TESTS)
    plugins = [word for name in ("tests.conftest", "xdist", "pytest_timeout", "no:cacheprovider") for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", *plugins, *words, str(folder)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_summary_lists_each_reason_once_with_number_of_tests(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.findall(r"^ *(\d+) tests?  (.*)$", done.stdout, re.MULTILINE)
    assert counted == [("4", "a part is not installed: apt-get install a-part")]
    assert done.stdout.count("a part is not installed") == 1
    assert "1 passed, 4 skipped" in done.stdout


def test_no_skips_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "--no-skips")
    assert done.returncode == 1 and "which --no-skips forbids" in done.stdout, done.stdout + done.stderr


def test_no_file_names_a_package_index() -> None:
    """pip and apt use the configured indexes and mirrors; a fixed one would be wrong on other machines."""
    names = re.compile(
        "|".join(re.escape(".".join(parts)) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("deb.debian", "org")))
    )
    places = [ROOT / "Makefile", *(ROOT / ".ci").iterdir(), ROOT / "Dockerfile"]
    places += [
        path
        for folder in ("tests", "bench", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh")
    ]
    assert [str(path.relative_to(ROOT)) for path in places if names.search(path.read_text())] == []
