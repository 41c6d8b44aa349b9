"""Cluster registry and temporary directories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from covey.errors import StoreError
from covey.storage.running_clusters import RegistryEntry, process_start_time, register_cluster, running_clusters
from covey.storage.tempdirs import TempDirectory


def test_new_scheduler_replaces_entry_of_earlier_one_that_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def make_entry(pid: int, cluster_id: str) -> RegistryEntry:
        return RegistryEntry(cluster_id, "127.0.0.1:8118", pid, process_start_time(pid))

    with subprocess.Popen(["sleep", "1000"]) as stopped:
        old, new, other = make_entry(stopped.pid, "c"), make_entry(os.getpid(), "c"), make_entry(1, "d")
        for entry in (old, other, new):
            register_cluster(entry)
        assert {entry.pid for entry in running_clusters()} == {new.pid, other.pid}
        stopped.kill()


def test_reading_registry_creates_no_directory_and_failed_write_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert running_clusters() == [] and not list(tmp_path.iterdir())
    (tmp_path / "covey").write_text("a file in place of the directory")
    with pytest.raises(StoreError, match="set XDG_RUNTIME_DIR to a writable directory"):
        register_cluster(RegistryEntry("c", "127.0.0.1:8118", os.getpid(), 0.0))


def test_missing_temporary_directory_raises_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")  # a directory in which none can be created
    with pytest.raises(StoreError, match="set TMPDIR to a writable directory"):
        TempDirectory("test")
