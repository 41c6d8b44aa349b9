"""Durable and atomic file writes. All functions raise `OSError` if they fail.

`write_atomically` writes a temporary file in the directory of the file, syncs it, renames it to `path` and syncs the directory:

* A reader, also after a crash or a power cut, finds the old content or the new content, never a part. A crash may leave the
  temporary file.
* When `write_atomically` returns, the new content survives a power cut.
* If `write_atomically` raises `OSError`, the file is unchanged. Exception: if the sync of the directory failed, the new content
  is in place but may not survive a power cut.

With `durable=False` nothing is synced, so the file may be damaged after a power cut.

Writers with the same pid (threads of one process, or processes in different containers) must not write the same file at the
same time, because they use the same temporary file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

DEFAULT_MODE: Final = 0o666  # reduced by the umask, as with open()


def write_atomically(path: Path, content: bytes, *, mode: int = DEFAULT_MODE, durable: bool = True) -> None:
    """Create or replace a file atomically. Its mode is `mode`, reduced by the umask, even if the old file had another mode."""
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
    """Sync the file `temporary`, rename it to `path`, and sync the directory of `path`."""
    _sync(temporary, os.O_RDONLY)
    temporary.rename(path)
    sync_directory(path.parent)


def write_synced(path: Path, content: bytes, *, mode: int = DEFAULT_MODE) -> None:
    """Write a file in place, not atomically, and sync its content. Call `sync_directory` to make a new name durable too."""
    _write_file(path, content, mode, durable=True)


def make_durable_directory(folder: Path) -> None:
    """Create a directory and its missing parents, so that they survive a power cut. An existing `folder` is accepted, even if
    it is a file."""
    if not folder.parent.is_dir():
        make_durable_directory(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    sync_directory(folder.parent)  # also if it exists, because its creator may not have synced it yet


def sync_directory(folder: Path) -> None:
    """Sync a directory, so that the names in it survive a power cut."""
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
