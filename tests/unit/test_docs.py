"""The documents say what the code says."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import click
import pytest

import covey
from covey.cli.main import verbs
from covey.cli.options import help_text, parse
from covey.errors import ExitCode
from covey.settings import TABLE

ROOT = Path(__file__).parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_variable_and_option_is_documented() -> None:
    settings = text("docs/settings.md")
    assert [var.variable for var in TABLE.values() if f"`{var.variable}`" not in settings] == []
    assert help_text().rstrip() in settings, "docs/settings.md holds the output of covey run --help"


def test_every_exit_code_is_documented() -> None:
    assert [code for code in ExitCode if f"| {int(code)} |" not in text("docs/errors.md")] == []


def test_the_verbs_of_the_readme_exist() -> None:
    blocks = re.findall(r"^```\w*$(.*?)^```$", text("README.md"), re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"^covey (\w+)", "".join(blocks), re.MULTILINE))
    assert named and named <= set(verbs.list_commands(click.Context(verbs)))


@pytest.mark.parametrize("name", ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))])
def test_links_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    broken = [link for link in re.findall(r"\]\(([^)#:]+)\)", text(name)) if not (folder / link).exists()]
    assert broken == []


def test_the_public_names_exist() -> None:
    assert [name for name in covey.__all__ if not hasattr(covey, name)] == []


def test_the_reference_is_what_the_code_says() -> None:
    pages = runpy.run_path(str(ROOT / "docs/build_reference.py"))["pages"]()
    folder = ROOT / "docs/reference"
    stale = [name for name, page in pages.items() if not (folder / name).exists() or (folder / name).read_text() != page]
    assert stale == [], "run: make docs"
    assert {path.name for path in folder.iterdir()} == set(pages)


def commands() -> list[tuple[str, str]]:
    """Every line of a block in our documents that begins with covey, without what is said beside it."""
    found = []
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/tutorials/*.md"))]:
        for block in re.findall(r"^```(?:bash)?$(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in re.findall(r"^covey .+$", block, re.MULTILINE):
                said = re.split(r" {2,}| #", line)[0].strip()
                found.append((str(path.relative_to(ROOT)), re.sub(r"[\[\]]|\.\.\.", "", said)))
    return found


@pytest.mark.parametrize(("name", "line"), commands(), ids=lambda text: text)
def test_a_command_of_the_documents_can_be_typed(name: str, line: str) -> None:
    words = shlex.split(line)[1:]
    if words[0] == "run":
        parse(words[1:], {}, cpu_count=2, gpu_count=0)
        return
    verb: click.Command = verbs
    while isinstance(verb, click.Group):
        found = verb.get_command(click.Context(verb), words.pop(0))
        assert found is not None, f"{name}: {line}"
        verb = found
    verb.make_context(line, words)  # raises where it cannot be


def test_the_files_that_documents_name_exist() -> None:
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "examples/README.md"]:
        named = re.findall(r"(?<![.\w/])(?:examples|config|deploy|bench|src|tests)/[\w/.-]*\w\.\w+\b", path.read_text())
        assert [file for file in named if not (ROOT / file).exists()] == [], path


def test_the_tests_that_failures_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)`", text("docs/failures.md"))
    assert named and [name for name in named if not (ROOT / "tests/processes" / name).exists()] == []
