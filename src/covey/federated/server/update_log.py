"""The log of updates: what a server must not forget between a device's acknowledgement and the end of the round.

One file per round and server. A record is appended with one system call and is then the kernel's: it survives the process
(durability `process`). With `disk` it is also synced before the acknowledgement, many at a time. A record that a death cut
short is the last one, and nobody was told that it counts. A log changes hands by being renamed into another server's folder:
it is in one folder at any time.
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
from covey.federated.model_codec import Floats, raw

DURABILITIES: Final = ("none", "process", "host", "disk")
_HEAD: Final = struct.Struct("<4sIII9q")  # magic, length of the id, bytes of values, checksum, weight, what the device told
_MAGIC: Final = b"CVU4"
_NAME: Final = re.compile(r"updates-(\d+)(?:-from-([\w.-]+))?\.log")


class Update(msgspec.Struct, frozen=True):
    """One device's contribution without its values."""

    device: str
    weight: int
    told: RoundTotals = RoundTotals()  # its loss and accuracy, and those of an evaluation; count and size stay 0


class Logged(NamedTuple):
    """A log found in a folder."""

    path: Path
    round: int
    life: str  # whose it was, if it was adopted


def pack(update: Update, values: Floats, *, checksum: bool) -> list[bytes | memoryview]:
    """A record, in pieces for one writev."""
    data = raw(values)
    name = update.device.encode()
    crc = zlib.crc32(data, zlib.crc32(name)) if checksum else 0
    head = _HEAD.pack(_MAGIC, len(name), len(data), crc, update.weight, *msgspec.structs.astuple(update.told)[2:])
    return [head + name, data]


def unpack(content: memoryview) -> Iterator[tuple[Update, Floats, int]]:
    """The whole records of a log and where each ends; a record cut short, or damaged, ends it."""
    start = 0
    while len(content) - start >= _HEAD.size:
        magic, name_size, data_size, crc, weight, *told = _HEAD.unpack_from(content, start)
        data_start = start + _HEAD.size + name_size
        end = data_start + data_size
        if magic != _MAGIC or end > len(content):
            return
        name, data = content[start + _HEAD.size : data_start], content[data_start:end]
        if crc and zlib.crc32(data, zlib.crc32(name)) != crc:
            return
        values = np.frombuffer(data if data_start % 4 == 0 else bytes(data), np.float32)
        yield Update(bytes(name).decode(), weight, RoundTotals(0, 0, *told)), values, end
        start = end


class UpdateLog:
    """The log a server writes for one round."""

    def __init__(self, folder: Path, round_number: int, *, checksum: bool) -> None:
        self.path = folder / f"updates-{round_number}.log"
        self.round = round_number
        self._checksum = checksum
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            raise _unusable(self.path, error) from None

    def append(self, update: Update, values: Floats) -> None:
        """Hand a record to the kernel. Raises `StoreError`; the log is then as it was."""
        self.write(pack(update, values, checksum=self._checksum))

    def write(self, pieces: list[bytes | memoryview]) -> None:
        """The same with a record that is packed already."""
        whole = sum(len(piece) for piece in pieces)
        try:
            written = os.writev(self._file, pieces)
            if written != whole:
                rest = b"".join(bytes(piece) for piece in pieces)[written:]
                while rest:
                    rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise _unusable(self.path, error) from None
        self._size += whole

    def sync(self) -> None:
        """Until this returns, the disk may forget."""
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)


class Folder:
    """A server's folder: the lock that says it lives, and its logs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def acquire(self) -> bool:
        """Whether nobody else holds this folder; from now on we do. The kernel lets go when the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self.path, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def logs(self) -> list[Logged]:
        """Every log in here, adopted ones included, oldest round first."""
        found = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match:
                found.append(Logged(path, int(match[1]), match[2] or ""))
        return sorted(found, key=lambda log: (log.round, log.path.name))

    def forget(self, before: int) -> None:
        """Remove the logs of rounds that are done."""
        for log in self.logs():
            if log.round < before:
                log.path.unlink(missing_ok=True)

    def take_from(self, other: Path, life: str, oldest: int, newest: int) -> list[Logged]:
        """Move another server's logs of some rounds in here. Raises `BlockingIOError` while that server lives."""
        theirs = Folder(other)
        if not theirs.acquire():
            raise BlockingIOError(f"{other} is held by a process that lives")
        try:
            taken = []
            for log in theirs.logs():
                if oldest <= log.round <= newest:
                    mine = self.path / f"updates-{log.round}-from-{log.life or life}.log"
                    log.path.rename(mine)
                    taken.append(Logged(mine, log.round, log.life or life))
            marker = self.path / f"updates-{newest}-from-{life}.log"
            if not marker.exists():  # its log was empty: that too must be known to whoever reads this folder
                marker.touch()
                taken.append(Logged(marker, newest, life))
            return taken
        finally:
            theirs.release()


def mapped(path: Path) -> memoryview:
    """A log's bytes: the kernel's, so that a long one takes no memory. Raises `StoreError`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"")
    except OSError as error:
        raise _unusable(path, error) from None


def read(path: Path) -> Iterator[tuple[Update, Floats]]:
    """The records of a log; what a death cut short is cut off."""
    content, end = mapped(path), 0
    for update, values, end in unpack(content):  # noqa: B007
        yield update, values
    if end < len(content):
        os.truncate(path, end)


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be used for updates ({error.strerror}): free the disk or make it writable")
