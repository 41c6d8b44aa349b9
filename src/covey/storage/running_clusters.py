"""Registry of the user's running clusters on this host, in which commands such as `covey status` find them.

There is one small file per scheduler. Its mode is 600, because it contains the join secret and the REST token.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec
import psutil

from covey.atomic_file import write_atomically
from covey.errors import StoreError


class RegistryEntry(msgspec.Struct, frozen=True):
    """A running cluster: its scheduler's process, addresses, credentials and directories."""

    cluster_id: str
    address: str  # HOST:PORT of the scheduler
    pid: int  # of the scheduler
    created: float  # start time of the process (`process_start_time`), to detect a reused pid
    secret: str = ""  # join secret; empty: none is required
    token: str = ""  # of the REST API
    manage: str = ""  # HOST:PORT of the REST API; empty: there is none
    job: str = ""
    log_dir: str = ""  # empty: unknown
    journal: str = ""  # directory of the journal; empty: there is none
    tls: str = ""  # TLS config file; empty: no TLS


def registry_folder(*, make: bool) -> Path:
    """Return the directory of the entries: `covey` in XDG_RUNTIME_DIR if that is a directory, else covey-UID in the temporary
    directory. Without `make` it may not exist. Raises `StoreError` if it cannot be created or belongs to another user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    try:
        path = Path(base) / "covey" if base and Path(base).is_dir() else Path(tempfile.gettempdir()) / f"covey-{os.getuid()}"
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid if make or path.exists() else os.getuid()
    except OSError as error:
        raise _registry_error(error) from None
    if owner != os.getuid():
        raise StoreError(f"{path} belongs to another user: remove it, or set XDG_RUNTIME_DIR")
    return path


def register_cluster(entry: RegistryEntry) -> Path:
    """Remove the entries of other schedulers with the same cluster id, write `entry` atomically and return its path.

    Raises `StoreError` if the directory is not usable or the entry cannot be written.
    """
    for other in running_clusters():
        if other.cluster_id == entry.cluster_id and other.pid != entry.pid:
            _entry_path(other.pid).unlink(missing_ok=True)
    path = _entry_path(entry.pid)
    try:
        write_atomically(path, msgspec.json.encode(entry), mode=0o600, durable=False)  # useless after a power cut anyway
    except OSError as error:
        raise _registry_error(error) from None
    return path


def _registry_error(error: OSError) -> StoreError:
    return StoreError(f"cannot write the cluster registry ({error}): set XDG_RUNTIME_DIR to a writable directory")


def _entry_path(pid: int) -> Path:
    return registry_folder(make=True) / f"{pid}.json"


def running_clusters() -> list[RegistryEntry]:
    """Return this user's running clusters on this host, ordered by the start time of their schedulers.

    Entries of exited schedulers are removed, unreadable ones skipped. Raises `StoreError` as `registry_folder`.
    """
    entries: list[RegistryEntry] = []
    for path in registry_folder(make=False).glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            entry = msgspec.json.decode(path.read_bytes(), type=RegistryEntry)
            if process_start_time(entry.pid) == entry.created:
                entries.append(entry)
            else:
                path.unlink(missing_ok=True)
    return sorted(entries, key=lambda entry: entry.created)


def process_start_time(pid: int) -> float:
    """Return the start time of a process in seconds since 1970; 0 if the process has exited, is a zombie or cannot be
    inspected."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.create_time() if process.status() != psutil.STATUS_ZOMBIE else 0.0
    return 0.0
