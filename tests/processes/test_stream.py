"""Iterable data sets: a replacement, and a resumed training, continue at the position of their predecessors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.processes import healing
from tests.processes.command import Shell
from tests.processes.healing import final_hash, train

STREAM = """
class River(torch.utils.data.IterableDataset):
    \"\"\"Every rank and loader its own samples, in an order that depends on those before.\"\"\"

    def __init__(self):
        self.noisy, self.at, self.last = Noisy(), 0, 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        if os.environ.get("SAYS"):
            print("READS from", self.at, flush=True)
        while True:
            self.at += 1
            self.last = (self.last * 31 + self.at + 7 * covey.get_rank() + 3 * (worker.id if worker else 0)) % len(self.noisy)
            yield self.noisy[self.last]

    def state_dict(self):
        return {"at": self.at, "last": self.last}

    def load_state_dict(self, state):
        self.at, self.last = state["at"], state["last"]


covey.init()
"""
TELLING = """
tell = loop._cursor.stream._exchange_positions
loop._cursor.stream._exchange_positions = lambda group: (fault(loop.step, "telling"), tell(group), fault(loop.step, "told"))
"""
BEGINS = 'print("BEGINS at"'
SCRIPT = healing.SCRIPT.replace("\ncovey.init()\n", STREAM).replace("Data(Noisy()", "Data(River()")
SCRIPT = SCRIPT.replace(BEGINS, TELLING + BEGINS)
assert "River()" in SCRIPT and "telling" in SCRIPT
WITHOUT_STATE = SCRIPT.replace("def state_dict", "def position").replace("def load_state_dict", "def go_to")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_stream_training_is_bitwise_equal_after_any_death(shell: Shell, tmp_path: Path) -> None:
    """Deaths before, while and after positions are reported; then a resume. Two loaders on each rank."""
    with Shell(tmp_path / "calm") as calm:
        train(calm, script=SCRIPT, LOADERS="2", STEPS="22")
        undisturbed = final_hash(calm)
    deaths = "1:5:forward 2:9:reduction 0:11:between 1:16:telling 2:16:told 0:18:backward"
    train(shell, script=SCRIPT, LOADERS="2", FAULTS=deaths, STEPS="21")
    marks = {path.name for path in (shell.folder / "marks").iterdir() if path.is_file()}
    assert marks == {death.replace(":", "-") for death in deaths.split()}, "not all faults were injected"
    output = [shell.log(rank).count("each sample is used once only while the world size does not change") for rank in range(3)]
    assert output == [1, 0, 0], "it must be logged once at the start"
    train(shell, script=SCRIPT, LOADERS="2", STEPS="22", SAYS="1")
    assert final_hash(shell) == undisturbed
    assert re.findall(r"BEGINS at (\d+)", shell.log(0))[-1] == "20"
    assert not re.findall(r"READS from 0$", shell.log(0), re.MULTILINE), "it must not read everything again"


@pytest.mark.timeout(300)
@pytest.mark.long
def test_stream_without_state_dict_is_read_again(shell: Shell, tmp_path: Path) -> None:
    with Shell(tmp_path / "calm") as calm:
        train(calm, script=SCRIPT, STEPS="8")
        undisturbed = final_hash(calm)
    train(shell, script=WITHOUT_STATE, FAULTS="1:5:forward 0:6:backward", STEPS="8", SAYS="1")
    assert final_hash(shell) == undisturbed
    assert "the data set has no state_dict and load_state_dict" in shell.log(0)
    assert shell.log(1).count("READS from 0") == 2


@pytest.mark.timeout(300)
def test_stream_continues_in_a_smaller_world(shell: Shell) -> None:
    train(shell, script=SCRIPT, FAULTS="1:5:forward", STEPS="18", COVEY_STRATEGY="retry,elastic-training,exit")
    assert "the world size is now 2" in shell.log("scheduler")
    found = [re.findall(r"^HASH (\w+)$", shell.log(process), re.MULTILINE) for process in (0, 2)]
    assert found[0] == found[1] != []
