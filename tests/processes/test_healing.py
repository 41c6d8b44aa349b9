"""After the death of any rank at any point, the final state is bitwise that of an undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.processes import unusual_training as odd
from tests.processes.command import Shell
from tests.processes.healing import LADDER, LONG_S, SCRIPT, WORLD, train_and_hash


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "deaths",
    [
        "1:2:forward 0:5:backward 2:8:reduction 0:11:optimizer 1:14:between",
        "1:0:joined 2:0:before 1:3:evaluation 0:7:evaluation 2:10:reduction 0:10:reduction 1:23:optimizer 2:24:after",
        "0:4:forward 1:4:forward 0:5:forward 0:6:forward 0:7:forward 0:8:backward 0:9:between 0:10:optimizer 0:12:between",
    ],
)
def test_final_state_is_bitwise_equal_after_any_death(shell: Shell, undisturbed: str, deaths: str) -> None:
    assert train_and_hash(shell, FAULTS=deaths) == undisturbed
    marks = {path.name for path in (shell.folder / "marks").iterdir() if path.is_file()}
    assert marks == {death.replace(":", "-") for death in deaths.split()}, "not all faults were injected"


@pytest.mark.timeout(300)
def test_final_state_is_bitwise_equal_with_loader_workers(shell: Shell, undisturbed: str) -> None:
    assert train_and_hash(shell, FAULTS="1:3:backward 2:9:forward", LOADERS="2") == undisturbed
    stages = r"detected \d+ ms, decided \d+ ms, re-formed \d+ ms, restored \d+ ms, resumed \d+ ms; \d+ ms in all, resumed"
    for rank in (1, 2):
        waterfall = rf"recovery: recover-in-place of worker:{rank} \(killed by SIGKILL\): {stages}"
        assert re.search(waterfall, shell.log("scheduler")), shell.log("scheduler")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_final_state_is_bitwise_equal_with_scaler_and_autocast(shell: Shell, tmp_path: Path) -> None:
    """With accumulation, clipping, a schedule and loader workers. In step 7 the gradients overflow and no optimizer runs."""
    with Shell(tmp_path / "calm") as calm:
        undisturbed = train_and_hash(calm, AMP="1")
    faults = "1:4:forward 0:7:evaluation 2:14:reduction 1:18:optimizer"
    assert train_and_hash(shell, FAULTS=faults, AMP="1", LOADERS="2") == undisturbed
    assert len(list((shell.folder / "marks").glob("*-*-*"))) == 4, "not all faults were injected"


@pytest.mark.timeout(300)
def test_survivors_one_step_apart_are_healed(shell: Shell, undisturbed: str) -> None:
    """Rank 1 has not completed step 5 when rank 2 dies in step 6: rank 0 sends it the result."""
    assert train_and_hash(shell, FAULTS="2:6:forward", LATE="1") == undisturbed
    assert "LATE at step 5" in shell.log(1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "faults",
    [
        # The donor dies when the replacement has its state but the delayed rank not yet the result: the replacement sends it.
        "2:6:forward 0:6:giving-results:hold 0:6:gave-state 0:10:checkpoint 1:12:forward 1:0:replacing 1:12:restored",
        # The reverse; then a donor that dies before it sent anything; then one that dies after it sent a state of after the
        # optimizer: the receiver becomes a donor before it has joined the others.
        "2:6:forward 0:6:giving-state:hold 0:6:gave-results 2:12:forward 0:12:giving-state 1:15:checkpoint"
        " 0:19:evaluation 1:19:gave-state",
    ],
)
@pytest.mark.long
def test_final_state_is_bitwise_equal_after_failure_during_recovery(shell: Shell, undisturbed: str, faults: str) -> None:
    assert train_and_hash(shell, FAULTS=faults, LATE="1") == undisturbed
    assert "LATE at step 5" in shell.log(1)
    marks = {path.name for path in (shell.folder / "marks").iterdir() if path.is_file()}
    deaths = {"-".join(fault.split(":")) for fault in faults.split() if not fault.endswith(":hold")}
    assert marks >= deaths, "not all faults were injected"


@pytest.mark.timeout(300)
@pytest.mark.long
def test_stopped_process_is_replaced_after_node_timeout(shell: Shell, undisturbed: str) -> None:
    assert train_and_hash(shell, "--node-timeout", "2", FAULTS="1:6:between:stop") == undisturbed
    assert "Current thread" in shell.log(1) or "Thread 0x" in shell.log(1), "the log must have the stack of the stopped process"


@pytest.mark.timeout(300)
def test_endless_loop_is_replaced_after_stuck_timeout(shell: Shell, undisturbed: str) -> None:
    assert train_and_hash(shell, "--stuck", "4", FAULTS="1:6:forward:spin 0:11:evaluation:spin") == undisturbed
    for rank in (0, 1):
        assert re.search(r'File "\S*train.py", line \d+ in spin', shell.log(rank)), (
            "the log must have the stack of the endless loop"
        )
    stuck = set(re.findall(r"(worker:\d) died: stuck: all other ranks wait for it in collective", shell.log("scheduler")))
    assert stuck >= {"worker:0", "worker:1"}, "other ranks may be stuck too, if they had no CPU time"


@pytest.mark.timeout(300)
@pytest.mark.long
def test_slow_step_causes_no_recovery(shell: Shell, undisturbed: str) -> None:
    """One rank takes five seconds for its evaluation, far more than ten times the median step."""
    assert train_and_hash(shell, FAULTS="2:7:evaluation:slow") == undisturbed
    assert not re.search("died|suspect|retry|generation 2", shell.log("scheduler"))


@pytest.mark.timeout(300)
def test_failed_step_is_retried_in_place(shell: Shell, undisturbed: str) -> None:
    """A retryable exception in each phase before the optimizer, two ranks at once, and broken connections: no rank restarts.
    Only a rank that fails after the optimizer ran is replaced."""
    failures = "1:2:forward:fail 0:5:backward:fail 2:8:reduction:fail 0:11:forward:fail 1:11:reduction:fail"
    assert train_and_hash(shell, FAULTS=f"{failures} 2:14:forward:cut 0:17:backward:cut 2:19:evaluation:fail") == undisturbed
    output = [shell.log(rank) for rank in range(WORLD)]
    assert [text.count("is repeated in place") for text in output] == [2, 2, 1]
    assert [text.count("BEGINS at") for text in output] == [1, 1, 2]
    assert len(re.findall("cluster retry: a collective failed", shell.log("scheduler"))) >= 2


@pytest.mark.timeout(300)
def test_results_above_cache_limit_cause_restart_from_checkpoint(shell: Shell, undisturbed: str) -> None:
    """Rank 2 dies between two collectives of step 7; then rank 1 in step 9, which has cached all results it needs."""
    assert train_and_hash(shell, FAULTS="2:7:evaluated 1:9:forward", COVEY_KEEP_BYTES="10000") == undisturbed
    shell.wait_for_log("scheduler", "cluster roll back: rank 2 cannot join the current step: .*COVEY_KEEP_BYTES")
    assert [re.findall(r"BEGINS at (\d+)", shell.log(rank)) for rank in range(WORLD)] == [
        ["0", "5"],
        ["0", "5", "9"],
        ["0", "5"],
    ]


@pytest.mark.timeout(300)
def test_death_without_recovery_strategy_ends_the_run(shell: Shell) -> None:
    shell.script(SCRIPT, "train.py")
    (shell.folder / "marks").mkdir()
    arguments = ["run", "-n", str(WORLD), "--strategy", "exit", "train.py", str(shell.folder / "marks")]
    run = shell.covey(*arguments, env={"FAULTS": "1:2:forward"})
    assert run.wait(LONG_S) == 137, run.tail()
    assert "first failure: rank 1" in run.text()


@pytest.mark.timeout(300)
def test_script_that_always_dies_is_not_restarted_indefinitely(shell: Shell) -> None:
    """Three deaths of one rank without a step in between end the strategy; the other ranks dump."""
    shell.script(SCRIPT.replace("mark.touch()", "pass"), "train.py")
    (shell.folder / "marks").mkdir()
    arguments = ["run", "-n", str(WORLD), "train.py", str(shell.folder / "marks")]
    run = shell.covey(*arguments, env={"FAULTS": "1:6:forward", "COVEY_STRATEGY": LADDER})
    assert run.wait(LONG_S) == 137, run.tail()
    assert "without a step in between" in shell.log("scheduler")
    assert re.search(r"step 6 is in \S+dump\S+", run.text()), run.text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("writes", ["", "1"])
@pytest.mark.long
def test_unusual_models_are_healed_bitwise_equal(shell: Shell, tmp_path: Path, writes: str) -> None:
    """Parameters that are tied, frozen, unused, empty or complex; buffers that are not saved, replaced or created later; an
    average of the model; gradients that outlive a step; code before an epoch's first batch and after the last. If the script
    changes parameters directly, a replacement cannot join within such a step: all ranks restart from the checkpoint."""
    with Shell(tmp_path / "calm") as calm:
        undisturbed = train_and_hash(calm, script=odd.SCRIPT, WRITES=writes)
    deaths = "1:7:forward" if writes else "1:3:forward 2:5:evaluation 0:8:opening 1:10:between 0:13:evaluation 2:16:after"
    assert train_and_hash(shell, script=odd.SCRIPT, FAULTS=deaths, WRITES=writes) == undisturbed
    marks = {path.name for path in (shell.folder / "marks").iterdir() if path.is_file()}
    assert marks == {death.replace(":", "-") for death in deaths.split()}, "not all faults were injected"
    assert ("all workers restart from the newest checkpoint" in shell.log("scheduler")) == bool(writes)


def test_usage_error_is_one_line_and_not_healed(shell: Shell) -> None:
    shell.script("import covey\ncovey.init()\ncovey.Checkpoint('c', keep=1)\n", "train.py")
    run = shell.covey("run", "-n", "2", "train.py", env={"COVEY_STRATEGY": LADDER})
    assert run.wait() == 10, run.tail()
    assert "Traceback" not in run.text() and "covey: Checkpoint(keep=1) is invalid" in run.text()
    assert "a restart does not fix that" in shell.log("scheduler")
