"""The disk of a training fills up and is freed: no rank dies, and the bits are the same."""

from __future__ import annotations

import pytest
from tests.processes import healing
from tests.processes.command import Shell
from tests.requirements import FILE_SYSTEMS, needs
from tests.soak.trained import small_disk

from covey.runtime.chaos_faults import fill_disk


@needs(FILE_SYSTEMS)
@pytest.mark.timeout(300)
def test_training_survives_a_full_disk(shell: Shell, undisturbed: str) -> None:
    talkative = healing.SCRIPT.replace("seen.append(loop.step)\n", 'seen.append(loop.step); print("step" * 2000)\n')
    begins, ends = "0:7:forward:hold", "0:12:forward:hold"
    (shell.folder / "marks").mkdir()
    with small_disk(shell.logs), small_disk(shell.folder / "marks"):
        run = healing.start(shell, script=talkative, FAULTS=f"{begins} {ends}")
        healing.wait_for_fault(shell, begins)
        with fill_disk(shell.logs), fill_disk(shell.folder / "marks"):
            healing.release(shell, begins)
            healing.wait_for_fault(shell, ends)
        healing.release(shell, ends)
        assert run.wait(healing.LONG_S) == 0, run.tail()
        assert healing.final_hash(shell) == undisturbed
        for rank in range(healing.WORLD):
            assert "bytes of output were lost here: the disk was full" in shell.log(rank)
            assert "BEGINS" in shell.log(rank) and shell.log(rank).count("BEGINS") == 1, "no rank may have restarted"
            stored = {path.name for path in (shell.folder / "marks" / "ckpt" / str(rank)).iterdir()}
            assert {"train-15.json", "train-20.json"} <= stored and "train-10.json" not in stored
        assert "training continues, the newest is that of step 5" in shell.log("scheduler")
