"""How `make bench-check` decides that a ratio is worse than its record."""

from __future__ import annotations

import json

import pytest
from bench import check
from bench.check import BENCHMARKS, RATIOS, Better, Verdict, confirmed, judge, judged, values
from bench.report import RESULTS, spread

LOWER, HIGHER = Better.LOWER, Better.HIGHER


@pytest.mark.parametrize(
    ("found", "better", "verdict"),
    [
        ([1.0], LOWER, Verdict.SAME),
        ([1.34], LOWER, Verdict.SAME),  # beyond the highest by less than half the spread
        ([1.36], LOWER, Verdict.WORSE),
        ([0.74], LOWER, Verdict.BETTER),
        ([1.36], HIGHER, Verdict.BETTER),
        ([0.74], HIGHER, Verdict.WORSE),
        ([0.1, 1.0, 9.0], HIGHER, Verdict.SAME),  # the median counts
    ],
)
def test_ratio_outside_of_the_widened_record(found: list[float], better: Better, verdict: Verdict) -> None:
    assert judge(spread([0.9, 1.0, 1.2]), found, better) is verdict


def test_record_without_spread_still_allows_five_percent() -> None:
    assert judge(spread([2.0, 2.0]), [2.09], LOWER) is Verdict.SAME
    assert judge(spread([2.0, 2.0]), [2.11], LOWER) is Verdict.WORSE


def test_worse_needs_a_confirmation() -> None:
    assert confirmed(Verdict.WORSE, Verdict.WORSE) is Verdict.WORSE
    assert confirmed(Verdict.WORSE, Verdict.SAME) is confirmed(Verdict.WORSE, None) is Verdict.SAME
    assert confirmed(Verdict.BETTER, Verdict.WORSE) is Verdict.BETTER


def test_ratio_that_one_side_has_not_measured_is_not_judged() -> None:
    ratio = next(one for one in RATIOS if one.benchmark == "scale")
    assert judged("scale", {}, [{ratio.name: 1.0}]) == {}
    assert judged("scale", {ratio.name: spread([1.0])}, [{}]) == {}
    assert judged("scale", {ratio.name: spread([1.0])}, [{ratio.name: 3.0}]) == {ratio.name: Verdict.WORSE}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_ratio_is_in_the_results_of_its_benchmark(benchmark: str) -> None:
    """The committed results are of whole runs with every peer, in the format of the quick ones."""
    found = values(benchmark, json.loads((RESULTS / f"{benchmark}.json").read_text()))
    assert list(found) == [ratio.name for ratio in RATIOS if ratio.benchmark == benchmark]
    assert all(value > 0 for value in found.values())


def test_names_of_ratios_are_unique() -> None:
    assert len({ratio.name for ratio in RATIOS}) == len(RATIOS)
    assert set(check.BRINGS) <= set(BENCHMARKS)
