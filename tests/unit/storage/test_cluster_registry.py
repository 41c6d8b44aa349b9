"""The registry: who can be found on this host; and the folders that a run makes for itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from covey.errors import StoreError
from covey.storage.cluster_registry import RegistryEntry, process_start_time, register_cluster, running_clusters
from covey.storage.tempdirs import TempDirectory


def test_a_cluster_is_found_once_though_who_led_it_before_still_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def led_by(pid: int, cluster_id: str) -> RegistryEntry:
        return RegistryEntry(cluster_id, "127.0.0.1:8118", pid, process_start_time(pid))

    with subprocess.Popen(["sleep", "1000"]) as stopped:
        old, new, other = led_by(stopped.pid, "c"), led_by(os.getpid(), "c"), led_by(1, "d")
        for entry in (old, other, new):
            register_cluster(entry)
        assert {entry.pid for entry in running_clusters()} == {new.pid, other.pid}
        stopped.kill()


def test_who_only_looks_makes_no_folder_and_who_cannot_make_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert running_clusters() == [] and not list(tmp_path.iterdir())
    (tmp_path / "covey").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="set XDG_RUNTIME_DIR to a folder of yours"):
        register_cluster(RegistryEntry("c", "127.0.0.1:8118", os.getpid(), 0.0))


def test_a_run_without_a_temporary_folder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")  # where nobody can make one
    with pytest.raises(StoreError, match="set TMPDIR to one that can be written to"):
        TempDirectory("test")
