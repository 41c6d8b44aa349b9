"""`covey chaos`: injects faults into a running cluster on this host and summarizes the recoveries.

`core/cluster/chaos_policy.py` chooses each fault from a seed and the state of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec
import psutil

from covey.cli import status
from covey.cli.scheduler_session import SchedulerSession
from covey.core.cluster.chaos_policy import (
    NODE_FAULTS,
    Fault,
    FaultSummary,
    ObservedRecovery,
    PlannedFault,
    choose_fault,
    clock_jump_s,
    pause_s,
    summarize_faults,
)
from covey.core.cluster.view import ClusterView
from covey.core.incidents import Incident, Outcome
from covey.core.types import Phase, Role
from covey.errors import ExitCode, PeerError, UsageError
from covey.runtime import chaos_faults
from covey.runtime.node_runtime import SchedulerAddress
from covey.storage.running_clusters import process_start_time

POLL_INTERVAL_S: Final = 0.05  # between two checks of the cluster, and between two connection attempts
RESTART_TIMEOUT_S: Final = 120.0  # for a killed scheduler or template to be restarted
RECOVERY_TIMEOUT_S: Final = 120.0  # after the last fault, for all recoveries to close
FAULTS_MAX: Final = 100_000  # limit without --times
QUOTED_TEXT_MAX: Final = 80  # characters of a duration or rate in an error message
_SECONDS_PER_UNIT: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


class ChaosSummary(msgspec.Struct, frozen=True):
    """Summary of `covey chaos`, which `--json` prints."""

    cluster_id: str
    seed: int
    seconds: float  # duration of the command
    strikes: int  # number of faults
    phase: Phase  # of the cluster at the end
    reason: str  # of the phase
    rows: list[FaultSummary]  # one for each kind of fault that occurred
    story: list[PlannedFault]  # all faults, also those whose process had exited
    recoveries: list[Incident]  # all that views showed, also the newest ones from before the command


def parse_duration_s(text: str) -> float:
    """Return the seconds of a text such as `10m`, `1.5h`, `500ms` or `90`. Raise UsageError for any other text, and for 0."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"{text[:QUOTED_TEXT_MAX]!r} is not a duration: expected a value such as 90s, 10m or 500ms")
    return float(found[1]) * _SECONDS_PER_UNIT[found[2]]


def parse_fault_interval_s(text: str) -> float:
    """Return the mean seconds between two faults for a rate such as `1/3s` or `20/m`. Raise UsageError if it is invalid."""
    found = re.fullmatch(r"([0-9]{1,9})/(.+)", text.strip())
    if found is None or not int(found[1]):
        raise UsageError(f"--rate {text[:QUOTED_TEXT_MAX]!r} is invalid: expected a rate such as 1/3s, 20/m or 2/s")
    period = found[2]
    return parse_duration_s(period if period[:1].isdigit() else f"1{period}") / int(found[1])


