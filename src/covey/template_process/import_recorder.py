"""What a first life imports, a later one should find imported: names noted in the child, for the template.

Only what the template had not imported is noted, by a finder that finds nothing. Of these, the installed modules are imported
ahead; the program's own are not, because importing them is running the program.
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

RECORD_IMPORTS_VARIABLE: Final = "COVEY_LEARN"  # the file in which a child notes what it imports
RECORDED_IMPORTS_MAX: Final = 500


class ImportRecorder:
    """A finder that only listens."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        with contextlib.suppress(OSError):  # the folder is gone
            notes = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:  # not kept open: a program that closes all there is would find its own file under this number next
                os.write(notes, name.encode() + b"\n")
            finally:
                os.close(notes)
        return None


def read_recorded_imports(path: Path) -> list[str]:
    """The installed modules among those noted, in the order of their import."""
    if not path.exists():
        return []
    names = list(dict.fromkeys(path.read_text().split()))
    installed = {top: _is_installed(top) for top in {name.partition(".")[0] for name in names}}
    return [name for name in names if installed[name.partition(".")[0]]][:RECORDED_IMPORTS_MAX]


def _is_installed(top: str) -> bool:
    """Part of Python or of an installed package, as opposed to a file of the program."""
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is None or top == "__main__":
        return False
    places = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return spec.origin in ("built-in", "frozen") or str(spec.origin).startswith(places)
