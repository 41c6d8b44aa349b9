"""`covey run` on one host: environment, output, started processes."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import psutil
import pytest
from tests.processes.command import PRINT_JSON, Shell, Terminal
from tests.processes.harness import free_port, until
from tests.requirements import CORES, MOUNTS, OWN_MOUNTS, needs

DETACHED_S = 15.0  # the exit of a background process is not an event for its starter
PLACE = "[covey.get_rank(), covey.get_group_size(), covey.get_local_rank(), covey.get_local_rank_size()]"

STAY = """
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""
REPORTS = f"""
import pathlib, sys, time
import covey

covey.init()
covey.report(41, "train")
print("hello from", covey.get_rank())
{STAY}
"""
HELLO = f"""
import pathlib, sys, time
print("hello")
{STAY}
"""


# -- environment of a script -----------------------------------------------------------------------------------------


def test_ranks_get_arguments_and_logs(shell: Shell) -> None:
    text = "import sys, covey\ncovey.init()\n" + PRINT_JSON.format(f"{{'place': {PLACE}, 'argv': sys.argv}}")
    shell.script(text, "t.py")
    run = shell.run_command("run", "-n", "2", "t.py", "--lr", "0.1", "-n", "3")
    assert run.code == 0, run.tail()
    for rank in (0, 1):
        assert shell.printed_json(rank) == {"place": [rank, 2, rank, 2], "argv": ["t.py", "--lr", "0.1", "-n", "3"]}
    assert sorted(os.listdir(shell.logs)) == ["scheduler.log", "worker_0.log", "worker_1.log"]
    assert "all 2 workers finished" in run.text()
    shell.assert_no_processes()


def test_pipe_gets_plain_lines_and_output_of_rank_0(shell: Shell) -> None:
    shell.script("import covey\ncovey.init()\nprint('I am', covey.get_rank())\nprint('no newline at the end', end='')", "t.py")
    run = shell.run_command("run", "-n", "2", "t.py")
    assert run.code == 0, run.tail()
    lines = run.text().splitlines()
    assert "\x1b" not in run.text(), run.text()
    assert "I am 0" in lines and "I am 1" not in lines
    assert "no newline at the end" in lines
    ports = re.search(r"scheduler at 127\.0\.0\.1:(\d+), REST at http://127\.0\.0\.1:(\d+), logs in (.*)", run.text())
    assert ports and ports[3] == str(shell.logs), run.text()


def test_log_of_an_earlier_run_is_not_echoed(shell: Shell) -> None:
    """Rank 1 is started after rank 0, which waits for torch: its log is read before it writes."""
    shell.script("import torch\nprint('of this run')", "t.py")
    shell.logs.mkdir(exist_ok=True)
    (shell.logs / "worker_1.log").write_text("of an earlier run\n")
    run = shell.run_command("run", "-n", "2", "--tail_worker_log", "1", "t.py")
    assert run.code == 0 and "of this run" in run.text(), run.tail()
    assert "of an earlier run" not in run.text(), run.text()


def test_closed_standard_streams_are_replaced_by_dev_null(shell: Shell) -> None:
    shell.script("print('hello')", "t.py")
    closed = shell.run_command("run", "-n", "2", "t.py", before=["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-"])
    assert (closed.code, shell.log(0)) == (0, "hello\n")


def test_terminal_shows_a_table(shell: Shell) -> None:
    shell.script(REPORTS, "t.py")
    terminal = Terminal()
    run = shell.covey("run", "-n", "2", "t.py", shell.go, stdout=terminal.theirs, stderr=terminal.theirs, env={"TERM": "xterm"})
    terminal.wait_for(r"rank +role +host +state +step +doing +beat +restarts")
    terminal.wait_for(r"1 +worker +\S+ +alive +41 +train +\d+\.\d s +0")
    terminal.wait_for(r"hello from 0")
    shell.release()
    assert run.wait() == 0
    assert "hello from 1" not in terminal.wait_for("all 2 workers finished")
    terminal.close()


