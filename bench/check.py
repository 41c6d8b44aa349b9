"""Comparison of the quick benchmarks with their record (`make bench-check`). `make bench-record` writes the record.

Every figure is a ratio to a peer, or to another method, in the same run (`RATIOS`). The record has the median, lowest and
highest of several trials. A ratio is worse if its median is beyond the recorded worst by more than half the recorded spread,
and if further trials of that benchmark confirm it. A better ratio is printed and changes nothing: a new record is a separate
commit that states the reason. A ratio that was not measured fails the check, unless its benchmark needs a peer (`BRINGS`).
A check ends after `CHECK_LIMIT_S` at the latest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import QUICK, RESULTS, Spread, spread

RECORD = RESULTS / "quick-record.json"
TRIALS = 5  # of a record
CONFIRM = 3  # further trials of a benchmark that seems worse
LEAST = 0.05  # minimum tolerance, as a fraction of the median: the spread of few trials can be too small by chance
LIMIT_S = 600.0  # of one trial of one benchmark
CHECK_LIMIT_S = 900.0  # of a whole check, with the trials that confirm
QUIET = 0.5  # load per core up to which a machine is considered quiet
Data = Mapping[str, Any]


class Better(StrEnum):
    LOWER = "lower"
    HIGHER = "higher"


class Verdict(StrEnum):
    SAME = "same"
    BETTER = "better"
    WORSE = "WORSE"
    MISSING = "MISSING"


class Ratio(NamedTuple):
    """One ratio of a benchmark. `read` extracts it from the benchmark's JSON; None if the run has not measured it."""

    name: str
    benchmark: str
    better: Better
    read: Callable[[Data], float | None]


# -- extraction of the ratios ----------------------------------------------------------------------------------------


def _formed(way: str, peer: str, peer_n: int) -> Callable[[Data], float | None]:
    """Read the seconds until 8 ranks have a working group."""

    def read(data: Data) -> float | None:
        ready = {(one["way"], one["n"]): [second["ready"] for second in one["seconds"]] for one in data["samples"]}
        return _divided(ready.get((way, 8)), ready.get((peer, peer_n)))

    return read


def _worker_memory(data: Data) -> float | None:
    memory = data["memory"]
    return memory["covey"]["worker_mb"]["median"] / memory["torchrun"]["worker_mb"]["median"]  # type: ignore[no-any-return]


def _joined(data: Data) -> float | None:
    """Return the ratio of the seconds until 1,000 nodes have joined."""
    mine = [one["form_s"]["median"] for one in data["scales"] if one["nodes"] == 1000]
    theirs = [one["join_s"]["median"] for one in data["peer"] if one["clients"] == 1000]
    return _divided(mine, theirs)


def _recovered(group: str, way: str, peer: str) -> Callable[[Data], float | None]:
    """Read the seconds from SIGKILL to the next step on all ranks."""

    def read(data: Data) -> float | None:
        return _divided(*([death["again"] for death in data[group].get(name, ())] for name in (way, peer)))

    return read


def _moved(megabytes: int) -> Callable[[Data], float | None]:
    """Read the transfer rate of state, relative to a plain socket."""
    return lambda data: next((one["ratio"]["median"] for one in data["bandwidth"] if one["megabytes"] == megabytes), None)


def _steps(name: str) -> Callable[[Data], float | None]:
    """Read the steps per second of two ranks, as the median ratio of all rounds."""

    def read(data: Data) -> float | None:
        rounds = [one["rounds"] for one in data["results"] if (one["name"], one["world"]) == (name, 2)]
        return statistics.median(seconds["ddp"] / seconds["covey"] for seconds in rounds[0]) if rounds else None

    return read


def _federated_round(clients: int) -> Callable[[Data], float | None]:
    """Read the framework's share of a round."""

    def read(data: Data) -> float | None:
        found = [one for one in data["rounds"] if (one["model"], one["clients"]) == ("62 k", clients) and one.get("flower")]
        return found[0]["median"] / found[0]["flower"]["median"] if found else None

    return read


def _durable(data: Data) -> float | None:
    """Return the ratio of updates per second of CPU time with and without a log."""
    rates = {(one["model"], one["servers"], one["durability"]): one["per_cpu_second"] for one in data["updates"]}
    logged, bare = rates.get(("62 k", 1, "process")), rates.get(("62 k", 1, "none"))
    return logged / bare if logged and bare else None


def _pods(peer: str, what: str) -> Callable[[Data], float | None]:
    """Read the seconds, or CPU seconds, until every pod of every job is created."""

    def read(data: Data) -> float | None:
        return _divided(*([run[what] for run in data["runs"].get(name, ())] for name in ("covey operator", peer)))

    return read


def _served(what: str) -> Callable[[Data], float | None]:
    """Read the transfer rate of complete parameters through two servers."""

    def read(data: Data) -> float | None:
        found = [one for one in data["whole"] if one["what"].startswith(f"{what}, ")]
        return found[0]["raw"]["median"] / found[0]["covey"]["median"] if found else None

    return read


