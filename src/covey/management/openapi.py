"""Every operation of the management port in one table, and the OpenAPI 3.1 document made from it.

The routes are made from the same table, so an operation cannot exist without being documented.
"""

from __future__ import annotations

from typing import Any

import msgspec

from covey.core.cluster.view import ClusterView
from covey.core.event_log import REPLY_EVENTS_MAX
from covey.core.messages import NODE_ID_MAX
from covey.management.cluster_metrics import CONTENT_TYPE
from covey.management.schemas import ErrorReply, KeyReply, NodesReply, Reply, SettingsReply, StateReply, StopBody, StoryReply

_REF_TEMPLATE = "#/components/schemas/{name}"


class Parameter(msgspec.Struct, frozen=True):
    """One thing a path or its query says. Only what stands in a path is required."""

    name: str
    location: str  # "path" or "query"
    json_type: str  # "string", "integer" or "number"
    description: str
    limits: tuple[tuple[str, int], ...] = ()

    def to_openapi(self) -> dict[str, Any]:
        schema = {"type": self.json_type, **dict(self.limits)}
        described = {
            "name": self.name,
            "in": self.location,
            "required": self.location == "path",
            "description": self.description,
        }
        return {**described, "schema": schema}


class Operation(msgspec.Struct, frozen=True):
    """One door. `reply` is the type of its JSON, or a media type where it is not one of ours."""

    name: str
    method: str
    path: str
    summary: str
    reply: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    is_public: bool = False  # to everybody, token or not
    parameters: tuple[Parameter, ...] = ()


EVENT_STREAM = "text/event-stream"
NODE_PARAMETER = Parameter("node", "query", "string", "Of this node alone, as in worker:1.", (("maxLength", NODE_ID_MAX),))
AFTER_PARAMETER = Parameter("after", "query", "number", "Only what came after this moment, in seconds since 1970.")
LIMIT_PARAMETER = Parameter(
    "limit", "query", "integer", "At most so many, the newest.", (("minimum", 1), ("maximum", REPLY_EVENTS_MAX))
)

COMMON_OPERATIONS = (  # to every kind of cluster
    Operation("nodes", "GET", "/nodes", "The nodes, in MindSpore's JSON.", NodesReply),
    Operation("state", "GET", "/state", "The state of the cluster, in MindSpore's JSON.", StateReply),
    Operation("view", "GET", "/view", "All there is to know about the cluster.", ClusterView),
    Operation("stop", "POST", "/stop", "Ask the cluster to end.", Reply, StopBody),
    Operation("metrics", "GET", "/metrics", "Numbers for Prometheus.", CONTENT_TYPE),
    Operation("healthz", "GET", "/healthz", "Answers while the scheduler's loop turns.", Reply, is_public=True),
    Operation(
        "story",
        "GET",
        "/story",
        "What happened, oldest first.",
        StoryReply,
        parameters=(NODE_PARAMETER, AFTER_PARAMETER, LIMIT_PARAMETER),
    ),
    Operation("settings", "GET", "/settings", "Every setting, and where its value comes from.", SettingsReply),
    Operation("stream", "GET", "/stream", "The cluster as it is and changes, as server-sent events.", EVENT_STREAM),
    Operation("key", "GET", "/key", "What the page at / sends with its actions, on loopback.", KeyReply),
    Operation("openapi", "GET", "/openapi.json", "This document.", "application/json"),
)

ERROR_DESCRIPTIONS = {
    400: "The request cannot be understood.",
    401: "The token is missing or wrong.",
    403: "The Host header could be a web page's doing.",
    404: "There is nothing under this path.",
    405: "This path answers another method.",
    409: "The cluster is not in a state for this; the sentence says why.",
    413: "The body is longer than 1 MiB.",
    431: "The headers are too long.",
    500: "The scheduler failed to answer; its log says why.",
    503: "Too many connections: try again.",
}
_ERROR_HEADERS = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    405: {"Allow": {"required": True, "schema": {"type": "string"}}},
}


def make_document(version: str, operations: tuple[Operation, ...]) -> dict[str, Any]:
    types = {ErrorReply, *(t for op in operations for t in (op.reply, op.body) if isinstance(t, type))}
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda t: t.__name__), ref_template=_REF_TEMPLATE)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "covey: the management port",
            "version": version,
            "description": "Commands on loopback need no token. Everything else does, and so does every web page.",
        },
        "security": [{}, {"token": []}],
        "paths": {op.path: {op.method.lower(): _operation_object(op)} for op in operations},
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error_response_object(status) for status in ERROR_DESCRIPTIONS},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation_object(op: Operation) -> dict[str, Any]:
    shut = () if not op.is_public else (401, 403)
    operation: dict[str, Any] = {
        "operationId": op.name,
        "summary": op.summary,
        "parameters": [parameter.to_openapi() for parameter in op.parameters],
        "responses": {
            "200": {"description": op.summary, "content": _content_object(op.reply)},
            **{
                str(status): {"$ref": f"#/components/responses/{status}"} for status in ERROR_DESCRIPTIONS if status not in shut
            },
        },
    }
    if op.body is not None:
        operation["requestBody"] = {"required": op.body is not StopBody, "content": _content_object(op.body)}
    if op.is_public:
        operation["security"] = []
    return operation


def _content_object(reply: type[msgspec.Struct] | str) -> dict[str, Any]:
    if isinstance(reply, str):
        return {reply: {"schema": {"type": "object" if reply == "application/json" else "string"}}}
    return {"application/json": {"schema": {"$ref": _REF_TEMPLATE.format(name=reply.__name__)}}}


def _error_response_object(status: int) -> dict[str, Any]:
    return {
        "description": ERROR_DESCRIPTIONS[status],
        "headers": _ERROR_HEADERS.get(status, {}),
        "content": _content_object(ErrorReply),
    }
