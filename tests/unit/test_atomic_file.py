"""Atomic file writes: syncs and their order, file modes, state after a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from covey import atomic_file


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which fsync and rename calls of a test are appended, with the names of the files."""
    found: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        found.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        found.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    return found


def test_file_is_synced_before_rename_and_directory_after(tmp_path: Path, calls: list[str]) -> None:
    atomic_file.write_atomically(tmp_path / "f", b"new")
    temporary = f".f.{os.getpid()}.new"
    assert calls == [f"fsync {temporary}", f"rename {temporary} f", f"fsync {tmp_path.name}"]
    assert (tmp_path / "f").read_bytes() == b"new"


def test_write_without_durable_does_not_sync(tmp_path: Path, calls: list[str]) -> None:
    atomic_file.write_atomically(tmp_path / "f", b"new", durable=False)
    assert [call.split()[0] for call in calls] == ["rename"]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_new_file_has_given_mode_over_existing_file(tmp_path: Path, mode: int) -> None:
    former = tmp_path / f".f.{os.getpid()}.new"
    former.write_bytes(b"of a process that was killed, and longer")
    former.chmod(0o604)
    (tmp_path / "f").write_bytes(b"old")
    atomic_file.write_atomically(tmp_path / "f", b"new", mode=mode)
    assert (tmp_path / "f").stat().st_mode & 0o777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_failed_write_keeps_old_file_and_removes_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "f").write_bytes(b"old")
    monkeypatch.setattr(os if step == "fsync" else Path, step, fail)
    with pytest.raises(OSError, match="No space left"):
        atomic_file.write_atomically(tmp_path / "f", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"old")]


def test_replace_durably_syncs_file_renames_and_syncs_directory(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "draft").write_bytes(b"new")
    atomic_file.replace_durably(tmp_path / "draft", tmp_path / "f")
    assert calls == ["fsync draft", "rename draft f", f"fsync {tmp_path.name}"]


def test_make_durable_directory_syncs_every_parent(tmp_path: Path, calls: list[str]) -> None:
    atomic_file.make_durable_directory(tmp_path / "a" / "b")
    assert calls == [f"fsync {tmp_path.name}", "fsync a"]
    atomic_file.make_durable_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_make_durable_directory_raises_if_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(NotADirectoryError):
        atomic_file.make_durable_directory(tmp_path / "a" / "b")
