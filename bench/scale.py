"""Scalability of one scheduler: thousands of nodes over real TCP register, form, send heartbeats, lose one node, and leave.

The scheduler is a separate process (`bench.cluster`). The nodes are simulated in this process (`bench.flock`, or eight per
agent with one connection: `bench.hosts`). On a small machine the two compete for the cores: seconds are those of both together,
CPU times those of the scheduler. In the same invocation torch's TCPStore serves as many clients (`bench.tcpstore`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import uvloop

from bench import tcpstore
from bench.cluster import FORM_LIMIT_S, STAGE_LIMIT_S, Figures, end_by_death, form_and_leave, whole_life
from bench.flock import PER_HOST, Late, NodePool
from bench.hosts import Hosts
from bench.process import take_along
from bench.report import Aim, Spread, aims_table, exponent, machine, publish, spread, table
from covey.runtime.listeners import raise_file_limit

PEER_BUDGET_S = 40.0  # per size of the peer: no further repeat begins after that
FORM_AIM_S, BEAT_AIM, MEMORY_AIM_KB = 10.0, 0.20, 20.0
LINEAR_AIM = 1.25  # exponent; cache misses cost a little more than linear, nested loops would have 2
INFINITE = float("inf")

SCENARIOS = {NodePool: {0: end_by_death, 1: whole_life}, Hosts: {0: whole_life}}  # by number of the run
REPEATED = ("form_s", "form_cpu_s", "nodes_cpu_s", "leave_s", "leave_cpu_s")  # measured in several runs
WATCHED = ("beats_per_s", "beat_share", "kb_per_node", "death_cpu_s", "stop_s", "stop_cpu_s")  # measured in one run
DEATH = ("news_half_s", "news_all_s", "back_s")  # measured several times in one run


class Plan(NamedTuple):
    """Sizes and repeats of a measurement, and the seconds for which heartbeats are measured."""

    sizes: list[int]
    agents: list[int]  # numbers of agents, of eight workers each
    peer_sizes: list[int]
    repeats: int
    beat_s: float


FULL = Plan([1000, 2000, 5000, 10_000], [125, 1250, 12_500], [1000, 5000], 5, 30.0)
QUICK = Plan([1000, 3000], [125], [1000], 2, 5.0)
WAYS = Plan([1000, 10_000], [125, 1000, 4000, 12_500], [], 2, 10.0)


def measure(size: int, plan: Plan, kind: type[NodePool] = NodePool) -> Figures:
    """Measure several clusters of one size; the first runs have scenarios with more stages."""
    runs: list[Figures] = []
    for number in range(plan.repeats):
        runs.append({})
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(SCENARIOS[kind].get(number, form_and_leave)(size, runs[-1], plan.beat_s, kind))
        except Late as late:
            runs[-1]["late"] = str(late)
        shown = ", ".join(f"{key} {value:.3g}" for key, value in runs[-1].items() if isinstance(value, float))
        print(f"{size} nodes: {runs[-1].get('late', shown)}", file=sys.stderr, flush=True)
        if "late" in runs[-1]:
            break
    repeated = {key: [run[key] for run in runs if key in run] for key in REPEATED}
    figures = {key: spread(values)._asdict() for key, values in repeated.items() if values}
    figures |= {key: spread(run[key])._asdict() for run in runs for key in DEATH if key in run}
    watched = {key: run[key] for run in runs for key in WATCHED if key in run}
    return {
        "nodes": size,
        "connections": kind.connections(size),
        "late": runs[-1].get("late", ""),
        **figures,
        **watched,
        "runs": runs,
    }


def measure_peer(size: int, repeats: int) -> Figures:
    """Measure the peer `repeats` times within its budget; without figures if a run fails or times out."""
    joined: list[tcpstore.Joined] = []
    began = time.monotonic()
    while len(joined) < repeats and time.monotonic() - began < PEER_BUDGET_S:
        try:
            joined.append(tcpstore.join_all(size))
        except tcpstore.NotJoined as error:
            print(f"TCPStore, {size} clients: {error}", file=sys.stderr, flush=True)
            return {"clients": size, "late": str(error)}
        print(f"TCPStore, {size} clients: joined in {joined[-1].seconds:.2f} s", file=sys.stderr, flush=True)
    seconds, cpu = (spread(values)._asdict() for values in zip(*joined, strict=True))
    return {"clients": size, "join_s": seconds, "server_cpu_s": cpu}


def exponents(found: list[Figures]) -> dict[str, float]:
    """Return the growth exponent of each cost by the number of nodes; 1 is linear."""
    costs = {
        "time to form": [_median(f, "form_s") for f in found],
        "time until all are notified of a death": [_median(f, "news_all_s") for f in found],
        "scheduler CPU to form": [_median(f, "form_cpu_s") for f in found],
        "scheduler CPU for heartbeats": [f.get("beat_share", INFINITE) for f in found],
        "scheduler memory": [f.get("kb_per_node", INFINITE) * f["nodes"] for f in found],
        "scheduler CPU for a death and a return": [f.get("death_cpu_s", INFINITE) for f in found],
        "scheduler CPU to stop all": [f.get("stop_cpu_s", INFINITE) for f in found],
        "scheduler CPU to leave": [_median(f, "leave_cpu_s") for f in found],
    }
    growth = {}
    for name, values in costs.items():
        known = [(f["nodes"], cost) for f, cost in zip(found, values, strict=True) if 0 < cost < INFINITE]
        if len(known) > 1:
            growth[name] = exponent(*zip(*known, strict=True))
    return growth


def _median(figures: Figures, key: str) -> float:
    return float(figures[key]["median"]) if key in figures else INFINITE


def aims(found: list[Figures], growth: dict[str, float]) -> list[Aim]:
    """Return the aims at the largest size, and timeouts at all sizes; a value that was not measured fails its aim."""
    f = found[-1]
    n = f["nodes"]
    form, share, memory = _median(f, "form_s"), f.get("beat_share", INFINITE), f.get("kb_per_node", INFINITE)
    costs = [name for name in growth if name.startswith("scheduler")]  # elapsed times depend on the load of the machine too
    steepest = max(costs, key=lambda name: growth[name], default="")
    power = growth.get(steepest, INFINITE)
    limits = f"{FORM_LIMIT_S:g} s to form, {STAGE_LIMIT_S:g} s for each other stage"
    late = "; ".join(f["late"] for f in found if f["late"])
    linear = f"at most {power:.2f} ({steepest})"
    return [
        Aim(f"{n} nodes form", f"within {FORM_AIM_S:g} s", f"{form:.2f} s", form <= FORM_AIM_S),
        Aim(f"{n} nodes send heartbeats", f"under {BEAT_AIM:.0%} of one core", f"{share:.1%}", share < BEAT_AIM),
        Aim("memory of the scheduler", f"under {MEMORY_AIM_KB:g} KB per node", f"{memory:.1f} KB", memory < MEMORY_AIM_KB),
        Aim("the scheduler's costs are linear", f"exponent under {LINEAR_AIM:g}", linear, power < LINEAR_AIM),
        Aim("every stage finishes in time", limits, late or "yes", not late),
    ]


def nodes_table(found: list[Figures]) -> str:
    header = ["nodes", "form (s)", "scheduler CPU to form (s)", "heartbeats/s", "% of one core for heartbeats", "KB per node"]
    header += ["half notified of a death (ms)", "all notified (ms)", "node replaced (ms)", "scheduler CPU for both (s)"]
    header += ["all stopped (ms)", "leave (s)", "scheduler CPU to leave (s)"]
    return table(header, [_nodes_row(figures) for figures in found])


def _nodes_row(f: Figures) -> list[str]:
    def cell(key: str, scale: float = 1.0, digits: int = 2) -> str:
        if key not in f:
            return f["late"] or "-"
        if not isinstance(f[key], dict):
            return f"{scale * f[key]:.{digits}f}"
        return Spread(**f[key]).scaled(scale).show(digits=digits)

    return [
        f"{f['nodes']}",
        f"**{cell('form_s')}**",
        cell("form_cpu_s"),
        cell("beats_per_s", digits=0),
        f"**{cell('beat_share', 100, 1)}**",
        f"**{cell('kb_per_node', digits=1)}**",
        cell("news_half_s", 1000, 0),
        cell("news_all_s", 1000, 0),
        cell("back_s", 1000, 0),
        cell("death_cpu_s"),
        cell("stop_s", 1000, 0),
        cell("leave_s"),
        cell("leave_cpu_s"),
    ]


def ways_table(found: list[Figures]) -> str:
    """Return a table of the scheduler's cost per worker, with direct connections and through agents."""
    header = [
        "workers",
        "connections",
        "form (s)",
        "CPU to form (µs per worker)",
        "heartbeats (% of one core per 1000 workers)",
    ]
    header += ["KB per worker", "all notified of a death (ms)", "CPU for a death and a return (µs per worker)"]
    header += ["CPU to leave (µs per worker)"]
    rows = []
    for f in found:
        n = f["nodes"]
        if f["late"]:
            rows.append([f"{n}", f"{f['connections']}", f["late"], *[""] * 6])
            continue
        row = [f"{n}", f"{f['connections']}", f"{_median(f, 'form_s'):.2f}", f"{1e6 * _median(f, 'form_cpu_s') / n:.0f}"]
        row += [f"{100 * f['beat_share'] / n * 1000:.2f}", f"{f['kb_per_node']:.1f}", f"{1000 * _median(f, 'news_all_s'):.0f}"]
        rows.append([*row, f"{1e6 * f['death_cpu_s'] / n:.1f}", f"{1e6 * _median(f, 'leave_cpu_s') / n:.0f}"])
    return table(header, rows)


