"""The Dockerfile: each stage that installs covey has copied every file that its wheel is built from."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest
from tests.documents import ROOT

STAGES = ("operator", "training")


class Copy(NamedTuple):
    sources: list[str]
    target: str


def copies(text: str) -> dict[str, tuple[list[Copy], list[Copy]]]:
    """Return for each stage of a Dockerfile the files copied before it installs covey, and all copied files.

    Only the instructions that ours uses are understood: FROM IMAGE AS NAME, and COPY without flags below one WORKDIR.
    """
    stages: dict[str, tuple[list[Copy], list[Copy]]] = {}
    installed: list[Copy] = []
    copied: list[Copy] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            assert name, line
            installed, copied = [], list(stages[base][1]) if base in stages else []
            stages[name] = (installed, copied)
        elif word == "COPY":
            assert "--" not in rest and "[" not in rest, f"unsupported instruction: {line}"
            *sources, target = rest.split()
            copied.append(Copy(sources, target))
        elif word == "RUN" and re.search(r"pip install .*?(?<= )['\"]?\.(\[|['\"\s]|$)", rest):
            installed[:] = copied
        else:
            assert word in ("", "#", "WORKDIR", "RUN", "USER", "ENTRYPOINT", "CMD", "ENV"), f"unsupported instruction: {line}"
    return stages


def context() -> list[str]:
    """Return the files of the build context: tracked files (all files without git) that .dockerignore does not exclude."""
    git = shutil.which("git")
    listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True) if git else None
    if listed is not None and listed.returncode == 0 and listed.stdout:
        files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    else:
        files = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    excluded = [line for line in (ROOT / ".dockerignore").read_text().split() if not line.startswith("#")]
    return [name for name in files if not any(ignored(name, pattern) for pattern in excluded)]


def ignored(name: str, pattern: str) -> bool:
    assert not pattern.startswith("!"), f"unsupported pattern: {pattern}"
    parents = [PurePosixPath(name), *PurePosixPath(name).parents]
    anywhere = pattern.removeprefix("**/")
    return any(
        fnmatch.fnmatch(str(path), pattern) or (anywhere != pattern and fnmatch.fnmatch(path.name, anywhere))
        for path in parents
    )


def carry(copied: list[Copy], folder: Path) -> None:
    """Copy files like a build, only from `context`."""
    files = context()
    for copy in copied:
        for source in copy.sources:
            taken = [name for name in files if name == source or name.startswith(f"{source}/")]
            assert taken, f"COPY {source}: no such file in the context"
            for name in taken:
                into = folder / copy.target / (Path(name).name if name == source else Path(name).relative_to(source))
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, into)


@pytest.mark.parametrize("stage", STAGES)
def test_stage_copies_all_files_of_the_wheel(tmp_path: Path, stage: str) -> None:
    installed, _ = copies((ROOT / "Dockerfile").read_text())[stage]
    assert installed, "the stage must install covey"
    carry(installed, tmp_path / "covey")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=tmp_path / "covey", capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    ours = {name.removeprefix("src/") for name in context() if name.startswith("src/covey/")}
    assert not ours - names
    assert {"covey/federated/simulation/digits.npz", "covey/management/web/index.html", "covey/management/web/app.js"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_training_image_contains_imports_of_examples(tmp_path: Path) -> None:
    _, copied = copies((ROOT / "Dockerfile").read_text())["training"]
    carry(copied, tmp_path)
    found = subprocess.run([sys.executable, "-c", "import digits; digits.load('train')"], cwd=tmp_path / "examples")
    assert found.returncode == 0


def test_dockerignore_patterns() -> None:
    assert ignored("src/covey/__pycache__/world.pyc", "**/__pycache__") and ignored(".venv/bin/python", ".venv")
    assert not ignored("src/covey/script_api.py", "**/__pycache__") and not ignored("src/.venv.py", ".venv")


def test_copies_before_and_after_installation_are_separated() -> None:
    text = "FROM x AS one\nCOPY a b ./\nFROM one AS two\nRUN pip install -c c '.[k8s]'\nCOPY d e/\nFROM y AS three\nCOPY f f\n"
    first, later, other = Copy(["a", "b"], "./"), Copy(["d"], "e/"), Copy(["f"], "f")
    assert copies(text) == {"one": ([], [first]), "two": ([first], [first, later]), "three": ([], [other])}
