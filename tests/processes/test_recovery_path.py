"""A recovery is told in few modules, and docs/architecture.md lists them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from tests.documents import ROOT

CORE_MAX = 8
MODULES_MAX = 25


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recovery_path", ROOT / "docs" / "recovery_path.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recovery_passes_few_modules_and_the_documentation_lists_them() -> None:
    modules = list(load_script().list_recovery_functions())
    section = (ROOT / "docs" / "architecture.md").read_text().split("### A recovery in one module")[1].split("\n## ")[0]
    assert "covey.core.cluster.recovery" in modules
    core = [module for module in modules if module.startswith("covey.core.")]
    assert [module for module in core if f"{Path(*module.split('.')).name}.py" not in section] == []
    assert len(core) <= CORE_MAX and len(modules) <= MODULES_MAX, modules
