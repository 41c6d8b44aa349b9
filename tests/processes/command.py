"""`covey` as a user types it: the verbs, what a run leaves behind, and who of it still lives.

    def test_two(shell: Shell) -> None:                      # each file makes its own fixture from `shells`
        run = shell.covey("run", "-n", "2", shell.default, shell.go)
        shell.heard(1, "rank=1")
        shell.release()
        assert run.wait() == 0

A run's logs go to the folder `logs`, unless the test says otherwise.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.processes.harness import Cluster, Process, until

# What a script prints about itself, as one line of JSON after a word that nothing else prints.
SAY = 'print("SAYS", __import__("json").dumps({}), flush=True)\n'


# The seeds' heartbeat limit, far beyond a test's patience: whoever ends within it was told, or saw it happen.
PATIENT = {"MS_NODE_TIMEOUT": 600, "COVEY_GRACE": 600}

# Rank 1 waits for the file and then does what the second argument says; the others never end by themselves.
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

# Ends only when it is killed.
STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
time.sleep(1000)
"""


class Shell(Cluster):
    """Types commands. Whatever they start ends with the test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.logs = folder / "logs"

    def covey(self, *words: str | Path, name: str = "", before: Sequence[str | Path] = (), **options: Any) -> Process:
        """Start a verb. `before` are words in front of the command."""
        verb, *rest = words
        options["env"] = {"COVEY_STRATEGY": "exit"} | (options.get("env") or {})  # what healing does is tested apart
        where: list[str | Path] = ["--log-dir", self.logs] if verb == "run" and "--log-dir" not in rest else []
        return self.start([*before, "covey", verb, *where, *rest], name=name or f"covey-{verb}", **options)

    def ask(self, *words: str | Path, **options: Any) -> Process:
        """Run a verb to its end: `.code` and `.text()` tell how."""
        process = self.covey(*words, **options)
        process.wait()
        return process

    def nodes(self, *words: str) -> list[dict[str, Any]]:
        """What `covey nodes --json` says."""
        asked = self.ask("nodes", "--json", *words)
        assert asked.code == 0, asked.tail()
        found: list[dict[str, Any]] = json.loads(asked.text())
        return found

    # -- logs --------------------------------------------------------------------------------------------------------

    def log(self, rank: int | str) -> str:
        """What a rank, or "scheduler", has written so far."""
        path = self.logs / (f"worker_{rank}.log" if isinstance(rank, int) else f"{rank}.log")
        return path.read_text(errors="replace") if path.exists() else ""

    def heard(self, rank: int | str, pattern: str, *, count: int = 1) -> re.Match[str]:
        """The `count`th match of a regular expression in the log of a rank, as soon as it is there."""

        def found() -> re.Match[str] | None:
            over = not any(process.alive for process in self.all)
            matches = list(re.finditer(pattern, self.log(rank)))
            assert len(matches) >= count or not over, f"{rank} never said {pattern!r}\n{self.tails()}\n{self.log(rank)}"
            return matches[count - 1] if len(matches) >= count else None

        match: re.Match[str] = until(found, f"{rank} to say {pattern!r}", story=lambda: f"{self.tails()}\n{self.log(rank)}")
        return match

    def says(self, rank: int) -> Any:
        """What a rank printed with SAY."""
        return json.loads(self.heard(rank, r"SAYS (.*)\n")[1])

    # -- who lives ---------------------------------------------------------------------------------------------------

    def template(self, run: Process) -> psutil.Process:
        """The template of a run."""

        def fits(process: psutil.Process) -> bool:
            return process.ppid() == run.pid and "covey: template" in "".join(process.cmdline())

        found: list[psutil.Process] = until(lambda: self.mine(fits), "a template")
        return found[0]

    def schedulers(self) -> list[psutil.Process]:
        """The run's, also those that stand by."""
        return self.mine(lambda process: "covey.scheduler.main" in process.cmdline())

    def scheduler_pid(self) -> int:
        """That of the run's scheduler, in the life it is in."""
        found: list[psutil.Process] = until(self.schedulers, "a scheduler")
        return found[0].pid

    def listening(self, port: int) -> None:
        """Be sure that something listens on a port of loopback."""

        def answers() -> bool:
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", port)) == 0

        until(answers, f"something to listen on {port}", story=self.tails)

    def nobody(self) -> None:
        """Be sure that nothing the test started is left."""

        def described() -> str:
            return "\n".join(str(process) for process in self.mine())

        until(lambda: not self.mine(), "everything to be gone", story=described)


class Terminal:
    """A terminal of which a command may think that it is a person's. What it shows comes without its control sequences.

    It is read all the time, as a person's would be: a command must not wait for the test to look.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._raw = b""
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str) -> str:
        """All that was shown, as soon as the pattern is in it."""
        until(lambda: re.search(pattern, self.text()), f"{pattern!r} on the terminal", story=self.text)
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


def shells(folder: Path) -> Iterator[Shell]:
    """The body of a fixture."""
    shell = Shell(folder)
    try:
        yield shell
    finally:
        shell.end()
