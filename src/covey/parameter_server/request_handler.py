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
    ChangedRows,
    DeclareParameter,
    Done,
    LoadRows,
    ParameterMessage,
    ParameterRequest,
    PullChanged,
    PullValues,
    PushGradients,
    QueryRankStep,
    RequestFailed,
    RowSelection,
    RowValues,
    SaveRows,
    ServerReply,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replication import ReplicationThread, VersionedRows
from covey.parameter_server.row_cache import UNKNOWN
from covey.parameter_server.shard_set import ShardSet

EMPTY_BODY: Final = np.empty(0, np.uint8)


class SlotsMovedError(Exception):
    """Rows move: whoever asked must ask again."""


class Desk:
    """A server's own rows, by which sharing they are served, and the chain to their copy. `ready`: they are here."""

    def __init__(self, serving: ServingSettings, rank: int, sharing: Sharding, *, ready: bool) -> None:
        self.serving, self.rank = serving, rank
        self._sharding = sharing
        self._condition = threading.Condition()  # the lock around all of this
        self._ready = ready
        self._own_rows = VersionedRows(ShardSet(serving, rank, self._owned_slots() if ready else ()))
        self._replication: ReplicationThread | None = None
        self._newest_generations = [0] * serving.workers
        self._last_load: LoadRows | None = None

    # -- what is here ------------------------------------------------------------------------------------------------

    def _owned_slots(self) -> list[int]:
        return [slot for slot, owner in enumerate(self._sharding.owners) if owner == self.rank]

    def _has_all_slots(self) -> bool:
        """Whether every slot that is this server's is here."""
        return len(self._own_rows.shard_set.slots) == self._sharding.owners.count(self.rank)

    def _has_requested_rows(self, parts: list[RowSelection], body: Array) -> bool:
        """Whether the rows that are asked for are here; other rows may still be under way."""
        if self._has_all_slots() or body.nbytes % 8 or any(part.row_count == ALL for part in parts):
            return self._has_all_slots()
        wanted = set(np.unique(body.view(np.int64) % SLOTS).tolist())
        return (wanted & set(self._owned_slots())) <= self._own_rows.shard_set.slots

    # -- what workers ask, under the lock ----------------------------------------------------------------------------

    def _handle_worker_request(self, asked: ParameterRequest, body: Array) -> tuple[ServerReply, list[Array]]:
        self._wait_unless_resharded(asked, lambda: self._sharding.version >= asked.sharding_version)
        if isinstance(asked, LoadRows):
            return self._on_load(asked), []
        if isinstance(asked, PullValues):
            return self._on_pull(asked, body)
        if isinstance(asked, PullChanged):
            return self._on_pull_changed(asked, body)
        self._wait_unless_resharded(asked, self._has_all_slots)
        if isinstance(asked, PushGradients):
            return self._on_push(asked, body), []
        if isinstance(asked, DeclareParameter):
            return self._on_declare(asked, body), []
        if isinstance(asked, QueryRankStep):
            return self._on_query_rank_step(asked.rank), []
        assert isinstance(asked, SaveRows)
        return self._on_save(asked), []

    def _wait_unless_resharded(self, asked: ParameterRequest, here: Callable[[], bool]) -> None:
        """Wait for something, unless rows move meanwhile: then the worker must ask again, by the newer sharing."""
        self._condition.wait_for(lambda: here() or self._sharding.version > asked.sharding_version)
        if self._sharding.version > asked.sharding_version:
            raise SlotsMovedError

    def _on_declare(self, asked: DeclareParameter, body: Array) -> ServerReply:
        shelf = self._own_rows.shard_set
        if asked.has_values:
            if shelf.declare(asked.spec, body):
                self._replicate_change(asked, body)
                self._condition.notify_all()
        else:
            self._wait_unless_resharded(asked, lambda: self._own_rows.shard_set.has_parameter(asked.spec.name))
            self._own_rows.shard_set.check_spec(asked.spec)
        self._wait_replica_unless_resharded(asked)
        return Done()

    def _on_push(self, push: PushGradients, body: Array) -> ServerReply:
        if push.rank < self.serving.workers:
            newest = self._newest_generations[push.rank]
            if push.generation < newest:
                return RequestFailed(
                    f"a push of rank {push.rank} from generation {push.generation} is refused: another life of that rank"
                    f" is at generation {newest}",
                    is_stale=True,
                )
            self._newest_generations[push.rank] = push.generation
        if self._own_rows.shard_set.push(push, body, owned=self._replication is None):
            self._replicate_change(push, body)
            self._condition.notify_all()
        if self.serving.mode is ConsistencyMode.SYNC:
            self._wait_unless_resharded(push, lambda: self._own_rows.shard_set.is_step_complete(push.step))
        self._wait_replica_unless_resharded(push)
        return Done(push.step)

    def _on_pull(self, pull: PullValues, body: Array) -> tuple[ServerReply, list[Array]]:
        self._wait_unless_resharded(pull, lambda: self._has_requested_rows(pull.selections, body))
        self._own_rows.shard_set.check_pull(pull.selections, body)  # what is wrong is said at once
        shelf = self._shards_at_step(pull, pull.step)
        found = shelf.read_values(pull.selections, body)
        # Whole parameters are sent from where they lie: in sync mode nobody changes them before all have pushed again.
        if self.serving.mode is not ConsistencyMode.SYNC:
            whole = [part.row_count == ALL for part in pull.selections]
            found = [values.copy() if one else values for values, one in zip(found, whole, strict=True)]
        return RowValues(shelf.step), found

    def _on_pull_changed(self, asked: PullChanged, body: Array) -> tuple[ServerReply, list[Array]]:
        if body.nbytes != asked.selection.row_count * 16:
            raise UsageError(
                f"{body.nbytes} bytes came for {asked.selection.row_count} rows of {asked.selection.name} and their numbers"
            )
        rows = body[: body.nbytes // 2]
        self._wait_unless_resharded(asked, lambda: self._has_requested_rows([asked.selection], rows))
        self._own_rows.shard_set.check_pull([asked.selection], rows)
        shelf = self._shards_at_step(asked, asked.step)
        if asked.replication_id != self._own_rows.replication_id:
            body[body.nbytes // 2 :].view(np.int64)[:] = UNKNOWN
        number, changed, values = shelf.read_changed(asked.selection, body)
        return ChangedRows(self._own_rows.replication_id, number), [changed.view(np.uint8), values]

    def _on_query_rank_step(self, rank: int) -> ServerReply:
        if rank >= self.serving.workers:
            raise UsageError(f"there is no rank {rank}: there are {self.serving.workers} workers")
        return Done(self._own_rows.shard_set.last_pushed_step(rank) + 1)

    def _on_save(self, asked: SaveRows) -> ServerReply:
        shelf = self._shards_at_step(asked, asked.step)
        if self.serving.mode is ConsistencyMode.SYNC and shelf.step != asked.step:
            raise UsageError(f"step {asked.step} cannot be written down: server {self.rank} is at step {shelf.step}")
        checkpoint_files.save_shard(asked.folder, asked.step, shelf.as_single_shard(), self._sharding.owners, keep=asked.keep)
        return Done(asked.step)

    def _on_load(self, asked: LoadRows) -> ServerReply:
        sync = self.serving.mode is ConsistencyMode.SYNC
        if self._last_load != asked or (
            sync and self._own_rows.shard_set.step != asked.step
        ):  # else it was asked twice, or by two
            loaded = ShardSet(self.serving, self.rank, self._owned_slots())
            checkpoint_files.load_shard(asked.folder, asked.step, loaded.as_single_shard())
            self._own_rows.shard_set, self._last_load = loaded, asked
            self._own_rows.reset_replication_id()
            if self._replication is not None:
                self._replication.restart_sync()
            self._condition.notify_all()
        self._wait_replica_unless_resharded(asked)
        return Done(asked.step)

    def _shards_at_step(self, asked: ParameterRequest, step: int) -> ShardSet:
        """The rows, as soon as they are those for a step."""
        self._wait_unless_resharded(asked, lambda: self._own_rows.shard_set.is_step_readable(step))
        self._own_rows.shard_set.apply_until(step)
        return self._own_rows.shard_set

    def _replicate_change(self, message: ParameterMessage, body: Array) -> None:
        """Something changed here: the copy must follow."""
        self._own_rows.change_count += 1
        if self._replication is not None:
            self._replication.append(message, body)

    def _wait_replica_unless_resharded(self, asked: ParameterRequest) -> None:
        count = self._own_rows.change_count
        self._wait_unless_resharded(asked, lambda: self._is_replicated(count))

    def _wait_until_replicated(self) -> None:
        count = self._own_rows.change_count
        self._condition.wait_for(lambda: self._is_replicated(count))

    def _is_replicated(self, count: int) -> bool:
        return self._replication is None or self._replication.replicated_count >= count
