"""Bounded reads of log files: complete lines from a byte offset on, or those of them that contain a text.

The scheduler sends the requests (`LogRequests`), and the agent that has the file replies (`read_log_chunk`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec

from covey.core.messages import LOG_CHUNK_BYTES_MAX, LogChunk, ReadLog
from covey.errors import ExitCode, PeerError
from covey.transport.connection import Connection

SCAN_MAX: Final = 8 << 20  # bytes searched for one reply
REQUESTS_MAX: Final = 32  # pending at the same time
REPLY_TIMEOUT_S: Final = 10.0


class LogRequests:
    """Pending log requests of one scheduler."""

    def __init__(self) -> None:
        # by number: the agent's connection, and the reply
        self._pending_requests: dict[int, tuple[Connection, asyncio.Future[LogChunk]]] = {}
        self._last_number = 0

    async def request_chunk(self, connection: Connection, host: str, request: ReadLog) -> LogChunk:
        """Send a request to the agent on `connection`, with the next request number, and return its reply.

        Raise `PeerError` if `REQUESTS_MAX` requests are pending, if the reply reports a failure, or if none arrives within
        `REPLY_TIMEOUT_S`; the message of the last error names the agent's `host`.
        """
        if len(self._pending_requests) >= REQUESTS_MAX:
            raise PeerError(f"{REQUESTS_MAX} log requests are pending: retry later", ExitCode.REFUSED)
        self._last_number += 1
        number, reply_future = self._last_number, asyncio.get_running_loop().create_future()
        self._pending_requests[number] = (connection, reply_future)
        try:
            connection.send(msgspec.structs.replace(request, request_number=number))
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                reply: LogChunk = await reply_future
        except TimeoutError:
            raise PeerError(f"the agent on {host} did not answer within {REPLY_TIMEOUT_S:g} s", ExitCode.REFUSED) from None
        finally:
            del self._pending_requests[number]
        if reply.failure:
            raise PeerError(reply.failure, ExitCode.REFUSED)
        return reply

    def on_chunk(self, connection: Connection, reply: LogChunk) -> None:
        """Complete the pending request. A reply to a request that is not pending, or that was sent on another connection, is
        ignored."""
        expected, reply_future = self._pending_requests.get(reply.request_number, (None, None))
        if expected is connection and reply_future is not None and not reply_future.done():
            reply_future.set_result(reply)


def read_log_chunk(path: str, request: ReadLog) -> LogChunk:
    """Return the requested chunk of a file, at most `LOG_CHUNK_BYTES_MAX` bytes; an error is in its field `failure`.

    An incomplete last line is left for the next request, unless it is longer than a chunk. A line longer than a chunk is split;
    with a search text it is cut. With a search text, at most `SCAN_MAX` bytes of the file are searched.
    """
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + request.start) if request.start < 0 else min(request.start, size)
            file.seek(start)
            text = file.read(SCAN_MAX if request.search_text else LOG_CHUNK_BYTES_MAX)
    except OSError as error:
        return LogChunk(request.request_number, failure=f"cannot read the log {path}: {error.strerror}")
    if request.start < 0 and start:  # do not begin within a line
        cut = text.find(b"\n") + 1
        start, text = start + cut, text[cut:]
    if len(text) < LOG_CHUNK_BYTES_MAX or b"\n" in text:  # a line longer than a chunk is split
        text = text[: text.rfind(b"\n") + 1]
    if not request.search_text:
        return LogChunk(request.request_number, text, start, start + len(text), size)
    return _select_matching_lines(request, text, start, size)


def _select_matching_lines(request: ReadLog, text: bytes, start: int, size: int) -> LogChunk:
    wanted, matching, room, end = request.search_text.lower(), bytearray(), LOG_CHUNK_BYTES_MAX, start
    for line in text.splitlines(keepends=True):
        if wanted in line.decode("utf-8", "replace").lower():
            shown = line[:LOG_CHUNK_BYTES_MAX]
            if len(shown) > room:
                break
            matching += shown
            room -= len(shown)
        end += len(line)
    return LogChunk(request.request_number, bytes(matching), start, end, size)
