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
import numpy as np

from covey.core.serving import Mode, Serving
from covey.core.shards import SLOTS, Sharing, first, holder
from covey.errors import ExitCode, PeerError, StoreError, UsageError
from covey.params import files
from covey.params.cache import UNKNOWN
from covey.params.copies import Chain, Kept, ask, restore
from covey.params.messages import (
    ALL,
    TOKEN_SIZE,
    Answered,
    Asked,
    Change,
    Changed,
    Check,
    Declare,
    Drop,
    Follow,
    Forget,
    Load,
    Message,
    Moved,
    No,
    Part,
    Pull,
    Push,
    Renew,
    Request,
    Restore,
    Save,
    Sever,
    Standing,
    Take,
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
from covey.params.peers import Find, Peer
from covey.params.shard import Shard
from covey.params.shelf import Shelf

CONNECTIONS_MAX: Final = 4096
FIRST_S: Final = 30.0  # in which a connection must show its token

NOTHING: Final = np.empty(0, np.uint8)

log = logging.getLogger("covey")


class _MovedError(Exception):
    """Rows move: whoever asked must ask again."""


class Server:
    """Serves until the process ends. `find` says where another server is, once it is somewhere."""

    def __init__(
        self, address: str, serving: Serving, rank: int, lives: int, find: Find, sharing: Sharing | None = None
    ) -> None:
        self.serving, self.rank = serving, rank
        self.on_settled: Callable[[int], None] = lambda version: None
        self._sharing = self._wanted = sharing or first(serving.servers)  # by which is served, and the newest that was heard
        self._heard = True  # of it, and nothing said about it yet
        self._turn = threading.Condition()
        self._first = lives == 0  # a copy that was never begun is empty; one of an earlier life is lost
        where = self._holder()
        self._ready = where is None or self._first
        self._own = Kept(Shelf(serving, rank, self._mine() if self._ready else ()))
        self._copies: dict[int, Kept] = {}
        self._holding = threading.Condition()  # around the copies: two servers may send each other all of their rows at once
        self._generations = [0] * serving.workers
        self._loaded: Load | None = None
        self._find = find
        self._chain = Chain(self._own, self._turn, rank, find, where) if where is not None else None
        self._socket = socket.create_server((address, 0), family=family(address), backlog=CONNECTIONS_MAX)
        token = secrets.token_hex(TOKEN_SIZE // 2)
        self.peer = Peer(address, int(self._socket.getsockname()[1]), token)
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        threading.Thread(target=self._accept, name="covey server", daemon=True).start()

    def _mine(self) -> list[int]:
        return [slot for slot, owner in enumerate(self._sharing.owners) if owner == self.rank]

    def _holder(self) -> int | None:
        """Who is to hold the copy of what is here; of one that leaves, whoever would if it stayed."""
        return holder(self.rank, {*self._sharing.ring, self.rank}) if self.serving.copies else None

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
            with self._holding:
                self._holding.wait_for(lambda: mine <= self._copies.keys())
        threading.Thread(target=self._converge, name="covey moves", daemon=True).start()

    def _others(self) -> list[int]:
        """All other servers; the holder of this one's copy is the first, if it is where it should be."""
        everyone = sorted(self._sharing.servers - {self.rank})
        return [s for s in everyone if s > self.rank] + [s for s in everyone if s < self.rank]

    # -- slots that move ---------------------------------------------------------------------------------------------

    def share(self, sharing: Sharing) -> None:
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

    def _give(self, shard: Shard, sharing: Sharing) -> None:
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
            where, old = self._holder(), self._chain
            now = old.holder if old is not None else None
            if where == now or self.rank not in self._sharing.ring:
                return
            if old is not None:
                old.stop()
            self._chain = Chain(self._own, self._turn, self.rank, self._find, where, now) if where is not None else None
            if self._chain is not None:
                self._chain.start()

    def _here(self) -> bool:
        """Whether every slot that is this server's is here."""
        return len(self._own.shelf.slots) == self._sharing.owners.count(self.rank)

    def _has(self, parts: list[Part], body: Array) -> bool:
        """Whether the rows that are asked for are here; other rows may still be under way."""
        if self._here() or body.nbytes % 8 or any(part.count == ALL for part in parts):
            return self._here()
        wanted = set(np.unique(body.view(np.int64) % SLOTS).tolist())
        return (wanted & set(self._mine())) <= self._own.shelf.slots

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
        if isinstance(asked, Forget):
            with self._holding:
                self._copies.pop(asked.server, None)
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
                except _MovedError:
                    return Moved(self._sharing), []
        raise UsageError("this is not asked of a server")

    # -- what workers ask, under the lock ----------------------------------------------------------------------------

    def _answer_worker(self, asked: Request, body: Array) -> tuple[Answered, list[Array]]:
        self._await(asked, lambda: self._sharing.version >= asked.sharing)
        if isinstance(asked, Load):
            return self._load(asked), []
        if isinstance(asked, Pull):
            return self._pull(asked, body)
        if isinstance(asked, Check):
            return self._check(asked, body)
        self._await(asked, self._here)
        if isinstance(asked, Push):
            return self._push(asked, body), []
        if isinstance(asked, Declare):
            return self._declare(asked, body), []
        if isinstance(asked, Standing):
            return self._standing(asked.rank), []
        assert isinstance(asked, Save)
        return self._save(asked), []

    def _await(self, asked: Request, here: Callable[[], bool]) -> None:
        """Wait for something, unless rows move meanwhile: then the worker must ask again, by the newer sharing."""
        self._turn.wait_for(lambda: here() or self._sharing.version > asked.sharing)
        if self._sharing.version > asked.sharing:
            raise _MovedError

    def _declare(self, asked: Declare, body: Array) -> Answered:
        shelf = self._own.shelf
        if asked.values:
            if shelf.declare(asked.spec, body):
                self._done(asked, body)
                self._turn.notify_all()
        else:
            self._await(asked, lambda: self._own.shelf.knows(asked.spec.name))
            self._own.shelf.check_spec(asked.spec)
        self._await_copied(asked)
        return Yes()

    def _push(self, push: Push, body: Array) -> Answered:
        if push.rank < self.serving.workers:
            newest = self._generations[push.rank]
            if push.generation < newest:
                return No(
                    f"a push of rank {push.rank} from generation {push.generation} is refused: another life of that rank"
                    f" is at generation {newest}",
                    stale=True,
                )
            self._generations[push.rank] = push.generation
        if self._own.shelf.push(push, body, owned=self._chain is None):
            self._done(push, body)
            self._turn.notify_all()
        if self.serving.mode is Mode.SYNC:
            self._await(push, lambda: self._own.shelf.complete(push.step))
        self._await_copied(push)
        return Yes(push.step)

    def _pull(self, pull: Pull, body: Array) -> tuple[Answered, list[Array]]:
        self._await(pull, lambda: self._has(pull.parts, body))
        self._own.shelf.check(pull.parts, body)  # what is wrong is said at once
        shelf = self._reach(pull, pull.step)
        found = shelf.values(pull.parts, body)
        # Whole parameters are sent from where they lie: in sync mode nobody changes them before all have pushed again.
        if self.serving.mode is not Mode.SYNC:
            whole = [part.count == ALL for part in pull.parts]
            found = [values.copy() if one else values for values, one in zip(found, whole, strict=True)]
        return Values(shelf.step), found

    def _check(self, asked: Check, body: Array) -> tuple[Answered, list[Array]]:
        if body.nbytes != asked.part.count * 16:
            raise UsageError(f"{body.nbytes} bytes came for {asked.part.count} rows of {asked.part.name} and their numbers")
        rows = body[: body.nbytes // 2]
        self._await(asked, lambda: self._has([asked.part], rows))
        self._own.shelf.check([asked.part], rows)
        shelf = self._reach(asked, asked.step)
        if asked.origin != self._own.origin:
            body[body.nbytes // 2 :].view(np.int64)[:] = UNKNOWN
        number, changed, values = shelf.changed(asked.part, body)
        return Changed(self._own.origin, number), [changed.view(np.uint8), values]

    def _standing(self, rank: int) -> Answered:
        if rank >= self.serving.workers:
            raise UsageError(f"there is no rank {rank}: there are {self.serving.workers} workers")
        return Yes(self._own.shelf.pushed(rank) + 1)

    def _save(self, asked: Save) -> Answered:
        shelf = self._reach(asked, asked.step)
        if self.serving.mode is Mode.SYNC and shelf.step != asked.step:
            raise UsageError(f"step {asked.step} cannot be written down: server {self.rank} is at step {shelf.step}")
        files.save(asked.folder, asked.step, shelf.whole(), self._sharing.owners, keep=asked.keep)
        return Yes(asked.step)

    def _load(self, asked: Load) -> Answered:
        sync = self.serving.mode is Mode.SYNC
        if self._loaded != asked or (sync and self._own.shelf.step != asked.step):  # else it was asked twice, or by two
            loaded = Shelf(self.serving, self.rank, self._mine())
            files.load(asked.folder, asked.step, loaded.whole())
            self._own.shelf, self._loaded = loaded, asked
            self._own.anew()
            if self._chain is not None:
                self._chain.begin_again()
            self._turn.notify_all()
        self._await_copied(asked)
        return Yes(asked.step)

    def _reach(self, asked: Request, step: int) -> Shelf:
        """The rows, as soon as they are those for a step."""
        self._await(asked, lambda: self._own.shelf.ready(step))
        self._own.shelf.reach(step)
        return self._own.shelf

    def _done(self, message: Message, body: Array) -> None:
        """Something changed here: the copy must follow."""
        self._own.count += 1
        if self._chain is not None:
            self._chain.append(message, body)

    def _await_copied(self, asked: Request) -> None:
        count = self._own.count
        self._await(asked, lambda: self._copied(count))

    def _wait_copied(self) -> None:
        count = self._own.count
        self._turn.wait_for(lambda: self._copied(count))

    def _copied(self, count: int) -> bool:
        return self._chain is None or self._chain.copied >= count

    # -- what other servers ask --------------------------------------------------------------------------------------

    def _restore(self, server: int) -> tuple[Answered, list[Array]]:
        with self._holding:
            kept = self._copies.get(server)
            sharing = self._sharing
            begun = not self._first or sharing.version > 0 or server not in sharing.ring
            if kept is None and not begun and holder(server, sharing.ring) == self.rank:  # it died before it had a copy
                kept = Kept(Shelf(self.serving, server, [slot for slot in range(SLOTS) if sharing.owners[slot] == server]))
            if kept is None:
                return No(f"server {self.rank} has no copy of the rows of server {server}"), []
            kept.anew()  # what is still on its way from the life before does not count
            state, arrays = kept.shelf.pack()
            return Whole(kept.origin, kept.count, state), arrays

    def _hold(self, connection: socket.socket, asked: Follow) -> None:
        """Do what another server did, in its order, until it goes away."""
        kept = self._copies.get(asked.server)
        origin = asked.origin
        same = kept is not None and kept.origin == origin
        send(connection, Yes(kept.count if same and kept is not None else -1))
        while True:
            message, body = receive_asked(connection, 1 << 62)
            with self._holding:
                if not isinstance(message, Whole) and (kept is None or kept.origin != origin):
                    raise EOFError("the next life of that server has taken its rows back")
                if isinstance(message, Whole):
                    kept = Kept(Shelf(self.serving, asked.server), message.origin, message.count)
                    kept.shelf.unpack(message.state, body)
                    self._copies[asked.server] = kept
                    self._holding.notify_all()
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
