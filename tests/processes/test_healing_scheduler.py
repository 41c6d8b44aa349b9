"""The scheduler dies during a recovery: it restarts from its journal and completes the recovery, with the same bits."""

from __future__ import annotations

import os
import re
import signal

import httpx2
import pytest
from tests.processes.command import Shell
from tests.processes.healing import LONG_S, final_hash, release, start, wait_for_fault

pytestmark = pytest.mark.timeout(300)


def worker_pid(shell: Shell, rank: int) -> int:
    return int(next(n["pid"] for n in shell.nodes() if n["role"] == "worker" and n["rank"] == rank))


def test_heal_completes_if_scheduler_dies_with_worker_and_again(shell: Shell, undisturbed: str) -> None:
    together, known, restored = "1:4:forward:hold", "2:0:replacing:hold", "0:12:restored:hold"
    run = start(shell, FAULTS=f"{together} 2:8:forward {known} 0:12:forward {restored}")
    wait_for_fault(shell, together)
    pids = [worker_pid(shell, 1), shell.scheduler_pid()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for times, fault in ((1, known), (2, restored)):
        wait_for_fault(shell, fault)
        shell.wait_for_log("scheduler", "cluster restored", count=times)
        os.kill(shell.scheduler_pid(), signal.SIGKILL)
        release(shell, fault)
    assert run.wait(LONG_S) == 0, run.tail()
    assert final_hash(shell) == undisturbed
    shell.wait_for_log("scheduler", "cluster restored", count=3)


@pytest.mark.long
def test_dump_is_written_if_scheduler_dies_during_it(shell: Shell) -> None:
    hold = "1:6:forward:hold"
    run = start(shell, FAULTS=hold)
    wait_for_fault(shell, hold)
    address = run.wait_for(r"REST at (http://127\.0\.0\.1:\d+)")[1]
    query = httpx2.post(f"{address}/dump", json={"reason": "enough for today"}, trust_env=False, timeout=60)
    assert query.status_code == 200, query.text
    os.kill(shell.scheduler_pid(), signal.SIGKILL)
    shell.wait_for_log("scheduler", "cluster restored")
    release(shell, hold)
    assert run.wait(LONG_S) == 32, run.tail()
    assert re.search(r"enough for today; step [67] is in \S+dump\S+", run.text()), run.text()
