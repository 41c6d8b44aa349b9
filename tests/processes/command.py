"""`covey` commands as a user types them, the logs of a run, and its processes.

    def test_two(shell: Shell) -> None:                      # the fixture of conftest.py
        run = shell.covey("run", "-n", "2", shell.default, shell.go)
        shell.wait_for_log(1, "rank=1")
        shell.release()
        assert run.wait() == 0

The logs of a run go to the directory `logs`, unless the test sets another.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.processes.harness import Cluster, Process, until

# Prints one line of JSON after a unique word.
PRINT_JSON = 'print("SAYS", __import__("json").dumps({}), flush=True)\n'


# Timeouts far beyond the duration of a test, so that only events end processes.
PATIENT = {"MS_NODE_TIMEOUT": 600, "COVEY_GRACE": 600}

# Rank 1 waits for the file and then executes the second argument; the other ranks never end by themselves.
FAILS = """
import os, pathlib, signal, sys, time

if "covey" in sys.argv:
    import covey
    covey.init()
rank = int(os.environ["RANK"])
print(f"rank={rank}", flush=True)

def fail():
    if sys.argv[2] == "raise":
        raise ValueError("the loss is not a number")
    exec(sys.argv[2])

while not (rank == 1 and pathlib.Path(sys.argv[1]).exists()):
    time.sleep(0.02)
fail()
"""

# Ignores all signals but SIGKILL.
STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
time.sleep(1000)
"""


class Shell(Cluster):
    """Runs commands; all processes they start end with the test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.logs = folder / "logs"

    def covey(self, *arguments: str | Path, name: str = "", before: Sequence[str | Path] = (), **options: Any) -> Process:
        """Start a covey command. `before` is a prefix of the command line."""
        verb, *rest = arguments
        options["env"] = {"COVEY_STRATEGY": "exit"} | (options.get("env") or {})  # healing has its own tests
        where: list[str | Path] = ["--log-dir", self.logs] if verb == "run" and "--log-dir" not in rest else []
        return self.start([*before, "covey", verb, *where, *rest], name=name or f"covey-{verb}", **options)

    def run_command(self, *arguments: str | Path, **options: Any) -> Process:
        """Run a covey command to its end; `.code` and `.text()` have the result."""
        process = self.covey(*arguments, **options)
        process.wait()
        return process

    def nodes(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the output of `covey nodes --json`."""
        command = self.run_command("nodes", "--json", *arguments)
        assert command.code == 0, command.tail()
        result: list[dict[str, Any]] = json.loads(command.text())
        return result

    # -- logs --------------------------------------------------------------------------------------------------------

    def log(self, rank: int | str) -> str:
        """Return the log of a rank, or of "scheduler", so far."""
        path = self.logs / (f"worker_{rank}.log" if isinstance(rank, int) else f"{rank}.log")
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_log(self, rank: int | str, pattern: str, *, count: int = 1) -> re.Match[str]:
        """Wait for the `count`th match of a regular expression in the log of a rank, and return it."""

        def result() -> re.Match[str] | None:
            ended = not any(process.alive for process in self.all)
            matches = list(re.finditer(pattern, self.log(rank)))
            assert len(matches) >= count or not ended, f"{rank} never logged {pattern!r}\n{self.tails()}\n{self.log(rank)}"
            return matches[count - 1] if len(matches) >= count else None

        match: re.Match[str] = until(result, f"{rank} to log {pattern!r}", details=lambda: f"{self.tails()}\n{self.log(rank)}")
        return match

    def printed_json(self, rank: int) -> Any:
        """Return what a rank printed with PRINT_JSON."""
        return json.loads(self.wait_for_log(rank, r"SAYS (.*)\n")[1])

    # -- processes ---------------------------------------------------------------------------------------------------

    def template(self, run: Process) -> psutil.Process:
        """Return the template of a run."""

        def fits(process: psutil.Process) -> bool:
            return process.ppid() == run.pid and "covey: template" in "".join(process.cmdline())

        result: list[psutil.Process] = until(lambda: self.own_processes(fits), "a template")
        return result[0]

    def schedulers(self) -> list[psutil.Process]:
        """Return the scheduler processes of the run, including standbys."""
        return self.own_processes(lambda process: "covey.scheduler.main" in process.cmdline())

    def scheduler_pid(self) -> int:
        """Return the pid of the run's scheduler."""
        result: list[psutil.Process] = until(self.schedulers, "a scheduler")
        return result[0].pid

    def listening(self, port: int) -> None:
        """Wait until a process listens on a port of loopback."""

        def answers() -> bool:
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", port)) == 0

        until(answers, f"a listener on {port}", details=self.tails)

    def assert_no_processes(self) -> None:
        """Wait until no process of the test is left."""

        def described() -> str:
            return "\n".join(str(process) for process in self.own_processes())

        until(lambda: not self.own_processes(), "all processes to exit", details=described)


class Terminal:
    """A pseudo-terminal, whose text is returned without control sequences.

    A thread reads it continuously, so that a command is never blocked by it.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._raw = b""
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str) -> str:
        """Wait until the pattern is shown; return the whole text."""
        until(lambda: re.search(pattern, self.text()), f"{pattern!r} on the terminal", details=self.text)
        return self.text()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def _read(self) -> None:
        while not self._closed:
            if select.select([self._ours], [], [], 0.1)[0]:
                self._raw += os.read(self._ours, 65536)

    def text(self) -> str:
        plain: bytes = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self._raw)
        return plain.decode(errors="replace")

    def close(self) -> None:
        self._closed = True
        self._reader.join()
        os.close(self._ours)
        os.close(self.theirs)
