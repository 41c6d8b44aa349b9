"""A running training whose workers are killed, and the evaluation of the stamps that its ranks write."""

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
    """One kill and the recovery from it. Times are seconds after the kill."""

    rank: int
    step: int  # the last one that any rank had committed before the kill
    again: float  # until all ranks have committed the same step, new or repeated
    ahead: float  # until all ranks have committed a step that no rank had committed before the kill
    redone: int  # steps that a rank other than the killed one committed twice, at most
    phases: dict[str, float]  # of the replacement


class Training:
    """A running training of N ranks that write stamps into a directory."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, world: int) -> None:
        self._process, self._folder = process, folder
        self._read = dict.fromkeys(range(world), 0)
        self.stamps: dict[int, list[Stamp]] = {rank: [] for rank in range(world)}

    def look(self) -> None:
        """Read the new stamps."""
        for rank, offset in self._read.items():
            path = self._folder / f"{rank}.stamps"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._read[rank] = offset + len(complete)
            for line in complete.decode().splitlines():
                kind, step, at, pid = line.split()
                self.stamps[rank].append(Stamp(kind, int(step), float(at), int(pid)))

    def steps(self, rank: int, since: float = 0.0) -> dict[int, float]:
        """Return the time at which a rank last committed each step after `since`."""
        return {s.step: s.at for s in self.stamps[rank] if s.kind == "step" and s.at > since}

    def await_steps(self, count: int) -> None:
        """Wait until every rank has written `count` more stamps, one for each step."""
        self.look()
        goal = {rank: len(stamps) + count for rank, stamps in self.stamps.items()}
        deadline = time.monotonic() + START_S
        while any(len(self.stamps[rank]) < wanted for rank, wanted in goal.items()):
            self._pause(deadline, f"{count} steps of every rank")

    def await_spare(self, count: int) -> None:
        """Wait until a spare is ready for the `count`th time."""
        deadline = time.monotonic() + START_S
        while (self._folder / "scheduler.log").read_text().count(" stands by: ") < count:
            self._pause(deadline, f"a ready spare for the {count}th time")

    def spare_load(self, seconds: float) -> float:
        """Return the fraction of a core that a waiting spare uses."""
        log = str(self._folder / "spare_0.log")
        [spare] = [p for p in psutil.Process(self._process.pid).children() if _output(p.pid) == log]
        before, at = sum(spare.cpu_times()[:2]), time.monotonic()
        time.sleep(seconds)
        return (sum(spare.cpu_times()[:2]) - before) / (time.monotonic() - at)

    def strike(self, how: signal.Signals = signal.SIGKILL) -> Death:
        """Send a signal to a random rank, and wait until all ranks have committed a new step."""
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
        """Return the steps that all ranks have committed since, each with the time of the last rank."""
        found = [self.steps(rank, since) for rank in self.stamps]
        return {step: max(steps[step] for steps in found) for step in set.intersection(*(set(steps) for steps in found))}

    def _pause(self, deadline: float, awaited: str) -> None:
        if self._process.poll() is not None or time.monotonic() > deadline:
            output = (self._folder / "output").read_text(errors="replace")[-3000:]
            raise SystemExit(f"{self._process.args!r} (code {self._process.poll()}) did not reach {awaited}:\n{output}")
        time.sleep(LOOK_S)
        self.look()


def _output(pid: int) -> str:
    """Return the path of a process's standard output; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    return ""


def _after(stamps: list[Stamp], at: float) -> set[int]:
    return {s.step for s in stamps if s.kind == "step" and s.at > at}


@contextlib.contextmanager
def training(command: list[str], arguments: list[str], world: int) -> Iterator[Training]:
    """Run a command with a directory for its stamps as first argument; yield it after 20 steps, and end it afterwards."""
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
    """Return `count` deaths of random ranks in one training, at random times, with a random number of steps in `between`.

    With `spare`, each death waits until a spare is ready.
    """
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
