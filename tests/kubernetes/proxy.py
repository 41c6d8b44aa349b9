"""A bad network between an operator and the API server: it cuts, falls silent, and loses replies."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on. `refuse`: nobody gets through. `deaf`: requests arrive, replies do not."""

    def __init__(self, server: str) -> None:
        self.refuse = False
        self.deaf = False
        self._target = urlsplit(server)
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """The address to use instead of the server's."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        """Break every connection there is."""
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        theirs_reader, theirs = await asyncio.open_connection(self._target.hostname, self._target.port)
        both = {writer, theirs}
        self._open |= both
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass(reader, theirs, False), self._pass(theirs_reader, writer, True))
        for one in both:
            one.transport.abort()
        self._open -= both

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bool) -> None:
        while data := await reader.read(65536):
            if reply and self.deaf:
                continue
            writer.write(data)
            await writer.drain()
        writer.transport.abort()
