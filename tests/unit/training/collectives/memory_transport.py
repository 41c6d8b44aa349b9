"""A transport whose ranks are threads of one process: the second implementation of the transport's contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from covey.training.collectives.group import GroupBuilt, ReduceOp, Work, WorkDone
from covey.training.node_interface import NodeInterface, RankInfo

REDUCTIONS: dict[ReduceOp, Callable[[Any], Any]] = {
    ReduceOp.SUM: lambda stacked: stacked.sum(0),
    ReduceOp.MAX: lambda stacked: stacked.amax(0),
    ReduceOp.MIN: lambda stacked: stacked.amin(0),
    ReduceOp.PRODUCT: lambda stacked: stacked.prod(0),
}


class MemoryTransport:
    """Connects all groups of one generation that it has built."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exchanges: dict[int, Exchange] = {}

    def build(self, context: NodeInterface, rank_info: RankInfo) -> MemoryGroup:
        with self._lock:
            exchange = self._exchanges.setdefault(rank_info.generation, Exchange(rank_info.world))
        group = MemoryGroup(context, rank_info, exchange)
        exchange.join(group)
        return group


class Operation:
    """One rank's part of an operation, with a function that writes the result from the inputs of all ranks."""

    def __init__(self, kind: tuple[Any, ...], tensor: Any, write: Callable[[Sequence[Any]], None]) -> None:
        self.kind, self.tensor, self.write = kind, tensor, write
        self.work: Work = object()


class MemoryGroup:
    """The group of one rank."""

    def __init__(self, context: NodeInterface, rank_info: RankInfo, exchange: Exchange) -> None:
        self.generation, self.rank, self.world = rank_info.generation, rank_info.rank, rank_info.world
        self.is_ready = False
        self._context, self._exchange = context, exchange
        self._pending: list[Operation] = []

    @property
    def is_drained(self) -> bool:
        return not self._pending

    def all_reduce(self, tensor: Any, op: ReduceOp) -> Work:
        def write(inputs: Sequence[Any]) -> None:
            tensor.copy_(REDUCTIONS[op](torch.stack(list(inputs))).to(tensor.dtype))

        return self._start(Operation(("all_reduce", op, tensor.dtype, tensor.shape), tensor, write))

    def all_gather(self, outputs: list[Any], tensor: Any) -> Work:
        def write(inputs: Sequence[Any]) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                output.copy_(source)

        return self._start(Operation(("all_gather", tensor.dtype, tensor.shape), tensor, write))

    def broadcast(self, tensor: Any, root: int) -> Work:
        operation = Operation(
            ("broadcast", root, tensor.dtype, tensor.shape), tensor, lambda inputs: tensor.copy_(inputs[root])
        )
        return self._start(operation)

    def abort(self) -> None:
        self._exchange.abort(self.rank)

    def close_in_child(self) -> None:
        """Do nothing: there are no descriptors."""

    def on_built(self, error: str = "") -> None:
        self.is_ready = not error
        self._context.inbox.put(GroupBuilt(self.generation, error))

    def on_complete(self, operation: Operation, inputs: Sequence[Any], error: str) -> None:
        if not error:
            operation.write(inputs)
        self._pending.remove(operation)
        self._context.inbox.put(WorkDone(operation.work, error))

    def _start(self, operation: Operation) -> Work:
        self._pending.append(operation)
        self._exchange.start(self.rank, operation)
        return operation.work


class Exchange:
    """The groups of one generation: the n-th operations of all ranks belong together."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._groups: dict[int, MemoryGroup] = {}
        self._queues: dict[int, list[Operation]] = {rank: [] for rank in range(world)}
        self._error = ""

    def join(self, group: MemoryGroup) -> None:
        with self._lock:
            self._groups[group.rank] = group
            if len(self._groups) == self._world:
                for member in self._groups.values():
                    member.on_built()

    def start(self, rank: int, operation: Operation) -> None:
        with self._lock:
            self._queues[rank].append(operation)
            if self._error:
                self._fail_pending()
            elif all(self._queues.values()):
                self._complete([self._queues[member].pop(0) for member in range(self._world)])

    def abort(self, rank: int) -> None:
        with self._lock:
            self._error = self._error or f"connection closed by rank {rank}"
            self._fail_pending()

    def _complete(self, operations: list[Operation]) -> None:
        error = "" if len({operation.kind for operation in operations}) == 1 else "the ranks run different operations"
        inputs = [operation.tensor.clone() for operation in operations]
        for rank, operation in enumerate(operations):
            self._groups[rank].on_complete(operation, inputs, error)

    def _fail_pending(self) -> None:
        for rank, queue in self._queues.items():
            while queue:
                self._groups[rank].on_complete(queue.pop(0), (), self._error)
