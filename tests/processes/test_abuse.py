"""Rude peers at real ports, and bytes and messages nobody of ours would send: a bounded part of what `make soak` does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Shell, shells
from tests.soak import abuse, fuzz


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


@pytest.mark.long
def test_a_scheduler_under_abuse(shell: Shell) -> None:
    site = abuse.training(shell)
    abuse.everything(site, half_open=200, body=32 << 20, drops_s=1)
    assert [node.pid for node in shell.view(abuse.SECRET).nodes if node.pid == site.process.pid], "it is the same process"


@pytest.mark.long
def test_a_federation_under_abuse(shell: Shell) -> None:
    _, sites = abuse.federated(shell)
    for site in sites:
        abuse.everything(site, half_open=200, body=32 << 20, drops_s=1)


@pytest.mark.parametrize("name", fuzz.BYTES)
def test_bytes_are_taken_or_refused(name: str) -> None:
    fuzz.fuzz_bytes(name, seed=1, rounds=1000)


def test_text_that_is_no_text_is_refused_by_its_type() -> None:
    broken = [seed.replace(b"life-0", b"life-\xfd") for seed in fuzz.corpus()]
    assert broken != fuzz.corpus()
    for data in broken:
        fuzz.try_frames(data)


def test_messages_at_the_machine_break_nothing() -> None:
    done, lines = fuzz.fuzz_machine(seed=2, seconds=0, rounds=120)
    assert done == 120 and lines > 300


@pytest.mark.timeout(240)
def test_every_answer_of_a_federated_scheduler_is_as_documented(shell: Shell, tmp_path: Path) -> None:
    """Whatever is asked, in whatever order: rounds are stopped, begun anew and scaled meanwhile."""
    federation, _ = abuse.federated(shell)
    document = f"http://127.0.0.1:{federation.manage}/openapi.json"
    bounds = "--max-examples 10 --seed 1 --generation-database none --no-color --phases examples,fuzzing"
    bounds += " --exclude-path /stop --exclude-path /stream"  # the end of all, and an answer that goes on
    # Whether a wish that is well spelled can be fulfilled is for the cluster's state to say: that check is left out.
    checks = "--checks all --exclude-checks positive_data_acceptance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", document, *bounds.split(), *checks.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert federation.up.alive
