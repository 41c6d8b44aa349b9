"""A server's link to its scheduler: kept, called again when it is lost, and given up where a limit says so."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from covey.core.federated.messages import ServerHeartbeat, ToServer
from covey.core.messages import Message
from covey.errors import ExitCode, PeerError
from covey.log import log
from covey.runtime.credentials import Credentials
from covey.transport.address import join_host_port
from covey.transport.connection import Connection, connect

RECONNECT_S: Final = (0.05, 0.5)
FIRST_S: Final = 900.0  # servers may be started before their scheduler: as long as it waits for them
_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(ToServer)


class Upstream:
    """`opened` is called for every new link, `heard` for every message, `end` when there is no use in calling again."""

    def __init__(
        self,
        scheduler: tuple[str, int],
        guard: Credentials,
        patience_s: float,
        *,
        opened: Callable[[], None],
        heard: Callable[[Message], None],
        end: Callable[[int, str], None],
    ) -> None:
        self._scheduler = scheduler
        self._guard = guard
        self._patience_s = patience_s  # for one that was there; negative: for ever
        self._met = False
        self._opened = opened
        self._heard = heard
        self._end = end
        self._link: Connection | None = None
        self._lost_at = time.monotonic()
        self.vouched_at = -math.inf  # the scheduler took this server for alive at this time or later

    @property
    def connected(self) -> bool:
        return self._link is not None

    def send(self, message: Message) -> None:
        """Nothing while there is no link: what matters is said again when there is."""
        if self._link is not None:
            self._link.send(message)

    def beat(self) -> None:
        """Say that this server lives."""
        self.send(ServerHeartbeat(time.monotonic()))

    async def keep(self) -> None:
        """Call, and call again."""
        wait, waiting = RECONNECT_S[0], False
        host, port = self._scheduler
        while True:
            over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            calls = {
                "on_open": self._on_open,
                "on_message": self._on_message,
                "on_close": lambda link, reason, over=over: over.done() or over.set_result(reason),
            }
            try:
                guard = self._guard
                link = await connect(
                    host, port, guard.secret, guard.client_context, insist=guard.secret_configured, decoder=_decoder, **calls
                )
                reason = await over
                if link.peer_requires_no_secret:
                    return self._end(ExitCode.REFUSED, reason)
                if link.refused_by_peer:
                    return self._end(ExitCode.REFUSED, f"the scheduler turned this server away: {reason}")
                wait = RECONNECT_S[0] if self._link is not None else wait
            except PeerError as error:
                reason = str(error)
            if self._link is not None:
                self._link, self._lost_at = None, time.monotonic()
                log.warning("the scheduler is out of reach (%s); devices are served on", reason)
            elif wait == RECONNECT_S[1] and not waiting:
                waiting = True
                log.warning(
                    "the scheduler at %s cannot be reached yet (%s); it is called again", join_host_port(host, port), reason
                )
            patience_s, word = (self._patience_s, "come back") if self._met else (FIRST_S, "come")
            if 0 <= patience_s < time.monotonic() - self._lost_at:
                sentence = f"the scheduler did not {word} within {patience_s:g} s ({reason})"
                return self._end(ExitCode.SCHEDULER_LOST, sentence)
            await asyncio.sleep(wait)
            wait = min(2 * wait, RECONNECT_S[1])

    def _on_open(self, link: Connection) -> None:
        self._link, self._met = link, True
        self._opened()
        self.beat()

    def _on_message(self, link: Connection, message: Message) -> None:
        if link is not self._link:
            return
        if isinstance(message, ServerHeartbeat):
            self.vouched_at = max(self.vouched_at, message.sent_at)
        else:
            self._heard(message)
