"""Direct reads of another process's memory on this host: one copy by the kernel, without work for the process that is read.

A process id is meaningless on another host or in another container. `is_expected_process` therefore looks for a random marker
at an address that the other process has sent.
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

MARKER_SIZE: Final = 16  # bytes
BLOCKS_PER_CALL_MAX: Final = 1024  # the kernel's limit (IOV_MAX)
HUGE_PAGE_SIZE: Final = 2 << 20  # bytes; smaller buffers do not benefit from huge pages


class MemoryBlock(msgspec.Struct, frozen=True, array_like=True):
    """A range of `size` bytes in the memory of a process."""

    address: int
    size: int


class MemoryMarker:
    """Random bytes by which a reader recognizes the process. They stay in memory as long as this object exists."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(MARKER_SIZE)
        self._memory = ctypes.create_string_buffer(self.value, MARKER_SIZE)
        self.block = MemoryBlock(ctypes.addressof(self._memory), MARKER_SIZE)


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def allocate_buffer(size: int) -> memoryview:
    """Return memory for a transfer; from `HUGE_PAGE_SIZE` bytes on, request huge pages, because faults of small pages are slow.

    Raise `OSError` if the kernel was built without huge pages or has no memory.
    """
    if size < HUGE_PAGE_SIZE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def is_expected_process(pid: int, marker: MemoryBlock, value: bytes) -> bool:
    """Return whether the local process `pid` has `value` at the marker's address; False if its memory cannot be read."""
    found = bytearray(MARKER_SIZE)
    try:
        read_process_memory(pid, [marker], [memoryview(found)])
    except OSError:  # no such process, or no permission
        return False
    return len(value) == MARKER_SIZE and bytes(found) == value


def read_process_memory(pid: int, blocks: Sequence[MemoryBlock], into: Sequence[memoryview]) -> None:
    """Read each block into the buffer at the same position of `into`, which has the same size.

    Raise `OSError` if the process does not exist, the address is invalid, or access is not allowed.
    """
    local = [MemoryBlock(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes) for view in into]
    pending = [(remote, target) for remote, target in zip(blocks, local, strict=True) if remote.size]
    assert all(remote.size == target.size for remote, target in pending)
    while pending:
        chosen, pending = pending[:BLOCKS_PER_CALL_MAX], pending[BLOCKS_PER_CALL_MAX:]
        pending = _remaining_blocks(chosen, _read_once(pid, chosen)) + pending


def _read_once(pid: int, pairs: list[tuple[MemoryBlock, MemoryBlock]]) -> int:
    """Return the number of bytes read, at least 1; raise `OSError` if none were read."""
    remote, local = ((_IoVec * len(pairs))(*(_IoVec(p.address, p.size) for p in side)) for side in zip(*pairs, strict=True))
    count = int(_libc().process_vm_readv(pid, local, len(pairs), remote, len(pairs), 0))
    if count <= 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return count


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library


def _remaining_blocks(pairs: list[tuple[MemoryBlock, MemoryBlock]], read: int) -> list[tuple[MemoryBlock, MemoryBlock]]:
    """Return the blocks that are left after `read` bytes, because the kernel reads at most 2 GB per call."""
    for index, (remote, local) in enumerate(pairs):
        if read < remote.size:
            left = remote.size - read
            return [(MemoryBlock(remote.address + read, left), MemoryBlock(local.address + read, left)), *pairs[index + 1 :]]
        read -= remote.size
    return []
