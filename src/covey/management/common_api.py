"""Operations of the management port that several kinds of clusters share, and the checks before each request.

Errors are JSON: `{"error_message": ..., "code": "1"}`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import formatdate
from typing import Protocol
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from covey.core.event_log import REPLY_EVENTS_MAX
from covey.errors import CoveyError, StoreError
from covey.management import auth, cluster_metrics, live_stream, openapi, schemas, web_files
from covey.version import VERSION

BODY_MAX = 1 << 20  # bytes
QUOTED_TEXT_MAX = 100  # characters of a path or name in an error message

_BODY_TOO_LONG = f"the body is longer than {BODY_MAX} bytes: send a shorter one"
_PUBLIC_PATHS = frozenset(operation.path for operation in openapi.COMMON_OPERATIONS if operation.is_public)
# A request with one of these does not count as local: a local proxy connects from loopback, also for clients on other hosts.
_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

log = logging.getLogger("covey.management")


class ClusterSource(live_stream.StreamSource, Protocol):
    """The scheduler or the operator, as the management port uses it: its view, its events, and stop."""

    def stop(self, reason: str) -> None: ...


Handler = Callable[[Request], Awaitable[Response]]


class CommonHandlers:
    """Handlers of `openapi.COMMON_OPERATIONS`: one method per operation, of the same name."""

    def __init__(self, source: ClusterSource, settings: Sequence[tuple[str, str, str, str]], key: str) -> None:
        self.version = VERSION
        self.live_stream = live_stream.LiveStream(source, self.version)
        self.document = b""  # OpenAPI document; set by `make_app`
        self._source = source
        self._settings = schemas.SettingsReply("Get settings successful.", [schemas.Setting(*setting) for setting in settings])
        self._key = key

    async def nodes(self, request: Request) -> Response:
        return json_response(schemas.make_nodes_reply(self._source.view()))

    async def state(self, request: Request) -> Response:
        return json_response(schemas.make_state_reply(self._source.view()))

    async def view(self, request: Request) -> Response:
        return json_response(self._source.view())

    async def stop(self, request: Request) -> Response:
        reason = schemas.parse_stop_reason(await read_body(request))
        log.info("stop requested by %s: %s", describe_peer(request), reason)
        self._source.stop(reason)
        return json_response(schemas.Reply("The cluster is stopping."))

    async def metrics(self, request: Request) -> Response:
        return make_response(cluster_metrics.render(self._source.view(), self.version), cluster_metrics.CONTENT_TYPE)

    async def healthz(self, request: Request) -> Response:
        return json_response(schemas.Reply("ok"))

    async def story(self, request: Request) -> Response:
        query = request.query_params
        limit = schemas.parse_integer(query.get("limit", str(REPLY_EVENTS_MAX)), "limit", 1, REPLY_EVENTS_MAX)
        after, node = (
            schemas.parse_timestamp(query.get("after", "0"), "after"),
            schemas.check_text_length(query.get("node", ""), "node"),
        )
        return json_response(
            schemas.StoryReply("Get story successful.", self._source.event_log.events_after(after, node, limit))
        )

    async def settings(self, request: Request) -> Response:
        return json_response(self._settings)

    async def stream(self, request: Request) -> Response:
        messages = self.live_stream.stream()
        if messages is None:
            return error_response(
                503, f"{live_stream.CLIENTS_MAX} pages follow this cluster already: close one, or retry later"
            )
        return StreamingResponse(messages, 200, common_headers(), openapi.EVENT_STREAM)

    async def key(self, request: Request) -> Response:
        return json_response(schemas.KeyReply("Get key successful.", self._key))

    async def openapi(self, request: Request) -> Response:
        return make_response(self.document, "application/json")


def make_app(
    source: ClusterSource,
    *,
    token: str,
    more: Mapping[openapi.Operation, Handler],
    settings: Sequence[tuple[str, str, str, str]] = (),
    without: frozenset[str] = frozenset(),
) -> Starlette:
    """Return the application for `covey.management.http_server.HttpServer`. With an empty `token`, requests that need a token
    are refused.

    `more` has further operations and their handlers; one with the name of a common operation replaces it. `settings` has the
    fields of each `schemas.Setting`. `without` names common operations to omit.
    """
    key = secrets.token_urlsafe(24)
    common = CommonHandlers(source, settings, key)
    excluded = {operation.name for operation in more} | without
    handlers: dict[openapi.Operation, Handler] = {
        **{op: getattr(common, op.name) for op in openapi.COMMON_OPERATIONS if op.name not in excluded},
        **more,
    }
    common.document = msgspec.json.encode(openapi.make_document(common.version, tuple(handlers)))
    files = web_files.read_web_files()
    app = Starlette(
        routes=[
            *(Route(path, _make_file_handler(*file)) for path, file in files.items()),
            *(Route(op.path, handler, methods=[op.method]) for op, handler in handlers.items()),
        ],
        middleware=[Middleware(AuthMiddleware, token=token, key=key, open_to_all=_PUBLIC_PATHS | files.keys())],
        exception_handlers={HTTPException: _on_http_exception, CoveyError: _on_covey_error},
    )
    app.router.redirect_slashes = False  # a redirect would contain the client's Host header
    app.state.beside = common.live_stream.run
    app.state.operations = tuple(handlers)
    return app


def _make_file_handler(content: bytes, media_type: str) -> Handler:
    async def file(request: Request) -> Response:
        return make_response(content, media_type, headers=web_files.SECURITY_HEADERS)

    return file


class AuthMiddleware:
    """Middleware that authorizes requests, refuses a Content-Length above `BODY_MAX`, and answers unexpected exceptions with a
    500. Paths in `open_to_all` need no authorization."""

    def __init__(self, app: ASGIApp, token: str, key: str, open_to_all: frozenset[str]) -> None:
        self._app = app
        self._token = token
        self._key = key
        self._public_paths = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            await (self._check_request(request) or self._app)(scope, receive, send)
        except ClientDisconnect:
            log.debug("%s disconnected before the end of its request", request.client)
        except Exception as bug:
            # Unless the reply is a stream, it has not begun, and a 500 can be sent. In a stream the connection is closed.
            log.error("%s %s failed: %s: %s", request.method, _printable_path(request), type(bug).__name__, bug)
            log.debug("traceback:", exc_info=bug)
            message = f"{request.method} {_printable_path(request)} failed in the scheduler: see its log"
            await error_response(500, message)(scope, receive, send)

    def _check_request(self, request: Request) -> Response | None:
        headers = request.headers
        hosts = headers.getlist("host")
        verdict = auth.authorize(
            peer=request.client.host if request.client and not any(h in headers for h in _PROXY_HEADERS) else "",
            host=hosts[0] if len(hosts) == 1 else "",
            origin=headers.get("origin"),
            sec_fetch_site=headers.get("sec-fetch-site"),
            authorization=headers.get("authorization"),
            method=request.method,
            token=self._token,
            key=self._key,
        )
        if not verdict.allowed and _request_path(request) not in self._public_paths:
            log.info("%s %s was refused: %s", request.method, _printable_path(request), verdict.reason)
            challenge = {"WWW-Authenticate": 'Bearer realm="covey"'} if verdict.status == 401 else {}
            return error_response(verdict.status, verdict.reason, challenge)
        if int(headers.get("content-length", 0)) > BODY_MAX:
            return error_response(413, _BODY_TOO_LONG, {"Connection": "close"})
        return None


async def read_body(request: Request) -> bytes:
    """Return the body. Raise HTTPException 413 if it is longer than `BODY_MAX`, and ClientDisconnect if the client
    disconnects."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MAX:  # a chunked body has no Content-Length that was checked before
            raise HTTPException(413, _BODY_TOO_LONG, {"Connection": "close"})
    return bytes(body)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    headers = dict(exc.headers or {})
    if exc.status_code == 404:
        paths = ", ".join(op.path for op in request.app.state.operations)
        return error_response(404, f"unknown path {_printable_path(request)}: expected one of {paths}", headers)
    if exc.status_code == 405:
        message = f"{_printable_path(request)} does not support {request.method}: use {headers['Allow']}"
        return error_response(405, message, headers)
    return error_response(exc.status_code, exc.detail, headers)


