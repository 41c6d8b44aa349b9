"""Where the servers are: each pins its address and its token to the board of every generation, and whoever needs it looks
there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from covey.core.parameter_server.sharding import Sharding
from covey.errors import PeerError
from covey.parameter_server.messages import socket_family, tune_connection

CONNECT_TIMEOUT_S: Final = 10.0
LOOKUP_TIMEOUT_S: Final = 2.0  # until it is asked again whether that server is still there
RETRY_DELAY_S: Final = 0.05  # between two tries


class ServerEndpoint(msgspec.Struct, frozen=True):
    """Where a server is, and the token it wants to see."""

    address: str
    port: int
    token: str

    def connect(self) -> socket.socket:
        connection = socket.socket(socket_family(self.address))
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect((self.address, self.port))
            tune_connection(connection)
            connection.settimeout(None)
            connection.sendall(self.token.encode())
        except OSError:
            connection.close()
            raise
        return connection


FindServer = Callable[[int], ServerEndpoint | None]  # where a server is; None if it has left


class ShardingInfo(Protocol):
    @property
    def generation(self) -> int: ...
    @property
    def sharding(self) -> Sharding | None: ...


class RendezvousClient(Protocol):
    """What is needed of a node."""

    @property
    def assignment(self) -> ShardingInfo: ...
    def put_rendezvous(self, key: str, value: bytes, generation: int) -> None: ...
    def get_rendezvous(self, key: str, generation: int, timeout_s: float) -> bytes: ...


def publish_endpoint(rendezvous: RendezvousClient, server: int, endpoint: ServerEndpoint, generation: int) -> None:
    """Let others find a server."""
    rendezvous.put_rendezvous(_rendezvous_key(server), msgspec.msgpack.encode(endpoint), generation)


def find_server(rendezvous: RendezvousClient, server: int) -> ServerEndpoint | None:
    """Where a server is, as soon as it is somewhere; None if it has left. The node ends this process if its cluster ends
    first."""
    while True:
        sharding = rendezvous.assignment.sharding
        if sharding is not None and server not in sharding.servers:
            return None
        try:
            return msgspec.msgpack.decode(
                rendezvous.get_rendezvous(_rendezvous_key(server), rendezvous.assignment.generation, LOOKUP_TIMEOUT_S),
                type=ServerEndpoint,
            )
        except PeerError:  # the membership changed, or the server is away for long: look again
            time.sleep(RETRY_DELAY_S)


def _rendezvous_key(server: int) -> str:
    return f"server/{server}"
