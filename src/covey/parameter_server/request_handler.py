"""What workers ask of a server, answered from its rows: one request at a time, under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from covey.core.parameter_server.settings import ConsistencyMode, ServingSettings
from covey.core.parameter_server.sharding import SLOTS, Sharding
from covey.errors import UsageError
from covey.parameter_server import checkpoint_files
from covey.parameter_server.messages import (
    ALL,
    Answered,
    Changed,
    Check,
    Declare,
    Load,
    Message,
    No,
    Part,
    Pull,
    Push,
    Request,
    Save,
    Standing,
    Values,
    Yes,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replication import Chain, Kept
from covey.parameter_server.row_cache import UNKNOWN
from covey.parameter_server.shard_set import Shelf

NOTHING: Final = np.empty(0, np.uint8)


class MovedError(Exception):
    """Rows move: whoever asked must ask again."""


class Desk:
    """A server's own rows, by which sharing they are served, and the chain to their copy. `ready`: they are here."""

    def __init__(self, serving: ServingSettings, rank: int, sharing: Sharding, *, ready: bool) -> None:
        self.serving, self.rank = serving, rank
        self._sharing = sharing
        self._turn = threading.Condition()  # the lock around all of this
        self._ready = ready
        self._own = Kept(Shelf(serving, rank, self._mine() if ready else ()))
        self._chain: Chain | None = None
        self._generations = [0] * serving.workers
        self._loaded: Load | None = None

    # -- what is here ------------------------------------------------------------------------------------------------

    def _mine(self) -> list[int]:
        return [slot for slot, owner in enumerate(self._sharing.owners) if owner == self.rank]

    def _here(self) -> bool:
        """Whether every slot that is this server's is here."""
        return len(self._own.shelf.slots) == self._sharing.owners.count(self.rank)

    def _has(self, parts: list[Part], body: Array) -> bool:
        """Whether the rows that are asked for are here; other rows may still be under way."""
        if self._here() or body.nbytes % 8 or any(part.count == ALL for part in parts):
            return self._here()
        wanted = set(np.unique(body.view(np.int64) % SLOTS).tolist())
        return (wanted & set(self._mine())) <= self._own.shelf.slots

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
            raise MovedError

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
        if self.serving.mode is ConsistencyMode.SYNC:
            self._await(push, lambda: self._own.shelf.complete(push.step))
        self._await_copied(push)
        return Yes(push.step)

    def _pull(self, pull: Pull, body: Array) -> tuple[Answered, list[Array]]:
        self._await(pull, lambda: self._has(pull.parts, body))
        self._own.shelf.check(pull.parts, body)  # what is wrong is said at once
        shelf = self._reach(pull, pull.step)
        found = shelf.values(pull.parts, body)
        # Whole parameters are sent from where they lie: in sync mode nobody changes them before all have pushed again.
        if self.serving.mode is not ConsistencyMode.SYNC:
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
        if self.serving.mode is ConsistencyMode.SYNC and shelf.step != asked.step:
            raise UsageError(f"step {asked.step} cannot be written down: server {self.rank} is at step {shelf.step}")
        checkpoint_files.save(asked.folder, asked.step, shelf.whole(), self._sharing.owners, keep=asked.keep)
        return Yes(asked.step)

    def _load(self, asked: Load) -> Answered:
        sync = self.serving.mode is ConsistencyMode.SYNC
        if self._loaded != asked or (sync and self._own.shelf.step != asked.step):  # else it was asked twice, or by two
            loaded = Shelf(self.serving, self.rank, self._mine())
            checkpoint_files.load(asked.folder, asked.step, loaded.whole())
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
