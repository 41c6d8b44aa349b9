"""A parameter server's own rows: their lock, their state, and the sharding under which they are served.

A restarted server that has a replica holder is RESTORING until it has received its rows. Other servers start SERVING, without
parameters. Later a server is SERVING if it has the slots that the sharding assigns to it, else MOVING.
"""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from covey.core.parameter_server.settings import ServingSettings
from covey.core.parameter_server.sharding import SLOTS, Sharding
from covey.parameter_server.messages import (
    ALL,
    DeclareParameter,
    DetachSlots,
    FullReplica,
    HandOverSlots,
    LoadRows,
    ParameterRequest,
    PushGradients,
    ReplicatedChange,
    RowSelection,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.shard_set import ShardSet


class SlotsMovedError(Exception):
    """A request is based on an outdated sharding; the worker must build it again for the newest sharding."""


class VersionedRows:
    """A server's rows and their version: rows with the same replication id and change count have had the same changes.

    In sync mode, a complete step may be applied on the server and still pending on the replica. Not thread-safe.
    """

    def __init__(self, shard_set: ShardSet) -> None:
        self.shard_set = shard_set
        self.replication_id = secrets.token_hex(8)
        self.change_count = 0

    def apply(self, change: ReplicatedChange, body: Array, *, owned: bool) -> bool:
        """Apply a change and count it. Return False if the rows have the change already, as after a resent request.

        Raise `UsageError` or `ValueError` if a push or a declaration is invalid; an invalid push changes nothing. `owned`:
        nothing else uses the memory of `body`, so rows and sums of gradients may be stored in it.
        """
        changed = True
        if isinstance(change, PushGradients):
            changed = self.shard_set.push(change, body, owned=owned)
        elif isinstance(change, DeclareParameter):
            changed = self.shard_set.declare(change.spec, body)
        elif isinstance(change, HandOverSlots):
            changed = not self.shard_set.slots >= set(change.state[0])
            if changed:
                self.shard_set.add_slots(change.state, body if owned else body.copy())
        elif isinstance(change, DetachSlots):
            self.shard_set.detach_slots(change.slots)
        else:
            self.shard_set.release_slots(change.slots)
        self.change_count += changed
        return changed

    def shards_at_step(self, step: int) -> ShardSet:
        """Return the rows with the values for a step, which must be readable. In sync mode, apply a pending step first."""
        self.shard_set.apply_until(step)
        return self.shard_set

    def replace(self, shard_set: ShardSet) -> None:
        """Replace all rows, and choose a new replication id."""
        self.shard_set = shard_set
        self.reset_replication_id()

    def reset_replication_id(self) -> None:
        """Choose a new replication id. Other replicas, and workers' caches, with the old id become invalid."""
        self.replication_id = secrets.token_hex(8)

    def pack(self) -> tuple[FullReplica, list[Array]]:
        """Return all rows, for `restore`. Values of rows are not copied."""
        state, arrays = self.shard_set.pack()
        return FullReplica(self.replication_id, self.change_count, state), arrays

    def restore(self, replica: FullReplica, body: Array) -> None:
        """Set rows, replication id and change count to what `pack` returned. The rows may be stored in the memory of `body`."""
        self.shard_set.unpack(replica.state, body)
        self.replication_id, self.change_count = replica.replication_id, replica.change_count


class RowsState(enum.Enum):
    RESTORING = "restoring"  # the rows are still on the replica holder
    SERVING = "serving"  # the slots here are those that the sharding assigns to this server
    MOVING = "moving"  # slots must still be received from another server, or detached for another one


TRANSITIONS: Final = {
    RowsState.RESTORING: {RowsState.SERVING, RowsState.MOVING},  # MOVING: restarted while slots moved
    RowsState.SERVING: {RowsState.MOVING},
    RowsState.MOVING: {RowsState.SERVING},
}


class Rows:
    """The rows that a server owns, their state, and the sharding under which they are served.

    `condition` is the lock of these fields, and of the fields of `Replication` and `Rebalancer` that change.
    """

    def __init__(self, serving: ServingSettings, rank: int, sharding: Sharding, *, restoring: bool = False) -> None:
        self.serving, self.rank, self.sharding = serving, rank, sharding
        self.condition = threading.Condition()
        self.state = RowsState.RESTORING if restoring else RowsState.SERVING
        self.own = VersionedRows(ShardSet(serving, rank, () if restoring else self.owned_slots()))
        self.last_load: LoadRows | None = None  # the request of the last `replace`; None: there was none
        self.newest_generations = [0] * serving.workers  # by rank: generation of its newest push; 0: none

    def owned_slots(self) -> list[int]:
        """Return the slots that the sharding assigns to this server. The caller holds the lock."""
        return [slot for slot, owner in enumerate(self.sharding.owners) if owner == self.rank]

    def has_rows(self, selections: list[RowSelection], body: Array) -> bool:
        """Return whether the selected rows that this server owns are here. `body` has the row numbers. If a selection is `ALL`,
        or `body` is malformed, return whether the state is SERVING. The caller holds the lock."""
        is_serving = self.state is RowsState.SERVING
        if is_serving or body.nbytes % 8 or any(selection.row_count == ALL for selection in selections):
            return is_serving
        selected = set(np.unique(body.view(np.int64) % SLOTS).tolist())
        return (selected & set(self.owned_slots())) <= self.own.shard_set.slots

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_unless_resharded(self, request: ParameterRequest, predicate: Callable[[], bool]) -> None:
        """Wait until `predicate` returns True. Raise `SlotsMovedError` if the sharding is or becomes newer than the request's.
        The caller holds the lock, which is released during the wait."""
        self.condition.wait_for(lambda: predicate() or self.sharding.version > request.sharding_version)
        if self.sharding.version > request.sharding_version:
            raise SlotsMovedError

    def wait_for_step(self, request: ParameterRequest, step: int) -> ShardSet:
        """Wait until the values for a step can be read, and return the rows with these values. Raise `SlotsMovedError` as
        `wait_unless_resharded` does. The caller holds the lock, which is released during the wait."""
        self.wait_unless_resharded(request, lambda: self.own.shard_set.is_step_readable(step))
        return self.own.shards_at_step(step)

    # -- changes -----------------------------------------------------------------------------------------------------

    def apply(self, change: ReplicatedChange, body: Array, *, owned: bool) -> bool:
        """Apply a change and return as `VersionedRows.apply` does; if True, notify waiting threads. The caller holds the lock
        and, if True is returned, sends the change to the replica."""
        if not self.own.apply(change, body, owned=owned):
            return False
        if isinstance(change, HandOverSlots):
            self.newest_generations = [max(pair) for pair in zip(self.newest_generations, change.generations, strict=True)]
        self._update_state()
        return True

    def replace(self, shard_set: ShardSet, request: LoadRows) -> None:
        """Replace all rows by those of a checkpoint. The caller holds the lock."""
        self.own.replace(shard_set)
        self.last_load = request
        self._update_state()

    def restore(self, replica: FullReplica, body: Array) -> None:
        """Restore the rows from their replica, and change the state from RESTORING to SERVING or MOVING. The caller holds the
        lock."""
        self.own.restore(replica, body)
        self._update_state()

    def adopt(self, sharding: Sharding) -> None:
        """Use this sharding from now on. The state must not be RESTORING. The caller holds the lock."""
        self.sharding = sharding
        self._update_state()

    def record_generation(self, rank: int, generation: int) -> int:
        """Record the generation of a rank's push and return the newest one of that rank. The caller holds the lock."""
        self.newest_generations[rank] = max(self.newest_generations[rank], generation)
        return self.newest_generations[rank]

    def _update_state(self) -> None:
        is_complete = len(self.own.shard_set.slots) == self.sharding.owners.count(self.rank)
        state = RowsState.SERVING if is_complete else RowsState.MOVING
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
            self.state = state
        self.condition.notify_all()
