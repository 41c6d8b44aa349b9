"""Standby schedulers: one takes over when the leader is killed or stopped, and an old leader is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Shell
from tests.processes.etcd import Etcd
from tests.processes.harness import Process, free_port, until
from tests.processes.healing import LONG_S, final_hash, release, start, wait_for_fault
from tests.processes.recovering import Recovering
from tests.processes.test_scheduler_restart import TRAIN_TOGETHER

from covey.core.types import Phase
from covey.errors import StoreError
from covey.storage.cas_store import open_cas_store

pytestmark = pytest.mark.timeout(300)
LEADS = r"this scheduler leads, with fencing token (\d+)"
LEASE_S = "2"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Recovering]:
    with Recovering(tmp_path) as cluster:
        yield cluster


def leader(shell: Shell) -> int:
    return int(next(n["pid"] for n in shell.nodes() if n["role"] == "scheduler"))


def worker(shell: Shell, rank: int) -> int:
    return int(next(n["pid"] for n in shell.nodes() if n["role"] == "worker" and n["rank"] == rank))


def token(shell: Shell) -> int:
    """Return the fencing token of the newest leader."""
    return max((int(number) for number in re.findall(LEADS, schedulers(shell))), default=0)


def schedulers(shell: Shell) -> str:
    """Return the logs of all schedulers."""
    return "".join(path.read_text() for path in shell.folder.rglob("scheduler*.log"))


def led_by(shell: Shell, number: int) -> None:
    until(lambda: token(shell) >= number, f"a leader with token {number}", details=shell.tails)


def test_training_is_bitwise_equal_after_killed_and_stopped_leaders(shell: Shell, undisturbed: str) -> None:
    killed, stopped = "1:4:forward:hold", "1:12:forward:hold"
    run = start(shell, "--standbys", "1", FAULTS=f"{killed} {stopped}", COVEY_LEASE_TIME=LEASE_S)
    wait_for_fault(shell, killed)
    pids = [worker(shell, 2), leader(shell)]  # a death without a scheduler that receives it
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    led_by(shell, 2)
    release(shell, killed)
    wait_for_fault(shell, stopped)
    victim, old = worker(shell, 0), leader(shell)
    os.kill(old, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    led_by(shell, 3)
    os.kill(old, signal.SIGCONT)
    until(lambda: "steps down and stands by" in schedulers(shell), "the old one to step down", details=shell.tails)
    release(shell, stopped)
    assert run.wait(LONG_S) == 0, run.tail()
    assert final_hash(shell) == undisturbed
    assert "step 0\nstep 0" not in run.text()
    shell.assert_no_processes()


def test_dead_standby_is_restarted_without_effect_on_others(shell: Shell) -> None:
    run = shell.covey("run", "-n", "1", "--standbys", "2", "train.py", str(shell.go), env={"COVEY_LEASE_TIME": LEASE_S})
    shell.wait_for_log(0, "rank=0")
    until(lambda: schedulers(shell).count("standing by") == 2, "two standbys", details=shell.tails)
    lead = leader(shell)
    next(p for p in shell.schedulers() if p.pid != lead).kill()
    until(lambda: len(shell.schedulers()) == 3, "three schedulers", details=shell.tails)
    assert token(shell) == 1
    shell.release()
    assert run.wait() == 0
    shell.assert_no_processes()


class Pair:
    """Two schedulers at their own addresses with a lease in etcd, and their workers."""

    def __init__(self, cluster: Recovering, lease_s: str = LEASE_S) -> None:
        self.cluster = cluster
        self.etcd = Etcd(cluster)
        cluster.host = f"127.0.0.1:{cluster.port},127.0.0.1:{free_port()}"
        self.addresses = cluster.host
        cluster.env |= {"MS_ENABLE_RECOVERY": None, "MS_RECOVERY_PATH": None, "COVEY_LEASE_TIME": lease_s}
        cluster.env |= {"COVEY_LEASE": f"etcd://{self.etcd.address}/test", "COVEY_JOB": "pair"}
        cluster.default = cluster.script(TRAIN_TOGETHER, "train.py")
        self.manage = [free_port(), free_port()]
        self.first = cluster.scheduler(MS_SCHED_MANAGE_PORT=self.manage[0])
        self.first.wait_for(LEADS)
        self.second = cluster.scheduler(MS_SCHED_MANAGE_PORT=self.manage[1])
        self.second.wait_for("standing by")
        self.workers = [cluster.worker(number) for number in range(cluster.workers)]
        for node in self.workers:
            node.wait_for("begins")

    def ready(self, leader: Process) -> None:
        """Wait until this scheduler reports that the cluster is ready."""
        port = leader.wait_for(r"scheduler of cluster \w+ at 127.0.0.1:(\d+)")[1]
        self.cluster.host, self.cluster.port = "127.0.0.1", int(port)
        self.cluster.until(lambda view: view.phase is Phase.READY, "the cluster to be ready again")

    def asked(self, verb: str) -> Process:
        """Run a command with all addresses."""
        return self.cluster.run(["covey", verb, "--master", self.addresses])

    def end(self, *schedulers: Process) -> None:
        self.cluster.release()
        assert [node.wait() for node in (*schedulers, *self.workers)] == [0] * (len(schedulers) + len(self.workers))


def state_at(port: int) -> dict[str, str] | None:
    """Return the state of the cluster at this REST port, or its redirect."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=5) as answer:
            found: dict[str, str] = json.load(answer)
            return found
    except OSError:
        return None


