"""The command line as such: examples that can be typed, mistakes that are one sentence, JSON for every verb that prints."""

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
from tests.http.serving import a_node, a_view

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

PRINTS_NO_JSON = {"run", "completion", "federated up", "operator run"}  # they run, or print what a shell reads


def every(group: click.Group = verbs, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from every(found, f"{path}{name} ")
        else:
            yield f"{path}{name}", found


VERBS = dict(every())


@pytest.mark.parametrize("name", [name for name in VERBS if name != "run"])
def test_the_examples_of_a_verb_can_be_typed(name: str) -> None:
    lines = [line.strip() for line in (VERBS[name].epilog or "").splitlines()[2:]]
    assert lines, f"covey {name} --help has no example"
    for line in lines:
        words = shlex.split(line, comments=False)
        start = next((at for at, word in enumerate(words) if word == "covey"), -1)
        if start < 0:  # inside $( )
            assert f"covey {name}" in line
            continue
        typed = words[start + 1 : words.index(">") if ">" in words else None]
        assert typed[: len(name.split())] == name.split(), line
        VERBS[name].make_context(name, typed[len(name.split()) :])  # raises where it cannot be


def test_every_verb_that_prints_has_json() -> None:
    without = {name for name, verb in VERBS.items() if not any("--json" in param.opts for param in verb.params)}
    assert without == PRINTS_NO_JSON


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("statsu", "covey: No such command 'statsu'. Did you mean 'status'?\n"),
        ("status --what", "covey: No such option '--what'.\n"),
        ("logs two", "covey: Invalid value for '[RANK]': 'two' is not a valid integer.\n"),
        ("kill", "covey: Missing argument 'RANK|NODE'.\n"),
        ("scale", "covey: say how many there are to be: --workers N or --servers N\n"),
        ("scale --workers 2 --servers 2", "covey: one at a time: --workers N first, and --servers N once that is done\n"),
        ("chaos --rate ²/s", "covey: --rate '²/s' is no rate: say 1/3s, 20/m or 2/s\n"),
        ("submit t.py --image i --processes 0", "covey: Invalid value for '--processes': 0 is not in the range x>=1.\n"),
        ("operator run --console 70000", "covey: Invalid value for '--console': 70000 is not in the range -1<=x<=65535.\n"),
        (
            "operator run --lease-duration nan",
            "covey: Invalid value for '--lease-duration': 'nan' is not a valid integer range.\n",
        ),
        ("bundle --log-dir absent", "covey: absent is no folder that can be read: give the one that covey run named\n"),
        ("federated upp", "covey: No such command 'upp'. Did you mean 'up'?\n"),
        ("federated simulate --noise -1", "covey: --noise -1.0 is not possible: give a number, 0 or more\n"),
    ],
)
def test_a_mistake_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    monkeypatch.setattr("sys.argv", ["covey", *words.split()])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert (ended.value.code, capsys.readouterr().err) == (10, sentence)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    os.mkfifo(tmp_path / "pipe")
    found = {name: read_blocker(tmp_path / name) for name in ("train.py", "absent.py", "x" * 300, "pipe", ".")}
    no_file = "read (it is no file)"
    assert [*found.values()] == ["", "found", "read (File name too long)", no_file, no_file]


@pytest.mark.parametrize(("content", "why"), [(b"\0\xff", "cannot be read as a script"), (b"", "is empty")])
def test_a_script_that_cannot_go_along(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"lies here but {why}") as refused:
        build_msjob(SubmitOptions(str(path), (), "", 1, 1, "image", "", 0))
    assert refused.value.exit_code == ExitCode.BAD_SCRIPT


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            OSError(errno.EMFILE, "Too many open files", "a"),
            41,
            "[Errno 24] Too many open files: 'a': allow this process more files",
        ),
        (OSError(errno.EADDRINUSE, "Address already in use"), 11, "[Errno 98] Address already in use"),
        (RuntimeError("can't start new thread"), 41, "can't start new thread: allow this user more processes or memory"),
        (MemoryError(), 41, "no memory is left: allow this user more processes or memory"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, said: str
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("covey.cli.status.print_settings", refuse)
    monkeypatch.setattr("sys.argv", ["covey", "env"])
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the tests' own output stays
    with pytest.raises(SystemExit) as ended:
        command.main()
    heard = capsys.readouterr().err
    assert ended.value.code == code and heard.startswith(f"covey: the system refuses this: {said}") and heard.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "log_dir", "why"),
    [
        (os.fsdecode(b"\xff"), "", "has no name in UTF-8: name another with --log-dir"),
        ("here", "circle", "circle cannot be made: Too many levels of symbolic links"),
        ("here", "circle/x", "circle/x cannot be made: Too many levels of symbolic links"),
    ],
)
def test_a_log_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, log_dir: str, why: str) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    Path("circle").symlink_to("circle")
    with pytest.raises(UsageError, match=why):
        prepare_log_dir(RunPlan(log_dir=log_dir))


