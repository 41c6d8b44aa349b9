"""Loads a script or module as `__main__`, as `python` does, with Python's own error messages and exit codes.

For use in a process forked from the template, whose main module is replaced.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn


def exit_with_message(message: str, code: int) -> NoReturn:
    """Write a message to stderr and exit with `code`."""
    sys.stderr.write(message + "\n")
    raise SystemExit(int(code))


def load_script(script: str, source: bytes | None = None) -> tuple[ModuleType, CodeType]:
    """Set main module and `sys.path` as for `python script`, and return the main module and its code.

    The script may be a directory or zip file with a __main__.py. `source` replaces the contents of a script that is a plain
    file. Exits with Python's message if the script cannot be read; raises `SyntaxError` if it cannot be compiled.
    """
    path = str(Path.cwd() / script)
    if (inner_spec := PathFinder.find_spec("__main__", [path])) is not None:
        sys.path.insert(0, path)
        return _main_from_spec(inner_spec)
    try:
        source = Path(path).read_bytes() if source is None else source
    except IsADirectoryError:
        exit_with_message(f"{sys.executable}: can't find '__main__' module in {path!r}", 1)
    except OSError as error:
        exit_with_message(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", 2)
    _prepend_path(str(Path(path).resolve().parent))
    main = _make_main_module(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    return main, compile(source, path, "exec", dont_inherit=True)


def load_module(name: str) -> tuple[ModuleType, CodeType]:
    """Set main module, `sys.path` and `sys.argv[0]` as for `python -m name`, and return the main module and its code.

    The name may be a package with a __main__. Exits with Python's message if the module cannot be found; raises what the
    imports of its parent packages raise, and `SyntaxError` if it cannot be compiled.
    """
    if name.startswith("."):
        exit_with_message(f"{sys.executable}: Relative module names not supported", 1)
    _prepend_path(os.getcwd())  # noqa: PTH109 (sys.path holds strings)
    spec = _find_module_spec(name)
    if spec is None:
        exit_with_message(f"{sys.executable}: No module named {name}", 1)
    if spec.submodule_search_locations is not None:
        spec = _find_module_spec(f"{name}.__main__")
        if spec is None:
            exit_with_message(
                f"{sys.executable}: No module named {name}.__main__; {name!r} is a package and cannot be directly executed",
                1,
            )
    loaded = _main_from_spec(spec)
    sys.argv[0] = str(spec.origin)
    return loaded


def _find_module_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the package exists, and its own code lacks a module
        exit_with_message(
            f"{sys.executable}: Error while finding module specification for {name!r} ({_format_error(error)})", 1
        )
    except ValueError as error:
        exit_with_message(
            f"{sys.executable}: Error while finding module specification for {name!r} ({_format_error(error)})", 1
        )


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _main_from_spec(spec: ModuleSpec) -> tuple[ModuleType, CodeType]:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code else None
    if code is None:
        exit_with_message(f"{sys.executable}: No code object available for {spec.name}", 1)
    main = _make_main_module(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,  # spawned processes of multiprocessing import the module by this
    )
    return main, code


def _make_main_module(**attributes: object) -> ModuleType:
    """Create the child's main module as `__main__` and `__mp_main__`, and return it.

    multiprocessing, imported by the template, has set `__mp_main__` to the template's main module, in which the classes of the
    script would not be found. The template's module is kept, because its code is still on the stack.
    """
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, **attributes)
    sys.modules["__covey_template__"] = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def _prepend_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
