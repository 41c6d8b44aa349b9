"""The management port's paths, and the gate every request passes before it reaches one.

Thin: replies come from `replies`, numbers from `metrics`, the decision who may speak from `guard`. Every answer that is not a
success is the same JSON, `{"error_message": ..., "code": "1"}`, whatever went wrong.
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
QUOTED_TEXT_MAX = 100  # characters of a path that a sentence repeats

_BODY_TOO_LONG = f"the body is longer than {BODY_MAX} bytes: send less"
_PUBLIC_PATHS = frozenset(operation.path for operation in openapi.COMMON_OPERATIONS if operation.is_public)
# A proxy's own connection comes from loopback, whoever stands behind it.
_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

log = logging.getLogger("covey.management")


class ClusterSource(live_stream.StreamSource, Protocol):
    """What the scheduler lends the console: a look, and one verb."""

    def stop(self, reason: str) -> None: ...


Handler = Callable[[Request], Awaitable[Response]]


class CommonHandlers:
    """What every kind of cluster answers: one method per operation of `openapi.COMMON_OPERATIONS`, by its name."""

    def __init__(self, source: ClusterSource, settings: Sequence[tuple[str, str, str, str]], key: str) -> None:
        self.version = VERSION
        self.live_stream = live_stream.LiveStream(source, self.version)
        self.document = b""  # set once all operations are known
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
        log.info("stop asked by %s: %s", describe_peer(request), reason)
        self._source.stop(reason)
        return json_response(schemas.Reply("The cluster was asked to end."))

    async def metrics(self, request: Request) -> Response:
        return make_response(cluster_metrics.render(self._source.view(), self.version), cluster_metrics.CONTENT_TYPE)

    async def healthz(self, request: Request) -> Response:
        return json_response(schemas.Reply("ok"))

    async def story(self, request: Request) -> Response:
        said = request.query_params
        limit = schemas.parse_integer(said.get("limit", str(REPLY_EVENTS_MAX)), "limit", 1, REPLY_EVENTS_MAX)
        after, node = (
            schemas.parse_timestamp(said.get("after", "0"), "after"),
            schemas.check_text_length(said.get("node", ""), "node"),
        )
        return json_response(
            schemas.StoryReply("Get story successful.", self._source.event_log.events_after(after, node, limit))
        )

    async def settings(self, request: Request) -> Response:
        return json_response(self._settings)

    async def stream(self, request: Request) -> Response:
        pieces = self.live_stream.stream()
        if pieces is None:
            return error_response(503, f"{live_stream.CLIENTS_MAX} pages look at this cluster already: close one, or try again")
        return StreamingResponse(pieces, 200, common_headers(), openapi.EVENT_STREAM)

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
    """The application for `covey.management.http_server.HttpServer`. An empty `token` shuts out all but commands on loopback.

    `more` are the operations of this kind of cluster, with their answers; one of the name of a common one replaces it.
    `without` names common ones that make no sense here.
    """
    key = secrets.token_urlsafe(24)
    common = CommonHandlers(source, settings, key)
    theirs = {operation.name for operation in more} | without
    doors: dict[openapi.Operation, Handler] = {
        **{op: getattr(common, op.name) for op in openapi.COMMON_OPERATIONS if op.name not in theirs},
        **more,
    }
    common.document = msgspec.json.encode(openapi.make_document(common.version, tuple(doors)))
    files = web_files.read_web_files()
    app = Starlette(
        routes=[
            *(Route(path, _make_file_handler(*found)) for path, found in files.items()),
            *(Route(op.path, reply, methods=[op.method]) for op, reply in doors.items()),
        ],
        middleware=[Middleware(AuthMiddleware, token=token, key=key, open_to_all=_PUBLIC_PATHS | files.keys())],
        exception_handlers={HTTPException: _on_http_exception, CoveyError: _on_covey_error},
    )
    app.router.redirect_slashes = False  # a redirect would repeat whatever the Host header says
    app.state.beside = common.live_stream.run
    app.state.operations = tuple(doors)
    return app


def _make_file_handler(content: bytes, media_type: str) -> Handler:
    async def file(request: Request) -> Response:
        return make_response(content, media_type, headers=web_files.SECURITY_HEADERS)

    return file


class AuthMiddleware:
    """Asks the guard, refuses a body that announces itself as too long, and turns a bug of ours into a 500."""

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
            log.debug("%s hung up before the end of its request", request.client)
        except Exception as bug:
            # Replies are made whole before they are sent, so nothing has been sent yet.
            log.error("%s %s failed: %s: %s", request.method, _printable_path(request), type(bug).__name__, bug)
            log.debug("where it failed:", exc_info=bug)
            sentence = f"the scheduler failed to answer {request.method} {_printable_path(request)}: its log says why"
            await error_response(500, sentence)(scope, receive, send)

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
    """The whole body, or a refusal as soon as it grows too long: a chunked one has announced no length."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MAX:
            raise HTTPException(413, _BODY_TOO_LONG, {"Connection": "close"})
    return bytes(body)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    """What the router or an answer refuses, in our JSON."""
    assert isinstance(exc, HTTPException)
    headers = dict(exc.headers or {})
    if exc.status_code == 404:
        paths = ", ".join(op.path for op in request.app.state.operations)
        return error_response(404, f"there is no {_printable_path(request)} here: the paths are {paths}", headers)
    if exc.status_code == 405:
        sentence = f"{_printable_path(request)} does not answer {request.method}: use {headers['Allow']}"
        return error_response(405, sentence, headers)
    return error_response(exc.status_code, exc.detail, headers)


async def _on_covey_error(request: Request, exc: Exception) -> Response:
    """A sentence for the caller: they can do something about it."""
    return error_response(503 if isinstance(exc, StoreError) else 400, str(exc))


def json_response(reply: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return make_response(msgspec.json.encode(reply), "application/json", status, headers)


def error_response(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return json_response(schemas.ErrorReply(sentence), status, headers)


def make_response(body: bytes, media_type: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, {**common_headers(), **(headers or {})}, media_type)


def common_headers() -> dict[str, str]:
    kept_out = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
    return {"Date": formatdate(usegmt=True), "Cache-Control": "no-store", **kept_out}


def describe_peer(request: Request) -> str:
    """Who asks, for the log and the story."""
    return request.client.host if request.client else "an unknown peer"


def path_and_query(request: Request, path: str = "") -> str:
    """Path and query, to be asked for elsewhere; with another `path`, the same question there."""
    query = request.scope["query_string"].decode("latin-1")
    return quote(path or _request_path(request)) + (f"?{query}" if query else "")


def _request_path(request: Request) -> str:
    """As the router sees it. Not `request.url.path`: that one is made from the Host header too, and a Host can lie."""
    path: str = request.scope["path"]
    return path


def _printable_path(request: Request) -> str:
    path = _request_path(request)
    return path if len(path) <= QUOTED_TEXT_MAX and path.isprintable() else repr(path[:QUOTED_TEXT_MAX])
