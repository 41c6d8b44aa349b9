"""Resizes: every sample of an epoch is counted once, with the same weight as all others of its step."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import httpx2
import pytest
from tests.processes.command import Shell
from tests.processes.elastic import LONG_S, check, start, train
from tests.processes.healing import release, wait_for_fault


@pytest.mark.timeout(300)
@pytest.mark.long
def test_training_resumes_from_checkpoint_with_other_world_sizes(shell: Shell) -> None:
    """12 samples per step: 4 on each of three ranks, 6 on each of two, 2 or 3 on each of five; micro-batches of at most 2."""
    train(shell, EVERY="5", STEPS="5")
    train(shell, "-n", "2", EVERY="10", STEPS="10")
    train(shell, "-n", "5", LOADERS="1")
    assert [(end["world"], end["steps"]) for end in check(shell)] == [(3, 5)] * 3 + [(2, 10)] * 2 + [(5, 15)] * 5
    assert "BEGINS at 10" in shell.log(4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "steps", "deaths"),
    [
        (3, 15, "2:2:forward 0:6:reduction"),  # rank 0 with a bucket in flight; then one rank is left
        (3, 15, "1:4:optimizer 0:9:forward"),  # in the last step of an epoch: after its reduction, and before
        # after the optimizer; then an extra step is the very last
        pytest.param(4, 16, "0:3:evaluation 2:14:between 1:15:forward", marks=pytest.mark.long),
        pytest.param(3, 15, "0:5:forward 1:5:forward", marks=pytest.mark.long),
    ],
)
def test_world_shrinks_within_a_step(shell: Shell, world: int, steps: int, deaths: str) -> None:
    shown = train(shell, "-n", str(world), STEPS=str(steps), FAULTS=deaths)
    marks = {path.name for path in (shell.folder / "marks").glob("*-*-*")}
    assert marks == {death.replace(":", "-") for death in deaths.split()}, "not all faults were injected"
    ends = check(shell, world)
    assert [end["world"] for end in ends] == [world - len(marks)] * (world - len(marks))
    assert ends[0]["steps"] == steps + ("1:15" in deaths or "0:9" in deaths)
    assert "ENDS as rank 0" in shown, "the console must show the present first rank"


@pytest.mark.timeout(300)
@pytest.mark.long
def test_death_of_all_ranks_of_an_extra_step_loses_no_sample(shell: Shell) -> None:
    """The 2 samples of a lost rank are an extra step of 3 ranks, of which the first has no sample and is the last one left. The
    batch that it used to take part is then counted, which has the same two samples."""
    train(shell, "-n", "4", STEPS="8", ACCUMULATE="1", FAULTS="3:7:forward 1:8:forward 2:8:forward")
    ends = check(shell, 4, accumulate=1)
    assert [(end["world"], end["steps"]) for end in ends] == [(1, 9)]


@pytest.mark.timeout(300)
@pytest.mark.long
def test_step_whose_only_result_died_is_repeated(shell: Shell) -> None:
    """Rank 2 wrote the checkpoint of step 3 and died before the others had the result, which repeated it without rank 2."""
    marks, other = shell.folder / "marks", shell.folder / "other"
    train(shell, EVERY="3", STEPS="3")
    marks.rename(other)
    held = "0:3:forward:hold"
    run = start(shell, EVERY="3", FAULTS=f"2:2:forward {held}")
    wait_for_fault(shell, held)
    run.kill()
    shell.assert_no_processes()
    shutil.copytree(other / "ckpt" / "2", marks / "ckpt" / "2", dirs_exist_ok=True)
    train(shell)
    assert "BEGINS at 3" in shell.log(2)
    assert [end["world"] for end in check(shell)] == [3, 3, 3]


def scaled(shell: Shell, at: str, workers: int) -> str:
    """Request a number of workers while a rank is held in its step; return the output of `covey scale`."""
    wait_for_fault(shell, at)
    query = shell.run_command("scale", "--workers", str(workers))
    assert query.code == 0, query.tail()
    return query.text()


@pytest.mark.timeout(300)
def test_world_grows_and_shrinks_on_request(shell: Shell) -> None:
    """Nothing is restarted; a new rank dies later; samples are counted once in worlds of 3, 5, 4 and 2."""
    grow, grown, shrink = "0:4:forward:hold", "2:5:forward:hold", "1:9:forward:hold"
    run = start(shell, FAULTS=f"{grow} {grown} {shrink} 3:6:reduction")
    assert "operation 1: the world grows from 3 to 5 workers, as requested" in scaled(shell, grow, 5)
    release(shell, grow)
    shell.wait_for_log("scheduler", r"scale-out of cluster \(requested\): .* resumed")  # a death before this would roll it back
    release(shell, grown)
    wait_for_fault(shell, shrink)
    address = re.search(r"REST at (http://127\.0\.0\.1:\d+)", run.text())
    assert address is not None
    with httpx2.Client(base_url=address[1], trust_env=False, timeout=30) as rest:
        assert "is illegal" in rest.post("/scalein", json={"node_ids": ["3"]}).json()["error_message"]  # it died
        query = rest.post("/scalein", json={"node_ids": ["worker:0", "2"]}).json()
        assert query["reason"] == "the world shrinks from 4 to 2 workers, as requested"
        assert rest.get("/state").json()["cluster_state"] == "CLUSTER_SCALE_IN"
        assert rest.get(f"/operations/{query['operation']}").json()["outcome"] == "open"
        assert rest.get("/operations/1").json()["outcome"] == "resumed"
        release(shell, shrink)
    assert run.wait(LONG_S) == 0, run.tail()
    assert [end["world"] for end in check(shell)] == [2, 2]


@pytest.mark.timeout(300)
def test_failed_scale_out_is_rolled_back(shell: Shell) -> None:
    held = "1:4:forward:hold"
    run = start(shell, FAULTS=f"{held} 4:0:joined")
    scaled(shell, held, 5)
    shell.wait_for_log("scheduler", "rolled back")
    release(shell, held)
    assert run.wait(LONG_S) == 0, run.tail()
    assert [end["world"] for end in check(shell)] == [3, 3, 3]


@pytest.mark.timeout(300)
def test_loss_of_the_last_state_resumes_from_checkpoint(shell: Shell) -> None:
    """The replacement is alone, and its member index differs from its rank: it continues from the checkpoint with all of the
    data, and further workers can join."""
    shrink, grow = "0:6:forward:hold", "2:12:forward:hold"
    run = start(shell, EVERY="5", COVEY_STRATEGY="recover-in-place,elastic-training", FAULTS=f"{shrink} 2:11:forward {grow}")
    wait_for_fault(shell, shrink)
    address = re.search(r"REST at (http://127\.0\.0\.1:\d+)", run.text())
    assert address is not None
    assert httpx2.post(f"{address[1]}/scalein", json={"node_ids": ["0", "1"]}, trust_env=False, timeout=30).status_code == 200
    release(shell, shrink)
    shell.wait_for_log("scheduler", "cluster state lost: full restart 1: all ranks restart from the newest checkpoint")
    assert "the world grows from 1 to 3" in scaled(shell, grow, 3)
    release(shell, grow)
    assert run.wait(LONG_S) == 0, run.tail()
    assert "BEGINS at 10" in shell.log(2)
    assert [end["world"] for end in check(shell)] == [3, 3, 3]


@pytest.mark.timeout(300)
def test_elastic_example_runs(shell: Shell) -> None:
    examples = Path(__file__).parents[2] / "examples"
    strategy = {"COVEY_STRATEGY": "retry,elastic-training,exit"}
    run = shell.covey("run", "-n", "3", examples / "04_elastic.py", env=strategy)
    shell.wait_for_log(0, "world 3")
    assert shell.run_command("scale", "--workers", "4").code == 0
    assert run.wait(LONG_S) == 0, run.tail()
    assert "in a world of 4" in shell.log(0)
