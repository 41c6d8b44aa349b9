"""Real processes for tests: a scheduler and workers started by MS_* variables, or any command at all.

    def test_two_workers(cluster: Cluster) -> None:          # the fixture is in conftest.py
        cluster.scheduler()
        first, second = cluster.worker(0), cluster.worker(1)
        first.wait_for("rank=0 world=2")
        cluster.release()                                    # the default script ends when told so
        assert cluster.wait() == {"scheduler": 0, "worker-0": 0, "worker-1": 0}

Every process has a session and a log file of its own, an environment without anything from outside, and ends with the test.
Waiting is for events (a line, an exit, a view of the cluster), with one generous deadline; when it passes, the logs are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from covey.cli.scheduler_client import fetch_view
from covey.core.cluster.view import ClusterView, NodeView
from covey.errors import CoveyError
from covey.runtime.node_runtime import SchedulerAddress

DEADLINE_S = 90.0  # for any one event; reached only when something is wrong
POLL_S = 0.01
TAIL_LINES = 60
MARK = "HARNESS_FOLDER"  # in the environment of everything a test starts

# Joins, says who it is, and stays until the file named by its first argument exists. It never imports torch.
STAY = """
import pathlib, sys, time
import covey

covey.init()
local = f"{covey.get_local_rank()}/{covey.get_local_rank_size()}"
print(f"rank={covey.get_rank()} world={covey.get_group_size()} local={local}", flush=True)
while sys.argv[1:] and not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
print("done", flush=True)
"""


def until(happened: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S, story: Callable[[], str] = str) -> Any:
    """Wait for an event: the first true answer of `happened`. Past the deadline, fail with `what` and the story."""
    limit = time.monotonic() + deadline_s
    while True:
        began = time.thread_time()
        if answer := happened():
            return answer
        assert time.monotonic() < limit, f"waited {deadline_s:g} s for {what}\n{story()}"
        time.sleep(max(POLL_S, 4 * (time.thread_time() - began)))  # to look takes a fifth of a processor at most


def free_port(host: str = "127.0.0.1") -> int:
    """A free port outside the range from which outgoing connections take theirs, so that none of them is in the way."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket(kind) as sock:
            sock.bind((host, port))
            return port


class Process:
    """One started process. Codes are as a shell says them: 128 + n for signal n."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path, story: Callable[[], str]) -> None:
        self.name = name
        self.popen = popen
        self.log = log  # its stdout and stderr
        self._story = story  # everyone's last lines

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        found = self.popen.poll()
        return found if found is None or found >= 0 else 128 - found

    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        state = "runs" if self.alive else f"ended with {self.code}"
        lines = self.text().splitlines()[-TAIL_LINES:]
        return "\n".join([f"--- {self.name} (process {self.pid}) {state}", *lines])

    def wait_for(self, pattern: str, *, count: int = 1, deadline_s: float = DEADLINE_S) -> re.Match[str]:
        """The `count`th match of a regular expression in its output, as soon as it is there."""

        def found() -> list[re.Match[str]]:
            matches = list(re.finditer(pattern, self.text()))
            return matches if len(matches) >= count else []

        def possible() -> list[re.Match[str]]:
            over = not self.alive  # asked first: what it wrote before it ended must still be found
            matches = found()
            assert matches or not over, f"{self.name} ended without saying {pattern!r}\n{self._story()}"
            return matches

        matches: list[re.Match[str]] = until(possible, f"{self.name} to say {pattern!r}", deadline_s, self._story)
        return matches[count - 1]

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit code, as soon as it has ended."""
        until(lambda: not self.alive, f"{self.name} to end", deadline_s, self._story)
        assert self.code is not None
        return self.code

    def signal(self, number: signal.Signals) -> None:
        """Signal this process alone, not its children."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """kill -9, and be sure that it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """SIGSTOP, and be sure that it has taken effect: every thread stands still."""
        self.signal(signal.SIGSTOP)
        until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, f"{self.name} to stop")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)


