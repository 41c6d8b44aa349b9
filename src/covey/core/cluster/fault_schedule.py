"""Which fault happens next, to whom and for how long; and at the end, what became of each.

A pure function of the seed, the faults that may happen, what has happened so far and the cluster as it is seen. What it
chooses is meant to be survived: it never takes the last who have the state, nor lets anything die so often that covey gives
it up, so a run that ends under it has a defect, or a ladder too short for the faults that were asked for.
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
    """What can be done to a cluster, as a user types it."""

    KILL = "kill"  # a node, by SIGKILL
    STOP = "stop"  # a node stands still for a while, and hears and says nothing
    SLOW = "slow"  # a node gets a part of the time it wants, for a while
    CUT = "cut"  # a node's connections to the others break
    DISK = "disk"  # where the logs lie no byte can be written for a while
    CLOCK = "clock"  # the wall clock jumps, and back
    SCHEDULER = "scheduler"  # it is killed
    TEMPLATE = "template"  # from which workers are forked: it is killed


DURATION_RANGE_S: Mapping[Fault, tuple[float, float]] = {  # at least and at most
    Fault.STOP: (0.2, 8.0),
    Fault.SLOW: (1.0, 3.0),
    Fault.DISK: (0.5, 2.0),
    Fault.CLOCK: (0.5, 2.0),
}
MIN_INTERVAL_S: Mapping[
    Fault, float
] = {  # who dies again sooner is taken for one that cannot live, and given up after a few times
    Fault.SCHEDULER: 61.0,
    Fault.TEMPLATE: 31.0,
}
NODE_FAULTS = (Fault.KILL, Fault.STOP, Fault.SLOW, Fault.CUT)
DEADLY_FAULTS = (Fault.KILL, Fault.STOP)  # to a node
AFTERMATH_S = 1.0  # until somebody who stood still is seen to be well again


class PlannedFault(msgspec.Struct, frozen=True):
    """One fault. Times are seconds since the beginning."""

    number: int  # from 1
    at_s: float
    fault: Fault
    node: str = ""  # "worker:2"; "" for what is not a node's
    pid: int = 0
    incarnation: int = 0
    for_s: float = 0.0


class ObservedRecovery(msgspec.Struct, frozen=True):
    """A recovery, and when it was first heard of."""

    incident: Incident
    at_s: float


class FaultSummary(msgspec.Struct, frozen=True):
    """What one kind of fault has led to. A rung is a strategy with its outcome where that is not "resumed"."""

    fault: Fault
    times: int
    rungs: dict[str, int]
    unnoticed: int  # of the times: no recovery was needed
    median_ms: float = 0.0  # of the recoveries
    worst_ms: float = 0.0


def pause_s(seed: int, number: int, every_s: float) -> float:
    """How long before strike `number`: around the wanted interval, never regular."""
    return every_s * (0.5 + _draw_uniform(seed, number, "pause"))


def choose_fault(
    seed: int, faults: Sequence[Fault], view: ClusterView, done: Sequence[PlannedFault], at_s: float
) -> tuple[PlannedFault | None, str]:
    """The next strike; or none, and why. Of equal seeds, histories and views the same is chosen."""
    number = len(done) + 1
    possible = [fault for fault in faults if not _is_too_soon(fault, done, at_s)]
    hit = {
        (s.node, s.incarnation, s.pid)
        for s in done
        if s.fault is Fault.KILL or (s.fault is Fault.STOP and not _has_ended(s, at_s))
    }
    victims = {fault: _list_targets(fault, view, hit) for fault in possible}
    possible = [fault for fault in possible if victims[fault] or fault not in (*NODE_FAULTS, Fault.SCHEDULER)]
    if not possible:
        return None, "no fault can be injected now without losing the last ranks that hold the training state"
    fault = possible[int(_draw_uniform(seed, number, "fault") * len(possible))]
    low, high = DURATION_RANGE_S.get(fault, (0.0, 0.0))
    for_s = low + (high - low) * _draw_uniform(seed, number, "lasts")
    if fault not in (*NODE_FAULTS, Fault.SCHEDULER):
        return PlannedFault(number, at_s, fault, for_s=for_s), f"{fault}"
    victim = victims[fault][int(_draw_uniform(seed, number, "victim") * len(victims[fault]))]
    return PlannedFault(number, at_s, fault, victim.name, victim.pid, victim.incarnation, for_s), f"{fault} {victim.name}"


def clock_jump_s(seed: int, number: int) -> float:
    """By how much the clock jumps: up to an hour, in either direction."""
    return 3600 * (2 * _draw_uniform(seed, number, "jump") - 1)


def summarize_faults(
    done: Sequence[PlannedFault], seen: Sequence[ObservedRecovery], back_ms: Mapping[int, float]
) -> list[FaultSummary]:
    """What became of all strikes. A recovery belongs to the newest strike at its node before it was heard of, else to the
    newest of all. `back_ms`, by number of strike: how long the scheduler or the template, which have no recoveries of their
    own, took to be there again."""
    owner = {found.incident.number: _find_causing_fault(found, done) for found in seen}
    rows = []
    for fault in Fault:
        mine = [strike for strike in done if strike.fault is fault]
        if not mine:
            continue
        numbers = {strike.number for strike in mine}
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
    before = [strike for strike in done if strike.at_s <= found.at_s]
    at_it = [strike for strike in before if strike.node == found.incident.node]
    return next((strikes[-1].number for strikes in (at_it, before) if strikes), 0)


def _is_too_soon(fault: Fault, done: Sequence[PlannedFault], at_s: float) -> bool:
    last = next((strike.at_s for strike in reversed(done) if strike.fault is fault), None)
    return last is not None and at_s - last < MIN_INTERVAL_S.get(fault, 0.0)


def _has_ended(strike: PlannedFault, at_s: float) -> bool:
    return strike.at_s + strike.for_s + AFTERMATH_S < at_s


def _list_targets(fault: Fault, view: ClusterView, hit: Collection[tuple[str, int, int]]) -> list[NodeView]:
    """Who may be hit, in an order that does not depend on the view's."""
    if fault is Fault.SCHEDULER:
        return [node for node in view.nodes if node.role is Role.SCHEDULER and node.pid]
    workers = [node for node in view.nodes if node.role is Role.WORKER]
    servers = [node for node in view.nodes if node.role.group is Role.PSERVER]
    found = _workers_with_state(workers, hit)
    if fault in DEADLY_FAULTS and len(found) - 1 < max(1, len(workers) // 2):
        found = []
    calm = view.phase is Phase.READY and all(_is_up(node) for node in servers)  # rows lie on two servers: never two at once
    found += servers if calm and (len(servers) > 1 or fault not in DEADLY_FAULTS) else []
    return sorted(found, key=lambda node: (node.role, node.rank, node.node_id))


def _workers_with_state(workers: Sequence[NodeView], hit: Collection[tuple[str, int, int]]) -> list[NodeView]:
    """Those who are up, were not hit in this life, and have come as far as others: a replacement has no state at first."""
    steps = any(node.step >= 0 for node in workers)
    return [
        node
        for node in workers
        if _is_up(node) and (node.name, node.incarnation, node.pid) not in hit and (node.step >= 0 or not steps)
    ]


def _is_up(node: NodeView) -> bool:
    return node.alive and node.pid > 0 and node.state == NodeState.ALIVE


def _draw_uniform(seed: int, number: int, what: str) -> float:
    """A number from 0 up to 1 that only these three decide."""
    digest = hashlib.blake2b(f"{seed}/{number}/{what}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
