"""MindSpore 2.10 on CPU as a peer: time until all ranks are assigned, and the reaction to SIGKILL of a worker.

Both form a cluster of N + 1 processes started by MS_* variables, each with its own import; `covey run`, which forks its
workers, is measured as well. After the death of one of two workers these times are measured: until MindSpore's survivor
continues or exits; until the same script under `covey run --framework mindspore` has ended; and until both ranks of covey's
healing loop under `covey run -n 2` do their next step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import peers
from bench.formation import BIN, COVEY, SCRIPTS, WAYS, measure
from bench.process import take_along
from bench.report import Aim, Spread, aims_table, machine, publish, spread, table
from bench.training import deaths
from covey.transport.address import find_free_port

VERSION = "2.10.0"
MINDSPORE, BY_HAND, RUN = f"MindSpore {VERSION}", "covey, by hand", "covey run"
LIMIT_S = 120.0
PART, END_PART = 0.35, 0.1  # the aims
SOURCE = Path(__file__).resolve().parents[1] / "src"


def start(command: list[str], n: int, folder: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """Start a scheduler and n workers of one script, by MS_* variables; return the processes, the scheduler first."""
    common = {"MS_WORKER_NUM": str(n), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(find_free_port("127.0.0.1"))}
    base = os.environ | common | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder), "XDG_CONFIG_HOME": str(folder)}
    found = []
    for number in range(-1, n):
        role = {"MS_ROLE": "MS_SCHED"} if number < 0 else {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(number)}
        with (folder / f"{number}.log").open("wb") as log:
            words = [*command, str(folder), *arguments]
            found.append(subprocess.Popen(words, env=base | role, cwd=folder, stdout=log, stderr=log, start_new_session=True))
    return found


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def await_(happened: Callable[[], bool], processes: list[subprocess.Popen[bytes]], what: str) -> float:
    """Wait for an event and return its monotonic time. A failed process, or a timeout, ends the benchmark."""
    limit = time.monotonic() + LIMIT_S
    while not happened():
        bad = [process.returncode for process in processes if process.poll()]
        if bad or time.monotonic() > limit:
            raise SystemExit(f"{what} did not occur ({'exit codes ' + str(bad) if bad else f'not within {LIMIT_S:g} s'})")
        time.sleep(0.01)
    return time.monotonic()


def stamped(folder: Path, kind: str) -> dict[int, list[float]]:
    """Return the times of the stamps of a kind, by rank."""
    found: dict[int, list[float]] = {}
    for path in folder.glob("*.stamps"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.stem)] = [float(words[2]) for words in lines if words[0] == kind and len(words) == 4]
    return found


def form_mindspore(python: Path, n: int) -> float:
    """Return the seconds from the first process until the last rank is assigned."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-", ignore_cleanup_errors=True) as name:
        folder, began = Path(name), time.monotonic()
        processes = start([str(python), str(SCRIPTS / "mindspore_ranks.py")], n, folder, "0")
        try:
            await_(lambda: sum(map(bool, stamped(folder, "joined").values())) == n, processes, "MindSpore's last rank")
            return max(at for stamps in stamped(folder, "joined").values() for at in stamps) - began
        finally:
            end(processes)


def form_by_hand(n: int) -> float:
    """Return the same with covey."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-", ignore_cleanup_errors=True) as name:
        folder, began = Path(name), time.monotonic()
        processes = start([sys.executable, str(SCRIPTS / "with_covey.py")], n, folder)
        try:
            await_(lambda: len(list(folder.glob("[0-9].json"))) == n, processes, "covey's last rank")
            return max(float(json.loads(path.read_text())["joined"]) for path in folder.glob("[0-9].json")) - began
        finally:
            end(processes)


def death(python: Path) -> dict[str, Any]:
    """Send SIGKILL to one of two workers; return the seconds until the other exits (at most LIMIT_S), and its later steps."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        processes = start([str(python), str(SCRIPTS / "mindspore_ranks.py")], 2, folder, "100000")
        try:
            await_(lambda: min(map(len, stamped(folder, "step").values()), default=0) > 20, processes, "MindSpore's steps")
            processes[2].kill()
            at, survivor = time.monotonic(), processes[1]
            while survivor.poll() is None and time.monotonic() - at < LIMIT_S:
                time.sleep(0.05)
            later = [t for t in stamped(folder, "step")[0] if t > at + 0.5]
            return {"seconds": time.monotonic() - at, "code": survivor.poll(), "steps": len(later)}
        finally:
            end(processes)


