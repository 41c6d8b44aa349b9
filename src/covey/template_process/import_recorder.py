"""Recording of the modules that a child imports, so that the template can import them for later children.

A finder that finds nothing records the name of each module that is not imported yet. The template imports only those of Python
and of installed packages, because an import of the program's own modules would run the program.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

RECORD_IMPORTS_VARIABLE: Final = "COVEY_LEARN"  # file to which a child appends the names of its imports
RECORDED_IMPORTS_MAX: Final = 500  # module names that are used


class ImportRecorder:
    """A finder for `sys.meta_path` that appends each requested module name to the file `path` and finds nothing."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        with contextlib.suppress(OSError):  # the directory was removed
            record_fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:  # not kept open: after a program closed all descriptors, this number could be one of its own files
                os.write(record_fd, name.encode() + b"\n")
            finally:
                os.close(record_fd)
        return None


def read_recorded_imports(path: Path) -> list[str]:
    """Return the recorded modules that belong to Python or to an installed package, in the order of import; at most
    `RECORDED_IMPORTS_MAX`. Return [] if the file does not exist."""
    if not path.exists():
        return []
    names = list(dict.fromkeys(path.read_text().split()))
    installed = {top: _is_installed(top) for top in {name.partition(".")[0] for name in names}}
    return [name for name in names if installed[name.partition(".")[0]]][:RECORDED_IMPORTS_MAX]


def _is_installed(top: str) -> bool:
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is None or top == "__main__":
        return False
    library_paths = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return spec.origin in ("built-in", "frozen") or str(spec.origin).startswith(library_paths)
