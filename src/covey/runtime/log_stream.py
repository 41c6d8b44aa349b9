"""What a child of an agent prints lies in a file of ours. Where its disk is full, what is printed is lost, not the child.

A program does not expect `print` to fail, and one that trains for days must not end because its log has no room. How much was
lost is said in the log as soon as it takes something again. What a program writes by other means (os.write, C) is its own.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Final, TextIO

DISK_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LogStream(io.FileIO):
    """A file that takes everything, and keeps what there is room for."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lost_bytes = 0  # bytes

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            if self._lost_bytes:
                super().write(
                    b"covey: %d bytes that were printed here are lost: there was no room for them\n" % self._lost_bytes
                )
                self._lost_bytes = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            size = memoryview(data).nbytes
            self._lost_bytes += size
            return size


def install_log_streams() -> None:
    """Let stdout and stderr of this process be such files, unless the program has put something else there."""
    sys.stdout, sys.stderr = _wrap_stream(sys.stdout), _wrap_stream(sys.stderr)


def _wrap_stream(stream: TextIO) -> TextIO:
    raw = getattr(getattr(stream, "buffer", None), "raw", getattr(stream, "buffer", None))
    if type(stream) is not io.TextIOWrapper or type(raw) is not io.FileIO:
        return stream
    stream.flush()
    file = LogStream(raw.fileno())
    if stream.buffer is raw:  # python -u
        return io.TextIOWrapper(file, stream.encoding, stream.errors, write_through=True)
    return io.TextIOWrapper(io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True)  # type: ignore[type-var]
