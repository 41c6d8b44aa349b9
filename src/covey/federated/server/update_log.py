"""Log of updates, one file per round, from which a restarted server restores its part of the round.

A record is appended before its update is acknowledged. It is then in the kernel's page cache, so it survives the process. With
durability `disk`, the log is also synced before the acknowledgement; with `none`, there is no log. A server adopts another
server's log by renaming it into its own directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from covey.core.federated.messages import RoundTotals
from covey.errors import StoreError
from covey.federated.model_codec import Floats, view_bytes

DURABILITIES: Final = ("none", "process", "host", "disk")
_RECORD_HEADER: Final = struct.Struct("<4sIII9q")  # magic, length of the id, bytes of values, checksum, weight, metrics
_RECORD_MAGIC: Final = b"CVU4"
_LOG_NAME: Final = re.compile(r"updates-(\d+)(?:-from-([\w.-]+))?\.log")


class Update(msgspec.Struct, frozen=True):
    """An update without its values."""

    device: str  # id; for asynchronous strategies `async_update_key`
    weight: int
    told: RoundTotals = RoundTotals()  # its loss and accuracy, and those of an evaluation; count and size are 0


class LogFile(NamedTuple):
    """An update log in a server's directory."""

    path: Path
    round: int
    instance_id: str  # of the server that wrote it, if it was adopted; else ""


def pack_record(update: Update, values: Floats, *, checksum: bool) -> list[bytes | memoryview]:
    """Return an update as the buffers of one log record, for writev; without `checksum` its checksum is 0."""
    data = view_bytes(values)
    name = update.device.encode()
    crc = zlib.crc32(data, zlib.crc32(name)) if checksum else 0
    head = _RECORD_HEADER.pack(
        _RECORD_MAGIC, len(name), len(data), crc, update.weight, *msgspec.structs.astuple(update.told)[2:]
    )
    return [head + name, data]


def unpack_records(content: memoryview) -> Iterator[tuple[Update, Floats, int]]:
    """Yield the records of a log, and the offset where each ends.

    Stop at the first record that is incomplete or damaged. Records without a checksum are not checked for damaged values.
    """
    start = 0
    while len(content) - start >= _RECORD_HEADER.size:
        magic, name_size, data_size, crc, weight, *told = _RECORD_HEADER.unpack_from(content, start)
        data_start = start + _RECORD_HEADER.size + name_size
        end = data_start + data_size
        if magic != _RECORD_MAGIC or end > len(content):
            return
        name, data = content[start + _RECORD_HEADER.size : data_start], content[data_start:end]
        if crc and zlib.crc32(data, zlib.crc32(name)) != crc:
            return
        values = np.frombuffer(data if data_start % 4 == 0 else bytes(data), np.float32)
        yield Update(bytes(name).decode(), weight, RoundTotals(0, 0, *told)), values, end
        start = end


class UpdateLog:
    """Log that a server writes for one round. The constructor raises `StoreError` if the file cannot be opened."""

    def __init__(self, directory: Path, round_number: int, *, checksum: bool) -> None:
        self.path = directory / f"updates-{round_number}.log"
        self.round = round_number
        self._checksum = checksum
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise _make_store_error(self.path, error) from None

    def append(self, update: Update, values: Floats) -> None:
        """Append an update. Raise `StoreError` if that fails."""
        self.write(pack_record(update, values, checksum=self._checksum))

    def write(self, pieces: list[bytes | memoryview]) -> None:
        """Append a packed record. If that fails, try to remove its written bytes, and raise `StoreError`."""
        size = sum(len(piece) for piece in pieces)
        try:
            written = os.writev(self._fd, pieces)
            if written != size:
                rest = b"".join(bytes(piece) for piece in pieces)[written:]
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise _make_store_error(self.path, error) from None
        self._size += size

    def sync(self) -> None:
        """Flush the log to disk (fdatasync), so that earlier records survive a power cut. Raise `OSError` if that fails."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class LogDirectory:
    """A directory of update logs, with a file lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def acquire(self) -> bool:
        """Create the directory if it is missing, and lock it; return False if it is locked already.

        Raise `StoreError` if directory or lock file cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _make_store_error(self.path, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock_fd = lock
        return True

    def release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def list_logs(self) -> list[LogFile]:
        """Return all logs, including adopted ones, sorted by round and name; [] if the directory does not exist."""
        found = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = _LOG_NAME.fullmatch(path.name)
            if match:
                found.append(LogFile(path, int(match[1]), match[2] or ""))
        return sorted(found, key=lambda log: (log.round, log.path.name))

    def remove_logs_before(self, before: int) -> None:
        """Remove the logs of rounds before `before`."""
        for log in self.list_logs():
            if log.round < before:
                log.path.unlink(missing_ok=True)

    def adopt_logs_from(self, other: Path, instance_id: str, oldest: int, newest: int) -> list[LogFile]:
        """Move another server's logs of rounds `oldest` to `newest` from the directory `other` into this one; return them.

        A log's new name contains the instance id of the process that wrote it; `instance_id` is that of the other server. An
        empty log of round `newest` is added if no log of that round has `instance_id`. Raise `BlockingIOError` if `other` is
        locked, `StoreError` if its lock file cannot be created, and another `OSError` if a log cannot be moved.
        """
        theirs = LogDirectory(other)
        if not theirs.acquire():
            raise BlockingIOError(f"{other} is locked by a running process")
        try:
            adopted = []
            for log in theirs.list_logs():
                if oldest <= log.round <= newest:
                    mine = self.path / f"updates-{log.round}-from-{log.instance_id or instance_id}.log"
                    log.path.rename(mine)
                    adopted.append(LogFile(mine, log.round, log.instance_id or instance_id))
            marker = self.path / f"updates-{newest}-from-{instance_id}.log"
            if not marker.exists():  # an empty log records the adoption for a restart
                marker.touch()
                adopted.append(LogFile(marker, newest, instance_id))
            return adopted
        finally:
            theirs.release()


def map_file(path: Path) -> memoryview:
    """Return a file's bytes, mapped into memory. Raise `StoreError` if it cannot be opened or mapped."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"")
    except OSError as error:
        raise _make_store_error(path, error) from None


def read_log(path: Path) -> Iterator[tuple[Update, Floats]]:
    """Yield the records of a log up to the first incomplete or damaged one, and then truncate the file there.

    Raise `StoreError` if the file cannot be opened, and `OSError` if it cannot be truncated.
    """
    content, end = map_file(path), 0
    for update, values, end in unpack_records(content):  # noqa: B007
        yield update, values
    if end < len(content):
        os.truncate(path, end)


def _make_store_error(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be used for updates ({error.strerror}): free the disk or make it writable")
