"""Standard output of an agent's child that survives a full disk.

The output goes to a log file. If its disk is full, the output is dropped and `print` does not fail, because a long training
must not end for lack of log space. When the disk has room again, the next write is preceded by a line with the number of
dropped bytes. Output by other means (os.write, C) is not covered.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Final, TextIO

DISK_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # also a quota or a limit of the file's size


class LogStream(io.FileIO):
    """A file that drops bytes while the disk is full instead of raising an error. Other errors are raised."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lost_bytes = 0

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            if self._lost_bytes:
                super().write(b"covey: %d bytes of output were lost here: the disk was full\n" % self._lost_bytes)
                self._lost_bytes = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            size = memoryview(data).nbytes
            self._lost_bytes += size
            return size


def install_log_streams() -> None:
    """Let stdout and stderr of this process write to `LogStream`s, line-buffered unless Python runs unbuffered. A stream that
    the program has replaced is left alone."""
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
