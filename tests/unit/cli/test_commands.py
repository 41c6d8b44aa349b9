"""Commands of `covey`: examples, error messages, --json, node selection, completion."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from tests.http.serving import example_node, example_view

from covey.cli import main as command
from covey.cli.common import read_blocker
from covey.cli.completion import SHELLS, completion_script
from covey.cli.kill import find_node
from covey.cli.kubernetes import SubmitOptions, build_msjob
from covey.cli.main import verbs
from covey.cli.run.command import prepare_log_dir
from covey.cli.run.display import LiveDisplay
from covey.cli.run.plan import RunPlan
from covey.cli.status import format_node_lines, print_cluster_table
from covey.core.types import Role
from covey.errors import ExitCode, UsageError
from covey.runtime.node_runtime import SchedulerAddress

PRINTS_NO_JSON = {"run", "completion", "federated up", "operator run"}  # they run, or print a shell script


def walk_commands(group: click.Group = verbs, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from walk_commands(found, f"{path}{name} ")
        else:
            yield f"{path}{name}", found


COMMANDS = dict(walk_commands())


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "run"])
def test_examples_in_help_are_valid_commands(name: str) -> None:
    lines = [line.strip() for line in (COMMANDS[name].epilog or "").splitlines()[2:]]
    assert lines, f"covey {name} --help has no example"
    for line in lines:
        words = shlex.split(line, comments=False)
        start = next((at for at, word in enumerate(words) if word == "covey"), -1)
        if start < 0:  # inside $( )
            assert f"covey {name}" in line
            continue
        typed = words[start + 1 : words.index(">") if ">" in words else None]
        assert typed[: len(name.split())] == name.split(), line
        COMMANDS[name].make_context(name, typed[len(name.split()) :])  # raises if it is invalid


def test_every_printing_command_has_json() -> None:
    without = {name for name, command in COMMANDS.items() if not any("--json" in param.opts for param in command.params)}
    assert without == PRINTS_NO_JSON


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("statsu", "covey: No such command 'statsu'. Did you mean 'status'?\n"),
        ("status --what", "covey: No such option '--what'.\n"),
        ("logs two", "covey: Invalid value for '[RANK]': 'two' is not a valid integer.\n"),
        ("kill", "covey: Missing argument 'RANK|NODE'.\n"),
        ("scale", "covey: give --workers N or --servers N\n"),
        ("scale --workers 2 --servers 2", "covey: --workers and --servers cannot be combined: scale one of them first\n"),
        ("chaos --rate ²/s", "covey: --rate '²/s' is invalid: expected a rate such as 1/3s, 20/m or 2/s\n"),
        ("submit t.py --image i --processes 0", "covey: Invalid value for '--processes': 0 is not in the range x>=1.\n"),
        ("operator run --console 70000", "covey: Invalid value for '--console': 70000 is not in the range -1<=x<=65535.\n"),
        (
            "operator run --lease-duration nan",
            "covey: Invalid value for '--lease-duration': 'nan' is not a valid integer range.\n",
        ),
        ("bundle --log-dir absent", "covey: absent is not a readable directory: give the one that covey run printed\n"),
        ("federated upp", "covey: No such command 'upp'. Did you mean 'up'?\n"),
        ("federated simulate --noise -1", "covey: --noise -1.0 is invalid: expected a number, 0 or more\n"),
    ],
)
def test_usage_error_is_one_line_with_exit_code_10(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["covey", *words.split()])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert (ended.value.code, capsys.readouterr().err) == (10, message)


def test_read_blocker_of_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    os.mkfifo(tmp_path / "pipe")
    found = {name: read_blocker(tmp_path / name) for name in ("train.py", "absent.py", "x" * 300, "pipe", ".")}
    not_regular = "read (not a regular file)"
    assert [*found.values()] == ["", "found", "read (File name too long)", not_regular, not_regular]


@pytest.mark.parametrize(("content", "why"), [(b"\0\xff", "cannot be read as a script"), (b"", "is empty")])
def test_submit_refuses_unreadable_or_empty_local_script(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"{why}") as refused:
        build_msjob(SubmitOptions(str(path), (), "", 1, 1, "image", "", 0))
    assert refused.value.exit_code == ExitCode.BAD_SCRIPT


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            OSError(errno.EMFILE, "Too many open files", "a"),
            41,
            "[Errno 24] Too many open files: 'a': raise the limit of open files",
        ),
        (OSError(errno.EADDRINUSE, "Address already in use"), 11, "[Errno 98] Address already in use"),
        (RuntimeError("can't start new thread"), 41, "can't start new thread: raise the limit of processes or memory"),
        (MemoryError(), 41, "out of memory: raise the limit of processes or memory"),
    ],
)
def test_system_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, message: str
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("covey.cli.status.print_settings", refuse)
    monkeypatch.setattr("sys.argv", ["covey", "env"])
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # keep the output of the tests
    with pytest.raises(SystemExit) as ended:
        command.main()
    printed = capsys.readouterr().err
    assert ended.value.code == code and printed.startswith(f"covey: system error: {message}") and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "log_dir", "error"),
    [
        (os.fsdecode(b"\xff"), "", "is not UTF-8: choose another with --log-dir"),
        ("here", "circle", "cannot create the log directory circle: Too many levels of symbolic links"),
        ("here", "circle/x", "cannot create the log directory circle/x: Too many levels of symbolic links"),
    ],
)
def test_unusable_log_dir_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, log_dir: str, error: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    Path("circle").symlink_to("circle")
    with pytest.raises(UsageError, match=error):
        prepare_log_dir(RunPlan(log_dir=log_dir))


def test_broken_pipe_ends_covey_top_but_not_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        with pytest.raises(BrokenPipeError):
            LiveDisplay(SchedulerAddress("127.0.0.1", 1), live=False, reconnect_timeout_s=1.0).print_message("a line")
        LiveDisplay(SchedulerAddress("127.0.0.1", 1), live=False).print_message("a line")
        assert Path(f"/proc/self/fd/{write}").readlink() == Path("/dev/null")


def test_cluster_table_escapes_markup_and_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    node = msgspec.structs.replace(example_node(Role.WORKER, 0), host="[/bold]\x1b[2J", phase="a\nb")
    print_cluster_table(msgspec.structs.replace(example_view(node), reason="\x1b]0;x"))
    printed = capsys.readouterr().out
    assert r"[/bold]\x1b[2J" in printed and r"a\nb" in printed and r"\x1b]0;x" in printed and "\x1b" not in printed


def test_node_lines_have_header_and_dash_for_unknown_pid() -> None:
    known = msgspec.structs.replace(example_node(Role.WORKER, 1), pid=4711)
    header, *lines = format_node_lines(example_view(example_node(Role.WORKER, 0), known))
    assert header.split() == ["node", "rank", "role", "host", "state", "step", "doing", "beat", "restarts", "pid"]
    ends = [(line.split()[0], line.split()[-1]) for line in lines]
    assert ends == [("scheduler:scheduler--1", "-"), ("worker:worker-0", "-"), ("worker:worker-1", "4711")]
    assert {line.index("host-a") for line in lines} == {header.index("host")}


def test_find_node_by_rank_or_name() -> None:
    worker, server = example_node(Role.WORKER, 1), example_node(Role.PSERVER, 1)
    view = example_view(example_node(Role.WORKER, 0), server, worker)
    assert find_node(view, "1") == find_node(view, "worker:worker-1") == worker
    assert find_node(view, "pserver:pserver-1") == server
    assert find_node(view, "scheduler") == find_node(view, "scheduler:scheduler--1") == view.nodes[0]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("2", "rank 2 does not exist: expected 0 to 1"),
        ("worker:7", "node 'worker:7' does not exist: covey nodes lists all nodes"),
        ("worker", "node 'worker' does not exist: covey nodes lists all nodes"),
        ("\u00b2", "node '\u00b2' does not exist: covey nodes lists all nodes"),
    ],
)
def test_find_node_refuses_unknown_node(wanted: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_node(example_view(example_node(Role.WORKER, 0), example_node(Role.WORKER, 1)), wanted)
    assert (str(refused.value), refused.value.exit_code) == (message, ExitCode.BAD_SETTING)


def test_find_node_refuses_rank_without_workers() -> None:
    with pytest.raises(UsageError, match="rank 0 does not exist: the cluster has no workers"):
        find_node(example_view(), "0")


def test_covey_without_arguments_prints_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["covey"])
    command.main()
    assert "covey run -n 4 train.py" in capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_of_each_shell(shell: str) -> None:
    assert "_COVEY_COMPLETE" in completion_script(verbs, shell)


@pytest.mark.parametrize(
    ("typed", "begun", "offered"),
    [([], "st", ["status", "stop", "story"]), (["run"], "--spa", ["--spares"]), (["federated"], "si", ["simulate"])],
)
def test_completion_of_commands_and_options(typed: list[str], begun: str, offered: list[str]) -> None:
    found = ShellComplete(verbs, {}, "covey", "_COVEY_COMPLETE").get_completions(typed, begun)
    assert [item.value for item in found] == offered
