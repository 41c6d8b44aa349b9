"""Connection of a server to its scheduler, reopened when it is lost."""

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

RECONNECT_DELAY_S: Final = (0.05, 0.5)
FIRST_CONNECT_TIMEOUT_S: Final = 900.0  # servers may be started long before the scheduler
_decoder: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(ToServer)


class SchedulerLink:
    """Connection to the scheduler, reopened when it is lost. `end` is called after a refusal or a timeout."""

    def __init__(
        self,
        scheduler: tuple[str, int],
        credentials: Credentials,
        patience_s: float,
        *,
        on_open: Callable[[], None],
        on_message: Callable[[Message], None],
        end: Callable[[int, str], None],
    ) -> None:
        self._scheduler_address = scheduler
        self._credentials = credentials
        self._patience_s = patience_s  # to reconnect after a lost connection; negative: no limit
        self._has_connected = False
        self._connected_callback = on_open
        self._message_callback = on_message
        self._end_callback = end
        self._connection: Connection | None = None
        self._lost_at = time.monotonic()
        self.confirmed_alive_at = -math.inf  # when the newest heartbeat was sent that the scheduler has replied to

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def send(self, message: Message) -> None:
        """Send a message; drop it if there is no connection."""
        if self._connection is not None:
            self._connection.send(message)

    def send_heartbeat(self) -> None:
        self.send(ServerHeartbeat(time.monotonic()))

    async def keep_connected(self) -> None:
        """Connect and reconnect; call `end` and return if the connection is refused or a time limit is exceeded.

        The limit is FIRST_CONNECT_TIMEOUT_S for the first connection, and `patience_s` (negative: none) after a lost one.
        """
        wait, has_warned = RECONNECT_DELAY_S[0], False
        host, port = self._scheduler_address
        while True:
            closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            calls = {
                "on_open": self._on_open,
                "on_message": self._on_message,
                "on_close": lambda connection, reason, closed=closed: closed.done() or closed.set_result(reason),
            }
            try:
                credentials = self._credentials
                connection = await connect(
                    host,
                    port,
                    credentials.secret,
                    credentials.client_context,
                    insist=credentials.secret_configured,
                    decoder=_decoder,
                    **calls,
                )
                reason = await closed
                if connection.peer_requires_no_secret:
                    return self._end_callback(ExitCode.REFUSED, reason)
                if connection.refused_by_peer:
                    return self._end_callback(ExitCode.REFUSED, f"the scheduler refused this server: {reason}")
                wait = RECONNECT_DELAY_S[0] if self._connection is not None else wait
            except PeerError as error:
                reason = str(error)
            if self._connection is not None:
                self._connection, self._lost_at = None, time.monotonic()
                log.warning("scheduler unreachable (%s): reconnecting; devices are still served", reason)
            elif wait == RECONNECT_DELAY_S[1] and not has_warned:
                has_warned = True
                log.warning("scheduler at %s unreachable (%s): retrying", join_host_port(host, port), reason)
            patience_s = self._patience_s if self._has_connected else FIRST_CONNECT_TIMEOUT_S
            if 0 <= patience_s < time.monotonic() - self._lost_at:
                end_reason = f"the scheduler was unreachable for {patience_s:g} s ({reason})"
                return self._end_callback(ExitCode.SCHEDULER_LOST, end_reason)
            await asyncio.sleep(wait)
            wait = min(2 * wait, RECONNECT_DELAY_S[1])

    def _on_open(self, connection: Connection) -> None:
        self._connection, self._has_connected = connection, True
        self._connected_callback()
        self.send_heartbeat()

    def _on_message(self, connection: Connection, message: Message) -> None:
        if connection is not self._connection:
            return
        if isinstance(message, ServerHeartbeat):
            self.confirmed_alive_at = max(self.confirmed_alive_at, message.sent_at)
        else:
            self._message_callback(message)
