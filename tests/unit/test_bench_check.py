"""Decision of `make bench-check` whether a ratio is worse than its record."""

from __future__ import annotations

import json
from pathlib import Path

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
def test_ratio_is_worse_only_beyond_widened_spread(found: list[float], better: Better, verdict: Verdict) -> None:
    assert judge(spread([0.9, 1.0, 1.2]), found, better) is verdict


def test_record_without_spread_allows_five_percent() -> None:
    assert judge(spread([2.0, 2.0]), [2.09], LOWER) is Verdict.SAME
    assert judge(spread([2.0, 2.0]), [2.11], LOWER) is Verdict.WORSE


def test_worse_ratio_needs_confirmation() -> None:
    assert confirmed(Verdict.WORSE, Verdict.WORSE) is Verdict.WORSE
    assert confirmed(Verdict.WORSE, Verdict.SAME) is confirmed(Verdict.WORSE, None) is Verdict.SAME
    assert confirmed(Verdict.WORSE, Verdict.MISSING) is Verdict.MISSING
    assert confirmed(Verdict.BETTER, Verdict.WORSE) is Verdict.BETTER


def test_ratio_without_record_is_ignored() -> None:
    ratio = next(one for one in RATIOS if one.benchmark == "scale")
    assert judged("scale", {}, [{ratio.name: 1.0}]) == {}
    assert judged("scale", {ratio.name: spread([1.0])}, [{ratio.name: 3.0}]) == {ratio.name: Verdict.WORSE}


def write_record(benchmark: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a record with the first ratio of a benchmark, for `check` to read."""
    name = next(one.name for one in RATIOS if one.benchmark == benchmark)
    path.write_text(json.dumps({"cores": 2, "load": [0, 0], "ratios": {name: spread([1.0])._asdict()}}))
    monkeypatch.setattr(check, "RECORD", path)


@pytest.mark.parametrize(("benchmark", "code", "output"), [("scale", 1, "MISSING"), ("mindspore", 0, "bench.peers mindspore")])
def test_missing_ratio_fails_unless_peer_is_missing(
    benchmark: str, code: int, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(benchmark, tmp_path / "record.json", monkeypatch)
    monkeypatch.setattr(check, "run", lambda *_: {})
    assert check.check([benchmark], trials=1, cores=2) == code
    assert output in capsys.readouterr().out


def test_check_stops_at_deadline_with_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record("scale", tmp_path / "record.json", monkeypatch)
    monkeypatch.setattr(check, "QUICK", tmp_path)
    monkeypatch.setattr(check, "CHECK_LIMIT_S", 0.0)
    with pytest.raises(SystemExit, match=r"the check did not finish within .* stopped in bench\.scale"):
        check.check(["scale"], trials=1, cores=2)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_committed_results_contain_every_ratio(benchmark: str) -> None:
    """The committed results come from complete runs with every peer, in the format of quick runs."""
    found = values(benchmark, json.loads((RESULTS / f"{benchmark}.json").read_text()))
    assert list(found) == [ratio.name for ratio in RATIOS if ratio.benchmark == benchmark]
    assert all(value > 0 for value in found.values())


def test_ratio_names_are_unique() -> None:
    assert len({ratio.name for ratio in RATIOS}) == len(RATIOS)
    assert set(check.BRINGS) <= set(BENCHMARKS)
