"""File writes that survive a crash.

`write_atomically` writes a temporary file in the same directory, syncs it, renames it to its name and syncs the directory. It
guarantees:

* A reader, also after a crash or a power cut, finds the old content or the new content, never a part. A crash may leave the
  temporary file.
* When it returns, the new content survives a power cut.
* If it raises `OSError`, the file is unchanged. Exception: if the sync of the directory failed, the new content is in place but
  may not survive a power cut.

With `durable=False` nothing is synced: after a power cut the file may have its old content or be empty.

If two processes write the same file, the one that renames last wins. Writers with the same pid (threads of one process, or
processes in different containers) must not write the same file at the same time, because they use the same temporary file. The
other functions are steps of `write_atomically`. All raise `OSError`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

DEFAULT_MODE: Final = 0o666  # reduced by the umask, as with open()


def write_atomically(path: Path, content: bytes, *, mode: int = DEFAULT_MODE, durable: bool = True) -> None:
    """Create or replace a file atomically. The new file gets `mode`, reduced by the umask, and not the mode of the old one."""
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
    """Write a file in place and sync its content. A reader may find a part of it. Call `sync_directory` to make its name
    durable too."""
    _write_file(path, content, mode, durable=True)


def make_durable_directory(folder: Path) -> None:
    """Create a directory and its missing parents, so that they survive a power cut. `folder` may exist, even as a file."""
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
