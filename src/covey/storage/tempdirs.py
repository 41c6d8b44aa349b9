"""Folders that a run makes for itself under the temporary folder, and what becomes of those whose run was killed.

A run removes its folders as it ends. A run that was killed could not: the next one of this user that ends on this host does.
That a folder is in use is known by a lock on a file in it, which the kernel lets go of with the process.
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
    """A folder of this process. It goes with `close`, or with the process unless that is killed."""

    def __init__(self, what: str) -> None:
        try:
            self.name = tempfile.mkdtemp(prefix=f"covey-{what}-")
            made = Path(self.name) / "new"
            lock = os.open(made, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(f"no temporary folder can be made ({error}): set TMPDIR to one that can be written to") from None
        with contextlib.suppress(OSError):  # a file system without locks: then nobody gets this one, and nobody clears up
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(Path(self.name) / LOCK_FILE)  # not before it is locked: who finds it unlocked may remove it
        self._finalizer = weakref.finalize(self, _remove_folder, self.name, lock)

    @property
    def exists(self) -> bool:
        """Not after somebody has cleared the temporary folder."""
        return Path(self.name).exists()

    def close(self) -> None:
        self._finalizer()
        remove_abandoned_folders()


def _remove_folder(name: str, lock: int) -> None:
    shutil.rmtree(name, ignore_errors=True)
    os.close(lock)


def remove_abandoned_folders() -> None:
    """Remove what killed runs of this user have left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"covey-*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):  # another run was faster, or it is in use, or another user's
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == path.parent.lstat().st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)
