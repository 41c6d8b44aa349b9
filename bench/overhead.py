"""Overhead of healing without failures: steps per second of covey.Loop and of plain DistributedDataParallel.

Both models are in the same processes and alternate: a round is some steps of one, twice as many of the other, and again of the
first, so that a slow period of the machine affects both; a ratio is taken within a round. Gloo over loopback, one thread per
rank, batch 32, batches in memory. The loop is complete: hooks, numbered collectives, seeding and commit of every step. The cost
of covey.Data's seeding of every batch is given separately. Heartbeats are sent all the time, so they are included in both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.formation import BIN, SCRIPTS, finish, running
from bench.process import take_along
from bench.report import Aim, aims_table, machine, publish, spread, table

SMALL, LARGE = "784 256 10", "784 2160 2160 2160 2160 2160 2160 10"  # widths of layers
AIM, SHOWN = 0.99, 0.97
RESAMPLES, CONFIDENCE = 4000, 0.95
BATCHES = 200  # of data, to time its loading


class Case(NamedTuple):
    """A model size, a number of ranks, and the steps of a block; a round has two blocks of each method."""

    name: str
    widths: str
    world: int
    steps: int


CASES = [Case("small", SMALL, 2, 30), Case("small", SMALL, 4, 20), Case("large", LARGE, 2, 2), Case("large", LARGE, 4, 1)]


class Result(NamedTuple):
    case: Case
    parameters: int
    rounds: list[dict[str, float]]

    @property
    def ratios(self) -> list[float]:
        """covey's steps per second divided by DistributedDataParallel's, per round."""
        return [seconds["ddp"] / seconds["covey"] for seconds in self.rounds]

    def rate(self, way: str) -> float:
        return statistics.median(2 * self.case.steps / seconds[way] for seconds in self.rounds)

    def cpu_ms(self, way: str) -> float:
        """Return the CPU milliseconds of rank 0 per step, which other processes hardly influence."""
        return 1000 * statistics.median(seconds[f"{way} cpu"] for seconds in self.rounds) / (2 * self.case.steps)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by bootstrapping."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    edge = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return medians[edge], medians[-edge - 1]


def measure(case: Case, rounds: int) -> Result:
    """Measure some rounds in one set of processes."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as name:
        folder = Path(name)
        script = [str(SCRIPTS / "two_models.py"), name, case.widths, str(rounds), str(case.steps)]
        with running([str(BIN / "covey"), "run", "-n", str(case.world), *script], folder) as run:
            finish(run, folder)
        found = json.loads((folder / "seconds.json").read_text())
    return Result(case, found["parameters"], found["rounds"])


def take_turns(cases: list[Case], starts: int, rounds: int) -> list[Result]:
    """Measure every case in `starts` sets of processes, `rounds` rounds in each."""
    results: dict[Case, Result] = {}
    for number in range(starts):
        for case in cases:
            found = measure(case, rounds)
            known = results.get(case)
            results[case] = found._replace(rounds=[*known.rounds, *found.rounds]) if known else found
            text = f"start {number + 1} of {starts}: {case.name}, N={case.world}: {statistics.median(found.ratios):.3f}"
            print(text, file=sys.stderr, flush=True)
    return list(results.values())


def loading() -> dict[str, float]:
    """Return the microseconds to load a batch of 32 from memory, by covey.Data and by torch's DataLoader alone."""
    import torch

    import covey
    from covey.training.data.sample_schedule import RankShare

    torch.set_num_threads(1)
    dataset = torch.utils.data.TensorDataset(torch.randn(32 * BATCHES, 784), torch.randint(0, 10, (32 * BATCHES,)))
    data = covey.Data(dataset, 32)

    def each(batches: Iterable[Any]) -> float:
        began = time.perf_counter()
        count = sum(1 for _ in batches)
        return 1e6 * (time.perf_counter() - began) / count

    def seeded() -> float:
        return each(data.batches(RankShare(data.make_schedule(seed=0, world=1, accumulate=1), 0, None), 0))

    def plain() -> float:
        return each(torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True))

    pairs = [(seeded(), plain()) for _ in range(7)]
    return {"covey": statistics.median(mine for mine, _ in pairs), "torch": statistics.median(theirs for _, theirs in pairs)}


