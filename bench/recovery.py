"""Time from SIGKILL of one of four workers to the next step on all ranks: covey, torchrun (both also with loaders), torchft.

A 784-256-10 perceptron, batch 32, gloo, one thread per rank. Each rank records every step it commits; the killed rank and the
time are random. "Next step" is the first one that all ranks commit after the kill. For torchrun that is a repeated step, so the
time to its first new step is given as well. torchrun gets the variable without which it hangs after a death, and a checkpoint
every 100 steps. Also measured: recovery with more state, bandwidth of the state transfer, and recovery of a stopped worker.

torchft does not restart dead replicas: a launcher written for this benchmark does, immediately. Its lighthouse has the default
settings. It is installed in a separate environment.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
from collections.abc import Callable
from typing import Any

from bench import bandwidth, peers
from bench.formation import BIN, SCRIPTS
from bench.process import take_along
from bench.report import Aim, Spread, aims_table, machine, publish, spread, table
from bench.training import PHASES, Death, deaths, training

WORLD = 4
SPARE_MEDIAN_S = {0: 0.1, 100: 0.25}  # the aims with a spare, by megabytes
SPARE_LOAD = 0.02
SLOW_S = 3.0  # seconds that a script with a slow start needs before its loop
COVEY, LOADERS = "covey", "covey, num_workers=2"
TORCHRUN, TORCHRUN_LOADERS, TORCHFT = "torchrun --max-restarts", "torchrun --max-restarts, num_workers=2", "torchft 0.2.0"
PEERS = {COVEY: TORCHRUN, LOADERS: TORCHRUN_LOADERS}  # the peer of each method
SIZES_MB = (1, 100, 1000)
SILENCE_S = 0.5  # node timeout; with a shorter one, processes on a busy machine are declared dead
MEDIAN_S, WORST_S, TIMES, PART = 0.15, 0.5, 50, 0.6  # the aims

Found = dict[str, list[Death]]


def covey(*options: str) -> list[str]:
    return [str(BIN / "covey"), "run", "-n", str(WORLD), *options, str(SCRIPTS / "healing_loop.py")]


def torchrun() -> list[str]:
    start = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", str(BIN / "torchrun"), "--standalone"]
    return [*start, "--nproc-per-node", str(WORLD), "--max-restarts", "100", str(SCRIPTS / "restarted_loop.py")]


def measure_kills(kills: int, peer_kills: int, *, quick: bool) -> Found:
    far = (50, 150)
    found = {
        COVEY: deaths(COVEY, covey(), ["0", "0", "0"], world=WORLD, count=kills),
        TORCHRUN: deaths(TORCHRUN, torchrun(), ["0"], world=WORLD, count=peer_kills, between=far),
    }
    if not quick:
        found[LOADERS] = deaths(LOADERS, covey(), ["2", "0", "0"], world=WORLD, count=kills)
        found[TORCHRUN_LOADERS] = deaths(TORCHRUN_LOADERS, torchrun(), ["2"], world=WORLD, count=peer_kills, between=far)
    python = peers.python_of("torchft", install=not quick)
    if python is not None:
        launch = [str(python), str(SCRIPTS / "torchft_launch.py"), str(WORLD)]
        found[TORCHFT] = deaths(TORCHFT, launch, [], world=WORLD, count=peer_kills, between=far)
    return found


def measure_sizes(sizes: tuple[int, ...], kills: int) -> dict[int, list[Death]]:
    return {
        size: deaths(f"{size} MB", covey(), ["0", str(size), "0"], world=WORLD, count=kills, between=(5, 15)) for size in sizes
    }


def measure_spares(kills: int, *, quick: bool) -> dict[str, list[Death]]:
    """Measure the training with and without a spare: with a small model, with 100 MB of state, and with a slow start."""
    found: dict[str, list[Death]] = {}
    cases = [("small", 0, 0.0), ("100 MB", 100, 0.0), (f"{SLOW_S:g} s before its loop", 0, SLOW_S)]
    for what, megabytes, slow_s in cases[:1] if quick else cases:
        for spares in (1, 0):
            name = f"{what}, {'a spare' if spares else 'none'}"
            command, arguments = covey("--spares", str(spares)), ["0", str(megabytes), str(slow_s)]
            found[name] = deaths(name, command, arguments, world=WORLD, count=kills, between=(5, 15), spare=bool(spares))
    return found


def measure_standing_by(for_s: float) -> float:
    with training(covey("--spares", "1"), ["0", "0", "0"], WORLD) as run:
        run.await_spare(1)
        return run.spare_load(for_s)


def measure_hangs(kills: int) -> list[Death]:
    command = covey("--node-timeout", f"{SILENCE_S:g}")
    return deaths(
        f"stopped, --node-timeout {SILENCE_S:g}", command, ["0", "0", "0"], world=WORLD, count=kills, how=signal.SIGSTOP
    )


def seconds(found: list[Death]) -> Spread:
    return spread(death.again for death in found)


def aims(kills: Found, moved: list[dict[str, Any]], spares: Found, load: float) -> list[Aim]:
    found = [Aim("a waiting spare: fraction of a core", f"at most {SPARE_LOAD:.0%}", f"{load:.2%}", load <= SPARE_LOAD)]
    for megabytes, limit_s in SPARE_MEDIAN_S.items():
        with_one = spares.get(f"{f'{megabytes} MB' if megabytes else 'small'}, a spare")
        if with_one is None:
            continue
        mine = seconds(with_one).scaled(1000)
        what = f"a spare, {megabytes} MB more state: kill to next step"
        found.append(Aim(what, f"median {1000 * limit_s:g} ms", mine.show(" ms", 0), mine.median <= 1000 * limit_s))
    for way, peer in ((way, peer) for way, peer in PEERS.items() if way in kills):
        theirs = seconds(kills[peer]).median
        mine = seconds(kills[way]).scaled(1000)
        limit = f"median {1000 * MEDIAN_S:g} ms, worst {1000 * WORST_S:g} ms"
        held = mine.median <= 1000 * MEDIAN_S and mine.high <= 1000 * WORST_S
        found.append(Aim(f"{way}: kill to next step", f"at most {limit}", mine.show(" ms", 0), held))
        times = 1000 * theirs / mine.median
        found.append(Aim(f"{way}: times faster than torchrun", f"at least {TIMES}", f"{times:.0f}", times >= TIMES))
        redone = max(death.redone for death in kills[way])
        found.append(Aim(f"{way}: steps redone", "0", str(redone), redone == 0))
    for row in moved:
        ratio = Spread(**row["ratio"])
        what = f"{row['megabytes']} MB of state, against a plain socket"
        found.append(Aim(what, f"at least {PART:g} x", ratio.show(" x"), ratio.median >= PART))
    return found


def kills_table(kills: Found) -> str:
    rows = []
    for way, found in kills.items():
        again, ahead = seconds(found).scaled(1000), spread(death.ahead for death in found).scaled(1000)
        redone = spread(death.redone for death in found)
        rows.append(
            [way, str(again.n), f"**{again.show(digits=0)}**", f"{again.mad:.0f}", ahead.show(digits=0), redone.show(digits=0)]
        )
    return table(["way", "kills", "next step on all ranks (ms)", "MAD", "first new step (ms)", "steps redone"], rows)


def phases(found: list[Death]) -> list[float]:
    """Return the median milliseconds after the kill until the replacement reached each phase, and all ranks the next step."""
    medians = [statistics.median(d.phases[phase] for d in found if phase in d.phases) for phase in PHASES]
    return [1000 * value for value in [*medians, seconds(found).median]]


def waterfalls(kills: Found, sizes: dict[int, list[Death]]) -> Found:
    """Return the deaths of covey's trainings, whose replacements record their phases."""
    return {way: kills[way] for way in PEERS if way in kills} | {f"{size} MB": found for size, found in sizes.items()}


