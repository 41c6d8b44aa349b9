"""Publication and lookup of parameter servers' addresses and tokens in the rendezvous store, the scheduler's key-value
store."""

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
LOOKUP_TIMEOUT_S: Final = 2.0  # after it, `find_server` checks again whether the server is still in the sharding
RETRY_DELAY_S: Final = 0.05  # between two attempts


class ServerEndpoint(msgspec.Struct, frozen=True):
    """Address of a server, and the token that it requires."""

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


FindServer = Callable[[int], ServerEndpoint | None]  # waits until the server has an endpoint; returns None if it has left


class ShardingInfo(Protocol):
    @property
    def generation(self) -> int: ...
    @property
    def sharding(self) -> Sharding | None: ...


class RendezvousClient(Protocol):
    """Access of a cluster member to its newest assignment and to the rendezvous store."""

    @property
    def assignment(self) -> ShardingInfo: ...
    def put_rendezvous(self, key: str, value: bytes, generation: int) -> None: ...
    def get_rendezvous(self, key: str, generation: int, timeout_s: float) -> bytes: ...


def publish_endpoint(rendezvous: RendezvousClient, server: int, endpoint: ServerEndpoint, generation: int) -> None:
    """Publish the endpoint of a server for a generation. Raise `PeerError` if the generation was superseded."""
    rendezvous.put_rendezvous(_rendezvous_key(server), msgspec.msgpack.encode(endpoint), generation)


def find_server(rendezvous: RendezvousClient, server: int) -> ServerEndpoint | None:
    """Wait until a server has published its endpoint in the current generation, and return the endpoint; return None if the
    newest sharding known here does not contain the server."""
    while True:
        sharding = rendezvous.assignment.sharding
        if sharding is not None and server not in sharding.servers:
            return None
        try:
            return msgspec.msgpack.decode(
                rendezvous.get_rendezvous(_rendezvous_key(server), rendezvous.assignment.generation, LOOKUP_TIMEOUT_S),
                type=ServerEndpoint,
            )
        except PeerError:  # the membership changed, or the server is not back yet: look it up again
            time.sleep(RETRY_DELAY_S)


def _rendezvous_key(server: int) -> str:
    return f"server/{server}"
