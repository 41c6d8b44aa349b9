"""Generates docs/reference/ from the code: `python docs/build_reference.py`. A test fails if it is out of date."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from covey.cli.main import verbs
from covey.cli.run.options import help_text
from covey.core import messages
from covey.core.cluster.view import ClusterView, NodeView
from covey.core.incidents import Outcome, Stage, Total
from covey.core.types import Phase, Role
from covey.errors import EXIT_CODE_HELP, ExitCode
from covey.federated.scheduler.management_api import FEDERATED_OPERATIONS
from covey.federated.server import openapi as devices
from covey.kubernetes.operator_metrics import OperatorMetrics
from covey.management import cluster_metrics
from covey.management.openapi import COMMON_OPERATIONS, Operation
from covey.management.training_api import ALL_OPERATIONS as TRAINING_OPERATIONS
from covey.settings import TABLE, Settings, format_value

FOLDER = Path(__file__).parent / "reference"
MADE = "Generated from the code by `docs/build_reference.py`.\n"
FAMILIES = {1: "usage", 2: "forming", 3: "peer", 4: "disk"}


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    made = {
        "settings.md": settings(),
        "cli.md": cli(),
        "rest.md": rest(),
        "messages.md": wire(),
        "exit-codes.md": exit_codes(),
        "metrics.md": numbers(),
    }
    listed = "\n".join(f"* [{text.splitlines()[0].removeprefix('# ')}]({name})" for name, text in made.items())
    return {"README.md": f"# Reference\n\n{MADE}\n{listed}\n", **made}


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def settings() -> str:
    default = Settings()
    rows = (
        (
            f"`{var.variable}`",
            format_value(getattr(default, field)) or "-",
            var.description,
            var.kind.allowed_text,
        )
        for field, var in TABLE.items()
    )
    return f"# Settings\n\n{MADE}\n" + table(("variable", "default", "meaning", "allowed values"), rows)


def cli() -> str:
    sections = [f"## covey run\n\n```\n{help_text().rstrip()}\n```"]
    sections += [f"## covey {name}\n\n```\n{text}\n```" for name, text in _helps(verbs, "") if name != "run"]
    return f"# Commands\n\n{MADE}\n" + "\n\n".join(sections) + "\n"


def _helps(group: click.Group, path: str) -> Iterator[tuple[str, str]]:
    context = click.Context(group, info_name=f"covey {path}".strip())
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from _helps(found, f"{path}{name} ")
        else:
            command_context = click.Context(found, info_name=f"covey {path}{name}", terminal_width=100, max_content_width=100)
            yield f"{path}{name}", found.get_help(command_context)


def rest() -> str:
    of_devices = (
        (method.upper(), f"`{path}`", operation.get("summary", operation.get("description", "")))
        for path, methods in devices.build_document()["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f"# REST\n\n{MADE}\nEvery port serves its OpenAPI document at `GET /openapi.json`. An error is"
        ' `{"error_message": ..., "code": "1"}`.\n'
        f"\n## Scheduler of a training cluster\n\n{_operations(TRAINING_OPERATIONS)}"
        f"\n## Scheduler of a federated cluster\n\n{_operations((*COMMON_OPERATIONS, *FEDERATED_OPERATIONS))}"
        f"\n## Federated servers, for devices\n\n{table(('method', 'path', 'meaning'), of_devices)}"
    )


def _operations(operations: tuple[Operation, ...]) -> str:
    rows = (
        (op.method, f"`{op.path}`", op.summary, f"`{op.body.__name__}`" if op.body else "", _reply(op)) for op in operations
    )
    return table(("method", "path", "meaning", "body", "reply"), rows)


def _reply(operation: Operation) -> str:
    reply = operation.reply
    return reply if isinstance(reply, str) else f"`{reply.__name__}`"


def wire() -> str:
    """Return the page of the cluster port's messages, by sender, with their fields."""
    senders = {
        "From nodes, agents and clients to the scheduler": messages.FromNode,
        "From the scheduler": messages.FromScheduler,
        "Between a child process and its agent, in addition": messages.FromAgent,
    }
    seen: set[type] = set()
    parts = [f"# Messages\n\n{MADE}\nProtocol {messages.PROTOCOL}: msgpack, tagged by name, in length-prefixed frames.\n"]
    for heading, union in senders.items():
        new = [kind for kind in get_args(union) if kind not in seen]
        seen |= set(new)
        rows = ((f"`{kind.__name__}`", inspect.getdoc(kind) or "", _fields(kind)) for kind in new)
        parts.append(f"## {heading}\n\n{table(('message', 'meaning', 'fields'), rows)}")
    return "\n".join(parts)


def _fields(kind: type[Any]) -> str:
    hints = get_type_hints(kind)
    return ", ".join(f"`{field.name}: {_type(hints[field.name])}`" for field in msgspec.structs.fields(kind))


def _type(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("covey.core.", "")


def exit_codes() -> str:
    rows = ((str(int(code)), FAMILIES.get(code // 10, ""), EXIT_CODE_HELP.get(code, "success")) for code in ExitCode)
    return f"# Exit codes\n\n{MADE}\n" + table(("code", "family", "meaning"), rows)


def metric_texts() -> dict[str, bytes]:
    """Return the text of `/metrics` of each port, for views in which every metric has a value."""
    worker = NodeView(Role.WORKER, "0", 0, "host", "127.0.0.1", "alive", True, step=1, beat_age_s=1.0, straggles=2.0)
    total = Total("recover", Outcome.RESUMED, 1, dict.fromkeys(Stage, 0.1))
    counted = {"federated_rounds", "federated_missed"}
    training = ClusterView("c", Phase.READY, "", 1, 1, 0, 0.0, 1.0, [worker], gauges={"links": 1.0}, recovery_totals=[total])
    federated = ClusterView(
        *("c", Phase.READY, "", 1, 0, 1, 0.0, 1.0, []),
        counters=dict.fromkeys(counted, 1.0),
        gauges={name: 1.0 for name in cluster_metrics.OTHER_METRICS if name.startswith("federated") and name not in counted},
    )
    return {
        "The scheduler of a training": cluster_metrics.render(training, "1"),
        "The scheduler of a federation": cluster_metrics.render(federated, "1"),
        "The operator": OperatorMetrics().render(),
    }


def numbers() -> str:
    """Return the page of all metrics."""
    parts = [f"# Metrics\n\n{MADE}\nServed at `GET /metrics`. `deploy/grafana/covey.json` is a Grafana dashboard.\n"]
    for heading, text in metric_texts().items():
        rows = (
            (f"`{_named(family)}`", family.type, ", ".join(_labels(family)), family.documentation)
            for family in text_string_to_metric_families(text.decode())
        )
        parts.append(f"## {heading}\n\n{table(('metric', 'type', 'labels', 'meaning'), rows)}")
    parts.append("Metrics of a model that devices and `evaluate` report are `covey_model_NAME`, such as `covey_model_loss`.\n")
    return "\n".join(parts)


def _named(family: Any) -> str:
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def _labels(family: Any) -> list[str]:
    return sorted({label for sample in family.samples for label in sample.labels})


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
