"""Description of a script's uncaught exception: contents, limits and file."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from covey.core.messages import ChildExited
from covey.core.types import ERROR_TEXT_MAX, ERROR_TRACE_MAX, Failure, Role, ScriptError
from covey.errors import UsageError
from covey.runtime import exception_record
from covey.runtime.failure_report import describe_failure


def describe_raised(source: str, path: str = "/project/train.py") -> ScriptError:
    """Return the description of the exception that this source raises."""
    try:
        exec(compile(source, path, "exec"), {"__name__": "__main__"})
    except BaseException as error:
        assert error.__traceback__ is not None
        description = exception_record.describe(error, error.__traceback__.tb_next)
        assert description is not None
        return description
    raise AssertionError("nothing was raised")


def test_description_names_exception_place_and_traceback() -> None:
    description = describe_raised("def f(x):\n    return 1 / x\n\nf(0)\n")
    assert (description.kind, description.text, description.place) == (
        "ZeroDivisionError",
        "division by zero",
        "/project/train.py:2",
    )
    assert description.traceback.startswith("Traceback (most recent call last):\n")
    assert description.traceback.endswith("\nZeroDivisionError: division by zero\n")


def test_place_is_the_innermost_frame_of_the_scripts_own_code() -> None:
    assert describe_raised("import json\n\njson.loads('{')\n").place == "/project/train.py:3"
    assert describe_raised("import json\n\njson.loads('{')\n").kind == "json.decoder.JSONDecodeError"
    installed = "/somewhere/lib/python3/site-packages/tool.py"
    assert describe_raised("1 / 0", installed).place == f"{installed}:1", (
        "expected the innermost frame, because none is the script's own"
    )


def test_place_of_syntax_error_is_the_invalid_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("x = 1\ndef f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert describe_raised("import broken_module\n").place == f"{tmp_path}/broken_module.py:2"
    assert "broken_module" not in sys.modules


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "raise KeyboardInterrupt"])
def test_exit_and_interrupt_are_not_described(source: str) -> None:
    with pytest.raises(AssertionError):
        describe_raised(source)


def test_error_of_covey_is_described_by_its_message_alone() -> None:
    description = exception_record.describe(UsageError("--n 0 is invalid: expected 1 or more"), None)
    assert description is not None and description.traceback == "covey: --n 0 is invalid: expected 1 or more"
    large = exception_record.describe(UsageError("begin" + "x" * 1_000_000), None)
    assert large is not None and large.traceback.startswith("covey: begin")


def test_large_exception_keeps_its_kind_frames_and_beginning() -> None:
    description = describe_raised("raise ValueError('begin' + 'x' * 1_000_000)\n")
    assert len(description.text) == ERROR_TEXT_MAX and description.text.startswith("begin")
    assert 'File "/project/train.py", line 1' in description.traceback and "ValueError: begin" in description.traceback
    assert len(description.traceback) <= ERROR_TRACE_MAX


def test_deep_traceback_keeps_its_end() -> None:
    calls = "".join(f"def f{n}():\n    return f{n + 1}()\n" for n in range(300))
    description = describe_raised(calls + "def f300():\n    raise ValueError('deepest')\n\nf0()\n")
    assert description.traceback.startswith("...\n") and description.traceback.endswith("ValueError: deepest\n")
    assert ERROR_TRACE_MAX / 2 < len(description.traceback) <= ERROR_TRACE_MAX


def test_exceptions_that_cannot_be_printed_are_described() -> None:
    odd = describe_raised("raise FileNotFoundError('caf\\udce9')\n")
    assert odd.text == "caf?" and msgspec.msgpack.decode(msgspec.msgpack.encode(odd), type=ScriptError) == odd
    bad = describe_raised("class Bad(Exception):\n    def __str__(self):\n        return 1 / 0\n\nraise Bad\n")
    assert (bad.kind, bad.text) == ("Bad", "<exception str() failed>")


def test_first_description_of_a_process_is_kept_until_removed(tmp_path: Path) -> None:
    first, second = describe_raised("raise ValueError('first')"), describe_raised("raise ValueError('second')")
    exception_record.write_error(tmp_path, first)
    exception_record.write_error(tmp_path, second)
    assert exception_record.read_error(tmp_path, os.getpid()) == first
    exception_record.remove_error(tmp_path, os.getpid())
    assert exception_record.read_error(tmp_path, os.getpid()) is None and not list(tmp_path.iterdir())
    exception_record.write_error(tmp_path / "absent", first)


@pytest.mark.parametrize("content", ["", '{"kind": "ValueError"', json.dumps(dict.fromkeys(("kind", "text"), "x"))])
def test_incomplete_description_is_read_as_none(tmp_path: Path, content: str) -> None:
    exception_record.write_error(tmp_path, describe_raised("1 / 0"))
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert exception_record.read_error(tmp_path, os.getpid()) is None


def test_report_shows_the_exception_before_the_end_of_the_log() -> None:
    failure = Failure(Role.WORKER, "1", 1, "box", 1, "exit code 1", ["printed later"], log="worker_1.log")
    assert describe_failure(failure)[1:] == ["its last lines of worker_1.log:", "  | printed later"]
    shown = describe_failure(msgspec.structs.replace(failure, error=describe_raised("1 / 0")))
    assert shown[1] == "its exception (its log is worker_1.log):"
    assert shown[-1] == "  | ZeroDivisionError: division by zero" and "  | printed later" not in shown


def test_child_exited_without_error_field_is_decoded() -> None:
    """An agent of an earlier version does not send the field."""
    bare = msgspec.msgpack.encode({"type": "ChildExited", "node_id": "1", "incarnation": 1, "code": 1})
    assert msgspec.msgpack.decode(bare, type=ChildExited) == ChildExited("1", 1, 1)
