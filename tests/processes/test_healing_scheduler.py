"""The scheduler dies in the middle of a recovery: it returns from its journal and the recovery finishes, to the same bits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.processes.command import Shell, shells
from tests.processes.healing import LONG_S, outcome, reached, release, start

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


def worker_pid(shell: Shell, rank: int) -> int:
    return int(next(n["pid"] for n in shell.nodes() if n["role"] == "worker" and n["rank"] == rank))


def test_the_scheduler_dies_with_a_worker_and_while_it_is_replaced(shell: Shell, undisturbed: str) -> None:
    together, known, restored = "1:4:forward:hold", "2:0:replacing:hold", "0:12:restored:hold"
    run = start(shell, FAULTS=f"{together} 2:8:forward {known} 0:12:forward {restored}")
    reached(shell, together)
    pids = [worker_pid(shell, 1), shell.scheduler_pid()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for times, fault in ((1, known), (2, restored)):
        reached(shell, fault)
        shell.heard("scheduler", "cluster restored", count=times)
        os.kill(shell.scheduler_pid(), signal.SIGKILL)
        release(shell, fault)
    assert run.wait(LONG_S) == 0, run.tail()
    assert outcome(shell) == undisturbed
    shell.heard("scheduler", "cluster restored", count=3)


@pytest.mark.long
def test_a_dump_that_was_asked_for_is_written_though_the_scheduler_dies_meanwhile(shell: Shell) -> None:
    hold = "1:6:forward:hold"
    run = start(shell, FAULTS=hold)
    reached(shell, hold)
    address = run.wait_for(r"REST at (http://127\.0\.0\.1:\d+)")[1]
    asked = httpx2.post(f"{address}/dump", json={"reason": "enough for today"}, trust_env=False, timeout=60)
    assert asked.status_code == 200, asked.text
    os.kill(shell.scheduler_pid(), signal.SIGKILL)
    shell.heard("scheduler", "cluster restored")
    release(shell, hold)
    assert run.wait(LONG_S) == 32, run.tail()
    assert re.search(r"enough for today; step [67] is in \S+dump\S+", run.text()), run.text()
