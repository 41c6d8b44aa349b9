"""Messages and peers for tests of one part of a parameter server."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

import msgspec
import numpy as np
from tests.parameter_server_workload import WAIT_S

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import SLOTS, Sharding
from covey.parameter_server.discovery import ServerEndpoint
from covey.parameter_server.messages import (
    DeclareParameter,
    DetachSlots,
    HandOverSlots,
    InitialValues,
    ParameterSpec,
    PushGradients,
    RowSelection,
    ServerReply,
    ServerRequest,
    receive_request,
    send_message,
)
from covey.parameter_server.optimizers import SGD, Array
from covey.parameter_server.rows import VersionedRows
from covey.parameter_server.shard_set import ShardSet

ROWS = 512  # two for each slot
EMPTY: Array = np.empty(0, np.uint8)
SPEC = ParameterSpec("t", ROWS, 1, "float32", True, SGD(1.0), InitialValues("zeros"))
DECLARE = DeclareParameter(SPEC, True)
ALONE = ServingSettings(servers=1, workers=1, copies=0)
PAIR = ServingSettings(servers=2, workers=1, copies=1)
LOWER, UPPER = list(range(SLOTS // 2)), list(range(SLOTS // 2, SLOTS))


def halves(version: int = 0, lower: int = 0, upper: int = 1) -> Sharding:
    """Return a sharding in which two servers own one half of the slots each; both are in the ring."""
    return Sharding(version, (lower,) * len(LOWER) + (upper,) * len(UPPER), (0, 1))


def all_slots(owner: int = 0, version: int = 0, ring: tuple[int, ...] = (0,)) -> Sharding:
    return Sharding(version, (owner,) * SLOTS, ring)


def push(step: int, *rows: int, rank: int = 0, generation: int = 1, version: int = 0) -> tuple[PushGradients, Array]:
    """Return a push with gradient 1 for each of these rows, and its body."""
    numbers, gradients = np.array(rows, np.int64), np.ones(len(rows), np.float32)
    selections = [RowSelection("t", len(rows), 1, "float32", 1.0)]
    body = np.concatenate([numbers.view(np.uint8), gradients.view(np.uint8)])
    return PushGradients(step, rank, generation, selections, sharding_version=version), body


def pack_body(arrays: list[Array]) -> Array:
    """Return arrays as the bytes of a message."""
    return np.concatenate([EMPTY, *(np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays)])


def hand_over(slots: list[int], version: int, generation: int = 0) -> tuple[HandOverSlots, Array]:
    """Return the request in which server 1, which owned all slots, hands some over, and its body."""
    sender = VersionedRows(ShardSet(PAIR, 1, range(SLOTS)))
    sender.apply(DECLARE, EMPTY, owned=True)
    sender.apply(DetachSlots(slots), EMPTY, owned=True)
    state, arrays = sender.shard_set.detached[0].pack()
    return HandOverSlots(version, [slots, state], [generation]), pack_body(arrays)


class Peer:
    """Another server, simulated by the test: receives requests over socket pairs and replies to them."""

    def __init__(self) -> None:
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.connection: socket.socket | None = None

    def find(self, server: int) -> ServerEndpoint:
        return _PairEndpoint("", 0, "", self._accepted)

    def accept(self) -> None:
        """Wait for a connection and receive from it from now on."""
        self.connection = self._accepted.get(timeout=WAIT_S)
        self.connection.settimeout(WAIT_S)

    def receive(self) -> tuple[ServerRequest, Array]:
        assert self.connection is not None
        return receive_request(self.connection, 1 << 62)

    def reply(self, reply: ServerReply) -> None:
        assert self.connection is not None
        send_message(self.connection, reply)


class _PairEndpoint(ServerEndpoint, frozen=True):
    accepted: queue.SimpleQueue[socket.socket] = msgspec.field(default_factory=queue.SimpleQueue)

    def connect(self) -> socket.socket:
        local, remote = socket.socketpair()
        self.accepted.put(remote)
        return local


class Call:
    """A call on its own thread, which may block."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], object]) -> None:
        try:
            self.result = function()
        except BaseException as error:
            self.error = error

    def is_waiting(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def wait(self) -> object:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"the call has not returned after {WAIT_S:g} s"
        if self.error is not None:
            raise self.error
        return self.result
