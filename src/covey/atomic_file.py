"""File writes that survive a crash.

`write_atomically` writes a temporary file in the same directory, syncs it, renames it to its name and syncs the directory. It
guarantees:

* A reader, also after a crash or a power cut, finds the old content or the new content, never a part.
* When it returns, the new content survives a power cut. With `durable=False` it syncs nothing: a power cut may then lose the
  new content or leave an empty file, a crash of the process may not.
* If it raises, the file is unchanged and the temporary file is removed.

It does not guarantee an order between writers: of two processes that write the same file, the one that renames last wins. The
other functions are its steps, for files that a library writes, or that several names depend on. All raise `OSError`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

DEFAULT_MODE: Final = 0o666  # reduced by the umask, as with open()


def write_atomically(path: Path, content: bytes, *, mode: int = DEFAULT_MODE, durable: bool = True) -> None:
    """Replace the content of a file atomically; `mode` is the mode of the new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.unlink(missing_ok=True)  # left by an earlier process with this pid, maybe with another mode
        _write_file(temporary, content, mode, durable=durable)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def replace_durably(temporary: Path, path: Path) -> None:
    """Sync a complete file, rename it to `path`, and sync the directory."""
    _sync(temporary, os.O_RDONLY)
    temporary.rename(path)
    sync_directory(path.parent)


def write_synced(path: Path, content: bytes, *, mode: int = DEFAULT_MODE) -> None:
    """Write a file in place and sync it. Its name survives a power cut only after `sync_directory`."""
    _write_file(path, content, mode, durable=True)


def make_durable_directory(folder: Path) -> None:
    """Create a directory and its missing parents, so that they survive a power cut. An existing one is accepted."""
    if not folder.parent.is_dir():
        make_durable_directory(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    sync_directory(folder.parent)  # also if it exists, because its creator may not have synced it yet


def sync_directory(folder: Path) -> None:
    """Make the names in a directory durable."""
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
