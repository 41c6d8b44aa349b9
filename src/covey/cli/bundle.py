"""`covey bundle`: archive for a bug report with versions, settings, cluster, events, journal and logs.

The archive has at most `LOG_BYTES_MAX` bytes of the end of each log and `BUNDLE_BYTES_MAX` bytes in total, before compression.
The secrets that `_collect_secrets` finds, and bearer tokens, are overwritten; other secrets in logs are not recognized.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

from covey.cli import status
from covey.cli.scheduler_session import fetch_events as ask_story
from covey.cli.scheduler_session import fetch_view as ask_view
from covey.errors import CoveyError, StoreError, UsageError
from covey.runtime.node_runtime import SchedulerAddress
from covey.settings import TABLE, load_settings, printable, settings_table
from covey.storage import running_clusters
from covey.storage.running_clusters import RegistryEntry

LOG_BYTES_MAX: Final = 1 << 20  # of each log, from its end
FILES_MAX: Final = 1000  # log files; further ones are left out without a message
BUNDLE_BYTES_MAX: Final = 64 << 20  # of content, before compression
PACKAGES: Final = (
    "covey",
    "torch",
    "numpy",
    "msgspec",
    "click",
    "rich",
    "starlette",
    "uvicorn",
    "uvloop",
    "cryptography",
    "mindspore",
)
LOG_PATTERNS: Final = ("*.log", "*.err", "*/covey.log")
BEARER_TOKEN: Final = re.compile(rb"(?i)(bearer\s+)([\w.~+/=-]{8,})")


class Archive:
    """A .tar.gz of at most `BUNDLE_BYTES_MAX` bytes of content; `omitted_names` has the files that did not fit.

    The given secrets and bearer tokens are overwritten with asterisks.
    """

    def __init__(self, path: Path, secrets: set[bytes]) -> None:
        self._secrets = secrets
        self._bytes_left = BUNDLE_BYTES_MAX
        self._tar = tarfile.open(path, "w:gz")  # noqa: SIM115
        self.omitted_names: list[str] = []

    def add(self, name: str, content: bytes) -> None:
        if len(content) > self._bytes_left:
            self.omitted_names.append(name)
            return
        self._bytes_left -= len(content)
        entry = tarfile.TarInfo(f"covey-bundle/{name}")
        entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
        self._tar.addfile(entry, io.BytesIO(self._redact_secrets(content)))

    def add_json(self, name: str, content: Any) -> None:
        self.add(name, msgspec.json.format(msgspec.json.encode(content)))

    def close(self) -> None:
        self._tar.close()

    def _redact_secrets(self, content: bytes) -> bytes:
        for secret in self._secrets:
            content = content.replace(secret, b"*" * len(secret))
        return BEARER_TOKEN.sub(lambda found: found[1] + b"*" * len(found[2]), content)


def write_bundle(master: str, log_dir: str, journal: str, output: str) -> tuple[Path, list[str]]:
    """Write the archive; return its path, and messages about parts that could not be read or did not fit.

    `log_dir` and `journal` are directories; "": those of the cluster. An existing `output` is overwritten. Raise UsageError if
    a directory is not readable, if `master` is invalid, or if neither directory is given and no cluster is found. Raise
    StoreError if the archive cannot be written.
    """
    for directory in filter(None, (log_dir, journal)):
        if not os.access(directory, os.R_OK | os.X_OK) or not Path(directory).is_dir():
            raise UsageError(f"{printable(directory)} is not a readable directory: give the one that covey run printed")
    entry, scheduler = _find_cluster_entry(master, needed=bool(master) or not (log_dir or journal))
    path = Path(output or f"covey-bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # logs may contain private data
        os.close(descriptor)
        archive = Archive(path, _collect_secrets(entry))
        archive.add_json("versions.json", _collect_versions())
        archive.add_json(
            "settings.json", [dict(zip(("name", "value", "origin", "what"), r, strict=True)) for r in _load_settings_table()]
        )
        problems = _add_cluster_state(archive, scheduler) if scheduler is not None else []
        for name, found, limit in _list_files(
            log_dir or (entry.log_dir if entry else ""), journal or (entry.journal if entry else "")
        ):
            try:
                archive.add(name, _read_tail(found, limit))
            except (PermissionError, FileNotFoundError) as error:
                problems.append(f"{name}: {error.strerror}")
        archive.close()
    except OSError as error:
        raise StoreError(f"cannot write the bundle {path}: {error.strerror}; choose another --output") from None
    return path, [
        *problems,
        *(f"{name}: the bundle would exceed {BUNDLE_BYTES_MAX >> 20} MB" for name in archive.omitted_names),
    ]


def _find_cluster_entry(master: str, *, needed: bool) -> tuple[RegistryEntry | None, SchedulerAddress | None]:
    """Return the cluster's registry entry (None if it is not registered here) and its scheduler's address.

    If no cluster is found, return (None, None), or raise UsageError if `needed`.
    """
    try:
        scheduler = status.find_cluster(master)
    except UsageError:
        if needed:
            raise
        return None, None
    return next((e for e in running_clusters.running_clusters() if e.address == (master or e.address)), None), scheduler


def _add_cluster_state(archive: Archive, scheduler: SchedulerAddress) -> list[str]:
    try:
        archive.add_json("cluster.json", asyncio.run(ask_view(scheduler)))
        events = asyncio.run(ask_story(scheduler))
        archive.add("story.jsonl", b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    except CoveyError as error:
        return [f"cluster.json and story.jsonl: {error}"]
    return []


def _list_files(log_dir: str, journal: str) -> Iterator[tuple[str, Path, int]]:
    if log_dir:
        found = sorted({path for pattern in LOG_PATTERNS for path in Path(log_dir).glob(pattern) if path.is_file()})
        for path in found[:FILES_MAX]:
            yield f"logs/{path.relative_to(log_dir)}", path, LOG_BYTES_MAX
    for path in [Path(journal) / "scheduler.journal"] if journal else []:
        if path.is_file():
            yield "scheduler.journal", path, BUNDLE_BYTES_MAX


def _read_tail(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return file.read(limit)


def _load_settings_table() -> list[tuple[str, str, str, str]]:
    return settings_table(load_settings(os.environ))


def _collect_versions() -> dict[str, Any]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"python": sys.version, "platform": platform.platform(), "cores": os.cpu_count(), "packages": found}


def _collect_secrets(entry: RegistryEntry | None) -> set[bytes]:
    """Return the secrets of the settings, the content of COVEY_SECRET_FILE, and join secret and REST token of the cluster.

    Without `entry`, include join secrets and tokens of all running clusters of this user on this host.
    """
    settings = load_settings(os.environ).settings
    values = {str(getattr(settings, field)) for field, var in TABLE.items() if var.secret}
    for known in running_clusters.running_clusters() if entry is None else [entry]:
        values |= {known.secret, known.token}
    found = {value.encode(errors="surrogateescape") for value in values if value}
    with contextlib.suppress(OSError):  # the secret in an unreadable file is unknown here
        found.add(Path(settings.secret_file).read_bytes().strip() if settings.secret_file else b"")
    return found - {b""}
