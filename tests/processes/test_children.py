"""What the code of a child sees, and how it ends: the same as under python itself."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.child_helpers import HOME, Nursery, python

from covey.agent.children import Exit, explain_os_error
from covey.errors import StoreError, UsageError


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path, fork=True, preload=[])
    yield nursery
    nursery.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path, fork=False, preload=[])
    yield nursery
    nursery.close()


# -- what the user's code sees ---------------------------------------------------------------------------------------

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
def test_a_forked_child_sees_what_python_gives(nursery: Nursery, argv: list[str], module: bool) -> None:
    nursery.script(PROBE, "deep/script.py")
    nursery.script(PROBE, "deep/__main__.py")
    (nursery.folder / "link.py").symlink_to("deep/script.py")
    env = {**os.environ, "RANK": "3", "EMPTY": ""}
    code, said = python(nursery.folder, *(["-m"] if module else []), *argv, env=env)
    assert code == 0, said
    result = nursery.run("worker:0", *argv, module=module, env=env)
    assert result.exit.reason == "exit code 0", result.said
    forked, real = json.loads(result.said), json.loads(said)
    for seen in (forked, real):
        seen["path"] = [path for path in seen["path"] if path != HOME]  # covey itself may be installed or not
        seen["environ"].pop("LC_CTYPE", None)  # python adds it where no locale is set
    assert forked == real


def test_the_environment_is_exact(nursery: Nursery) -> None:
    """Large, with bytes that are no text, and nothing of the agent's or the template's."""
    script = nursery.script("""
        import os, subprocess
        assert os.environb == {k.encode(): v.encode("utf-8", "surrogateescape") for k, v in os.environ.items()}
        seen = subprocess.run(["env", "-0"], stdout=subprocess.PIPE).stdout.split(b"\\0")
        assert set(filter(None, seen)) == {k + b"=" + v for k, v in os.environb.items()}
        print(len(os.environ), sum(map(len, os.environ.values())), os.environb[b"ODD"], os.environ.get("OMP_NUM_THREADS"))
    """)
    env = {f"LARGE_{n}": "x" * 10_000 for n in range(40)} | {"PATH": os.environ["PATH"], "ODD": os.fsdecode(b"\xff\xfe")}
    result = nursery.run("worker:0", script, env=env)
    assert result.said.split(" ", 2)[::2] == [str(len(env)), "b'\\xff\\xfe' None\n"], result.said


def test_only_its_own_descriptors_are_open(nursery: Nursery) -> None:
    script = nursery.script("""
        import os
        names = os.listdir("/proc/self/fd")
        fds = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in names if os.path.lexists(f"/proc/self/fd/{name}")}
        print(sorted(fds), fds[0], fds[1] == fds[2], fds[max(fds)].split(":")[0])
    """)
    assert nursery.run("worker:0", script).said == "[0, 1, 2, 64] /dev/null True pipe\n"


def test_ps_shows_the_users_command(nursery: Nursery) -> None:
    script = nursery.script("print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0'))")
    result = nursery.run("worker:0", script, "--lr", "0.1")
    assert result.said == f"{[sys.executable, script, '--lr', '0.1']}\n"


def test_a_child_is_bound_to_its_cores(nursery: Nursery) -> None:
    script = nursery.script("import os; print(os.sched_getaffinity(0))")
    core = max(os.sched_getaffinity(0))
    bound = ["sh", "-c", f"exec {sys.executable} {script}"]
    nursery.start_all(
        nursery.spec("forked", script, cores=[core]),
        nursery.spec("command", *bound, python=False, cores=[core]),
        nursery.spec("wrong", script, cores=[100_000]),
    )
    assert nursery.result("forked").said == nursery.result("command").said == f"{{{core}}}\n"
    wrong = nursery.result("wrong")
    assert wrong.exit.code == 10
    assert "cannot bind to the cores [100000]" in wrong.said


# -- how it ends -----------------------------------------------------------------------------------------------------

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


def test_every_ending_is_pythons_own(nursery: Nursery) -> None:
    specs = []
    for name, source in ENDINGS.items():
        if source is not None:
            nursery.script(source, f"{name}.py")
        specs.append(nursery.spec(name, f"{name}.py"))
    nursery.start_all(*specs)
    for name in ENDINGS:
        result = nursery.result(name)
        assert (result.exit.code, result.said) == python(nursery.folder, f"{name}.py"), name
    assert nursery.exits["killed"].reason == "killed by SIGKILL"
    assert [nursery.exits[name].code for name in ("code", "text", "raises", "interrupt", "killed", "missing")] == [
        *(7, 1, 1, 130, 137, 2)
    ]


@pytest.mark.parametrize("name", ["absent", "absent.deeper", "bare", "bare.absent", ".relative"])
def test_a_module_that_cannot_be_run_is_said_as_python_says_it(nursery: Nursery, name: str) -> None:
    nursery.script("", "bare/__init__.py")
    result = nursery.run("worker:0", name, module=True)
    assert (result.exit.code, result.said) == python(nursery.folder, "-m", name)


def test_a_module_that_fails_shows_its_own_lines_only(nursery: Nursery) -> None:
    nursery.script("import nowhere_at_all", "broken/__init__.py")
    nursery.script("", "broken/__main__.py")
    result = nursery.run("worker:0", "broken", module=True)
    assert result.exit.code == 1
    assert result.said.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{nursery.folder}/broken/__init__.py", line 1, in <module>',
    ]
    assert result.said.splitlines()[-1] == "ModuleNotFoundError: No module named 'nowhere_at_all'"


def test_nothing_written_is_lost(nursery: Nursery) -> None:
    script = nursery.script("""
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
    result = nursery.run("worker:0", script)
    assert result.exit.code == 0
    assert sorted(result.said.split()) == sorted(["from", "C", "no", "newline", "thread", "at", "exit"])
    assert result.said.index("thread") < result.said.index("at exit")
    assert (nursery.folder / "never_closed").read_text() == "on disk"
    assert not Path((nursery.folder / "kept").read_text()).exists()


