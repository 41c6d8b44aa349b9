"""The registry: who can be found on this host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from covey.store.registry import Entry, add, process_started, running


def test_a_cluster_is_found_once_though_who_led_it_before_still_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def led_by(pid: int, cluster_id: str) -> Entry:
        return Entry(cluster_id, "127.0.0.1:8118", pid, process_started(pid))

    with subprocess.Popen(["sleep", "1000"]) as stopped:
        old, new, other = led_by(stopped.pid, "c"), led_by(os.getpid(), "c"), led_by(1, "d")
        for entry in (old, other, new):
            add(entry)
        assert {entry.pid for entry in running()} == {new.pid, other.pid}
        stopped.kill()
