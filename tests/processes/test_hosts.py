"""Three hosts at one switch, over IPv4, IPv6 and both: isolated and slow hosts are detected correctly."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.processes import elastic
from tests.processes.command import Shell
from tests.processes.harness import Process
from tests.processes.healing import LONG_S, final_hash, release, start, wait_for_fault
from tests.processes.network import Hosts
from tests.requirements import HOSTS, needs

pytestmark = [pytest.mark.timeout(300), needs(*HOSTS)]
SILENCE_S = "3"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(f"h{uuid.uuid4().hex[:6]}", 3) as hosts:
        yield hosts


def words_of(shell: Shell, index: int, master: str, timeout: str) -> tuple[list[str], dict[str, str]]:
    """Options of `covey run` on a host with one of three workers and its own log directory."""
    (shell.folder / f"runtime-{index}").mkdir(exist_ok=True)
    arguments = ["-n", "3", "--local", "1", "--node-rank", str(index), "--master", f"{master}:{shell.port}"]
    arguments += ["--node-timeout", timeout, "--log-dir", str(shell.folder / f"host-{index}")]
    return arguments, {"XDG_RUNTIME_DIR": str(shell.folder / f"runtime-{index}"), "COVEY_SECRET": "between us"}


def trained(shell: Shell, hosts: Hosts, master: str, timeout: str = SILENCE_S, **env: str) -> list[Process]:
    """Start the training of `healing` with a rank on each host; the scheduler is on the first."""
    agents = []
    for index in range(3):
        arguments, own = words_of(shell, index, master, timeout)
        agents.append(start(shell, *arguments, before=hosts.on(index), **own | env))
    shell.logs = shell.folder / "host-0"
    return agents


def gathered(shell: Shell) -> None:
    """Copy every rank's log, from the host where the rank ended, to the directory of rank 0's."""
    for log in sorted(shell.folder.glob("host-[12]/worker_*.log")):
        if "HASH" in log.read_text():
            log.replace(shell.folder / "host-0" / log.name)


@pytest.mark.parametrize("family", ["IPv6", "both"])
@pytest.mark.long
def test_three_hosts_with_one_name_train_over_slow_and_lossy_network(
    shell: Shell, hosts: Hosts, undisturbed: str, family: str
) -> None:
    """A slow connection must not count as a dead host."""
    master = f"[{hosts.addresses6[0]}]" if family == "IPv6" else hosts.name
    held = "0:0:forward:hold"
    agents = trained(shell, hosts, master, FAULTS=held)
    wait_for_fault(shell, held)
    for index in (1, 2):
        hosts.slow(index, "20mbit", 30_000)
    release(shell, held)
    assert [agent.wait(LONG_S) for agent in agents] == [0, 0, 0], shell.tails()
    assert "died" not in shell.log("scheduler")
    assert all(hosts.dropped(index) for index in (1, 2))
    gathered(shell)
    assert final_hash(shell) == undisturbed


@pytest.mark.parametrize("what", ["block_outgoing", "block_incoming"])
@pytest.mark.long
def test_host_isolated_in_one_direction_is_replaced_and_fenced(shell: Shell, hosts: Hosts, undisturbed: str, what: str) -> None:
    late, after = "2:4:between:hold", "0:8:forward:hold"
    agents = trained(shell, hosts, hosts.addresses[0], FAULTS=f"{late} {after}")
    wait_for_fault(shell, late)
    getattr(hosts, what)(2)
    wait_for_fault(shell, after)
    release(shell, late)
    hosts.restore(2)
    assert agents[2].wait(LONG_S) == 21, agents[2].tail()
    release(shell, after)
    assert [agent.wait(LONG_S) for agent in agents[:2]] == [0, 0], shell.tails()
    gathered(shell)
    assert final_hash(shell) == undisturbed


@pytest.mark.long
def test_isolated_host_shrinks_world_and_joins_again(shell: Shell, hosts: Hosts) -> None:
    lost, small, whole = "2:3:forward:hold", "0:7:forward:hold", "0:9:forward:hold"
    env = {"FAULTS": f"{lost} {small} {whole}", "COVEY_STRATEGY": elastic.LADDER, "COVEY_SHRINK_AFTER": "0"}

    def joins(index: int) -> Process:
        arguments, own = words_of(shell, index, hosts.addresses[0], SILENCE_S)
        return elastic.start(shell, *arguments, before=hosts.on(index), **own | env)

    agents = [joins(index) for index in range(3)]
    shell.logs = shell.folder / "host-0"
    wait_for_fault(shell, lost)
    hosts.cut(2)
    shell.wait_for_log("scheduler", "the world size is now 2")
    wait_for_fault(shell, small)
    hosts.restore(2)  # its agent reconnects, receives that its worker's rank was reassigned, and registers as a new host
    shell.wait_for_log("scheduler", "the world grows from 2 to 3 workers")
    release(shell, small)
    wait_for_fault(shell, whole)
    release(shell, whole)
    assert [run.wait(LONG_S) for run in agents] == [0, 0, 0], shell.tails()
    assert [end["world"] for end in elastic.check(shell)] == [3, 3, 3]
