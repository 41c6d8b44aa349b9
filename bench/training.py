"""A training under way whose workers are killed, and what their stamps say of each death."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.formation import running

LOOK_S = 0.02
START_S, RECOVER_S, END_S = 120.0, 120.0, 20.0  # limits
PHASES = ("started", "joined", "built", "attached")


class Stamp(NamedTuple):
    kind: str
    step: int
    at: float
    pid: int


class Death(NamedTuple):
    """One kill, and how the training went on. Times are seconds after the kill."""

    rank: int
    step: int  # the last that any rank had committed
    again: float  # all ranks have committed one and the same step after the kill, whichever
    ahead: float  # all ranks have committed a step that nobody had committed before
    redone: int  # steps that ranks other than the dead one did twice
    phases: dict[str, float]  # of the replacement


class Training:
    """N ranks that leave stamps in a folder."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, world: int) -> None:
        self._process, self._folder = process, folder
        self._read = dict.fromkeys(range(world), 0)
        self.stamps: dict[int, list[Stamp]] = {rank: [] for rank in range(world)}

    def look(self) -> None:
        """Take in the stamps that are new."""
        for rank, offset in self._read.items():
            path = self._folder / f"{rank}.stamps"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[rank] = offset + len(whole)
            for line in whole.decode().splitlines():
                kind, step, at, pid = line.split()
                self.stamps[rank].append(Stamp(kind, int(step), float(at), int(pid)))

    def steps(self, rank: int, since: float = 0.0) -> dict[int, float]:
        """When a rank last committed each step."""
        return {s.step: s.at for s in self.stamps[rank] if s.kind == "step" and s.at > since}

    def await_steps(self, count: int) -> None:
        """Until every rank has committed so many more steps."""
        self.look()
        goal = {rank: len(stamps) + count for rank, stamps in self.stamps.items()}
        deadline = time.monotonic() + START_S
        while any(len(self.stamps[rank]) < wanted for rank, wanted in goal.items()):
            self._pause(deadline, f"{count} steps of every rank")

    def await_spare(self, count: int) -> None:
        """Until a spare stands by, for the `count`th time."""
        deadline = time.monotonic() + START_S
        while (self._folder / "scheduler.log").read_text().count(" stands by: ") < count:
            self._pause(deadline, f"a spare that stands by for the {count}th time")

    def spare_load(self, seconds: float) -> float:
        """What part of a core a spare that stands by uses."""
        log = str(self._folder / "spare_0.log")
        [spare] = [p for p in psutil.Process(self._process.pid).children() if _output(p.pid) == log]
        before, at = sum(spare.cpu_times()[:2]), time.monotonic()
        time.sleep(seconds)
        return (sum(spare.cpu_times()[:2]) - before) / (time.monotonic() - at)

    def strike(self, how: signal.Signals = signal.SIGKILL) -> Death:
        """Signal a random rank, and watch until the training is ahead of where it was."""
        rank = random.randrange(len(self.stamps))
        self.look()
        pid = self.stamps[rank][-1].pid
        at = time.monotonic()
        os.kill(pid, how)
        deadline = at + RECOVER_S
        again = 0.0
        while True:
            self._pause(deadline, f"a step after rank {rank} (pid {pid}) got {how.name}")
            before = max(s.step for stamps in self.stamps.values() for s in stamps if s.kind == "step" and s.at <= at)
            common = self._common(at)
            again = again or min(common.values(), default=0.0)
            ahead = [found for step, found in common.items() if step > before]
            if ahead:
                break
        others = [self.stamps[other] for other in self.stamps if other != rank]
        redone = max(len({s.step for s in mine if s.kind == "step" and s.at <= at} & _after(mine, at)) for mine in others)
        phases = {s.kind: s.at - at for s in self.stamps[rank] if s.at > at and s.pid != pid and s.kind in PHASES}
        return Death(rank, before, again - at, min(ahead) - at, redone, phases)

    def _common(self, since: float) -> dict[int, float]:
        """The steps that all ranks have committed since, and when the last one did."""
        found = [self.steps(rank, since) for rank in self.stamps]
        return {step: max(steps[step] for steps in found) for step in set.intersection(*(set(steps) for steps in found))}

    def _pause(self, deadline: float, awaited: str) -> None:
        if self._process.poll() is not None or time.monotonic() > deadline:
            said = (self._folder / "output").read_text(errors="replace")[-3000:]
            raise SystemExit(f"{self._process.args!r} (code {self._process.poll()}) did not reach {awaited}:\n{said}")
        time.sleep(LOOK_S)
        self.look()


def _output(pid: int) -> str:
    """The file that a process prints to."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    return ""


def _after(stamps: list[Stamp], at: float) -> set[int]:
    return {s.step for s in stamps if s.kind == "step" and s.at > at}


@contextlib.contextmanager
def training(command: list[str], arguments: list[str], world: int) -> Iterator[Training]:
    """Run a script's command with a folder for its stamps, and end it."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with running([*command, name, *arguments], folder) as process:
            try:
                found = Training(process, folder, world)
                found.await_steps(20)
                yield found
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)


def deaths(
    what: str,
    command: list[str],
    arguments: list[str],
    *,
    world: int,
    count: int,
    between: tuple[int, int] = (10, 40),
    how: signal.Signals = signal.SIGKILL,
    spare: bool = False,
) -> list[Death]:
    """So many deaths of random ranks in one training, each at a random moment, `between` so many steps apart, and each when
    there is a `spare`, if it is to have one."""
    found: list[Death] = []
    with training(command, arguments, world) as run:
        for number in range(count):
            if spare:
                run.await_spare(number + 1)
            run.await_steps(random.randint(*between))
            time.sleep(random.uniform(0, LOOK_S))
            found.append(run.strike(how))
            last = found[-1]
            print(
                f"{what}: {number + 1} of {count}: {1000 * last.again:.0f} ms, {last.redone} redone",
                file=sys.stderr,
                flush=True,
            )
    return found
