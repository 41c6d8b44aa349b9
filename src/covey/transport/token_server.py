"""A port whose callers show a token first and are then served in a thread each: state between ranks, rows of parameters.

Who has not shown the token yet costs a thread and a descriptor, so there are few such: where all their places are taken, the
oldest makes room. So whoever only connects keeps nobody else out, and whoever knows the token shows it at once.
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

TOKEN_SIZE: Final = 32
STRANGERS_MAX: Final = 256
BACKLOG: Final = 4096
PAUSE_S: Final = 0.05  # when there are no descriptors or threads left

log = logging.getLogger("covey")


class Callers:
    """Accepts until the process ends, or until closed. `serve` has a connection to itself, and may raise what sockets raise."""

    def __init__(self, address: str, serve: Callable[[socket.socket], None], name: str, *, first_s: float) -> None:
        """`first_s`: in which the token must be shown."""
        self.token = secrets.token_hex(TOKEN_SIZE // 2)
        self._serve, self._name, self._first_s = serve, name, first_s
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._starved = False  # said so
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name=f"{name} port", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _accept(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                self._wait(error)
                continue
            self._starved = False
            with self._lock:
                self._strangers[connection] = None
                crowded = len(self._strangers) > STRANGERS_MAX
            if crowded:
                self._make_room()
            try:
                threading.Thread(target=self._meet, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError as error:  # no thread can be started
                self._knows(connection)
                connection.close()
                self._wait(error)

    def _wait(self, error: Exception) -> None:
        """The system gives no more: whoever waits longest goes first."""
        if self._socket.fileno() >= 0:
            if not self._starved:
                log.warning("callers cannot be served now: %s", error)
            self._starved = True
            time.sleep(PAUSE_S)
            self._make_room()

    def _make_room(self) -> None:
        with self._lock:
            oldest = next((one for one in self._strangers if not _speaks(one)), None)
            if oldest is not None:
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end and closes it

    def _knows(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _meet(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):  # who went away calls again
            shown = b""
            try:
                connection.settimeout(self._first_s)
                while len(shown) < TOKEN_SIZE and (more := connection.recv(TOKEN_SIZE - len(shown))):
                    shown += more
            finally:
                self._knows(connection)
            if hmac.compare_digest(shown, self.token.encode()):
                self._serve(connection)


def _speaks(connection: socket.socket) -> bool:
    """Something came that its thread has not read yet."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(0))
