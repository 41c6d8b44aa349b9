"""All workers die together: the next run resumes from the newest checkpoint with a complete copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.processes.command import Shell
from tests.processes.healing import LONG_S, release, start, train_and_hash, wait_for_fault

pytestmark = pytest.mark.timeout(300)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_run_resumes_from_complete_checkpoint_after_kill_of_all(shell: Shell, undisturbed: str) -> None:
    fault = "2:12:forward:hold"
    run = start(shell, FAULTS=fault)
    wait_for_fault(shell, fault)
    run.kill()
    shell.assert_no_processes()
    checkpoints = shell.folder / "marks" / "ckpt"
    tensors = checkpoints / "0" / "train-10.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])  # truncated
    manifest = checkpoints / "1" / "train-10.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"world": 3', b'"world": 4'))  # edited
    shutil.copytree(checkpoints, shell.folder / "kept")

    assert train_and_hash(shell) == undisturbed
    for rank, damaged in ((0, tensors), (1, manifest)):
        assert "BEGINS at 10" in shell.log(rank)
        assert f"a checkpoint of step 10 is skipped: {damaged}" in shell.log(rank)

    shutil.rmtree(checkpoints)
    shutil.copytree(shell.folder / "kept", checkpoints)
    (checkpoints / "2" / "train-10.json").unlink()  # step 10 has no complete copy now
    before = contents(checkpoints)
    fault = "0:5:forward:hold"
    smaller = start(shell, "-n", "2", FAULTS=fault)
    wait_for_fault(shell, fault)
    assert contents(checkpoints) == before, "unreadable checkpoints must not be removed"
    release(shell, fault)
    assert smaller.wait(LONG_S) == 0, smaller.tail()
    assert all("BEGINS at 5" in shell.log(rank) for rank in range(2))
