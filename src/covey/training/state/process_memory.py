"""Memory of another process on this host, read directly: one copy by the kernel, and no work for the process that is read.

A process number means nothing on another host or in another container, so nothing is read before a random mark, which the
other process has told the address of, was found there.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

MARK_SIZE: Final = 16
PIECES_MAX: Final = 1024  # the kernel's limit for one call
HUGE: Final = 2 << 20  # from this size on, large pages pay


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some bytes in the memory of a process."""

    address: int
    size: int


class Mark:
    """What a reader looks for first. Lives as long as the process that is read should be recognised."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(MARK_SIZE)
        self._memory = ctypes.create_string_buffer(self.value, MARK_SIZE)
        self.piece = Piece(ctypes.addressof(self._memory), MARK_SIZE)


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def room(size: int) -> memoryview:
    """Fresh memory to receive into, in large pages where there are such: handing out small ones takes longer than the copy."""
    if size < HUGE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def recognised(pid: int, mark: Piece, value: bytes) -> bool:
    """Whether the process with this number here is the one that speaks to us."""
    found = bytearray(MARK_SIZE)
    try:
        pull(pid, [mark], [memoryview(found)])
    except OSError:  # there is none, or it may not be read
        return False
    return len(value) == MARK_SIZE and bytes(found) == value


def pull(pid: int, pieces: Sequence[Piece], into: Sequence[memoryview]) -> None:
    """Read each of these pieces into memory of its size. Raises `OSError`."""
    here = [Piece(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes) for view in into]
    waiting = [(there, mine) for there, mine in zip(pieces, here, strict=True) if there.size]
    assert all(there.size == mine.size for there, mine in waiting)
    while waiting:
        chosen, waiting = waiting[:PIECES_MAX], waiting[PIECES_MAX:]
        waiting = _rest(chosen, _read(pid, chosen)) + waiting


def _read(pid: int, pairs: list[tuple[Piece, Piece]]) -> int:
    """One call to the kernel; how many bytes it read."""
    theirs, mine = ((_Vector * len(pairs))(*(_Vector(p.address, p.size) for p in side)) for side in zip(*pairs, strict=True))
    count = int(_library().process_vm_readv(pid, mine, len(pairs), theirs, len(pairs), 0))
    if count <= 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return count


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library


def _rest(pairs: list[tuple[Piece, Piece]], read: int) -> list[tuple[Piece, Piece]]:
    """What is left of them: the kernel reads at most 2 GB in one call."""
    for place, (theirs, mine) in enumerate(pairs):
        if read < theirs.size:
            left = theirs.size - read
            return [(Piece(theirs.address + read, left), Piece(mine.address + read, left)), *pairs[place + 1 :]]
        read -= theirs.size
    return []