def parse_faults(text: str) -> list[Fault]:
    """Return the faults of a list such as `kill,stop`, without duplicates. Raise UsageError if one is unknown or none given."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [word for word in words if word not in set(Fault)]
    if unknown or not words:
        raise UsageError(f"--faults {text!r} is invalid: expected one or more of {', '.join(Fault)}")
    return [Fault(word) for word in words]


class Chaos:
    """Injector of faults into one cluster."""

    def __init__(self, scheduler: SchedulerAddress, seed: int, interval_s: float, requested: Sequence[Fault]) -> None:
        self._scheduler_address, self._seed, self._interval_s, self._requested_faults = scheduler, seed, interval_s, requested
        self._view: ClusterView | None = None
        self._started_at = 0.0
        self._cluster_ended = asyncio.Event()
        self._recoveries: dict[int, ObservedRecovery] = {}
        self._injected_faults: list[PlannedFault] = []
        self._downtime_ms: dict[int, float] = {}
        self._clock_file: Path | None = None
        self._run_processes: list[psutil.Process] = []
        self._possible_faults: list[Fault] = []

    async def run(self, for_s: float, times: int) -> ChaosSummary:
        """Inject faults for at most `for_s` seconds, at most `times` faults (0: `FAULTS_MAX`), and return the summary.

        Before the return, wait until faults are undone, and at most `RECOVERY_TIMEOUT_S` until recoveries are closed. If this
        call is cancelled, active faults are undone. Raise PeerError if the scheduler is unreachable, and UsageError if it
        refuses or no requested fault is possible on this host.
        """
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        async with SchedulerSession(self._scheduler_address) as session:
            self._view = await anext(session.follow_views())
        self._run_processes = _find_run_processes(self._view)
        self._possible_faults = self._select_possible_faults(self._view)
        follower = asyncio.create_task(self._follow_view())
        effects: set[asyncio.Task[None]] = set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(for_s):
                    await self._inject_faults(effects, times)
            await asyncio.gather(*effects)
            await self._wait_for_recoveries()
        finally:
            for task in (follower, *effects):
                task.cancel()
            await asyncio.gather(follower, *effects, return_exceptions=True)
        view = self._view
        assert view is not None
        rows = summarize_faults(self._injected_faults, list(self._recoveries.values()), self._downtime_ms)
        recoveries = [seen.incident for seen in self._recoveries.values()]
        took = loop.time() - self._started_at
        known = (view.phase, view.reason, rows, self._injected_faults, recoveries)
        return ChaosSummary(view.cluster_id, self._seed, took, len(self._injected_faults), *known)

    def _select_possible_faults(self, view: ClusterView) -> list[Fault]:
        reasons = {fault: self._fault_blocker(fault, view) for fault in self._requested_faults}
        for fault, reason in reasons.items():
            if reason:
                click.echo(f"covey: fault {fault} is omitted: {reason}", err=True)
        possible = [fault for fault, reason in reasons.items() if not reason]
        if not possible:
            raise UsageError("none of the requested faults is possible on this host")
        return possible

    def _fault_blocker(self, fault: Fault, view: ClusterView) -> str:
        """Return why the fault is not possible on this host; "" if it is. For `Fault.CLOCK`, also set `_clock_file`."""
        scheduler = next(node.pid for node in view.nodes if node.role is Role.SCHEDULER)
        here = [node.pid for node in _view_of_this_host(view).nodes if node.role is not Role.SCHEDULER and node.pid]
        try:
            if fault in NODE_FAULTS and not here:
                return "no node of this cluster runs on this host"
            for pid in {Fault.SCHEDULER: [scheduler], Fault.TEMPLATE: here[:1]}.get(fault, here[:1]):
                chaos_faults.find_supervisor(pid)
            if fault is Fault.CUT:
                return chaos_faults.cut_blocker(here[0], self._run_processes)
            if fault is Fault.DISK:
                return (
                    chaos_faults.fill_disk_blocker(Path(view.log_dir))
                    if view.log_dir
                    else "the cluster reports no log directory"
                )
            if fault is Fault.CLOCK:
                self._clock_file = chaos_faults.find_clock_file(scheduler)
            if fault is Fault.TEMPLATE and not (here and chaos_faults.find_template_pid(chaos_faults.find_supervisor(here[0]))):
                return "this run has no template"
        except (chaos_faults.ProcessGone, UsageError) as error:
            return str(error)
        return ""

    async def _follow_view(self) -> None:
        """Store each view and its recoveries until the cluster ends. Reconnect if the connection to the scheduler is lost."""
        loop = asyncio.get_running_loop()
        while not self._cluster_ended.is_set():
            with contextlib.suppress(PeerError):
                async with SchedulerSession(self._scheduler_address) as session:
                    async for view in session.follow_views():
                        self._view = view
                        for incident in view.recoveries:
                            known = self._recoveries.get(incident.number)
                            at_s = known.at_s if known else loop.time() - self._started_at
                            self._recoveries[incident.number] = ObservedRecovery(incident, at_s)
                        if view.phase is Phase.ENDED:
                            self._cluster_ended.set()
            await asyncio.sleep(POLL_INTERVAL_S)
            running = (process_start_time(process.pid) == process.create_time() for process in self._run_processes)
            if not any(running):  # then no process restarts the scheduler
                self._cluster_ended.set()

    async def _inject_faults(self, effects: set[asyncio.Task[None]], times: int) -> None:
        loop = asyncio.get_running_loop()
        number = 1
        due = loop.time()
        while not self._cluster_ended.is_set() and number <= (times or FAULTS_MAX):
            due += pause_s(self._seed, number, self._interval_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cluster_ended.wait(), max(0.0, due - loop.time()))
            planned = None
            while planned is None and not self._cluster_ended.is_set():
                assert self._view is not None
                planned, _ = choose_fault(
                    self._seed,
                    self._possible_faults,
                    _view_of_this_host(self._view),
                    self._injected_faults,
                    loop.time() - self._started_at,
                )
                if planned is None:
                    await asyncio.sleep(POLL_INTERVAL_S)
            if planned is None:
                return
            self._injected_faults.append(planned)
            effect = asyncio.create_task(self._inject_fault(planned))
            effects.add(effect)
            effect.add_done_callback(effects.discard)
            number += 1

    async def _inject_fault(self, planned: PlannedFault) -> None:
        words = " ".join([str(planned.fault), planned.node, f"for {planned.for_s:.1f} s" if planned.for_s else ""])
        click.echo(f"covey: {planned.at_s:6.1f} s  {' '.join(words.split())}", err=True)
        with contextlib.suppress(chaos_faults.ProcessGone):
            if planned.fault is Fault.KILL:
                chaos_faults.kill_process(planned.pid, self._run_processes)
            elif planned.fault is Fault.STOP:
                await chaos_faults.suspend_process(planned.pid, self._run_processes, planned.for_s)
            elif planned.fault is Fault.SLOW:
                await chaos_faults.slow_process(planned.pid, self._run_processes, planned.for_s)
            elif planned.fault is Fault.CUT:
                chaos_faults.cut_connections(planned.pid, self._run_processes)
            elif planned.fault is Fault.SCHEDULER:
                chaos_faults.kill_process(planned.pid, self._run_processes)
                await self._measure_downtime(planned, lambda: self._scheduler_pid() not in (0, planned.pid))
            elif planned.fault is Fault.TEMPLATE:
                killed = chaos_faults.find_template_pid(self._run_processes[0])
                if killed:
                    chaos_faults.kill_process(killed, self._run_processes)
                    await self._measure_downtime(
                        planned, lambda: chaos_faults.find_template_pid(self._run_processes[0]) not in (0, killed)
                    )
            elif planned.fault is Fault.DISK:
                assert self._view is not None
                with chaos_faults.fill_disk(Path(self._view.log_dir)):
                    await asyncio.sleep(planned.for_s)
            else:
                assert planned.fault is Fault.CLOCK and self._clock_file is not None
                with chaos_faults.shift_clock(self._clock_file, clock_jump_s(self._seed, planned.number)):
                    await asyncio.sleep(planned.for_s)

    def _scheduler_pid(self) -> int:
        assert self._view is not None
        return next((node.pid for node in self._view.nodes if node.role is Role.SCHEDULER), 0)

    async def _measure_downtime(self, planned: PlannedFault, is_back: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if await self._wait_until(is_back, RESTART_TIMEOUT_S):
            self._downtime_ms[planned.number] = 1000 * (loop.time() - began)

    async def _wait_for_recoveries(self) -> None:
        def settled() -> bool:
            open_ = any(seen.incident.outcome is Outcome.OPEN for seen in self._recoveries.values())
            return self._view is not None and self._view.phase is Phase.READY and not open_

        await self._wait_until(settled, RECOVERY_TIMEOUT_S)

    async def _wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        for _ in range(int(limit_s / POLL_INTERVAL_S)):
            if condition() or self._cluster_ended.is_set():
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        return condition()


def _view_of_this_host(view: ClusterView) -> ClusterView:
    return msgspec.structs.replace(view, nodes=[node for node in view.nodes if node.host == socket.gethostname()])


def _find_run_processes(view: ClusterView) -> list[psutil.Process]:
    """Return the `covey run` and `covey federated up` processes of this user whose children are nodes of this cluster."""
    found: dict[psutil.Process, None] = {}
    for node in _view_of_this_host(view).nodes:
        with contextlib.suppress(chaos_faults.ProcessGone):
            found[chaos_faults.find_supervisor(node.pid)] = None
    if not found:
        raise UsageError(f"no process of the cluster at {view.address} was started by covey run of this user on this host")
    return list(found)


def run_chaos(master: str, *, seed: int, rate: str, wanted: str, length: str, times: int, as_json: bool) -> int:
    """Inject faults, print the summary and return the exit code.

    The code is PEER_FAILED if the cluster is still HEALING or a recovery has the outcome ENDED, else 0. After SIGTERM or SIGHUP
    it is 128 + SIGTERM, without a summary. Raise UsageError for an invalid option, and the errors of `find_cluster` and
    `Chaos.run`.
    """
    interval_s, for_s, faults = parse_fault_interval_s(rate), parse_duration_s(length), parse_faults(wanted)
    try:
        summary = asyncio.run(_run_with_signals(status.find_cluster(master), seed, interval_s, faults, for_s, times))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    if as_json:
        click.echo(msgspec.json.encode(summary).decode())
    else:
        _print_summary(summary)
    failed = summary.phase is Phase.HEALING or any(incident.outcome is Outcome.ENDED for incident in summary.recoveries)
    return int(ExitCode.PEER_FAILED) if failed else 0


async def _run_with_signals(
    scheduler: SchedulerAddress, seed: int, interval_s: float, faults: Sequence[Fault], for_s: float, times: int
) -> ChaosSummary:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # active faults are undone, as after Ctrl-C
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await Chaos(scheduler, seed, interval_s, faults).run(for_s, times)


def _print_summary(summary: ChaosSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("fault", "times", "strategies", "unnoticed", "median ms", "worst ms"):
        table.add_column(name, justify="left" if name in ("fault", "strategies") else "right")
    for row in summary.rows:
        strategies = ", ".join(f"{count} {strategy}" for strategy, count in sorted(row.rungs.items())) or "-"
        times = (f"{row.median_ms:.0f}", f"{row.worst_ms:.0f}") if row.rungs else ("-", "-")
        table.add_row(str(row.fault), str(row.times), strategies, str(row.unnoticed), *times)
    console = Console()
    console.print(table)
    length = f"{summary.strikes} faults in {summary.seconds:.0f} s with seed {summary.seed}"
    console.print(f"{length}; {summary.cluster_id} is {summary.phase}: {summary.reason}", highlight=False, soft_wrap=True)
