"""Real processes for tests: a scheduler and workers started by MS_* variables, or any command at all.

    def test_two_workers(cluster: Cluster) -> None:          # the fixture is in conftest.py
        cluster.scheduler()
        first, second = cluster.worker(0), cluster.worker(1)
        first.wait_for("rank=0 world=2")
        cluster.release()                                    # the default script ends when `go` exists
        assert cluster.wait() == {"scheduler": 0, "worker-0": 0, "worker-1": 0}

Every process has its own session and log file and a clean environment, and ends with the test. Tests wait for events (a line,
an exit, a view of the cluster) with one generous deadline; after it, the test fails with the logs.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from covey.cli.scheduler_session import fetch_view
from covey.core.cluster.view import ClusterView, NodeView
from covey.errors import CoveyError
from covey.runtime.node_runtime import SchedulerAddress

DEADLINE_S = 90.0  # for any one event; reached only if the test fails
POLL_S = 0.01
TAIL_LINES = 60
PORT_RANGES, PORTS_PER_RANGE = 8, 2_750  # from 10,000 on
_returned_ports: set[int] = set()
MARK = "HARNESS_FOLDER"  # in the environment of every process that a test starts

# Joins, prints its rank, and runs until the file named by its first argument exists. It never imports torch.
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


def until(happened: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S, details: Callable[[], str] = str) -> Any:
    """Wait for the first true result of `happened` and return it. After the deadline, fail with `what` and the details."""
    limit = time.monotonic() + deadline_s
    while True:
        started_at = time.thread_time()
        if answer := happened():
            return answer
        assert time.monotonic() < limit, f"waited {deadline_s:g} s for {what}\n{details()}"
        time.sleep(max(POLL_S, 4 * (time.thread_time() - started_at)))  # the checks use a fifth of a core at most


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port that this process has not returned before."""
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """Return the first of consecutive free ports, outside the ephemeral range: no outgoing connection uses them.

    Each process of pytest-xdist has its own range, and no port is returned twice, so that a port is still free when a test
    uses it. Two runs of pytest at the same time share the ranges.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PORT_RANGES
    first = 10_000 + number * PORTS_PER_RANGE
    while True:
        port = random.SystemRandom().randrange(first, first + PORTS_PER_RANGE - count)
        chosen = range(port, port + count)
        if _returned_ports.isdisjoint(chosen) and all(_can_bind(host, each) for each in chosen):
            _returned_ports.update(chosen)
            return port


def _can_bind(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True


class Process:
    """A started process. Exit codes are as in a shell: 128 + n for signal n."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path, details: Callable[[], str]) -> None:
        self.name = name
        self.popen = popen
        self.log = log  # its stdout and stderr
        self._details = details  # last lines of all processes

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        result = self.popen.poll()
        return result if result is None or result >= 0 else 128 - result

    def text(self) -> str:
        """Return its output so far."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        state = "runs" if self.alive else f"exited with {self.code}"
        lines = self.text().splitlines()[-TAIL_LINES:]
        return "\n".join([f"--- {self.name} (process {self.pid}) {state}", *lines])

    def wait_for(self, pattern: str, *, count: int = 1, deadline_s: float = DEADLINE_S) -> re.Match[str]:
        """Wait for the `count`th match of a regular expression in its output, and return it."""

        def result() -> list[re.Match[str]]:
            matches = list(re.finditer(pattern, self.text()))
            return matches if len(matches) >= count else []

        def possible() -> list[re.Match[str]]:
            ended = not self.alive  # checked first, so that output before the exit is still found
            matches = result()
            assert matches or not ended, f"{self.name} exited without output {pattern!r}\n{self._details()}"
            return matches

        matches: list[re.Match[str]] = until(possible, f"{self.name} to print {pattern!r}", deadline_s, self._details)
        return matches[count - 1]

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the exit of the process; return its code."""
        until(lambda: not self.alive, f"{self.name} to exit", deadline_s, self._details)
        assert self.code is not None
        return self.code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, not to its children."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """Send SIGSTOP and wait until all threads are stopped."""
        self.signal(signal.SIGSTOP)
        until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, f"{self.name} to stop")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)


class Processes:
    """Starts processes, and kills all of them and their descendants at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Process] = []
        for name in ("runtime", "config", "home"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def environ(self, extra: Mapping[str, str | int | float | None] | None = None) -> dict[str, str]:
        """Return a clean environment with `extra`; None removes a variable."""
        base: dict[str, str | int | float | None] = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.environ.get("PYTHONPATH"),  # the covey under test, if it is not the installed one
            "HOME": str(self.folder / "home"),
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "COVERAGE_PROCESS_CONFIG": os.environ.get("COVERAGE_PROCESS_CONFIG"),  # coverage of started processes
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
        """Start a command with `environ(env)` in its own session; its output goes to a file named after it."""
        name = self._unused(name or Path(command[0]).name)
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(role_name) for role_name in command],
                env=self.environ(env),
                cwd=cwd or self.folder,
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, **popen},
            )
        self.all.append(Process(name, process, log, self.tails))
        return self.all[-1]

    def run(self, command: Sequence[str | Path], **options: Any) -> Process:
        """Run a command to its end; `.code` and `.text()` have the result."""
        process = self.start(command, **options)
        process.wait()
        return process

    def wait(self) -> dict[str, int]:
        """Wait for the exit of all processes; return their codes by name."""
        until(lambda: not any(p.alive for p in self.all), "all processes to exit", details=self.tails)
        return {process.name: process.wait() for process in self.all}

    def tails(self) -> str:
        """Return the last lines of all processes, for failure messages."""
        return "\n".join(process.tail() for process in self.all)

    def own_processes(self, fits: Callable[[psutil.Process], bool] = lambda _: True) -> list[psutil.Process]:
        """Return the running processes of this test, recognized by the mark in their environment, for which `fits` is true.
        `fits` may raise `psutil.Error` for a process that exits."""
        result = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE
                if marked and fits(process):
                    result.append(process)
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill all processes that still run."""
        while family := self.own_processes():
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=1)
        for started in self.all:
            started.popen.wait()

    def _unused(self, name: str) -> str:
        used_names = {process.name for process in self.all}
        return next(n for n in (name, *(f"{name}.{i}" for i in range(2, 1000))) if n not in used_names)


class Cluster(Processes):
    """A cluster started by MS_* variables: one script per node. `env` applies to every node and can be overridden per node."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.host = "127.0.0.1"
        self.port = free_port()
        self.workers = 2
        self.env: dict[str, str | int | float | None] = {"MS_SCHED_MANAGE_PORT": 0}
        self.go = folder / "go"
        self.default = self.script(STAY, "train.py")

    def script(self, text: str, name: str = "other.py") -> Path:
        """Write a script into the test's directory, atomically, and return its path."""
        path = self.folder / name
        new = path.with_suffix(f"{path.suffix}.new")
        new.write_text(text)
        new.replace(path)
        return path

    def scheduler(self, **options: Any) -> Process:
        """Start the scheduler, named `scheduler`; the next one is named `scheduler.2`."""
        return self.node("MS_SCHED", **{"name": "scheduler", **options})

    def worker(self, node_id: int | str | None = None, **options: Any) -> Process:
        """Start a worker, named `worker-ID`, or `worker` without an id."""
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
        """Start a node of any role. `env` is for this node only; `before` is a prefix of the command."""
        role_name = role.removeprefix("MS_").lower()
        default_name = role_name if node_id is None else f"{role_name}-{node_id}"
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
        """Start a scheduler and workers (ids 0, 1, ... unless given) and wait until all have ranks; return them in that
        order."""
        scheduler = self.scheduler(**env)
        nodes = [self.worker(node_id, **env) for node_id in (workers or range(self.workers))]
        for node in nodes:
            node.wait_for(r"rank=\d+ world=\d+")
        return scheduler, nodes

    def release(self) -> None:
        """Let all STAY scripts end."""
        self.go.touch()

    # -- views -------------------------------------------------------------------------------------------------------

    def view(self, secret: str = "") -> ClusterView:
        """Return the present view of the cluster."""
        return asyncio.run(fetch_view(SchedulerAddress(self.host, self.port, secret)))

    def until(self, happened: Callable[[ClusterView], Any], what: str, deadline_s: float = DEADLINE_S) -> ClusterView:
        """Wait for the first view in which `happened` is true, and return it; retries while no scheduler answers."""
        schedulers = [process for process in self.all if process.name.startswith("scheduler")]

        def seen() -> ClusterView | None:
            ended = schedulers and not schedulers[-1].alive
            assert not ended, f"the scheduler exited while the test waited for {what}\n{self.tails()}"
            try:
                view = self.view()
            except CoveyError:
                return None
            return view if happened(view) else None

        result: ClusterView = until(seen, what, deadline_s, self.tails)
        return result


def nodes_of(view: ClusterView, role: str = "worker") -> dict[str, NodeView]:
    """Return the nodes of a role by id."""
    return {node.node_id: node for node in view.nodes if node.role == role}
