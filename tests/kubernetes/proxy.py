"""TCP proxy between an operator and the API server that can refuse and abort connections and drop replies."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit


class Proxy:
    """TCP proxy. `refuse`: new connections are aborted. `drop_replies`: requests are forwarded, replies are dropped."""

    def __init__(self, server: str) -> None:
        self.refuse = False
        self.drop_replies = False
        self._target = urlsplit(server)
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Start the proxy and return its URL, to use instead of the server's."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def abort_connections(self) -> None:
        """Abort all open connections."""
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        both = {writer, server_writer}
        self._open |= both
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, server_writer, False), self._copy(server_reader, writer, True))
        for open_writer in both:
            open_writer.transport.abort()
        self._open -= both

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bool) -> None:
        while data := await reader.read(65536):
            if reply and self.drop_replies:
                continue
            writer.write(data)
            await writer.drain()
        writer.transport.abort()
