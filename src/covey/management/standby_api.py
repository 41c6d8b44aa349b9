"""What the management port of a scheduler that stands by answers: where the leader's is."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from covey.management.common_api import refusal, target


def make_app(leader: Callable[[], str]) -> ASGIApp:
    """The application for `console.server.Server`. `leader` is where the leader's port is, "" while nobody leads."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        where = leader()
        if where:
            sentence = f"this scheduler stands by: the one that leads answers at {where}"
            reply = refusal(307, sentence, {"location": where + target(Request(scope))})
        else:
            reply = refusal(503, "this scheduler stands by, and nobody leads now: ask again in a moment")
        await reply(scope, receive, send)

    return answer