def test_scripts_start_as_under_python(shell: Shell) -> None:
    """The script's directory is on the path, the current directory stays, and its exports are its own."""
    (shell.folder / "deep").mkdir()
    (shell.folder / "deep" / "beside.py").write_text("WORD = 'found'\n")
    text = "import os, sys, beside\n" + PRINT_JSON.format(
        "{'word': beside.WORD, 'cwd': os.getcwd(), 'name': __name__, 'file': __file__, 'x': os.environ.get('X_OWN')}"
    )
    shell.script(text, "deep/t.py")
    run = shell.run_command("run", "-n", "1", "deep/t.py", env={"X_OWN": "1"})
    assert run.code == 0, run.tail()
    output = shell.printed_json(0)
    assert output | {"file": Path(output["file"]).name} == {
        "word": "found",
        "cwd": str(shell.folder),
        "name": "__main__",
        "file": "t.py",
        "x": "1",
    }


ENVIRONMENT = "import os, sys\n" + PRINT_JSON.format("{'env': dict(os.environ), 'argv': sys.argv, 'argv0': sys.argv[0]}")


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_fork_and_exec_give_the_same_environment(shell: Shell, start: str) -> None:
    shell.script(ENVIRONMENT, "t.py")
    run = shell.run_command("run", "-n", "2", "--start", start, "t.py", "a b", "--", "-x")
    assert run.code == 0, run.tail()
    for rank in (0, 1):
        output = shell.printed_json(rank)
        assert output["argv"] == ["t.py", "a b", "--", "-x"]
        expected = {"RANK": rank, "LOCAL_RANK": rank, "RANK_ID": rank, "MS_NODE_ID": rank, "DEVICE_ID": rank}
        expected |= {"WORLD_SIZE": 2, "RANK_SIZE": 2, "MS_WORKER_NUM": 2, "LOCAL_WORLD_SIZE": 2}
        assert {name: output["env"].get(name) for name in expected} == {name: str(value) for name, value in expected.items()}
        assert output["env"]["MS_ROLE"] == "MS_WORKER"


def test_no_python_runs_any_command(shell: Shell) -> None:
    run = shell.run_command(
        "run", "-n", "2", "--no-python", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE: $0 $1"', "zero", "one two"
    )
    assert run.code == 0, run.tail()
    assert [shell.log(rank) for rank in (0, 1)] == [f"rank {rank} of 2: zero one two\n" for rank in (0, 1)]


def test_module_option_runs_a_module(shell: Shell) -> None:
    package = shell.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "import sys\n" + PRINT_JSON.format("[__name__, __spec__.name, __package__, sys.argv[1:]]")
    )
    run = shell.run_command("run", "-n", "2", "-m", "package.train", "--lr", "1")
    assert run.code == 0, run.tail()
    assert shell.printed_json(1) == ["__main__", "package.train", "package", ["--lr", "1"]]


def test_dry_run_prints_and_starts_nothing(shell: Shell) -> None:
    shell.script("raise SystemExit(3)", "t.py")
    run = shell.run_command("run", "--dry-run", "-n", "4", "--master", "127.0.0.1:18118", "t.py", "--lr", "0.1")
    assert run.code == 0, run.tail()
    for wanted in ("4, all on this host", "127.0.0.1:18118", "python t.py --lr 0.1", "worker_<rank>.log", "WORLD_SIZE"):
        assert wanted in run.text()
    assert not shell.logs.exists()
    assert "runtime" not in [path.parent.name for path in (shell.folder / "runtime").rglob("*.json")]


def test_preloaded_modules_are_imported_before_the_script(shell: Shell) -> None:
    shell.script("import sys\n" + PRINT_JSON.format("'colorsys' in sys.modules"), "t.py")
    for words, wanted in (([], False), (["--preload", "colorsys"], True), (["--preload", "colorsys,no_such_module"], True)):
        run = shell.run_command("run", "-n", "1", *words, "t.py")
        assert run.code == 0, run.tail()
        assert shell.printed_json(0) is wanted
    assert "no_such_module" in run.text()


