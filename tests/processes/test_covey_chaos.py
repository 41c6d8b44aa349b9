"""`covey chaos` at a real training and at a real federation: the bits are those of an undisturbed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Shell, shells
from tests.soak import federated_load, trained


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


@pytest.mark.timeout(300)
def test_a_training_under_chaos_ends_with_the_same_bits(tmp_path: Path) -> None:
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
def test_a_federation_under_chaos_stays_exact(shell: Shell) -> None:
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
def test_what_is_no_wish_is_refused_in_one_sentence(shell: Shell, words: list[str], sentence: str) -> None:
    asked = shell.ask("chaos", *words)
    assert asked.code in (10, 22) and sentence in asked.text() and "Traceback" not in asked.text()


def test_only_what_can_be_undone_is_done(shell: Shell) -> None:
    """A large disk is not filled, a clock nobody looks at does not jump, and a stranger's process is not touched."""
    shell.covey("run", "-n", "1", shell.default, shell.go)
    shell.heard(0, "rank=0")
    asked = shell.ask("chaos", "--faults", "disk,clock", "--for", "1s")
    assert asked.code == 10 and "none of the requested faults is possible on this host" in asked.text()
    assert "give the run a small file system" in asked.text() or "cannot be seen" in asked.text()
    assert "start the run with COVEY_FAULT_CLOCK=FILE" in asked.text()
    shell.release()
