"""Management API of a federated cluster: MindSpore's paths and JSON, added to the API that all clusters have.

A request that the scheduler refuses is answered with `{"error_message": ..., "code": "1"}` and HTTP 400, as in MindSpore. A
request that it accepted but cannot store yet is answered with HTTP 503.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from covey.errors import UsageError
from covey.federated.scheduler.scheduler import FederatedScheduler, change_plan
from covey.management import common_api
from covey.management.openapi import COMMON_OPERATIONS, Operation
from covey.management.schemas import Reply, StateReply


class ResultReply(msgspec.Struct, frozen=True):
    """Reply to a successful request, with its result."""

    message: str
    result: dict[str, Any] = {}
    code: str = "0"


class ScaleOutBody(msgspec.Struct, frozen=True):
    """Number of processes to add. `worker_num` must be 0: cloud workers are not supported."""

    worker_num: int
    server_num: int


class ScaleInBody(msgspec.Struct, frozen=True):
    """Node ids of the servers to remove."""

    node_ids: list[str]


STATE_OPERATION = next(operation for operation in COMMON_OPERATIONS if operation.name == "state")
FEDERATED_OPERATIONS = (
    Operation("scaleout", "POST", "/scaleout", "Allow more servers to join.", Reply, ScaleOutBody),
    Operation("scalein", "POST", "/scalein", "Remove servers.", Reply, ScaleInBody),
    Operation("rollback", "POST", "/scaleoutRollback", "Roll back a scale-out that is not complete.", Reply),
    Operation("new_instance", "POST", "/newInstance", "Restart at iteration 1 from the newest model.", ResultReply),
    Operation("query", "GET", "/queryInstance", "State of the current instance.", ResultReply),
    Operation("enable", "POST", "/enableFLS", "Serve devices.", ResultReply),
    Operation("disable", "POST", "/disableFLS", "Stop serving devices; the model is still served.", ResultReply),
)


class FederatedHandlers:
    """Request handlers: one method for each operation, with the operation's name."""

    def __init__(self, scheduler: FederatedScheduler) -> None:
        self._scheduler = scheduler
        self._machine = scheduler.machine

    async def state(self, request: Request) -> Response:
        return common_api.json_response(StateReply("Get cluster state successful.", self._machine.state))

    async def scaleout(self, request: Request) -> Response:
        body = _decode_object(await common_api.read_body(request))
        workers, servers = _read_count(body, "worker_num"), _read_count(body, "server_num")
        if workers:
            raise UsageError("The Worker does not currently support scale out.")
        self._scheduler.apply_request_effects(self._machine.scale_out(servers, self._scheduler.now()))
        return common_api.json_response(Reply("Cluster begin to scale out."))

    async def scalein(self, request: Request) -> Response:
        body = _decode_object(await common_api.read_body(request))
        if "node_ids" not in body:
            raise UsageError("The json is not contain the key:node_ids")
        ids = body["node_ids"]
        if not isinstance(ids, list) or not all(isinstance(node_id, str) for node_id in ids):
            raise UsageError("The node ids should be a list of strings.")
        if self._scheduler.node_id in ids:
            raise UsageError(f"The node id:{self._scheduler.node_id} is illegal: it is the scheduler.")
        self._scheduler.apply_request_effects(self._machine.scale_in(ids, self._scheduler.now()))
        return common_api.json_response(Reply("Cluster begin to scale in."))

    async def rollback(self, request: Request) -> Response:
        self._scheduler.apply_request_effects(self._machine.roll_back(self._scheduler.now()))
        return common_api.json_response(Reply("Cluster scale out rollback success."))

    async def new_instance(self, request: Request) -> Response:
        body = await common_api.read_body(request)
        plan = change_plan(self._machine.instance.plan, _decode_object(body) if body else {})
        self._scheduler.apply_request_effects(self._machine.request_new_instance(plan, self._scheduler.now()))
        return common_api.json_response(ResultReply("Start new instance successful.", self._scheduler.instance_status()))

    async def query(self, request: Request) -> Response:
        return common_api.json_response(ResultReply("Query Instance successful.", self._scheduler.instance_status()))

    async def enable(self, request: Request) -> Response:
        self._scheduler.apply_request_effects(self._machine.set_enabled(True, self._scheduler.now()))
        return common_api.json_response(ResultReply("start enabling FL-Server successful.", self._scheduler.instance_status()))

    async def disable(self, request: Request) -> Response:
        self._scheduler.apply_request_effects(self._machine.set_enabled(False, self._scheduler.now()))
        return common_api.json_response(ResultReply("start disabling FL-Server successful.", self._scheduler.instance_status()))


def make_app(scheduler: FederatedScheduler, *, token: str, settings: Sequence[tuple[str, str, str, str]] = ()) -> Any:
    """Return the ASGI application of the management port."""
    handlers = FederatedHandlers(scheduler)
    more = {op: getattr(handlers, op.name) for op in (STATE_OPERATION, *FEDERATED_OPERATIONS)}
    return common_api.make_app(scheduler, token=token, settings=settings, more=more)


def _decode_object(body: bytes) -> dict[str, Any]:
    if not body:
        raise UsageError("The post message size is invalid.")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"Illegal JSON format:{error}") from None


def _read_count(body: dict[str, Any], key: str) -> int:
    if key not in body:
        raise UsageError(f"The json is not contain the key:{key}")
    value = body[key]
    if type(value) is not int or value < 0:
        raise UsageError("The value should not be less than 0.")
    return value
