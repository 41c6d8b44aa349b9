"""MS_ENABLE_RECOVERY=1: the scheduler and the workers can be killed and restarted, and the others continue."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.processes.harness import Process, free_port, nodes_of, until
from tests.processes.recovering import TRAIN, Recovering, membership

from covey.agent.scheduler_supervisor import SchedulerProcess
from covey.core.types import ClusterRecord, Ended, Phase
from covey.runtime.child_environment import SchedulerHandoff
from covey.storage.journal import open_journal

QUICK = {"MS_RETRY_INTERVAL_LOWER": 0.1, "MS_RETRY_INTERVAL_UPPER": 0.2}

# Counts its steps, with a sum over all ranks in each; the ranks end together because the sum decides.
TRAIN_TOGETHER = """
import pathlib, sys, time
import torch
import covey

covey.init()
print(f"rank={covey.get_rank()} world={covey.get_group_size()}", flush=True)
while len(sys.argv) > 2 and not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
print("begins", flush=True)
step = 0
while True:
    step += 1
    told = covey.all_reduce(torch.tensor([float(pathlib.Path(sys.argv[1]).exists()), 1.0]))
    assert told[1] == covey.get_group_size()
    if told[0]:
        break
    pathlib.Path(f"steps-{covey.get_rank()}").write_text(str(step))
    time.sleep(0.01)
print("done", flush=True)
"""


# With a second argument it joins when that file exists, so that the time of its imports does not count.
JOINS_WHEN_TOLD = """
import pathlib, sys, time
import covey

while sys.argv[2:] and not pathlib.Path(sys.argv[2]).exists():
    print("started", flush=True)
    time.sleep(0.05)
