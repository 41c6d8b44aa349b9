"""The request handler alone, without connections, on rows without a replica."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.unit.parameter_server.server_parts import (
    ALONE,
    DECLARE,
    EMPTY,
    PAIR,
    SPEC,
    Call,
    Peer,
    all_slots,
    halves,
    pack_body,
    push,
)

from covey.core.parameter_server.settings import ConsistencyMode, ServingSettings
from covey.errors import StoreError, UsageError
from covey.parameter_server import messages
from covey.parameter_server.optimizers import Array
from covey.parameter_server.replica_sender import Replication
from covey.parameter_server.request_handler import RequestHandler
from covey.parameter_server.rows import Rows, SlotsMovedError

TWO_WORKERS = ServingSettings(servers=1, workers=2, copies=0)


class Server:
    def __init__(self, serving: ServingSettings = ALONE) -> None:
        self.rows = Rows(serving, 0, all_slots() if serving.servers == 1 else halves())
        self.handler = RequestHandler(self.rows, Replication(self.rows, Peer().find))

    def request(self, request: messages.ParameterRequest, body: Array = EMPTY) -> tuple[messages.ServerReply, list[Array]]:
        with self.rows.condition:
            return self.handler.handle(request, body)

    def pull(self, step: int, *rows: int) -> list[float]:
        numbers = np.array(rows, np.int64)
        reply, [values] = self.request(
            messages.PullValues(step, [messages.RowSelection("t", len(rows))]), numbers.view(np.uint8)
        )
        assert isinstance(reply, messages.RowValues)
        return values.reshape(-1).tolist()


def declared(serving: ServingSettings = ALONE) -> Server:
    server = Server(serving)
    assert server.request(DECLARE) == (messages.Done(), [])
    return server


def test_push_changes_the_values_of_the_next_step() -> None:
    server = declared()
    assert server.request(*push(0, 5, 6)) == (messages.Done(0), [])
    assert server.pull(1, 5, 6, 7) == [-1.0, -1.0, 0.0]


def test_declaration_without_values_waits_for_one_with_values() -> None:
    server = Server()
    call = Call(lambda: server.request(messages.DeclareParameter(SPEC, False)))
    assert call.is_waiting()
    server.request(DECLARE)
    assert call.wait() == (messages.Done(), [])


def test_push_in_sync_mode_is_acknowledged_when_all_ranks_have_pushed() -> None:
    server = declared(TWO_WORKERS)
    call = Call(lambda: server.request(*push(0, 5, rank=1)))
    assert call.is_waiting()
    assert server.request(*push(0, 5, rank=0)) == (messages.Done(0), []) == call.wait()
    assert server.pull(1, 5) == [-1.0], "the mean of two gradients"


def test_push_of_an_older_generation_is_refused() -> None:
    server = declared()
    server.request(*push(0, 5, generation=4))
    reply, _ = server.request(*push(1, 5, generation=3))
    assert isinstance(reply, messages.RequestFailed) and reply.is_stale and "generation 4" in reply.reason
    assert server.rows.own.shard_set.last_pushed_step(0) == 0


def test_request_with_an_older_sharding_raises_slots_moved() -> None:
    server = declared()
    with server.rows.condition:
        server.rows.adopt(all_slots(version=1))
    with pytest.raises(SlotsMovedError):
        server.request(messages.PullValues(0, []))


def test_request_with_a_newer_sharding_waits_until_it_is_adopted() -> None:
    server = declared()
    call = Call(lambda: server.request(messages.QueryRankStep(0, sharding_version=1)))
    assert call.is_waiting()
    with server.rows.condition:
        server.rows.adopt(all_slots(version=1))
    assert call.wait() == (messages.Done(0), [])


def test_push_waits_while_slots_are_missing() -> None:
    server = Server(ServingSettings(servers=2, workers=1, copies=0))
    with server.rows.condition:
        server.rows.adopt(all_slots(version=1))
    assert Call(lambda: server.request(*push(0, 5, version=1))).is_waiting()


def test_change_is_acknowledged_only_when_it_is_replicated() -> None:
    server = Server(PAIR)
    assert Call(lambda: server.request(DECLARE)).is_waiting(), "the replication thread is not started"
    assert server.rows.own.change_count == 1


def test_pull_changed_returns_only_rows_that_changed() -> None:
    server = declared()
    rows = np.array([5, 6], np.int64)

    def pull_changed(step: int, replication_id: str, versions: list[int]) -> tuple[messages.ServerReply, list[Array]]:
        body = pack_body([rows, np.array(versions, np.int64)])
        return server.request(messages.PullChanged(step, messages.RowSelection("t", 2), replication_id), body)

    first, [changed, values] = pull_changed(0, "", [-1, -1])
    assert isinstance(first, messages.ChangedRows) and changed.tolist() == [1, 1] and values.shape == (2, 1)
    server.request(*push(0, 6))
    second, [changed, values] = pull_changed(1, first.replication_id, [first.version] * 2)
    assert (
        second == messages.ChangedRows(first.replication_id, 1) and changed.tolist() == [0, 1] and values.tolist() == [[-1.0]]
    )
    _, [changed, _] = pull_changed(1, "another id", [9, 9])
    assert changed.tolist() == [1, 1], "versions of another replication id are ignored"


def test_wrong_pulls_are_refused_immediately() -> None:
    server = declared()
    with pytest.raises(UsageError, match="parameter x does not exist"):
        server.request(messages.PullValues(9, [messages.RowSelection("x", -1)]))
    with pytest.raises(UsageError, match="of row numbers and versions"):
        server.request(messages.PullChanged(9, messages.RowSelection("t", 2), ""), EMPTY)
    with pytest.raises(UsageError, match="rank 3 does not exist"):
        server.request(messages.QueryRankStep(3))


def test_saved_rows_are_loaded_once_by_repeated_requests(tmp_path: Path) -> None:
    server = declared()
    server.request(*push(0, 5))
    assert server.request(messages.SaveRows(1, str(tmp_path))) == (messages.Done(1), [])
    other, request = Server(), messages.LoadRows(1, str(tmp_path))
    assert other.request(request) == (messages.Done(1), [])
    loaded, replication_id = other.rows.own.shard_set, other.rows.own.replication_id
    assert other.pull(1, 5) == [-1.0]
    assert other.request(request) == (messages.Done(1), [])
    assert other.rows.own.shard_set is loaded and other.rows.own.replication_id == replication_id
    with pytest.raises(StoreError):
        other.request(messages.LoadRows(2, str(tmp_path)))
    assert other.rows.own.shard_set is loaded, "a failed load changes nothing"


def test_applied_step_cannot_be_saved(tmp_path: Path) -> None:
    server = declared()
    server.request(*push(0, 5))
    server.pull(1, 5)
    with pytest.raises(UsageError, match="step 0 cannot be saved: server 0 is at step 1"):
        server.request(messages.SaveRows(0, str(tmp_path)))


def test_complete_parameters_are_copied_in_async_mode() -> None:
    server = declared(ServingSettings(servers=1, workers=1, copies=0, mode=ConsistencyMode.ASYNC))
    spec = msgspec.structs.replace(SPEC, name="w", rows=8, striped=False)
    server.request(messages.DeclareParameter(spec, True))
    _, [values] = server.request(messages.PullValues(0, [messages.RowSelection("w", -1)]))
    assert not np.shares_memory(values, server.rows.own.shard_set.shards[0].tables["w"].weights)
