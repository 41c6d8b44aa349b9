"""Description of the uncaught exception that ends a script, and its way to the agent.

The end of a log may not show the exception, because exit handlers, destructors and libraries print after the traceback. The
process therefore writes the description to a file in the agent's directory, named by its pid. Without an agent, a node sends
the description to the scheduler in `Leave`.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from covey.core.types import ERROR_KIND_MAX, ERROR_PLACE_MAX, ERROR_TEXT_MAX, ERROR_TRACE_MAX, Progress, ScriptError
from covey.errors import CoveyError

PART_MAX: Final = 2000  # characters of one frame, or of the exception's text, in the traceback
FILE_MAX: Final = 128 * 1024  # bytes; a description of the largest size fits, whatever its characters
COVEY_PREFIX: Final = str(Path(__file__).parents[1]) + os.sep
INSTALL_FOLDERS: Final = {"site-packages", "dist-packages"}


def describe(
    error: BaseException, trace: TracebackType | None, progress: Progress | None = None, *, loop: bool = False
) -> ScriptError | None:
    """Return the description of an exception that ends the script; None for `SystemExit` and Ctrl-C, which are not errors.

    The traceback of an error of covey is its message alone. `progress` is the script's last report; None: it has not joined a
    cluster. `loop`: the script has a covey.Loop, which reports the steps.
    """
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return None
    text = _exception_text(error)
    if isinstance(error, CoveyError):
        printed = f"covey: {text[:PART_MAX]}"
    else:
        parts = traceback.TracebackException(type(error), error, trace).format()
        printed = "".join(part if len(part) <= PART_MAX else part[:PART_MAX] + "...\n" for part in parts)
    if len(printed) > ERROR_TRACE_MAX:
        printed = "...\n" + printed[-ERROR_TRACE_MAX + 4 :].partition("\n")[2]
    return ScriptError(
        kind=_exception_name(type(error))[:ERROR_KIND_MAX],
        text=text[:ERROR_TEXT_MAX],
        place=replace_surrogates(_script_location(error, trace))[-ERROR_PLACE_MAX:],
        traceback=replace_surrogates(printed),
        step=progress.step if progress is not None else -1,
        completed=progress.steps_completed if progress is not None else 0,
        loop=loop,
    )


def replace_surrogates(text: str) -> str:
    """Return the text with "?" for each surrogate. Surrogates stand for bytes that are not UTF-8, as in file names, and cannot
    be encoded."""
    return text.encode("utf-8", "replace").decode()


def write_error(folder: str | Path, error: ScriptError) -> None:
    """Write the description for the agent, unless a file for this pid exists. Errors are ignored."""
    with contextlib.suppress(OSError), (Path(folder) / _file_name(os.getpid())).open("xb") as file:
        file.write(msgspec.json.encode(error))


def read_error(folder: str | Path, pid: int) -> ScriptError | None:
    """Return the description that process `pid` wrote; None if there is none or it is incomplete."""
    try:
        with (Path(folder) / _file_name(pid)).open("rb") as file:
            return msgspec.json.decode(file.read(FILE_MAX), type=ScriptError)
    except (
        OSError,
        msgspec.MsgspecError,
    ):  # no exception was raised, the disk was full, or the process was killed while writing
        return None


def remove_error(folder: str | Path, pid: int) -> None:
    """Remove the description of process `pid`, because the pid may be reused."""
    with contextlib.suppress(OSError):
        (Path(folder) / _file_name(pid)).unlink(missing_ok=True)


def _file_name(pid: int) -> str:
    return f"error-{pid}.json"


def _exception_text(error: BaseException) -> str:
    try:
        return replace_surrogates(str(error))
    except Exception:  # raised by the class's own __str__
        return "<exception str() failed>"


def _exception_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"


def _script_location(error: BaseException, trace: TracebackType | None) -> str:
    """Return "file:line" of the innermost frame in the script's own code, else of the innermost frame; "" without a frame.

    For a SyntaxError return the place of the wrong syntax.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    own = [(file, line) for file, line in steps if _is_script_code(file)]
    return "{}:{}".format(*(own or steps)[-1]) if steps else ""


def _is_script_code(file: str) -> bool:
    """Return whether a file is the script's own code: not covey's, not of Python's library, not of a package in site-packages
    or dist-packages, and not generated ("<string>")."""
    libraries = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
    return not file.startswith(("<", COVEY_PREFIX, *libraries)) and not INSTALL_FOLDERS.intersection(Path(file).parts)
