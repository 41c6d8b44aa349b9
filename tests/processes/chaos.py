"""Random kills and resizes of real processes, sequential and concurrent: `python -m tests.processes.chaos --events 500`.

There are two hosts. A killed worker is restarted on the other host while that has room, else the world shrinks. A killed host
loses its workers and returns later. Requests change the number of workers. The training waits at a step limit that each event
raises by a few steps, so that events happen anywhere within a step.
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
from tests.processes.command import Shell
from tests.processes.elastic import check, start
from tests.processes.harness import Process, until

from covey.cli.scheduler_session import request_scale
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.types import Phase, Role
from covey.errors import PeerError
from covey.runtime.node_runtime import SchedulerAddress

WORLD, MOST = 4, 7
STEPS_PER_EPOCH = 4  # of 64 samples in batches of 16
STEPS_EACH = 6  # at most; steps that each event allows
REFUSED = 21
LONG_S = 60.0
LOOK_S = 0.04  # interval of views during a recovery, because views use CPU time


class Chaos:
    """A running training and its events."""

    def __init__(self, shell: Shell, events: int, seed: int) -> None:
        self.shell, self.random = shell, random.Random(seed)
        self.steps = -(-events * STEPS_EACH // STEPS_PER_EPOCH) * STEPS_PER_EPOCH + STEPS_PER_EPOCH
        self.counts: Counter[str] = Counter()
        self._limit = shell.folder / "marks" / "limit"
        self._limit.parent.mkdir(exist_ok=True)
        self._allowed = self._looks = 0
        self._killed: set[int] = set()  # pids that the scheduler may not have declared dead yet
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
        arguments = ("-n", str(WORLD), "--local", str(WORLD // 2), "--master", f"127.0.0.1:{self.shell.port}")
        return start(self.shell, *arguments, **env)

    def _allow(self, more: int) -> None:
        self._allowed += more
        assert self._allowed < self.steps, "too many steps were allowed: the last ones must remain for the end"
        aside = self._limit.with_suffix(".new")
        aside.write_text(str(self._allowed))
        aside.rename(self._limit)

    def _is_ready(self, view: ClusterView) -> bool:
        """Return whether the cluster is ready; if not, allow a step at intervals, because ranks are notified in collectives."""
        if view.phase is not Phase.READY:
            self._looks += 1
            if self._looks % 16 == 0:  # ranks that wait at the limit may have to admit a host
                self._allow(1)
            time.sleep(LOOK_S)
        return view.phase is Phase.READY

    def inject_event(self) -> None:
        """Cause one event when the cluster is ready again; in 30 % of the cases kill another worker immediately."""
        view = self.shell.until(self._is_ready, "the cluster to be ready", LONG_S)
        self._allow(1)
        time.sleep(self.random.uniform(0, 0.02))
        self._inject_one(view)
        if self.random.random() < 0.3:
            self._kill(self.shell.view(), leave=3)
        self._allow(2)

    def _inject_one(self, view: ClusterView) -> None:
        chance, world = self.random.random(), len(workers(view))
        if self.guest is not None and not self.guest.alive:
            assert self.guest.code == REFUSED, self.guest.tail()  # all requested workers exist already
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
        """Return the number of workers with state on the first host."""
        ours = {child.pid for child in psutil.Process(self.home.pid).children(recursive=True)}
        return sum(node.pid in ours and node.step > 0 and node.pid not in self._killed for node in workers(view))

    def _kill(self, view: ClusterView, leave: int) -> bool:
        """Kill a random worker if more than `leave` have state, because without state the training would restart; return
        whether."""
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
        except PeerError as refused:  # another change is in progress
            assert "not ready" in str(refused) or "already" in str(refused), refused
            self.counts["refused"] += 1

    def finish(self) -> None:
        """Finish the training; assert that all exit with 0 and each sample was counted once."""
        self._limit.unlink()
        assert self.home.wait(LONG_S) == 0, self.shell.tails()
        if self.guest is not None:
            assert self.guest.wait(LONG_S) in (0, REFUSED), self.shell.tails()
        check(self.shell, WORLD)


def workers(view: ClusterView) -> list[NodeView]:
    return [node for node in view.nodes if node.role is Role.WORKER and node.alive]


def run(shell: Shell, events: int, seed: int) -> Counter[str]:
    """Run a training with `events` events to its end; return their counts by kind."""
    chaos = Chaos(shell, events, seed)
    until(lambda: "counted" in text(shell), "the first steps", details=shell.tails)
    while sum(chaos.counts.values()) - chaos.counts["refused"] < events:
        chaos.inject_event()
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
    with tempfile.TemporaryDirectory() as folder, Shell(Path(folder)) as shell:
        started_at = time.monotonic()
        print(run(shell, options.events, options.seed), f"{time.monotonic() - started_at:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
