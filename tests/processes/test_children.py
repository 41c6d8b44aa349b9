"""Children as real processes: what a forked script sees, how it ends, and that nobody is left behind."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from covey.errors import CoveyError, StoreError, UsageError
from covey.node.children import Children, ChildSpec, Exit

HOME = str(Path(sys.modules["covey.node.children"].__file__ or "").parents[2])
TORCH = ["numpy", "torch", "torch._dynamo"]
LIMIT_S = 60.0


class Result(NamedTuple):
    exit: Exit
    said: str


class Nursery:
    """Children on a loop of their own, for tests that read from top to bottom."""

    def __init__(self, folder: Path, *, fork: bool, preload: list[str], loop: Callable[[], Any] | None = None) -> None:
        self.folder = folder
        self.exits: dict[str, Exit] = {}
        self.runner = asyncio.Runner(loop_factory=loop)
        self.news = asyncio.Event()
        self.children = Children(on_exit=self._ended, fork=fork, preload=preload)
        self.do(self.children.open())

    def _ended(self, exit: Exit) -> None:
        assert exit.name not in self.exits, "one exit for one life"
        self.exits[exit.name] = exit
        self.news.set()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, LIMIT_S))

    def script(self, source: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return str(path)

    def spec(self, name: str, *argv: str, **more: Any) -> ChildSpec:
        more = {"env": dict(os.environ), "cwd": str(self.folder), "log": str(self.folder / f"{name}.log")} | more
        return ChildSpec(name=name, argv=list(argv), **more)

    def start(self, name: str, *argv: str, **more: Any) -> int:
        self.exits.pop(name, None)
        pid: int = self.do(self.children.start(self.spec(name, *argv, **more)))
        return pid

    def start_all(self, *specs: ChildSpec) -> None:
        async def together() -> None:
            await asyncio.gather(*(self.children.start(spec) for spec in specs))

        self.do(together())

    def result(self, name: str) -> Result:
        """When it has ended."""

        async def ended() -> None:
            while name not in self.exits:
                self.news.clear()
                await self.news.wait()

        self.do(ended())
        return Result(self.exits[name], self.log(name))

    def run(self, name: str, *argv: str, **more: Any) -> Result:
        self.start(name, *argv, **more)
        return self.result(name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        self.do(self.children.close())
        self.runner.close()


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


def python(cwd: Path, *argv: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """What python itself does, with the code as a shell says it."""
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return (done.returncode if done.returncode >= 0 else 128 - done.returncode), done.stdout


def wait_until_gone(*pidfds: int) -> None:
    """The kernel says when a process is over."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(LIMIT_S * 1000), "a process lives on"
        os.close(pidfd)


def fifo(nursery: Nursery, name: str) -> str:
    path = nursery.folder / name
    os.mkfifo(path)
    return str(path)