def test_standby_on_other_host_continues_from_stored_records(cluster: Recovering) -> None:
    pair = Pair(cluster)
    cluster.wait_for_steps(0, 1)
    pair.first.kill()
    cluster.wait_for_steps(0, 1)
    pair.second.wait_for(LEADS)
    for node in pair.workers:
        node.wait_for("found again")
    pair.ready(pair.second)
    view = cluster.view()
    assert view.generation == 1 and [node.rank for node in view.nodes if node.role == "worker"] == [0, 1]
    pair.end(pair.second)


def test_resumed_leader_steps_down_and_stands_by(cluster: Recovering) -> None:
    pair = Pair(cluster)
    pair.first.stop()
    pair.second.wait_for(LEADS)
    for node in pair.workers:
        node.wait_for("found again")
    cluster.wait_for_steps(0, 1)
    pair.first.resume()
    pair.first.wait_for("steps down and stands by")
    pair.ready(pair.second)
    asked, result = pair.manage
    state = until(lambda: state_at(asked), "the leader's answer by way of the standby", details=cluster.tails)
    assert state["cluster_state"] == "CLUSTER_READY" and state_at(result) == state
    cluster.wait_for_steps(0, 1)
    pair.end(pair.first, pair.second)


@pytest.mark.long
def test_unreachable_store_leaves_no_leader_and_training_continues(cluster: Recovering) -> None:
    pair = Pair(cluster)
    pair.etcd.process.stop()
    pair.first.wait_for("training continues, but no scheduler leads")
    pair.first.wait_for("steps down and stands by")
    cluster.wait_for_steps(0, 1)
    asked = pair.asked("status")
    assert asked.code == 22 and f"no scheduler leads at {pair.addresses}" in asked.text() and asked.text().count("\n") == 1
    pair.etcd.process.resume()
    until(lambda: len(re.findall(LEADS, pair.first.text() + pair.second.text())) == 2, "a new leader", details=cluster.tails)
    for node in pair.workers:
        node.wait_for("found again")
    cluster.wait_for_steps(0, 1)
    pair.end(pair.first, pair.second)


def test_sigterm_to_leader_hands_over_immediately(cluster: Recovering) -> None:
    pair = Pair(cluster, lease_s="600")  # longer than the test
    pair.first.signal(signal.SIGTERM)
    assert pair.first.wait() == 143
    pair.second.wait_for(LEADS)
    for node in pair.workers:
        node.wait_for("found again")
    cluster.wait_for_steps(0, 1)
    assert "worker:1" in pair.asked("nodes").text(), "the first address has no listener now, so the second must answer"
    pair.end(pair.second)


def test_store_with_decreased_revision_is_rejected(cluster: Recovering) -> None:
    etcd = Etcd(cluster)

    async def check() -> None:
        cells = open_cas_store(f"etcd://{etcd.address}", folder="", job="j")
        version: int | None = 0
        for _ in range(5):
            version = await cells.put("lease", b"x", version or 0)
        etcd.wipe()
        other = open_cas_store(f"etcd://{etcd.address}", folder="", job="j")
        for _ in range(8):  # more changes than before
            with pytest.raises(StoreError, match=r"has lost data .its revision decreased from 6 to 1.: restore it"):
                await cells.get("lease")
            await other.put("lease", b"y", (await other.get("lease"))[1])
        for one in (cells, other):
            await one.close()

    asyncio.run(check())