def peer_table(found: list[Figures], peers: list[Figures]) -> str:
    """Return a table of TCPStore and, if measured, covey with the same number of nodes."""
    rows = []
    for peer in peers:
        if "late" in peer:
            rows.append([f"{peer['clients']}", peer["late"], "", "", "", ""])
            continue
        seconds, cpu, n = Spread(**peer["join_s"]), Spread(**peer["server_cpu_s"]), peer["clients"]
        row = [f"{n}", seconds.show(), cpu.show()]
        for f in (f for f in found if f["nodes"] == n and "form_s" in f):
            form, form_cpu = Spread(**f["form_s"]).median, Spread(**f["form_cpu_s"]).median
            row += [f"{form:.2f}", f"{form_cpu:.2f}", f"**{form / seconds.median:.2f} x**, {form_cpu / cpu.median:.2f} x CPU"]
        rows.append([*row, *[""] * (6 - len(row))])
    header = ["N", "TCPStore joins (s)", "server CPU (s)", "covey forms (s)", "scheduler CPU (s)", "covey / TCPStore"]
    return table(header, rows)


def draw(found: list[Figures], peers: list[Figures]) -> Callable[[Any], None]:
    """Return a function that draws seconds to form, and the share of a core for heartbeats, by number of nodes."""

    def on(figure: Any) -> None:
        form, heartbeats = figure.subplots(1, 2)
        formed, beating = [f for f in found if "form_s" in f], [f for f in found if "beat_share" in f]
        sizes = [f["nodes"] for f in formed]
        form.loglog(sizes, [f["form_s"]["median"] for f in formed], "o-", label="covey: all nodes have their rank")
        form.loglog(sizes, [f["form_cpu_s"]["median"] for f in formed], "o--", label="covey: scheduler CPU")
        joined = [p for p in peers if "late" not in p]
        at = [p["clients"] for p in joined]
        form.loglog(at, [p["join_s"]["median"] for p in joined], "s-", label="TCPStore: all clients joined")
        form.loglog(at, [p["server_cpu_s"]["median"] for p in joined], "s--", label="TCPStore: server CPU")
        form.set_xlabel("nodes")
        form.set_ylabel("seconds")
        form.legend(loc="lower right", fontsize="small")
        heartbeats.plot([f["nodes"] for f in beating], [100 * f["beat_share"] for f in beating], "o-")
        heartbeats.axhline(100 * BEAT_AIM, linestyle="--", color="black")
        heartbeats.set_xlabel("nodes, each with a heartbeat every 3 to 5 s")
        heartbeats.set_ylabel("% of one core in the scheduler")
        heartbeats.set_ylim(bottom=0)

    return on


