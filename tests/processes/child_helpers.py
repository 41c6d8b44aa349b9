"""Children on a loop of their own, and the words that tests about processes share."""

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
    said: str


class Nursery:
    """Children on a loop of their own, for tests that read from top to bottom."""

    def __init__(self, folder: Path, *, fork: bool, preload: list[str], loop: Callable[[], Any] | None = None) -> None:
        self.folder = folder
        self.exits: dict[str, Exit] = {}
        self.runner = asyncio.Runner(loop_factory=loop)
        self.news = asyncio.Event()
        self.witness: Callable[[], None] = lambda: None  # called when a child has ended, before anything else can happen
        self.children = Children(on_exit=self._ended, fork=fork, preload=preload)
        self.do(self.children.open())

    def _ended(self, exit: Exit) -> None:
        assert exit.name not in self.exits, "one exit for one life"
        self.exits[exit.name] = exit
        self.witness()
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
