"""A real training under `covey chaos`, against the same training undisturbed: `python -m tests.soak.trained --minutes 10`.

Four ranks with all usual sources of differences between runs (`tests.processes.healing`). The logs and checkpoints are on their
own small file system, if it can be mounted, so that the disk can be filled. When the chaos ends, the training gets its last
step; its hash must then be that of an undisturbed training of as many steps.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import healing
from tests.processes.command import Shell
from tests.processes.harness import Process
from tests.soak.chaos_command import chaos_arguments, harm, parser, table

WORLD = 4
PACE_S = 0.02  # seconds added to each step
SILENCE_S = 6  # shorter than the longest stop, longer than the restart of a scheduler on a busy machine
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
    """Mount a file system for the output of a run; yield False, and mount none, if this user may not."""
    folder.mkdir(exist_ok=True)
    arguments = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(arguments, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Course(NamedTuple):
    """Options of the training, for both runs."""

    world: int = WORLD
    spares: int = 0
    loaders: int = 0  # data loader processes per rank

    def start(self, shell: Shell, marks: Path, *options: str, **env: str) -> Process:
        shell.script(SCRIPT, "train.py")
        spares = ["--spares", str(self.spares)] if self.spares else []
        arguments = ["run", "-n", str(self.world), *spares, *options, "train.py", str(marks)]
        return shell.covey(*arguments, env={"STEPS": str(STEPS_MAX), "LOADERS": str(self.loaders), **env})


def disturbed(shell: Shell, course: Course, silence_s: int, *chaos: str) -> tuple[dict[str, Any], int]:
    """Run the training with faults until they end; return the JSON of `covey chaos`, and the last step."""
    marks = shell.logs / "marks"
    marks.mkdir()
    env = {"COVEY_STRATEGY": healing.LADDER, "PACE": str(PACE_S), "COVEY_FAULT_CLOCK": str(shell.folder / "clock")}
    run = course.start(shell, marks, "--node-timeout", str(silence_s), **env)
    for rank in range(course.world):
        shell.wait_for_log(rank, "BEGINS at 0")
    found = harm(shell, *chaos)
    assert run.alive, f"the run ended under faults of seed {found['seed']}\n{run.tail()}"
    last = max(node["step"] for node in shell.nodes()) + MORE_STEPS
    say_last(marks, last)
    assert run.wait(LONG_S) == 0, run.tail()
    return found, last


def say_last(marks: Path, step: int) -> None:
    """Write the file atomically, before any rank reaches the last step."""
    (marks / "last.new").write_text(str(step))
    (marks / "last.new").rename(marks / "last")


def undisturbed(shell: Shell, course: Course, last: int) -> str:
    """Return the hash of the same training without faults."""
    shell.logs.mkdir(exist_ok=True)
    marks = shell.logs / "marks"
    marks.mkdir()
    say_last(marks, last)
    run = course.start(shell, marks)
    assert run.wait(LONG_S) == 0, run.tail()
    return healing.final_hash(shell, course.world)


def prove(folder: Path, silence_s: int, *chaos: str, course: Course = Course()) -> tuple[dict[str, Any], int]:  # noqa: B008
    """Run both trainings; return the faults and the last step. Fails if the results differ by a bit."""
    hashes: list[str] = []
    found: dict[str, Any] = {}
    last = 0
    for name in ("disturbed", "alone"):
        with Shell(folder / name) as shell, small_disk(shell.logs):
            if name == "disturbed":
                found, last = disturbed(shell, course, silence_s, *chaos)
                hashes.append(healing.final_hash(shell, course.world))
            else:
                hashes.append(undisturbed(shell, course, last))
    assert hashes[0] == hashes[1], f"the results differ after {found['strikes']} faults (seed {found['seed']})"
    return found, last


def main() -> int:
    wanted = parser(__doc__, minutes=10, rate="1/2s", faults=FAULTS)
    wanted.add_argument("--world", type=int, default=WORLD)
    wanted.add_argument("--spares", type=int, default=0)
    wanted.add_argument("--loaders", type=int, default=0)
    options = wanted.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started_at = time.monotonic()
        course = Course(options.world, options.spares, options.loaders)
        found, last = prove(Path(folder), SILENCE_S, *chaos_arguments(options), course=course)
        print(table(found))
        print("\n".join(f"  {count:4d}  {cause}" for cause, count in causes(found).most_common()))
        print(f"{found['strikes']} faults, {last} steps, bitwise equal; {time.monotonic() - started_at:.0f} s in all")
    return 0


def causes(found: dict[str, Any]) -> Counter[str]:
    """Return the causes of the recoveries, without numbers."""
    return Counter(re.sub(r"\d+(\.\d+)?", "N", incident["cause"])[:100] for incident in found["recoveries"])


if __name__ == "__main__":
    sys.exit(main())
