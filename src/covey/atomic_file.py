"""File writes that survive a crash.

`write_atomically` writes a temporary file in the same folder, syncs it, renames it to its name and syncs the folder. It
guarantees:

* A reader, also after a crash or a power cut, finds the former content or the new one, never a part.
* When it returns, the new content survives a power cut. With `durable=False` it syncs nothing: a power cut may then lose the
  new content or leave an empty file, a crash of the process may not.
* If it raises, the file is as it was, and the temporary file is removed.

It does not guarantee an order between writers: of two that write the same file, the one that renames last wins. The other
functions are the steps of it, for files that a library writes, or that several names depend on. All raise `OSError`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

DEFAULT_MODE: Final = 0o666  # as open(): what the umask leaves of it


def write_atomically(path: Path, content: bytes, *, mode: int = DEFAULT_MODE, durable: bool = True) -> None:
    """Replace a file as a whole; `mode` is that of the new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.unlink(missing_ok=True)  # of a former process with this pid: its mode may be another
        _write_file(temporary, content, mode, durable=durable)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def replace_durably(temporary: Path, path: Path) -> None:
    """Sync a complete file, rename it to `path`, and sync the folder."""
    _sync(temporary, os.O_RDONLY)
    temporary.rename(path)
    sync_directory(path.parent)


def write_synced(path: Path, content: bytes, *, mode: int = DEFAULT_MODE) -> None:
    """Write a file in place and sync it. Its name survives a power cut only after `sync_directory`."""
    _write_file(path, content, mode, durable=True)


def make_durable_directory(folder: Path) -> None:
    """Create a folder and the missing ones above it, so that they survive a power cut. An existing folder is no error."""
    if not folder.parent.is_dir():
        make_durable_directory(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    sync_directory(folder.parent)  # also if it exists: the process that made it may not have synced it yet


def sync_directory(folder: Path) -> None:
    """Make the names in a folder durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _write_file(path: Path, content: bytes, mode: int, *, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
