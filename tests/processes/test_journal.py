"""Unusable journals: the start ends with a one-line error, the journal is not changed, and the workers continue.

If the disk fails while the cluster runs, no change takes effect until it can be written.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes.harness import Process, until
from tests.processes.recovering import TRAIN, Recovering, membership
from tests.requirements import MOUNTS, OWN_MOUNTS, needs


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Recovering]:
    with Recovering(tmp_path) as cluster:
        yield cluster


# -- unusable journals -----------------------------------------------------------------------------------------------


def left_alone(cluster: Recovering, code: int, *arguments: str, **env: Any) -> Process:
    """Assert that a start is refused in one line and changes nothing, while the workers continue."""
    before = cluster.contents()
    refused = cluster.scheduler(name="scheduler-refused", **env)
    assert refused.wait() == code, refused.tail()
    assert len(refused.text().splitlines()) == 1, refused.tail()
    for word in (str(cluster.journal), *arguments):
        assert word in refused.text()
    assert cluster.contents() == before
    cluster.wait_for_steps(0, 1)
    return refused


def test_journal_of_other_world_size_is_refused(cluster: Recovering) -> None:
    scheduler, workers = cluster.formed()
    scheduler.kill()
    left_alone(cluster, 40, "belongs to another job", "MS_WORKER_NUM is 2 there and 3 here", MS_WORKER_NUM=3)
    cluster.scheduler()
    cluster.ready()
    cluster.release()
    assert [worker.wait() for worker in workers] == [0, 0]


def test_journal_of_other_script_is_refused(cluster: Recovering) -> None:
    scheduler, _ = cluster.formed()
    scheduler.kill()
    other = cluster.script(TRAIN, "another.py")
    left_alone(cluster, 40, "belongs to another job", "train.py there and", "another.py here", script=other)


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut in half": lambda path: cut(path, path.stat().st_size // 2),
    "cut within its header": lambda path: cut(path, 50),
    "empty": lambda path: cut(path, 0),
    "overwritten": lambda path: path.write_bytes(os.urandom(20_000)),
    "of another program": lambda path: make_foreign(path),
}


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def settle(path: Path) -> None:
    """Merge SQLite's side files into the journal, as a clean shutdown does."""
    database = sqlite3.connect(path)
    assert database.execute("pragma wal_checkpoint(truncate)").fetchone()[0] == 0
    database.close()


def make_foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("create table someone (else_ text)")
    database.close()


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_journal_is_refused_and_unchanged(cluster: Recovering, kind: str) -> None:
    """Restore the valid journal: the scheduler starts, and the workers have noticed only its absence."""
    scheduler, workers = cluster.formed()
    before = cluster.view()
    scheduler.kill()
    settle(cluster.journal / "scheduler.journal")
    good = cluster.folder / "good"
    shutil.copytree(cluster.journal, good)
    DAMAGE[kind](cluster.journal / "scheduler.journal")
    left_alone(cluster, 40, "damaged")
    shutil.rmtree(cluster.journal)
    shutil.copytree(good, cluster.journal)
    cluster.scheduler()
    assert membership(cluster.ready()) == membership(before)
    cluster.release()
    assert [worker.wait() for worker in workers] == [0, 0]


