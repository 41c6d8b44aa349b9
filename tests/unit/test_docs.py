"""The documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import covey
from covey.cli.main import verbs
from covey.cli.options import help_text
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


@pytest.mark.parametrize("name", ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))])
def test_links_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    broken = [link for link in re.findall(r"\]\(([^)#:]+)\)", text(name)) if not (folder / link).exists()]
    assert broken == []


def test_the_public_names_exist() -> None:
    assert [name for name in covey.__all__ if not hasattr(covey, name)] == []