@needs(CORES)
def test_cores_option_binds_ranks(shell: Shell) -> None:
    cores = sorted(os.sched_getaffinity(0))
    shell.script("import os\n" + PRINT_JSON.format("sorted(os.sched_getaffinity(0))"), "t.py")
    run = shell.run_command("run", "-n", "2", "--bind_core", "True", "t.py")
    assert run.code == 0, run.tail()
    shares = [shell.printed_json(rank) for rank in (0, 1)]
    assert all(share and set(share) < set(cores) for share in shares) and not set(shares[0]) & set(shares[1])
    chosen = json.dumps({"device0": [str(cores[1])], "device1": [str(cores[0])]})
    run = shell.run_command("run", "-n", "2", "--bind_core", chosen, "--start", "exec", "t.py")
    assert run.code == 0, run.tail()
    assert [shell.printed_json(rank) for rank in (0, 1)] == [[cores[1]], [cores[0]]]


def test_invalid_cores_are_a_one_line_error(shell: Shell) -> None:
    shell.script("pass", "t.py")
    run = shell.run_command("run", "-n", "1", "--bind_core", '{"device0": ["4000"]}', "t.py")
    assert run.code == 10, run.tail()
    assert "cannot bind to the cores [4000]" in run.text() and "Traceback" not in run.text()


# -- logs ------------------------------------------------------------------------------------------------------------


def test_log_name_option_names_the_logs(shell: Shell) -> None:
    shell.script(HELLO, "t.py")
    name = socket.gethostname()
    run = shell.covey("run", "-n", "2", "--worker_log_name", "mine_{hostname}_{ip}", "t.py", shell.go)
    path = shell.logs / f"mine_{name}_127.0.0.1_1.log"
    until(lambda: path.exists() and path.read_text() == "hello\n", f"{path}", 15, details=run.tail)
    query = shell.run_command("logs", "1")
    assert query.code == 0 and query.text() == "hello\n", query.tail()
    shell.release()
    assert run.wait() == 0
    assert sorted(os.listdir(shell.logs)) == [f"mine_{name}_127.0.0.1_{rank}.log" for rank in (0, 1)] + ["scheduler.log"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--tail_worker_log", "-1"], {0, 1, 2}),
        (["--tail_worker_log", "1,2"], {1, 2}),
        (["--tee", "3"], {0, 1, 2}),
        (["--tee", "0:3,2:3"], {0, 2}),
        (["--tee", "3", "--local-ranks-filter", "1,2"], {1, 2}),
    ],
)
def test_echoed_lines_are_prefixed_with_rank(shell: Shell, words: list[str], shown: set[int]) -> None:
    shell.script("import os\nprint('I am', os.environ['RANK'])\n", "t.py")
    run = shell.run_command("run", "-n", "3", *words, "t.py")
    assert run.code == 0, run.tail()
    assert {int(rank) for rank in re.findall(r"^\[(\d)\] I am \1$", run.text(), re.MULTILINE)} == shown
    assert len(re.findall("I am", run.text())) == len(shown)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--redirects", "3"], set()),
        (["--redirects", "2"], {"out 0"}),
        (["--tee", "1"], {"[0] out 0", "[1] out 1"}),
        (["--tee", "2"], {"[0] err 0", "[1] err 1"}),
        (["--tee", "0:1,1:2"], {"[0] out 0", "[1] err 1"}),
    ],
)
def test_stdout_and_stderr_can_be_separate(shell: Shell, words: list[str], shown: set[str]) -> None:
    shell.script(
        "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n", "t.py"
    )
    run = shell.run_command("run", "-n", "2", *words, "t.py")
    assert run.code == 0, run.tail()
    assert {line for line in run.text().splitlines() if re.search(r"\b(out|err) \d$", line)} == shown, run.text()
    logs = "".join(path.read_text() for path in shell.logs.glob("worker_*"))
    assert sorted(logs.split("\n")[:-1]) == ["err 0", "err 1", "out 0", "out 1"], "the logs must have both streams"