"""


def waiting(cluster: Recovering, node_id: int) -> Process:
    """Start a worker that joins when the file `join` exists."""
    worker = cluster.worker(node_id, args=[cluster.go, cluster.folder / "join"])
    worker.wait_for("started")
    return worker


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Recovering]:
    with Recovering(tmp_path) as cluster:
        yield cluster


# -- restart of the scheduler ----------------------------------------------------------------------------------------


def test_training_continues_while_scheduler_is_killed(cluster: Recovering) -> None:
    cluster.default = cluster.script(TRAIN_TOGETHER, "train.py")
    scheduler, workers = cluster.formed()
    cluster.wait_for_steps(0, 1)
    before = cluster.view()
    scheduler.kill()
    cluster.wait_for_steps(0, 1)
    again = cluster.scheduler()
    for worker in workers:
        worker.wait_for("found again")
    after = cluster.ready()
    assert membership(after) == membership(before)
    assert all(node.alive for node in after.nodes)
    cluster.wait_for_steps(0, 1)
    status = cluster.run(["covey", "status", "--json", "--master", f"127.0.0.1:{cluster.port}"])
    assert json.loads(status.text())["generation"] == before.generation
    cluster.release()
    assert [node.wait() for node in (again, *workers)] == [0, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_restarted_scheduler_restores_members_ranks_and_generation(cluster: Recovering, number: signal.Signals) -> None:
    """Also after a worker was replaced, and after SIGTERM instead of SIGKILL."""
    cluster.workers = 3
    scheduler, (first, *_) = cluster.formed("b", "a", 2)
    first.kill()
    cluster.worker("b").wait_for("rank=1")
    before = cluster.ready()
    assert before.generation == 3
    scheduler.signal(number)
    assert scheduler.wait() == 128 + number
    cluster.wait_for_steps(0, 1, 2)
    cluster.scheduler()
    assert membership(cluster.ready()) == membership(before)
    cluster.release()
    codes = cluster.wait()
    assert codes.pop("scheduler") == 128 + number
    assert codes.pop("worker-b") == 137
    assert set(codes.values()) == {0}


def test_group_forms_after_scheduler_outage(cluster: Recovering) -> None:
    """Values in the rendezvous store of the killed scheduler are set again in that of the new one."""
    begin = cluster.folder / "begin"
    scheduler = cluster.scheduler()
    options: dict[str, Any] = {"script": cluster.script(TRAIN_TOGETHER, "train.py")}
    early = cluster.worker(0, **options, args=[cluster.go])
    late = cluster.worker(1, **options, args=[cluster.go, begin])
    early.wait_for("begins")
    late.wait_for("rank=1")
    scheduler.kill()
    begin.touch()
    late.wait_for("begins")
    again = cluster.scheduler()
    cluster.wait_for_steps(0, 1)
    cluster.release()
    assert [node.wait() for node in (again, early, late)] == [0, 0, 0]


def test_cluster_forms_after_scheduler_killed_during_formation(cluster: Recovering) -> None:
    scheduler, first = cluster.scheduler(), cluster.worker(0)
    before = cluster.until(lambda v: nodes_of(v), "the first worker to be registered")
    scheduler.kill()
    cluster.scheduler()
    after = cluster.until(lambda v: nodes_of(v), "the first worker to be registered again")
    assert (after.cluster_id, after.phase) == (before.cluster_id, Phase.FORMING)
    second = cluster.worker(1)
    first.wait_for("rank=0")
    second.wait_for("rank=1")
    cluster.release()
    assert cluster.wait() == {"scheduler": 137, "scheduler.2": 0, "worker-0": 0, "worker-1": 0}


def test_workers_finished_during_outage_are_reported_after_restart(cluster: Recovering) -> None:
    scheduler, workers = cluster.formed()
    scheduler.kill()
    for worker in workers:
        worker.wait_for("is unreachable")
    cluster.release()
    for worker in workers:
        worker.wait_for("done")
    assert cluster.scheduler().wait() == 0
    assert [worker.wait() for worker in workers] == [0, 0]


def test_finished_worker_logs_unacknowledged_leave(cluster: Recovering) -> None:
    """A scheduler that returns later declares the rank dead and waits for it: the worker must log this."""
    cluster.workers = 1
    scheduler, (worker,) = cluster.formed(MS_NODE_TIMEOUT=2)
    scheduler.kill()
    cluster.release()
    assert worker.wait() == 0
    assert "did not acknowledge it in time" in worker.text()


def test_worker_dead_during_outage_is_detected_after_restart(cluster: Recovering) -> None:
    """Its replacement is deferred until that is certain, then gets the rank."""
    cluster.env |= {**QUICK, "MS_NODE_TIMEOUT": 4}
    cluster.default = cluster.script(JOINS_WHEN_TOLD + TRAIN, "train.py")
    scheduler, (victim, other) = cluster.formed()
    successor = waiting(cluster, 0)
    scheduler.kill()
    victim.kill()
    again = cluster.scheduler()
    again.wait_for("restored")
    (cluster.folder / "join").touch()
    again.wait_for("worker:0 held off")
    successor.wait_for("rank=0")
    again.wait_for("worker:0 died: no heartbeat")
    cluster.ready()
    assert nodes_of(cluster.view())["0"].incarnation == 2
    cluster.release()
    assert [node.wait() for node in (again, successor, other)] == [0, 0, 0]


def test_second_scheduler_on_same_journal_is_refused(cluster: Recovering) -> None:
    cluster.formed()
    other = cluster.scheduler(MS_SCHED_PORT=free_port())
    assert other.wait() == 40
    assert f"another scheduler uses the journal {cluster.journal}" in other.text()
    cluster.release()
    assert sorted(cluster.wait().values()) == [0, 0, 0, 40]


def test_new_cluster_starts_after_the_previous_ended(cluster: Recovering) -> None:
    """The journal of the first cluster is kept under its own name."""
    cluster.workers = 1
    cluster.formed()
    ended = cluster.view().cluster_id
    cluster.release()
    cluster.wait()
    cluster.go.unlink()
    scheduler = cluster.scheduler(MS_WORKER_NUM=2)
    workers = [cluster.worker(rank, MS_WORKER_NUM=2) for rank in (0, 1)]
    for worker in workers:
        worker.wait_for("rank=")
    assert cluster.view().cluster_id != ended
    assert (cluster.journal / f"scheduler.journal.{ended}").exists()
    cluster.release()
    assert [node.wait() for node in (scheduler, *workers)] == [0, 0, 0]


# -- restart of workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_id", [1, None])
def test_restarted_worker_gets_its_rank_immediately(cluster: Recovering, node_id: int | None) -> None:
    """Its connection closed, so the process is known to be dead without a timeout."""
    scheduler, (other, victim) = cluster.formed(0, node_id)
    before = cluster.view()
    victim.kill()
    broken = cluster.until(lambda v: v.phase is Phase.HEALING, "the death to be seen")
    assert broken.generation == before.generation + 1
    successor = cluster.worker(node_id)
    successor.wait_for("rank=1 world=2")
    healed = cluster.ready()
    assert healed.generation == before.generation + 2
    assert sorted((node.rank, node.incarnation) for node in nodes_of(healed).values()) == [(0, 1), (1, 2)]
    assert "held off" not in scheduler.text()
    cluster.wait_for_steps(0, 1)
    cluster.release()
    assert [node.wait() for node in (scheduler, other, successor)] == [0, 0, 0]


@pytest.mark.parametrize("last_line", ["raise ValueError('bad luck')", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"])
def test_worker_that_raised_can_be_restarted(cluster: Recovering, last_line: str) -> None:
    fails = cluster.script(f"import os, signal, time, covey\ncovey.init()\n{last_line}\n", "fails.py")
    scheduler = cluster.scheduler()
    other, failing = cluster.worker(0), cluster.worker(1, script=fails)
    assert failing.wait() in (1, 143)
    scheduler.wait_for("worker:1 died: (ValueError: bad luck|asked to leave)")
    successor = cluster.worker(1)
    successor.wait_for("rank=1 world=2")
    cluster.release()
    assert [node.wait() for node in (scheduler, other, successor)] == [0, 0, 0]


def test_two_processes_never_have_the_same_rank(cluster: Recovering) -> None:
    """A worker that was declared dead wrongly finds its rank reassigned, and exits."""
    cluster.env |= QUICK
    cluster.default = cluster.script(JOINS_WHEN_TOLD + TRAIN, "train.py")
    scheduler, (frozen, other) = cluster.formed(MS_NODE_TIMEOUT=6)
    successor = waiting(cluster, 0)
    frozen.stop()
    scheduler.wait_for("worker:0 suspect")
    (cluster.folder / "join").touch()
    successor.wait_for("rank=0")
    scheduler.wait_for("worker:0 held off.*not known to be dead")
    scheduler.wait_for("worker:0 died: no heartbeat")
    frozen.resume()
    assert frozen.wait() == 21, frozen.tail()
    assert "worker:0" in frozen.text()
    cluster.release()
    assert [node.wait() for node in (scheduler, successor, other)] == [0, 0, 0]


def test_slow_worker_continues_after_reconnect(cluster: Recovering) -> None:
    cluster.env |= QUICK
    scheduler, (frozen, other) = cluster.formed(MS_NODE_TIMEOUT=1)
    frozen.stop()
    scheduler.wait_for("worker:0 died: no heartbeat")
    frozen.resume()
    view = cluster.ready()
    assert [node.incarnation for node in nodes_of(view).values()] == [1, 1]
    cluster.wait_for_steps(0, 1)
    cluster.release()
    assert [node.wait() for node in (scheduler, frozen, other)] == [0, 0, 0]


def test_all_workers_can_be_restarted(cluster: Recovering) -> None:
    scheduler, workers = cluster.formed()
    for worker in workers:
        worker.kill()
    cluster.until(lambda v: not any(node.alive for node in nodes_of(v).values()), "all deaths to be seen")
    successors = [cluster.worker(rank) for rank in (0, 1)]
    for rank, successor in enumerate(successors):
        successor.wait_for(f"rank={rank} world=2")
    cluster.release()
    assert [node.wait() for node in (scheduler, *successors)] == [0, 0, 0]


def test_scheduler_exits_naming_workers_that_do_not_return(cluster: Recovering) -> None:
    """MindSpore waits indefinitely."""
    scheduler, workers = cluster.formed(MS_TOPO_TIMEOUT=4)
    for worker in workers:
        worker.kill()
    assert scheduler.wait() == 30
    assert "worker:0, worker:1 did not come back within 4 s" in scheduler.text()


def test_restarted_scheduler_delivers_the_end(cluster: Recovering) -> None:
    scheduler, workers = cluster.formed()
    scheduler.kill()
    journal = open_journal(cluster.journal, job=str(cluster.default), worker_num=cluster.workers, server_num=0)
    (stored,) = [record for record in journal.read() if isinstance(record, ClusterRecord)]
    journal.commit([msgspec.structs.replace(stored, phase=Phase.ENDED, ended=Ended(32, "asked to stop"))])
    journal.close()
    again = cluster.scheduler()
    assert [node.wait() for node in (again, *workers)] == [32, 32, 32]
    assert all("asked to stop" in node.text() for node in workers)
    assert cluster.scheduler().wait_for(r"scheduler of cluster (\w+) at")[1] != stored.cluster_id, (
        "the end was delivered to all"
    )


def test_scheduler_interrupted_during_import_prints_nothing(tmp_path: Path) -> None:
    """The first package that it imports never finishes its import."""
    (tmp_path / "covey").mkdir()
    (tmp_path / "covey/__init__.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    log = tmp_path / "scheduler.log"

    async def interrupted() -> int | None:
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        stored = SchedulerHandoff(socket_fds=([], []), journal_folder="")
        process = SchedulerProcess(stored, environ, log, over=lambda: True, gave_up=lambda code, reason: None)
        await process.start()
        await asyncio.to_thread(until, lambda: log.exists() and log.read_text(), "it to import")
        await process.stop(60.0)
        assert process._process is not None
        return process._process.returncode

    assert asyncio.run(interrupted()) == -signal.SIGINT
    assert log.read_text() == "importing\n"