@pytest.mark.parametrize("kind", ["lost", "cut"])
def test_journal_survives_loss_of_sqlite_side_files(cluster: Recovering, kind: str) -> None:
    """The journal is copied without its side files: the scheduler refuses it or has all records; it never starts over."""
    scheduler, workers = cluster.formed()
    before = cluster.view()
    scheduler.kill()
    beside(cluster.journal / "scheduler.journal", "-shm").unlink(missing_ok=True)
    wal = beside(cluster.journal / "scheduler.journal", "-wal")
    if wal.exists():
        wal.unlink() if kind == "lost" else cut(wal, wal.stat().st_size // 2)
    again = cluster.scheduler()
    until(lambda: not again.alive or settled(again), "the scheduler to refuse or to be back", details=cluster.tails)
    assert [worker.alive for worker in workers] == [True, True], cluster.tails()
    if again.alive:
        assert membership(cluster.ready()) == membership(before)
    else:
        assert again.wait() == 40 and "damaged" in again.text()
    cluster.wait_for_steps(0, 1)


def settled(scheduler: Process) -> bool:
    """Wait until the scheduler has admitted or refused the workers."""
    return "cluster ready" in scheduler.text() or "refused" in scheduler.text()


# Dies with its change partly in the file: the cache is too small to delay the write until the commit.
TORN = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("pragma journal_mode = truncate")
database.execute("pragma cache_size = 1")
database.execute("begin immediate")
database.execute("delete from facts")
database.executemany("insert into story (at, node) values (0, ?)", [("x" * 4000,)] * 100)
os.kill(os.getpid(), 9)
"""


def test_interrupted_commit_is_rolled_back(cluster: Recovering) -> None:
    scheduler, workers = cluster.formed()
    before = membership(cluster.ready())
    scheduler.kill()
    journal = cluster.journal / "scheduler.journal"
    cluster.run([sys.executable, cluster.script(TORN), journal], name="torn")
    assert journal.with_name(f"{journal.name}-journal").stat().st_size > 0
    cluster.scheduler()
    assert membership(cluster.ready()) == before
    cluster.release()
    assert [worker.wait() for worker in workers] == [0, 0]


def test_file_in_place_of_journal_directory_is_a_one_line_error(cluster: Recovering) -> None:
    cluster.journal.write_text("not a folder")
    scheduler = cluster.scheduler()
    assert scheduler.wait() == 41
    assert f"cannot use the journal directory {cluster.journal}" in scheduler.text()
    assert cluster.journal.read_text() == "not a folder"


# -- disks -----------------------------------------------------------------------------------------------------------


def in_mounts_of_its_own(command: str) -> list[str]:
    """Return a prefix that runs a command in its own mount namespace, after `command`."""
    return [*OWN_MOUNTS, "sh", "-c", f'{command} && exec "$@"', "sh"]


@needs(MOUNTS)
@pytest.mark.parametrize("used_before", [False, True])
def test_read_only_disk_is_a_one_line_error(cluster: Recovering, used_before: bool) -> None:
    cluster.journal.mkdir()
    if used_before:
        scheduler, _ = cluster.formed()
        scheduler.kill()
    before = cluster.contents()
    read_only = f"mount --bind {cluster.journal} {cluster.journal} && mount -o remount,bind,ro {cluster.journal}"
    refused = cluster.scheduler(before=in_mounts_of_its_own(read_only))
    assert refused.wait() == 41, refused.tail()
    assert str(cluster.journal) in refused.text() and "Read-only" in refused.text()
    assert len(refused.text().splitlines()) == 1
    assert cluster.contents() == before
    if used_before:
        cluster.wait_for_steps(0, 1)


@needs(MOUNTS)
def test_disk_full_at_start_is_a_one_line_error(cluster: Recovering) -> None:
    cluster.journal.mkdir()
    disk = f"mount -t tmpfs -o size=64k none {cluster.journal} && (head -c 1m /dev/zero > {cluster.journal}/fill 2>&- || true)"
    scheduler = cluster.scheduler(before=in_mounts_of_its_own(disk))
    assert scheduler.wait() == 41, scheduler.tail()
    assert str(cluster.journal) in scheduler.text() and "full" in scheduler.text()
    assert "Traceback" not in scheduler.text()


@needs(MOUNTS)
def test_full_disk_delays_changes_and_training_continues(cluster: Recovering) -> None:
    cluster.journal.mkdir()
    disk = f"mount -t tmpfs -o size=2m none {cluster.journal}"
    scheduler = cluster.scheduler(before=in_mounts_of_its_own(disk))
    other, victim = cluster.worker(0), cluster.worker(1)
    other.wait_for("rank=0")
    victim.wait_for("rank=1")
    fill = Path(f"/proc/{scheduler.pid}/root{cluster.journal}/fill")
    with fill.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    victim.kill()
    scheduler.wait_for("cannot write the journal .*until then no change takes effect")
    successor = cluster.worker(1)
    cluster.wait_for_steps(0)
    assert "generation 2" not in other.text() and "rank=" not in successor.text()
    fill.unlink()
    scheduler.wait_for("journal writable again")
    successor.wait_for("rank=1")
    assert cluster.ready().generation == 3
    cluster.wait_for_steps(0, 1)
    cluster.release()
    assert [node.wait() for node in (scheduler, other, successor)] == [0, 0, 0]


@needs(MOUNTS)
def test_full_disk_at_the_end_does_not_block_the_cluster(cluster: Recovering) -> None:
    """The end cannot be written: the workers finish nevertheless, and the scheduler logs the reason."""
    cluster.journal.mkdir()
    disk = f"mount -t tmpfs -o size=2m none {cluster.journal}"
    scheduler = cluster.scheduler(before=in_mounts_of_its_own(disk))
    workers = [cluster.worker(0), cluster.worker(1)]
    for worker in workers:
        worker.wait_for("rank=")
    fill = Path(f"/proc/{scheduler.pid}/root{cluster.journal}/fill")
    with fill.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    cluster.release()
    assert [worker.wait() for worker in workers] == [0, 0]
    scheduler.wait_for("cannot write the journal")
    fill.unlink()
    assert scheduler.wait() == 0
