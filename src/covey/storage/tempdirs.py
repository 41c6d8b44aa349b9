"""Temporary directories of `covey run` and of agents, and the removal of those that killed processes have left behind.

A lock on a file in a directory shows that the directory is in use; the kernel releases the lock when the process exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from covey.errors import StoreError

LOCK_FILE: Final = "in-use"


class TempDirectory:
    """A new directory `covey-WHAT-...` in the temporary directory, removed by `close`, when this object is freed, or at normal
    process exit. The constructor raises `StoreError` if the directory cannot be created."""

    def __init__(self, what: str) -> None:
        try:
            self.name = tempfile.mkdtemp(prefix=f"covey-{what}-")
            unlocked_path = Path(self.name) / "new"
            lock = os.open(unlocked_path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(f"cannot create a temporary directory ({error}): set TMPDIR to a writable directory") from None
        # On a file system without locks the directory is not removed if this process is killed.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked_path.rename(Path(self.name) / LOCK_FILE)  # after locking, because another run may remove an unlocked directory
        self._finalizer = weakref.finalize(self, _remove_folder, self.name, lock)

    @property
    def exists(self) -> bool:
        """Whether the directory exists; a cleaner of temporary files may have removed it."""
        return Path(self.name).exists()

    def close(self) -> None:
        """Remove this directory and those that killed processes have left behind."""
        self._finalizer()
        remove_abandoned_folders()


def _remove_folder(name: str, lock: int) -> None:
    shutil.rmtree(name, ignore_errors=True)
    os.close(lock)


def remove_abandoned_folders() -> None:
    """Remove the directories that killed processes of this user have left behind; skip those that cannot be removed."""
    for path in Path(tempfile.gettempdir()).glob(f"covey-*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):  # removed by another run, in use, or another user's
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == path.parent.lstat().st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)