def _rows(data: Data) -> float | None:
    """Return the ratio of table rows per second."""
    return _divided([data["rows"].get("copies 0", 0.0)], [data["rows"].get("torch.distributed.rpc", 0.0)])


def _by_hand(data: Data) -> float | None:
    """Return the ratio of seconds until ranks started with MS_* variables run."""
    theirs: list[float] = next((found for way, found in data["samples"].items() if way.startswith("MindSpore")), [])
    return _divided(data["samples"].get("covey, by hand"), theirs)


def _divided(mine: Iterable[float] | None, theirs: Iterable[float] | None) -> float | None:
    ours, others = list(mine or ()), list(theirs or ())
    if not ours or not others or not statistics.median(others):
        return None
    return statistics.median(ours) / statistics.median(others)


LOWER, HIGHER = Better.LOWER, Better.HIGHER
RATIOS = (
    Ratio("8 ranks form, seconds / torchrun's", "formation", LOWER, _formed("covey", "torchrun", 8)),
    Ratio("8 ranks form, seconds / one import torch", "formation", LOWER, _formed("covey", "import torch", 1)),
    Ratio("memory of a worker / torchrun's", "formation", LOWER, _worker_memory),
    Ratio("1,000 nodes form, seconds / TCPStore's", "scale", LOWER, _joined),
    Ratio(
        "kill -9 to next step, seconds / torchrun's", "recovery", LOWER, _recovered("kills", "covey", "torchrun --max-restarts")
    ),
    Ratio(
        "kill -9 to next step with a spare / without", "recovery", LOWER, _recovered("spares", "small, a spare", "small, none")
    ),
    Ratio("1 MB of state, rate / plain socket's", "recovery", HIGHER, _moved(1)),
    Ratio("100 MB of state, rate / plain socket's", "recovery", HIGHER, _moved(100)),
    Ratio("small model, 2 ranks, steps per second / DDP's", "overhead", HIGHER, _steps("small")),
    Ratio("large model, 2 ranks, steps per second / DDP's", "overhead", HIGHER, _steps("large")),
    Ratio("logged updates per CPU second / unlogged", "federated", HIGHER, _durable),
    Ratio("round of 4 clients, milliseconds / Flower's", "federated", LOWER, _federated_round(4)),
    Ratio("pods of all jobs, seconds / plain loop's", "operator", LOWER, _pods("plain loop", "seconds")),
    Ratio("pods of all jobs, CPU / kopf's", "operator", LOWER, _pods("kopf", "cpu")),
    Ratio("1 MB of parameters, rate / raw socket's", "params", HIGHER, _served("1 MB, copies 0")),
    Ratio("25 MB of parameters, rate / raw socket's", "params", HIGHER, _served("25 MB, copies 0")),
    Ratio("rows per second / torch.distributed.rpc's", "params", HIGHER, _rows),
    Ratio("ranks by MS_* variables, seconds / MindSpore's", "mindspore", LOWER, _by_hand),
)
BENCHMARKS = tuple(dict.fromkeys(ratio.benchmark for ratio in RATIOS))
BRINGS = {  # by benchmark: commands that install its peers, beyond covey and torch
    "federated": "python -m bench.peers flower",
    "operator": "make kubernetes, and python -m bench.peers kopf",
    "mindspore": "python -m bench.peers mindspore",
}


# -- comparing -------------------------------------------------------------------------------------------------------


def judge(recorded: Spread, found: Iterable[float], better: Better) -> Verdict:
    """Compare the median of some trials with the record, widened by half its spread and at least by `LEAST`."""
    slack = max((recorded.high - recorded.low) / 2, LEAST * recorded.median)
    median = statistics.median(found)
    if recorded.low - slack <= median <= recorded.high + slack:
        return Verdict.SAME
    return Verdict.BETTER if (median < recorded.low) == (better is Better.LOWER) else Verdict.WORSE


def values(benchmark: str, data: Data) -> dict[str, float]:
    """Return the ratios of one run of a benchmark, by name, without those it has not measured."""
    found = {ratio.name: ratio.read(data) for ratio in RATIOS if ratio.benchmark == benchmark}
    return {name: value for name, value in found.items() if value is not None}


# -- running ---------------------------------------------------------------------------------------------------------


