"""Collects the names, fields and numbers that users rely on, as sorted lines: one file for each kind.

Texts for people are left out, because wording may change. So is whatever depends on the machine, on the version of Python or on
the version of a library.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from covey.cli.main import verbs
from covey.cli.run.event_hooks import KIND_BY_EVENT, HookEvent
from covey.cli.run.options import OPTIONS
from covey.core.event_log import Event
from covey.errors import ExitCode
from covey.federated.context import KEYS
from covey.federated.scheduler.management_api import FEDERATED_OPERATIONS
from covey.federated.server import openapi as device_port
from covey.management.jobs_api import (
    EXCLUDED_OPERATIONS,
    FORWARDED_OPERATIONS,
    JOBS_OPERATION,
    SCALE_OPERATION,
    STREAM_OPERATION,
    SUSPEND_OPERATION,
)
from covey.management.openapi import COMMON_OPERATIONS, make_document
from covey.management.training_api import ALL_OPERATIONS as TRAINING
from covey.ps_context import DEFAULTS as PS_CONTEXT
from covey.settings import SETTINGS_FILE_VARIABLE, TABLE, Settings

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
REQUEST, ANSWER = "request", "answer"


def snapshots() -> dict[str, str]:
    """Return every snapshot: the name of its file, and its text."""
    kinds: dict[str, Callable[[], Iterator[str]]] = {
        "api": api,
        "cli": cli,
        "events": events,
        "exit-codes": exit_codes,
        "metrics": metrics,
        "rest": rest,
        "settings": settings,
    }
    return {f"{kind}.txt": "".join(f"{line}\n" for line in sorted(set(collected()))) for kind, collected in kinds.items()}


# -- Python ----------------------------------------------------------------------------------------------------------


class Imports(NamedTuple):
    """A module that documents name, and the names to look at; all public ones (`__all__`) if none are given."""

    module: str
    names: tuple[str, ...] = ()


# Every import path in README, docs and examples; a test finds those that are missing here.
DOCUMENTED = (
    Imports("covey"),
    Imports("covey.integrations.accelerate", ("Accelerator",)),
    Imports("covey.integrations.lightning", ("CoveyStrategy",)),
    Imports("covey.federated"),
    Imports("covey.federated.context", ("KEYS", "from_text")),
    Imports("covey.federated.privacy.device_certificates", ("DeviceIdentity", "DeviceTrust")),
    Imports("covey.parameter_server.checkpoint_files", ("export",)),
    Imports("covey.parameter_server.optimizers", ("FTRL", "LazyAdam")),
    Imports("covey.integrations.taskd"),
    Imports("taskd.api.taskd_agent_api"),
    Imports("taskd.api.taskd_manager_api"),
    Imports("taskd.api.taskd_proxy_api"),
    Imports("taskd.api.taskd_worker_api"),
)
# Import paths of 0.1 that forward to new modules, with a DeprecationWarning.
FORWARDED = (
    Imports("covey.doors.accelerate", ("Accelerator",)),
    Imports("covey.doors.lightning", ("Strategy",)),
    Imports("covey.federated.privacy.identity", ("Identity", "Trust")),
    Imports("covey.params.files", ("export",)),
    Imports("covey.params.optimizers", ("FTRL", "LazyAdam")),
    Imports("covey.taskd"),
)
FACTORIES = {  # of `covey`: functions that return an object of a class that documents describe
    "DistributedDataParallel": "covey.training.ddp.DistributedDataParallel",
    "Embedding": "covey.training.embedding.Embedding",
    "Loop": "covey.training.loop.Loop",
    "Model": "covey.training.model.Model",
    "ShardedOptimizer": "covey.training.sharded_optimizer.ShardedOptimizer",
}


def api() -> Iterator[str]:
    """Yield the documented names with their signatures, and the public members of classes."""
    sys.path.append(str(ROOT / "src/covey/integrations/taskd_shim"))
    try:
        for documented in (*DOCUMENTED, *FORWARDED):
            with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
                module = importlib.import_module(documented.module)
            for name in documented.names or module.__all__:
                yield from _described(f"{documented.module}.{name}", getattr(module, name))
        for name, path in FACTORIES.items():
            module_name, _, kind = path.rpartition(".")
            yield from _described(f"covey.{name}()", getattr(importlib.import_module(module_name), kind))
    finally:
        sys.path.remove(str(ROOT / "src/covey/integrations/taskd_shim"))


def _described(path: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"{path}{_signature(value)}"
        own = [kind for kind in value.__mro__ if kind.__module__.split(".")[0] in ("covey", "taskd")]
        for name in {name for kind in own for name in vars(kind)} & _mentioned():
            yield from _member(f"{path}.{name}", inspect.getattr_static(value, name))
    elif callable(value):
        yield f"{path}{_signature(value)}"
    else:
        yield f"{path}: {type(value).__name__}"


def _member(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, staticmethod | classmethod):
        yield f"{path}{_signature(value.__func__)} {type(value).__name__}"
    elif inspect.isfunction(value):
        yield f"{path}{_signature(value)}"
    elif not inspect.isclass(value):
        yield f"{path}: attribute"


def _signature(value: Any) -> str:
    """Return the parameters with kind and default: annotations are written differently by versions of Python."""
    try:
        found = inspect.signature(value)
    except ValueError:
        return "(...)"
    shown = [one.replace(annotation=one.empty, default=_default(one.default)) for one in found.parameters.values()]
    return str(found.replace(parameters=shown, return_annotation=found.empty))


class _Text:
    """A default that has one text in every process."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty or value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return _Text(repr(value)) if value in ((), [], {}) else _Text(f"<{type(value).__name__}>")