def test_a_run_goes_on_when_nobody_reads_it_and_who_only_looks_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        with pytest.raises(BrokenPipeError):
            LiveDisplay(SchedulerAddress("127.0.0.1", 1), live=False, patience_s=1.0).print_message("a line")
        LiveDisplay(SchedulerAddress("127.0.0.1", 1), live=False).print_message("a line")
        assert Path(f"/proc/self/fd/{write}").readlink() == Path("/dev/null")


def test_names_from_the_wire_are_no_markup_and_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    node = msgspec.structs.replace(a_node(Role.WORKER, 0), host="[/bold]\x1b[2J", phase="a\nb")
    print_cluster_table(msgspec.structs.replace(a_view(node), reason="\x1b]0;x"))
    said = capsys.readouterr().out
    assert r"[/bold]\x1b[2J" in said and r"a\nb" in said and r"\x1b]0;x" in said and "\x1b" not in said


def test_nodes_have_a_header_and_a_dash_for_an_unknown_pid() -> None:
    known = msgspec.structs.replace(a_node(Role.WORKER, 1), pid=4711)
    header, *lines = format_node_lines(a_view(a_node(Role.WORKER, 0), known))
    assert header.split() == ["node", "rank", "role", "host", "state", "step", "doing", "beat", "restarts", "pid"]
    ends = [(line.split()[0], line.split()[-1]) for line in lines]
    assert ends == [("scheduler:scheduler--1", "-"), ("worker:worker-0", "-"), ("worker:worker-1", "4711")]
    assert {line.index("host-a") for line in lines} == {header.index("host")}


def test_nodes_are_chosen_by_rank_or_name() -> None:
    worker, server = a_node(Role.WORKER, 1), a_node(Role.PSERVER, 1)
    view = a_view(a_node(Role.WORKER, 0), server, worker)
    assert find_node(view, "1") == find_node(view, "worker:worker-1") == worker
    assert find_node(view, "pserver:pserver-1") == server
    assert find_node(view, "scheduler") == find_node(view, "scheduler:scheduler--1") == view.nodes[0]


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("2", "there is no rank 2: ranks go from 0 to 1"),
        ("worker:7", "there is no node 'worker:7': covey nodes lists them"),
        ("worker", "there is no node 'worker': covey nodes lists them"),
        ("\u00b2", "there is no node '\u00b2': covey nodes lists them"),
    ],
)
def test_a_node_that_is_not_there_is_not_chosen(wanted: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_node(a_view(a_node(Role.WORKER, 0), a_node(Role.WORKER, 1)), wanted)
    assert (str(refused.value), refused.value.exit_code) == (sentence, ExitCode.BAD_SETTING)


def test_no_rank_is_chosen_where_there_are_no_workers() -> None:
    with pytest.raises(UsageError, match="there is no rank 0: the cluster has no workers"):
        find_node(a_view(), "0")


def test_covey_alone_shows_its_verbs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["covey"])
    command.main()
    assert "covey run -n 4 train.py" in capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_its_script(shell: str) -> None:
    assert "_COVEY_COMPLETE" in completion_script(verbs, shell)


@pytest.mark.parametrize(
    ("typed", "begun", "offered"),
    [([], "st", ["status", "stop", "story"]), (["run"], "--spa", ["--spares"]), (["federated"], "si", ["simulate"])],
)
def test_words_are_completed(typed: list[str], begun: str, offered: list[str]) -> None:
    found = ShellComplete(verbs, {}, "covey", "_COVEY_COMPLETE").get_completions(typed, begun)
    assert [item.value for item in found] == offered
