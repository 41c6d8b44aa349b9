"""Chunks of a log: complete lines, bounded, from an offset, from the end or by a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.cli.run.display import LogTail
from covey.core.messages import LOG_CHUNK_BYTES_MAX, ReadLog
from covey.runtime.log_reader import SCAN_MAX, read_log_chunk


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "worker_0.log"
    path.write_bytes(b"one\ntwo Ein\xc3\xa4ugig\nthree\nfou")
    return str(path)


def request(start: int = 0, find: str = "") -> ReadLog:
    return ReadLog(7, "0", start=start, search_text=find)


def test_chunk_has_complete_lines_and_next_offset(log: str) -> None:
    chunk = read_log_chunk(log, request())
    assert (chunk.request_number, chunk.lines, chunk.start, chunk.next_start) == (
        7,
        "one\ntwo Einäugig\nthree\n".encode(),
        0,
        24,
    )
    assert read_log_chunk(log, request(chunk.next_start)).lines == b"", "an incomplete line must be left for the next request"
    with Path(log).open("ab") as file:
        file.write(b"r\n")
    assert read_log_chunk(log, request(chunk.next_start)).lines == b"four\n"


def test_negative_start_begins_at_a_line(log: str) -> None:
    chunk = read_log_chunk(log, request(-8))
    assert chunk.lines == b"three\n" or chunk.lines == b""
    assert read_log_chunk(log, request(-12)).lines == b"three\n" and read_log_chunk(log, request(-10_000)).start == 0


def test_search_ignores_case_and_returns_next_offset(log: str) -> None:
    chunk = read_log_chunk(log, request(find="EINÄUGIG"))
    assert chunk.lines == "two Einäugig\n".encode() and chunk.next_start == 24


def test_chunks_are_bounded_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_bytes(b"x" * (2 * LOG_CHUNK_BYTES_MAX) + b"\n" + b"needle line\n" * (SCAN_MAX // 12))
    seen, start = 0, 0
    while True:
        chunk = read_log_chunk(str(path), request(start))
        assert len(chunk.lines) <= LOG_CHUNK_BYTES_MAX
        seen += len(chunk.lines)
        if chunk.next_start == start:
            break
        start = chunk.next_start
    assert seen == chunk.size, "the chunks must cover the whole file"
    found, start = 0, 0
    while start < chunk.size:
        chunk = read_log_chunk(str(path), request(start, "needle"))
        assert len(chunk.lines) <= LOG_CHUNK_BYTES_MAX and chunk.next_start > start
        found += chunk.lines.count(b"needle")
        start = chunk.next_start
    assert found == SCAN_MAX // 12


def test_missing_log_is_reported_as_failure(tmp_path: Path) -> None:
    assert "none.log: No such file" in read_log_chunk(str(tmp_path / "none.log"), request()).failure


def test_log_tail_restarts_at_beginning_of_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    tail = LogTail(str(path))
    assert tail.read() == ["one", "two"]
    path.write_text("three\n")
    assert tail.read() == ["three"]
