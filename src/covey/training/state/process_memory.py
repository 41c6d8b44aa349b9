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

MARKER_SIZE: Final = 16
BLOCKS_PER_CALL_MAX: Final = 1024  # the kernel's limit for one call
HUGE_PAGE_SIZE: Final = 2 << 20  # from this size on, large pages pay


class MemoryBlock(msgspec.Struct, frozen=True, array_like=True):
    """Some bytes in the memory of a process."""

    address: int
    size: int


class MemoryMarker:
    """What a reader looks for first. Lives as long as the process that is read should be recognised."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(MARKER_SIZE)
        self._memory = ctypes.create_string_buffer(self.value, MARKER_SIZE)
        self.block = MemoryBlock(ctypes.addressof(self._memory), MARKER_SIZE)


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def allocate_buffer(size: int) -> memoryview:
    """Fresh memory to receive into, in large pages where there are such: handing out small ones takes longer than the copy."""
    if size < HUGE_PAGE_SIZE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def is_expected_process(pid: int, mark: MemoryBlock, value: bytes) -> bool:
    """Whether the process with this number here is the one that speaks to us."""
    found = bytearray(MARKER_SIZE)
    try:
        read_process_memory(pid, [mark], [memoryview(found)])
    except OSError:  # there is none, or it may not be read
        return False
    return len(value) == MARKER_SIZE and bytes(found) == value


def read_process_memory(pid: int, pieces: Sequence[MemoryBlock], into: Sequence[memoryview]) -> None:
    """Read each of these pieces into memory of its size. Raises `OSError`."""
    here = [MemoryBlock(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes) for view in into]
    waiting = [(there, mine) for there, mine in zip(pieces, here, strict=True) if there.size]
    assert all(there.size == mine.size for there, mine in waiting)
    while waiting:
        chosen, waiting = waiting[:BLOCKS_PER_CALL_MAX], waiting[BLOCKS_PER_CALL_MAX:]
        waiting = _remaining_blocks(chosen, _read_once(pid, chosen)) + waiting


def _read_once(pid: int, pairs: list[tuple[MemoryBlock, MemoryBlock]]) -> int:
    """One call to the kernel; how many bytes it read."""
    theirs, mine = ((_IoVec * len(pairs))(*(_IoVec(p.address, p.size) for p in side)) for side in zip(*pairs, strict=True))
    count = int(_libc().process_vm_readv(pid, mine, len(pairs), theirs, len(pairs), 0))
    if count <= 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return count


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library


def _remaining_blocks(pairs: list[tuple[MemoryBlock, MemoryBlock]], read: int) -> list[tuple[MemoryBlock, MemoryBlock]]:
    """What is left of them: the kernel reads at most 2 GB in one call."""
    for place, (theirs, mine) in enumerate(pairs):
        if read < theirs.size:
            left = theirs.size - read
            return [(MemoryBlock(theirs.address + read, left), MemoryBlock(mine.address + read, left)), *pairs[place + 1 :]]
        read -= theirs.size
    return []
