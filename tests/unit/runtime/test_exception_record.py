"""The description of a script's uncaught exception: what it contains, its limits, and its file."""

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


def raised(source: str, path: str = "/project/train.py") -> ScriptError:
    """The description of what this source raises."""
    try:
        exec(compile(source, path, "exec"), {"__name__": "__main__"})
    except BaseException as error:
        assert error.__traceback__ is not None
        found = exception_record.describe(error, error.__traceback__.tb_next)
        assert found is not None
        return found
    raise AssertionError("nothing was raised")


def test_description_names_exception_place_and_traceback() -> None:
    found = raised("def f(x):\n    return 1 / x\n\nf(0)\n")
    assert (found.kind, found.text, found.place) == ("ZeroDivisionError", "division by zero", "/project/train.py:2")
    assert found.traceback.startswith("Traceback (most recent call last):\n")
    assert found.traceback.endswith("\nZeroDivisionError: division by zero\n")


def test_place_is_the_innermost_frame_of_the_scripts_own_code() -> None:
    assert raised("import json\n\njson.loads('{')\n").place == "/project/train.py:3"
    assert raised("import json\n\njson.loads('{')\n").kind == "json.decoder.JSONDecodeError"
    installed = "/somewhere/lib/python3/site-packages/tool.py"
    assert raised("1 / 0", installed).place == f"{installed}:1", "the innermost of all, if none is the script's own"


def test_place_of_a_syntax_error_is_the_line_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("x = 1\ndef f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert raised("import broken_module\n").place == f"{tmp_path}/broken_module.py:2"
    assert "broken_module" not in sys.modules


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "raise KeyboardInterrupt"])
def test_exit_and_interrupt_are_not_described(source: str) -> None:
    with pytest.raises(AssertionError):
        raised(source)


def test_error_of_covey_is_described_in_one_sentence() -> None:
    found = exception_record.describe(UsageError("--n 0 is invalid: expected 1 or more"), None)
    assert found is not None and found.traceback == "covey: --n 0 is invalid: expected 1 or more"
    large = exception_record.describe(UsageError("begin" + "x" * 1_000_000), None)
    assert large is not None and large.traceback.startswith("covey: begin")


def test_large_exception_keeps_its_kind_frames_and_beginning() -> None:
    found = raised("raise ValueError('begin' + 'x' * 1_000_000)\n")
    assert len(found.text) == ERROR_TEXT_MAX and found.text.startswith("begin")
    assert 'File "/project/train.py", line 1' in found.traceback and "ValueError: begin" in found.traceback
    assert len(found.traceback) <= ERROR_TRACE_MAX


def test_deep_traceback_keeps_its_end() -> None:
    calls = "".join(f"def f{n}():\n    return f{n + 1}()\n" for n in range(300))
    found = raised(calls + "def f300():\n    raise ValueError('deepest')\n\nf0()\n")
    assert found.traceback.startswith("...\n") and found.traceback.endswith("ValueError: deepest\n")
    assert ERROR_TRACE_MAX / 2 < len(found.traceback) <= ERROR_TRACE_MAX


def test_exceptions_that_cannot_be_printed_are_described() -> None:
    odd = raised("raise FileNotFoundError('caf\\udce9')\n")
    assert odd.text == "caf?" and msgspec.msgpack.decode(msgspec.msgpack.encode(odd), type=ScriptError) == odd
    bad = raised("class Bad(Exception):\n    def __str__(self):\n        return 1 / 0\n\nraise Bad\n")
    assert (bad.kind, bad.text) == ("Bad", "<exception str() failed>")


def test_description_reaches_the_agent_once(tmp_path: Path) -> None:
    first, second = raised("raise ValueError('first')"), raised("raise ValueError('second')")
    exception_record.write_error(tmp_path, first)
    exception_record.write_error(tmp_path, second)
    assert exception_record.read_error(tmp_path, os.getpid()) == first
    exception_record.remove_error(tmp_path, os.getpid())
    assert exception_record.read_error(tmp_path, os.getpid()) is None and not list(tmp_path.iterdir())
    exception_record.write_error(tmp_path / "absent", first)


@pytest.mark.parametrize("content", ["", '{"kind": "ValueError"', json.dumps(dict.fromkeys(("kind", "text"), "x"))])
def test_half_a_description_is_none(tmp_path: Path, content: str) -> None:
    exception_record.write_error(tmp_path, raised("1 / 0"))
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert exception_record.read_error(tmp_path, os.getpid()) is None


def test_report_shows_the_exception_before_the_end_of_the_log() -> None:
    failure = Failure(Role.WORKER, "1", 1, "box", 1, "exit code 1", ["printed later"], log="worker_1.log")
    assert describe_failure(failure)[1:] == ["its last lines of worker_1.log:", "  | printed later"]
    shown = describe_failure(msgspec.structs.replace(failure, error=raised("1 / 0")))
    assert shown[1] == "its exception (its log is worker_1.log):"
    assert shown[-1] == "  | ZeroDivisionError: division by zero" and "  | printed later" not in shown


def test_message_without_the_field_is_read() -> None:
    """An agent of an earlier version sends none."""
    bare = msgspec.msgpack.encode({"type": "ChildExited", "node_id": "1", "incarnation": 1, "code": 1})
    assert msgspec.msgpack.decode(bare, type=ChildExited) == ChildExited("1", 1, 1)
