"""`Children` on their own event loop, and shared helpers of the tests about child processes."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from covey.agent.children import Children, ChildSpec, Exit

HOME = str(Path(sys.modules["covey.agent.children"].__file__ or "").parents[2])
LIMIT_S = 60.0


class Result(NamedTuple):
    exit: Exit
    output: str


class ChildRunner:
    """`Children` on their own event loop, for synchronous tests."""

    def __init__(self, folder: Path, *, fork: bool, preload: list[str], loop: Callable[[], Any] | None = None) -> None:
        self.folder = folder
        self.exits: dict[str, Exit] = {}
        self.runner = asyncio.Runner(loop_factory=loop)
        self.exit_event = asyncio.Event()
        self.on_exit_hook: Callable[[], None] = lambda: None  # called when a child has exited, before any other event
        self.children = Children(on_exit=self._ended, fork=fork, preload=preload)
        self.run_async(self.children.open())

    def _ended(self, exit: Exit) -> None:
        assert exit.name not in self.exits, f"{exit.name} exited twice"
        self.exits[exit.name] = exit
        self.on_exit_hook()
        self.exit_event.set()

    def run_async(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, LIMIT_S))

    def script(self, source: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return str(path)

    def spec(self, name: str, *argv: str, **options: Any) -> ChildSpec:
        options = {"env": dict(os.environ), "cwd": str(self.folder), "log": str(self.folder / f"{name}.log")} | options
        return ChildSpec(name=name, argv=list(argv), **options)

    def start(self, name: str, *argv: str, **options: Any) -> int:
        self.exits.pop(name, None)
        pid: int = self.run_async(self.children.start(self.spec(name, *argv, **options)))
        return pid

    def start_all(self, *specs: ChildSpec) -> None:
        async def start_concurrently() -> None:
            await asyncio.gather(*(self.children.start(spec) for spec in specs))

        self.run_async(start_concurrently())

    def result(self, name: str) -> Result:
        """Wait for the exit of a child; return its exit and output."""

        async def wait_for_exit() -> None:
            while name not in self.exits:
                self.exit_event.clear()
                await self.exit_event.wait()

        self.run_async(wait_for_exit())
        return Result(self.exits[name], self.log(name))

    def run(self, name: str, *argv: str, **options: Any) -> Result:
        self.start(name, *argv, **options)
        return self.result(name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        self.run_async(self.children.close())
        self.runner.close()


def python(cwd: Path, *argv: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run python itself; return the exit code as in a shell, and the output."""
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
    """Wait until the processes have exited, and close their pidfds."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(LIMIT_S * 1000), f"process still running after {LIMIT_S:g} s"
        os.close(pidfd)


def fifo(child_runner: ChildRunner, name: str) -> str:
    path = child_runner.folder / name
    os.mkfifo(path)
    return str(path)


def read_line(path: str) -> str:
    """Return one line from a fifo; blocks until it is written."""
    with open(path) as file:
        return file.readline().strip()


# Writes the pids of its descendants to a fifo and waits: one is a plain child, one leads its own process group.
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


def family(child_runner: ChildRunner, name: str, **options: Any) -> list[int]:
    """Start a process with descendants; return the pidfds of all, its own first."""
    script, exit_fifo = child_runner.script(FAMILY, "family.py"), fifo(child_runner, f"{name}.fifo")
    argv = [script, exit_fifo] if options.get("python", True) else [sys.executable, script, exit_fifo]
    child_runner.start(name, *argv, **options)
    return [os.pidfd_open(int(pid)) for pid in read_line(exit_fifo).split()]