def death_under_covey(python: Path) -> float:
    """Send SIGKILL to one of two MindSpore workers; return the seconds until `covey run` has reported it and ended."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        words = ["-m", "covey.cli.main", "run", "-n", "2", "--framework", "mindspore"]
        with (folder / "output").open("wb") as output:
            run = subprocess.Popen(
                [str(python), *words, str(SCRIPTS / "mindspore_ranks.py"), name, "100000"],
                env=os.environ | {"PYTHONPATH": str(SOURCE), "XDG_RUNTIME_DIR": name, "XDG_CONFIG_HOME": name},
                cwd=folder,
                stdout=output,
                stderr=output,
            )
        try:
            await_(lambda: min(map(len, stamped(folder, "step").values()), default=0) > 20, [run], "MindSpore's steps")
            os.kill(int((folder / "1.stamps").read_text().split()[3]), signal.SIGKILL)
            at = time.monotonic()
            run.wait(LIMIT_S)
            return time.monotonic() - at
        finally:
            end([run])


def draw(formed: dict[str, Spread]) -> Callable[[Any], None]:
    def on(figure: Any) -> None:
        axes = figure.subplots()
        axes.barh(list(formed), [s.median for s in formed.values()])
        axes.set_xlabel("seconds from the command to the last rank")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    about = machine() | {"mindspore": VERSION}
    python = peers.python_of("mindspore", install=not options.quick)
    if python is None:
        return
    n, rounds = (2, 1) if options.quick else (4, 3)
    samples: dict[str, list[float]] = {MINDSPORE: [], BY_HAND: [], RUN: []}
    for _ in range(rounds):
        samples[MINDSPORE].append(form_mindspore(python, n))
        samples[BY_HAND].append(form_by_hand(n))
        samples[RUN].append(measure(WAYS[COVEY], n)["joined"])
    formed = {way: spread(values) for way, values in samples.items()}
    ratio = spread(b / m for b, m in zip(samples[BY_HAND], samples[MINDSPORE], strict=True))
    aims = [Aim(f"N={n} by hand, against MindSpore", f"at most {PART} x", ratio.show(" x"), ratio.median <= PART)]
    sections = [table(["way", "from the command to the last rank (s)"], [[way, s.show()] for way, s in formed.items()])]
    data: dict[str, Any] = {"machine": about, "quick": options.quick, "samples": samples}
    if not options.quick:
        data["death"] = found = death(python) | {"under_covey": death_under_covey(python)}
        command = [str(BIN / "covey"), "run", "-n", "2", str(SCRIPTS / "healing_loop.py")]
        mine = spread(d.again for d in deaths("covey", command, ["0", "0", "0"], world=2, count=5)).scaled(1000)
        ended = "still runs" if found["code"] is None else f"exits with code {found['code']}"
        sections.append(
            f"SIGKILL of one of two workers: MindSpore's survivor does {found['steps']} further steps and {ended} after "
            f"{found['seconds']:.1f} s. The same script under `covey run --framework mindspore` ends, with a report, after "
            f"{found['under_covey']:.1f} s. With covey's own loop both ranks do their next step after {mine.show(' ms', 0)}."
        )
        part = found["under_covey"] / found["seconds"]
        what = "a death ends MindSpore's script under covey run, against MindSpore"
        aims.append(Aim(what, f"at most {END_PART} x", f"{part:.3f} x", part <= END_PART))
        aims.append(Aim("after a death the remaining ranks resume", "within 1 s", mine.show(" ms", 0), mine.high <= 1000))
    data["aims"] = [aim._asdict() for aim in aims]
    publish("mindspore", data, [aims_table(aims), *sections], draw(formed))


if __name__ == "__main__":
    take_along()
    main()
