"""The contract of a transport (`Group`), on every implementation. Ranks are threads of this process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.unit.training.collectives.threaded_cluster import WAIT_S, ThreadContext, ThreadedCluster

from covey.core.messages import RankAssigned
from covey.training.collectives.group import Group, GroupBuilt, ReduceOp, Transport, Work, WorkDone


def next_of(context: ThreadContext, kind: type) -> Any:
    """Return the next notification of this kind; drop others."""
    while not isinstance(found := context.inbox.get(timeout=WAIT_S), kind):
        pass
    return found


def build(cluster: ThreadedCluster, transport: Transport) -> list[Group]:
    groups = [transport.build(context, context.assignment) for context in cluster.contexts]
    for context in cluster.contexts:
        assert not next_of(context, GroupBuilt).error
    assert all(group.is_ready for group in groups)
    return groups


def finish(context: ThreadContext, work: Work) -> str:
    """Wait until a work is done; return its error."""
    while (done := next_of(context, WorkDone)).work is not work:
        pass
    return str(done.error)


def values(rank: int) -> Any:
    return torch.tensor([rank + 1.0, 4.0 - rank, -2.0])


def test_group_is_ready_when_every_rank_has_built_it(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    first = transport.build(cluster.contexts[0], cluster.contexts[0].assignment)
    assert not first.is_ready and first.is_drained
    transport.build(cluster.contexts[1], cluster.contexts[1].assignment)
    assert next_of(cluster.contexts[0], GroupBuilt).generation == 1
    assert first.is_ready


def test_group_takes_rank_world_and_generation_from_its_argument(transport: Transport) -> None:
    cluster = ThreadedCluster(1)
    rank_info = cluster.contexts[0].assignment
    cluster.contexts[0].assignment = RankAssigned(2, 4, 5, 4, 5)  # the context is at a newer generation
    group = transport.build(cluster.contexts[0], rank_info)
    assert (group.generation, group.rank, group.world) == (1, 0, 1)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [6.0, 9.0, -6.0]),
        (ReduceOp.MAX, [3.0, 4.0, -2.0]),
        (ReduceOp.MIN, [1.0, 2.0, -2.0]),
        (ReduceOp.PRODUCT, [6.0, 24.0, -8.0]),
    ],
)
def test_all_reduce_writes_the_result_in_place(transport: Transport, op: ReduceOp, expected: list[float]) -> None:
    cluster = ThreadedCluster(3)
    groups = build(cluster, transport)
    tensors = [values(group.rank) for group in groups]
    works = [group.all_reduce(tensor, op) for group, tensor in zip(groups, tensors, strict=True)]
    assert [finish(*pair) for pair in zip(cluster.contexts, works, strict=True)] == [""] * 3
    assert [tensor.tolist() for tensor in tensors] == [expected] * 3


def test_all_gather_writes_outputs_in_rank_order(transport: Transport) -> None:
    cluster = ThreadedCluster(3)
    groups = build(cluster, transport)
    outputs = [[torch.zeros(3) for _ in groups] for _ in groups]
    works = [group.all_gather(outputs[group.rank], values(group.rank)) for group in groups]
    assert [finish(*pair) for pair in zip(cluster.contexts, works, strict=True)] == [""] * 3
    for found in outputs:
        assert torch.equal(torch.stack(found), torch.stack([values(rank) for rank in range(3)]))


def test_broadcast_writes_the_values_of_the_root(transport: Transport) -> None:
    cluster = ThreadedCluster(3)
    groups = build(cluster, transport)
    tensors = [values(group.rank) for group in groups]
    works = [group.broadcast(tensor, 2) for group, tensor in zip(groups, tensors, strict=True)]
    assert [finish(*pair) for pair in zip(cluster.contexts, works, strict=True)] == [""] * 3
    assert all(torch.equal(tensor, values(2)) for tensor in tensors)


def test_operation_returns_before_the_other_ranks_have_called_it(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    first, second = build(cluster, transport)
    works = [first.all_reduce(values(0), ReduceOp.SUM), first.all_reduce(values(0), ReduceOp.SUM)]
    assert not first.is_drained and cluster.contexts[0].inbox.empty()
    second.all_reduce(values(1), ReduceOp.SUM)
    assert finish(cluster.contexts[0], works[0]) == ""
    assert not first.is_drained
    second.all_reduce(values(1), ReduceOp.SUM)
    assert finish(cluster.contexts[0], works[1]) == ""
    cluster.wait_for(lambda: first.is_drained)


def test_pending_works_end_with_an_error_after_abort(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    first, _ = build(cluster, transport)
    works = [first.all_reduce(values(0), ReduceOp.SUM) for _ in range(3)]
    first.abort()
    done = [next_of(cluster.contexts[0], WorkDone) for _ in works]
    assert {id(end.work) for end in done} == {id(work) for work in works}
    assert all(end.error for end in done), "every error has a message"
    cluster.wait_for(lambda: first.is_drained)


def test_works_of_a_rank_end_with_an_error_if_another_rank_aborts(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    first, second = build(cluster, transport)
    work = first.all_reduce(values(0), ReduceOp.SUM)
    second.abort()
    assert finish(cluster.contexts[0], work)


def test_buffers_are_referenced_until_the_work_has_ended(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    first, second = build(cluster, transport)
    tensor = values(0)
    reference = weakref.ref(tensor)
    work = first.all_reduce(tensor, ReduceOp.SUM)
    del tensor
    gc.collect()
    assert reference() is not None
    second.all_reduce(values(1), ReduceOp.SUM)
    assert finish(cluster.contexts[0], work) == ""
