"""Public API of `covey`: lazy imports, and the same names for type checkers."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import covey

EXTRA = {"UsageError", "federated", "group"}  # public, but not for `from covey import *`


def type_checking_imports() -> dict[str, str]:
    """Return the names below TYPE_CHECKING with their modules."""
    tree = ast.parse(Path(covey.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(block.body)
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def test_lazy_names_match_type_checking_imports() -> None:
    seen = type_checking_imports()
    assert seen.pop("federated") == "covey"
    assert seen == covey._MODULE_BY_NAME
    assert {*seen, "federated"} == {*covey.__all__, *EXTRA}
    assert covey.__all__ == sorted(covey.__all__)


@pytest.mark.parametrize("name", sorted(covey._MODULE_BY_NAME))
def test_public_name_is_object_of_its_module(name: str) -> None:
    assert getattr(covey, name) is getattr(importlib.import_module(covey._MODULE_BY_NAME[name]), name)


def test_dir_lists_all_names() -> None:
    assert {*covey.__all__, *EXTRA, "__version__"} <= set(dir(covey))


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'covey' has no attribute 'loop'"):
        getattr(covey, "loop")  # noqa: B009 - a type checker would refuse the attribute


def test_import_of_covey_imports_no_other_module() -> None:
    program = "import sys, covey; print([name for name in sys.modules if name.split('.')[0] in ('covey', 'numpy', 'torch')])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert set(ast.literal_eval(printed)) == {"covey", "covey.version"}


def test_script_functions_do_not_import_numpy_or_torch() -> None:
    program = "import sys, covey; covey.init, covey.Loop, covey.Data, covey.Model; print({'numpy', 'torch'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Loop", "covey.training.loop"),
        ("Model", "covey.training.model"),
        ("Embedding", "covey.training.embedding"),
        ("ShardedOptimizer", "covey.training.sharded_optimizer"),
        ("DistributedDataParallel", "covey.training.ddp"),
    ],
)
def test_constructor_function_has_parameters_of_its_class(name: str, module: str) -> None:
    made = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    function = inspect.signature(getattr(covey, name)).parameters
    expected = [(one.name, one.kind, one.default) for one in made.values() if one.name != "group"]
    assert [(one.name, one.kind, one.default) for one in function.values()] == expected
