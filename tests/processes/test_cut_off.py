"""An isolated host: its rank continues on another host, and its old processes exit when the network returns."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.processes.command import Shell
from tests.processes.harness import Process
from tests.processes.healing import LONG_S, final_hash, release, start, wait_for_fault
from tests.processes.network import Hosts
from tests.requirements import HOSTS, needs

pytestmark = [pytest.mark.timeout(300), needs(*HOSTS)]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(f"cut{uuid.uuid4().hex[:6]}") as hosts:
        yield hosts


def two_hosts(shell: Shell, hosts: Hosts, node_timeout: str, **env: str) -> list[Process]:
    """Start the training with the scheduler and two ranks on one host, rank 2 on the other, and a log directory per host."""
    agents = []
    for host, local in ((0, "2"), (1, "1")):
        (shell.folder / f"runtime-{host}").mkdir()
        own = {"XDG_RUNTIME_DIR": str(shell.folder / f"runtime-{host}"), "COVEY_SECRET": "between us"}
        arguments = [
            "-n",
            "3",
            "--local",
            local,
            "--master",
            f"{hosts.addresses[0]}:{shell.port}",
            "--node-timeout",
            node_timeout,
        ]
        arguments += ["--log-dir", str(shell.folder / f"host-{host}")]
        agents.append(start(shell, *arguments, before=hosts.on(host), **own | env))
    shell.logs = shell.folder / "host-0"
    return agents


def test_isolated_host_is_fenced_when_it_returns(shell: Shell, hosts: Hosts, undisturbed: str) -> None:
    """Rank 2 is about to write its checkpoint of step 5 when its host is isolated, and writes it after its rank was
    reassigned."""
    late, later = "2:4:between:hold", "0:8:forward:hold"
    agents = two_hosts(shell, hosts, "2", FAULTS=f"{late} {later}")
    wait_for_fault(shell, late)
    hosts.cut()
    wait_for_fault(shell, later)  # executed by the replacement of rank 2
    release(shell, late)
    shell.logs = shell.folder / "host-1"
    shell.wait_for_log(2, "the checkpoint is delayed")
    hosts.restore()
    assert agents[1].wait(LONG_S) == 21, shell.tails()
    checkpoints = shell.folder / "marks" / "ckpt"
    assert (checkpoints / "0" / "train-5.json").exists() and not (checkpoints / "2" / "train-5.json").exists()
    shell.logs = shell.folder / "host-0"
    release(shell, later)
    assert agents[0].wait(LONG_S) == 0, shell.tails()
    assert final_hash(shell) == undisturbed


@pytest.mark.long
def test_short_network_outage_causes_no_recovery(shell: Shell, hosts: Hosts, undisturbed: str) -> None:
    agents = two_hosts(shell, hosts, "10", FAULTS="2:4:between:hold")
    wait_for_fault(shell, "2:4:between")
    hosts.cut()
    release(shell, "2:4:between")
    shell.wait_for_log("scheduler", "worker:2 suspect: no heartbeat")
    hosts.restore()
    assert [agent.wait(LONG_S) for agent in agents] == [0, 0], shell.tails()
    assert "died" not in shell.log("scheduler") and "retry" not in shell.log("scheduler")
    (shell.folder / "host-1" / "worker_2.log").rename(shell.folder / "host-0" / "worker_2.log")
    assert final_hash(shell) == undisturbed
