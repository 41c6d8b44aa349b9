"""Choice of faults: the last ranks with the state, and processes that died too often, are never hit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from covey import wall_clock
from covey.core.cluster import chaos_policy
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.incidents import Incident, Outcome
from covey.core.types import Phase, Role
from covey.runtime import chaos_faults


def worker(rank: int, **more: object) -> NodeView:
    known: dict[str, object] = {"step": 5, "pid": 100 + rank, "incarnation": 1, "alive": True, "state": "alive"} | more
    return NodeView(Role.WORKER, str(rank), rank, "h", "127.0.0.1", **known)  # type: ignore[arg-type]


def view(*nodes: NodeView, phase: Phase = Phase.READY) -> ClusterView:
    scheduler = NodeView(Role.SCHEDULER, "sched", 0, "h", "127.0.0.1", "alive", True, pid=99)
    return ClusterView("c", phase, "", 1, len(nodes), 0, 0.0, 0.0, [scheduler, *nodes])


FOUR = view(*map(worker, range(4)))


def test_same_seed_gives_same_faults_and_other_seed_does_not() -> None:
    def event_log_of(seed: int) -> list[chaos_policy.PlannedFault]:
        done: list[chaos_policy.PlannedFault] = []
        for number in range(40):
            strike, _ = chaos_policy.choose_fault(seed, list(chaos_policy.Fault), FOUR, done, 10.0 * number)
            assert strike is not None
            done.append(strike)
        return done

    assert event_log_of(7) == event_log_of(7) != event_log_of(8)
    assert {strike.fault for strike in event_log_of(7)} == set(chaos_policy.Fault)
    assert chaos_policy.clock_jump_s(7, 1) == chaos_policy.clock_jump_s(7, 1) != chaos_policy.clock_jump_s(7, 2)
    assert all(1.5 <= chaos_policy.pause_s(7, number, 3.0) <= 4.5 for number in range(50))


def killed_nodes(cluster: ClusterView, done: list[chaos_policy.PlannedFault]) -> set[str]:
    """Return the nodes that KILL hits with any of 60 seeds."""
    faults = (chaos_policy.choose_fault(seed, [chaos_policy.Fault.KILL], cluster, done, 0.1)[0] for seed in range(60))
    return {fault.node for fault in faults if fault is not None}


def test_hit_rank_is_spared_until_replacement_has_state() -> None:
    done = [chaos_policy.PlannedFault(1, 0.0, chaos_policy.Fault.KILL, "worker:2", 102, 1)]
    for number in range(2, 30):  # the view does not know of the death yet
        strike, _ = chaos_policy.choose_fault(number, [chaos_policy.Fault.KILL], FOUR, done, 0.1)
        assert strike is not None and strike.node != "worker:2"
    fresh = view(worker(0), worker(1), worker(2, incarnation=2, pid=202, step=-1), worker(3))
    assert killed_nodes(fresh, done) == {"worker:0", "worker:1", "worker:3"}
    back = view(worker(0), worker(1), worker(2, incarnation=2, pid=202), worker(3))
    assert "worker:2" in killed_nodes(back, done)


@pytest.mark.parametrize("world", range(1, 7))
def test_deadly_faults_spare_half_of_ranks_with_state_and_at_least_one(world: int) -> None:
    seen = view(*map(worker, range(world)))
    done: list[chaos_policy.PlannedFault] = []
    while (
        strike := chaos_policy.choose_fault(1, [chaos_policy.Fault.KILL, chaos_policy.Fault.STOP], seen, done, 1.0)[0]
    ) is not None:
        done.append(strike)
    assert len(done) == world - max(1, world // 2)
    assert (
        chaos_policy.choose_fault(1, [chaos_policy.Fault.SLOW], seen, done, 1.0)[0] is not None
        or world == 1
        or len(done) == world
    )


def test_resumed_node_can_be_hit_again() -> None:
    done = [
        chaos_policy.PlannedFault(1, 0.0, chaos_policy.Fault.STOP, "worker:0", 100, 1, 2.0),
        chaos_policy.PlannedFault(2, 0.0, chaos_policy.Fault.STOP, "worker:1", 101, 1, 2.0),
    ]
    assert chaos_policy.choose_fault(1, [chaos_policy.Fault.KILL], FOUR, done, 2.5)[0] is None
    assert chaos_policy.choose_fault(1, [chaos_policy.Fault.KILL], FOUR, done, 3.5)[0] is not None


def test_scheduler_and_template_faults_keep_minimum_interval() -> None:
    done = [chaos_policy.PlannedFault(1, 0.0, chaos_policy.Fault.SCHEDULER, "scheduler:sched", 99)]
    assert chaos_policy.choose_fault(1, [chaos_policy.Fault.SCHEDULER], FOUR, done, 60.0) == (
        None,
        "no fault can be injected now without losing the last ranks that hold the training state",
    )
    assert chaos_policy.choose_fault(1, [chaos_policy.Fault.SCHEDULER], FOUR, done, 62.0)[0] is not None
    assert (
        chaos_policy.choose_fault(
            1, [chaos_policy.Fault.TEMPLATE], FOUR, [chaos_policy.PlannedFault(1, 0.0, chaos_policy.Fault.TEMPLATE)], 30.0
        )[0]
        is None
    )


def test_servers_are_hit_one_at_a_time_while_ready() -> None:
    servers = [NodeView(Role.SERVER, str(n), n, "h", "127.0.0.1", "alive", True, pid=10 + n) for n in range(2)]
    assert chaos_policy.choose_fault(1, [chaos_policy.Fault.KILL], view(*servers), [], 0.0)[0] is not None
    assert chaos_policy.choose_fault(1, [chaos_policy.Fault.KILL], view(*servers, phase=Phase.HEALING), [], 0.0)[0] is None
    assert chaos_policy.choose_fault(1, [chaos_policy.Fault.KILL], view(servers[0]), [], 0.0)[0] is None


def test_recovery_is_attributed_to_causing_fault() -> None:
    def incident(number: int, node: str, total: float, outcome: Outcome = Outcome.RESUMED) -> Incident:
        return Incident(number, 0.0, node, 0, "", "recover-in-place", "", outcome, total_ms=total)

    done = [
        chaos_policy.PlannedFault(1, 0.0, chaos_policy.Fault.KILL, "worker:1", 101, 1),
        chaos_policy.PlannedFault(2, 1.0, chaos_policy.Fault.SLOW, "worker:2", 102, 1),
        chaos_policy.PlannedFault(3, 2.0, chaos_policy.Fault.KILL, "worker:3", 103, 1),
        chaos_policy.PlannedFault(4, 3.0, chaos_policy.Fault.SCHEDULER, "scheduler:sched", 99),
    ]
    seen = [
        chaos_policy.ObservedRecovery(incident(1, "worker:1", 100.0), 0.1),
        chaos_policy.ObservedRecovery(incident(2, "worker:3", 300.0, Outcome.OPEN), 3.1),
    ]
    rows = {row.fault: row for row in chaos_policy.summarize_faults(done, seen, {4: 900.0})}
    assert (rows[chaos_policy.Fault.KILL].times, rows[chaos_policy.Fault.KILL].unnoticed) == (2, 0)
    assert rows[chaos_policy.Fault.KILL].rungs == {"recover-in-place": 1, "recover-in-place (open)": 1}
    assert (rows[chaos_policy.Fault.KILL].median_ms, rows[chaos_policy.Fault.KILL].worst_ms) == (200.0, 300.0)
    assert (rows[chaos_policy.Fault.SLOW].rungs, rows[chaos_policy.Fault.SLOW].unnoticed) == ({}, 1)
    assert (
        rows[chaos_policy.Fault.SCHEDULER].rungs == {"started again": 1}
        and rows[chaos_policy.Fault.SCHEDULER].worst_ms == 900.0
    )


def test_process_outside_any_run_is_not_touched() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for harm in (chaos_faults.kill_process, chaos_faults.cut_connections):
            with pytest.raises(chaos_faults.ProcessGone, match="not a child of a covey run"):
                harm(stranger.pid, [psutil.Process()])
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


KEEPS = """
import subprocess
with subprocess.Popen(["sleep", "600"]) as child:
    print(child.pid, flush=True)
"""


def test_a_process_of_another_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "covey").write_text(KEEPS)
    command = [sys.executable, str(tmp_path / "covey"), "run"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(2)]
    try:
        pids = [int(run.stdout.readline()) for run in runs if run.stdout]
        with pytest.raises(chaos_faults.ProcessGone, match="belongs to another run"):
            chaos_faults.kill_process(pids[1], [psutil.Process(runs[0].pid)])
        assert psutil.Process(pids[1]).status() != psutil.STATUS_ZOMBIE
        chaos_faults.kill_process(pids[0], [psutil.Process(runs[0].pid)])
        assert runs[0].wait(60) == 0, "it ends with its child"
    finally:
        for run in runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.communicate()


def test_wall_clock_can_be_shifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock"
    monkeypatch.setenv("COVEY_FAULT_CLOCK", str(file))
    with chaos_faults.shift_clock(file, 3000.0):
        assert wall_clock.wall_time() - time.time() > 2000
    assert abs(wall_clock.wall_time() - time.time()) < 1000
