"""Table of the common operations of the management port, and the OpenAPI 3.1 document.

Routes and document are made from the same operations, so every operation is documented. The docstrings of the types of bodies
and replies are descriptions in the document.
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
    """A parameter of a path or query. Path parameters are required, query parameters are optional."""

    name: str
    location: str  # "path" or "query"
    json_type: str  # "string", "integer" or "number"
    description: str
    limits: tuple[tuple[str, int], ...] = ()  # keywords of its JSON schema, such as minimum

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
    """One operation. `reply` is the type of its JSON reply, or the media type of another reply."""

    name: str
    method: str
    path: str
    summary: str
    reply: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None  # None: no body is documented
    is_public: bool = False  # needs no token
    parameters: tuple[Parameter, ...] = ()


EVENT_STREAM = "text/event-stream"
NODE_PARAMETER = Parameter(
    "node", "query", "string", "Only events of this node, such as worker:1.", (("maxLength", NODE_ID_MAX),)
)
AFTER_PARAMETER = Parameter("after", "query", "number", "Only events after this time, in seconds since 1970.")
LIMIT_PARAMETER = Parameter(
    "limit",
    "query",
    "integer",
    "Maximum number of events; the newest are returned.",
    (("minimum", 1), ("maximum", REPLY_EVENTS_MAX)),
)

COMMON_OPERATIONS = (  # of every kind of cluster
    Operation("nodes", "GET", "/nodes", "All nodes, in MindSpore's JSON.", NodesReply),
    Operation("state", "GET", "/state", "State of the cluster, in MindSpore's JSON.", StateReply),
    Operation("view", "GET", "/view", "Complete view of the cluster.", ClusterView),
    Operation("stop", "POST", "/stop", "Shut down the cluster gracefully.", Reply, StopBody),
    Operation("metrics", "GET", "/metrics", "Metrics for Prometheus.", CONTENT_TYPE),
    Operation("healthz", "GET", "/healthz", "Liveness of the scheduler's event loop.", Reply, is_public=True),
    Operation(
        "story",
        "GET",
        "/story",
        "Events, oldest first.",
        StoryReply,
        parameters=(NODE_PARAMETER, AFTER_PARAMETER, LIMIT_PARAMETER),
    ),
    Operation("settings", "GET", "/settings", "Every setting, with the origin of its value.", SettingsReply),
    Operation("stream", "GET", "/stream", "Live state of the cluster, as server-sent events.", EVENT_STREAM),
    Operation("key", "GET", "/key", "Key of the console's page for requests on loopback.", KeyReply),
    Operation("openapi", "GET", "/openapi.json", "This document.", "application/json"),
)

ERROR_DESCRIPTIONS = {
    400: "The request is invalid.",
    401: "The token is missing or wrong.",
    403: "The Host header is neither an address nor localhost.",
    404: "Unknown path.",
    405: "The path does not support this method.",
    409: "The cluster refuses the request in its current state; the message has the reason.",
    413: "The body is longer than 1 MiB.",
    431: "The headers are too long.",
    500: "Internal error; see the scheduler's log.",
    503: "Too many connections; retry later.",
}
_ERROR_HEADERS = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    405: {"Allow": {"required": True, "schema": {"type": "string"}}},
}


def make_document(version: str, operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Return the OpenAPI document of these operations."""
    types = {ErrorReply, *(t for op in operations for t in (op.reply, op.body) if isinstance(t, type))}
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda t: t.__name__), ref_template=_REF_TEMPLATE)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "covey management port",
            "version": version,
            "description": "Commands on loopback need no token; all other requests, and every web page, do.",
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
    impossible = () if not op.is_public else (401, 403)
    operation: dict[str, Any] = {
        "operationId": op.name,
        "summary": op.summary,
        "parameters": [parameter.to_openapi() for parameter in op.parameters],
        "responses": {
            "200": {"description": op.summary, "content": _content_object(op.reply)},
            **{
                str(status): {"$ref": f"#/components/responses/{status}"}
                for status in ERROR_DESCRIPTIONS
                if status not in impossible
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
