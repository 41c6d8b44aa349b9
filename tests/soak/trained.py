"""A real training under `covey chaos`, against the same training undisturbed: `python -m tests.soak.trained --minutes 10`.

Four ranks with everything that could make two runs differ (`tests.processes.healing`). The logs and checkpoints lie on a small
file system of their own where that can be mounted, so that the disk can be filled. When the chaos is over the training is told
its last step; its hash must then be that of a training of as many steps that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.processes import healing
from tests.processes.command import Shell, shells

WORLD = 4
PACE_S = 0.02  # of a step, beside what it computes
SILENCE_S = 6  # shorter than the longest stop, longer than a busy machine takes to start a scheduler again
LONG_S = 600.0
STEPS_MAX = 10**7
MORE_STEPS = 60  # after the chaos
FAULTS = "kill,stop,slow,cut,disk,clock,scheduler,template"
STEP = '            fault(loop.step, "between")\n'
PACED = (
    STEP
    + """            time.sleep(float(os.environ.get("PACE", "0")))
            if (folder / "last").exists() and loop.step >= int((folder / "last").read_text()):
                break
"""
)
SCRIPT = healing.SCRIPT.replace(STEP, PACED)
assert SCRIPT != healing.SCRIPT


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 64) -> Iterator[bool]:
    """A file system of its own for what a run writes; False where none can be mounted."""
    folder.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def disturbed(shell: Shell, silence_s: int, *chaos: str) -> tuple[dict[str, Any], int]:
    """The training with faults until they are over; what `covey chaos --json` said, and its last step."""
    clock = shell.folder / "clock"
    env = {"COVEY_STRATEGY": healing.LADDER, "STEPS": str(STEPS_MAX), "PACE": str(PACE_S)}
    marks = shell.logs / "marks"
    marks.mkdir()
    shell.script(SCRIPT, "train.py")
    words = ["run", "-n", str(WORLD), "--node-timeout", str(silence_s), "train.py", str(marks)]
    run = shell.covey(*words, env=env | {"COVEY_FAULT_CLOCK": str(clock)})
    for rank in range(WORLD):
        shell.heard(rank, "BEGINS at 0")
    found = harm(shell, *chaos)
    assert run.alive, f"the run ended under faults of seed {found['seed']}\n{run.tail()}"
    last = max(node["step"] for node in shell.nodes()) + MORE_STEPS
    say_last(marks, last)
    assert run.wait(LONG_S) == 0, run.tail()
    return found, last


def say_last(marks: Path, step: int) -> None:
    """In one move: every rank sees all of it or nothing, and none has come that far."""
    (marks / "last.new").write_text(str(step))
    (marks / "last.new").rename(marks / "last")


def harm(shell: Shell, *words: str) -> dict[str, Any]:
    """`covey chaos` to its end; what `--json` said."""
    command = [sys.executable, "-m", "covey.cli.main", "chaos", "--json", *words]
    done = subprocess.run(command, env=shell.environ(), stdout=subprocess.PIPE, timeout=3600)
    assert done.returncode == 0, f"covey chaos ended with {done.returncode}: {done.stdout!r}\n{shell.tails()}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def undisturbed(shell: Shell, last: int) -> str:
    """The hash of the same training, alone."""
    shell.logs.mkdir(exist_ok=True)
    marks = shell.logs / "marks"
    marks.mkdir()
    say_last(marks, last)
    shell.script(SCRIPT, "train.py")
    run = shell.covey("run", "-n", str(WORLD), "train.py", str(marks), env={"STEPS": str(STEPS_MAX)})
    assert run.wait(LONG_S) == 0, run.tail()
    return healing.outcome(shell, WORLD)


def prove(folder: Path, silence_s: int, *chaos: str) -> tuple[dict[str, Any], int]:
    """Both trainings; what happened to the first, and their last step. Fails if their results differ by a bit."""
    hashes: list[str] = []
    found: dict[str, Any] = {}
    last = 0
    for name in ("disturbed", "alone"):
        for shell in shells(folder / name):
            with small_disk(shell.logs):
                if name == "disturbed":
                    found, last = disturbed(shell, silence_s, *chaos)
                    hashes.append(healing.outcome(shell, WORLD))
                else:
                    hashes.append(undisturbed(shell, last))
    assert hashes[0] == hashes[1], f"the results differ after {found['strikes']} faults (seed {found['seed']})"
    return found, last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", default="1/2s")
    parser.add_argument("--faults", default=FAULTS)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    words = ["--rate", options.rate, "--faults", options.faults, "--seed", str(options.seed), "--for", f"{options.minutes}m"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found, last = prove(Path(folder), SILENCE_S, *words)
        print(table(found))
        print("\n".join(f"  {count:4d}  {cause}" for cause, count in causes(found).most_common()))
        print(f"{found['strikes']} faults, {last} steps, bitwise equal; {time.monotonic() - began:.0f} s in all")
    return 0


def causes(found: dict[str, Any]) -> Counter[str]:
    """Why there were recoveries, numbers left out."""
    return Counter(re.sub(r"\d+(\.\d+)?", "N", incident["cause"])[:100] for incident in found["recoveries"])


def table(found: dict[str, Any]) -> str:
    """What happened, as a table for docs/proof.md."""
    lines = ["| fault | times | answered by | unnoticed | median ms | worst ms |", "|---|---|---|---|---|---|"]
    for row in found["rows"]:
        rungs = ", ".join(f"{count} {rung}" for rung, count in sorted(row["rungs"].items())) or "-"
        times = f"{row['median_ms']:.0f} | {row['worst_ms']:.0f}" if row["rungs"] else "- | -"
        lines.append(f"| {row['fault']} | {row['times']} | {rungs} | {row['unnoticed']} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