def compare_ways(plan: Plan, about: Figures) -> None:
    """Compare workers with direct connections and workers behind agents, up to 100,000; takes a few minutes."""
    found = [measure(size, plan) for size in plan.sizes]
    relayed = [measure(PER_HOST * agents, plan._replace(repeats=1), Hosts) for agents in plan.agents]
    data = {"machine": about, "quick": False, "scales": found, "agents": relayed}
    publish("scale-ways", data, [ways_table([*found, *relayed])], draw_ways(found, relayed))


def draw_ways(found: list[Figures], relayed: list[Figures]) -> Callable[[Any], None]:
    """Return a function that draws the scheduler's microseconds per joining worker, by number of workers."""

    def on(figure: Any) -> None:
        axes = figure.subplots()
        for name, ways in (("direct connections", found), (f"{PER_HOST} behind an agent", relayed)):
            formed = [f for f in ways if "form_cpu_s" in f]
            axes.semilogx(
                [f["nodes"] for f in formed], [1e6 * _median(f, "form_cpu_s") / f["nodes"] for f in formed], "o-", label=name
            )
        axes.set_xlabel("workers")
        axes.set_ylabel("scheduler CPU to form, µs per worker")
        axes.set_ylim(bottom=0)
        axes.legend()

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 and 3,000 nodes")
    parser.add_argument("--ways", action="store_true", help="only the cost of a worker, directly and through its agent")
    parser.add_argument("--nodes", type=int, nargs="+", help="sizes to measure")
    parser.add_argument("--agents", type=int, nargs="+", help=f"numbers of agents to measure, of {PER_HOST} workers each")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    plan = plan._replace(sizes=sorted(options.nodes)) if options.nodes else plan
    plan = plan._replace(agents=sorted(options.agents)) if options.agents else plan
    raise_file_limit()
    about = machine()
    if options.ways:
        return compare_ways(WAYS._replace(sizes=options.nodes or WAYS.sizes, agents=options.agents or WAYS.agents), about)
    peers = [measure_peer(size, plan.repeats) for size in plan.peer_sizes]
    found = [measure(size, plan) for size in plan.sizes]
    relayed = [measure(PER_HOST * agents, plan, Hosts) for agents in plan.agents]
    growth = exponents(found)
    judged = aims(found, growth)
    data = {
        "machine": about,
        "quick": options.quick,
        "scales": found,
        "agents": relayed,
        "peer": peers,
        "exponents": growth,
        "aims": [aim._asdict() for aim in judged],
    }
    grown = table(["cost", "grows as nodes to the power of"], [[name, f"{x:.2f}"] for name, x in growth.items()])
    ways = [figures for figures in [*found, *relayed] if figures["late"] or "beat_share" in figures]
    sections = [aims_table(judged), nodes_table(found), ways_table(ways), grown, peer_table(found, peers)]
    return publish("scale", data, sections, draw(found, peers))


if __name__ == "__main__":
    take_along()
    main()
