"""A TCP server with one thread per client; a client must first send a token.

If more than `UNAUTHENTICATED_MAX` clients have not sent the token, the oldest of them without unread bytes is closed, so that
idle clients do not use up threads and descriptors.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

TOKEN_SIZE: Final = 32  # characters, hexadecimal
UNAUTHENTICATED_MAX: Final = 256  # connections that have not sent the token yet
BACKLOG: Final = 4096
RETRY_DELAY_S: Final = 0.05  # pause when the system has no descriptors or threads left

log = logging.getLogger("covey")


class AuthenticatedServer:
    """A server at `port`. It calls `serve` with the connection of each client that sends `token`, on that client's thread. The
    connection is closed when `serve` returns; `OSError` and `EOFError` of `serve` are ignored."""

    def __init__(self, address: str, serve: Callable[[socket.socket], None], name: str, *, first_s: float) -> None:
        """Listen at a free port of the IP address `address`. Raises `OSError` if that fails.

        A client that sends nothing for `first_s` seconds before its token is complete is closed. `serve` receives the
        connection with this timeout set.
        """
        self.token = secrets.token_hex(TOKEN_SIZE // 2)
        self._serve_connection, self._thread_name, self._token_timeout_s = serve, name, first_s
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._out_of_resources = False  # a warning was logged
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept_connections, name=f"{name} port", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Open connections stay open, and one more client may still be accepted."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _accept_connections(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # no descriptor is left, or the server was closed
                self._on_accept_error(error)
                continue
            self._out_of_resources = False
            with self._lock:
                self._unauthenticated[connection] = None
                over_limit = len(self._unauthenticated) > UNAUTHENTICATED_MAX
            if over_limit:
                self._drop_oldest()
            try:
                threading.Thread(
                    target=self._authenticate_and_serve, args=(connection,), name=self._thread_name, daemon=True
                ).start()
            except RuntimeError as error:  # no thread can be started
                self._remove_unauthenticated(connection)
                connection.close()
                self._on_accept_error(error)

    def _on_accept_error(self, error: Exception) -> None:
        if self._socket.fileno() >= 0:
            if not self._out_of_resources:
                log.warning("cannot accept connections: %s", error)
            self._out_of_resources = True
            time.sleep(RETRY_DELAY_S)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        with self._lock:
            oldest = next((connection for connection in self._unauthenticated if not _has_unread_data(connection)), None)
            if oldest is not None:
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread then closes it

    def _remove_unauthenticated(self, connection: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.pop(connection, None)

    def _authenticate_and_serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):  # a disconnected client reconnects
            received = b""
            try:
                connection.settimeout(self._token_timeout_s)
                while len(received) < TOKEN_SIZE and (more := connection.recv(TOKEN_SIZE - len(received))):
                    received += more
            finally:
                self._remove_unauthenticated(connection)
            if hmac.compare_digest(received, self.token.encode()):
                self._serve_connection(connection)


def _has_unread_data(connection: socket.socket) -> bool:
    """Return whether bytes, the end of the stream or an error wait to be read."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(0))
