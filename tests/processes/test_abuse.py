"""Abusive peers at real ports, and random bytes and messages: a bounded part of `make soak`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes.command import Shell
from tests.soak import abuse, fuzz


@pytest.mark.long
def test_scheduler_survives_abuse(shell: Shell) -> None:
    site = abuse.training(shell)
    abuse.everything(site, half_open=200, body=32 << 20, drops_s=1)
    assert [node.pid for node in shell.view(abuse.SECRET).nodes if node.pid == site.process.pid], "the process must be the same"


@pytest.mark.long
def test_federation_survives_abuse(shell: Shell) -> None:
    _, sites = abuse.federated(shell)
    for site in sites:
        abuse.everything(site, half_open=200, body=32 << 20, drops_s=1)


@pytest.mark.parametrize("name", fuzz.BYTES)
def test_random_bytes_are_accepted_or_refused_with_a_typed_error(name: str) -> None:
    fuzz.fuzz_bytes(name, seed=1, rounds=1000)


def test_text_that_is_not_utf8_is_refused_with_a_typed_error() -> None:
    broken = [seed.replace(b"life-0", b"life-\xfd") for seed in fuzz.corpus()]
    assert broken != fuzz.corpus()
    for data in broken:
        fuzz.try_frames(data)


def test_random_message_sequences_do_not_break_the_machine() -> None:
    done, lines = fuzz.fuzz_machine(seed=2, seconds=0, rounds=120)
    assert done == 120 and lines > 300


@pytest.mark.timeout(240)
def test_federated_scheduler_answers_match_its_openapi_document(shell: Shell, tmp_path: Path) -> None:
    """All requests in any order, while rounds are stopped, restarted and scaled."""
    federation, _ = abuse.federated(shell)
    document = f"http://127.0.0.1:{federation.manage}/openapi.json"
    bounds = "--max-examples 10 --seed 1 --generation-database none --no-color --phases examples,fuzzing"
    bounds += " --exclude-path /stop --exclude-path /stream"  # they end the cluster, or answer with an endless stream
    # The check for a positive response is left out: a valid request may be refused because of the cluster's state.
    checks = "--checks all --exclude-checks positive_data_acceptance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", document, *bounds.split(), *checks.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert federation.up.alive
