"""Time from the command until all ranks are in a working gloo group: `covey run`, torchrun, and one `import torch`.

The clock starts before the command is spawned and stops when the last rank has finished its first all-reduce. Each rank records
that time itself, on the monotonic clock that all processes of a host share. The methods alternate, so that a slow period of the
machine affects all of them; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.process import proportional_mb, take_along
from bench.report import Aim, Spread, aims_table, machine, publish, spread, table

LIMIT_S = 120.0  # of one command
SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
LARGEST = 8
IMPORT = "import torch"
COVEY, COVEY_TORCH, TORCHRUN = "covey", "covey, torch script", "torchrun"
TORCHRUN_PART, IMPORT_FACTOR, IMPORT_SLACK_S = 0.35, 1.3, 0.5  # the aims

Samples = dict[tuple[str, int], list[dict[str, float]]]


class Way(NamedTuple):
    """One method to start N ranks of a script."""

    script: str
    launcher: Callable[[int], list[str]]


def _covey(n: int) -> list[str]:
    return [str(BIN / "covey"), "run", "-n", str(n)]


def _torchrun(n: int) -> list[str]:
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(n)]


WAYS = {
    COVEY: Way("with_covey.py", _covey),
    COVEY_TORCH: Way("plain_torch.py", _covey),
    TORCHRUN: Way("plain_torch.py", _torchrun),
}


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a directory that is also its user environment; kill it at the end if it still runs."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a command to exit with 0; otherwise end the benchmark with the command's output."""
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = -1
    if code != 0:
        output = (folder / "output").read_text(errors="replace")[-2000:]
        raise SystemExit(f"{process.args!r} exited with code {code} (-1: not within {LIMIT_S:g} s):\n{output}")


def cpu() -> float:
    """Return the CPU seconds of all ended descendants; unlike elapsed time, hardly influenced by other processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_import() -> dict[str, float]:
    """Measure one interpreter that imports torch and exits."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as name:
        folder = Path(name)
        began, used = time.monotonic(), cpu()
        with running([sys.executable, "-c", IMPORT], folder) as process:
            finish(process, folder)
            return {"ready": time.monotonic() - began, "cpu": cpu() - used}


def measure(way: Way, n: int) -> dict[str, float]:
    """Return the seconds after the command until the last rank reached each stage, and until the command ended."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as name:
        folder = Path(name)
        began, used = time.monotonic(), cpu()
        with running([*way.launcher(n), str(SCRIPTS / way.script), name], folder) as process:
            finish(process, folder)
            ended = time.monotonic() - began
        stamps = stamps_in(folder)
        if len(stamps) != n:
            raise SystemExit(f"{process.args!r} wrote {len(stamps)} stamps, expected {n}")
        stages = ("started", "imported", "joined", "ready")
        return {stage: max(stamp[stage] for stamp in stamps) - began for stage in stages} | {
            "ended": ended,
            "cpu": cpu() - used,
        }


def stamps_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem.isdigit()]


def measure_memory(way: Way, n: int) -> dict[str, Any]:
    """Return proportional set sizes in MB while all ranks wait: of each worker, and of all other processes of the command."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as name:
        folder = Path(name)
        hold = folder / "hold"
        hold.touch()
        with running([*way.launcher(n), str(SCRIPTS / way.script), name], folder) as process:
            deadline = time.monotonic() + LIMIT_S
            while len(stamps_in(folder)) < n and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            workers = {stamp["pid"] for stamp in stamps_in(folder)}
            family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            sizes = {pid: proportional_mb(pid) for pid in family}
            hold.unlink()
            finish(process, folder)
    return {
        "worker_mb": spread(sizes[pid] for pid in workers)._asdict(),
        "workers_mb": sum(sizes[pid] for pid in workers),
        "others_mb": sum(size for pid, size in sizes.items() if pid not in workers),
    }


def take_turns(worlds: list[int], rounds: int) -> Samples:
    """Measure one import and every method at every N once per round; every other round in reverse order."""
    order = [(IMPORT, 1), *((way, n) for n in worlds for way in WAYS)]
    samples: Samples = {key: [] for key in order}
    for number in range(rounds):
        for way, n in order if number % 2 == 0 else reversed(order):
            sample = measure_import() if way == IMPORT else measure(WAYS[way], n)
            samples[(way, n)].append(sample)
            print(f"round {number + 1} of {rounds}: {way}, N={n}: {sample['ready']:.2f} s", file=sys.stderr, flush=True)
    return samples


def column(samples: Samples, way: str, n: int, stage: str = "ready") -> list[float]:
    return [sample[stage] for sample in samples[(way, n)]]


