"""File writes that survive a crash: what is synced, in which order, and what a failure leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from covey import atomic_file


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The syncs and renames of a test, with the names of the files."""
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


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(tmp_path: Path, calls: list[str]) -> None:
    atomic_file.write_atomically(tmp_path / "f", b"new")
    temporary = f".f.{os.getpid()}.new"
    assert calls == [f"fsync {temporary}", f"rename {temporary} f", f"fsync {tmp_path.name}"]
    assert (tmp_path / "f").read_bytes() == b"new"


def test_a_write_that_need_not_be_durable_syncs_nothing(tmp_path: Path, calls: list[str]) -> None:
    atomic_file.write_atomically(tmp_path / "f", b"new", durable=False)
    assert [call.split()[0] for call in calls] == ["rename"]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_the_new_file_has_the_mode_whatever_was_there(tmp_path: Path, mode: int) -> None:
    former = tmp_path / f".f.{os.getpid()}.new"
    former.write_bytes(b"of a process that was killed, and longer")
    former.chmod(0o604)
    (tmp_path / "f").write_bytes(b"old")
    atomic_file.write_atomically(tmp_path / "f", b"new", mode=mode)
    assert (tmp_path / "f").stat().st_mode & 0o777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failure_leaves_the_former_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "f").write_bytes(b"old")
    monkeypatch.setattr(os if step == "fsync" else Path, step, fail)
    with pytest.raises(OSError, match="No space left"):
        atomic_file.write_atomically(tmp_path / "f", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"old")]


def test_a_file_of_a_library_is_synced_renamed_and_its_folder_synced(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "draft").write_bytes(b"new")
    atomic_file.replace_durably(tmp_path / "draft", tmp_path / "f")
    assert calls == ["fsync draft", "rename draft f", f"fsync {tmp_path.name}"]


def test_every_new_folder_is_synced_in_the_folder_above(tmp_path: Path, calls: list[str]) -> None:
    atomic_file.make_durable_directory(tmp_path / "a" / "b")
    assert calls == [f"fsync {tmp_path.name}", "fsync a"]
    atomic_file.make_durable_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(NotADirectoryError):
        atomic_file.make_durable_directory(tmp_path / "a" / "b")
