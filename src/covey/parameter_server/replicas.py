"""The copies of other servers' rows that a server holds: it repeats what they do, and gives them back to their next life."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection

from covey.core.parameter_server.settings import ServingSettings
from covey.parameter_server.messages import Change, Declare, Follow, Push, Sever, Take, Whole, Yes, receive_asked, send
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replication import Kept
from covey.parameter_server.shard_set import Shelf


class Held:
    """Copies by server, around which is a lock of their own: two servers may send each other all of their rows at once."""

    def __init__(self, serving: ServingSettings) -> None:
        self._serving = serving
        self._copies: dict[int, Kept] = {}
        self._news = threading.Condition()

    def forget(self, server: int) -> None:
        with self._news:
            self._copies.pop(server, None)

    def wait_for(self, servers: Collection[int]) -> None:
        """Until the rows of all of these are here."""
        with self._news:
            self._news.wait_for(lambda: set(servers) <= self._copies.keys())

    def give_back(self, server: int, otherwise: Shelf | None) -> tuple[Whole, list[Array]] | None:
        """A server's rows, for its next life; `otherwise` is what it began with, if it died before it had a copy."""
        with self._news:
            kept = self._copies.get(server)
            if kept is None and otherwise is not None:
                kept = Kept(otherwise)
            if kept is None:
                return None
            kept.anew()  # what is still on its way from the life before does not count
            state, arrays = kept.shelf.pack()
            return Whole(kept.origin, kept.count, state), arrays

    def hold(self, connection: socket.socket, asked: Follow) -> None:
        """Do what another server did, in its order, until it goes away."""
        kept = self._copies.get(asked.server)
        origin = asked.origin
        same = kept is not None and kept.origin == origin
        send(connection, Yes(kept.count if same and kept is not None else -1))
        while True:
            message, body = receive_asked(connection, 1 << 62)
            with self._news:
                if not isinstance(message, Whole) and (kept is None or kept.origin != origin):
                    raise EOFError("the next life of that server has taken its rows back")
                if isinstance(message, Whole):
                    kept = Kept(Shelf(self._serving, asked.server), message.origin, message.count)
                    kept.shelf.unpack(message.state, body)
                    self._copies[asked.server] = kept
                    self._news.notify_all()
                    send(connection, Yes(kept.count))
                else:
                    assert kept is not None and isinstance(message, Change)
                    kept.count += 1
                    send(connection, Yes(kept.count))  # it is here: who asks for these rows waits until it is done, too
                    try:
                        _repeat(kept.shelf, message, body)
                    except BaseException:  # a copy that cannot follow is none: all rows are sent again
                        self._copies.pop(asked.server, None)
                        raise


def _repeat(shelf: Shelf, message: Change, body: Array) -> None:
    """What another server did with its rows, done with their copy."""
    if isinstance(message, Declare):
        shelf.declare(message.spec, body)
    elif isinstance(message, Push):
        shelf.push(message, body, owned=True)
    elif isinstance(message, Take):
        shelf.adopt(message.state, body)
    elif isinstance(message, Sever):
        shelf.sever(message.slots)
    else:
        shelf.drop(message.slots)
