"""OpenAPI 3.1 document of the device port, made from the types of its requests and replies."""

from __future__ import annotations

from typing import Any

import msgspec

from covey.federated.device_protocol import (
    JSON,
    MSGPACK,
    SAFETENSORS,
    Answer,
    Code,
    FlPlan,
    GetModel,
    SecureAnswer,
    StartJob,
    UpdateFields,
)
from covey.federated.server.secagg_endpoints import SECAGG_REQUEST_TYPES

_SCHEMA_REF = "#/components/schemas/{name}"
_TENSORS_DESCRIPTION = (
    "safetensors: the model's tensors as F32; the fields of {name} are the header's __metadata__, each as a string."
)


def build_document(prefix: str = "") -> dict[str, Any]:
    """Return the OpenAPI document as dicts and lists for JSON; `prefix` is put before every path."""
    types = (Answer, FlPlan, GetModel, SecureAnswer, StartJob, UpdateFields, *SECAGG_REQUEST_TYPES.values())
    _, schemas = msgspec.json.schema_components(types, ref_template=_SCHEMA_REF)
    codes = ", ".join(f"{code.value} {code.name}" for code in Code)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "covey: device port",
            "version": "1",
            "description": f"The HTTP status is 200 also for a refusal; the result is retcode: {codes}.",
        },
        "paths": {
            f"{prefix}/startFLJob": _describe_operation("startFLJob", StartJob, gives_model=True),
            f"{prefix}/updateModel": _describe_operation("updateModel", UpdateFields, gives_model=False),
            f"{prefix}/getModel": _describe_operation("getModel", GetModel, gives_model=True),
            **{
                f"{prefix}/{name}": _describe_operation(name, body, gives_model=False, answer="SecureAnswer")
                for name, body in SECAGG_REQUEST_TYPES.items()
            },
        },
        "components": {"schemas": schemas},
    }


def encode_document(prefix: str) -> bytes:
    return msgspec.json.encode(build_document(prefix))


def _describe_operation(
    name: str, body: type[msgspec.Struct], *, gives_model: bool = False, answer: str = "Answer"
) -> dict[str, Any]:
    summary = (body.__doc__ or "").strip()
    fields = {"schema": {"$ref": _SCHEMA_REF.format(name=body.__name__)}}
    if body is UpdateFields:
        content: dict[str, Any] = {SAFETENSORS: _binary_schema(body.__name__)}
    else:
        content = {JSON: fields, MSGPACK: fields}
    schema = {"schema": {"$ref": _SCHEMA_REF.format(name=answer)}}
    answers: dict[str, Any] = {JSON: schema, MSGPACK: schema}
    if gives_model:
        answers[SAFETENSORS] = _binary_schema("Answer")
    refused = {"description": "The request cannot be read.", "content": {JSON: schema}}
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {
                "200": {"description": "The result is retcode.", "content": answers},
                **dict.fromkeys(("400", "405", "408", "411", "413", "415", "431", "503"), refused),
            },
        }
    }


def _binary_schema(name: str) -> dict[str, Any]:
    return {"schema": {"type": "string", "format": "binary", "description": _TENSORS_DESCRIPTION.format(name=name)}}
