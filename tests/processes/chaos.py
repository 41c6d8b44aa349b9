"""Kills and resizes mixed, one after the other and at once, on real processes: `python -m tests.processes.chaos --events 500`.

Two hosts. A worker that is killed is started again on the other host while that may carry more, else the world shrinks; a
host that is killed takes its workers along, and comes back later; somebody asks for more workers, or fewer. The training waits
at a limit that is raised as long as there are events, a few steps at a time, so that they happen anywhere in a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from tests.processes.command import Shell, shells
from tests.processes.elastic import check, start
from tests.processes.harness import Process, until

from covey.cli.scheduler_client import request_scale
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.types import Phase, Role
from covey.errors import PeerError
from covey.runtime.node_runtime import SchedulerAddress

WORLD, MOST = 4, 7
STEPS_PER_EPOCH = 4  # of 64 samples in batches of 16
STEPS_EACH = 6  # at most: each event lets the training go on by a few
REFUSED = 21
LONG_S = 60.0
LOOK_S = 0.04  # between two looks at a cluster that heals: they cost it time too


class Chaos:
    """A training under way, and what happens to it."""

    def __init__(self, shell: Shell, events: int, seed: int) -> None:
        self.shell, self.random = shell, random.Random(seed)
        self.steps = -(-events * STEPS_EACH // STEPS_PER_EPOCH) * STEPS_PER_EPOCH + STEPS_PER_EPOCH
        self.counts: Counter[str] = Counter()
        self._limit = shell.folder / "marks" / "limit"
        self._limit.parent.mkdir(exist_ok=True)
        self._allowed = self._looks = 0
        self._killed: set[int] = set()  # of whom the scheduler may not have heard yet
        self._allow(2)
        self.home = self._host("a")
        shell.listening(shell.port)
        self.guest: Process | None = self._host("b")

    def _host(self, name: str) -> Process:
        env = {
            "COVEY_HOST_ID": name,
            "COVEY_STRATEGY": "retry,recover,elastic-training,exit",
            "COVEY_EXTRA_RANKS": "1",
            "COVEY_SHRINK_AFTER": "0",
            "STEPS": str(self.steps),
        }
        words = ("-n", str(WORLD), "--local", str(WORLD // 2), "--master", f"127.0.0.1:{self.shell.port}")
        return start(self.shell, *words, **env)

    def _allow(self, more: int) -> None:
        self._allowed += more
        assert self._allowed < self.steps, "more steps than there should have been: the last must be free to go"
        aside = self._limit.with_suffix(".new")
        aside.write_text(str(self._allowed))
        aside.rename(self._limit)

    def _goes_on(self, view: ClusterView) -> bool:
        """Whether everyone is there; if not, they must be able to come to a collective, where they learn of each other."""
        if view.phase is not Phase.READY:
            self._looks += 1
            if self._looks % 16 == 0:  # a host may have come to those who wait at the limit
                self._allow(1)
            time.sleep(LOOK_S)
        return view.phase is Phase.READY

    def happen(self) -> None:
        """One event, as soon as everyone goes on after the last; half a time, a second one while they do not."""
        view = self.shell.until(self._goes_on, "everyone to go on", LONG_S)
        self._allow(1)
        time.sleep(self.random.uniform(0, 0.02))
        self._one(view)
        if self.random.random() < 0.3:
            self._kill(self.shell.view(), leave=3)
        self._allow(2)

    def _one(self, view: ClusterView) -> None:
        chance, world = self.random.random(), len(workers(view))
        if self.guest is not None and not self.guest.alive:
            assert self.guest.code == REFUSED, self.guest.tail()  # so many workers were asked for, and all are there
            self.guest = None
        if self.guest is None and chance < 0.2:
            self.guest = self._host("b")
            self.counts["host came"] += 1
        elif self.guest is not None and chance < 0.03 and self._at_home(view) >= 2:
            self.guest.kill()
            self.guest = None
            self.counts["host killed"] += 1
        elif chance < 0.6 and self._kill(view, leave=2):
            return
        else:
            self._scale(self.random.choice([n for n in range(2, MOST + 1) if n != world]))

    def _at_home(self, view: ClusterView) -> int:
        """How many have the state without the guest."""
        ours = {child.pid for child in psutil.Process(self.home.pid).children(recursive=True)}
        return sum(node.pid in ours and node.step > 0 and node.pid not in self._killed for node in workers(view))

    def _kill(self, view: ClusterView, leave: int) -> bool:
        """Not the last who have the state: without it the training would begin anew."""
        here = [node.pid for node in workers(view) if node.pid and node.step > 0 and node.pid not in self._killed]
        if len(here) <= leave:
            return False
        victim = self.random.choice(here)
        self._killed.add(victim)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self.counts["killed"] += 1
        return True

    def _scale(self, wanted: int) -> None:
        try:
            asyncio.run(request_scale(SchedulerAddress("127.0.0.1", self.shell.port, ""), wanted))
            self.counts["scaled"] += 1
        except PeerError as refused:  # something else came first
            assert "not ready" in str(refused) or "already" in str(refused), refused
            self.counts["refused"] += 1

    def finish(self) -> None:
        """Let the training come to its end: everyone who is left ends well, and each sample has counted once."""
        self._limit.unlink()
        assert self.home.wait(LONG_S) == 0, self.shell.tails()
        if self.guest is not None:
            assert self.guest.wait(LONG_S) in (0, REFUSED), self.shell.tails()
        check(self.shell, WORLD)


def workers(view: ClusterView) -> list[NodeView]:
    return [node for node in view.nodes if node.role is Role.WORKER and node.alive]


def run(shell: Shell, events: int, seed: int) -> Counter[str]:
    """So many events, and the end; what they were."""
    chaos = Chaos(shell, events, seed)
    until(lambda: "counted" in text(shell), "the first steps", story=shell.tails)
    while sum(chaos.counts.values()) - chaos.counts["refused"] < events:
        chaos.happen()
    chaos.finish()
    return chaos.counts


def text(shell: Shell) -> str:
    path = shell.folder / "marks" / "lines"
    return path.read_text() if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for shell in shells(Path(folder)):
            began = time.monotonic()
            print(run(shell, options.events, options.seed), f"{time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
