"""What the management port of a training cluster answers beyond what every cluster does: recoveries, and the world's size."""

from __future__ import annotations

from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from covey.console import api, replies
from covey.console.api import SHOWN, as_json, refusal, whole_body
from covey.console.openapi import COMMON, Operation
from covey.console.replies import RecoveriesReply, ScaleInBody, ScaleOutBody, ScaleReply
from covey.core.incidents import Incident
from covey.core.messages import ScaleAsked, Scaling
from covey.errors import PeerError, StoreError

RECOVERIES = Operation(
    "recoveries", "GET", "/recoveries", "What went wrong, what was done, how long each stage took.", RecoveriesReply
)
SCALE_OUT = Operation(
    "scaleout", "POST", "/scaleout", "Ask for more workers, or for more parameter servers.", ScaleReply, ScaleOutBody
)
SCALE_IN = Operation("scalein", "POST", "/scalein", "Ask workers or parameter servers to go.", ScaleReply, ScaleInBody)
ROLL_BACK = Operation("rollback", "POST", "/scaleoutRollback", "Take back a growth that is under way.", ScaleReply)
OPERATION = Operation("operation", "GET", "/operations/{number}", "How a change of the world's size goes.", Incident)
OPERATIONS = (*COMMON, RECOVERIES, SCALE_OUT, SCALE_IN, ROLL_BACK, OPERATION)


class Source(api.Source, Protocol):
    """What the scheduler of a training lends the console besides."""

    def recoveries(self) -> list[Incident]: ...

    async def scale(self, asked: ScaleAsked) -> Scaling: ...


def make_app(source: Source, *, token: str) -> Starlette:
    """The application for `covey.console.server.Server`."""

    async def recoveries(request: Request) -> Response:
        return as_json(replies.recoveries(source.recoveries()))

    async def scale(message: str, asked: ScaleAsked) -> Response:
        try:
            decided = await source.scale(asked)
        except PeerError as refused:
            return refusal(409, str(refused))
        except StoreError as uncertain:
            return refusal(503, str(uncertain))
        return as_json(replies.ScaleReply(message, str(decided.operation), decided.reason))

    async def scale_out(request: Request) -> Response:
        return await scale("Cluster begin to scale out.", replies.scale_out(await whole_body(request)))

    async def scale_in(request: Request) -> Response:
        return await scale("Cluster begin to scale in.", replies.scale_in(await whole_body(request)))

    async def roll_back(request: Request) -> Response:
        return await scale("Cluster scale out rollback success.", ScaleAsked(roll_back=True))

    async def operation(request: Request) -> Response:
        number = request.path_params["number"]
        found = replies.operation(source.recoveries(), number)
        return as_json(found) if found is not None else refusal(404, f"no operation has the number {number[:SHOWN]!r}")

    answers = {RECOVERIES: recoveries, SCALE_OUT: scale_out, SCALE_IN: scale_in, ROLL_BACK: roll_back, OPERATION: operation}
    return api.make_app(source, token=token, more=answers)