@functools.cache
def _documents() -> str:
    """Return README, docs and examples, without the pages that explain the code to its developers."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    paths += [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".md", ".py")]
    return "\n".join(path.read_text() for path in sorted(paths) if path.name not in ("architecture.md", "messages.md"))


@functools.cache
def _mentioned() -> frozenset[str]:
    """Return the names that documents use as a member (`.name`, or `name` in a code span): the others are internal."""
    return frozenset(re.findall(r"(?<=[.`])[a-z]\w*", _documents())) | {"__iter__"}


def documented_imports() -> set[tuple[str, str]]:
    """Return the modules of covey, and the names of them, that documents import."""
    found: set[tuple[str, str]] = set()
    for module, names in re.findall(r"^\s*from ((?:covey|taskd)[\w.]*) import ([\w, ]+)", _documents(), re.MULTILINE):
        found |= {(module, name.split(" as ")[0].strip()) for name in names.split(",")}
    return found


# -- the command line ------------------------------------------------------------------------------------------------


def cli() -> Iterator[str]:
    """Yield verbs, their arguments and options: names, metavars or types, defaults."""
    for options in OPTIONS.values():
        for option in options:
            refused = " refused" if option.refusal else ""
            yield " ".join(["covey run", option.names, option.metavar]).rstrip() + refused
    yield from _verbs(verbs, "covey")


def _verbs(group: click.Group, path: str) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _verbs(command, f"{path} {name}")
            continue
        yield f"{path} {name}"
        for parameter in command.params:
            yield f"{path} {name} {_parameter(parameter)}"


def _parameter(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return ", ".join([*parameter.opts, *parameter.secondary_opts]) + f" [default: {parameter.default is True}]"
    kind = parameter.type
    value = "|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else parameter.metavar or kind.name
    several = "..." if parameter.multiple or parameter.nargs == -1 else ""
    if isinstance(parameter, click.Argument):
        return f"{(parameter.name or '').upper()} {value}{several}" + ("" if parameter.required else " [optional]")
    fixed = parameter.default if isinstance(parameter.default, bool | int | float | str) else ""
    default = f" [default: {fixed}]" if fixed != "" else ""
    return f"{', '.join(parameter.opts)} {value}{several}{default}" + (" [required]" if parameter.required else "")


# -- REST ------------------------------------------------------------------------------------------------------------


def rest() -> Iterator[str]:
    """Yield paths with their parameters, and the fields of every request and answer, from the OpenAPI documents."""
    shared = tuple(operation for operation in COMMON_OPERATIONS if operation.name not in EXCLUDED_OPERATIONS)
    ports = {
        "training": make_document("", TRAINING),
        "federated scheduler": make_document("", (*COMMON_OPERATIONS, *FEDERATED_OPERATIONS)),
        "federated server": device_port.build_document(),
        "operator": make_document(
            "", (*shared, JOBS_OPERATION, SCALE_OPERATION, SUSPEND_OPERATION, STREAM_OPERATION, *FORWARDED_OPERATIONS)
        ),
    }
    for port, described in ports.items():
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                yield from _operation(f"{port}: {method.upper()} {path}", operation, described["components"]["schemas"])


def _operation(name: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield name
    for one in operation.get("parameters", ()):
        yield f"{name} {one['in']} {one['name']}: {one['schema']['type']}"
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield from _fields(f"{name} {REQUEST} {media}", content["schema"], schemas, ())
    yield f"{name} {ANSWER} {', '.join(sorted(operation['responses']))}"
    for answer in operation["responses"].values():
        for media, content in answer.get("content", {}).items():
            yield from _fields(f"{name} {ANSWER} {media}", content["schema"], schemas, ())


def _fields(path: str, schema: dict[str, Any], schemas: dict[str, Any], seen: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each field, at any depth; a type that contains itself is not followed again."""
    name = schema.get("$ref", "").rpartition("/")[2]
    if name:
        if name not in seen:
            yield from _fields(path, schemas[name], schemas, (*seen, name))
        return
    for one in (*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("prefixItems", ())):
        yield from _fields(path, one, schemas, seen)
    if isinstance(schema.get("items"), dict):
        yield from _fields(f"{path}[]", schema["items"], schemas, seen)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _fields(f"{path}.*", schema["additionalProperties"], schemas, seen)
    for field, inner in schema.get("properties", {}).items():
        required = "" if field in schema.get("required", ()) else " [optional]"
        yield f"{path}.{field}: {_type(inner, schemas)}{required}"
        yield from _fields(f"{path}.{field}", inner, schemas, seen)


