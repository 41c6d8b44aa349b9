"""Names, fields and numbers that users rely on are those of the snapshots: docs/compatibility.md."""

from __future__ import annotations

import difflib

import pytest
from tests.snapshots.collect import DOCUMENTED, FOLDER, documented_imports, snapshots


@pytest.fixture(scope="module")
def collected() -> dict[str, str]:
    return snapshots()


def test_snapshots_are_up_to_date(collected: dict[str, str]) -> None:
    differing: list[str] = []
    for name, text in collected.items():
        path = FOLDER / name
        before = path.read_text() if path.exists() else ""
        differing += difflib.unified_diff(before.splitlines(), text.splitlines(), name, f"{name} (present code)", lineterm="")
    assert not differing, "\n".join([*differing, "If this is intended: make snapshots, and commit the difference."])


def test_no_snapshot_is_left_over(collected: dict[str, str]) -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == set(collected)


def test_every_documented_import_is_in_a_snapshot(collected: dict[str, str]) -> None:
    """A submodule counts as the names of it that are used."""
    lines = collected["api.txt"].splitlines()
    forwarded = {module for module, *_ in DOCUMENTED}
    missing = [
        f"{module}.{name}"
        for module, name in documented_imports()
        if not any(line.startswith((f"{module}.{name}(", f"{module}.{name}:")) for line in lines)
        and not any(one.startswith(f"{module}.") and f"{one}.{name}(" in collected["api.txt"] for one in forwarded)
    ]
    assert not missing, f"add to DOCUMENTED in tests/snapshots/collect.py: {', '.join(sorted(missing))}"


def test_snapshots_are_sorted_lines_without_paths(collected: dict[str, str]) -> None:
    for name, text in collected.items():
        lines = text.splitlines()
        assert lines and lines == sorted(set(lines)), name
        assert " object at 0x" not in text and str(FOLDER.parents[1]) not in text, name
