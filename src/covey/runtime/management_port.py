"""The REST port of a process, whose slow imports run on another thread, so that they do not delay the process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from covey.log import log
from covey.runtime.credentials import Credentials

if TYPE_CHECKING:
    from covey.management.http_server import HttpServer


@contextlib.asynccontextmanager
async def serve_management_port(
    make: Callable[[], Any], sockets: list[socket.socket], auth: Credentials
) -> AsyncIterator[None]:
    """Serve the application that `make` returns while the body runs; without sockets nothing is served.

    `make` is called on another thread, and its exception is raised when the body ends. If the server cannot listen, that is
    logged and the body continues.
    """
    if not sockets:
        yield
        return
    serving = asyncio.create_task(_serve_app(make, sockets, auth))
    try:
        yield
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _serve_app(make: Callable[[], Any], sockets: list[socket.socket], auth: Credentials) -> None:
    app, server_type = await asyncio.to_thread(lambda: (make(), _import_http_server()))
    server = server_type(app, sockets, auth.server_context)
    try:
        await server.start()
    except OSError as error:
        log.error("cannot serve the REST port (%s): the cluster continues without it", error)
        return
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


def _import_http_server() -> type[HttpServer]:
    from covey.management.http_server import HttpServer

    return HttpServer
