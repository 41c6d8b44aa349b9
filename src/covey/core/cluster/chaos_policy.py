"""Choice of the faults that `covey chaos` injects, and a summary of the recoveries that followed.

A worker is killed or stopped only if at least one other worker, and at least half of the number of workers (rounded down), are
assumed to keep the training state.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

import msgspec

from covey.core.cluster.view import ClusterView, NodeView
from covey.core.incidents import Incident
from covey.core.types import NodeState, Phase, Role


class Fault(StrEnum):
    """Kinds of faults, as a user types them."""

    KILL = "kill"  # SIGKILL to a node: a worker or a server
    STOP = "stop"  # a node is suspended for some time
    SLOW = "slow"  # a node gets only a part of its CPU time for some time
    CUT = "cut"  # the TCP connections of a node break
    DISK = "disk"  # the file system of the log directory is full for some time
    CLOCK = "clock"  # the run's wall clock jumps, and later back
    SCHEDULER = "scheduler"  # SIGKILL to the scheduler
    TEMPLATE = "template"  # SIGKILL to the template from which workers are forked


DURATION_RANGE_S: Mapping[Fault, tuple[float, float]] = {  # minimum and maximum; other faults have no duration
    Fault.STOP: (0.2, 8.0),
    Fault.SLOW: (1.0, 3.0),
    Fault.DISK: (0.5, 2.0),
    Fault.CLOCK: (0.5, 2.0),
}
# Seconds between two faults of this kind. A process that dies sooner after its start is restarted only a few times.
MIN_INTERVAL_S: Mapping[Fault, float] = {
    Fault.SCHEDULER: 61.0,
    Fault.TEMPLATE: 31.0,
}
NODE_FAULTS = (Fault.KILL, Fault.STOP, Fault.SLOW, Fault.CUT)
DEADLY_FAULTS = (Fault.KILL, Fault.STOP)  # after these the node may have to be replaced
AFTERMATH_S = 1.0  # seconds until the view shows that a suspended node runs again


class PlannedFault(msgspec.Struct, frozen=True):
    """One fault that `choose_fault` chose."""

    number: int  # from 1
    at_s: float  # seconds since the start of `covey chaos`
    fault: Fault
    node: str = ""  # "worker:2"; "" if the fault does not concern one node
    pid: int = 0  # of the node's process; 0 without a node
    incarnation: int = 0  # of the node; 0 without a node
    for_s: float = 0.0  # duration in seconds; 0: none


class ObservedRecovery(msgspec.Struct, frozen=True):
    """A recovery or resize, and when `covey chaos` first saw it."""

    incident: Incident  # in its newest version
    at_s: float  # seconds since the start of `covey chaos`


class FaultSummary(msgspec.Struct, frozen=True):
    """Recoveries after one kind of fault.

    The keys of `rungs` are strategies, with the outcome unless it is "resumed", and "started again" for a scheduler or template
    that was killed; the values count them.
    """

    fault: Fault
    times: int  # number of faults
    rungs: dict[str, int]
    unnoticed: int  # faults without a recovery or restart
    median_ms: float = 0.0  # of the closed recoveries and the restarts; 0 if there was none
    worst_ms: float = 0.0  # as `median_ms`, the longest


def pause_s(seed: int, number: int, every_s: float) -> float:
    """Return the seconds to wait before fault `number`: 0.5 to 1.5 times `every_s`."""
    return every_s * (0.5 + _draw_uniform(seed, number, "pause"))


def choose_fault(
    seed: int, faults: Sequence[Fault], view: ClusterView, done: Sequence[PlannedFault], at_s: float
) -> tuple[PlannedFault | None, str]:
    """Return the next fault and its description; or None and the reason if no fault can be injected now.

    `done` has the faults so far, oldest first, and `at_s` is the time since the start of `covey chaos`.
    """
    number = len(done) + 1
    possible = [fault for fault in faults if not _is_too_soon(fault, done, at_s)]
    hit = {
        (s.node, s.incarnation, s.pid)
        for s in done
        if s.fault is Fault.KILL or (s.fault is Fault.STOP and not _has_ended(s, at_s))
    }
    targets = {fault: _list_targets(fault, view, hit) for fault in possible}
    possible = [fault for fault in possible if targets[fault] or fault not in (*NODE_FAULTS, Fault.SCHEDULER)]
    if not possible:
        return None, "no fault can be injected now without losing the last ranks that hold the training state"
    fault = possible[int(_draw_uniform(seed, number, "fault") * len(possible))]
    low, high = DURATION_RANGE_S.get(fault, (0.0, 0.0))
    for_s = low + (high - low) * _draw_uniform(seed, number, "lasts")
    if fault not in (*NODE_FAULTS, Fault.SCHEDULER):
        return PlannedFault(number, at_s, fault, for_s=for_s), f"{fault}"
    target = targets[fault][int(_draw_uniform(seed, number, "victim") * len(targets[fault]))]
    return PlannedFault(number, at_s, fault, target.name, target.pid, target.incarnation, for_s), f"{fault} {target.name}"


def clock_jump_s(seed: int, number: int) -> float:
    """Return the seconds by which the clock jumps: up to an hour in either direction."""
    return 3600 * (2 * _draw_uniform(seed, number, "jump") - 1)


def summarize_faults(
    done: Sequence[PlannedFault], seen: Sequence[ObservedRecovery], back_ms: Mapping[int, float]
) -> list[FaultSummary]:
    """Return one summary for each kind of fault that was injected, in the order of `Fault`.

    A recovery belongs to the newest earlier fault at its node, or to the newest earlier fault of all if its node had none. A
    recovery before the first fault is left out. `back_ms` has, by number of fault, the milliseconds until a killed scheduler or
    template ran again.
    """
    owner = {found.incident.number: _find_causing_fault(found, done) for found in seen}
    rows = []
    for fault in Fault:
        mine = [planned for planned in done if planned.fault is fault]
        if not mine:
            continue
        numbers = {planned.number for planned in mine}
        incidents = [found.incident for found in seen if owner[found.incident.number] in numbers]
        rungs = Counter(_describe_strategy(incident) for incident in incidents)
        back = [back_ms[number] for number in numbers if number in back_ms]
        if back:
            rungs["started again"] += len(back)
        times = [incident.total_ms for incident in incidents if incident.total_ms] + back
        answered = {owner[incident.number] for incident in incidents} | (numbers & back_ms.keys())
        rows.append(
            FaultSummary(
                fault,
                len(mine),
                dict(rungs),
                len(mine) - len(answered),
                statistics.median(times) if times else 0.0,
                max(times, default=0.0),
            )
        )
    return rows


def _describe_strategy(incident: Incident) -> str:
    return incident.strategy if incident.outcome == "resumed" else f"{incident.strategy} ({incident.outcome})"


def _find_causing_fault(found: ObservedRecovery, done: Sequence[PlannedFault]) -> int:
    before = [planned for planned in done if planned.at_s <= found.at_s]
    at_it = [planned for planned in before if planned.node == found.incident.node]
    return next((faults_before[-1].number for faults_before in (at_it, before) if faults_before), 0)


def _is_too_soon(fault: Fault, done: Sequence[PlannedFault], at_s: float) -> bool:
    last = next((planned.at_s for planned in reversed(done) if planned.fault is fault), None)
    return last is not None and at_s - last < MIN_INTERVAL_S.get(fault, 0.0)


def _has_ended(planned: PlannedFault, at_s: float) -> bool:
    return planned.at_s + planned.for_s + AFTERMATH_S < at_s


def _list_targets(fault: Fault, view: ClusterView, hit: Collection[tuple[str, int, int]]) -> list[NodeView]:
    if fault is Fault.SCHEDULER:
        return [node for node in view.nodes if node.role is Role.SCHEDULER and node.pid]
    workers = [node for node in view.nodes if node.role is Role.WORKER]
    servers = [node for node in view.nodes if node.role.group is Role.PSERVER]
    found = _workers_with_state(workers, hit)
    if fault in DEADLY_FAULTS and len(found) - 1 < max(1, len(workers) // 2):
        found = []
    calm = view.phase is Phase.READY and all(_is_up(node) for node in servers)  # a row may be on two servers: never fail both
    found += servers if calm and (len(servers) > 1 or fault not in DEADLY_FAULTS) else []
    return sorted(found, key=lambda node: (node.role, node.rank, node.node_id))


def _workers_with_state(workers: Sequence[NodeView], hit: Collection[tuple[str, int, int]]) -> list[NodeView]:
    steps = any(node.step >= 0 for node in workers)  # then a worker without a step is assumed to lack the state
    return [
        node
        for node in workers
        if _is_up(node) and (node.name, node.incarnation, node.pid) not in hit and (node.step >= 0 or not steps)
    ]


def _is_up(node: NodeView) -> bool:
    return node.alive and node.pid > 0 and node.state == NodeState.ALIVE


def _draw_uniform(seed: int, number: int, what: str) -> float:
    """Return a number in [0, 1) that depends only on the arguments."""
    digest = hashlib.blake2b(f"{seed}/{number}/{what}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