def test_single_echoed_rank_has_no_prefix(shell: Shell) -> None:
    shell.script("import os\nprint('I am', os.environ['RANK'])\n", "t.py")
    run = shell.run_command("run", "-n", "3", "--tail_worker_log", "2", "t.py")
    assert run.code == 0, run.tail()
    assert "I am 2" in run.text().splitlines() and len(re.findall("I am", run.text())) == 1


def test_new_run_truncates_logs(shell: Shell) -> None:
    """An argument that is not UTF-8 must reach the script unchanged."""
    shell.script("import sys\nprint(ascii(sys.argv[1]))\n", "t.py")
    for word in ("first", os.fsdecode(b"second \xff")):
        assert shell.run_command("run", "-n", "1", "t.py", word).code == 0
        assert shell.log(0) == f"{word!a}\n"
        assert shell.log("scheduler").count("scheduler of cluster") == 1


# -- invalid options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["-n", "2", "absent.py"], 13, "the script absent.py cannot be found"),
        (["-n", "2"], 13, "No script is given"),
        (["-n", "2", "--no-python", "no-such-program"], 13, "program no-such-program not found"),
        (["-n", "two", "t.py"], 10, "-n two is invalid: expected an integer from 1 to"),
        (["--wrker-num", "2", "t.py"], 10, "Unknown option --wrker-num: did you mean --worker-num?"),
        (["-n", "2", "--local", "3", "t.py"], 10, "--local 3 exceeds the number of workers in the cluster"),
        (["-n", "4", "--local", "2", "t.py"], 10, "give --master HOST:PORT"),
        (["-n", "2", "--master", "127.0.0.1:80", "t.py"], 10, "--master 127.0.0.1:80 is invalid"),
        (["-n", "2", "--master", "192.0.2.1:8118", "t.py"], 10, "192.0.2.1 is not an address of this host"),
        (["-n", "2", "--master", "no-such-host.invalid:8118", "t.py"], 10, "=no-such-host.invalid ("),
        (["-n", "2", "--start", "exec", "--preload", "json", "t.py"], 10, "--preload json contradicts"),
        (["-n", "1", "--log-dir", "t.py/logs", "t.py"], 10, "cannot create the log directory"),
        (["-n", "1", "--log-dir", os.fsdecode(b"\xff"), "t.py"], 10, "is invalid: expected a path in UTF-8"),
        (["-n", "1", "/proc/self/environ"], 13, "the script /proc/self/environ is open in this process only"),
        (["-n", "1", "--tls", "absent.json", "t.py"], 12, "cannot read the TLS settings absent.json"),
    ],
)
def test_invalid_options_are_a_one_line_error(shell: Shell, words: list[str], code: int, sentence: str) -> None:
    shell.script("raise SystemExit(77)", "t.py")
    run = shell.run_command("run", *words)
    assert run.code == code, run.tail()
    assert sentence in run.text()
    assert run.text().startswith("covey: ") and run.text().count("\n") == 1, run.text()
    shell.assert_no_processes()


@pytest.mark.parametrize(
    ("around", "before", "sentence"),
    [
        pytest.param(
            *(OWN_MOUNTS, "mount -t tmpfs -o ro none logs", "logs is not writable: choose another with --log-dir"),
            marks=needs(MOUNTS),
            id="read-only",
        ),
        pytest.param([], "mkdir gone; cd gone; rmdir ../gone", "the current directory was removed", id="removed"),
    ],
)
def test_unusable_directory_is_a_one_line_error(shell: Shell, around: list[str], before: str, sentence: str) -> None:
    shell.script("raise SystemExit(77)", "t.py")
    shell.logs.mkdir(exist_ok=True)
    run = shell.run_command("run", shell.folder / "t.py", before=[*around, "sh", "-c", f'{before}; exec "$@"', "-"])
    assert run.code == 10 and sentence in run.text(), run.tail()
    assert run.text().startswith("covey: ") and run.text().count("\n") == 1, run.text()