def ratio(samples: Samples, n: int, way: str, peer: str, peer_n: int) -> Spread:
    """Return the ratio of this method's seconds to the peer's, per round."""
    pairs = zip(column(samples, way, n), column(samples, peer, peer_n), strict=True)
    return spread(mine / theirs for mine, theirs in pairs)


def aims(samples: Samples, n: int) -> list[Aim]:
    mine = ratio(samples, n, COVEY, TORCHRUN, n)
    ready = statistics.median(column(samples, COVEY, n))
    allowed = IMPORT_FACTOR * statistics.median(column(samples, IMPORT, 1)) + IMPORT_SLACK_S
    limit = f"at most {IMPORT_FACTOR:g} x + {IMPORT_SLACK_S:g} s = {allowed:.2f} s"
    return [
        Aim(f"N={n}, against torchrun", f"at most {TORCHRUN_PART:g} x", mine.show(" x"), mine.median <= TORCHRUN_PART),
        Aim(f"N={n}, against one {IMPORT}", limit, f"{ready:.2f} s", ready <= allowed),
    ]


def formation_table(samples: Samples, worlds: list[int]) -> str:
    def median(way: str, n: int, stage: str) -> str:
        return f"{statistics.median(column(samples, way, n, stage)):.2f}"

    one = spread(column(samples, IMPORT, 1))
    rows = [[IMPORT, "1", one.show(), f"{one.mad:.2f}", "", "", "", "", "", median(IMPORT, 1, "cpu")]]
    for n in worlds:
        for way in WAYS:
            ready = spread(column(samples, way, n))
            ratios = [ratio(samples, n, way, TORCHRUN, n).show(), ratio(samples, n, way, IMPORT, 1).show()]
            stages = [median(way, n, stage) for stage in ("started", "joined", "ended", "cpu")]
            rows.append([way, str(n), f"**{ready.show()}**", f"{ready.mad:.2f}", *ratios, *stages])
    header = ["way", "N", "ready (s)", "MAD", "x torchrun", f"x {IMPORT}"]
    header += ["last rank started (s)", "last rank joined (s)", "command ended (s)", "CPU of all processes (s)"]
    return table(header, rows)


def memory_table(memory: dict[str, dict[str, Any]], n: int) -> str:
    rows = [
        [way, f"{Spread(**found['worker_mb']).show(digits=0)}", f"{found['workers_mb']:.0f}", f"{found['others_mb']:.0f}"]
        for way, found in memory.items()
    ]
    return table(["way", f"PSS per worker (MB), N={n}", "all workers", "other processes of the command"], rows)


def draw(samples: Samples, worlds: list[int], memory: dict[str, dict[str, Any]]) -> Callable[[Any], None]:
    """Return a function that draws seconds by N, and megabytes per worker."""

    def on(figure: Any) -> None:
        seconds, megabytes = figure.subplots(1, 2, width_ratios=[3, 1])
        for place, way in enumerate(WAYS):
            found = [spread(column(samples, way, n)) for n in worlds]
            errors = [[s.median - s.low for s in found], [s.high - s.median for s in found]]
            at = [index + (place - 1) * 0.27 for index in range(len(worlds))]
            seconds.bar(at, [s.median for s in found], 0.25, yerr=errors, capsize=3, label=way)
        one = statistics.median(column(samples, IMPORT, 1))
        seconds.axhline(one, linestyle="--", color="black", label=f"one {IMPORT}")
        seconds.set_xticks(range(len(worlds)), [f"N={n}" for n in worlds])
        seconds.set_ylabel("seconds from the command to a working group")
        seconds.legend()
        megabytes.bar(list(memory), [found["worker_mb"]["median"] for found in memory.values()])
        megabytes.set_ylabel("PSS per worker (MB)")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one round, only N={LARGEST}")
    parser.add_argument("--rounds", type=int, default=0, help="measurements of each method (5; 1 with --quick)")
    options = parser.parse_args()
    worlds = [LARGEST] if options.quick else [2, 4, LARGEST]
    about = machine()
    measure_import()  # fills the page cache, so that no first round reads from the disk
    samples = take_turns(worlds, options.rounds or (1 if options.quick else 5))
    memory = {way: measure_memory(WAYS[way], LARGEST) for way in (COVEY, TORCHRUN)}
    found = aims(samples, LARGEST)
    data = {
        "machine": about,
        "quick": options.quick,
        "samples": [{"way": way, "n": n, "seconds": rows} for (way, n), rows in samples.items()],
        "memory": memory,
        "aims": [aim._asdict() for aim in found],
    }
    sections = [aims_table(found), formation_table(samples, worlds), memory_table(memory, LARGEST)]
    publish("formation", data, sections, draw(samples, worlds, memory))


if __name__ == "__main__":
    take_along()
    main()
