"""`covey chaos` with a real training and a real federation: the results are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes.command import Shell
from tests.soak import federated_load, trained


@pytest.mark.timeout(300)
def test_training_under_chaos_is_bitwise_equal(tmp_path: Path) -> None:
    words = [
        "--rate",
        "1/s",
        "--times",
        "6",
        "--for",
        "200s",
        "--seed",
        "3",
        "--faults",
        "kill,slow,cut,clock,scheduler,template",
    ]
    found, _ = trained.prove(tmp_path, 60, *words)
    assert found["strikes"] == 6 and {"kill", "scheduler"} <= {struck["fault"] for struck in found["story"]}
    assert found["recoveries"] and all(incident["outcome"] == "resumed" for incident in found["recoveries"])


@pytest.mark.timeout(300)
@pytest.mark.long
def test_federation_under_chaos_has_exact_sums(shell: Shell) -> None:
    found, rounds = federated_load.prove(
        shell, "--rate", "1/s", "--times", "4", "--for", "200s", "--seed", "3", "--faults", "kill,scheduler"
    )
    assert found["strikes"] == 4 and rounds > 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rate", "often"], "--rate 'often' is invalid: expected a rate such as 1/3s, 20/m or 2/s"),
        (["--faults", "kill,frogs"], "--faults 'kill,frogs' is invalid: expected one or more of kill, stop, slow"),
        (["--for", "long"], "'long' is not a duration: expected a value such as 90s, 10m or 500ms"),
        ([], "no running cluster of this user found on this host"),
    ],
)
def test_invalid_chaos_options_are_refused_in_one_line(shell: Shell, words: list[str], sentence: str) -> None:
    query = shell.run_command("chaos", *words)
    assert query.code in (10, 22) and sentence in query.text() and "Traceback" not in query.text()


def test_chaos_refuses_faults_that_it_cannot_undo(shell: Shell) -> None:
    """A large disk is not filled, a clock without a file is not shifted, and a process of another program is not touched."""
    shell.covey("run", "-n", "1", shell.default, shell.go)
    shell.wait_for_log(0, "rank=0")
    query = shell.run_command("chaos", "--faults", "disk,clock", "--for", "1s")
    assert query.code == 10 and "none of the requested faults is possible on this host" in query.text()
    assert "give the run a small file system" in query.text() or "cannot read the log directory" in query.text()
    assert "start the run with COVEY_FAULT_CLOCK=FILE" in query.text()
    shell.release()