@pytest.mark.parametrize(
    ("variable", "value"), [("MS_NODE_TIMEOUT", "soon"), ("MS_TOPO_TIMEOUT", "0"), ("GLOG_v", "9"), ("MS_WORKER_NUM", "-1")]
)
def test_invalid_variable_is_named_with_its_value(shell: Shell, variable: str, value: str) -> None:
    shell.script("raise SystemExit(77)", "t.py")
    run = shell.run_command("run", "t.py", env={variable: value})
    assert run.code == 10, run.tail()
    assert f"{variable}={value} is invalid" in run.text() and run.text().count("\n") == 1


def test_port_in_use_error_names_the_process(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shell.script("raise SystemExit(77)", "t.py")
        for words in (["--master", f"127.0.0.1:{port}"], ["--manage-port", str(port)]):
            run = shell.run_command("run", "-n", "2", *words, "t.py")
            assert run.code == 11, run.tail()
            assert f"port {port} at 127.0.0.1 is in use" in run.text() and f"(process {os.getpid()})" in run.text()
            assert run.text().count("\n") == 1


def test_second_run_on_same_port_names_the_first(shell: Shell) -> None:
    port = free_port()
    first = shell.covey("run", "-n", "1", "--master", f"127.0.0.1:{port}", shell.default, shell.go)
    shell.wait_for_log(0, "rank=0")
    second = shell.run_command("run", "-n", "1", "--log-dir", "other", "--master", f"127.0.0.1:{port}", shell.default)
    assert second.code == 11, second.tail()
    holder = re.search(rf"port {port} at 127\.0\.0\.1 is in use by .*\(process (\d+)\)", second.text())
    assert holder, second.text()
    assert psutil.Process(int(holder[1])) in [psutil.Process(first.pid), *psutil.Process(first.pid).children()]
    shell.release()
    assert first.wait() == 0


# -- without join ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [["--join=False"], ["--join", "False"]])
def test_run_without_join_continues_until_stopped(shell: Shell, word: list[str]) -> None:
    run = shell.run_command("run", "-n", "2", *word, shell.default, shell.go)
    assert run.code == 0, run.tail()
    pid = int(re.search(r"in the background as process (\d+)", run.text())[1])  # type: ignore[index]
    until(lambda: "rank=1" in shell.log(1), "rank 1 to join", DETACHED_S)
    assert pid in [process.pid for process in shell.own_processes()]
    stopped = shell.run_command("stop")
    assert stopped.code == 0, stopped.tail()
    shell.assert_no_processes()
    assert "requested by covey stop" in (shell.logs / "agent.log").read_text()


def test_run_without_join_can_end_by_itself(shell: Shell) -> None:
    run = shell.run_command("run", "-n", "2", "--join=False", shell.default, shell.go)
    assert run.code == 0, run.tail()
    until(lambda: all("rank=" in shell.log(rank) for rank in (0, 1)), "both to join", DETACHED_S)
    shell.release()
    shell.assert_no_processes()
    assert "all 2 workers finished" in (shell.logs / "agent.log").read_text()


# -- output ----------------------------------------------------------------------------------------------------------


def test_closed_stdout_pipe_does_not_end_the_run(shell: Shell) -> None:
    """As in `covey run ... | head -1`."""
    reader, writer = os.pipe()
    shell.script("import os\nfor n in range(1000): print('line', n, flush=True)\nprint('done')\n" + HELLO, "t.py")
    run = shell.covey("run", "-n", "2", "t.py", shell.go, stdout=writer)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    shell.wait_for_log(0, "done")
    shell.wait_for_log(1, "done")
    shell.release()
    assert run.wait() == 0, run.tail()
    assert "Traceback" not in run.text() and "BrokenPipe" not in run.text(), run.text()
    shell.assert_no_processes()


@pytest.mark.parametrize("rank", [0, 1])
def test_unwritable_log_is_a_one_line_error(shell: Shell, rank: int) -> None:
    (shell.logs / f"worker_{rank}.log").mkdir(parents=True)
    run = shell.run_command("run", "-n", "2", shell.default)
    assert run.code == 41, run.tail()
    assert f"worker_{rank}.log' of worker:{rank}: Is a directory" in run.text()
    assert "Traceback" not in run.text(), run.text()
    shell.assert_no_processes()