def aims(results: list[Result]) -> list[Aim]:
    found = []
    for result in results:
        low, high = interval(result.ratios)
        median = statistics.median(result.ratios)
        what = f"{result.case.name}, N={result.case.world}: steps/s, DDP = 1"
        limit = f"at least {AIM:g}, shown {SHOWN:g}"
        found.append(Aim(what, limit, f"{median:.3f} [{low:.3f}..{high:.3f}]", median >= AIM and low >= SHOWN))
    return found


def results_table(results: list[Result]) -> str:
    rows = []
    for result in results:
        low, high = interval(result.ratios)
        every = spread(result.ratios)
        rates = [f"{result.rate(way):.1f}" for way in ("ddp", "covey")]
        shown = [f"**{every.median:.3f}**", f"{low:.3f}..{high:.3f}", f"{every.low:.2f}..{every.high:.2f}", f"{every.n}"]
        cpu = [f"{result.cpu_ms(way):.2f}" for way in ("ddp", "covey")]
        rows.append([f"{result.parameters / 1e6:.1f} M", str(result.case.world), *rates, *shown, *cpu])
    header = ["parameters", "N", "DDP (steps/s)", "covey.Loop (steps/s)", "median ratio", "95 % of it", "all rounds", "rounds"]
    header += ["DDP, CPU of a rank (ms per step)", "covey.Loop, CPU"]
    return table(header, rows)


def loading_line(found: dict[str, float], results: list[Result]) -> str:
    more = found["covey"] - found["torch"]
    step = 1e6 / results[0].rate("ddp")
    return (
        f"Loading a batch of 32 from memory: covey.Data {found['covey']:.0f} us, torch's DataLoader {found['torch']:.0f} us;"
        f" the difference, the seeding, is {100 * more / step:.1f} % of a step of the small model at"
        f" N={results[0].case.world}."
    )


def draw(results: list[Result]) -> Callable[[Any], None]:
    """Return a function that draws every round's ratio, and the interval of the median."""

    def on(figure: Any) -> None:
        axes = figure.subplots()
        for place, result in enumerate(results):
            ratios = result.ratios
            low, high = interval(ratios)
            median = statistics.median(ratios)
            axes.scatter([place - 0.15] * len(ratios), ratios, s=12, alpha=0.5, color="tab:blue")
            axes.errorbar(place + 0.1, median, yerr=[[median - low], [high - median]], fmt="o", capsize=5, color="tab:orange")
        axes.axhline(1.0, linestyle="--", color="black")
        axes.set_xticks(range(len(results)), [f"{r.parameters / 1e6:.1f} M, N={r.case.world}" for r in results])
        axes.set_ylabel("steps per second of covey.Loop, DDP = 1")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only two ranks, three rounds in one set of processes")
    parser.add_argument("--starts", type=int, default=0, help="sets of processes (4; 1 with --quick)")
    parser.add_argument("--rounds", type=int, default=0, help="rounds in each set of processes (10; 3 with --quick)")
    options = parser.parse_args()
    about = machine()
    cases = [case for case in CASES if case.world == 2 or not options.quick]
    starts, rounds = (1, 3) if options.quick else (4, 10)
    results = take_turns(cases, options.starts or starts, options.rounds or rounds)
    loaded = loading()
    found = aims(results)
    data = {
        "machine": about,
        "quick": options.quick,
        "results": [{**r.case._asdict(), "parameters": r.parameters, "rounds": r.rounds} for r in results],
        "loading_us": loaded,
        "aims": [aim._asdict() for aim in found],
    }
    sections = [aims_table(found), results_table(results), loading_line(loaded, results)]
    publish("overhead", data, sections, draw(results))


if __name__ == "__main__":
    take_along()
    main()