class Processes:
    """Starts processes and ends all of them, with whatever they started, when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Process] = []
        for name in ("runtime", "config", "home"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def environ(self, extra: Mapping[str, str | int | float | None] | None = None) -> dict[str, str]:
        """A small environment of the test's own; None takes a variable away."""
        base: dict[str, str | int | float | None] = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.environ.get("PYTHONPATH"),  # the covey under test, where it is not the installed one
            "HOME": str(self.folder / "home"),
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "COVERAGE_PROCESS_CONFIG": os.environ.get("COVERAGE_PROCESS_CONFIG"),  # what is started is counted too
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "TERM": "dumb",
            MARK: str(self.folder),
        }
        return {name: str(value) for name, value in {**base, **(extra or {})}.items() if value is not None}

    def start(
        self,
        command: Sequence[str | Path],
        *,
        name: str = "",
        env: Mapping[str, str | int | float | None] | None = None,
        cwd: Path | None = None,
        **popen: Any,
    ) -> Process:
        """Start a command with `environ(env)`, in a session of its own; its output goes to a file named after it."""
        name = self._unused(name or Path(command[0]).name)
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=self.environ(env),
                cwd=cwd or self.folder,
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, **popen},
            )
        self.all.append(Process(name, process, log, self.tails))
        return self.all[-1]

    def run(self, command: Sequence[str | Path], **options: Any) -> Process:
        """Start a command and wait until it has ended: `.code` and `.text()` tell how."""
        process = self.start(command, **options)
        process.wait()
        return process

    def wait(self) -> dict[str, int]:
        """The exit codes of all, by name, as soon as everyone has ended."""
        until(lambda: not any(p.alive for p in self.all), "everyone to end", story=self.tails)
        return {process.name: process.wait() for process in self.all}

    def tails(self) -> str:
        """The last lines of everyone, for the sentence of a failure."""
        return "\n".join(process.tail() for process in self.all)

    def mine(self, fits: Callable[[psutil.Process], bool] = lambda _: True) -> list[psutil.Process]:
        """Every living process that came from this test, however far it has moved away: they all carry its mark. `fits` may
        ask one that ends meanwhile."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE
                if marked and fits(process):
                    found.append(process)
        return found

    def end(self) -> None:
        """Kill what still runs."""
        while family := self.mine():
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=1)
        for started in self.all:
            started.popen.wait()

    def _unused(self, name: str) -> str:
        taken = {process.name for process in self.all}
        return next(n for n in (name, *(f"{name}.{i}" for i in range(2, 1000))) if n not in taken)


class Cluster(Processes):
    """The raw MS_* way: one script, started once per node. `env` holds for every node, unless a node says otherwise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.host = "127.0.0.1"
        self.port = free_port()
        self.workers = 2
        self.env: dict[str, str | int | float | None] = {"MS_SCHED_MANAGE_PORT": 0}
        self.go = folder / "go"
        self.default = self.script(STAY, "train.py")

    def script(self, text: str, name: str = "other.py") -> Path:
        """A program in the test's folder. It may be written again while a run reads it: no reader sees half of it."""
        path = self.folder / name
        new = path.with_suffix(f"{path.suffix}.new")
        new.write_text(text)
        new.replace(path)
        return path

    def scheduler(self, **options: Any) -> Process:
        """Start the scheduler; it is called `scheduler`, the next one `scheduler.2`."""
        return self.node("MS_SCHED", **{"name": "scheduler", **options})

    def worker(self, node_id: int | str | None = None, **options: Any) -> Process:
        """Start a worker; with an id it is called `worker-ID`, without one `worker`."""
        return self.node("MS_WORKER", node_id, **options)

    def node(
        self,
        role: str,
        node_id: int | str | None = None,
        *,
        name: str = "",
        script: Path | None = None,
        args: Sequence[str | Path] | None = None,
        before: Sequence[str | Path] = (),
        **env: str | int | float | None,
    ) -> Process:
        """Start any role. `env` is for this node alone; `before` are words in front of the command."""
        word = role.removeprefix("MS_").lower()
        default_name = word if node_id is None else f"{word}-{node_id}"
        variables: dict[str, str | int | float | None] = {
            "MS_ROLE": role,
            "MS_SCHED_HOST": self.host,
            "MS_SCHED_PORT": self.port,
            "MS_WORKER_NUM": self.workers,
            "MS_NODE_ID": node_id,
            **self.env,
            **env,
        }
        command = [*before, sys.executable, script or self.default, *([self.go] if args is None else args)]
        return self.start(command, name=name or default_name, env=variables)

    def formed(self, *workers: int | str | None, **env: Any) -> tuple[Process, list[Process]]:
        """A scheduler and its workers (ids 0, 1, ... unless given), all of them members; the workers in the order given."""
        scheduler = self.scheduler(**env)
        nodes = [self.worker(node_id, **env) for node_id in (workers or range(self.workers))]
        for node in nodes:
            node.wait_for(r"rank=\d+ world=\d+")
        return scheduler, nodes

    def release(self) -> None:
        """Let every STAY script end."""
        self.go.touch()

    # -- looking -----------------------------------------------------------------------------------------------------

    def view(self, secret: str = "") -> ClusterView:
        """The cluster as its scheduler sees it now."""
        return asyncio.run(fetch_view(SchedulerAddress(self.host, self.port, secret)))

    def until(self, happened: Callable[[ClusterView], Any], what: str, deadline_s: float = DEADLINE_S) -> ClusterView:
        """The first view in which `happened` is true; a scheduler that is not there yet is asked again."""
        schedulers = [process for process in self.all if process.name.startswith("scheduler")]

        def seen() -> ClusterView | None:
            over = schedulers and not schedulers[-1].alive
            assert not over, f"the scheduler ended while the test waited for {what}\n{self.tails()}"
            try:
                view = self.view()
            except CoveyError:
                return None
            return view if happened(view) else None

        found: ClusterView = until(seen, what, deadline_s, self.tails)
        return found


def nodes_of(view: ClusterView, role: str = "worker") -> dict[str, NodeView]:
    """The nodes of a role, by id."""
    return {node.node_id: node for node in view.nodes if node.role == role}


def running(folder: Path) -> Iterator[Cluster]:
    """The body of the `cluster` fixture."""
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
