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
from covey.parameter_server.messages import family, quick

CONNECT_S: Final = 10.0
LOOK_S: Final = 2.0  # until it is asked again whether that server is still there
AGAIN_S: Final = 0.05  # between two tries


class Peer(msgspec.Struct, frozen=True):
    """Where a server is, and the token it wants to see."""

    address: str
    port: int
    token: str

    def connect(self) -> socket.socket:
        connection = socket.socket(family(self.address))
        try:
            connection.settimeout(CONNECT_S)
            connection.connect((self.address, self.port))
            quick(connection)
            connection.settimeout(None)
            connection.sendall(self.token.encode())
        except OSError:
            connection.close()
            raise
        return connection


Find = Callable[[int], Peer | None]  # where a server is; None if it has left


class Place(Protocol):
    @property
    def generation(self) -> int: ...
    @property
    def sharding(self) -> Sharding | None: ...


class Board(Protocol):
    """What is needed of a node."""

    @property
    def place(self) -> Place: ...
    def pin(self, key: str, value: bytes, generation: int) -> None: ...
    def look(self, key: str, generation: int, timeout_s: float) -> bytes: ...


def pin(board: Board, server: int, peer: Peer, generation: int) -> None:
    """Let others find a server."""
    board.pin(_key(server), msgspec.msgpack.encode(peer), generation)


def find(board: Board, server: int) -> Peer | None:
    """Where a server is, as soon as it is somewhere; None if it has left. The node ends this process if its cluster ends
    first."""
    while True:
        sharing = board.place.sharding
        if sharing is not None and server not in sharing.servers:
            return None
        try:
            return msgspec.msgpack.decode(board.look(_key(server), board.place.generation, LOOK_S), type=Peer)
        except PeerError:  # the membership changed, or the server is away for long: look again
            time.sleep(AGAIN_S)


def _key(server: int) -> str:
    return f"server/{server}"
