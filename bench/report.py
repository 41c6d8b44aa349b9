"""Common parts of benchmark reports: the machine, a median with its spread, a growth exponent, and the result files.

A result is `NAME.json` (all data), `NAME.md` (the tables, also printed) and `NAME.png` (one picture). Results of `--quick` are
in a separate directory, which is not committed: they show that a benchmark works, not how fast covey is.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
QUICK = RESULTS / "quick"


class Spread(NamedTuple):
    """Summary of several measurements. `mad` is the median absolute deviation from the median."""

    median: float
    low: float
    high: float
    mad: float
    n: int

    def show(self, unit: str = "", digits: int = 2) -> str:
        """Return `median unit [low..high]`, for a table cell."""
        return f"{self.median:.{digits}f}{unit} [{self.low:.{digits}f}..{self.high:.{digits}f}]"

    def scaled(self, factor: float) -> Spread:
        """Return the summary in another unit."""
        return Spread(factor * self.median, factor * self.low, factor * self.high, factor * self.mad, self.n)


def spread(values: Iterable[float]) -> Spread:
    """Return the summary of measurements; there must be at least one."""
    found = sorted(values)
    median = statistics.median(found)
    mad = statistics.median(abs(value - median) for value in found)
    return Spread(median, found[0], found[-1], mad, len(found))


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the x of cost = c * size^x that fits best, by least squares on logarithms: 1 is linear, 2 quadratic."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs]).slope


class Aim(NamedTuple):
    """A target and the measured value; `held` is whether the target is met."""

    what: str
    limit: str
    found: str
    held: bool


def machine() -> dict[str, Any]:
    """Return the properties of this machine that a comparison needs; the load averages show how quiet it was."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "uvloop": version("uvloop"),
        "load": list(os.getloadavg()),
    }


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aims_table(aims: Iterable[Aim]) -> str:
    """Return a Markdown table of targets and measured values."""
    return table(["aim", "limit", "found", "held"], [[a.what, a.limit, a.found, "yes" if a.held else "NO"] for a in aims])


def publish(name: str, data: dict[str, Any], sections: Sequence[str], draw: Callable[[Any], None]) -> None:
    """Print the sections and write all three files, into QUICK if data["quick"], else RESULTS. `draw` gets a Figure."""
    about = data["machine"]
    load = ", ".join(f"{value:.1f}" for value in about["load"])
    after = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    quiet = f"Load average {load} before and {after} after, on {about['cores']} cores."
    intro = f"{about['system']}, Python {about['python']}, torch {about['torch']}, {about['at']}. {quiet}"
    text = "\n\n".join([f"# {name}", intro, *sections]) + "\n"
    data = {**data, "load_after": list(os.getloadavg())}
    folder = QUICK if data["quick"] else RESULTS
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    (folder / f"{name}.md").write_text(text)
    _picture(folder / f"{name}.png", draw)
    print(text)


def _picture(path: Path, draw: Callable[[Any], None]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(10, 4.5), layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
