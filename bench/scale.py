"""How large one scheduler may become: thousands of nodes over real TCP register, form, beat, lose one, and leave.

The scheduler is one real process, started by the MS_* variables with its journal on, as `covey run` has it. The nodes live in
this process (`bench.flock`), so on a small machine the two compete for the cores: seconds are those of both together, the CPU
times are the scheduler's own. In the same invocation torch's TCPStore takes as many clients (`bench.tcpstore`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench import tcpstore
from bench.flock import ADDRESS, Flock, Late
from bench.process import cpu_seconds, resident_kb
from bench.report import Aim, Spread, aims_table, exponent, machine, publish, spread, table
from covey.node.scheduler import raise_file_limit

FORM_LIMIT_S = 120.0
STAGE_LIMIT_S = 60.0
PEER_BUDGET_S = 60.0  # for all repeats of one size of the peer
DEATHS = 5
FORM_AIM_S, BEAT_AIM, MEMORY_AIM_KB, LINEAR_AIM = 10.0, 0.20, 20.0, 1.15
INFINITE = float("inf")

REPEATED = ("form_s", "form_cpu_s", "nodes_cpu_s", "leave_s", "leave_cpu_s")  # in every run
WATCHED = ("beats_per_s", "beat_share", "kb_per_node", "death_cpu_s")  # in the first
DEATH = ("news_half_s", "news_all_s", "back_s")  # in the first, several times

Figures = dict[str, Any]


class Plan(NamedTuple):
    """Which sizes, how often, and how long the beats are watched."""

    sizes: list[int]
    peer_sizes: list[int]
    repeats: int
    beat_s: float


FULL = Plan([1000, 2000, 5000, 10_000], [1000, 5000], 5, 30.0)
QUICK = Plan([1000, 3000], [1000], 2, 6.0)


@contextlib.contextmanager
def scheduler(size: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A scheduler process that waits for `size` workers, and its port."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder, socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port = int(probe.getsockname()[1])
        probe.close()
        variables = {
            "MS_ROLE": "MS_SCHED",
            "MS_SCHED_HOST": ADDRESS,
            "MS_SCHED_PORT": str(port),
            "MS_WORKER_NUM": str(size),
            "MS_SCHED_MANAGE_PORT": "0",
            "MS_ENABLE_RECOVERY": "1",
            "MS_RECOVERY_PATH": folder,
            "XDG_RUNTIME_DIR": folder,
            "XDG_CONFIG_HOME": folder,
        }
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", "import covey; covey.init()"], env=os.environ | variables, stdout=output, stderr=output
            )
        try:
            _await_door(port, process)
            yield process, port
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _await_door(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STAGE_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((ADDRESS, port), timeout=1):
            return
        time.sleep(0.02)
    raise SystemExit(f"the scheduler did not listen at {ADDRESS}:{port} (its exit code: {process.poll()})")


async def live(size: int, plan: Plan, found: Figures, *, whole: bool) -> None:
    """One cluster from its first connect to its last goodbye; without `whole` it only forms and leaves.

    Figures go into `found` as they are known, so that a stage that takes too long does not hide those before it.
    """
    with scheduler(size) as (process, port):
        pid = process.pid
        flock = Flock(port, size)
        memory, cpu, own = resident_kb(pid), cpu_seconds(pid), time.process_time()
        found["form_s"] = await flock.form(FORM_LIMIT_S)
        found["form_cpu_s"], found["nodes_cpu_s"] = cpu_seconds(pid) - cpu, time.process_time() - own
        found["retries"] = flock.retries
        if whole:
            found |= await _watch_beats(flock, pid, plan.beat_s)
            found["kb_per_node"] = (resident_kb(pid) - memory) / size
            cpu = cpu_seconds(pid)
            found |= await _lose_some(flock)
            found["death_cpu_s"] = (cpu_seconds(pid) - cpu) / DEATHS
        cpu = cpu_seconds(pid)
        found["leave_s"] = await flock.leave(STAGE_LIMIT_S)
        found["leave_cpu_s"] = cpu_seconds(pid) - cpu
        if code := await asyncio.to_thread(process.wait, STAGE_LIMIT_S):
            raise SystemExit(f"the scheduler of {size} nodes ended with code {code} after all had left")


async def _watch_beats(flock: Flock, pid: int, seconds: float) -> Figures:
    await flock.all_beating()
    cpu, beats, began = cpu_seconds(pid), flock.beats, time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - began
    return {"beats_per_s": (flock.beats - beats) / elapsed, "beat_share": (cpu_seconds(pid) - cpu) / elapsed}


async def _lose_some(flock: Flock) -> Figures:
    """Kill nodes one after the other, each coming back before the next one goes."""
    half, every, back = [], [], []
    for number in range(0, flock.size, flock.size // DEATHS)[:DEATHS]:
        first, last = await flock.lose(number, STAGE_LIMIT_S)
        half.append(first)
        every.append(last)
        back.append(await flock.bring_back(number, STAGE_LIMIT_S))
    return {"news_half_s": half, "news_all_s": every, "back_s": back}


def measure(size: int, plan: Plan) -> Figures:
    """Several formations of one size; the first of them also beats, loses nodes and is watched."""
    runs: list[Figures] = []
    for number in range(plan.repeats):
        runs.append({})
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(live(size, plan, runs[-1], whole=number == 0))
        except Late as late:
            runs[-1]["late"] = str(late)
        shown = ", ".join(f"{key} {value:.3g}" for key, value in runs[-1].items() if isinstance(value, float))
        print(f"{size} nodes: {runs[-1].get('late', shown)}", file=sys.stderr, flush=True)
        if "late" in runs[-1]:
            break
    repeated = {key: [run[key] for run in runs if key in run] for key in REPEATED}
    figures = {key: spread(values)._asdict() for key, values in repeated.items() if values}
    figures |= {key: spread(runs[0][key])._asdict() for key in DEATH if key in runs[0]}
    watched = {key: runs[0][key] for key in WATCHED if key in runs[0]}
    return {"nodes": size, "late": runs[-1].get("late", ""), **figures, **watched, "runs": runs}


def measure_peer(size: int, repeats: int) -> Figures:
    """As often as the others, but no longer than a minute in all."""
    joined: list[tcpstore.Joined] = []
    began = time.monotonic()
    while len(joined) < repeats and time.monotonic() - began < PEER_BUDGET_S:
        joined.append(tcpstore.join_all(size))
        print(f"TCPStore, {size} clients: joined in {joined[-1].seconds:.2f} s", file=sys.stderr, flush=True)
    seconds, cpu = (spread(values)._asdict() for values in zip(*joined, strict=True))
    return {"clients": size, "join_s": seconds, "server_cpu_s": cpu}


def exponents(found: list[Figures]) -> dict[str, float]:
    """How each cost grows with the number of nodes; 1 is linear."""
    costs = {
        "time to form": [_median(f, "form_s") for f in found],
        "time until all know of a death": [_median(f, "news_all_s") for f in found],
        "scheduler CPU to form": [_median(f, "form_cpu_s") for f in found],
        "scheduler CPU for beats": [f.get("beat_share", INFINITE) for f in found],
        "scheduler memory": [f.get("kb_per_node", INFINITE) * f["nodes"] for f in found],
        "scheduler CPU for a death and a return": [f.get("death_cpu_s", INFINITE) for f in found],
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
    """Judged at the largest size; what was not reached is not held."""
    f = found[-1]
    n = f["nodes"]
    form, share, memory = _median(f, "form_s"), f.get("beat_share", INFINITE), f.get("kb_per_node", INFINITE)
    costs = [name for name in growth if name.startswith("scheduler")]  # wall-clock times are the machine's mood as well
    steepest = max(costs, key=lambda name: growth[name], default="")
    power = growth.get(steepest, INFINITE)
    limits = f"{FORM_LIMIT_S:g} s to form, {STAGE_LIMIT_S:g} s for each other stage"
    linear = f"at most {power:.2f} ({steepest})"
    return [
        Aim(f"{n} nodes form", f"within {FORM_AIM_S:g} s", f"{form:.2f} s", form <= FORM_AIM_S),
        Aim(f"{n} nodes beat", f"under {BEAT_AIM:.0%} of one core", f"{share:.1%}", share < BEAT_AIM),
        Aim("memory of the scheduler", f"under {MEMORY_AIM_KB:g} KB per node", f"{memory:.1f} KB", memory < MEMORY_AIM_KB),
        Aim("the scheduler's costs are linear", f"exponent under {LINEAR_AIM:g}", linear, power < LINEAR_AIM),
        Aim("every stage ends in time", limits, f["late"] or "yes", not f["late"]),
    ]


def nodes_table(found: list[Figures]) -> str:
    header = ["nodes", "form (s)", "scheduler CPU to form (s)", "beats/s", "of one core for beats", "KB per node"]
    header += ["half know of a death (ms)", "all know (ms)", "place filled again (ms)", "scheduler CPU for both (s)"]
    header += ["leave (s)", "scheduler CPU to leave (s)"]
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
        f"**{cell('beat_share', 100, 1)} %**",
        f"**{cell('kb_per_node', digits=1)}**",
        cell("news_half_s", 1000, 0),
        cell("news_all_s", 1000, 0),
        cell("back_s", 1000, 0),
        cell("death_cpu_s"),
        cell("leave_s"),
        cell("leave_cpu_s"),
    ]


def peer_table(found: list[Figures], peers: list[Figures]) -> str:
    """TCPStore beside the same number of nodes, where there is one."""
    rows = []
    for peer in peers:
        seconds, cpu, n = Spread(**peer["join_s"]), Spread(**peer["server_cpu_s"]), peer["clients"]
        row = [f"{n}", seconds.show(), cpu.show()]
        for f in (f for f in found if f["nodes"] == n and "form_s" in f):
            form, form_cpu = Spread(**f["form_s"]).median, Spread(**f["form_cpu_s"]).median
            row += [f"{form:.2f}", f"{form_cpu:.2f}", f"**{form / seconds.median:.2f} x**, {form_cpu / cpu.median:.2f} x CPU"]
        rows.append([*row, *[""] * (6 - len(row))])
    header = ["N", "TCPStore joins (s)", "server CPU (s)", "covey forms (s)", "scheduler CPU (s)", "covey / TCPStore"]
    return table(header, rows)


def draw(found: list[Figures], peers: list[Figures]) -> Callable[[Any], None]:
    """Seconds to form, and the share of a core that beats take, both by number of nodes."""

    def on(figure: Any) -> None:
        form, beat = figure.subplots(1, 2)
        formed, beating = [f for f in found if "form_s" in f], [f for f in found if "beat_share" in f]
        sizes = [f["nodes"] for f in formed]
        form.loglog(sizes, [f["form_s"]["median"] for f in formed], "o-", label="covey: all nodes know their rank")
        form.loglog(sizes, [f["form_cpu_s"]["median"] for f in formed], "o--", label="covey: scheduler CPU")
        at = [p["clients"] for p in peers]
        form.loglog(at, [p["join_s"]["median"] for p in peers], "s-", label="TCPStore: all clients joined")
        form.loglog(at, [p["server_cpu_s"]["median"] for p in peers], "s--", label="TCPStore: server CPU")
        form.set_xlabel("nodes")
        form.set_ylabel("seconds")
        form.legend()
        beat.plot([f["nodes"] for f in beating], [100 * f["beat_share"] for f in beating], "o-")
        beat.axhline(100 * BEAT_AIM, linestyle="--", color="black")
        beat.set_xlabel("nodes, each with a beat every 3 to 5 s")
        beat.set_ylabel("% of one core in the scheduler")
        beat.set_ylim(bottom=0)

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 and 3,000 nodes, less than a minute")
    parser.add_argument("--nodes", type=int, nargs="+", help="these sizes instead")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    plan = plan._replace(sizes=sorted(options.nodes)) if options.nodes else plan
    raise_file_limit()
    about = machine()
    peers = [measure_peer(size, plan.repeats) for size in plan.peer_sizes]
    found = [measure(size, plan) for size in plan.sizes]
    growth = exponents(found)
    judged = aims(found, growth)
    data = {
        "machine": about,
        "quick": options.quick,
        "scales": found,
        "peer": peers,
        "exponents": growth,
        "aims": [aim._asdict() for aim in judged],
    }
    grown = table(["cost", "grows as nodes to the power of"], [[name, f"{x:.2f}"] for name, x in growth.items()])
    sections = [aims_table(judged), nodes_table(found), grown, peer_table(found, peers)]
    publish("scale-quick" if options.quick else "scale", data, sections, draw(found, peers))


if __name__ == "__main__":
    main()