def run(benchmark: str, deadline: float = math.inf) -> dict[str, float]:
    """Run a quick benchmark, at most until `deadline`; return its ratios. Its output is shown only if it fails."""
    path = QUICK / f"{benchmark}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"bench.{benchmark}", "--quick"]
    began = time.monotonic()
    limit = max(min(LIMIT_S, deadline - began), 0.0)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=Path(__file__).parents[1])
    except subprocess.TimeoutExpired:
        if limit < LIMIT_S:
            raise SystemExit(
                f"the check did not finish within {CHECK_LIMIT_S / 60:g} minutes and was stopped in bench.{benchmark}: "
                "run it on a quiet machine, or select benchmarks with --only"
            ) from None
        raise SystemExit(f"bench.{benchmark} --quick did not finish within {LIMIT_S:g} s: run it alone to see why") from None
    if done.returncode:
        raise SystemExit(f"bench.{benchmark} --quick failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    print(f"bench.{benchmark}: {time.monotonic() - began:.0f} s", flush=True)
    return values(benchmark, json.loads(path.read_text())) if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the record instead of comparing with it")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="benchmarks to run, separated by commas (default: all)")
    parser.add_argument("--trials", type=int, default=0, help=f"trials of each benchmark ({TRIALS} for a record, else 1)")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"--only {','.join(unknown)} is unknown: expected some of {', '.join(BENCHMARKS)}")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > QUIET * cores:
        print(f"this machine is not quiet: load average {load:.1f} on {cores} cores", flush=True)
    return record(chosen, options.trials or TRIALS, cores) if options.record else check(chosen, options.trials or 1, cores)


def record(chosen: list[str], trials: int, cores: int) -> int:
    """Write the record: median, lowest and highest trial of each ratio. The ratios of other benchmarks are not changed."""
    ratios = json.loads(RECORD.read_text())["ratios"] if RECORD.exists() else {}
    before = os.getloadavg()[0]
    for benchmark in chosen:
        found = [run(benchmark) for _ in range(trials)]
        for ratio in RATIOS:
            measured = [one[ratio.name] for one in found if ratio.name in one]
            if ratio.benchmark == benchmark and measured:
                ratios[ratio.name] = spread(measured)._asdict()
                print(f"  {ratio.name}: {spread(measured).show('', 3)}", flush=True)
            elif ratio.benchmark == benchmark:
                print(f"  {ratio.name}: not measured; it needs: {BRINGS.get(benchmark, 'nothing else')}", flush=True)
    ordered = {ratio.name: ratios[ratio.name] for ratio in RATIOS if ratio.name in ratios}
    load = [round(before, 1), round(os.getloadavg()[0], 1)]
    RECORD.write_text(json.dumps({"cores": cores, "load": load, "ratios": ordered}, indent=2) + "\n")
    return 0


def check(chosen: list[str], trials: int, cores: int) -> int:
    """Compare with the record; a ratio that seems worse is measured again. Return 1 if one is worse or missing."""
    deadline = time.monotonic() + CHECK_LIMIT_S
    if not RECORD.exists():
        raise SystemExit(f"{RECORD.name} is missing: write it with `make bench-record` on a quiet machine")
    known = json.loads(RECORD.read_text())
    if known["cores"] != cores:
        print(f"the record was made on {known['cores']} cores, this machine has {cores}", flush=True)
    recorded = {name: Spread(**fields) for name, fields in known["ratios"].items()}
    failed = False
    for benchmark in chosen:
        found = [run(benchmark, deadline) for _ in range(trials)]
        verdicts = judged(benchmark, recorded, found)
        if Verdict.WORSE in verdicts.values():
            again = judged(benchmark, recorded, [run(benchmark, deadline) for _ in range(CONFIRM)])
            verdicts = {name: confirmed(verdict, again.get(name)) for name, verdict in verdicts.items()}
        failed |= not {Verdict.WORSE, Verdict.MISSING}.isdisjoint(verdicts.values())
        _print(benchmark, recorded, found, verdicts)
    return 1 if failed else 0


def judged(benchmark: str, recorded: Mapping[str, Spread], found: list[dict[str, float]]) -> dict[str, Verdict]:
    """Return the verdict on each recorded ratio, without those not measured of a benchmark that needs a peer."""
    ratios = [ratio for ratio in RATIOS if ratio.benchmark == benchmark and ratio.name in recorded]
    measured = {ratio: [one[ratio.name] for one in found if ratio.name in one] for ratio in ratios}
    return {
        ratio.name: judge(recorded[ratio.name], some, ratio.better) if some else Verdict.MISSING
        for ratio, some in measured.items()
        if some or benchmark not in BRINGS
    }


def confirmed(first: Verdict, again: Verdict | None) -> Verdict:
    """Return WORSE only if both measurements are worse, MISSING if the second one has not measured the ratio."""
    if first is not Verdict.WORSE:
        return first
    return again if again in (Verdict.WORSE, Verdict.MISSING) else Verdict.SAME


def _print(benchmark: str, recorded: Mapping[str, Spread], found: list[dict[str, float]], verdicts: dict[str, Verdict]) -> None:
    for ratio in RATIOS:
        if ratio.benchmark != benchmark:
            continue
        measured = [one[ratio.name] for one in found if ratio.name in one]
        if not measured:
            needed = BRINGS.get(benchmark)
            text = (
                f"skipped: not measured; it needs: {needed}"
                if needed
                else f"not measured: {verdicts.get(ratio.name, 'not in the record')}"
            )
        elif ratio.name not in recorded:
            text = f"{statistics.median(measured):.3f}, not in the record"
        else:
            text = f"{statistics.median(measured):.3f}, record {recorded[ratio.name].show('', 3)}: {verdicts[ratio.name]}"
        print(f"  {ratio.name} ({ratio.better} is better): {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
