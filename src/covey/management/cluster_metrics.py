"""Metrics of a cluster for Prometheus. All values of a scrape come from one view, so they are consistent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric, SummaryMetricFamily

from covey.core.cluster.view import ClusterView
from covey.core.incidents import Outcome, Stage
from covey.core.types import NodeState, Phase, Role

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# Counters of a training cluster. Each is exported from the start, because an alert on an increase needs the zero before it.
COUNTERS = {
    "deaths": "Nodes that died.",
    "silent_deaths": "Nodes declared dead because of missed heartbeats.",
    "handovers": "Ranks handed over because their host was leaving.",
    "left": "Nodes that exited normally or on request.",
    "refused": "Registrations refused.",
    "strangers": "Connections rejected before registration.",
    "replacements": "Processes started to replace a dead one.",
    "promotions": "Spares promoted to workers.",
    "returns": "Nodes that rejoined as the same member.",
    "restarts": "Restarts of all workers.",
    "kills": "Nodes killed on request.",
    "retries": "Steps retried without a new process.",
    "stuck": "Ranks that were stuck: all others waited too long for them.",
    "unsaved": "Checkpoints that a rank failed to write.",
    "shrinks": "Shrinks of the world after a loss.",
    "scale_out": "Scale-outs started.",
    "scale_in": "Scale-ins requested.",
}
OTHER_METRICS = {
    "federated_rounds": "Completed rounds of the federated training.",
    "federated_missed": "Iterations that were repeated.",
    "federated_iteration": "Current iteration.",
    "federated_counted": "Updates counted in this iteration.",
    "federated_joined": "Devices that joined this iteration.",
    "federated_epsilon": "Privacy budget spent so far (epsilon).",
    "links": "Open connections of nodes, agents and clients.",
}


def render(view: ClusterView, version: str) -> bytes:
    """Return the text of one scrape."""
    return generate_latest(_ViewCollector(view, version))


class _ViewCollector:
    def __init__(self, view: ClusterView, version: str) -> None:
        self._view = view
        self._version = version

    def collect(self) -> Iterator[Metric]:
        view = self._view
        identity = {"version": self._version, "cluster_id": view.cluster_id}
        yield InfoMetricFamily("covey", "Version of covey and id of the cluster.", value=identity)
        yield _node_metric(view)
        yield _phase_metric(view)
        yield GaugeMetricFamily("covey_generation", "Version of the membership.", value=view.generation)
        yield from _heartbeat_age_metric(view)
        yield from _step_metrics(view)
        yield from _counter_metrics(view)
        yield from _gauge_metrics(view)
        yield _recovery_metric(view)
        yield _recovery_stage_metric(view)
        yield _straggler_metric(view)


def _node_metric(view: ClusterView) -> Metric:
    # Every state of every present role, including zeros: a series that disappears cannot trigger an alert.
    numbers = Counter((str(node.role), node.state) for node in view.nodes)
    for name in {str(node.role) for node in view.nodes}:
        numbers.update({(name, str(state)): 0 for state in NodeState})
    family = GaugeMetricFamily("covey_nodes", "Nodes by role and state.", labels=["role", "state"])
    for (role, state), number in sorted(numbers.items()):
        family.add_metric([role, state], number)
    return family


def _phase_metric(view: ClusterView) -> Metric:
    family = GaugeMetricFamily(
        "covey_cluster_phase", "1 for the current phase of the cluster, 0 for the others.", labels=["phase"]
    )
    for phase in Phase:
        family.add_metric([phase], phase is view.phase)
    return family


def _heartbeat_age_metric(view: ClusterView) -> Iterator[Metric]:
    # Dead nodes are excluded, because their age would grow without limit.
    ages = [node.beat_age_s for node in view.nodes if node.alive and node.beat_age_s >= 0]
    if ages:
        yield GaugeMetricFamily(
            "covey_beat_age_seconds", "Longest time since the last heartbeat of a node that is alive.", value=max(ages)
        )


def _step_metrics(view: ClusterView) -> Iterator[Metric]:
    steps = [node.step for node in view.nodes if node.role is Role.WORKER and node.alive and node.step >= 0]
    if steps:
        yield GaugeMetricFamily("covey_step_min", "Lowest step of a worker.", value=min(steps))
        yield GaugeMetricFamily("covey_step_max", "Highest step of a worker.", value=max(steps))


def _recovery_metric(view: ClusterView) -> Metric:
    description = "Recoveries and resizes, by strategy and outcome."
    family = CounterMetricFamily("covey_recoveries", description, labels=["strategy", "outcome"])
    for total in view.recovery_totals:
        family.add_metric([total.strategy, total.outcome], total.count)
    return family


def _recovery_stage_metric(view: ClusterView) -> Metric:
    description = "Duration of each stage of the recoveries that resumed."
    family = SummaryMetricFamily("covey_recovery_stage_seconds", description, labels=["strategy", "stage"])
    for total in view.recovery_totals:
        if total.outcome is Outcome.RESUMED:
            for stage in Stage:
                family.add_metric([total.strategy, stage], count_value=total.count, sum_value=total.seconds.get(stage, 0.0))
    return family


def _straggler_metric(view: ClusterView) -> Metric:
    description = "Step time of a straggler, as a multiple of the median of all ranks."
    family = GaugeMetricFamily("covey_straggler_ratio", description, labels=["role", "rank"])
    for node in view.nodes:
        if node.straggles:
            family.add_metric([node.role, str(node.rank)], node.straggles)
    return family


def _gauge_metrics(view: ClusterView) -> Iterator[Metric]:
    for name, number in sorted({_metric_name(gauge): number for gauge, number in view.gauges.items()}.items()):
        description = OTHER_METRICS.get(name, f"Last value of {name} reported by devices or by the training.")
        yield GaugeMetricFamily(f"covey_{name}", description, value=number)


def _metric_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _counter_metrics(view: ClusterView) -> Iterator[Metric]:
    totals: dict[str, float] = dict.fromkeys(COUNTERS, 0.0) if view.worker_num else {}
    for counter, number in view.counters.items():
        name = _metric_name(counter).removesuffix("_total")
        totals[name] = totals.get(name, 0) + number
    totals["restarts"] = view.restarts
    for name, number in sorted(totals.items()):
        description = COUNTERS.get(name) or OTHER_METRICS.get(name, f"Number of {name} so far.")
        yield CounterMetricFamily(f"covey_{name}", description, value=number)