async def _on_covey_error(request: Request, exc: Exception) -> Response:
    return error_response(503 if isinstance(exc, StoreError) else 400, str(exc))


def json_response(reply: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return make_response(msgspec.json.encode(reply), "application/json", status, headers)


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return json_response(schemas.ErrorReply(message), status, headers)


def make_response(body: bytes, media_type: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, {**common_headers(), **(headers or {})}, media_type)


def common_headers() -> dict[str, str]:
    isolation = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
    return {"Date": formatdate(usegmt=True), "Cache-Control": "no-store", **isolation}


def describe_peer(request: Request) -> str:
    """Return the client's address, for logs and events; "an unknown peer" if there is none."""
    return request.client.host if request.client else "an unknown peer"


def path_and_query(request: Request, path: str = "") -> str:
    """Return the percent-encoded path and the query of a request. `path` replaces the request's path unless it is ""."""
    query = request.scope["query_string"].decode("latin-1")
    return quote(path or _request_path(request)) + (f"?{query}" if query else "")


def _request_path(request: Request) -> str:
    path: str = request.scope["path"]  # request.url.path would depend on the Host header, which the client controls
    return path


def _printable_path(request: Request) -> str:
    path = _request_path(request)
    return path if len(path) <= QUOTED_TEXT_MAX and path.isprintable() else repr(path[:QUOTED_TEXT_MAX])
