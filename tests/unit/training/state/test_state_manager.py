"""Hand-over of the training state to a replacement. Ranks are threads of this process."""

from __future__ import annotations

import threading
from typing import Any

import torch
from tests.unit.training.collectives.memory_transport import MemoryTransport
from tests.unit.training.collectives.threaded_cluster import ThreadContext, ThreadedCluster
from torch.utils.data import TensorDataset

from covey.training.collectives.communicator import Communicator
from covey.training.collectives.group import Transport
from covey.training.collectives.repeatable_operations import AllReduce
from covey.training.data.cursor import DataCursor
from covey.training.data.loader import Data
from covey.training.ps_parameters import ServedParameters
from covey.training.state.state_manager import StateManager
from covey.training.state.training_state import TrainingState
from covey.training.state.transfer import NO_TENSORS


class Rank:
    """Model, optimizer, data cursor and hand-over of one rank, without a loop."""

    def __init__(self, context: ThreadContext | None, transport: Transport, weight: float) -> None:
        self.model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(self.model.weight, weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.group = Communicator(context, transport=transport)
        self.state = TrainingState(self.model, self.optimizer)
        self.cursor = DataCursor(Data(TensorDataset(torch.zeros(16, 2)), 2), epochs=1, steps=None, accumulate=1, seed=0)
        self.cursor.start_at_rank(self.group, self.group.collectives)
        served = ServedParameters(self.model, self.optimizer, self.group)
        self.manager = StateManager(self.state, self.cursor, served, None, self.group, self.group.collectives, None)

    def start(self) -> None:
        self.manager.take_initial_state(NO_TENSORS)

    def step_optimizer(self) -> None:
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizer.step()
        self.manager.on_optimizer_stepped()

    def wait_in_collective(self, value: float) -> float:
        assert self.group.collectives is not None
        tensor = torch.tensor([value])
        self.group.collectives.run(AllReduce(tensor, "sum"))
        return float(tensor)

    @property
    def weights(self) -> list[float]:
        found: list[float] = self.model.weight.detach().flatten().tolist()
        return found


def start_ranks(cluster: ThreadedCluster, transport: Transport) -> list[Rank]:
    ranks = [Rank(context, transport, 1.0 + number) for number, context in enumerate(cluster.contexts)]
    cluster.run(lambda context: ranks[context.assignment.rank].start())
    return ranks


def replace_last(cluster: ThreadedCluster, transport: Transport, survivor: Rank, results: list[float]) -> tuple[Rank, Any]:
    """Let the survivor wait in a collective, and start a replacement of rank 1."""
    thread = threading.Thread(target=lambda: results.append(survivor.wait_in_collective(1.0)), daemon=True)
    thread.start()
    cluster.wait_for(lambda: cluster.contexts[0].waiting_in is not None)
    replacement = ThreadContext(cluster, restarts=1)
    cluster.start_generation([cluster.contexts[0], replacement])
    rank = Rank(replacement, transport, -1.0)
    rank.start()
    return rank, thread


def test_fresh_start_copies_the_parameters_of_rank_0_to_all_ranks() -> None:
    first, second = start_ranks(ThreadedCluster(2), MemoryTransport())
    assert first.weights == second.weights == [1.0, 1.0]
    assert first.manager.has_state and not first.manager.is_replacement


def test_rank_without_a_group_starts_alone() -> None:
    rank = Rank(None, MemoryTransport(), 3.0)
    rank.start()
    assert rank.weights == [3.0, 3.0] and rank.cursor.schedule.seats == (0,)


def test_replacement_continues_from_the_step_boundary_of_the_donor() -> None:
    cluster, transport, results = ThreadedCluster(2), MemoryTransport(), list[float]()
    survivor, _ = start_ranks(cluster, transport)
    survivor.step_optimizer()
    survivor.cursor.end_step()
    survivor.state.end_step()
    assert survivor.group.collectives is not None
    survivor.group.collectives.begin_step(1)
    survivor.state.snapshot_boundary()
    rank, thread = replace_last(cluster, transport, survivor, results)
    assert rank.manager.is_replacement and not rank.manager.replaying
    assert (rank.cursor.step, rank.weights) == (1, survivor.weights)
    assert rank.group.collectives is not None
    rank.group.collectives.begin_step(1)
    assert rank.wait_in_collective(2.0) == 3.0
    thread.join()
    assert results == [3.0]


def test_replacement_replays_a_step_whose_optimizer_the_donor_has_run() -> None:
    cluster, transport, results = ThreadedCluster(2), MemoryTransport(), list[float]()
    survivor, _ = start_ranks(cluster, transport)
    assert survivor.group.collectives is not None
    survivor.group.collectives.begin_step(0)
    survivor.step_optimizer()
    rank, thread = replace_last(cluster, transport, survivor, results)
    assert rank.manager.replaying
    assert rank.group.collectives is not None
    rank.group.collectives.begin_step(0)
    rank.step_optimizer()
    assert rank.weights == survivor.weights, "the donor's update replaces the rank's own"
    assert rank.wait_in_collective(2.0) == 3.0
    thread.join()
    assert not rank.manager.replaying, "replay ends before the first collective with other ranks"


def test_changes_of_the_script_before_its_first_batch_are_undone_in_a_replacement() -> None:
    cluster, transport, results = ThreadedCluster(2), MemoryTransport(), list[float]()
    survivor, _ = start_ranks(cluster, transport)
    rank, thread = replace_last(cluster, transport, survivor, results)
    rank.optimizer.param_groups[0]["lr"] = 5.0
    rank.manager.undo_script_changes()
    assert rank.optimizer.param_groups[0]["lr"] == 0.1
    rank.wait_in_collective(0.0)
    thread.join()