def _type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _type(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return " or ".join(sorted({_type(one, schemas) for one in schema["anyOf"]}))
    if "enum" in schema:
        return "|".join(sorted(map(str, schema["enum"])))
    return str(schema.get("type", "any"))


# -- settings, metrics, events, exit codes ---------------------------------------------------------------------------


def settings() -> Iterator[str]:
    """Yield variables and names in a settings file, with types and defaults; and the keys of contexts."""
    yield f"variable {SETTINGS_FILE_VARIABLE}: path of the settings file"
    for field in msgspec.structs.fields(Settings):
        kind = type(field.default).__name__ if field.default is not None else "str"
        secret = " secret" if TABLE[field.name].secret else ""
        yield f"variable {TABLE[field.name].variable}, in a file {field.name}: {kind} = {field.default!r}{secret}"
    for name, value in PS_CONTEXT.items():
        yield f"set_ps_context {name}: {type(value).__name__} = {value!r}"
    for name, key in KEYS.items():
        yield f"set_fl_context {name}: {type(key.default).__name__} = {key.default!r}"


def metrics() -> Iterator[str]:
    """Yield the metrics of each port with type and labels."""
    ports = ("training", "federated scheduler", "operator")
    for port, text in zip(ports, _reference().metric_texts().values(), strict=True):
        for family in text_string_to_metric_families(text.decode()):
            if family.name.endswith("_created") and family.type == "gauge":
                continue  # added by the library: when a counter began
            labels = sorted({label for sample in family.samples for label in sample.labels})
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield f"{port}: {name} {family.type} {{{', '.join(labels)}}}"


def _reference() -> Any:
    """Return the module that writes docs/reference/, which renders every metric."""
    spec = importlib.util.spec_from_file_location("build_reference", ROOT / "docs/build_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PUBLISHERS = ("publish", "_publish", "_publish_event", "PublishEvent")  # called with a node, the name of an event, and a reason


def events() -> Iterator[str]:
    """Yield the fields of an event, the names of events in the story, and what `--on-event` sends."""
    for kind, word in ((Event, "story"), (HookEvent, "hook")):
        for field in msgspec.structs.fields(kind):
            yield f"{word} field {field.name}"
    for path in sorted((ROOT / "src/covey").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _called(node) in PUBLISHERS and len(node.args) > 1:
                yield from (f"story event {name}" for name in _texts(node.args[1]))
    for name in {*KIND_BY_EVENT.values(), "exit"}:
        yield f"hook event {name}"


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def exit_codes() -> Iterator[str]:
    """Yield the numbers with their keys."""
    for code in ExitCode:
        yield f"{int(code):3d} {code.name}"
