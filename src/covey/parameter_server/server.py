"""A parameter server: its own port, a thread for each worker that asks, and one lock around its rows.

A server in its next life asks the holder of its copy for its rows before it answers anybody; it holds its own copy of another
server's rows meanwhile, so that any number of servers may be away without waiting for each other in a circle.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import SLOTS, Sharding, initial_sharding, replica_holder
from covey.errors import ExitCode, PeerError, StoreError, UsageError
from covey.parameter_server.discovery import Find, Peer
from covey.parameter_server.messages import (
    Answered,
    Asked,
    Drop,
    Follow,
    Forget,
    Message,
    Moved,
    No,
    Renew,
    Request,
    Restore,
    Sever,
    Take,
    TooLarge,
    Yes,
    quick,
    receive_asked,
    send,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replicas import Held
from covey.parameter_server.replication import Chain, ask, restore
from covey.parameter_server.request_handler import NOTHING, Desk, MovedError
from covey.parameter_server.shard import Shard
from covey.parameter_server.shard_set import Shelf
from covey.transport.token_server import Callers

CONNECTIONS_MAX: Final = 4096
FIRST_S: Final = 30.0  # in which a connection must show its token

log = logging.getLogger("covey")


class Server(Desk):
    """Serves until the process ends. `find` says where another server is, once it is somewhere."""

    def __init__(
        self, address: str, serving: ServingSettings, rank: int, lives: int, find: Find, sharing: Sharding | None = None
    ) -> None:
        self.on_settled: Callable[[int], None] = lambda version: None
        self._wanted = sharing or initial_sharding(serving.servers)  # the newest sharing that was heard of
        self._heard = True  # of it, and nothing said about it yet
        self._first = lives == 0  # a copy that was never begun is empty; one of an earlier life is lost
        where = _holder(serving, rank, self._wanted)
        super().__init__(serving, rank, self._wanted, ready=where is None or self._first)
        self._held = Held(serving)
        self._find = find
        self._chain = Chain(self._own, self._turn, rank, find, where) if where is not None else None
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        callers = Callers(address, self._serve, "covey rows", first_s=FIRST_S)
        self.peer = Peer(address, callers.port, callers.token)

    def recover(self) -> None:
        """In a later life: take the rows from their copy, answer, and hold the copies of others again. Called once. Raises
        `PeerError` if there is no copy left."""
        others = self._others()
        if not self._ready:
            found = restore(self._find, others, self.rank)
            if found is None:
                reason = f"the rows of server {self.rank} are lost: server {others[0]}, which held their copy, died as well"
                raise PeerError(f"{reason}; start the cluster again, it goes on from its last checkpoint", ExitCode.ROWS_LOST)
            message, body, where = found
            with self._turn:
                self._own.shelf.unpack(message.state, body)
                self._own.origin, self._own.count = message.origin, message.count
                if self._chain is not None and self._chain.holder != where:
                    self._chain.before = where
                self._ready = True
                self._turn.notify_all()
            log.info("took %d parameters back from their copy, at step %d", len(self._own.shelf.names), self._own.shelf.step)
        if self._chain is not None:
            self._chain.start()
        if not self._first:
            answers = {server: ask(self._find, server, Renew(self.rank)) for server in others}
            mine = {server for server, said in answers.items() if said is not None and said[0] == Yes(1)}
            self._held.wait_for(mine)
        threading.Thread(target=self._converge, name="covey moves", daemon=True).start()

    def _others(self) -> list[int]:
        """All other servers; the holder of this one's copy is the first, if it is where it should be."""
        everyone = sorted(self._sharing.servers - {self.rank})
        return [s for s in everyone if s > self.rank] + [s for s in everyone if s < self.rank]

    # -- slots that move ---------------------------------------------------------------------------------------------

    def share(self, sharing: Sharding) -> None:
        """This is who owns what now. Said again, it is answered again."""
        with self._turn:
            if sharing.version >= self._wanted.version:
                self._wanted, self._heard = sharing, True
                self._turn.notify_all()

    def _converge(self) -> None:
        """Give what is another's, wait for what is this server's, have the copy where it belongs, and say so; for ever."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._heard)
                self._heard = False
                sharing = self._sharing = self._wanted
                for taker in sorted(set(sharing.owners) - {self.rank}):
                    slots = [slot for slot in sorted(self._own.shelf.slots) if sharing.owners[slot] == taker]
                    if slots:
                        self._own.shelf.sever(slots)
                        self._done(Sever(slots), NOTHING)
                going = list(self._own.shelf.going)
                self._turn.notify_all()
            for shard in going:
                self._give(shard, sharing)
            self._follow_the_ring()
            with self._turn:
                self._turn.wait_for(lambda: self._heard or self._here())
                self._wait_copied()
                if self._heard:
                    continue
            self.on_settled(sharing.version)

    def _give(self, shard: Shard, sharing: Sharding) -> None:
        """Have the owner take these slots; whoever of the two dies meanwhile asks or is asked again."""
        slots = sorted(shard.slots)
        taker = sharing.owners[slots[0]]
        state, arrays = shard.pack()
        said = ask(self._find, taker, Take(sharing.version, [slots, state], self._generations), arrays)
        assert said is not None and isinstance(said[0], Yes), f"server {taker} did not take slots that are its own: {said}"
        with self._turn:
            self._own.shelf.drop(slots)
            self._done(Drop(slots), NOTHING)
        log.info("%d of 256 slots went to server %d", len(slots), taker)

    def _take(self, asked: Take, body: Array) -> Answered:
        self._turn.wait_for(lambda: self._sharing.version >= asked.sharing)
        shelf = self._own.shelf
        if not shelf.slots >= set(asked.state[0]):  # else it was given before, by a life that did not hear the answer
            shelf.adopt(asked.state, body if self._chain is None else body.copy())  # rows change, what the copy hears does not
            self._generations = [max(pair) for pair in zip(self._generations, asked.generations, strict=True)]
            self._done(asked, body)
            self._turn.notify_all()
        self._wait_copied()
        return Yes()

    def _follow_the_ring(self) -> None:
        """The copy is to lie with the next server of the ring. One that leaves stays with the holder it has."""
        with self._turn:
            where, old = _holder(self.serving, self.rank, self._sharing), self._chain
            now = old.holder if old is not None else None
            if where == now or self.rank not in self._sharing.ring:
                return
            if old is not None:
                old.stop()
            self._chain = Chain(self._own, self._turn, self.rank, self._find, where, now) if where is not None else None
            if self._chain is not None:
                self._chain.start()

    # -- connections -------------------------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        if not self._places.acquire(blocking=False):
            log.warning("a connection is refused: %d are open", CONNECTIONS_MAX)
            return
        try:
            quick(connection)
            connection.settimeout(None)
            while True:
                self._serve_one(connection)
        finally:
            self._places.release()

    def _serve_one(self, connection: socket.socket) -> None:
        arrays: list[Array] = []
        answer: Message
        try:
            asked, body = receive_asked(connection, self.serving.message_max)
            if isinstance(asked, Follow):
                self._held.hold(connection, asked)
                return
            answer, arrays = self._answer(asked, body)
        except StoreError as error:
            answer = No(str(error), disk=True)
        except (TooLarge, UsageError) as error:
            answer = No(str(error))
        except msgspec.MsgspecError as error:
            answer = No(f"a message was not understood: {error}")
        except MemoryError as error:
            answer = No(f"server {self.rank} has not enough memory ({error}): have more servers, or smaller tables")
        except (OSError, EOFError):  # the connection's: the other side asks again
            raise
        except Exception as error:  # asked again it would fail again, and the worker would never know why
            log.exception("a request failed")
            answer = No(f"server {self.rank} failed ({error!r}): its log says where")
        send(connection, answer, arrays)

    def _answer(self, asked: Asked, body: Array) -> tuple[Answered, list[Array]]:
        if isinstance(asked, Restore):
            return self._restore(asked.server)
        if isinstance(asked, Forget):
            self._held.forget(asked.server)
            return Yes(), []
        with self._turn:
            if isinstance(asked, Renew):
                if self._chain is None or self._chain.holder != asked.holder:
                    return Yes(0), []
                self._chain.begin_again()
                return Yes(1), []
            self._turn.wait_for(lambda: self._ready)
            if isinstance(asked, Take):
                return self._take(asked, body), []
            if isinstance(asked, Request):
                try:
                    return self._answer_worker(asked, body)
                except MovedError:
                    return Moved(self._sharing), []
        raise UsageError("this is not asked of a server")

    def _restore(self, server: int) -> tuple[Answered, list[Array]]:
        """The copy of another server's rows; of one that died before it had a copy, what all begin with."""
        sharing = self._sharing
        begun = not self._first or sharing.version > 0 or server not in sharing.ring
        young = not begun and replica_holder(server, sharing.ring) == self.rank
        slots = [slot for slot in range(SLOTS) if sharing.owners[slot] == server]
        found = self._held.give_back(server, Shelf(self.serving, server, slots) if young else None)
        return found or (No(f"server {self.rank} has no copy of the rows of server {server}"), [])


def _holder(serving: ServingSettings, rank: int, sharing: Sharding) -> int | None:
    """Who is to hold the copy of a server's rows; of one that leaves, whoever would if it stayed."""
    return replica_holder(rank, {*sharing.ring, rank}) if serving.copies else None
