"""Documents, manifests, build files, docstrings, comments and strings name only modules and names that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.documents import ROOT
from tests.snapshots.collect import FORWARDED

SOURCE = ROOT / "src"
DOTTED = re.compile(r"(?<![\w.@/-])covey((?:\.[A-Za-z_]\w*)+)")
FOLDERS = "|".join(sorted(path.name for path in (SOURCE / "covey").iterdir() if path.is_dir() and path.name != "__pycache__"))
FILE = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[\w/]+\.py)\b")
OTHERS = {  # names that look like modules but are not
    ".__file__",
    ".console",  # a logger
    ".io",  # Kubernetes labels and annotations
    ".conflist",  # a file of a container network
    ".json",  # a file with a Grafana dashboard
    ".federated.STRATEGY",  # a template in a test
}
HISTORY = {"CHANGELOG.md"}  # entries use the names of their version
TEXTS = {".md", ".py", ".toml", ".yaml", ".yml", ".sh", ".js", ".html", ""}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    skipped = (ROOT / "bench/results", ROOT / "tests/traces/record", ROOT / "tests/snapshots")
    return [
        path
        for path in paths
        if path.is_file() and path.suffix in TEXTS and path.name not in HISTORY and not any(s in path.parents for s in skipped)
    ]


def module_file(names: list[str]) -> Path | None:
    folder = SOURCE.joinpath("covey", *names)
    return next((path for path in (folder / "__init__.py", folder.with_suffix(".py")) if path.exists()), None)


def missing(dotted: str) -> bool:
    """Whether no prefix of a dotted name is a module that has the next part of the name."""
    names = dotted.strip(".").split(".")
    for count in range(len(names), -1, -1):
        if file := module_file(names[:count]):
            rest = names[count:]
            return bool(rest) and not re.search(rf"\b{rest[0]}\b", file.read_text())
    return True


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "docs", "examples", "deploy", "config", "."])
def test_named_modules_exist(folder: str) -> None:
    top = ROOT / folder
    paths = [path for path in tracked() if (path.parent == top if folder == "." else top in path.parents)]
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            names = [match[1] for match in DOTTED.finditer(line) if match[1] not in OTHERS]
            found += [f"{path.relative_to(ROOT)}:{number}: covey{name}" for name in names if missing(name)]
            files = [name for name in FILE.findall(line) if not (SOURCE / "covey" / name).exists()]
            found += [f"{path.relative_to(ROOT)}:{number}: {name}" for name in files if not (path.parent / name).exists()]
    assert paths
    assert not found, "\n".join(found)


def test_old_module_paths_are_named_only_at_their_definition() -> None:
    old = re.compile("|".join(rf"(?<![\w.]){re.escape(one.module)}\b" for one in FORWARDED))
    allowed = {ROOT / name for name in ("tests/snapshots/collect.py", "docs/compatibility.md", "pyproject.toml")}
    allowed |= {file for one in FORWARDED if (file := module_file(one.module.split(".")[1:]))}
    named = [str(path.relative_to(ROOT)) for path in tracked() if path not in allowed and old.search(path.read_text())]
    assert named == []
