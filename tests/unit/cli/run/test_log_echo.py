"""TracebackFilter drops repeated tracebacks of one cause, and no other line."""

from __future__ import annotations

from covey.cli.run.log_echo import TracebackFilter
from covey.core.types import ScriptError

HEAD = "Traceback (most recent call last):"
LINES = [HEAD, '  File "train.py", line 4, in <module>', "    main()", "ValueError: bad"]


def error(lines: list[str], location: str = "train.py:4") -> ScriptError:
    return ScriptError("ValueError", "bad", location, "\n".join(lines) + "\n")


def passed(once: TracebackFilter, lines: list[str]) -> list[str]:
    return [shown for line in lines for shown in once.feed(line)]


def test_traceback_is_printed_once() -> None:
    printed: set[tuple[str, str]] = set()
    once = TracebackFilter(lambda: error(LINES), printed)
    assert passed(once, ["a", *LINES, "b"]) == ["a", *LINES, "b"]
    assert printed == {("ValueError", "train.py:4")}
    assert passed(once, ["c", *LINES, "d"]) == ["c", "d"]
    other = [HEAD, *LINES[1:3], "ValueError: another text"]
    assert passed(TracebackFilter(lambda: error(other), printed), other) == [], (
        "a traceback of the same cause in another log must be dropped"
    )


def test_tracebacks_printed_by_the_script_are_kept() -> None:
    caught = [HEAD, LINES[1], "    retry()", "ValueError: bad"]
    once = TracebackFilter(lambda: error(LINES), {("ValueError", "train.py:4")})
    assert passed(once, [*caught, *caught, HEAD, *caught]) == [*caught, *caught, HEAD, *caught]
    assert passed(TracebackFilter(lambda: None, set()), [*LINES, *LINES]) == [*LINES, *LINES]


def test_traceback_after_partial_traceback_is_recognized() -> None:
    printed = {("ValueError", "train.py:4")}
    assert passed(TracebackFilter(lambda: error(LINES), printed), [*LINES[:2], *LINES, "after"]) == [*LINES[:2], "after"]


def test_lines_of_incomplete_traceback_are_printed_at_flush() -> None:
    once = TracebackFilter(lambda: error(LINES), {("ValueError", "train.py:4")})
    assert passed(once, LINES[:3]) == [] and once.flush() == LINES[:3] and once.flush() == []


def test_syntax_error_is_printed_once() -> None:
    lines = ['  File "train.py", line 1', "    def", "       ^", "SyntaxError: invalid syntax"]
    once = TracebackFilter(lambda: error(lines), set())
    assert passed(once, [*lines, *lines, "after"]) == [*lines, "after"]
