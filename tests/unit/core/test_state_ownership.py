"""In these folders a class writes only its own fields: no function changes an attribute of another object."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.documents import ROOT

SOURCE = ROOT / "src/covey"
FOLDERS = ["core"]  # below src/covey
MUTATORS = frozenset(
    ["append", "add", "discard", "pop", "clear", "remove", "update", "setdefault", "extend", "insert", "popitem", "sort"]
)


def is_foreign(node: ast.AST) -> bool:
    """Return whether a node is an attribute of another object: `x.y` or `self.x.y`, but not `self.x`."""
    return isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def is_foreign_write(node: ast.AST) -> bool:
    """Return whether a node stores to, deletes or calls a mutating method on another object's attribute, or an item of it."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS and is_foreign(node.func.value)
    if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
        return False
    return is_foreign(node if isinstance(node, ast.Attribute) else node.value)


def foreign_writes(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [f"{path.name}:{node.lineno}: {ast.unparse(node)}" for node in nodes if is_foreign_write(node)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_code_writes_attributes_of_another_object(folder: str) -> None:
    paths = sorted((SOURCE / folder).rglob("*.py"))
    assert paths and [write for path in paths for write in foreign_writes(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "x.y = 1",
        "x.y += 1",
        "del x.y",
        "x.y[0] = 1",
        "del x.y[0]",
        "x.y |= {}",
        "x.y.append(1)",
        "self.x.y = 1",
        "self.x.y.pop()",
    ],
)
def test_foreign_write_is_found(line: str) -> None:
    assert any(is_foreign_write(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["self.x = 1", "self.x[0] = 1", "self.x.append(1)", "x = y.z", "x[0] = 1", "x.add(1)", "x.y.get(0)"]
)
def test_write_of_own_field_or_local_is_allowed(line: str) -> None:
    assert not any(is_foreign_write(node) for node in ast.walk(ast.parse(line)))
