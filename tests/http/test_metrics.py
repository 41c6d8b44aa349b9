"""Metrics follow Prometheus' conventions, and the dashboard queries only existing metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.http.serving import example_node, example_view

from covey.core.types import Role
from covey.kubernetes.operator_metrics import OperatorMetrics
from covey.management.cluster_metrics import OTHER_METRICS, render

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "covey.json"
COUNTED = {"federated_rounds": 1.0, "federated_missed": 0.0}
FEDERATED = {name: 1.0 for name in OTHER_METRICS if name.startswith("federated") and name not in COUNTED}
UNITS = ("_milliseconds", "_ms", "_minutes", "_kb", "_mb", "_megabytes", "_percent")  # not base units
LABELS = {"role", "state", "phase", "strategy", "outcome", "stage", "rank", "version", "cluster_id", "le", "quantile"}


def all_metrics() -> list[Metric]:
    """Return the metrics of a training cluster, a federated cluster and an operator."""
    busy = msgspec.structs.replace(example_node(Role.WORKER, 3), straggles=2.5, step=7)
    training = render(msgspec.structs.replace(example_view(busy), gauges={"links": 3.0}), "1")
    federated = render(msgspec.structs.replace(example_view(counters=COUNTED), gauges=FEDERATED, worker_num=0), "1")
    texts = (training, federated, OperatorMetrics().render())
    return [family for text in texts for family in text_string_to_metric_families(text.decode())]


@pytest.mark.parametrize("family", all_metrics(), ids=lambda family: family.name)
def test_metric_follows_naming_conventions(family: Metric) -> None:
    assert re.fullmatch(r"(covey|training_operator)(_[a-z][a-z0-9]*)+", family.name) or family.name == "covey_info"
    assert not family.name.endswith(UNITS)
    assert family.documentation.endswith(".") and len(family.documentation) > 10
    kinds = {sample.name.removeprefix(family.name) for sample in family.samples}
    expected = {"counter": {"_total"}, "gauge": {""}, "summary": {"_sum", "_count"}, "histogram": {"_bucket", "_sum", "_count"}}
    assert kinds - {"_created"} <= expected[family.type], kinds
    if family.type == "gauge":
        assert not family.name.endswith("_total")
    assert {label for sample in family.samples for label in sample.labels} <= LABELS


def test_number_of_series_does_not_grow_with_healthy_ranks() -> None:
    sizes = [
        sum(len(family.samples) for family in text_string_to_metric_families(render(view, "1").decode()))
        for view in (
            example_view(example_node(Role.WORKER, 0)),
            example_view(*(example_node(Role.WORKER, rank) for rank in range(1000))),
        )
    ]
    assert sizes[0] == sizes[1]


def test_dashboard_queries_existing_metrics() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    known = {sample.name for family in all_metrics() for sample in family.samples}
    queried = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:covey|training_operator)_\w+", target["expr"])
    }
    assert queried and queried <= known, queried - known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    positions = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(positions)) == len(positions)
