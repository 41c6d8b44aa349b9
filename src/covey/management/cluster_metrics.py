"""The cluster as Prometheus reads it. Made from one view per scrape, so the numbers of a scrape belong together."""

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

# What a training cluster counts; each is there from the start, since an alarm on an increase needs the zero before it.
COUNTERS = {
    "deaths": "Nodes that died.",
    "silent_deaths": "Nodes that died without a word: they only fell silent.",
    "handovers": "Ranks that were handed over because their host was leaving.",
    "left": "Nodes that ended as they meant to.",
    "refused": "Nodes that were refused.",
    "strangers": "Connections that were turned away.",
    "replacements": "Lives that were begun in place of one that had ended.",
    "promotions": "Spares that took the place of a worker.",
    "returns": "Nodes that came back to their place.",
    "restarts": "Times that all workers started anew.",
    "kills": "Nodes that somebody asked to have killed.",
    "retries": "Steps that were tried again in place.",
    "stuck": "Ranks that all others waited for too long.",
    "unsaved": "Checkpoints that a rank could not write.",
    "shrinks": "Worlds that went on smaller.",
    "scale_out": "Growths that were begun.",
    "scale_in": "Shrinkings that were asked for.",
}
OTHER_METRICS = {
    "federated_rounds": "Rounds of the federated training that are over.",
    "federated_missed": "Iterations that had to be tried again.",
    "federated_iteration": "The iteration that is under way.",
    "federated_counted": "Updates that count in this iteration.",
    "federated_joined": "Devices that have joined this iteration.",
    "federated_epsilon": "Privacy spent so far.",
    "links": "Open connections of nodes, agents and visitors.",
}


def render(view: ClusterView, version: str) -> bytes:
    """The whole text of one scrape."""
    return generate_latest(_ViewCollector(view, version))


class _ViewCollector:
    """One view in the form prometheus-client collects from."""

    def __init__(self, view: ClusterView, version: str) -> None:
        self._view = view
        self._version = version

    def collect(self) -> Iterator[Metric]:
        view = self._view
        identity = {"version": self._version, "cluster_id": view.cluster_id}
        yield InfoMetricFamily("covey", "Which covey runs which cluster.", value=identity)
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
    # Every state of a role that is there, zeros included: a series that vanishes cannot raise an alarm.
    numbers = Counter((str(node.role), node.state) for node in view.nodes)
    for name in {str(node.role) for node in view.nodes}:
        numbers.update({(name, str(state)): 0 for state in NodeState})
    family = GaugeMetricFamily("covey_nodes", "Nodes by role and state.", labels=["role", "state"])
    for (role, state), number in sorted(numbers.items()):
        family.add_metric([role, state], number)
    return family


def _phase_metric(view: ClusterView) -> Metric:
    family = GaugeMetricFamily("covey_cluster_phase", "1 for the phase the cluster is in.", labels=["phase"])
    for phase in Phase:
        family.add_metric([phase], phase is view.phase)
    return family


def _heartbeat_age_metric(view: ClusterView) -> Iterator[Metric]:
    # A dead node's silence grows for ever and says nothing new.
    ages = [node.beat_age_s for node in view.nodes if node.alive and node.beat_age_s >= 0]
    if ages:
        yield GaugeMetricFamily("covey_beat_age_seconds", "The longest silence of a living node.", value=max(ages))


def _step_metrics(view: ClusterView) -> Iterator[Metric]:
    steps = [node.step for node in view.nodes if node.role is Role.WORKER and node.alive and node.step >= 0]
    if steps:
        yield GaugeMetricFamily("covey_step_min", "The step of the worker that is furthest behind.", value=min(steps))
        yield GaugeMetricFamily("covey_step_max", "The step of the worker that is furthest ahead.", value=max(steps))


def _recovery_metric(view: ClusterView) -> Metric:
    says = "Faults that were answered, by strategy and outcome."
    family = CounterMetricFamily("covey_recoveries", says, labels=["strategy", "outcome"])
    for total in view.recovery_totals:
        family.add_metric([total.strategy, total.outcome], total.count)
    return family


def _recovery_stage_metric(view: ClusterView) -> Metric:
    says = "What each stage of the recoveries that resumed took."
    family = SummaryMetricFamily("covey_recovery_stage_seconds", says, labels=["strategy", "stage"])
    for total in view.recovery_totals:
        if total.outcome is Outcome.RESUMED:
            for stage in Stage:
                family.add_metric([total.strategy, stage], count_value=total.count, sum_value=total.seconds.get(stage, 0.0))
    return family


def _straggler_metric(view: ClusterView) -> Metric:
    says = "Ranks that the others wait for: how many times the median a step takes them."
    family = GaugeMetricFamily("covey_straggler_ratio", says, labels=["role", "rank"])
    for node in view.nodes:
        if node.straggles:
            family.add_metric([node.role, str(node.rank)], node.straggles)
    return family


def _gauge_metrics(view: ClusterView) -> Iterator[Metric]:
    for name, number in sorted({_metric_name(gauge): number for gauge, number in view.gauges.items()}.items()):
        says = OTHER_METRICS.get(name, f"What devices or the training said of {name}, last.")
        yield GaugeMetricFamily(f"covey_{name}", says, value=number)


def _metric_name(said: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", said)


def _counter_metrics(view: ClusterView) -> Iterator[Metric]:
    totals: dict[str, float] = dict.fromkeys(COUNTERS, 0.0) if view.worker_num else {}
    for counter, number in view.counters.items():
        name = _metric_name(counter).removesuffix("_total")
        totals[name] = totals.get(name, 0) + number
    totals["restarts"] = view.restarts
    for name, number in sorted(totals.items()):
        says = COUNTERS.get(name) or OTHER_METRICS.get(name, f"How often so far: {name}.")
        yield CounterMetricFamily(f"covey_{name}", says, value=number)
