"""From a script's path or a module's name to a main module and its code, as `python` itself finds them.

What cannot be found ends in the words and with the code that python has for it.
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


def exit_with_message(sentence: str, code: int) -> NoReturn:
    """A sentence into the log, and the end of the child."""
    sys.stderr.write(sentence + "\n")
    raise SystemExit(int(code))


def load_script(script: str, source: bytes | None = None) -> tuple[ModuleType, CodeType]:
    """`python script`, where the script may also be a folder or a zip file with a __main__.py in it. `source`: what was in it
    when that counted."""
    path = str(Path.cwd() / script)
    if (inside := PathFinder.find_spec("__main__", [path])) is not None:
        sys.path.insert(0, path)
        return _main_from_spec(inside)
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
    """`python -m name`, where the name may also be a package with a __main__ in it."""
    if name.startswith("."):
        exit_with_message(f"{sys.executable}: Relative module names not supported", 1)
    _prepend_path(os.getcwd())  # noqa: PTH109 (sys.path holds strings)
    found = _find_module_spec(name)
    if found is None:
        exit_with_message(f"{sys.executable}: No module named {name}", 1)
    if found.submodule_search_locations is not None:
        found = _find_module_spec(f"{name}.__main__")
        if found is None:
            exit_with_message(
                f"{sys.executable}: No module named {name}.__main__; {name!r} is a package and cannot be directly executed",
                1,
            )
    loaded = _main_from_spec(found)
    sys.argv[0] = str(found.origin)
    return loaded


def _find_module_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the package is there, and its own code misses something
        exit_with_message(
            f"{sys.executable}: Error while finding module specification for {name!r} ({_format_error(error)})", 1
        )
    except ValueError as error:
        exit_with_message(
            f"{sys.executable}: Error while finding module specification for {name!r} ({_format_error(error)})", 1
        )


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _main_from_spec(found: ModuleSpec) -> tuple[ModuleType, CodeType]:
    get_code = getattr(found.loader, "get_code", None)
    code = get_code(found.name) if get_code else None
    if code is None:
        exit_with_message(f"{sys.executable}: No code object available for {found.name}", 1)
    main = _make_main_module(
        __file__=found.origin,
        __cached__=found.cached,
        __loader__=found.loader,
        __package__=found.parent,
        __spec__=found,  # by this, multiprocessing's spawned processes import the module again and not a file
    )
    return main, code


def _make_main_module(**attributes: object) -> ModuleType:
    """A main module of the child's own.

    Under both names: multiprocessing, imported by the template, has made `__mp_main__` the template's main module, where the
    classes of the user's script could not be found. The template's is kept, since its code is still on the stack.
    """
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, **attributes)
    sys.modules["__covey_template__"] = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def _prepend_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
