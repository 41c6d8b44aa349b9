"""Documents match the code: settings, commands, links, names, blocks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.documents import PAGES, ROOT, Block, blocks

import covey
from covey.cli.main import verbs
from covey.cli.run.options import help_text, parse_command_line
from covey.errors import ExitCode
from covey.settings import TABLE

BLOCKS = [block for page in PAGES for block in blocks(page)]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_variable_and_option_is_documented() -> None:
    settings = text("docs/settings.md")
    assert [var.variable for var in TABLE.values() if f"`{var.variable}`" not in settings] == []
    assert help_text().rstrip() in settings, "docs/settings.md holds the output of covey run --help"


def test_package_docstring_lists_all_modules() -> None:
    pages = [page for page in (ROOT / "src/covey").glob("*/**/__init__.py") if "taskd_shim" not in page.parts]
    docstrings = {page.parent: page.read_text() for page in pages}
    files = [path for package in docstrings for path in package.glob("*.py") if not path.stem.startswith("__")]
    assert files and [str(path) for path in files if f"`{path.stem}`" not in docstrings[path.parent]] == []


def test_contributing_lists_every_make_target() -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.MULTILINE)
    assert targets and [name for name in targets if f"| `make {name}" not in text("CONTRIBUTING.md")] == []


def test_every_exit_code_is_documented() -> None:
    assert [code for code in ExitCode if f"| {int(code)} |" not in text("docs/errors.md")] == []


def test_commands_in_readme_exist() -> None:
    blocks = re.findall(r"^```\w*$(.*?)^```$", text("README.md"), re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"^covey (\w+)", "".join(blocks), re.MULTILINE))
    assert named and named <= set(verbs.list_commands(click.Context(verbs)))


@pytest.mark.parametrize("name", ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))])
def test_links_have_existing_targets(name: str) -> None:
    directory = (ROOT / name).parent
    broken = [link for link in re.findall(r"\]\(([^)#:]+)\)", text(name)) if not (directory / link).exists()]
    assert broken == []


def test_public_names_exist() -> None:
    assert [name for name in covey.__all__ if not hasattr(covey, name)] == []


def test_reference_is_up_to_date() -> None:
    # In a separate interpreter, because click caches the help option of a command at its first parse, which other tests do.
    build = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['pages']()))"
    command = [sys.executable, "-c", build, str(ROOT / "docs/build_reference.py")]
    pages = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    folder = ROOT / "docs/reference"
    stale = [name for name, page in pages.items() if not (folder / name).exists() or (folder / name).read_text() != page]
    assert stale == [], "run: make docs"
    assert {path.name for path in folder.iterdir()} == set(pages)


def commands() -> list[tuple[str, str]]:
    """Return page and command of every line in the documents that begins with covey, without its comment."""
    found = []
    for block in BLOCKS:
        for line in re.findall(r"^covey .+$", block.text, re.MULTILINE) if block.language in ("", "bash") else ():
            command = re.split(r" {2,}| [#>]", line)[0].strip()
            found.append((block.page, re.sub(r"[\[\]]|\.\.\.", "", command)))
    return found


@pytest.mark.parametrize(("name", "line"), commands(), ids=lambda text: text)
def test_command_in_documents_is_valid(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # as in an activated .venv
    words = shlex.split(line)[1:]
    if words[0] == "run":
        parse_command_line(words[1:], {}, cpu_count=2, gpu_count=0)
        return
    command: click.Command = verbs
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None, f"{name}: {line}"
        command = found
    command.make_context(line, words)  # raises if it is invalid


def test_files_named_in_documents_exist() -> None:
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "examples/README.md"]:
        named = re.findall(r"(?<![.\w/])(?:examples|config|deploy|bench|src|tests)/[\w/.-]*\w\.\w+\b", path.read_text())
        assert [file for file in named if not (ROOT / file).exists()] == [], path
        packages = "|".join(package.name for package in (ROOT / "src/covey").iterdir() if package.is_dir())
        inside = re.findall(rf"`((?:{packages})/[\w/]+\.py)`", path.read_text())
        roots = (ROOT / "src/covey", ROOT, path.parent)
        assert [file for file in inside if not any((root / file).exists() for root in roots)] == [], path


def test_tests_named_in_failures_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)`", text("docs/failures.md"))
    assert named and [name for name in named if not (ROOT / "tests/processes" / name).exists()] == []


# A page that names its test in the text.
KNOWN = {"docs/proof.md": "run by tests/processes/test_covey_chaos.py::test_training_under_chaos_is_bitwise_equal"}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_block_names_its_test_or_why_it_has_none(block: Block) -> None:
    """The comments are described in tests/documents.py."""
    if block.language == "console":  # typed by tests/processes/test_walkthrough.py, on every page
        assert block.text.startswith("$ "), "a console block must begin with a command"
    elif block.language == "text":
        assert not re.search(r"^(\$|covey|python|bash|make|kubectl|curl|export) ", block.text, re.MULTILINE)
    else:
        comment = re.fullmatch(r"run by (?P<tests>.+)|not run: .+", block.said or KNOWN.get(block.page, ""))
        assert comment, "add a comment above the block: the test that runs it, or why none does"
        for test in filter(None, (comment["tests"] or "").split(", ")):
            file, _, name = test.partition("::")
            assert f"def {name}(" in text(file), test


def test_documents_have_no_indented_blocks() -> None:
    """Indented blocks would not be tested."""
    for path in PAGES:
        outside = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"^\n    \S.*", outside, re.MULTILINE) == [], path


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=lambda block: f"{block.page}:{block.line}"
)
def test_python_block_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec")