def phases_table(ways: dict[str, list[Death]]) -> str:
    header = ["median ms after the kill", "script's first line", "joined", "model built", "state attached", "next step on all"]
    return table(header, [[way, *(f"{value:.0f}" for value in phases(found))] for way, found in ways.items()])


def sizes_table(sizes: dict[int, list[Death]], small: list[Death]) -> str:
    """Return a table by size. State arrives between "built" and "attached"; a small model's time there is the fixed cost."""
    base = statistics.median(d.phases["attached"] - d.phases["built"] for d in small)
    rows = []
    for size, found in sizes.items():
        fetch = spread(d.phases["attached"] - d.phases["built"] for d in found)
        beyond = max(fetch.median - base, 1e-9)
        speed = f"{size / 1000 / beyond:.2f}" if size >= SIZES_MB[1] else ""
        rows.append([f"{size} MB", seconds(found).scaled(1000).show(digits=0), fetch.scaled(1000).show(digits=0), speed])
    header = [
        "frozen parameters",
        "next step on all ranks (ms)",
        "of it attaching the state (ms)",
        "GB/s beyond a small model's",
    ]
    return table(header, rows)


def spares_table(spares: Found) -> str:
    rows = [[way, str(len(found)), seconds(found).scaled(1000).show(digits=0)] for way, found in spares.items()]
    return table(["training, spare", "kills", "next step on all ranks (ms)"], rows)