def test_lines_are_in_the_log_before_the_child_ends(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path, fork=True, preload=[])
    script = nursery.script("""
        import os, signal, sys
        print("before the kill")
        print("and its error", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    for argv, forked in (([script], True), ([sys.executable, "-u", script], False)):
        result = nursery.run("worker:0", *argv, python=forked)
        assert result == (Exit("worker:0", result.exit.pid, 137, "killed by SIGKILL"), "before the kill\nand its error\n")
    nursery.close()


def test_a_log_is_truncated_appended_or_split(nursery: Nursery) -> None:
    script = nursery.script("import sys; print('out', sys.argv[1]); print('err', sys.argv[1], file=sys.stderr)")
    nursery.run("worker:0", script, "1")
    assert nursery.run("worker:0", script, "2").said == "out 2\nerr 2\n"
    assert nursery.run("worker:0", script, "3", append=True).said == "out 2\nerr 2\nout 3\nerr 3\n"
    errors = nursery.folder / "errors"
    assert nursery.run("worker:0", script, "4", log_err=str(errors)).said == "out 4\n"
    assert errors.read_text() == "err 4\n"


# -- without a template ----------------------------------------------------------------------------------------------


def test_a_command_runs_as_it_is(nursery: Nursery) -> None:
    result = nursery.run(
        "worker:0",
        "sh",
        "-c",
        'echo "$RANK $0"; ls /proc/self/fd; exit 5',
        "zero",
        python=False,
        env={"RANK": "3", "PATH": os.environ["PATH"]},
    )
    assert result.exit.code == 5
    assert result.said.splitlines()[0] == "3 zero"
    assert nursery.run("worker:0", "no-such-command", python=False).exit.code == 127
    assert nursery.log("worker:0") == "covey: cannot run 'no-such-command': No such file or directory\n"
    assert nursery.run("worker:0", str(nursery.folder), python=False).exit.code == 126


def test_plain_processes_when_asked_for(plain: Nursery) -> None:
    script = plain.script(
        "import sys, os; print(__name__, sys.argv[1:], sys.path[0], os.getsid(0) == os.getpid()); sys.exit(4)"
    )
    result = plain.run("worker:0", script, "a")
    assert (result.exit.code, result.said) == (4, f"__main__ ['a'] {plain.folder} True\n")
    assert plain.run("worker:0", "script", "b", module=True).said == f"__main__ ['b'] {plain.folder} True\n"
    assert plain.children.template_pid == 0


def test_where_few_files_may_be_open_a_child_is_tied_all_the_same(nursery: Nursery) -> None:
    """The descriptor of its lifeline lies above those that shells use, where there is such a number."""
    script = nursery.script("print('tied')")
    nursery.run("worker:0", script)  # waits for the template: without one its pid is 0, and prlimit would change this process
    template = nursery.children.template_pid
    assert template
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(template, resource.RLIMIT_NOFILE, (48, hard))
    assert nursery.run("worker:0", script).said == "tied\n"


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_started_is_one_sentence(nursery: Nursery) -> None:
    wait = nursery.script("import signal; signal.pause()")
    nursery.start("worker:0", wait)
    with pytest.raises(UsageError, match="worker:0 is already running"):
        nursery.do(nursery.children.start(nursery.spec("worker:0", wait)))
    with pytest.raises(UsageError, match="worker:1 cannot start in '/nowhere'"):
        nursery.start("worker:1", wait, cwd="/nowhere")
    with pytest.raises(StoreError, match=r"cannot write the log '/dev/null/log' of worker:1"):
        nursery.start("worker:1", wait, log="/dev/null/log")
    with pytest.raises(UsageError, match="worker:1 has nothing to run"):
        nursery.start("worker:1")
    assert nursery.children.pid("worker:1") == 0
    assert explain_os_error(OSError(errno.EMFILE, "Too many open files")).endswith(
        "open files is reached: raise it (ulimit -n)"
    )
    assert explain_os_error(OSError(errno.ENOMEM, "Cannot allocate memory")) == "[Errno 12] Cannot allocate memory"