def read_line(path: str) -> str:
    """One line from a fifo, which tells that its writer has come so far."""
    with open(path) as file:
        return file.readline().strip()


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
        fds = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
        print(sorted(fds), fds[0], fds[1] == fds[2], fds[max(fds)].split(":")[0])
    """)
    result = nursery.run("worker:0", script)
    assert result.said == "[0, 1, 2, 64] /dev/null True pipe\n"


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
    assert sorted(result.said.split()) == sorted("from C no newline thread at exit".split())
    assert result.said.index("thread") < result.said.index("at exit")
    assert (nursery.folder / "never_closed").read_text() == "on disk"
    assert not Path((nursery.folder / "kept").read_text()).exists()


def test_lines_are_in_the_log_before_the_child_ends(nursery: Nursery) -> None:
    script = nursery.script("""
        import os, signal, sys
        print("before the kill")
        print("and its error", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    for fork in (True, False):
        result = (
            nursery.run("worker:0", script) if fork else nursery.run("worker:0", sys.executable, "-u", script, python=False)
        )
        assert result == (Exit("worker:0", result.exit.pid, 137, "killed by SIGKILL"), "before the kill\nand its error\n")


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


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_started_is_one_sentence(nursery: Nursery) -> None:
    wait = nursery.script("import signal; signal.pause()")
    nursery.start("worker:0", wait)
    with pytest.raises(UsageError, match="worker:0 runs already"):
        nursery.do(nursery.children.start(nursery.spec("worker:0", wait)))
    with pytest.raises(UsageError, match="worker:1 cannot work in '/nowhere'"):
        nursery.start("worker:1", wait, cwd="/nowhere")
    with pytest.raises(StoreError, match=r"the log '/nowhere/log' of worker:1 cannot be written"):
        nursery.start("worker:1", wait, log="/nowhere/log")
    with pytest.raises(UsageError, match="worker:1 has nothing to run"):
        nursery.start("worker:1")
    assert nursery.children.pid("worker:1") == 0


# -- nobody is left behind -------------------------------------------------------------------------------------------

# Says on a fifo who its descendants are, and waits to be ended: one is a plain child, one made a group of its own.
FAMILY = """
    import os, subprocess, sys, signal
    near = subprocess.Popen(["sleep", "1000"])
    group = subprocess.Popen(["sleep", "1000"], process_group=0)
    nested = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
    pids = [os.getpid(), near.pid, group.pid, nested.pid, int(nested.stdout.readline())]
    with open(sys.argv[1], "w") as file:
        print(*pids, file=file)
    signal.pause()
"""


def family(nursery: Nursery, name: str, **more: Any) -> list[int]:
    """Start one; pidfds of all of it, itself first."""
    script, news = nursery.script(FAMILY, "family.py"), fifo(nursery, f"{name}.fifo")
    argv = [script, news] if more.get("python", True) else [sys.executable, script, news]
    nursery.start(name, *argv, **more)
    return [os.pidfd_open(int(pid)) for pid in read_line(news).split()]


@pytest.mark.parametrize("python", [True, False], ids=["fork", "exec"])
def test_with_a_child_dies_its_whole_family(nursery: Nursery, python: bool) -> None:
    bystanders = family(nursery, "bystander")
    relatives = family(nursery, "worker:0", python=python)
    signal.pidfd_send_signal(relatives[0], signal.SIGKILL)
    assert nursery.result("worker:0").exit.reason == "killed by SIGKILL"

    async def swept() -> None:
        await asyncio.get_running_loop().run_in_executor(None, wait_until_gone, *relatives)

    nursery.do(swept())
    assert nursery.children.pid("bystander") > 0
    for pidfd in bystanders:
        signal.pidfd_send_signal(pidfd, 0)
    nursery.do(nursery.children.end(None, grace_s=0))
    wait_until_gone(*bystanders)


def test_ending_asks_first_and_kills_then(nursery: Nursery) -> None:
    polite = nursery.script(
        """
        import signal, sys
        def leave(number, frame):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        open(sys.argv[1], "w").close()
        while True: signal.pause()
    """,
        "polite.py",
    )
    stubborn = nursery.script(
        """
        import signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").close()
        while True: signal.pause()
    """,
        "stubborn.py",
    )
    for name, script in (("polite", polite), ("stubborn", stubborn), ("other", stubborn)):
        news = fifo(nursery, name)
        nursery.start(name, script, news)
        assert read_line(news) == ""
    nursery.do(nursery.children.end(["polite", "gone long ago"], grace_s=LIMIT_S))
    assert nursery.result("polite") == (Exit("polite", nursery.exits["polite"].pid, 0, "exit code 0"), "saved\n")
    nursery.do(nursery.children.end(["stubborn"], grace_s=0.1))
    assert nursery.exits["stubborn"].code == 137
    nursery.children.signal("other", signal.SIGUSR1)
    nursery.children.signal("gone long ago", signal.SIGUSR1)
    assert nursery.result("other").exit.reason == "killed by SIGUSR1"


def test_who_fled_into_a_session_of_its_own_is_ended_with_the_last_child(nursery: Nursery) -> None:
    script = nursery.script("""
        import subprocess, sys
        far = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open(sys.argv[1], "w").write(str(far.pid))
    """)
    news = fifo(nursery, "news")
    nursery.start("worker:0", script, news)
    far = os.pidfd_open(int(read_line(news)))
    nursery.result("worker:0")
    nursery.do(nursery.children.end(None, grace_s=0))
    wait_until_gone(far)


def test_closing_leaves_neither_processes_nor_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    nursery = Nursery(tmp_path, fork=True, preload=[])
    relatives = family(nursery, "worker:0")
    template = os.pidfd_open(nursery.children.template_pid)
    nursery.close()
    wait_until_gone(template, *relatives)
    assert nursery.exits["worker:0"].reason == "killed by SIGKILL"
    assert len(os.listdir("/proc/self/fd")) == before


AGENT = """
    import asyncio, os, sys
    from covey.node.children import Children, ChildSpec

    async def main(folder, script):
        children = Children(on_exit=print, fork=True)
        await children.open()
        common = dict(env=dict(os.environ), cwd=folder, log=folder + "/agent-child.log", append=True)
        fifos = [folder + "/forked", folder + "/executed"]
        await children.start(ChildSpec(name="forked", argv=[script, fifos[0]], **common))
        await children.start(ChildSpec(name="executed", argv=[sys.executable, script, fifos[1]], python=False, **common))
        pids = [children.template_pid]
        for path in fifos:
            pids += await asyncio.to_thread(lambda: open(path).readline().split())
        print(*pids, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("template", ["alive", "killed before"])
def test_when_the_agent_is_killed_nobody_survives(plain: Nursery, template: str) -> None:
    family_script = plain.script(FAMILY.replace(", process_group=0", ""), "family.py")
    fifo(plain, "forked"), fifo(plain, "executed")
    agent = subprocess.Popen(
        [sys.executable, plain.script(AGENT, "agent.py"), str(plain.folder), family_script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": HOME},
    )
    assert agent.stdout is not None
    pidfds = [os.pidfd_open(int(pid)) for pid in agent.stdout.readline().split()]
    assert len(pidfds) == 1 + 5 + 5
    if template == "killed before":
        signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
        wait_until_gone(pidfds.pop(0))
    for pidfd in pidfds:
        signal.pidfd_send_signal(pidfd, 0)
    agent.kill()
    agent.communicate()
    wait_until_gone(*pidfds)


# -- the template ----------------------------------------------------------------------------------------------------

# Tells that it runs, and ends with the code it is told.
OBEDIENT = """
    import sys
    open(sys.argv[1], "w").close()
    sys.exit(int(open(sys.argv[2]).readline()))
"""


def module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, source: str) -> str:
    """A module that templates opened from now on can import."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), HOME]))
    return name


def test_killing_the_template_hurts_no_child(nursery: Nursery) -> None:
    script = nursery.script(OBEDIENT)
    began, orders = fifo(nursery, "began"), fifo(nursery, "orders")
    pid = nursery.start("worker:0", script, began, orders)
    assert read_line(began) == ""
    first = nursery.children.template_pid
    os.kill(first, signal.SIGKILL)
    assert nursery.run("worker:1", nursery.script("import os; print(os.getppid())", "parent.py")).said == f"{os.getpid()}\n"
    assert nursery.children.template_pid not in (0, first)
    Path(orders).write_text("9")
    assert nursery.result("worker:0").exit == Exit("worker:0", pid, 9, "exit code 9")


def test_a_template_that_always_fails_gives_way_to_exec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = module(monkeypatch, tmp_path, "deadly", "import os; print('last words', flush=True); os._exit(3)")
    nursery = Nursery(tmp_path, fork=True, preload=[name])
    script = nursery.script("import sys; print(sys.orig_argv[1])")
    assert nursery.run("worker:0", script).said == "-u\n"
    nursery.close()
    said = [record.message for record in caplog.records if record.name == "covey.agent"]
    assert sum("the template ended (exit code 3, after saying: last words)" in line for line in said) == 5
    assert said[-1] == "the template failed 5 times: children are started by exec from now on"


def test_modules_that_cannot_be_preloaded_are_left_to_the_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covey.agent")
    threaded = module(
        monkeypatch,
        tmp_path,
        "threaded",
        """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """,
    )
    forking = module(monkeypatch, tmp_path, "forking", "import subprocess; it = subprocess.Popen(['sleep', '1000'])")
    broken = module(monkeypatch, tmp_path, "broken", "raise SystemExit('no licence')")
    good = module(monkeypatch, tmp_path, "good", "print('imported once')")
    nursery = Nursery(tmp_path, fork=True, preload=[threaded, forking, "absent", broken, good])
    script = nursery.script("""
        import sys
        before = [name for name in ("threaded", "forking", "broken", "good", "wave") if name in sys.modules]
        import threaded, good
        print(before)
    """)
    assert nursery.run("worker:0", script).said == "['good']\n"
    nursery.do(nursery.children.preload(["good", "wave"]))
    assert nursery.run("worker:0", script).said == "['good', 'wave']\n"
    os.kill(nursery.children.template_pid, signal.SIGKILL)
    assert nursery.run("worker:0", script).said == "['good', 'wave']\n"
    nursery.close()
    for expected in (
        "importing threaded in the template is impossible, because 1 thread(s) were started",
        "importing forking in the template is impossible, because a process was started",
        "the template goes on without absent, which cannot be imported (ModuleNotFoundError: No module named 'absent')",
        "the template goes on without broken, which cannot be imported (SystemExit: no licence)",
        "the template said: imported once",
    ):
        assert sum(expected in message for message in caplog.messages) >= 1, (expected, caplog.messages)


def test_a_template_in_which_a_thread_appears_late_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a timer of some module fires: seen before the fork, not by a child that hangs."""
    late = module(
        monkeypatch,
        tmp_path,
        "late",
        """
        import os, signal, threading
        def begin(number, frame):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            os.close(os.open(os.environ["NEWS"], os.O_WRONLY))
        signal.signal(signal.SIGUSR1, begin)
    """,
    )
    news = str(tmp_path / "news")
    os.mkfifo(news)
    monkeypatch.setenv("NEWS", news)
    nursery = Nursery(tmp_path, fork=True, preload=[late])
    script = nursery.script("import threading; print(threading.active_count())")
    assert nursery.run("worker:0", script).said == "1\n"
    os.kill(nursery.children.template_pid, signal.SIGUSR1)
    assert read_line(news) == ""
    assert nursery.run("worker:0", script).said == "1\n"
    nursery.close()
    assert any("cannot be forked any more (1 thread(s) were started)" in message for message in caplog.messages)


def slow_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nursery:
    """A nursery whose template imports until somebody writes to a fifo, after saying that it has begun."""
    for name in ("began", "go_on"):
        os.mkfifo(tmp_path / name)
    name = module(
        monkeypatch,
        tmp_path,
        "slow",
        f"""
        open("{tmp_path}/began", "w").close()
        open("{tmp_path}/go_on").read()
    """,
    )
    nursery = Nursery(tmp_path, fork=True, preload=[name])

    async def begun() -> None:
        assert await asyncio.to_thread(read_line, f"{tmp_path}/began") == ""

    nursery.do(begun())
    return nursery


def test_a_start_waits_for_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = slow_import(tmp_path, monkeypatch)

    async def start() -> None:
        spec = nursery.spec("worker:0", nursery.script("import sys; print('slow' in sys.modules)"))
        starting = asyncio.ensure_future(nursery.children.start(spec))
        await asyncio.sleep(0)
        assert not starting.done()
        await asyncio.to_thread(lambda: open(f"{tmp_path}/go_on", "w").close())
        await starting

    nursery.do(start())
    assert nursery.result("worker:0").said == "True\n"
    nursery.close()


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_start_given_up_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    nursery = slow_import(tmp_path, monkeypatch)

    async def give_up() -> None:
        spec = nursery.spec("worker:0", nursery.script("print('it runs')"))
        starting = asyncio.ensure_future(nursery.children.start(spec))
        await asyncio.sleep(0)
        if how == "closed":
            await nursery.children.close()
            with pytest.raises(CoveyError, match="worker:0 is not started: everything is being ended"):
                await starting
        else:
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await asyncio.to_thread(lambda: open(f"{tmp_path}/go_on", "w").close())
            await nursery.children.start(nursery.spec("worker:1", spec.argv[0]))

    nursery.do(give_up())
    assert nursery.log("worker:0") == ""
    if how == "cancelled":
        assert nursery.result("worker:1").said == "it runs\n"
    nursery.close()
    assert "worker:0" not in nursery.exits


def test_uvloop_hears_of_deaths_too(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    nursery = Nursery(tmp_path, fork=True, preload=[], loop=uvloop.new_event_loop)
    nursery.start_all(*(nursery.spec(f"worker:{n}", nursery.script(f"raise SystemExit({n})", f"{n}.py")) for n in range(8)))
    assert [nursery.result(f"worker:{n}").exit.code for n in range(8)] == list(range(8))
    nursery.close()


# -- with torch ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("torch"), fork=True, preload=TORCH)
    yield nursery
    nursery.close()


def test_eight_torch_children_at_once(torch_nursery: Nursery) -> None:
    """Each with random numbers of its own and the threads it would have had alone, in a template that never computed."""
    script = torch_nursery.script(
        """
        import json, os, random, sys
        already = [name for name in ("torch", "torch._dynamo", "numpy") if name in sys.modules]
        import numpy, torch
        json.dump({
            "already": already, "threads": torch.get_num_threads(),
            "seeds": [torch.initial_seed(), random.random(), numpy.random.random(), torch.rand(1).item()],
            "env": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
        }, sys.stdout)
    """,
        "eight.py",
    )
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    torch_nursery.start_all(
        *(torch_nursery.spec(f"worker:{n}", script, env=env) for n in range(7)),
        torch_nursery.spec("worker:7", script, env={**env, "OMP_NUM_THREADS": "1"}),
    )
    seen = [json.loads(torch_nursery.result(f"worker:{n}").said) for n in range(8)]
    alone = json.loads(python(torch_nursery.folder, script, env=env)[1])
    assert all(child["already"] == ["torch", "torch._dynamo", "numpy"] for child in seen)
    assert len({seed for child in seen for seed in child["seeds"]}) == 8 * 4
    assert [child["threads"] for child in seen] == [alone["threads"]] * 7 + [1]
    assert [child["env"] for child in seen] == [{}] * 7 + [{"OMP_NUM_THREADS": "1"}]


def test_torch_works_in_a_forked_child(torch_nursery: Nursery) -> None:
    """What hangs or fails when the template has computed, or when the main module is not the child's own."""
    matmul = torch_nursery.script(
        """
        import numpy, torch
        torch.set_num_threads(2)
        a = torch.rand(600, 600, requires_grad=True)
        (a @ a).sum().backward()
        assert torch.isfinite(a.grad).all()
        numpy.ones((600, 600)) @ numpy.ones((600, 600))
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        print("computed")
    """,
        "matmul.py",
    )
    loaders = torch_nursery.script(
        """
        import io, pickle, torch
        from multiprocessing import get_context
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return i * i

        class Answer:
            def __init__(self, value): self.value = value

        def ask(value): return Answer(value + 1)

        if __name__ == "__main__":
            copy = pickle.loads(pickle.dumps(Answer(3)))
            assert type(copy) is Answer and copy.value == 3
            buffer = io.BytesIO()
            torch.save(Answer(4), buffer)
            buffer.seek(0)
            assert torch.load(buffer, weights_only=False).value == 4
            for method in ("fork", "spawn"):
                loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
                print(method, [batch.tolist() for batch in loader])
            with get_context("spawn").Pool(1) as pool:
                print([answer.value for answer in pool.map(ask, [1, 2])])
    """,
        "loaders.py",
    )
    torch_nursery.start_all(
        torch_nursery.spec("matmul", matmul),
        torch_nursery.spec("script", loaders),
        torch_nursery.spec("module", "loaders", module=True),
    )
    expected = "fork [[0, 1, 4, 9], [16, 25, 36, 49]]\nspawn [[0, 1, 4, 9], [16, 25, 36, 49]]\n[2, 3]\n"
    for name, said in (("matmul", "computed\n"), ("script", expected), ("module", expected)):
        result = torch_nursery.result(name)
        assert (result.exit.reason, result.said) == ("exit code 0", said)
