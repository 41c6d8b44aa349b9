"""A parameter server: its own port, a thread for each worker that asks, and one lock around its rows.

A server in its next life asks the holder of its copy for its rows before it answers anybody; it holds its own copy of another
server's rows meanwhile, so that any number of servers may be away without waiting for each other in a circle.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from covey.core.serving import Mode, Serving
from covey.core.shards import form, holder
from covey.errors import ExitCode, PeerError, StoreError, UsageError
from covey.params import files
from covey.params.copies import Chain, Kept, renew, restore
from covey.params.messages import (
    TOKEN_SIZE,
    Answered,
    Asked,
    Declare,
    Follow,
    Load,
    Message,
    No,
    Pull,
    Push,
    Renew,
    Restore,
    Save,
    Standing,
    TooLarge,
    Values,
    Whole,
    Yes,
    family,
    fill,
    quick,
    receive_asked,
    send,
)
from covey.params.optimizers import Array
from covey.params.peers import Peer
from covey.params.shard import Shard

CONNECTIONS_MAX: Final = 4096
FIRST_S: Final = 30.0  # in which a connection must show its token

log = logging.getLogger("covey")


class Server:
    """Serves until the process ends. `find` says where another server is, once it is somewhere."""

    def __init__(self, address: str, serving: Serving, rank: int, lives: int, find: Callable[[int], Peer]) -> None:
        self.serving, self.rank = serving, rank
        self._owners = form(range(serving.servers))
        self._turn = threading.Condition()
        self._own = Kept(Shard(serving, rank, self._owners))
        self._copies: dict[int, Kept] = {}
        self._holding = threading.Condition()  # around the copies: two servers may send each other all of their rows at once
        self._generations = [0] * serving.workers
        self._loaded: Load | None = None
        self._first = lives == 0  # a copy that was never begun is empty; one of an earlier life is lost
        self._ready = not serving.copied or self._first
        self._find = find
        where = holder(rank, range(serving.servers)) if serving.copied else None
        self._holder = where
        self._chain = Chain(self._own, self._turn, rank, find, where) if where is not None else None
        self._socket = socket.create_server((address, 0), family=family(address), backlog=CONNECTIONS_MAX)
        token = secrets.token_hex(TOKEN_SIZE // 2)
        self.peer = Peer(address, int(self._socket.getsockname()[1]), token)
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        threading.Thread(target=self._accept, name="covey server", daemon=True).start()

    def recover(self) -> None:
        """In a later life: take the rows from their copy, answer, and hold the copy of another's again. Called once. Raises
        `PeerError` if there is no copy left."""
        if not self._ready:
            where = self._holder
            assert where is not None
            found = restore(self._find, where, self.rank)
            if found is None:
                reason = f"the rows of server {self.rank} are lost: server {where}, which held their copy, died as well"
                raise PeerError(f"{reason}; start the cluster again, it goes on from its last checkpoint", ExitCode.PEER_FAILED)
            message, body = found
            with self._turn:
                self._own.shard.unpack(message.state, body)
                self._own.origin, self._own.count = message.origin, message.count
                self._ready = True
                self._turn.notify_all()
            log.info("took %d parameters back from their copy, at step %d", len(self._own.shard.tables), self._own.shard.step)
        if self._chain is not None:
            self._chain.start()
        if not self._first and self._holder is not None:
            before = (self.rank - 1) % self.serving.servers
            renew(self._find, before)
            with self._holding:
                self._holding.wait_for(lambda: before in self._copies)

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="covey rows", daemon=True).start()
            else:
                log.warning("a connection is refused: %d are open", CONNECTIONS_MAX)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, EOFError):  # who went away asks again
                quick(connection)
                connection.settimeout(FIRST_S)
                shown = bytearray(TOKEN_SIZE)
                fill(connection, memoryview(shown))
                if not hmac.compare_digest(bytes(shown), self.peer.token.encode()):
                    return
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
                self._hold(connection, asked)
                return
            answer, arrays = self._answer(asked, body)
        except (TooLarge, UsageError, StoreError) as error:
            answer = No(str(error))
        except msgspec.MsgspecError as error:
            answer = No(f"a message was not understood: {error}")
        send(connection, answer, arrays)

    def _answer(self, asked: Asked, body: Array) -> tuple[Answered, list[Array]]:
        if isinstance(asked, Restore):
            return self._restore(asked.server)
        with self._turn:
            if isinstance(asked, Renew):
                if self._chain is not None:
                    self._chain.begin_again()
                return Yes(), []
            self._turn.wait_for(lambda: self._ready)
            if isinstance(asked, Push):
                return self._push(asked, body), []
            if isinstance(asked, Pull):
                return self._pull(asked, body)
            if isinstance(asked, Declare):
                return self._declare(asked, body), []
            if isinstance(asked, Standing):
                return self._standing(asked.rank), []
            if isinstance(asked, Save):
                return self._save(asked), []
            if isinstance(asked, Load):
                return self._load(asked), []
        raise UsageError("this is not asked of a server")

    # -- what workers ask, under the lock ----------------------------------------------------------------------------

    def _declare(self, asked: Declare, body: Array) -> Answered:
        if asked.values:
            shard = self._own.shard
            new = asked.spec.name not in shard.tables
            shard.declare(asked.spec, body)
            if new:
                self._done(asked, body)
                self._turn.notify_all()
        else:
            self._turn.wait_for(lambda: asked.spec.name in self._own.shard.tables)
            self._own.shard.check_spec(asked.spec)
        self._wait_copied(self._own.count)
        return Yes()

    def _push(self, push: Push, body: Array) -> Answered:
        shard = self._own.shard
        if push.rank < self.serving.workers:
            newest = self._generations[push.rank]
            if push.generation < newest:
                return No(
                    f"a push of rank {push.rank} from generation {push.generation} is refused: another life of that rank"
                    f" is at generation {newest}",
                    stale=True,
                )
            self._generations[push.rank] = push.generation
        if push.rank >= self.serving.workers or not shard.known(push.step, push.rank):
            shard.push(push.step, push.rank, shard.gifts(push, body, owned=self._chain is None))
            self._done(push, body)
            self._turn.notify_all()
        if self.serving.mode is Mode.SYNC:
            self._turn.wait_for(lambda: self._own.shard.complete(push.step))
        self._wait_copied(self._own.count)
        return Yes(push.step)

    def _pull(self, pull: Pull, body: Array) -> tuple[Answered, list[Array]]:
        self._own.shard.parts(pull.parts, body, values=False)  # what is wrong is said at once
        shard = self._reach(pull.step)
        parts = shard.parts(pull.parts, body, values=False)
        # Whole parameters are sent from where they lie: in sync mode nobody changes them before all have pushed again.
        found = [shard.tables[part.name].values(rows) for part, rows, _ in parts]
        if self.serving.mode is not Mode.SYNC:
            found = [values.copy() if rows is None else values for values, (_, rows, _) in zip(found, parts, strict=True)]
        return Values(shard.step), found

    def _standing(self, rank: int) -> Answered:
        if rank >= self.serving.workers:
            raise UsageError(f"there is no rank {rank}: there are {self.serving.workers} workers")
        return Yes(self._own.shard.pushed[rank] + 1)

    def _save(self, asked: Save) -> Answered:
        shard = self._reach(asked.step)
        if self.serving.mode is Mode.SYNC and shard.step != asked.step:
            raise UsageError(f"step {asked.step} cannot be written down: server {self.rank} is at step {shard.step}")
        files.save(asked.folder, asked.step, shard, keep=asked.keep)
        return Yes(asked.step)

    def _load(self, asked: Load) -> Answered:
        sync = self.serving.mode is Mode.SYNC
        if self._loaded != asked or (sync and self._own.shard.step != asked.step):  # else it was asked twice, or by two
            loaded = Shard(self.serving, self.rank, self._owners)
            files.load(asked.folder, asked.step, loaded)
            self._own.shard, self._loaded = loaded, asked
            self._own.anew()
            if self._chain is not None:
                self._chain.begin_again()
            self._turn.notify_all()
        self._wait_copied(self._own.count)
        return Yes(asked.step)

    def _reach(self, step: int) -> Shard:
        """The rows, as soon as they are those for a step."""
        self._turn.wait_for(lambda: self._own.shard.ready(step))
        self._own.shard.reach(step)
        return self._own.shard

    def _done(self, message: Message, body: Array) -> None:
        """Something changed here: the copy must follow."""
        self._own.count += 1
        if self._chain is not None:
            self._chain.append(message, body)

    def _wait_copied(self, count: int) -> None:
        chain = self._chain
        if chain is not None:
            self._turn.wait_for(lambda: chain.copied >= count)

    # -- what other servers ask --------------------------------------------------------------------------------------

    def _restore(self, server: int) -> tuple[Answered, list[Array]]:
        with self._holding:
            kept = self._copies.get(server)
            if kept is None and self._first:
                kept = Kept(Shard(self.serving, server, self._owners))
            if kept is None:
                return No(f"server {self.rank} has no copy of the rows of server {server}"), []
            state, arrays = kept.shard.pack()
            return Whole(kept.origin, kept.count, state), arrays

    def _hold(self, connection: socket.socket, asked: Follow) -> None:
        """Do what another server did, in its order, until it goes away."""
        kept = self._copies.get(asked.server)
        same = kept is not None and kept.origin == asked.origin
        send(connection, Yes(kept.count if same and kept is not None else -1))
        while True:
            message, body = receive_asked(connection, 1 << 62)
            with self._holding:
                if isinstance(message, Whole):
                    kept = Kept(Shard(self.serving, asked.server, self._owners), message.origin, message.count)
                    kept.shard.unpack(message.state, body)
                    self._copies[asked.server] = kept
                    self._holding.notify_all()
                else:
                    assert kept is not None and isinstance(message, Declare | Push)
                    _repeat(kept.shard, message, body)
                    kept.count += 1
            send(connection, Yes(kept.count))


def _repeat(shard: Shard, message: Declare | Push, body: Array) -> None:
    if isinstance(message, Declare):
        shard.declare(message.spec, body)
    elif not shard.known(message.step, message.rank):
        shard.push(message.step, message.rank, shard.gifts(message, body, owned=True))
