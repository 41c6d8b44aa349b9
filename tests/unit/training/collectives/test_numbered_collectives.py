"""Numbered collectives on every transport: results, and recovery after a membership change."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.unit.training.collectives.threaded_cluster import ThreadContext, ThreadedCluster

from covey.core.messages import CollectiveNumber, DumpRequest, DumpWritten, RankResumed, SafePointReport, StateFetched
from covey.training.collectives.communicator import Communicator
from covey.training.collectives.group import Transport, WorkDone
from covey.training.collectives.numbered import NumberedCollectives
from covey.training.collectives.repeatable_operations import AllReduce, Mean, Reduction
from covey.training.node_interface import GenerationStarted
from covey.training.state.transfer import NO_TENSORS, DonatedState


class Provider:
    """The loop of one rank: its state is one tensor."""

    sharded_state = None
    spare_source = None
    indexes_version = 7
    is_consistent = True
    is_result_invalid = False

    def __init__(self, weights: Any, *, has_state: bool) -> None:
        self.weights, self.has_state = weights, has_state
        self.replays_finished = 0

    def destination_tensors(self) -> Mapping[str, Any]:
        return {}

    def finish_replay(self) -> None:
        self.replays_finished += 1

    def donate(self) -> DonatedState:
        return DonatedState(step=3, initial_collectives=1, state={"weights": self.weights})

    def dump(self) -> tuple[int, str]:
        return 3, "the dump"


class LateInbox(queue.SimpleQueue[Any]):
    """Delivers the first `WorkDone` only after a new generation: another rank has completed a collective, this one has not."""

    def __init__(self) -> None:
        super().__init__()
        self._is_late = True
        self.holds_work = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        notification = super().get(block, timeout)
        if self._is_late and isinstance(notification, WorkDone):
            self._is_late = False
            self.holds_work.set()
            while not isinstance(notification, GenerationStarted):
                notification = super().get(block, timeout)
        return notification


def all_reduce(collectives: NumberedCollectives, value: float, op: Reduction = "sum") -> float:
    tensor = torch.tensor([value])
    collectives.run(AllReduce(tensor, op))
    return float(tensor)


def start(program: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=program, args=args, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("max", 3.0), ("min", 1.0), ("product", 6.0)])
def test_all_reduce_gives_every_rank_the_same_result(transport: Transport, op: Reduction, expected: float) -> None:
    cluster = ThreadedCluster(3)
    found = cluster.run(lambda rank: all_reduce(NumberedCollectives(rank, transport), rank.assignment.rank + 1.0, op))
    assert found == [expected] * 3


def test_mean_averages_tensors_of_several_dtypes_in_place(transport: Transport) -> None:
    def program(context: ThreadContext) -> list[Any]:
        rank = context.assignment.rank
        tensors = [torch.full((2, 2), float(rank)), torch.full((3,), 4.0 * rank, dtype=torch.float64)]
        NumberedCollectives(context, transport).run(Mean(tensors))
        return [tensor.tolist() for tensor in tensors]

    assert ThreadedCluster(2).run(program) == [[[[0.5, 0.5], [0.5, 0.5]], [2.0, 2.0, 2.0]]] * 2


def test_communicator_runs_on_the_given_transport(transport: Transport) -> None:
    def program(context: ThreadContext) -> tuple[list[int], list[int], list[float]]:
        group = Communicator(context, transport=transport)
        assert (group.rank, group.world) == (context.assignment.rank, 3)
        gathered = [int(part) for part in group.all_gather(torch.tensor(10 * group.rank))]
        received = group.broadcast(torch.tensor([group.rank, 5], dtype=torch.int16), root=1).tolist()
        group.barrier()
        return gathered, received, group.reduce([torch.tensor([3.0 * group.rank])])[0].tolist()

    assert ThreadedCluster(3).run(program) == [([0, 10, 20], [1, 5], [3.0])] * 3


def test_waiting_ranks_repeat_the_collective_in_the_next_generation(transport: Transport) -> None:
    cluster = ThreadedCluster(3)
    survivors = cluster.contexts[:2]
    collectives_of = {context: NumberedCollectives(context, transport) for context in cluster.contexts}
    assert cluster.run(lambda rank: all_reduce(collectives_of[rank], 1.0)) == [3.0] * 3  # the group of generation 1 is built
    results: dict[ThreadContext, float] = {}
    threads = [
        start(lambda rank: results.update({rank: all_reduce(collectives_of[rank], 1.0)}), context) for context in survivors
    ]
    cluster.wait_for(lambda: all(context.waiting_in == CollectiveNumber(-1, 1) for context in survivors))
    cluster.start_generation(survivors)
    for thread in threads:
        thread.join()
    assert list(results.values()) == [2.0, 2.0]
    for context in survivors:
        assert collectives_of[context].assignment.world == 2
        report = next(message for message in context.sent if isinstance(message, SafePointReport))
        assert (report.completed, report.waiting_in) == (CollectiveNumber(-1, 0), CollectiveNumber(-1, 1))
        assert RankResumed(2, -1) in context.sent and context.waiting_in is None


def test_rank_that_missed_a_result_fetches_it_from_another_rank(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    late = LateInbox()
    cluster.contexts[1].inbox = late

    def program(context: ThreadContext) -> list[float]:
        collectives = NumberedCollectives(context, transport)
        rank = context.assignment.rank
        return [all_reduce(collectives, rank + 1.0), all_reduce(collectives, rank + 10.0)]

    def regroup() -> None:
        late.holds_work.wait()
        cluster.wait_for(lambda: cluster.contexts[0].waiting_in == CollectiveNumber(-1, 1))
        cluster.start_generation(cluster.contexts)

    start(regroup)
    assert cluster.run(program) == [[3.0, 21.0]] * 2
    assert [StateFetched(2) in context.sent for context in cluster.contexts] == [False, True]


def test_replacement_receives_the_state_and_the_results_of_the_step(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    survivor = cluster.contexts[0]
    collectives_of = {context: NumberedCollectives(context, transport) for context in cluster.contexts}
    provider = Provider(torch.arange(4.0), has_state=True)
    collectives_of[survivor].attach(provider, NO_TENSORS)

    def first_collective_of_step(context: ThreadContext) -> float:
        collectives_of[context].begin_step(3)
        return all_reduce(collectives_of[context], 2.0)

    assert cluster.run(first_collective_of_step) == [4.0] * 2
    results: list[float] = []
    waiting = start(lambda: results.append(all_reduce(collectives_of[survivor], 5.0)))
    cluster.wait_for(lambda: survivor.waiting_in == CollectiveNumber(3, 1))
    replacement = ThreadContext(cluster, restarts=1)
    cluster.start_generation([survivor, replacement])
    collectives = NumberedCollectives(replacement, transport)
    collectives.attach(Provider(torch.zeros(4), has_state=False), NO_TENSORS)
    donation = collectives.take_donation()
    assert donation is not None and (donation.step, donation.initial_collectives) == (3, 1)
    assert torch.equal(donation.state["weights"], torch.arange(4.0))
    assert collectives.take_donation() is None and collectives.take_fetched_slots() is None
    collectives.begin_step(3)
    assert all_reduce(collectives, 0.0) == 4.0, "the other rank completed it, so its cached result is used"
    assert all_reduce(collectives, 6.0) == 11.0
    waiting.join()
    assert results == [11.0]
    assert collectives_of[survivor].has_loop and not collectives.has_loop
    assert provider.replays_finished == 3, "called before each collective, and before its repetition"


def test_report_contains_the_providers_state_flags(transport: Transport) -> None:
    cluster = ThreadedCluster(1)
    collectives = NumberedCollectives(cluster.contexts[0], transport)
    provider = Provider(torch.zeros(1), has_state=True)
    provider.is_consistent, provider.is_result_invalid = False, True
    collectives.attach(provider, NO_TENSORS)
    cluster.start_generation(cluster.contexts)
    all_reduce(collectives, 1.0)
    report = next(message for message in cluster.contexts[0].sent if isinstance(message, SafePointReport))
    assert (report.has_complete_state, report.is_result_invalid, report.indexes_version) == (False, True, 7)


def test_dump_request_is_served_while_the_rank_waits(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    collectives = [NumberedCollectives(context, transport) for context in cluster.contexts]
    collectives[0].attach(Provider(torch.zeros(1), has_state=True), NO_TENSORS)
    for context in cluster.contexts:
        context.inbox.put(DumpRequest("a test"))
    cluster.run(lambda rank: all_reduce(collectives[rank.assignment.rank], 1.0))
    assert DumpWritten(3, "the dump") in cluster.contexts[0].sent
    assert DumpWritten(-1, "") in cluster.contexts[1].sent, "without a loop nothing can be dumped"


def test_failed_work_is_reported_and_the_collective_repeated(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    collectives_of = {context: NumberedCollectives(context, transport) for context in cluster.contexts}
    cluster.run(lambda rank: all_reduce(collectives_of[rank], 1.0))
    first, second = cluster.contexts
    results: list[float] = []
    thread = start(lambda: results.append(all_reduce(collectives_of[first], 1.0)))
    cluster.wait_for(lambda: first.waiting_in is not None)
    broken = collectives_of[second]._group
    assert broken is not None
    broken.abort()
    cluster.wait_for(lambda: bool(cluster.failures))
    assert cluster.failures[0].generation == 1 and cluster.failures[0].reason
    cluster.start_generation(cluster.contexts)
    results.append(all_reduce(collectives_of[second], 1.0))
    thread.join()
    assert results == [2.0, 2.0]


def test_rewound_step_replays_its_results_without_the_other_ranks(transport: Transport) -> None:
    def program(context: ThreadContext) -> list[float]:
        collectives = NumberedCollectives(context, transport)
        collectives.begin_step(0)
        found = [all_reduce(collectives, 1.0), all_reduce(collectives, 2.0)]
        if context.assignment.rank == 0:
            collectives.rewind()
            found = [all_reduce(collectives, -1.0), all_reduce(collectives, -1.0)]
        return [*found, all_reduce(collectives, 3.0)]

    assert ThreadedCluster(2).run(program) == [[2.0, 4.0, 6.0]] * 2


def test_collective_can_be_issued_ahead_once_the_group_is_ready(transport: Transport) -> None:
    def program(context: ThreadContext) -> tuple[int, int]:
        collectives, generations = NumberedCollectives(context, transport), []
        collectives.issue_ahead(lambda group: generations.append(group.generation))
        before = len(generations)
        all_reduce(collectives, 1.0)
        collectives.issue_ahead(lambda group: generations.append(group.generation))
        return before, len(generations)

    assert ThreadedCluster(2).run(program) == [(0, 1)] * 2


def test_finished_ranks_wait_until_all_have_finished(transport: Transport) -> None:
    cluster = ThreadedCluster(2)
    cluster.run(lambda rank: NumberedCollectives(rank, transport).wait_for_all_ranks())
    assert all(isinstance(context.sent[-1], SafePointReport) for context in cluster.contexts)
