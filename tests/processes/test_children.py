"""Interpreter state and exit of a child: the same as under python itself."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.child_helpers import HOME, ChildRunner, python

from covey.agent.children import Exit, explain_os_error
from covey.errors import StoreError, UsageError


@pytest.fixture
def child_runner(tmp_path: Path) -> Iterator[ChildRunner]:
    child_runner = ChildRunner(tmp_path, fork=True, preload=[])
    yield child_runner
    child_runner.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[ChildRunner]:
    child_runner = ChildRunner(tmp_path, fork=False, preload=[])
    yield child_runner
    child_runner.close()


# -- interpreter state -----------------------------------------------------------------------------------------------

PROBE = """
import json, os, signal, sys
main = sys.modules["__main__"]
json.dump({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "cwd": os.getcwd(),
    "name": __name__, "file": __file__, "package": __package__, "spec": getattr(__spec__, "name", None),
    "cached": __cached__, "loader": type(__loader__).__name__, "builtins": type(__builtins__).__name__,
    "names": sorted(globals()), "main": main.__dict__ is globals(), "environ": dict(os.environ),
    "umask": os.umask(0), "streams": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.encoding, sys.stderr.errors],
    "signals": {s: str(signal.getsignal(s)).split(" at ")[0] for s in signal.valid_signals()},
    "affinity": sorted(os.sched_getaffinity(0)), "stdin": sys.stdin.read(), "session": os.getsid(0) == os.getpid(),
}, sys.stdout)
"""


@pytest.mark.parametrize(
    ("argv", "module"),
    [
        (["deep/script.py", "--lr", "0.1", "ü"], False),
        (["link.py"], False),
        (["deep"], False),
        (["deep.script", "-x"], True),
        (["deep"], True),
    ],
    ids=["script", "symlink", "folder", "module", "package"],
)
def test_forked_child_has_the_same_interpreter_state_as_python(
    child_runner: ChildRunner, argv: list[str], module: bool
) -> None:
    child_runner.script(PROBE, "deep/script.py")
    child_runner.script(PROBE, "deep/__main__.py")
    (child_runner.folder / "link.py").symlink_to("deep/script.py")
    env = {**os.environ, "RANK": "3", "EMPTY": ""}
    code, printed = python(child_runner.folder, *(["-m"] if module else []), *argv, env=env)
    assert code == 0, printed
    result = child_runner.run("worker:0", *argv, module=module, env=env)
    assert result.exit.reason == "exit code 0", result.output
    forked, real = json.loads(result.output), json.loads(printed)
    for seen in (forked, real):
        seen["path"] = [path for path in seen["path"] if path != HOME]  # covey may be installed or not
        seen["environ"].pop("LC_CTYPE", None)  # python adds it if no locale is set
    assert forked == real


def test_child_environment_is_exactly_the_spec(child_runner: ChildRunner) -> None:
    """A large environment with bytes that are not UTF-8, and nothing of the agent's or the template's."""
    script = child_runner.script("""
        import os, subprocess
        assert os.environb == {k.encode(): v.encode("utf-8", "surrogateescape") for k, v in os.environ.items()}
        seen = subprocess.run(["env", "-0"], stdout=subprocess.PIPE).stdout.split(b"\\0")
        assert set(filter(None, seen)) == {k + b"=" + v for k, v in os.environb.items()}
        print(len(os.environ), sum(map(len, os.environ.values())), os.environb[b"ODD"], os.environ.get("OMP_NUM_THREADS"))
    """)
    env = {f"LARGE_{n}": "x" * 10_000 for n in range(40)} | {"PATH": os.environ["PATH"], "ODD": os.fsdecode(b"\xff\xfe")}
    result = child_runner.run("worker:0", script, env=env)
    assert result.output.split(" ", 2)[::2] == [str(len(env)), "b'\\xff\\xfe' None\n"], result.output


def test_child_has_only_its_own_descriptors(child_runner: ChildRunner) -> None:
    script = child_runner.script("""
        import os
        names = os.listdir("/proc/self/fd")
        fds = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in names if os.path.lexists(f"/proc/self/fd/{name}")}
        print(sorted(fds), fds[0], fds[1] == fds[2], fds[max(fds)].split(":")[0])
    """)
    assert child_runner.run("worker:0", script).output == "[0, 1, 2, 64] /dev/null True pipe\n"


def test_ps_shows_the_command_of_the_user(child_runner: ChildRunner) -> None:
    script = child_runner.script("print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0'))")
    result = child_runner.run("worker:0", script, "--lr", "0.1")
    assert result.output == f"{[sys.executable, script, '--lr', '0.1']}\n"


def test_child_is_bound_to_its_cores(child_runner: ChildRunner) -> None:
    script = child_runner.script("import os; print(os.sched_getaffinity(0))")
    core = max(os.sched_getaffinity(0))
    bound = ["sh", "-c", f"exec {sys.executable} {script}"]
    child_runner.start_all(
        child_runner.spec("forked", script, cores=[core]),
        child_runner.spec("command", *bound, python=False, cores=[core]),
        child_runner.spec("wrong", script, cores=[100_000]),
    )
    assert child_runner.result("forked").output == child_runner.result("command").output == f"{{{core}}}\n"
    wrong = child_runner.result("wrong")
    assert wrong.exit.code == 10
    assert "cannot bind to the cores [100000]" in wrong.output


# -- exits -----------------------------------------------------------------------------------------------------------

ENDINGS = {
    "returns": "pass",
    "code": "import sys; sys.exit(7)",
    "text": "import sys; sys.exit('the reason')",
    "none": "import sys; sys.exit(None)",
    "raises": "def f(x):\n    return 1 / x\n\nf(0)",
    "chained": "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('b')",
    "syntax": "x = 1\ndef",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hooked', a[2].tb_lineno)\n1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "abrupt": "import os; os._exit(3)",
    "missing": None,
}


def test_child_ends_as_under_python(child_runner: ChildRunner) -> None:
    specs = []
    for name, source in ENDINGS.items():
        if source is not None:
            child_runner.script(source, f"{name}.py")
        specs.append(child_runner.spec(name, f"{name}.py"))
    child_runner.start_all(*specs)
    for name in ENDINGS:
        result = child_runner.result(name)
        assert (result.exit.code, result.output) == python(child_runner.folder, f"{name}.py"), name
    assert child_runner.exits["killed"].reason == "killed by SIGKILL"
    assert [child_runner.exits[name].code for name in ("code", "text", "raises", "interrupt", "killed", "missing")] == [
        *(7, 1, 1, 130, 137, 2)
    ]


@pytest.mark.parametrize("name", ["absent", "absent.deeper", "bare", "bare.absent", ".relative"])
def test_module_that_cannot_run_prints_the_message_of_python(child_runner: ChildRunner, name: str) -> None:
    child_runner.script("", "bare/__init__.py")
    result = child_runner.run("worker:0", name, module=True)
    assert (result.exit.code, result.output) == python(child_runner.folder, "-m", name)


def test_failing_module_prints_only_its_own_frames(child_runner: ChildRunner) -> None:
    child_runner.script("import nowhere_at_all", "broken/__init__.py")
    child_runner.script("", "broken/__main__.py")
    result = child_runner.run("worker:0", "broken", module=True)
    assert result.exit.code == 1
    assert result.output.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{child_runner.folder}/broken/__init__.py", line 1, in <module>',
    ]
    assert result.output.splitlines()[-1] == "ModuleNotFoundError: No module named 'nowhere_at_all'"


def test_output_of_killed_child_is_complete(child_runner: ChildRunner) -> None:
    script = child_runner.script("""
        import atexit, ctypes, logging, os, tempfile, threading
        kept = tempfile.TemporaryDirectory()
        open("kept", "w").write(kept.name)
        never_closed = open("never_closed", "w")
        never_closed.write("on disk")
        atexit.register(print, "at exit")
        go = threading.Event()
        def late():
            go.wait()
            print("thread", end=" ")
        threading.Thread(target=late).start()
        ctypes.CDLL(None).printf(b"from C ")
        print("no newline", end=" ")
        go.set()
    """)
    result = child_runner.run("worker:0", script)
    assert result.exit.code == 0
    assert sorted(result.output.split()) == sorted(["from", "C", "no", "newline", "thread", "at", "exit"])
    assert result.output.index("thread") < result.output.index("at exit")
    assert (child_runner.folder / "never_closed").read_text() == "on disk"
    assert not Path((child_runner.folder / "kept").read_text()).exists()


def test_output_is_logged_line_by_line(tmp_path: Path) -> None:
    child_runner = ChildRunner(tmp_path, fork=True, preload=[])
    script = child_runner.script("""
        import os, signal, sys
        print("before the kill")
        print("and its error", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    for argv, forked in (([script], True), ([sys.executable, "-u", script], False)):
        result = child_runner.run("worker:0", *argv, python=forked)
        assert result == (Exit("worker:0", result.exit.pid, 137, "killed by SIGKILL"), "before the kill\nand its error\n")
    child_runner.close()


def test_log_is_truncated_appended_or_split(child_runner: ChildRunner) -> None:
    script = child_runner.script("import sys; print('out', sys.argv[1]); print('err', sys.argv[1], file=sys.stderr)")
    child_runner.run("worker:0", script, "1")
    assert child_runner.run("worker:0", script, "2").output == "out 2\nerr 2\n"
    assert child_runner.run("worker:0", script, "3", append=True).output == "out 2\nerr 2\nout 3\nerr 3\n"
    errors = child_runner.folder / "errors"
    assert child_runner.run("worker:0", script, "4", log_err=str(errors)).output == "out 4\n"
    assert errors.read_text() == "err 4\n"


# -- without a template ----------------------------------------------------------------------------------------------


def test_command_that_is_not_python_runs_unchanged(child_runner: ChildRunner) -> None:
    result = child_runner.run(
        "worker:0",
        "sh",
        "-c",
        'echo "$RANK $0"; ls /proc/self/fd; exit 5',
        "zero",
        python=False,
        env={"RANK": "3", "PATH": os.environ["PATH"]},
    )
    assert result.exit.code == 5
    assert result.output.splitlines()[0] == "3 zero"
    assert child_runner.run("worker:0", "no-such-command", python=False).exit.code == 127
    assert child_runner.log("worker:0") == "covey: cannot run 'no-such-command': No such file or directory\n"
    assert child_runner.run("worker:0", str(child_runner.folder), python=False).exit.code == 126


def test_children_without_fork_are_started_by_exec(plain: ChildRunner) -> None:
    script = plain.script(
        "import sys, os; print(__name__, sys.argv[1:], sys.path[0], os.getsid(0) == os.getpid()); sys.exit(4)"
    )
    result = plain.run("worker:0", script, "a")
    assert (result.exit.code, result.output) == (4, f"__main__ ['a'] {plain.folder} True\n")
    assert plain.run("worker:0", "script", "b", module=True).output == f"__main__ ['b'] {plain.folder} True\n"
    assert plain.children.template_pid == 0


def test_lifeline_works_with_a_low_limit_of_open_files(child_runner: ChildRunner) -> None:
    """The descriptor of the lifeline is above those that shells use, if the limit allows it."""
    script = child_runner.script("print('tied')")
    child_runner.run(
        "worker:0", script
    )  # start waits for the template; without one its pid is 0, and prlimit would change this process
    template = child_runner.children.template_pid
    assert template
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(template, resource.RLIMIT_NOFILE, (48, hard))
    assert child_runner.run("worker:0", script).output == "tied\n"


# -- errors ----------------------------------------------------------------------------------------------------------


def test_invalid_spec_raises_a_one_line_error(child_runner: ChildRunner) -> None:
    wait = child_runner.script("import signal; signal.pause()")
    child_runner.start("worker:0", wait)
    with pytest.raises(UsageError, match="worker:0 is already running"):
        child_runner.run_async(child_runner.children.start(child_runner.spec("worker:0", wait)))
    with pytest.raises(UsageError, match="worker:1 cannot start in '/nowhere'"):
        child_runner.start("worker:1", wait, cwd="/nowhere")
    with pytest.raises(StoreError, match=r"cannot write the log '/dev/null/log' of worker:1"):
        child_runner.start("worker:1", wait, log="/dev/null/log")
    with pytest.raises(UsageError, match="worker:1 has nothing to run"):
        child_runner.start("worker:1")
    assert child_runner.children.pid("worker:1") == 0
    assert explain_os_error(OSError(errno.EMFILE, "Too many open files")).endswith(
        "open files is reached: raise it (ulimit -n)"
    )
    assert explain_os_error(OSError(errno.ENOMEM, "Cannot allocate memory")) == "[Errno 12] Cannot allocate memory"
