"""Metrics by Prometheus' conventions, and a dashboard that asks only for what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.http.serving import a_node, a_view

from covey.core.types import Role
from covey.kubernetes.operator_metrics import OperatorMetrics
from covey.management.cluster_metrics import OTHER_METRICS, render

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "covey.json"
COUNTED = {"federated_rounds": 1.0, "federated_missed": 0.0}
FEDERATED = {name: 1.0 for name in OTHER_METRICS if name.startswith("federated") and name not in COUNTED}
UNITS = ("_milliseconds", "_ms", "_minutes", "_kb", "_mb", "_megabytes", "_percent")  # not base units
LABELS = {"role", "state", "phase", "strategy", "outcome", "stage", "rank", "version", "cluster_id", "le", "quantile"}


def everything() -> list[Metric]:
    """Of a training, a federation and an operator."""
    busy = msgspec.structs.replace(a_node(Role.WORKER, 3), straggles=2.5, step=7)
    training = render(msgspec.structs.replace(a_view(busy), gauges={"links": 3.0}), "1")
    federated = render(msgspec.structs.replace(a_view(counters=COUNTED), gauges=FEDERATED, worker_num=0), "1")
    texts = (training, federated, OperatorMetrics().render())
    return [family for text in texts for family in text_string_to_metric_families(text.decode())]


@pytest.mark.parametrize("family", everything(), ids=lambda family: family.name)
def test_a_metric_follows_the_conventions(family: Metric) -> None:
    assert re.fullmatch(r"(covey|training_operator)(_[a-z][a-z0-9]*)+", family.name) or family.name == "covey_info"
    assert not family.name.endswith(UNITS)
    assert family.documentation.endswith(".") and len(family.documentation) > 10
    kinds = {sample.name.removeprefix(family.name) for sample in family.samples}
    expected = {"counter": {"_total"}, "gauge": {""}, "summary": {"_sum", "_count"}, "histogram": {"_bucket", "_sum", "_count"}}
    assert kinds - {"_created"} <= expected[family.type], kinds
    if family.type == "gauge":
        assert not family.name.endswith("_total")
    assert {label for sample in family.samples for label in sample.labels} <= LABELS


def test_labels_have_few_values() -> None:
    """A thousand ranks in good order are no more series than one."""
    sizes = [
        sum(len(family.samples) for family in text_string_to_metric_families(render(view, "1").decode()))
        for view in (a_view(a_node(Role.WORKER, 0)), a_view(*(a_node(Role.WORKER, rank) for rank in range(1000))))
    ]
    assert sizes[0] == sizes[1]


def test_the_dashboard_asks_for_what_is_there() -> None:
    board = json.loads(DASHBOARD.read_text())
    known = {sample.name for family in everything() for sample in family.samples}
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:covey|training_operator)_\w+", target["expr"])
    }
    assert asked and asked <= known, asked - known
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
