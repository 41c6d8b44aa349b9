"""What the management port of a scheduler that stands by answers: where the leader's is."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from covey.console.api import refusal

METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]


def make_app(leader: Callable[[], str]) -> Starlette:
    """The application for `console.server.Server`. `leader` is where the leader's port is, "" while nobody leads."""

    async def answer(request: Request) -> Response:
        where = leader()
        if not where:
            return refusal(503, "this scheduler stands by, and nobody leads now: ask again in a moment")
        query = f"?{request.url.query}" if request.url.query else ""
        sentence = f"this scheduler stands by: the one that leads answers at {where}"
        return refusal(307, sentence, {"location": f"{where}{request.url.path}{query}"})

    return Starlette(routes=[Route("/{path:path}", answer, methods=METHODS)])
