"""Import paths of 0.1 forward to the new modules with a warning; covey itself does not use them."""

from __future__ import annotations

import ast
import importlib
import sys

import pytest
from tests.documents import ROOT
from tests.snapshots.collect import FORWARDED, Imports


@pytest.mark.parametrize("old", FORWARDED, ids=lambda old: old.module)
def test_import_of_old_path_warns(old: Imports) -> None:
    sys.modules.pop(old.module, None)
    with pytest.warns(DeprecationWarning, match=rf"{old.module} is deprecated: import covey\.") as warned:
        module = importlib.import_module(old.module)
    assert [name for name in old.names or module.__all__ if not hasattr(module, name)] == []
    assert warned[0].filename != module.__file__, "the warning must name the importing line"


def test_covey_does_not_import_old_paths() -> None:
    former = {old.module for old in FORWARDED}
    found = []
    for path in (ROOT / "src/covey").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path}: {name}" for name in names if name in former]
    assert found == []
