"""Types the console blocks of the documents, from the first of a page to the last, at terminals of real hosts.

    ```console
    $ tail -F device/worker_0.log             `$ ` begins a command, `> ` continues it
    ...                                       any lines
    epoch: 9, step: 0, loss is 1.8            any number with a point matches, and any number of s or ms
    rank ... is there                         within a line: any text
    ^C                                        Ctrl-C, when all of this was printed
    ```

A command must print exactly what is shown, and exit with 0. If the next block is typed in another terminal, the command keeps
running and may exit with any code; with the variable PAUSE, which makes examples use less CPU time. `console second` is another
terminal of the same host, `console host 2` one of another host. The hosts are network namespaces, so every port and address is
the one in the text: host 1 is 10.0.0.1, host 2 is 10.0.0.2. Each host has the files of a clone, and both have one home
directory.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from tests.documents import PAGES, ROOT, blocks
from tests.processes.harness import Processes, until
from tests.processes.network import Hosts
from tests.requirements import CURL, HOSTS, require

DEADLINE_S = 240.0  # for any one command: some start nine interpreters that import torch
PAUSE_S = 0.03
ENDED = "walkthrough: ended with "
CLONED = ("Makefile", "config", "deploy", "examples", "pyproject.toml", "constraints.txt")
VARIES = re.compile(r"(?P<lines>^\.\.\.\n)|(?P<any>\.\.\.)|(?P<number>\d+\.\d+(?:e-?\d+)?|\d+(?= m?s\b))", re.MULTILINE)
MEANT = {"lines": r"(?:.*\n)*?", "any": ".*", "number": r"\d+(?:\.\d+)?(?:e-?\d+)?"}


class Command(NamedTuple):
    """A command and the output shown below it."""

    place: str
    typed: str
    shown: str
    interrupted: bool
    left: bool = False  # keeps running while the next one is typed in another terminal


def commands(page: Path) -> list[Command]:
    """The commands of a page."""
    found = []
    for block in blocks(page):
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                first, *rest = part.splitlines(keepends=True)
                more = next((n for n, line in enumerate(rest) if not line.startswith("> ")), len(rest))
                shown = "".join(rest[more:])
                typed = first + "".join(line[2:] for line in rest[:more])
                found.append(Command(block.words, typed, shown.removesuffix("^C\n"), shown.endswith("^C\n")))
    return [one._replace(left=one.place != two.place) for one, two in pairwise(found)] + found[-1:]


def pattern(shown: str) -> re.Pattern[str]:
    """Return a pattern for the shown output, with its variable parts."""
    parts, end = [], 0
    for found in VARIES.finditer(shown):
        parts += [re.escape(shown[end : found.start()]), MEANT[str(found.lastgroup)]]
        end = found.end()
    return re.compile("".join([*parts, re.escape(shown[end:])]))


class Terminal:
    """A shell into which commands are typed one after the other."""

    def __init__(self, processes: Processes, home: Path, place: str, on: list[str]) -> None:
        theirs, ours = os.pipe()
        command = [*on, "bash", f"/dev/fd/{theirs}"]  # not from its standard input, which commands would read
        self.process = processes.start(command, name=place.replace(" ", "-") or "first", cwd=home, pass_fds=[theirs])
        os.close(theirs)
        self._keys = os.fdopen(ours, "w")
        self._begin = 0
        self.command: Command | None = None

    def type(self, command: Command) -> None:
        self.command = command
        pause = f"export PAUSE={PAUSE_S};" if command.left else ""
        self._keys.write(f"{pause}{command.typed}echo '{ENDED}'$?\n")
        self._keys.flush()

    def shown(self) -> bool:
        """Return whether the command has printed the shown output."""
        assert self.command
        printed, end, _ = self._printed()
        wanted = pattern(self.command.shown + "...\n" * self.command.interrupted)
        whole = wanted.fullmatch(printed) is not None
        assert whole or not end, f"{self.command.typed}printed\n{printed}\ninstead of\n{self.command.shown}"
        return whole or wanted.match(printed) is not None

    def ended(self) -> bool:
        """Return whether the command has ended as expected, so that the next can be typed."""
        if self.command is None:
            return True
        _, end, code = self._printed()
        if not (end and self.shown()):
            return False
        assert code == "0" or self.command.interrupted or self.command.left, f"{self.command.typed}ended with {code}"
        self._begin += end
        self.command = None
        return True

    def interrupt(self) -> None:
        """Send Ctrl-C to the newest child of the shell, which runs in the foreground."""
        psutil.Process(self.process.pid).children()[-1].send_signal(2)

    def _printed(self) -> tuple[str, int, str]:
        """Return the complete lines of the command's output, the position of its end if it has ended, and its code."""
        text = self.process.text()[self._begin :]
        printed, mark, code = text.partition(ENDED)
        if mark and code.endswith("\n"):
            return printed if not printed or printed.endswith("\n") else f"{printed}\n", len(text), code.strip()
        return printed[: printed.rfind("\n") + 1], 0, ""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require(*HOSTS)
    with Hosts(f"walk{os.getpid()}", network="10.0.0") as made:
        yield made


