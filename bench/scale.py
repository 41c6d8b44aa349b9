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
STAGE_LIMIT_S = 20.0
PEER_BUDGET_S = 60.0  # for all repeats of one size of the peer
DEATHS = 5
FORM_AIM_S, BEAT_AIM, MEMORY_AIM_KB, LINEAR_AIM = 10.0, 0.20, 20.0, 1.15

Figures = dict[str, Any]


class Plan(NamedTuple):
    """Which sizes, how often, and how long the beats are watched."""

    sizes: list[int]
    peer_sizes: list[int]
    repeats: int
    beat_s: float


FULL = Plan([1000, 2000, 5000, 10_000], [1000, 5000], 5, 30.0)
QUICK = Plan([500, 1000, 2000], [1000], 2, 8.0)


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
            found |= await _lose_some(flock)
        cpu = cpu_seconds(pid)
        found["leave_s"] = await flock.leave(STAGE_LIMIT_S)
        found["leave_cpu_s"] = cpu_seconds(pid) - cpu
        found["exit_code"] = await asyncio.to_thread(process.wait, STAGE_LIMIT_S)


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
    """Several formations of one size; the last of them also beats, loses nodes and is watched."""
    runs: list[Figures] = []
    for number in range(plan.repeats):
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runs.append(runner.run(live(size, plan, whole=number == plan.repeats - 1)))
        except Late as late:
            print(f"{size} nodes: {late}", file=sys.stderr, flush=True)
            return {"nodes": size, "late": str(late), "runs": runs}
        print(
            f"{size} nodes, {number + 1} of {plan.repeats}: formed in {runs[-1]['form_s']:.2f} s", file=sys.stderr, flush=True
        )
    watched = ("beats_per_s", "beat_share", "kb_per_node", "news_half_s", "news_all_s", "back_s")
    repeated = ("form_s", "form_cpu_s", "nodes_cpu_s", "leave_s", "leave_cpu_s")
    figures = {name: spread(run[name] for run in runs)._asdict() for name in repeated}
    return {"nodes": size, "runs": runs} | figures | {name: runs[-1][name] for name in watched}


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
    """How each cost of the scheduler grows with the number of nodes; 1 is linear."""
    sizes = [figures["nodes"] for figures in found]
    costs = {
        "time to form": [f["form_s"]["median"] for f in found],
        "scheduler CPU to form": [f["form_cpu_s"]["median"] for f in found],
        "scheduler CPU for beats": [f["beat_share"] for f in found],
        "memory": [f["kb_per_node"] * f["nodes"] for f in found],
        "time until all know of a death": [spread(f["news_all_s"]).median for f in found],
        "scheduler CPU to leave": [f["leave_cpu_s"]["median"] for f in found],
    }
    return {name: exponent(sizes, values) for name, values in costs.items()}


def aims(found: list[Figures], growth: dict[str, float]) -> list[Aim]:
    largest = found[-1]
    n, form = largest["nodes"], Spread(**largest["form_s"])
    share, memory, steepest = largest["beat_share"], largest["kb_per_node"], max(growth, key=lambda name: growth[name])
    return [
        Aim(f"{n} nodes form", f"within {FORM_AIM_S:g} s", form.show(" s"), form.median <= FORM_AIM_S),
        Aim(f"{n} nodes beat", f"under {BEAT_AIM:.0%} of one core", f"{share:.1%}", share < BEAT_AIM),
        Aim("memory of the scheduler", f"under {MEMORY_AIM_KB:g} KB per node", f"{memory:.1f} KB", memory < MEMORY_AIM_KB),
        Aim(
            "every cost is linear",
            f"exponent under {LINEAR_AIM:g}",
            f"at most {growth[steepest]:.2f} ({steepest})",
            growth[steepest] < LINEAR_AIM,
        ),
    ]