def test_standby_at_same_address_kills_stopped_leader(cluster: Recovering) -> None:
    cluster.env |= {"COVEY_LEASE": "file", "COVEY_LEASE_TIME": LEASE_S}
    cluster.default = cluster.script(TRAIN_TOGETHER, "train.py")
    first, workers = cluster.formed()
    second = cluster.scheduler()
    second.wait_for("standing by")
    first.stop()
    second.wait_for("it was stopped or stuck and its lease expired")
    for node in workers:
        node.wait_for("found again")
    cluster.wait_for_steps(0, 1)
    cluster.release()
    assert [node.wait() for node in (second, *workers)] == [0, 0, 0]


@pytest.mark.parametrize("store", [None, "file"])
def test_several_schedulers_without_lease_store_are_refused(cluster: Recovering, store: str | None) -> None:
    cluster.env |= {"MS_ENABLE_RECOVERY": None, "MS_RECOVERY_PATH": None, "COVEY_LEASE": store}
    cluster.host = f"127.0.0.1:{cluster.port},127.0.0.1:{free_port()}"
    lonely = cluster.scheduler()
    assert lonely.wait() == 10
    assert "several schedulers need a lease store: set COVEY_LEASE" in lonely.text()


def test_standby_exits_with_code_of_the_cluster(cluster: Recovering) -> None:
    cluster.env |= {"COVEY_LEASE": "file", "MS_ENABLE_RECOVERY": 0}
    first, workers = cluster.formed()
    second = cluster.scheduler()
    second.wait_for("standing by")
    workers[1].kill()
    code = first.wait()
    assert code != 0 and second.wait() == code, "a command at the standby must not report a failure as a success"


@pytest.mark.long
def test_removed_lease_does_not_block_the_journal(cluster: Recovering) -> None:
    cluster.env |= {"COVEY_LEASE": "file", "COVEY_LEASE_TIME": LEASE_S}
    cluster.default = cluster.script(TRAIN_TOGETHER, "train.py")
    first, workers = cluster.formed()
    first.kill()
    second = cluster.scheduler()
    second.wait_for("cluster ready")
    second.kill()
    shutil.rmtree(cluster.journal / "lease")
    third = cluster.scheduler()
    third.wait_for("token 3")
    for node in workers:
        node.wait_for("found again", count=2)
    cluster.release()
    assert [node.wait() for node in (third, *workers)] == [0, 0, 0]
    assert third.text().count("steps down") == 1


@pytest.mark.long
def test_ctrl_c_ends_scheduler_that_stepped_down(cluster: Recovering) -> None:
    pair = Pair(cluster)
    pair.first.stop()
    pair.second.wait_for(LEADS)
    pair.first.resume()
    pair.first.wait_for("steps down and stands by")
    pair.first.wait_for("standing by: another scheduler leads")
    pair.first.signal(signal.SIGINT)
    assert pair.first.wait() == 130
    pair.end(pair.second)


def test_run_does_not_stand_by_for_another_in_same_directory(shell: Shell) -> None:
    arguments = ("run", "-n", "1", "--standbys", "1", "--recovery-path", shell.folder / "recovery")
    first = shell.covey(*arguments, "train.py", str(shell.go), env={"COVEY_LEASE_TIME": LEASE_S})
    shell.wait_for_log(0, "rank=0")
    second = shell.covey(*arguments, "--log-dir", shell.folder / "second", "train.py", str(shell.go), name="second")
    assert second.wait() == 40, "it would have exited with 0 together with the first"
    assert "the lease belongs to another cluster" in (shell.folder / "second" / "scheduler.log").read_text()
    shell.release()
    assert first.wait() == 0


def test_runs_at_several_addresses_without_store_are_refused(shell: Shell) -> None:
    where = {"MS_SCHED_HOST": f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"}
    run = shell.run_command("run", "--nnodes", "2", "--nproc-per-node", "1", "train.py", str(shell.go), env=where)
    assert run.code == 10 and "several schedulers need a lease store: set COVEY_LEASE" in run.text()
