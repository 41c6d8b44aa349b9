"""In `covey.parameter_server` a class writes only its own fields: no function changes an attribute of another object."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.documents import ROOT

PACKAGE = ROOT / "src/covey/parameter_server"
ALLOWED: dict[str, str] = {}  # "module.py: source of the write" -> the reason
COLLECTIONS = "append add appendleft clear discard extend insert pop popitem popleft remove setdefault sort update"
SHARDS = "add_gradients apply_gradient apply_row_gradient apply_step load"
SHARD_SETS = "add_slots apply_until declare detach_slots merge_shards push release_slots unpack"
ROWS = "adopt apply record_generation replace reset_replication_id restore shards_at_step"
MUTATORS = frozenset(f"{COLLECTIONS} {SHARDS} {SHARD_SETS} {ROWS}".split())


def is_foreign(node: ast.AST) -> bool:
    """Return whether a node is an attribute of another object: `x.y` or `self.x.y`, but not `self.x`."""
    return isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def foreign_aliases(function: ast.AST) -> frozenset[str]:
    """Return the local names that a function gives to another object's attributes."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            is_tuple = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if is_tuple else [(target, value)]  # type: ignore[attr-defined]
            names |= {name.id for name, assigned in pairs if isinstance(name, ast.Name) and is_foreign(assigned)}
    return frozenset(names)


def foreign_writes(source: str) -> set[str]:
    """Return stores, deletions and mutating calls on another object's attributes, their items, or local names for them."""
    tree = ast.parse(source)
    found = {ast.unparse(node) for node in ast.walk(tree) if _is_write(node, frozenset())}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            aliases = foreign_aliases(function)
            found |= {ast.unparse(node) for node in ast.walk(function) if _is_write(node, aliases)}
    return found


def _is_write(node: ast.AST, aliases: frozenset[str]) -> bool:
    def is_other(value: ast.AST) -> bool:
        return is_foreign(value) or (isinstance(value, ast.Name) and value.id in aliases)

    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS and is_other(node.func.value)
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and is_other(node.value)
    return isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and is_foreign(node)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_no_module_writes_attributes_of_another_object(path: Path) -> None:
    found = {f"{path.name}: {write}" for write in foreign_writes(path.read_text())}
    assert found == {key for key in ALLOWED if key.startswith(f"{path.name}: ")}


@pytest.mark.parametrize(
    "line",
    [
        "x.y = 1",
        "x.y += 1",
        "del x.y",
        "x.y[0] = 1",
        "self.x.y = 1",
        "self.x.y.pop()",
        "self.rows.own.apply(1)",
        "def f(self):\n own = self.rows.own\n own.apply(1)",
        "def f(self):\n a, own = 1, self.rows.own\n own[0] = 1",
    ],
)
def test_write_to_another_object_is_found(line: str) -> None:
    assert len(foreign_writes(line)) == 1


@pytest.mark.parametrize(
    "line",
    ["self.x = 1", "self.x[0] = 1", "self.rows.apply(1)", "x = y.z", "x[0] = 1", "x.add(1)", "def f(x):\n y = x.z\n y.get(0)"],
)
def test_write_to_own_field_or_local_is_allowed(line: str) -> None:
    assert foreign_writes(line) == set()
