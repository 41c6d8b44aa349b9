"""Preemption and loss of a host: its ranks continue on another host, and the final state is bitwise equal."""

from __future__ import annotations

import re
import signal

import pytest
from tests.processes.command import Shell
from tests.processes.harness import Process
from tests.processes.healing import LONG_S, final_hash, release, start, train_and_hash, wait_for_fault

pytestmark = pytest.mark.timeout(300)


def two_hosts(shell: Shell, **env: str) -> tuple[Process, Process]:
    """Start the training with rank 0 on the host of the scheduler, and the ranks 1 and 2 on another."""
    agents = []
    for host, local in ((0, 1), (1, 2)):
        arguments = ["-n", "3", "--local", str(local), "--master", f"127.0.0.1:{shell.port}"]
        agents.append(start(shell, *arguments, **{"COVEY_HOST_ID": f"host-{host}"} | env))
        shell.listening(shell.port)
    return agents[0], agents[1]


def test_sigterm_to_worker_hands_its_rank_over(shell: Shell, undisturbed: str) -> None:
    assert (
        train_and_hash(shell, "--max-restarts", "1", FAULTS="1:6:forward:leave 0:9:backward:leave 0:11:forward:leave")
        == undisturbed
    )
    output = shell.log("scheduler")
    assert len(re.findall(r"worker:\d handed over: asked to leave \(SIGTERM\), its step is finished", output)) == 3, output
    assert "died" not in output


def test_sigterm_to_host_hands_its_ranks_over(shell: Shell, undisturbed: str) -> None:
    fault = "0:6:forward:hold"
    stays, leaves = two_hosts(shell, FAULTS=fault)
    wait_for_fault(shell, fault)
    leaves.signal(signal.SIGTERM)
    shell.wait_for_log("scheduler", "leaving: the agent was asked to leave")
    release(shell, fault)
    assert leaves.wait(LONG_S) == 143, shell.tails()
    assert stays.wait(LONG_S) == 0, shell.tails()
    assert final_hash(shell) == undisturbed
    assert "died" not in shell.log("scheduler")


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.long
def test_host_that_leaves_with_the_scheduler_dumps(shell: Shell, undisturbed: str, hosts: int) -> None:
    fault = "0:6:forward:hold"
    runs = two_hosts(shell, FAULTS=fault) if hosts == 2 else (start(shell, FAULTS=fault),)
    wait_for_fault(shell, fault)
    runs[0].signal(signal.SIGTERM)
    shell.wait_for_log("scheduler", "cluster dump: the agent was asked to leave")
    release(shell, fault)
    assert [run.wait(LONG_S) for run in runs] == [143, 32][:hosts], shell.tails()
    assert re.search(r"step [67] is in \S+dump\S+", runs[0].text()), runs[0].text()
    assert "first failure" not in runs[0].text()
    shell.assert_no_processes()
    assert train_and_hash(shell) == undisturbed, "another run must resume from the dump"
    assert re.search("BEGINS at [67]", shell.log(0))


def test_lost_host_is_replaced_by_another(shell: Shell, undisturbed: str) -> None:
    fault = "2:6:backward:hold"
    stays, lost = two_hosts(shell, FAULTS=fault)
    wait_for_fault(shell, fault)
    lost.kill()
    assert stays.wait(LONG_S) == 0, shell.tails()
    assert final_hash(shell) == undisturbed
    assert len(re.findall(r"worker:[12] died: the agent on \S+ is gone", shell.log("scheduler"))) == 2


@pytest.mark.long
def test_host_takes_at_most_the_allowed_extra_ranks(shell: Shell) -> None:
    fault = "2:6:backward:hold"
    stays, lost = two_hosts(shell, FAULTS=fault, COVEY_EXTRA_RANKS="1")
    wait_for_fault(shell, fault)
    lost.kill()
    assert stays.wait(LONG_S) == 30, shell.tails()
    assert re.search(r"the agent on \S+ is gone", stays.text()), stays.text()
    assert re.search(r"no other host can run worker:\d \(COVEY_EXTRA_RANKS is 1\)", shell.log("scheduler"))
    assert re.search(r"step 6 is in \S+dump\S+", stays.text()), stays.text()
