"""A worker's way to the servers: one connection and one thread for each, and requests that may be sent twice.

Every request can be repeated without harm, so whoever finds a connection broken looks for the server again, in its next life
perhaps, and asks again; the program only waits. Arrays are sent from the caller's memory and received into it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from covey.core.serving import Serving
from covey.core.shards import form
from covey.errors import CoveyError, UsageError
from covey.params.messages import (
    ALL,
    Declare,
    Load,
    Message,
    No,
    Part,
    Pull,
    Push,
    Save,
    Spec,
    Standing,
    Yes,
    receive_answer,
    send,
)
from covey.params.optimizers import Array
from covey.params.peers import AGAIN_S, Peer
from covey.params.placement import Placement

Find = Callable[[int], Peer]
_NUMBERED = np.dtype(np.int64)


class Work:
    """Requests under way, to one server or more; over when all are answered. `done` is called once, in some thread."""

    def __init__(self, waits_for: int, done: Callable[[Work], None] | None = None) -> None:
        self.error: CoveyError | None = None
        self.numbers: list[int] = []
        self.over = threading.Event()
        self._left = waits_for
        self._done = done
        self._lock = threading.Lock()

    def answered(self, number: int, error: CoveyError | None) -> None:
        with self._lock:
            self.numbers.append(number)
            self.error = self.error or error
            self._left -= 1
            if self._left:
                return
        self.over.set()
        if self._done is not None:
            self._done(self)

    def wait(self) -> Work:
        self.over.wait()
        if self.error is not None:
            raise self.error
        return self


class Request(msgspec.Struct, frozen=True):
    """A message, what goes with it, where the answer goes, and the work it is part of."""

    message: Message
    arrays: Sequence[Any]
    into: Sequence[Any]
    work: Work


class Channel:
    """One server, as seen from here."""

    def __init__(self, server: int, find: Find) -> None:
        self._server, self._find = server, find
        self._connection: socket.socket | None = None
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"covey to server {server}", daemon=True).start()

    def ask(self, request: Request) -> None:
        self._requests.put(request)

    def close_in_child(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                os.close(self._connection.fileno())

    def _run(self) -> None:
        while True:
            request = self._requests.get()
            answer = self._answer(request)
            if isinstance(answer, No):
                request.work.answered(0, answer.error())
            else:
                request.work.answered(answer.number if isinstance(answer, Yes) else 0, None)

    def _answer(self, request: Request) -> Any:
        """The answer, from whichever life of the server gives one."""
        while True:
            try:
                if self._connection is None:
                    self._connection = self._find(self._server).connect()
                send(self._connection, request.message, request.arrays)
                return receive_answer(self._connection, request.into)[0]
            except (OSError, EOFError, msgspec.MsgspecError):
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                time.sleep(AGAIN_S)


class Given(msgspec.Struct, frozen=True):
    """A gradient to push: of all rows, flat, or of those that `rows` numbers."""

    name: str
    gradient: Array
    lr: float
    rows: Array | None = None


class Client:
    """All servers, as seen from one worker. `generation` tells that of this worker's place."""

    def __init__(self, serving: Serving, rank: int, generation: Callable[[], int], find: Find) -> None:
        self.serving, self.rank = serving, rank
        self._generation = generation
        self._owners = form(range(serving.servers))
        self._channels = [Channel(server, find) for server in range(serving.servers)]
        self._specs: dict[str, Spec] = {}
        self._placements: dict[str, Placement] = {}
        os.register_at_fork(after_in_child=self._forked)

    def declare(self, spec: Spec, values: Array | None, *, first: bool) -> None:
        """There is this parameter. `first`: this worker says how it begins; the others wait for that."""
        known = Placement(spec.rows, spec.striped, self._owners)
        arrays: list[list[Array]] = [[] for _ in self._channels]
        if first and values is not None:
            flat = values.reshape(-1)
            arrays = [[flat[a:b] for a, b in known.runs(server)] for server in range(len(self._channels))]
        self._all(lambda server: (Declare(spec, values=first), arrays[server])).wait()
        self._specs[spec.name], self._placements[spec.name] = spec, known

    def push(self, step: int, given: Sequence[Given], done: Callable[[Work], None] | None = None) -> Work:
        """This rank's gradients of a step, to all servers. The work is over when they are safe; in sync mode, everyone's."""
        parts: list[list[Part]] = [[] for _ in self._channels]
        numbers: list[list[Array]] = [[] for _ in self._channels]
        arrays: list[list[Array]] = [[] for _ in self._channels]
        for gift in given:
            spec, placement = self._known(gift.name)
            gradient, dtype = gift.gradient, str(gift.gradient.dtype)
            self._check(spec, gift)
            if gift.rows is None:
                flat = gradient.reshape(-1)
                for server in range(len(self._channels)):
                    parts[server].append(Part(gift.name, ALL, spec.width, dtype, gift.lr))
                    arrays[server] += [flat[a:b] for a, b in placement.runs(server)]
                continue
            order, cuts = self._by_server(placement, gift.rows)
            rows, gradient = gift.rows[order], gradient[order]
            for server, (low, high) in enumerate(cuts):
                parts[server].append(Part(gift.name, high - low, spec.width, dtype, gift.lr))
                numbers[server].append(rows[low:high])
                arrays[server].append(gradient[low:high])
        generation = self._generation()
        return self._all(
            lambda server: (Push(step, self.rank, generation, parts[server]), [*numbers[server], *arrays[server]]), done
        )

    def pull_whole(self, step: int, wanted: Sequence[tuple[str, Array]]) -> None:
        """The values of whole parameters for a step, into these arrays."""
        parts, into = [], [[] for _ in self._channels]  # type: list[Part], list[list[Array]]
        for name, array in wanted:
            spec, placement = self._known(name)
            if array.size != spec.rows or str(array.dtype) != spec.dtype or not array.flags.c_contiguous:
                raise UsageError(f"{name} has {spec.rows} numbers of {spec.dtype}, not {array.size} of {array.dtype}")
            parts.append(Part(name, ALL, spec.width, spec.dtype))
            flat = array.reshape(-1)
            for server in range(len(self._channels)):
                into[server] += [flat[a:b] for a, b in placement.runs(server)]
        self._all(lambda server: (Pull(step, parts), []), into=into).wait()

    def pull_rows(self, step: int, name: str, rows: Array) -> Array:
        """The values of some rows for a step."""
        spec, placement = self._known(name)
        self._check_rows(spec, rows)
        order, cuts = self._by_server(placement, rows)
        sorted_rows = rows[order]
        found = np.empty((len(rows), spec.width), spec.dtype)
        asked = [(server, low, high) for server, (low, high) in enumerate(cuts) if low < high]
        work = Work(len(asked) or 1)
        for server, low, high in asked:
            pull = Pull(step, [Part(name, high - low, spec.width, spec.dtype)])
            self._ask(server, Request(pull, [sorted_rows[low:high]], [found[low:high]], work))
        if asked:
            work.wait()
        values = np.empty_like(found)
        values[order] = found
        return values

    def standing(self) -> int:
        """The step this rank is to take next, as far as the servers know."""
        return min(self._all(lambda server: (Standing(self.rank), [])).wait().numbers)

    def save(self, step: int, folder: str, keep: int) -> None:
        """Have every server write down its rows, as they are at this step."""
        self._all(lambda server: (Save(step, folder, keep), [])).wait()

    def try_save(self, step: int, folder: str, patience_s: float) -> bool:
        """The same, but not for ever; whether all did."""
        work = self._all(lambda server: (Save(step, folder), []))
        return work.over.wait(patience_s) and work.error is None

    def load(self, step: int, folder: str) -> None:
        """Have every server take its rows from what was written down at this step."""
        self._all(lambda server: (Load(step, folder), [])).wait()

    def _all(
        self,
        message: Callable[[int], tuple[Message, Sequence[Array]]],
        done: Callable[[Work], None] | None = None,
        into: Sequence[Sequence[Array]] | None = None,
    ) -> Work:
        work = Work(len(self._channels), done)
        requests = [Request(*message(server), into[server] if into else (), work) for server in range(len(self._channels))]
        for request in requests:
            self._check_size(request)
        for server, request in enumerate(requests):
            self._channels[server].ask(request)
        return work

    def _ask(self, server: int, request: Request) -> None:
        self._check_size(request)
        self._channels[server].ask(request)

    def _check_size(self, request: Request) -> None:
        size = sum(memoryview(array).nbytes for array in request.arrays)
        if size > self.serving.message_max:
            raise UsageError(
                f"a message of {size} bytes is larger than the limit of {self.serving.message_max} (COVEY_PS_MESSAGE_MAX)"
            )

    def _known(self, name: str) -> tuple[Spec, Placement]:
        if name not in self._specs:
            raise UsageError(f"there is no parameter {name} on the servers: declare it first")
        return self._specs[name], self._placements[name]

    def _check(self, spec: Spec, gift: Given) -> None:
        gradient = gift.gradient
        if str(gradient.dtype) != spec.dtype:
            raise UsageError(f"{spec.name} is {spec.dtype}, and a gradient of {gradient.dtype} came: convert it first")
        if gift.rows is None:
            if spec.striped or gradient.size != spec.rows:
                raise UsageError(
                    f"{spec.name} has {spec.rows} rows of {spec.width}, and a gradient of shape {gradient.shape} came"
                )
            return
        if not spec.striped or gradient.shape != (len(gift.rows), spec.width):
            raise UsageError(
                f"the gradient of {len(gift.rows)} rows of {spec.name} must have rows of {spec.width}, not {gradient.shape}"
            )
        self._check_rows(spec, gift.rows)

    def _check_rows(self, spec: Spec, rows: Array) -> None:
        if rows.dtype != _NUMBERED or rows.ndim != 1:
            raise UsageError(f"rows of {spec.name} are numbered by one int64 array, not by {rows.dtype} of shape {rows.shape}")
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < spec.rows):
            wrong = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise UsageError(f"row {wrong} of {spec.name} does not exist: its rows go from 0 to {spec.rows - 1}")

    def _by_server(self, placement: Placement, rows: Array) -> tuple[Array, list[tuple[int, int]]]:
        """An order in which each server's rows lie together, and where each begins and ends."""
        owners = placement.owner(rows)
        order = np.argsort(owners, kind="stable")
        edges = np.searchsorted(owners[order], np.arange(len(self._channels) + 1))
        return order, [(int(a), int(b)) for a, b in itertools.pairwise(edges)]

    def _forked(self) -> None:
        """In a forked child (a data loader's worker): our connections are not its to keep open."""
        for channel in self._channels:
            channel.close_in_child()