def moved_table(moved: list[dict[str, Any]]) -> str:
    columns = ("fetch", "raw", "fresh", "ratio")
    rows = [[f"{row['megabytes']} MB", *(Spread(**row[column]).show() for column in columns)] for row in moved]
    return table(["state", "covey's transfer (GB/s)", "plain socket", "plain socket into fresh memory", "covey x plain"], rows)


def draw(kills: Found, sizes: dict[int, list[Death]]) -> Callable[[Any], None]:
    """Return a function that draws every death on a logarithmic scale, and the phases of a recovery."""

    def on(figure: Any) -> None:
        every, parts = figure.subplots(1, 2)
        for place, (way, found) in enumerate(kills.items()):
            every.scatter([place + random.uniform(-0.2, 0.2) for _ in found], [1000 * d.again for d in found], s=14, label=way)
        every.set_xticks([])
        every.set_yscale("log")
        every.set_ylabel("ms from kill -9 to the next step on all ranks")
        every.legend()
        ways = waterfalls(kills, sizes)
        labels = ("until the script's first line", "joining", "building the model", "attaching the state", "the step itself")
        ends = [phases(found) for found in ways.values()]
        for number, label in enumerate(labels):
            left = [end[number - 1] if number else 0.0 for end in ends]
            widths = [end[number] - start for end, start in zip(ends, left, strict=True)]
            parts.barh(list(ways), widths, left=left, label=label)
        parts.set_xlabel("median ms after the kill")
        parts.invert_yaxis()
        parts.legend()

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few kills, no loaders, little state")
    parser.add_argument("--kills", type=int, default=0, help="kills of each kind of covey's training (24; 4 with --quick)")
    options = parser.parse_args()
    about = machine()
    quick = options.quick
    kills = measure_kills(options.kills or (4 if quick else 24), 1 if quick else 5, quick=quick)
    sizes = measure_sizes(SIZES_MB[1:2] if quick else SIZES_MB, 1 if quick else 3)
    spares = measure_spares(options.kills or (2 if quick else 24), quick=quick)
    load = measure_standing_by(5.0 if quick else 60.0)
    hangs = measure_hangs(1 if quick else 6)
    moved = [bandwidth.measure(size, 5 if quick else 15) for size in (SIZES_MB[:2] if quick else SIZES_MB)]
    found = aims(kills, moved, spares, load)
    data = {
        "machine": about,
        "quick": quick,
        "kills": {way: [death._asdict() for death in rows] for way, rows in kills.items()},
        "sizes": {size: [death._asdict() for death in rows] for size, rows in sizes.items()},
        "spares": {way: [death._asdict() for death in rows] for way, rows in spares.items()},
        "spare_load": load,
        "hangs": [death._asdict() for death in hangs],
        "bandwidth": moved,
        "aims": [aim._asdict() for aim in found],
    }
    after = seconds(hangs).show(" s")
    hung = f"A stopped worker (SIGSTOP), `--node-timeout {SILENCE_S:g}`: {after} to the next step on all ranks."
    sections = [
        aims_table(found),
        kills_table(kills),
        phases_table(waterfalls(kills, sizes)),
        sizes_table(sizes, kills[COVEY]),
        spares_table(spares),
    ]
    sections += [hung, moved_table(moved)]
    publish("recovery", data, sections, draw(kills, sizes))


if __name__ == "__main__":
    take_along()
    main()
