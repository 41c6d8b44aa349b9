"""Sharded optimizers: after any death, the final state is bitwise that of the ordinary optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes import healing
from tests.processes.command import Shell
from tests.processes.healing import LONG_S, final_hash, release, start, train, wait_for_fault
from tests.processes.sharded import SCRIPT


@pytest.fixture(scope="session")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The hash of four ranks with the ordinary optimizer."""
    with Shell(tmp_path_factory.mktemp("ordinary")) as calm:
        train(calm, "-n", "4", script=healing.SCRIPT, STEPS="14")
        yield final_hash(calm, 4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "deaths",
    [
        "1:2:forward 0:5:backward 2:8:reduction 0:11:optimizer 1:14:between 2:17:sharing",
        "1:0:joined 2:0:before 1:3:evaluation 0:7:sharing 1:10:sharing 2:13:optimizer 1:16:sharing 1:23:sharing 2:24:after",
    ],
)
def test_sharded_optimizer_is_bitwise_equal_after_any_death(shell: Shell, undisturbed: str, deaths: str) -> None:
    train(shell, script=SCRIPT, FAULTS=deaths)
    assert final_hash(shell) == undisturbed
    marks = {path.name for path in (shell.folder / "marks").iterdir() if path.is_file()}
    assert marks == {death.replace(":", "-") for death in deaths.split()}, "not all faults were injected"
    assert "roll back" not in shell.log("scheduler")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("death", "nth"), [("2:5:sharing", "1"), ("2:6:forward", "2")])
@pytest.mark.long
def test_survivors_one_collective_apart_are_healed(shell: Shell, undisturbed: str, death: str, nth: str) -> None:
    """Rank 1 has not updated its slots yet when rank 2 dies, but rank 0 has: rank 2's replacement gets slots of both kinds. Or
    rank 1 has updated them, but not received the values, and rank 0 is a step ahead."""
    train(shell, script=SCRIPT, FAULTS=death, LATE="1", NTH=nth)
    assert final_hash(shell) == undisturbed
    assert "LATE at step 5" in shell.log(1)
    assert "roll back" not in shell.log("scheduler")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_two_simultaneous_deaths_of_four_ranks_are_healed(shell: Shell, ordinary: str) -> None:
    """With two replicas any two ranks may die together; a rank holds its shard and two others, of four."""
    deaths = "0:2:forward 1:2:forward 2:5:backward 3:8:reduction 1:9:sharing 2:9:sharing 0:12:optimizer 3:12:optimizer"
    train(shell, "-n", "4", script=SCRIPT, FAULTS=deaths, COPIES="2", STEPS="14")
    assert final_hash(shell, 4) == ordinary
    marks = {path.name for path in (shell.folder / "marks").iterdir() if path.is_file()}
    assert marks == {death.replace(":", "-") for death in deaths.split()}, "not all faults were injected"
    assert "roll back" not in shell.log("scheduler")


@pytest.mark.timeout(300)
def test_loss_of_all_replicas_restarts_from_checkpoint(shell: Shell, ordinary: str) -> None:
    """One replica of each shard, on the next rank: 1 and 2 die together, then 0 alone."""
    deaths = "1:7:sharing 2:7:sharing 0:12:forward"
    train(shell, "-n", "4", script=SCRIPT, FAULTS=deaths, STEPS="14")
    assert final_hash(shell, 4) == ordinary
    output = re.findall(r"cluster roll back: (.*)", shell.log("scheduler"))
    assert len(output) == 1 and re.match(
        r"only dead ranks held the optimizer's state of \d+ of 6 parameters: increase ShardedOptimizer\(copies=...\) to survive"
        r" more deaths at the same time: all workers restart from the newest checkpoint$",
        output[0],
    )
    assert re.findall(r"BEGINS at (\d+)", shell.log(3)) == ["0", "5"]
    for rank in range(4):
        held, total = re.findall(r"^HOLDS (\d+) of (\d+)$", shell.log(rank), re.MULTILINE)[-1]
        assert int(held) < int(total)


def resized(shell: Shell, script: str, **env: str) -> str:
    """Run a training that grows from 3 to 5 ranks in step 4 and shrinks to 4 in step 9; return its hash."""
    grow, shrink = "0:4:forward:hold", "1:9:forward:hold"
    run = start(shell, script=script, FAULTS=f"{grow} {shrink} {env.pop('deaths', '')}", STEPS="12", **env)
    for held, workers in ((grow, 5), (shrink, 4)):
        wait_for_fault(shell, held)
        assert shell.run_command("scale", "--workers", str(workers)).code == 0
        release(shell, held)
    assert run.wait(LONG_S) == 0, run.tail()
    return final_hash(shell, 4)


@pytest.mark.timeout(300)
@pytest.mark.long
def test_shards_are_redistributed_when_world_size_changes(shell: Shell, tmp_path: Path) -> None:
    with Shell(tmp_path / "calm") as calm:
        ordinary = resized(calm, healing.SCRIPT)
    deaths = "2:5:sharing 4:6:optimizer 0:10:sharing"
    assert resized(shell, SCRIPT, deaths=deaths) == ordinary
    assert "roll back" not in shell.log("scheduler")
    marks = {path.name for path in (shell.folder / "marks").iterdir() if path.is_file()}
    assert marks >= {death.replace(":", "-") for death in deaths.split()}, "not all faults were injected"
    assert re.findall("resized: (.*), as requested", shell.log("scheduler")) == [
        "the world grows from 3 to 5 workers",
        "the world shrinks from 5 to 4 workers",
    ]


@pytest.mark.timeout(300)
@pytest.mark.long
def test_neighbouring_ranks_leave_in_sequence_without_loss(shell: Shell) -> None:
    """One replica of each shard: ranks 2 and 3 have the only two copies of one."""
    hold = "0:4:forward:hold"
    run = start(shell, "-n", "4", script=SCRIPT, FAULTS=hold, STEPS="9")
    wait_for_fault(shell, hold)
    assert shell.run_command("scale", "--workers", "2").code == 0
    release(shell, hold)
    assert run.wait(LONG_S) == 0, run.tail()
    final_hash(shell, 2)
    output = shell.log("scheduler")
    assert "roll back" not in output
    assert re.findall("the world size is now (.)", output) == ["3", "2"]
    assert re.findall(r"recovery: (\S+) .* (\S+)$", output, re.MULTILINE) == [("scale-in", "resumed")]


@pytest.mark.timeout(300)
@pytest.mark.long
def test_training_resumes_from_all_shards_in_other_world_size(shell: Shell, tmp_path: Path) -> None:
    """Three ranks, then four, each with its own checkpoint directory: they fetch missing shards from each other."""
    with Shell(tmp_path / "calm") as calm:
        train(calm, script=healing.SCRIPT, STEPS="5")
        train(calm, "-n", "4", script=healing.SCRIPT, STEPS="8")
        ordinary = final_hash(calm, 4)
    train(shell, script=SCRIPT, STEPS="5", COPIES="0", DISKS="1")
    train(shell, "-n", "4", script=SCRIPT, STEPS="8", DISKS="1")
    assert final_hash(shell, 4) == ordinary
    assert [re.findall(r"BEGINS at (\d+)", shell.log(rank))[-1] for rank in range(4)] == ["5"] * 4
