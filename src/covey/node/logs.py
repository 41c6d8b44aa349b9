"""A piece of a log: whole lines from a byte on, or those of them that have a text. Bounded, whatever the file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from covey.core.messages import LOG_MAX, LogAsked, LogTold

SCAN_MAX: Final = 8 << 20  # bytes looked through for one answer


def piece(path: str, asked: LogAsked) -> LogTold:
    """What `asked` wants of this file. A line that is not complete yet is left for the next question."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + asked.start) if asked.start < 0 else min(asked.start, size)
            file.seek(start)
            text = file.read(SCAN_MAX if asked.find else LOG_MAX)
    except OSError as error:
        return LogTold(asked.number, failure=f"its log {path} cannot be read: {error.strerror}")
    if asked.start < 0 and start:  # not in the middle of a line
        cut = text.find(b"\n") + 1
        start, text = start + cut, text[cut:]
    if len(text) < LOG_MAX or b"\n" in text:  # a longer line is cut where it must be
        text = text[: text.rfind(b"\n") + 1]
    if not asked.find:
        return LogTold(asked.number, text, start, start + len(text), size)
    return _found(asked, text, start, size)


def _found(asked: LogAsked, text: bytes, start: int, size: int) -> LogTold:
    wanted, found, room, end = asked.find.lower(), bytearray(), LOG_MAX, start
    for line in text.splitlines(keepends=True):
        if wanted in line.decode("utf-8", "replace").lower():
            kept = line[:LOG_MAX]
            if len(kept) > room:
                break
            found += kept
            room -= len(kept)
        end += len(line)
    return LogTold(asked.number, bytes(found), start, end, size)
