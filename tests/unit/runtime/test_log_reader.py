"""Pieces of a log: whole lines, bounded, from its end or by a text."""

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


def asked(start: int = 0, find: str = "") -> ReadLog:
    return ReadLog(7, "0", start=start, search_text=find)


def test_whole_lines_and_where_to_go_on(log: str) -> None:
    told = read_log_chunk(log, asked())
    assert (told.request_number, told.lines, told.start, told.next_start) == (7, "one\ntwo Einäugig\nthree\n".encode(), 0, 24)
    assert read_log_chunk(log, asked(told.next_start)).lines == b"", "a line that is not complete yet waits"
    with Path(log).open("ab") as file:
        file.write(b"r\n")
    assert read_log_chunk(log, asked(told.next_start)).lines == b"four\n"


def test_the_end_begins_with_a_whole_line(log: str) -> None:
    told = read_log_chunk(log, asked(-8))
    assert told.lines == b"three\n" or told.lines == b""
    assert read_log_chunk(log, asked(-12)).lines == b"three\n" and read_log_chunk(log, asked(-10_000)).start == 0


def test_a_search_finds_lines_whatever_their_case_and_goes_on(log: str) -> None:
    told = read_log_chunk(log, asked(find="EINÄUGIG"))
    assert told.lines == "two Einäugig\n".encode() and told.next_start == 24


def test_answers_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_bytes(b"x" * (2 * LOG_CHUNK_BYTES_MAX) + b"\n" + b"needle line\n" * (SCAN_MAX // 12))
    seen, start = 0, 0
    while True:
        told = read_log_chunk(str(path), asked(start))
        assert len(told.lines) <= LOG_CHUNK_BYTES_MAX
        seen += len(told.lines)
        if told.next_start == start:
            break
        start = told.next_start
    assert seen == told.size, "nothing is lost on the way"
    found, start = 0, 0
    while start < told.size:
        told = read_log_chunk(str(path), asked(start, "needle"))
        assert len(told.lines) <= LOG_CHUNK_BYTES_MAX and told.next_start > start
        found += told.lines.count(b"needle")
        start = told.next_start
    assert found == SCAN_MAX // 12


def test_a_log_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in read_log_chunk(str(tmp_path / "none.log"), asked()).failure


def test_a_file_that_was_emptied_is_followed_from_its_new_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    tail = LogTail(str(path))
    assert tail.read() == ["one", "two"]
    path.write_text("three\n")
    assert tail.read() == ["three"]
