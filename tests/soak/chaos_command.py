"""`covey chaos` for the soak programs: options, command and table."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.processes.command import Shell


def parser(description: str | None, *, minutes: float, rate: str, faults: str) -> argparse.ArgumentParser:
    """Add the options of every soak, with the given defaults."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--minutes", type=float, default=minutes)
    found.add_argument("--rate", default=rate)
    found.add_argument("--faults", default=faults)
    found.add_argument("--seed", type=int, default=7)
    return found


def chaos_arguments(options: argparse.Namespace) -> list[str]:
    """Return the same values as options of `covey chaos`."""
    wanted = {"--rate": options.rate, "--faults": options.faults, "--seed": options.seed, "--for": f"{options.minutes}m"}
    return [str(word) for pair in wanted.items() for word in pair]


@contextlib.contextmanager
def ground() -> Iterator[Shell]:
    """Yield a shell in its own directory; its processes end with the soak, also after a signal."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder, Shell(Path(folder)) as shell:
        yield shell


def harm(shell: Shell, *words: str) -> dict[str, Any]:
    """Run `covey chaos` to its end; return its JSON."""
    command = [sys.executable, "-m", "covey.cli.main", "chaos", "--json", *words]
    done = subprocess.run(command, env=shell.environ(), stdout=subprocess.PIPE, timeout=3600)
    assert done.returncode == 0, f"covey chaos exited with {done.returncode}: {done.stdout!r}\n{shell.tails()}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(found: dict[str, Any]) -> str:
    """Return the result as a table for docs/proof.md."""
    lines = ["| fault | times | answered by | unnoticed | median ms | worst ms |", "|---|---|---|---|---|---|"]
    for row in found["rows"]:
        rungs = ", ".join(f"{count} {rung}" for rung, count in sorted(row["rungs"].items())) or "-"
        times = f"{row['median_ms']:.0f} | {row['worst_ms']:.0f}" if row["rungs"] else "- | -"
        lines.append(f"| {row['fault']} | {row['times']} | {rungs} | {row['unnoticed']} | {times} |")
    return "\n".join(lines)
