"""The management port of a standby scheduler: redirects every request to the leader, or answers 503 if its URL is not known."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from covey.management.common_api import error_response, path_and_query


def make_app(leader: Callable[[], str]) -> ASGIApp:
    """Return the application for `http_server.HttpServer`. `leader` returns the URL of the leader's port, or "" if no scheduler
    leads or the leader has no such port."""

    async def redirect(scope: Scope, receive: Receive, send: Send) -> None:
        url = leader()
        if url:
            message = f"this scheduler is a standby: the leader is at {url}"
            response = error_response(307, message, {"location": url + path_and_query(Request(scope))})
        else:
            response = error_response(503, "this scheduler is a standby, and no scheduler leads: retry in a few seconds")
        await response(scope, receive, send)

    return redirect
