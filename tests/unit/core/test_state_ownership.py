"""Every mutable field belongs to one class, and only that class writes it.

In the packages below no code stores to, deletes or mutates an attribute of another object: `x.y = ...`, `del x.y`,
`x.y[...] = ...` and `x.y.append(...)` are allowed only if `x` is `self` or `cls`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import covey

PACKAGES = ("core/federated",)
MUTATORS = frozenset(
    ["append", "add", "discard", "pop", "clear", "remove", "update", "setdefault", "extend", "insert", "popitem", "sort"]
)


def is_foreign(node: ast.AST) -> bool:
    """Whether this is an attribute of another object than `self` or `cls`."""
    return isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def foreign_writes(source: str) -> list[str]:
    """Return the writes to attributes of other objects, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        target: ast.expr | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node if isinstance(node, ast.Attribute) else node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        if target is not None and is_foreign(target):
            found.append(f"line {target.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_code_writes_to_attributes_of_other_objects(package: str) -> None:
    root = Path(covey.__file__).parent / package
    found = [f"{path.relative_to(root)} {write}" for path in root.rglob("*.py") for write in foreign_writes(path.read_text())]
    assert not found


def test_foreign_writes_are_found() -> None:
    source = """
self.mine = other.value
self.mine.append(1)
local.append(1)
local[0] = 1
other.value = 1
other.value += 1
del other.value
other.values[0] = 1
self.other.value = 1
self.other.values.append(1)
"""
    assert [line.partition(":")[0] for line in foreign_writes(source)] == [f"line {number}" for number in range(6, 12)]
