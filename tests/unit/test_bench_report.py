"""Benchmark reports: medians, spreads, growth exponents, tables; end of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.report import Aim, Spread, aims_table, exponent, spread, table
from bench.scoreboard import page
from tests.documents import ROOT
from tests.processes.harness import until

from covey.storage.running_clusters import process_start_time


def test_spread_of_an_odd_number_of_measurements() -> None:
    assert spread([5.0, 1.0, 2.0, 100.0, 3.0]) == Spread(median=3.0, low=1.0, high=100.0, mad=2.0, n=5)


def test_spread_of_an_even_number_averages_two_middle_values() -> None:
    assert spread(iter([4.0, 1.0, 2.0, 3.0])) == Spread(median=2.5, low=1.0, high=4.0, mad=1.0, n=4)


def test_single_measurement_has_no_spread() -> None:
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, 0.0, 1)


def test_spread_is_scaled_and_formatted_as_cell() -> None:
    assert spread([0.001, 0.002, 0.004]).scaled(1000).show(" ms", 0) == "2 ms [1..4]"


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_exponent_of_exact_power_law(power: float) -> None:
    sizes = [1000, 2000, 5000, 10_000]
    assert exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)


def test_exponent_of_noisy_measurements_is_between_extremes() -> None:
    assert exponent([1, 2, 4], [1.0, 2.1, 3.8]) == pytest.approx(0.963, abs=0.001)


def test_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_scoreboard_contains_aims_of_every_result(tmp_path: Path) -> None:
    aims = aims_table([Aim("fast", "at most 1 s", "0.5 s [0.4..0.6]", True), Aim("small", "1 MB", "2 MB", False)])
    about = {"at": "now", "cores": 2, "python": "3.11", "torch": "2", "load": [0.1]}
    (tmp_path / "scale.md").write_text(f"# scale\n\n{aims}\n\nmore\n")
    (tmp_path / "scale.json").write_text(json.dumps({"machine": about, "load_after": [0.2]}))
    text = page(tmp_path)
    assert "1 of 2 aims held" in text
    assert "| [scale](scale.md) | fast | at most 1 s | 0.5 s [0.4..0.6] | yes |" in text
    assert "Not measured: formation" in text


STARTS = """
import subprocess
from bench.process import take_along
take_along()
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"])
child.wait()
"""


def test_terminated_benchmark_ends_its_child_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True, cwd=ROOT) as bench:
        assert bench.stdout is not None
        sleeper = int(bench.stdout.readline())
        assert process_start_time(sleeper)
        bench.terminate()
        assert bench.wait(60) == 143
    until(lambda: not process_start_time(sleeper), "what the shell started to be gone")