def nodes_table(found: list[Figures]) -> str:
    header = ["nodes", "form (s)", "scheduler CPU to form (s)", "beats/s", "scheduler CPU for beats", "KB per node"]
    header += ["half / all know of a death (ms)", "back (ms)", "leave (s)", "scheduler CPU to leave (s)"]
    return table(header, [_nodes_row(figures) for figures in found])


def _nodes_row(f: Figures) -> list[str]:
    if "late" in f:
        return [f"{f['nodes']}", f["late"], *[""] * 8]
    half, every, back = (spread(1000 * s for s in f[name]) for name in ("news_half_s", "news_all_s", "back_s"))
    return [
        f"{f['nodes']}",
        f"**{Spread(**f['form_s']).show()}**",
        Spread(**f["form_cpu_s"]).show(),
        f"{f['beats_per_s']:.0f}",
        f"**{f['beat_share']:.1%}** of a core",
        f"**{f['kb_per_node']:.1f}**",
        f"{half.median:.0f} / {every.show(digits=0)}",
        back.show(digits=0),
        Spread(**f["leave_s"]).show(),
        Spread(**f["leave_cpu_s"]).show(),
    ]


def peer_table(found: list[Figures], peers: list[Figures]) -> str:
    """TCPStore beside the same number of nodes, where there is one."""
    rows = []
    for peer in peers:
        seconds, cpu, n = Spread(**peer["join_s"]), Spread(**peer["server_cpu_s"]), peer["clients"]
        row = [f"{n}", seconds.show(), cpu.show()]
        for f in (f for f in found if f["nodes"] == n and "late" not in f):
            form, form_cpu = Spread(**f["form_s"]).median, Spread(**f["form_cpu_s"]).median
            row += [f"{form:.2f}", f"{form_cpu:.2f}", f"**{form / seconds.median:.2f} x**, {form_cpu / cpu.median:.2f} x CPU"]
        rows.append([*row, *[""] * (6 - len(row))])
    header = ["N", "TCPStore joins (s)", "server CPU (s)", "covey forms (s)", "scheduler CPU (s)", "covey / TCPStore"]
    return table(header, rows)


def draw(found: list[Figures], peers: list[Figures]) -> Callable[[Any], None]:
    """Seconds to form, and the share of a core that beats take, both by number of nodes."""

    def on(figure: Any) -> None:
        form, beat = figure.subplots(1, 2)
        sizes = [f["nodes"] for f in found]
        form.loglog(sizes, [f["form_s"]["median"] for f in found], "o-", label="covey: all nodes know their rank")
        form.loglog(sizes, [f["form_cpu_s"]["median"] for f in found], "o--", label="covey: scheduler CPU")
        at = [p["clients"] for p in peers]
        form.loglog(at, [p["join_s"]["median"] for p in peers], "s-", label="TCPStore: all clients joined")
        form.loglog(at, [p["server_cpu_s"]["median"] for p in peers], "s--", label="TCPStore: server CPU")
        form.set_xlabel("nodes")
        form.set_ylabel("seconds")
        form.legend()
        beat.plot(sizes, [100 * f["beat_share"] for f in found], "o-")
        beat.axhline(100 * BEAT_AIM, linestyle="--", color="black")
        beat.set_xlabel("nodes, each with a beat every 3 to 5 s")
        beat.set_ylabel("% of one core in the scheduler")
        beat.set_ylim(bottom=0)

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 2,000 nodes, about a minute")
    parser.add_argument("--nodes", type=int, nargs="+", help="these sizes instead")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    plan = plan._replace(sizes=sorted(options.nodes)) if options.nodes else plan
    raise_file_limit()
    about = machine()
    peers = [measure_peer(size, plan.repeats) for size in plan.peer_sizes]
    found = [measure(size, plan) for size in plan.sizes]
    good = [figures for figures in found if "late" not in figures]
    growth = exponents(good) if len(good) > 1 else {}
    judged = aims(good, growth) if growth else []
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
    publish("scale-quick" if options.quick else "scale", data, sections, draw(good, peers))


if __name__ == "__main__":
    main()
