"""What the management port of a scheduler that stands by answers: where the leader's is."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from covey.management.common_api import error_response, path_and_query


def make_app(leader: Callable[[], str]) -> ASGIApp:
    """The application for `console.server.Server`. `leader` is where the leader's port is, "" while nobody leads."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        where = leader()
        if where:
            sentence = f"this scheduler stands by: the one that leads answers at {where}"
            reply = error_response(307, sentence, {"location": where + path_and_query(Request(scope))})
        else:
            reply = error_response(503, "this scheduler stands by, and nobody leads now: ask again in a moment")
        await reply(scope, receive, send)

    return answer
