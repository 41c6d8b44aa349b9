"""Operations of the management port of a training cluster: recoveries, resizes, kill, dump, logs, lost hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from covey.core.incidents import Incident
from covey.core.messages import NODE_ID_MAX, KillRequest, LogChunk, RequestAccepted, ScaleAccepted, ScaleRequest, StopRequest
from covey.errors import PeerError
from covey.management import common_api, schemas
from covey.management.common_api import QUOTED_TEXT_MAX, describe_peer, error_response, json_response, read_body
from covey.management.openapi import COMMON_OPERATIONS, Operation, Parameter
from covey.management.schemas import (
    GoneBody,
    KillBody,
    LogReply,
    RecoveriesReply,
    Reply,
    ScaleInBody,
    ScaleOutBody,
    ScaleReply,
    StopBody,
)

LOG_START_MAX: Final = 1 << 53  # bytes
START_LIMITS: Final = (("minimum", -LOG_START_MAX), ("maximum", LOG_START_MAX))
NUMBER_PARAMETER = Parameter("number", "path", "integer", "Number of the operation.", (("minimum", 1),))
LOG_PARAMETERS = (
    Parameter("node", "path", "string", "Name of the node, such as worker:1.", (("minLength", 1), ("maxLength", 200))),
    Parameter("start", "query", "integer", "First byte; negative: counted from the end of the log.", START_LIMITS),
    Parameter("find", "query", "string", "Only lines that contain this text.", (("maxLength", NODE_ID_MAX),)),
)
TRAINING_OPERATIONS = (
    Operation(
        "recoveries",
        "GET",
        "/recoveries",
        "Recoveries and resizes: cause, strategy, outcome, duration of each stage.",
        RecoveriesReply,
    ),
    Operation("scaleout", "POST", "/scaleout", "Add workers or parameter servers.", ScaleReply, ScaleOutBody),
    Operation("scalein", "POST", "/scalein", "Remove workers or parameter servers.", ScaleReply, ScaleInBody),
    Operation("rollback", "POST", "/scaleoutRollback", "Roll back a scale-out in progress.", ScaleReply),
    Operation(
        "operation",
        "GET",
        "/operations/{number}",
        "State of a resize.",
        Incident,
        parameters=(NUMBER_PARAMETER,),
    ),
    Operation("kill", "POST", "/kill", "Kill the process of a node, to test the recovery.", Reply, KillBody),
    Operation("dump", "POST", "/dump", "Have the ranks dump their state, then end the cluster.", Reply, StopBody),
    Operation(
        "logs",
        "GET",
        "/logs/{node}",
        "Log of a node: complete lines, one chunk per request.",
        LogReply,
        parameters=LOG_PARAMETERS,
    ),
    Operation(
        "gone",
        "POST",
        "/gone",
        "Report that a host instance is gone, so that the scheduler does not wait for it.",
        Reply,
        GoneBody,
    ),
)
ALL_OPERATIONS = (*COMMON_OPERATIONS, *TRAINING_OPERATIONS)


class TrainingSource(common_api.ClusterSource, Protocol):
    """The scheduler of a training cluster, as the management port uses it. Requests raise `PeerError` if they are refused, and
    `StoreError` if their effect may not be durable."""

    def recoveries(self) -> list[Incident]: ...

    async def submit_request(self, request: ScaleRequest | KillRequest | StopRequest) -> ScaleAccepted | RequestAccepted: ...

    async def read_log(self, node: str, start: int, find: str) -> LogChunk: ...

    async def report_host_gone(self, life: str, reason: str) -> None: ...


class TrainingHandlers:
    """Handlers of `TRAINING_OPERATIONS`: one method per operation, of the same name."""

    def __init__(self, source: TrainingSource) -> None:
        self._source = source

    async def recoveries(self, request: Request) -> Response:
        return json_response(schemas.make_recoveries_reply(self._source.recoveries()))

    async def scaleout(self, request: Request) -> Response:
        return await self._submit_request("Cluster begin to scale out.", schemas.parse_scale_out(await read_body(request)))

    async def scalein(self, request: Request) -> Response:
        return await self._submit_request("Cluster begin to scale in.", schemas.parse_scale_in(await read_body(request)))

    async def rollback(self, request: Request) -> Response:
        return await self._submit_request("Cluster scale out rollback success.", ScaleRequest(roll_back=True))

    async def operation(self, request: Request) -> Response:
        number = request.path_params["number"]
        found = schemas.find_resize(self._source.recoveries(), number)
        return (
            json_response(found)
            if found is not None
            else error_response(404, f"operation {number[:QUOTED_TEXT_MAX]!r} does not exist")
        )

    async def kill(self, request: Request) -> Response:
        return await self._submit_request(
            "", KillRequest(schemas.parse_kill_target(await read_body(request)), f"requested by {describe_peer(request)}")
        )

    async def dump(self, request: Request) -> Response:
        reason = schemas.parse_stop_reason(await read_body(request), "/dump")
        return await self._submit_request("", StopRequest(reason, dump=True))

    async def logs(self, request: Request) -> Response:
        start = schemas.parse_integer(request.query_params.get("start", "0"), "start", -LOG_START_MAX, LOG_START_MAX)
        find = schemas.check_text_length(request.query_params.get("find", ""), "find")
        try:
            return json_response(
                schemas.make_log_reply(await self._source.read_log(request.path_params["node"][:QUOTED_TEXT_MAX], start, find))
            )
        except PeerError as refused:
            return error_response(404, str(refused))

    async def gone(self, request: Request) -> Response:
        gone = schemas.parse_host_gone(await read_body(request))
        await self._source.report_host_gone(gone.life, gone.reason)
        return json_response(Reply("The scheduler no longer waits for this host."))

    async def _submit_request(self, message: str, request: ScaleRequest | KillRequest | StopRequest) -> Response:
        try:
            accepted = await self._source.submit_request(request)
        except PeerError as refused:
            return error_response(409, str(refused))
        if isinstance(accepted, RequestAccepted):
            return json_response(Reply(accepted.reason))
        return json_response(ScaleReply(message, str(accepted.operation), accepted.reason))


def make_app(source: TrainingSource, *, token: str, settings: Sequence[tuple[str, str, str, str]] = ()) -> Starlette:
    """Return the application for `covey.management.http_server.HttpServer`."""
    handlers = TrainingHandlers(source)
    return common_api.make_app(
        source, token=token, settings=settings, more={op: getattr(handlers, op.name) for op in TRAINING_OPERATIONS}
    )
