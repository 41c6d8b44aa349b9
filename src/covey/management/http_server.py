"""HTTP server on bound sockets, in the running event loop, with limits for clients.

uvicorn parses and writes HTTP. Its `Server` is not used, because it installs signal handlers and, when it stops, waits without
a limit for connections that do not close. uvicorn does not limit the time of a request, so `HttpConnection` does: it
disconnects a client that sends its request or reads the response too slowly. A connection above the maximum number replaces the
oldest one that has not sent any byte; if there is none, it gets a 503.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from covey.management.schemas import ErrorReply

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger: on, for 0 s


class ClientLimits(msgspec.Struct, frozen=True):
    """Limits for clients."""

    connections: int = 128  # open at the same time, of all clients
    head_bytes: int = 64 * 1024  # request line and headers
    request_s: float = 10.0  # from connecting to the start of the request, and from there to its end
    response_s: float = 60.0  # from the end of the request until its response is sent
    keep_alive_s: int = 5  # from a response to the next request
    linger_s: float = 1.0  # for responses in progress, when the server stops


class HttpServer:
    """HTTP server that serves `app` from `start` to `stop`, which closes the sockets."""

    def __init__(
        self,
        app: ASGIApp,
        sockets: list[socket.socket],
        ssl_context: ssl.SSLContext | None = None,
        *,
        limits: ClientLimits | None = None,
    ) -> None:
        self._sockets = sockets
        self._ssl_context = ssl_context
        self._limits = limits or ClientLimits()
        self._state = ServerState()
        self._all_closed = asyncio.Event()
        self._silent_connections: dict[HttpConnection, None] = {}  # connections without any received byte, oldest first
        self._listeners: list[asyncio.Server] = []
        self._background_task: asyncio.Task[None] | None = None  # `app.state.beside` of the application
        # Fixes everything that uvicorn would read from the environment or change in the process's logging.
        self._config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            workers=1,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=self._limits.keep_alive_s,
        )

    async def start(self) -> None:
        """Start to accept connections, and run `app.state.beside`, if there is one, as a task."""
        self._config.load()
        loop = asyncio.get_running_loop()
        handshake_timeout = self._limits.request_s if self._ssl_context else None
        for sock in self._sockets:
            listener = await loop.create_server(
                self._make_connection, sock=sock, ssl=self._ssl_context, ssl_handshake_timeout=handshake_timeout
            )
            self._listeners.append(listener)
        state = getattr(self._config.app, "state", None)
        if background := getattr(state, "beside", None):
            self._background_task = loop.create_task(background())

    async def stop(self) -> None:
        """Stop listening and cancel the task of `start`. Close idle connections, wait at most `linger_s` for responses in
        progress, then abort the remaining connections."""
        if self._background_task is not None:
            self._background_task.cancel()
        for listener in self._listeners:
            listener.close()
        for sock in self._sockets:
            sock.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._wait_until_all_closed()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await self._wait_until_all_closed()

    async def _wait_until_all_closed(self) -> None:
        if not self._state.connections:
            return
        self._all_closed.clear()
        try:
            await asyncio.wait_for(self._all_closed.wait(), self._limits.linger_s)
        except TimeoutError:
            return

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(self._config, self._state, self._limits, self._all_closed, self._silent_connections)


class HttpConnection(HttpToolsProtocol):
    """One connection, with deadlines for request and response. Protocol errors are answered with `ErrorReply`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        limits: ClientLimits,
        all_closed: asyncio.Event,
        silent: dict[HttpConnection, None],
    ) -> None:
        super().__init__(config, server_state, app_state={})
        self._limits = limits
        self._all_closed = all_closed
        self._silent_connections = silent
        self._deadline: asyncio.TimerHandle | None = None
        self._request_in_progress = False  # a request has begun and is not complete
        self._unparsed_bytes = 0  # since the parser last completed a head or delivered a part of a body
        self._head_too_long = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does this only for sockets created with an explicit protocol number; without it a response takes 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._set_deadline(self._limits.request_s)
        if len(self.connections) > self._limits.connections:
            oldest = next(iter(self._silent_connections), None)
            if oldest is None:
                return self._send_error(503, f"{self._limits.connections} connections are open already: retry later")
            oldest._reset_connection()
        self._silent_connections[self] = None
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._silent_connections.pop(self, None)
        self._clear_deadline()
        super().connection_lost(exc)
        if not self.connections:
            self._all_closed.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._silent_connections.pop(self, None)
        if self._deadline is None:
            self._set_deadline(self._limits.request_s)
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > self._limits.head_bytes and not self.transport.is_closing():
            self._send_error(431, self._headers_too_long_text())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._request_in_progress = True
        self._set_deadline(self._limits.request_s)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.head_bytes:
            self._head_too_long = True
            raise ValueError(self._headers_too_long_text())  # the parser passes it to `send_400_response`
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._request_in_progress = False
        self._set_deadline(self._limits.response_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        all_sent = self.cycle.response_complete and not self.transport.get_write_buffer_size()
        if all_sent and not self._request_in_progress:
            self._clear_deadline()

    def send_400_response(self, msg: str) -> None:
        if self._head_too_long:
            self._send_error(431, self._headers_too_long_text())
        else:
            self._send_error(400, "not a valid HTTP/1.1 request: check the client, and the port")

    def _headers_too_long_text(self) -> str:
        return f"the headers are longer than {self._limits.head_bytes} bytes: send shorter ones"

    def _send_error(self, status: int, message: str) -> None:
        body = msgspec.json.encode(ErrorReply(message))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._reset_connection)

    def _reset_connection(self) -> None:
        self._silent_connections.pop(self, None)
        # With RST, because otherwise the kernel keeps unread data long after the connection was closed.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