def cloned(home: Path) -> Path:
    """Copy what a clone has after `make run`, with the .venv of the tests."""
    home.mkdir()
    for name in CLONED:
        here = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(here, home / name, ignore=ignored) if here.is_dir() else shutil.copy(here, home)
    (home / ".venv").mkdir()
    (home / ".venv/bin").symlink_to(Path(sys.executable).parent)
    (home / ".venv/.installed").touch()
    return home


TYPED = {str(page.relative_to(ROOT)): typed for page in PAGES if (typed := commands(page))}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", TYPED)
def test_console_blocks_of_a_page_print_what_they_show(page: str, tmp_path: Path, hosts: Hosts) -> None:
    if any("curl " in command.typed for command in TYPED[page]):
        require(CURL)
    processes, terminals = Processes(tmp_path), dict[str, Terminal]()
    clones = [cloned(tmp_path / f"host_{number}") for number in (1, 2)]

    def wait(happened: Callable[[], bool], what: str) -> None:
        until(happened, what, DEADLINE_S, processes.tails)

    try:
        for command in TYPED[page]:
            if command.place not in terminals:
                host = 1 if command.place == "host 2" else 0
                terminals[command.place] = Terminal(processes, clones[host], command.place, hosts.on(host))
            terminal = terminals[command.place]
            wait(terminal.ended, f"the end of what was typed before {command.typed}")
            terminal.type(command)
            wait(terminal.shown, f"what {command.typed}should print:\n{command.shown}")
            if command.interrupted:
                terminal.interrupt()
            if not command.left or command.interrupted:
                wait(terminal.ended, f"the end of {command.typed}")
        for terminal in terminals.values():
            wait(terminal.ended, f"the end of {terminal.command}")
    finally:
        processes.end()


def run_first_script(page: str, folder: Path, *arguments: str) -> str:
    """Run the first Python block of a page, exactly as printed, with this prefix; return its output."""
    script = next(block.text for block in blocks(ROOT / page) if block.language == "python")
    (folder / "train.py").write_text(script)
    processes = Processes(folder)
    try:
        process = processes.start([*arguments, "train.py"])
        assert process.wait(DEADLINE_S) == 0, process.tail()
        return process.text()
    finally:
        processes.end()


@pytest.mark.parametrize("page", ["README.md", "docs/healing.md"])
def test_first_script_of_a_page_runs_alone(page: str, tmp_path: Path) -> None:
    run_first_script(page, tmp_path, sys.executable)


@pytest.mark.parametrize("page", ["README.md", "docs/healing.md"])
def test_first_script_of_a_page_runs_with_four_workers(page: str, tmp_path: Path) -> None:
    text = run_first_script(page, tmp_path, "covey", "run", "-n", "4", "--log-dir", "logs")
    assert "covey: all 4 workers finished" in text
