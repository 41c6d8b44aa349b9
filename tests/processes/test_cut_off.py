"""A host whose cable is pulled: its rank goes on elsewhere, and when the cable is back its old processes end themselves."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.command import Hosts, Shell, hosts_possible, shells
from tests.processes.healing import LONG_S, outcome, reached, release, start

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hosts_possible(), reason="network namespaces need root"),
]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield from shells(tmp_path)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(f"cut{uuid.uuid4().hex[:6]}") as hosts:
        yield hosts


def test_a_host_that_was_cut_off_and_comes_back_is_fenced(shell: Shell, hosts: Hosts, undisturbed: str) -> None:
    """Rank 2 is about to write its checkpoint of step 5 when its host is cut off, and gets to it when its place was taken."""
    late, later = "2:4:between:hold", "0:8:forward:hold"
    agents = []
    for host, local in ((0, "2"), (1, "1")):
        (shell.folder / f"runtime-{host}").mkdir()
        env = {"XDG_RUNTIME_DIR": str(shell.folder / f"runtime-{host}"), "COVEY_SECRET": "between us"}
        words = ["-n", "3", "--local", local, "--master", f"{hosts.addresses[0]}:{shell.port}", "--node-timeout", "2"]
        words += ["--log-dir", str(shell.folder / f"host-{host}")]
        agents.append(start(shell, *words, before=hosts.on(host), FAULTS=f"{late} {later}", **env))
    shell.logs = shell.folder / "host-0"
    reached(shell, late)
    hosts.cut()
    reached(shell, later)  # with another process in the place of rank 2
    release(shell, late)
    shell.logs = shell.folder / "host-1"
    shell.heard(2, "the checkpoint waits")
    hosts.mend()
    assert agents[1].wait(LONG_S) == 21, shell.tails()
    checkpoints = shell.folder / "marks" / "ckpt"
    assert (checkpoints / "0" / "train-5.json").exists() and not (checkpoints / "2" / "train-5.json").exists()
    shell.logs = shell.folder / "host-0"
    release(shell, later)
    assert agents[0].wait(LONG_S) == 0, shell.tails()
    assert outcome(shell) == undisturbed
