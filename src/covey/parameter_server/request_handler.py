"""Handler of workers' requests on a server's rows."""

from __future__ import annotations

import numpy as np

from covey.core.parameter_server.settings import ConsistencyMode
from covey.errors import UsageError
from covey.parameter_server import checkpoint_files
from covey.parameter_server.messages import (
    ALL,
    ChangedRows,
    DeclareParameter,
    Done,
    LoadRows,
    ParameterRequest,
    PullChanged,
    PullValues,
    PushGradients,
    QueryRankStep,
    RequestFailed,
    RowValues,
    SaveRows,
    ServerReply,
)
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replica_sender import Replication
from covey.parameter_server.row_cache import UNKNOWN
from covey.parameter_server.rows import Rows, RowsState
from covey.parameter_server.shard_set import ShardSet


class RequestHandler:
    """Handles requests: reads from `rows`, and applies changes through `replication`.

    The caller of `handle` holds the lock of `rows`. The lock is held while files are read and written, and released during
    waits.
    """

    def __init__(self, rows: Rows, replication: Replication) -> None:
        self._rows, self._replication = rows, replication
        self._is_sync = rows.serving.mode is ConsistencyMode.SYNC

    def handle(self, request: ParameterRequest, body: Array) -> tuple[ServerReply, list[Array]]:
        """Return the reply to a worker's request, and its arrays. Raise `SlotsMovedError` if the sharding is or becomes newer
        than the request's, `UsageError` or `ValueError` if the request is invalid, `StoreError` if files cannot be read or
        written."""
        rows = self._rows
        rows.wait_unless_resharded(request, lambda: rows.sharding.version >= request.sharding_version)
        if isinstance(request, LoadRows):
            return self._on_load(request), []
        if isinstance(request, PullValues):
            return self._on_pull(request, body)
        if isinstance(request, PullChanged):
            return self._on_pull_changed(request, body)
        rows.wait_unless_resharded(request, lambda: rows.state is RowsState.SERVING)
        if isinstance(request, PushGradients):
            return self._on_push(request, body), []
        if isinstance(request, DeclareParameter):
            return self._on_declare(request, body), []
        if isinstance(request, QueryRankStep):
            return self._on_query_rank_step(request.rank), []
        assert isinstance(request, SaveRows)
        return self._on_save(request), []

    def _on_declare(self, request: DeclareParameter, body: Array) -> ServerReply:
        own = self._rows.own
        if request.has_values:
            self._replication.apply(request, body)
        else:
            self._rows.wait_unless_resharded(request, lambda: own.shard_set.has_parameter(request.spec.name))
            own.shard_set.check_spec(request.spec)
        self._wait_until_replicated(request)
        return Done()

    def _on_push(self, push: PushGradients, body: Array) -> ServerReply:
        if push.rank < self._rows.serving.workers:
            newest = self._rows.record_generation(push.rank, push.generation)
            if push.generation < newest:
                return RequestFailed(
                    f"a push of rank {push.rank} from generation {push.generation} is refused: a newer process of that rank is"
                    f" at generation {newest}",
                    is_stale=True,
                )
        self._replication.apply(push, body)
        if self._is_sync:
            self._rows.wait_unless_resharded(push, lambda: self._rows.own.shard_set.is_step_complete(push.step))
        self._wait_until_replicated(push)
        return Done(push.step)

    def _on_pull(self, pull: PullValues, body: Array) -> tuple[ServerReply, list[Array]]:
        self._rows.wait_unless_resharded(pull, lambda: self._rows.has_rows(pull.selections, body))
        self._rows.own.shard_set.check_pull(pull.selections, body)  # before the wait, to report errors immediately
        shard_set = self._rows.wait_for_step(pull, pull.step)
        found = shard_set.read_values(pull.selections, body)
        # Complete parameters are sent from the table's memory, without the lock. In sync mode they change only after all ranks,
        # including the receiver, have pushed again; in the other modes they may change at any time.
        if not self._is_sync:
            complete = [selection.row_count == ALL for selection in pull.selections]
            found = [values.copy() if is_complete else values for values, is_complete in zip(found, complete, strict=True)]
        return RowValues(shard_set.step), found

    def _on_pull_changed(self, pull: PullChanged, body: Array) -> tuple[ServerReply, list[Array]]:
        selection, own = pull.selection, self._rows.own
        if body.nbytes != selection.row_count * 16:
            expected = selection.row_count * 16
            raise UsageError(
                f"received {body.nbytes} bytes of row numbers and versions of {selection.name}, expected {expected}"
            )
        rows = body[: body.nbytes // 2]
        self._rows.wait_unless_resharded(pull, lambda: self._rows.has_rows([selection], rows))
        own.shard_set.check_pull([selection], rows)
        shard_set = self._rows.wait_for_step(pull, pull.step)
        if pull.replication_id != own.replication_id:
            body[body.nbytes // 2 :].view(np.int64)[:] = UNKNOWN
        version, changed, values = shard_set.read_changed(selection, body)
        return ChangedRows(own.replication_id, version), [changed.view(np.uint8), values]

    def _on_query_rank_step(self, rank: int) -> ServerReply:
        workers = self._rows.serving.workers
        if rank >= workers:
            raise UsageError(f"rank {rank} does not exist: expected 0 to {workers - 1}")
        return Done(self._rows.own.shard_set.last_pushed_step(rank) + 1)

    def _on_save(self, request: SaveRows) -> ServerReply:
        shard_set = self._rows.wait_for_step(request, request.step)
        if self._is_sync and shard_set.step != request.step:
            raise UsageError(f"step {request.step} cannot be saved: server {self._rows.rank} is at step {shard_set.step}")
        checkpoint_files.save_shard(
            request.folder, request.step, shard_set.as_single_shard(), self._rows.sharding.owners, keep=request.keep
        )
        return Done(request.step)

    def _on_load(self, request: LoadRows) -> ServerReply:
        rows = self._rows
        if rows.last_load != request or (self._is_sync and rows.own.shard_set.step != request.step):  # else a resent request
            loaded = ShardSet(rows.serving, rows.rank, rows.owned_slots())
            checkpoint_files.load_shard(request.folder, request.step, loaded.as_single_shard())
            rows.replace(loaded, request)
            self._replication.restart_sync()
        self._wait_until_replicated(request)
        return Done(request.step)

    def _wait_until_replicated(self, request: ParameterRequest) -> None:
        change_count = self._rows.own.change_count
        self._rows.wait_unless_resharded(request, lambda: self._replication.is_replicated(change_count))
