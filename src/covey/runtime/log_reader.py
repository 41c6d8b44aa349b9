"""A piece of a log: whole lines from a byte on, or those of them that have a text. Bounded, whatever the file holds.

The scheduler asks, the agent that keeps the file answers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec

from covey.core.messages import LOG_CHUNK_BYTES_MAX, LogChunk, ReadLog
from covey.errors import ExitCode, PeerError
from covey.transport.connection import Connection

SCAN_MAX: Final = 8 << 20  # bytes looked through for one answer
REQUESTS_MAX: Final = 32  # at once
REPLY_TIMEOUT_S: Final = 10.0


class LogRequests:
    """Those of one scheduler that are under way."""

    def __init__(self) -> None:
        self._pending_requests: dict[int, tuple[Connection, asyncio.Future[LogChunk]]] = {}  # whom, and for the answer
        self._last_number = 0

    async def request_chunk(self, link: Connection, host: str, question: ReadLog) -> LogChunk:
        """The answer of the agent on a host; the question's number is given here. Raises `PeerError` where there is none."""
        if len(self._pending_requests) >= REQUESTS_MAX:
            raise PeerError(f"{REQUESTS_MAX} questions about logs are under way: ask again", ExitCode.REFUSED)
        self._last_number += 1
        number, told = self._last_number, asyncio.get_running_loop().create_future()
        self._pending_requests[number] = (link, told)
        try:
            link.send(msgspec.structs.replace(question, request_number=number))
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                answer: LogChunk = await told
        except TimeoutError:
            raise PeerError(f"the agent on {host} did not answer within {REPLY_TIMEOUT_S:g} s", ExitCode.REFUSED) from None
        finally:
            del self._pending_requests[number]
        if answer.failure:
            raise PeerError(answer.failure, ExitCode.REFUSED)
        return answer

    def on_chunk(self, link: Connection, answer: LogChunk) -> None:
        """What an agent says; who was not asked is not believed."""
        asked, waiting = self._pending_requests.get(answer.request_number, (None, None))
        if asked is link and waiting is not None and not waiting.done():
            waiting.set_result(answer)


def read_log_chunk(path: str, asked: ReadLog) -> LogChunk:
    """What `asked` wants of this file. A line that is not complete yet is left for the next question."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + asked.start) if asked.start < 0 else min(asked.start, size)
            file.seek(start)
            text = file.read(SCAN_MAX if asked.search_text else LOG_CHUNK_BYTES_MAX)
    except OSError as error:
        return LogChunk(asked.request_number, failure=f"its log {path} cannot be read: {error.strerror}")
    if asked.start < 0 and start:  # not in the middle of a line
        cut = text.find(b"\n") + 1
        start, text = start + cut, text[cut:]
    if len(text) < LOG_CHUNK_BYTES_MAX or b"\n" in text:  # a longer line is cut where it must be
        text = text[: text.rfind(b"\n") + 1]
    if not asked.search_text:
        return LogChunk(asked.request_number, text, start, start + len(text), size)
    return _select_matching_lines(asked, text, start, size)


def _select_matching_lines(asked: ReadLog, text: bytes, start: int, size: int) -> LogChunk:
    wanted, found, room, end = asked.search_text.lower(), bytearray(), LOG_CHUNK_BYTES_MAX, start
    for line in text.splitlines(keepends=True):
        if wanted in line.decode("utf-8", "replace").lower():
            kept = line[:LOG_CHUNK_BYTES_MAX]
            if len(kept) > room:
                break
            found += kept
            room -= len(kept)
        end += len(line)
    return LogChunk(asked.request_number, bytes(found), start, end, size)
