"""Type check of the fields of a pod template that covey reads; the schema of the custom resource does not check most of them.

The check reports an invalid field before the operator creates the pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

StringMap = dict[str, str] | None
ObjectList = list[dict[str, Any]] | None


class _Variable(msgspec.Struct):
    name: str
    value: str | None = None


class _Port(msgspec.Struct):
    containerPort: Annotated[int, Meta(ge=1, le=65535)]
    name: str | None = None


class _Container(msgspec.Struct):
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[_Variable] | None = None
    envFrom: ObjectList = None
    ports: list[_Port] | None = None
    volumeMounts: ObjectList = None
    workingDir: str | None = None


class _Spec(msgspec.Struct):
    containers: list[_Container] | None = None
    initContainers: list[_Container] | None = None
    volumes: ObjectList = None
    affinity: dict[str, Any] | None = None


class _Metadata(msgspec.Struct):
    labels: StringMap = None
    annotations: StringMap = None


class _Template(msgspec.Struct):
    spec: _Spec
    metadata: _Metadata | None = None


def find_template_error(template: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the path of the first invalid field, such as ".spec.containers[0].env", and a message; None if all are valid."""
    try:
        msgspec.convert(template, _Template)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        return where.rstrip("`"), f"is not valid in a pod template: {message.replace('`', '')}"
    return None
