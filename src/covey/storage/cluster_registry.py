"""The clusters this user runs on this host, so that `covey status` finds them without being told where.

One small file per scheduler, readable by its owner only: it holds the secret and the token that let a command in. A file
whose process is gone is removed by whoever reads it.
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
    """How to reach one running cluster."""

    cluster_id: str
    address: str  # HOST:PORT of the scheduler
    pid: int
    created: float  # when that process started: a reused pid is not the same process
    secret: str = ""
    token: str = ""
    manage: str = ""  # HOST:PORT of the REST API
    job: str = ""
    log_dir: str = ""
    journal: str = ""  # the folder of its journal
    tls: str = ""  # the TLS config file, where the cluster uses one


def registry_folder(*, make: bool) -> Path:
    """Where the entries lie: the user's runtime folder, else one of their own under the temporary folder."""
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
    """Write an entry in one move, in the place of those of the schedulers that led this cluster before."""
    for other in running_clusters():
        if other.cluster_id == entry.cluster_id and other.pid != entry.pid:
            _entry_path(other.pid).unlink(missing_ok=True)
    path = _entry_path(entry.pid)
    try:
        write_atomically(path, msgspec.json.encode(entry), mode=0o600, durable=False)  # its process ends with the power
    except OSError as error:
        raise _registry_error(error) from None
    return path


def _registry_error(error: OSError) -> StoreError:
    return StoreError(f"clusters cannot be noted down ({error}): set XDG_RUNTIME_DIR to a folder of yours")


def _entry_path(pid: int) -> Path:
    return registry_folder(make=True) / f"{pid}.json"


def running_clusters() -> list[RegistryEntry]:
    """This user's clusters on this host, oldest first."""
    found: list[RegistryEntry] = []
    for path in registry_folder(make=False).glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            entry = msgspec.json.decode(path.read_bytes(), type=RegistryEntry)
            if process_start_time(entry.pid) == entry.created:
                found.append(entry)
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda entry: entry.created)


def process_start_time(pid: int) -> float:
    """When a process started; 0 if there is none."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.create_time() if process.status() != psutil.STATUS_ZOMBIE else 0.0
    return 0.0
