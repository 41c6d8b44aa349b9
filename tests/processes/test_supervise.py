"""COVEY_SUPERVISE=1: the first process of `python train.py` becomes the supervisor, and restarts the worker when it dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.processes.harness import Cluster, Process, until

LIVES = """
import os, pathlib, sys, time
import covey

{before}
print("before init", flush=True)
covey.init()
print(f"life pid={{os.getpid()}} rank={{covey.get_rank()}} restarts={{covey.restart_count()}}", flush=True)
{after}
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
print("done", flush=True)
"""
THREAD = "import threading; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"


def start(cluster: Cluster, *, before: str = "", after: str = "") -> list[Process]:
    script = cluster.script(LIVES.format(before=before, after=after))
    folder = cluster.folder / "recovery"
    cluster.env |= {"MS_ENABLE_RECOVERY": 1, "MS_RECOVERY_PATH": str(folder), "COVEY_SUPERVISE": 1}
    cluster.scheduler(script=script)
    return [cluster.worker(f"pod-{index}", script=script) for index in range(2)]


def pid_of(worker: Process, life: int) -> int:
    return int(worker.wait_for(r"life pid=(\d+)", count=life)[1])


@pytest.mark.parametrize(("before", "imports"), [("", 1), (THREAD, 4)], ids=["forked", "executed"])
def test_dead_worker_is_restarted_in_place(cluster: Cluster, before: str, imports: int) -> None:
    workers = start(cluster, before=before)
    lives = [pid_of(worker, 1) for worker in workers]
    assert all(life != worker.pid for life, worker in zip(lives, workers, strict=True))
    os.kill(lives[0], signal.SIGKILL)
    again = pid_of(workers[0], 2)
    assert "restarts=1" in workers[0].text() and again != lives[0] and workers[0].alive
    os.kill(again, signal.SIGKILL)
    pid_of(workers[0], 3)
    cluster.release()
    assert cluster.wait() == {"scheduler": 0, "worker-pod-0": 0, "worker-pod-1": 0}
    assert workers[0].text().count("before init") == imports, "a fork must not repeat the code before covey.init()"
    assert workers[1].text().count("life pid") == 1


def test_supervisor_stops_after_three_deaths_without_a_step(cluster: Cluster) -> None:
    workers = start(cluster, after="os.kill(os.getpid(), 9) if 'pod-0' in os.environ['MS_NODE_ID'] else None")
    assert workers[0].wait() == 137 and workers[0].text().count("life pid") == 3
    assert "3 in a row without a step" in workers[0].text()


def test_deaths_with_steps_in_between_are_not_counted(cluster: Cluster) -> None:
    counted = """
number = covey.restart_count()
covey.report(number, "train")
if "pod-0" in os.environ["MS_NODE_ID"] and number < 5:
    os.kill(os.getpid(), 9)
"""
    workers = start(cluster, after=counted)
    pid_of(workers[0], 6)
    cluster.release()
    assert set(cluster.wait().values()) == {0}


def test_supervisor_forwards_sigterm_and_does_not_restart(cluster: Cluster) -> None:
    workers = start(cluster)
    life = pid_of(workers[0], 1)
    workers[0].signal(signal.SIGTERM)
    assert workers[0].wait() in (143, 0) and workers[0].text().count("life pid") == 1
    until(lambda: not Path(f"/proc/{life}").exists(), "the life to be gone")


def test_child_dies_with_its_supervisor(cluster: Cluster) -> None:
    workers = start(cluster)
    life = pid_of(workers[0], 1)
    workers[0].kill()
    until(lambda: not Path(f"/proc/{life}").exists(), "the life to be gone")


def test_refused_worker_is_not_restarted(cluster: Cluster) -> None:
    workers = start(cluster)
    pid_of(workers[1], 1)
    third = cluster.worker("pod-2", script=cluster.folder / "other.py")
    assert third.wait() == 21 and "one worker too many" in third.text()
